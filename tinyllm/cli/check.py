"""`tinyllm check`: hold a cache to the laws, then grade the tests. The exit code is the verdict."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from tinyllm.cli import stages
from tinyllm.cli.check_worker import Held, Programs, Progress, as_json, hold
from tinyllm.cli.ci_reports import Gate
from tinyllm.cli.extras import need
from tinyllm.cli.options import (
    PROFILES,
    REFERENCE,
    Badge,
    Exec,
    Html,
    Impl,
    Jobs,
    Junit,
    Reveal,
    Seed,
    chosen,
)
from tinyllm.cli.outputs import check_writable, write
from tinyllm.cli.screen import fail, terminal
from tinyllm.cli.suite import choose, run_grader, suite_pool
from tinyllm.cli.verdict import show
from tinyllm.exit_codes import USAGE, WEAK

if TYPE_CHECKING:
    from tinyllm.grading.plant import Target
    from tinyllm.grading.verdict import Grade
    from tinyllm.jobs.process import Ended

SILENCE = 60.0  # seconds that a check may send nothing; the slowest takes two


def check(
    context: typer.Context,
    impl: Impl = REFERENCE,
    command: Exec = None,
    tests: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Tests to grade, once IMPL passes.")
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="dev|ci|deep", help="How long the machine searches.")
    ] = "ci",
    seed: Seed = 0,
    jobs: Jobs = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write both steps as JSON.")] = None,
    reveal: Reveal = False,
    junit: Junit = None,
    badge: Badge = None,
    html: Html = None,
) -> None:
    """Hold a cache to every law, then grade the tests that go with it.

    Step 1 runs the ten tests of the catalogue, the directed cases and random programs on IMPL, the reference
    by default. Step 2 plants the bugs in the reference, one at a time, and grades the tests by how many they
    kill: those of --tests, or the project's own when IMPL is the reference.

    An engine in another language is a program that speaks the protocol of docs/protocol.md: `tinyllm check
    --exec "./engine"`.
    """
    from tinyllm.grading import grade as _  # noqa: F401, PLC0415 - before the first process starts
    from tinyllm.grading import report as reports  # noqa: PLC0415 - heavy

    need("pytest", "hypothesis", *(["jinja2"] if html else []))
    console = terminal()
    impl = chosen(impl, command)
    if profile not in PROFILES:
        fail(USAGE, f"--profile {profile}: expected one of {', '.join(PROFILES)}")
    if tests is not None and not tests.exists():
        fail(USAGE, f"there are no tests at {tests}")
    check_writable(json, html)
    gate = Gate(junit, badge, impl)
    report: dict[str, Any] = {"implementation": impl, "profile": profile, "seed": seed, "grade": None}

    aim = _aim(gate, tests)
    held, code = _step_one(console, gate, profile, seed)
    report["check"] = as_json(held)
    grade = None
    if code == 0:
        grade = _step_two(console, gate, tests, profile, seed, jobs, aim=aim, reveal=reveal)
        report["grade"], code = (reports.as_json(grade), grade.code) if grade else (None, 0)
    else:
        console.print("\nStep 2, grading the tests, waits until step 1 passes.")
    report["exitCode"] = code
    with contextlib.ExitStack() as last:
        last.callback(gate.publish, code)  # also when a report cannot be written
        if json:
            write(json, report)
        if html and grade:
            from tinyllm.cli.html_report import write_page  # noqa: PLC0415 - heavy

            write_page(console, html, grade, context)
        elif html:
            console.print("\nNo HTML page was written: there is no grade.")
    raise typer.Exit(code)


def _aim(gate: Gate, tests: Path | None) -> "Target | None":
    """The place to plant bugs for tests of the user's own cache; exits with a message if there is none."""
    from tinyllm.grading.locate import NOT_HERE, located  # noqa: PLC0415 - heavy
    from tinyllm.grading.plant import PlantError  # noqa: PLC0415

    if tests is None or gate.impl == REFERENCE:
        return None
    if gate.impl.startswith("exec:"):
        gate.refuse(USAGE, f"--exec with --tests: an engine behind a pipe is no Python class: {NOT_HERE}")
    try:
        return located(gate.impl, [str(tests)])
    except PlantError as error:
        gate.refuse(USAGE, str(error))


