"""An engine that answers `ok` to everything, until it speaks the protocol badly. It starts fast."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path


def forever(act: Callable[[], object]) -> None:
    while True:
        act()


def sleep() -> None:
    forever(lambda: time.sleep(60))


def say(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def complain() -> None:
    sys.stderr.write("so much to say " * 10_000)
    sys.stderr.flush()


def part() -> None:
    say(b"ok 1")
    sleep()


def unasked() -> None:
    say(b"ok\n")
    time.sleep(0.1)
    say(b"by the way\n")


def mute() -> None:
    os.close(1)
    sleep()


def deaf() -> None:
    os.close(0)
    say(b"ok\n")
    sleep()


def crash() -> None:
    raise RuntimeError("last words")


MISBEHAVIOUR: dict[str, Callable[[], object]] = {
    "garbage": lambda: say(b"lorem ipsum\n"),
    "nothing": lambda: say(b"\n"),
    "nameless": lambda: say(b"error\n"),
    "misnamed": lambda: say(b"error 7up is no name\n"),
    "twice": lambda: say(b"ok\nok\n"),
    "unasked": unasked,
    "binary": lambda: say(b"ok \xff\xfe\n"),
    "endless": lambda: forever(lambda: say(b"ok " * 10_000)),
    "part": part,
    "hang": sleep,
    "complains": lambda: forever(complain),
    "crash": crash,
    "exit": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "mute": mute,
    "deaf": deaf,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bug", choices=MISBEHAVIOUR)
    parser.add_argument("--after", type=int, default=3, help="requests before it begins")
    parser.add_argument("--alive", help="a named pipe to hold open: it ends with the process")
    options = parser.parse_args()
    held = Path(options.alive).open("wb", buffering=0) if options.alive else None  # noqa: SIM115
    for request, _ in enumerate(sys.stdin.buffer):
        if request < options.after:
            say(b"ok\n")
        else:
            MISBEHAVIOUR[options.bug]()
    if held:
        held.close()


if __name__ == "__main__":
    main()
