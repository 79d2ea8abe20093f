"""Generic mutants beside the planted bugs: run mutmut on `paged.py`, and account for every survivor.

    python -m tools.generic            run mutmut at the root, then the account
    python -m tools.generic --no-run   the account of the last run

mutmut changes each line in every way it knows, and `tests/own` must notice each change. A change with no
observable effect is listed in `equivalent.toml` with its diff and the reason. It must survive the deep
profile, every trace that kills a bug, and every directed case. The account fails for a survivor that is not
listed, a listed change that is killed, a list too long, and a timeout.
"""

import argparse
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tinyllm.grading import bugs
from tinyllm.grading.worker import Job, run
from tinyllm.jobs import process

LISTED = Path(__file__).with_name("equivalent.toml")
MOST = 0.05  # share of the mutants that may be listed
MACHINE = ("tests/own/test_machine.py",)
DEEP = 3600.0  # seconds, for the deep run of one listed mutant
QUIET = {"killed", "caught by type check"}


def mutmut(*arguments: str) -> str:
    """The output of a mutmut command in the current folder. Raises CalledProcessError."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def results() -> dict[str, str]:
    """The status of every mutant of the last run."""
    lines = mutmut("results", "--all", "true").splitlines()
    pairs = (line.strip().rpartition(": ") for line in lines if ": " in line)
    return {name: status for name, _, status in pairs}


def change(name: str) -> str:
    """The removed and added lines of a mutant, marked - and +."""
    lines = mutmut("show", name).splitlines()
    changed = (line for line in lines if line[:1] in {"-", "+"} and line[:3] not in {"---", "+++"})
    return "\n".join(line[0] + line[1:].strip() for line in changed)


def listed() -> dict[str, str]:
    """The listed changes and their reasons."""
    entries = tomllib.loads(LISTED.read_text(encoding="utf-8")).get("mutant", [])
    return {entry["change"].strip(): entry["reason"] for entry in entries}


def apply(source: str, text: str) -> str:
    """The source with one line changed. Raises ValueError unless that line occurs once."""
    old, new = (line[1:] for line in sorted(text.splitlines(), key=lambda line: line[0] == "+"))
    hits = [line for line in source.splitlines() if line.strip() == old]
    if len(hits) != 1:
        raise ValueError(f"this line occurs {len(hits)} times in the source: {old}")
    return source.replace(hits[0], hits[0].replace(old, new))


def noticed(text: str) -> str:
    """The trace or the deep run that notices a listed change; empty if none does."""
    from tinyllm.testing.check import run_directed  # noqa: PLC0415 - the kit judges here, and grades nothing
    from tinyllm.testing.directed import DIRECTED  # noqa: PLC0415
    from tinyllm.testing.run import replay  # noqa: PLC0415

    target = bugs.reference()
    mutant = target.with_source(apply(target.source, text))
    scope: dict[str, object] = {"__name__": bugs.MODULE}
    exec(compile(mutant.source, target.path, "exec"), scope)  # noqa: S102 - our own source, one line changed
    factory = scope["PagedKVCache"]
    try:
        for witness in [bug.witness for bug in bugs.load_set("all") if bug.witness]:
            replay(factory, witness)  # type: ignore[arg-type]
        for name in DIRECTED:
            run_directed(factory, name)  # type: ignore[arg-type]
    except AssertionError as error:
        return f"a trace: {error}"
    job = Job(MACHINE, mutant, seed=0, options=("--hypothesis-profile=tinyllm-deep",))
    ended = process.call(run, job, timeout=DEEP)
    if ended.how != "done" or ended.value.broken:
        return f"the deep run did not finish ({ended.how})\n{ended.output[-2000:]}"
    return "".join(f"{kill.test}: {kill.message}\n" for kill in ended.value.kills)


def account(minutes: float | None) -> list[str]:
    """Print the figures; returns the problems."""
    status = results()
    alive = {name: change(name) for name, how in status.items() if how not in QUIET}
    known = listed()
    wrong = [
        f"{name} is {status[name]}:\n{text}"
        for name, text in alive.items()
        if text not in known or status[name] != "survived"
    ]
    wrong += [f"listed, but killed or gone:\n{text}" for text in known if text not in alive.values()]
    if len(known) > MOST * len(status):
        wrong.append(f"{len(known)} are listed, more than {MOST:.0%} of {len(status)}")
    took = "" if minutes is None else f", {minutes:.1f} minutes"
    counts = ", ".join(f"{count} {how}" for how, count in Counter(status.values()).most_common())
    print(f"{len(status)} mutants: {counts}; {len(known)} listed as equivalent{took}", flush=True)
    return wrong


def main() -> int:
    """Run mutmut, account for its survivors, and run the listed ones deep; 0 without a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-run", action="store_true", help="use the results of the last run")
    parser.add_argument(
        "--no-deep", action="store_true", help="leave out the deep runs of the listed mutants"
    )
    options = parser.parse_args()
    minutes = None
    if not options.no_run:
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "mutmut", "run"], check=True)
        minutes = (time.monotonic() - started) / 60
    wrong = account(minutes)
    if not wrong and not options.no_deep:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for text, by in zip(listed(), pool.map(noticed, listed()), strict=True):
                print(f"{'noticed' if by else 'deep run survived'}:\n{text}", flush=True)
                wrong += [f"no equivalent: noticed by {by}\n{text}"] if by else []
    for one in wrong:
        print(f"\n{one}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