def _step_one(console: Console, gate: Gate, profile: str, seed: int) -> tuple[Held, int]:
    from tinyllm.jobs.process import call  # noqa: PLC0415 - heavy

    impl = gate.impl
    console.print(f"[bold]1  Is the cache right?[/bold]  {escape(impl)}")
    now = Progress("", f"loading {impl}")
    passed: set[str] = set()
    with console.status("  starting") as status:

        def listen(event: object) -> None:
            nonlocal now
            if isinstance(event, Progress):
                now = event
                gate.steps += [event] if event.seconds is not None else []
                passed.update([event.name] if event.seconds is not None and not event.problem else [])
            _show_progress(console, status, event)

        ended = call(hold, impl, profile, seed, timeout=SILENCE, on_event=listen)
    held = ended.value if ended.how == "done" else Held()
    if ended.how != "done":
        held.failed.append(now)
        _show_end(console, ended, now)
    if held.unusable:
        gate.refuse(USAGE, held.unusable)
    gate.held = held
    if held.story and not (held.stages and impl != REFERENCE and _too_early(held)):
        console.print()
        console.print(held.story, markup=False, soft_wrap=True)
    if held.passed:
        console.print(f"   every law holds over {held.programs:,} programs of {held.lines:,} lines")
    for missing in held.not_checked:
        console.print(f"   not checked: {escape(missing)}")
    _guide(console, impl, held, passed)
    return held, 0 if held.passed else WEAK


def _guide(console: Console, impl: str, held: Held, passed: set[str]) -> None:
    """Print the next step for a user who builds a cache in Python."""
    learner = impl != REFERENCE and not impl.startswith("exec:")
    if held.stages and learner:
        stages.show(console, passed, held.stages, held.unwritten)
    elif held.story and learner and not held.beyond:
        console.print(f"\nThe ten tests pass; law {held.law} is still broken: tinyllm laws {held.law}")
    elif held.unwritten:
        console.print(f"\nNext: write [bold]{escape(held.unwritten)}[/bold].")


def _too_early(held: Held) -> bool:
    """Whether the broken law is about bad arguments, a learner's last stage, while other tests fail."""
    failed = {one.name for one in held.failed if one.kind == "catalogue"}
    return held.law == 15 and failed != {"test_bad_arguments"}


def _show_end(console: Console, ended: "Ended", now: Progress) -> None:
    """Print how a process ended that did not finish."""
    name = escape(now.name)
    if ended.how == "timeout":
        console.print(f"\n[red]{name} has not ended within {SILENCE:.0f} s: an endless loop?[/red]")
        return
    console.print(f"\n[red]{name} ended the process it ran in.[/red]")
    if said := (str(ended.value or "") + ended.output).strip():
        console.print(said[-2000:], markup=False, soft_wrap=True)


def _show_progress(console: Console, status: Status, event: object) -> None:
    if isinstance(event, Programs):
        status.update(f"  random programs: {event.count}")
    elif isinstance(event, Progress) and event.seconds is None:
        status.update(f"  {event.name}")
    elif isinstance(event, Progress):
        mark = "[red]✗[/red]" if event.problem else "[green]✓[/green]"
        unwritten = event.problem.endswith(stages.UNWRITTEN)
        why = f"[dim]: {escape(event.problem)}[/dim]" if unwritten else ""
        console.print(f"   {mark} {event.kind:10} {escape(event.name)}{why}", soft_wrap=True)
        if event.problem and not unwritten:
            console.print(f"     {escape(event.problem)}", soft_wrap=True)


def _step_two(
    console: Console,
    gate: Gate,
    tests: Path | None,
    profile: str,
    seed: int,
    jobs: int | None,
    *,
    aim: "Target | None",
    reveal: bool,
) -> "Grade | None":
    from tinyllm.grading.grade import Grader  # noqa: PLC0415 - heavy

    impl = gate.impl
    if tests is None and impl != REFERENCE:
        console.print("\n[bold]2  Are the tests any good?[/bold]  skipped: name them with --tests PATH")
        return None
    graded = str(tests or own_tests())
    console.print(f"\n[bold]2  Are the tests any good?[/bold]  {escape(graded)}")
    target, bugs = choose([], "course", None, None)
    if aim and aim.place:
        target = aim
        console.print("   (the reference stands in for your class: tests may ask for no more than the laws)")
    options = (f"--hypothesis-profile=tinyllm-{profile}",) if tests is None else ()
    grader = Grader((graded,), target, bugs, seed=seed, options=options)
    with suite_pool(None, jobs, grader) as workers:
        result = run_grader(console, grader, gate, workers)
    show(console, result, reveal=reveal)
    return result


def own_tests() -> Path:
    """The project's own tests; the kit's where there is only the wheel."""
    import tinyllm.testing  # noqa: PLC0415

    own = Path(tinyllm.__path__[0]).parent / "tests" / "own"
    path = own if own.is_dir() else Path(tinyllm.testing.__path__[0]) / "test_contract.py"
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
