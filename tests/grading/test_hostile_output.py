"""However much a suite prints, none of it reaches a disk, and the end of it is told.

Each sets a limit to the size of its files, which pipes do not have: what is printed to a file fails.
"""

import os
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from tinyllm.jobs import process
from tinyllm.jobs.process import LAST, TAIL, call

BASELINE = 3
FLOOD = """
import os, resource, subprocess
import tinyllm.infer.paged

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
mega = b"x" * (1 << 20)

def test_to_both():
    for number in (1, 2) * 4:
        os.write(number, mega)

def test_by_print(): print("y" * (1 << 22))
def test_in_a_shell(): subprocess.run("head -c 4000000 /dev/zero", shell=True, check=True)
def test_end():
    print("that was", "all")
    assert False, "the end"
"""


def test_a_suite_prints_much(grade: Callable[..., Any]) -> None:
    verdict = grade(FLOOD)
    assert verdict.code == BASELINE
    assert "the clean tests fail" in verdict.message
    assert "the end" in verdict.message.splitlines()[0], "no other test failed"
    assert "that was all" in verdict.message


def flood(send: Any) -> str:
    import resource  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    mega = b"x" * (1 << 20)
    for _ in range(128):
        os.write(1, mega)
    os.write(2, b"the end")
    send("through")
    return "done"


def test_many_megabytes() -> None:
    heard: list[Any] = []
    ended = call(flood, timeout=300, on_event=heard.append)
    assert (ended.value, heard) == ("done", ["through"])
    assert len(ended.output) == TAIL
    assert ended.output.endswith("xxxthe end")


def close_all(send: Any) -> None:
    os.closerange(0, 3)
    send("closed")
    raise ValueError("and goes on")


def test_output_is_closed() -> None:
    heard: list[Any] = []
    ended = call(close_all, timeout=60, on_event=heard.append)
    assert (ended.how, heard, ended.output) == ("error", ["closed"], "")
    assert "and goes on" in ended.value


def test_somebody_goes_on_printing() -> None:
    """As what escaped would: nobody reads on for ever."""
    here, there = Pipe(duplex=False)
    far = process._Far(here)

    def print_on() -> None:
        try:
            while True:
                os.write(there.fileno(), b"x" * 4096)
        except BrokenPipeError:
            pass

    printer = threading.Thread(target=print_on)
    printer.start()
    read = 0
    while read < 2 * LAST:
        read += far.read()
    assert set(far.close()) == {"x"}
    printer.join(60)
    assert not printer.is_alive()
    there.close()
