"""The unit of work of a soak: one search, in a process of its own.

A file holds the program under way, so that it is known when the implementation kills its process or hangs.
"""

import os
import tempfile
from dataclasses import dataclass, field
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from tinyllm.jobs.process import Cancel, Ended, Here, Send, call
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.soak import Soaked

SILENCE = 60.0  # seconds that a search may send nothing; a call that hangs is stopped sooner


@dataclass
class Slice:
    """The end of a search.

    `soaked` has its results; if `raw`, only the broken law, with a program that was not shortened.
    `unusable` says why the implementation cannot run, `skipped` why it cannot run this trace. `died` says
    how the process ended, and `program` what it was running.
    """

    soaked: Soaked = field(default_factory=Soaked)
    raw: bool = False
    unusable: str = ""
    skipped: str = ""
    died: str = ""
    program: str = ""
    cancelled: bool = False


def search(impl: str, seed: int, seconds: float, cancelled: Cancel, hear: Here) -> Slice:
    """Search from a seed for some seconds; `hear` gets the progress, and a broken law at once."""
    handle, name = tempfile.mkstemp(dir=get_temp_dir())  # beside the fork server's socket
    os.close(handle)
    flight = Path(name)
    raw: list[LawBroken] = []

    def listen(event: Soaked | LawBroken) -> None:
        raw.extend([event] if isinstance(event, LawBroken) else [])
        hear(event)

    try:
        ended = call(
            _search, impl, seed, seconds, name, timeout=SILENCE, cancelled=cancelled, on_event=listen
        )
        program = flight.read_text(encoding="utf-8")
    finally:
        flight.unlink(missing_ok=True)
    if ended.how != "done" and raw:  # a law broke, and the process died while shrinking
        return Slice(Soaked(broken=raw[-1]), raw=True)
    return _slice(ended, program)


def again(impl: str, trace: str, cancelled: Cancel) -> Slice:
    """Run one program; the trace of a broken law is not shortened."""
    return _slice(call(_again, impl, trace, timeout=SILENCE, cancelled=cancelled), trace)


def _slice(ended: Ended, program: str) -> Slice:
    if ended.how == "done":
        return ended.value if isinstance(ended.value, Slice) else Slice(ended.value)
    if ended.how == "cancelled":
        return Slice(cancelled=True)
    said = str(ended.value or ended.output).strip()[-2000:]
    how = f"nothing heard for {SILENCE:.0f} s" if ended.how == "timeout" else "the process ended"
    return Slice(died=f"{how}{', after this was printed:' if said else ''}\n{said}".strip(), program=program)


def _search(send: Send, impl: str, seed: int, seconds: float, flight: str) -> Any:
    from tinyllm.testing.adapters.loading import ImplementationError, load  # noqa: PLC0415 - heavy
    from tinyllm.testing.soak import soak  # noqa: PLC0415

    try:
        return soak(load(impl), seed, seconds, send, Path(flight))
    except (ImplementationError, ValueError, NotImplementedError) as error:
        return Slice(unusable=_why(error))


def _again(send: Send, impl: str, trace: str) -> Any:
    from tinyllm.testing.adapters.loading import ImplementationError, load  # noqa: PLC0415 - heavy
    from tinyllm.testing.run import Run  # noqa: PLC0415
    from tinyllm.testing.time_limit import watch_over  # noqa: PLC0415
    from tinyllm.testing.trace import NotOffered, TraceError, program  # noqa: PLC0415

    try:
        factory = load(impl)
        with watch_over(factory):
            run = Run(factory)
            for op in program(trace):
                send(None)  # a slow program is not silent
                run.step(op)
            run.finish()
        return Soaked(1, len(run.ops))
    except LawBroken as broken:
        return Soaked(broken=broken.with_traceback(None))
    except NotOffered as needed:
        return Slice(skipped=f"the implementation does not offer {needed}")
    except TraceError as error:
        return Slice(skipped=str(error))
    except (ImplementationError, ValueError, NotImplementedError) as error:
        return Slice(unusable=_why(error))


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, NotImplementedError) else str(error)
