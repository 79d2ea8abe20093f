"""Step 1 of `tinyllm check`, in a process of its own: hold an implementation to every law.

An implementation may loop for ever, leave the interpreter, or print anything: the parent ends the process
when it has sent nothing for too long.
"""

import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.cli.stages import UNWRITTEN, stages

if TYPE_CHECKING:
    from tinyllm.jobs.process import Send
    from tinyllm.testing.check import Check
    from tinyllm.testing.contract import Factory


@dataclass(frozen=True)
class Progress:
    """One check began (`seconds` is None) or ended; `problem` says in a few words why it failed."""

    kind: str
    name: str
    seconds: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Programs:
    """The machine has run this many programs so far."""

    count: int


@dataclass
class Held:
    """The result of step 1. `unusable` says why the implementation could not be loaded."""

    unusable: str = ""
    unwritten: str = ""
    failed: list[Progress] = field(default_factory=list)
    law: int | None = None
    name: str = ""
    story: str = ""
    trace: str = ""
    beyond: bool = False
    not_checked: tuple[str, ...] = ()
    programs: int = 0
    lines: int = 0
    stages: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return not (self.unusable or self.unwritten or self.failed or self.story)


def hold(send: "Send", impl: str, profile: str, seed: int) -> Held:
    """Run every check of `impl`, up to the first method that is not written or the first broken law."""
    from tinyllm.testing.adapters.loading import ImplementationError, load  # noqa: PLC0415
    from tinyllm.testing.check import checks  # noqa: PLC0415 - heavy, and not to be loaded by the command line
    from tinyllm.testing.contract import CAPABILITIES, capabilities  # noqa: PLC0415
    from tinyllm.testing.machine import CacheMachine, shard  # noqa: PLC0415
    from tinyllm.testing.profiles import profile as settings_of  # noqa: PLC0415
    from tinyllm.testing.time_limit import beating  # noqa: PLC0415

    held = Held()
    try:
        factory = load(impl)
        missing = sorted(CAPABILITIES.keys() - capabilities(factory))
    except (ImplementationError, ValueError) as error:
        held.unusable = str(error)
        return held
    held.not_checked = tuple(f"{name}: {CAPABILITIES[name]}" for name in missing)

    class Reporting(CacheMachine):
        """Reports the number of programs run."""

        def teardown(self) -> None:
            super().teardown()
            send(Programs(self.search.programs))

    machine = shard(Reporting, seed, factory)
    with beating(lambda: send(None)):  # a slow cache is no silence
        for check in checks(factory, machine, settings_of(profile)):
            if held.unwritten and check.kind != "catalogue":
                break
            send(Progress(check.kind, check.name))
            started = time.monotonic()
            problem = _problem(check, held, impl)
            done = Progress(check.kind, check.name, time.monotonic() - started, problem)
            send(done)
            if problem:
                held.failed.append(done)
            if (held.story and not held.beyond) or problem.startswith("NotReturned"):
                break
        if any(one.kind == "catalogue" for one in held.failed) and not problem.startswith("NotReturned"):
            held.stages = {stage.title: _stage(factory, stage.program, impl) for stage in stages()}
    held.programs, held.lines = machine.search.programs, machine.search.lines
    return held


def _problem(check: "Check", held: Held, impl: str) -> str:
    """Run one check; return its problem in a few words, and record it in full in `held`."""
    from tinyllm.testing.time_limit import CutShort  # noqa: PLC0415
    from tinyllm.testing.trace import NotOffered  # noqa: PLC0415

    try:
        broken = check.run(bool(held.story)).worst
    except NotOffered as needed:
        held.not_checked += (f"{check.kind}: {check.name} needs {needed}",)
        return ""
    except CutShort as cut:
        held.not_checked += (f"{check.kind}: {check.name} {cut}",)
        return ""
    except NotImplementedError as error:
        held.unwritten = held.unwritten or _place(error)
        return _place(error) + UNWRITTEN
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the panic of a Rust engine, or a call that was stopped
        said, where = _said(error), _line_of(error, impl)
        return f"{type(error).__name__}: {said}{'' if where in said else where}"
    if broken is None:
        return ""
    if not held.story or held.beyond > broken.beyond:
        held.law, held.name, held.story, held.trace = broken.law, broken.name, str(broken), broken.trace
        held.beyond = broken.beyond
    return f"law {broken.law} is broken"


def _stage(factory: "Factory", program: str, impl: str) -> str:
    """The problem of a stage's program on this cache; empty if it passes."""
    from tinyllm.testing import replay  # noqa: PLC0415
    from tinyllm.testing.laws import LAWS, LawBroken  # noqa: PLC0415
    from tinyllm.testing.time_limit import watch_over  # noqa: PLC0415

    try:
        with watch_over(factory):
            replay(factory, program)
    except LawBroken as broken:
        if broken.found.startswith("NotImplementedError"):
            return f"{broken.trace.splitlines()[-1]!r} needs a method that{UNWRITTEN}"
        title = LAWS[broken.law][0]
        return f"law {broken.law} ({title}): expected {broken.expected}; found {broken.found}"
    except NotImplementedError as error:
        return _place(error) + UNWRITTEN
    except Exception as error:
        return f"{type(error).__name__}: {_said(error)}{_line_of(error, impl)}"
    return ""


def _said(error: BaseException) -> str:
    """The message of an error on one line; for a bare assertion, its source line."""
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:
        return "its message cannot be read"
    return " ".join(lines[:6])[:200] or traceback.extract_tb(error.__traceback__)[-1].line or ""


def _place(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].name


def _line_of(error: BaseException, impl: str) -> str:
    """The line of the implementation's own file that the error came from, if any."""
    name = Path(impl.partition(":")[0]).name
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).name == name:
            return f" ({name}, line {frame.lineno})"
    return ""


def as_json(held: Held) -> dict[str, Any]:
    """The result of step 1 as JSON."""
    return {
        "passed": held.passed,
        "unusable": held.unusable,
        "unwritten": held.unwritten,
        "failed": [{"kind": one.kind, "name": one.name, "problem": one.problem} for one in held.failed],
        "law": held.law,
        "check": held.name,
        "story": held.story,
        "trace": held.trace,
        "notChecked": list(held.not_checked),
        "programs": held.programs,
        "lines": held.lines,
    }
