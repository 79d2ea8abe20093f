"""The cost of the kit, the grader and the command: `python -m benchmarks.harness`.

Every figure is a ratio to a baseline of the same run:

- A step of the machine, against the same operations on the bare cache. There are two baselines: the calls
  alone, with arrays made beforehand; and calls with reads of everything observable after each line: tables,
  lengths, contents and counts. A *checked line* is the work of `Run` alone; the *machine* also lets
  Hypothesis draw the lines, which costs more than all checks together.
- A graded planted bug, against one of mutmut's mutants, with the same tests and one process at a time. The
  clean runs before the first are separate.
- `tinyllm --help`, against an empty interpreter.

Steps and the command are measured in processor time, since the machine may be busy: the fastest of all rounds
for steps, the median of turns for the command. Faults are measured in elapsed seconds, as mutmut does. Needs
the extra `check` and mutmut, on a POSIX system. Exit code: 0 every target is met, 1 one is missed.
"""

import argparse
import gc
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hypothesis import settings

from benchmarks.cache import Row, tell
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing import trace
from tinyllm.testing.check import run_machine
from tinyllm.testing.forms import FORMS
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import Run
from tinyllm.testing.trace import Op

ROOT = Path(__file__).parents[1]
TESTS = "tests/own"
METHODS = {"add": "add_seq", "table": "block_table", "len": "seq_len"}
SAMPLE = ("*__mutmut_3", "*__mutmut_11", "*__mutmut_19")
"""Names of mutmut: the third mutant of each method, and so on; a tenth of all."""


class Call(NamedTuple):
    """A prepared call, and the live sequences after it."""

    method: str
    args: tuple[Any, ...]
    live: tuple[int, ...]
    layers: int


class Recording(CacheMachine):
    """The machine, with its programs recorded."""

    programs: ClassVar[list[list[Op]]] = []

    def teardown(self) -> None:
        """Record the program."""
        try:
            super().teardown()
        finally:
            if self.run.ops:
                self.programs.append(list(self.run.ops))


class _Unchecked(Run):
    """Makes the calls and updates the oracle, without checks."""

    def block_conservation(self) -> None:
        """Do nothing."""

    parent_immutability = finish = block_conservation


class Unchecked(CacheMachine):
    """The machine without checks; it draws the same programs, since the oracle decides what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.run = _Unchecked(PagedKVCache)


def recorded(seed: int, programs: int) -> list[list[Op]]:
    """The programs that the machine draws with a seed."""
    Recording.programs.clear()
    drawn(Recording, seed, programs)
    return Recording.programs.copy()


def drawn(machine: type[CacheMachine], seed: int, programs: int) -> None:
    """Let a machine draw and run programs with the profile `ci`."""
    run_machine(
        PagedKVCache, shard(machine, seed, PagedKVCache), settings(profile("ci"), max_examples=programs)
    )


def prepared(program: Sequence[Op]) -> list[Call]:
    """The calls of a program, with their arguments made beforehand."""
    run, calls = Run(PagedKVCache), []
    for op in program:
        args: tuple[Any, ...] = op.args
        if op.name == "append":
            k, v = trace.values(op, run.scalars, run.config)
            args = (*op.args[:2], *(FORMS[op.form].make(k, v) if op.form else (k, v)))
        run.do(op)
        live = () if run.closed else tuple(run.oracle.tables)
        calls.append(Call(METHODS.get(op.name, op.name), args, live, run.config.n_layers))
    return calls


def play(calls: Sequence[Call], *, reads: bool) -> PagedKVCache:
    """Make the calls on a new cache, with all reads after each if `reads`; returns the cache."""
    cache = PagedKVCache(*calls[0].args)
    for call in calls:
        if call.method != "new":
            try:  # noqa: SIM105 - `suppress` takes as long as some calls
                getattr(cache, call.method)(*call.args)
            except Exception:  # noqa: S110 - the line may be a refusal
                pass
        if reads and call.method != "close":
            for seq in call.live:
                cache.block_table(seq)
                for layer in range(call.layers):
                    cache.seq_len(seq, layer)
                    cache.gather(seq, layer)
            cache.stats()
            cache.num_free_blocks()
    return cache


def check(programs: Sequence[Sequence[Op]]) -> None:
    """Run programs, with every law checked after each line."""
    for program in programs:
        run = Run(PagedKVCache)
        for op in program:
            run.step(op)


def fastest(acts: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least processor seconds of each act over all rounds; they take turns."""
    best = dict.fromkeys(acts, float("inf"))
    for _ in range(rounds):
        for name, act in acts.items():
            start = time.process_time()
            act()
            best[name] = min(best[name], time.process_time() - start)
    return best


def steps(programs: int, rounds: int, seed: int = 0) -> list[Row]:
    """The cost of a line."""
    ops = recorded(seed, programs)
    calls = [prepared(program) for program in ops]
    lines = sum(map(len, ops))
    gc.collect()
    gc.freeze()  # the recorded programs must not slow collections during a checked line
    cost = fastest(
        {
            "calls": lambda: [play(one, reads=False) for one in calls],
            "reads": lambda: [play(one, reads=True) for one in calls],
            "checked": lambda: check(ops),
            "unchecked": lambda: drawn(Unchecked, seed, programs),
            "machine": lambda: drawn(CacheMachine, seed, programs),
        },
        rounds,
    )
    each = {name: 1e6 * seconds / lines for name, seconds in cost.items()}
    print(f"{len(ops)} programs of {lines:,} lines; " + ", ".join(f"{n} {c:.1f}" for n, c in each.items()))
    print(f"microseconds a line; {1e6 / each['machine']:,.0f} lines a second")
    gc.unfreeze()
    return [
        Row("a checked line", "its call and all reads", cost["checked"] / cost["reads"], 6),
        Row("a checked line", "its call", cost["checked"] / cost["calls"]),
        Row("the machine", "its calls and all reads", cost["machine"] / cost["reads"]),
        Row("the machine", "its calls", cost["machine"] / cost["calls"]),
        Row("the machine", "drawing and calling alone", cost["machine"] / cost["unchecked"]),
    ]


def tracked(folder: Path) -> None:
    """Copy the tracked files of the project: mutmut writes into its folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)


def mutmut(names: Sequence[str]) -> tuple[float, float, int]:
    """Seconds a mutant, seconds before the first, and the number of mutants."""
    with tempfile.TemporaryDirectory() as folder:
        tracked(Path(folder))
        started = time.monotonic()
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *names]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        took = time.monotonic() - started
        if done.returncode:
            raise RuntimeError(f"mutmut failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        meta = Path(folder, "mutants", "tinyllm", "infer", "paged.py.meta").read_text(encoding="utf-8")
    seconds = [one for one in json.loads(meta)["durations_by_key"].values() if one is not None]
    return statistics.mean(seconds), took - sum(seconds), len(seconds)


GRADE = """
import json, sys, time
from tinyllm.grading import bugs, plant
from tinyllm.grading.grade import Grader
# What replaces paged.py fails the tests, which are of its insides too.
edits = [bug for bug in bugs.load_set("all") if bug.implementation is None]
chosen, at = edits[::int(sys.argv[2])], {"start": time.monotonic()}
def listener(what, *_):
    at[what] = time.monotonic()
Grader((sys.argv[1],), bugs.reference(), chosen).grade(listener)
print(json.dumps([(at["bug"] - at["clean"]) / len(chosen), at["clean"] - at["start"], len(chosen)]))
"""
"""Run in its own interpreter, since the grader's processes load the main file of their parent."""


def grade(every: int) -> tuple[float, float, int]:
    """Seconds a planted bug, seconds of the clean runs before, and the number of bugs."""
    command = [sys.executable, "-c", GRADE, TESTS, str(every)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    bug, clean, count = json.loads(done.stdout)
    return bug, clean, count


def faults(names: Sequence[str], every: int) -> list[Row]:
    """The cost of a fault, planted or mutated."""
    (mutant, before, mutated), (bug, clean, planted) = mutmut(names), grade(every)
    print(f"{mutated} mutants: {mutant:.2f} s each, {before:.1f} s before them")
    print(f"{planted} planted bugs: {bug:.2f} s each, each killed twice; {clean:.1f} s of clean runs before")
    return [
        Row("a planted bug", "a mutant of mutmut", bug / mutant, 1.3),
        Row("clean runs", "what mutmut does first", clean / before),
    ]


def children() -> float:
    """Processor seconds of the ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def startup(turns: int) -> list[Row]:
    """The processor time of `tinyllm --help` beyond an empty interpreter."""
    commands = {"help": ["-m", "tinyllm", "--help"], "bare": ["-c", "pass"]}
    took: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(turns):
        for name, command in commands.items():
            started = children()
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
            took[name].append(children() - started)
    beyond = statistics.median(took["help"]) - statistics.median(took["bare"])
    return [Row("tinyllm --help", "python -c pass, more", beyond, 0.2, " s")]


PARTS: dict[str, tuple[Callable[[], list[Row]], Callable[[], list[Row]]]] = {
    "steps": (lambda: steps(200, 5), lambda: steps(10, 2)),
    "faults": (lambda: faults(SAMPLE, 1), lambda: faults(["*seq_len__mutmut_*"], 9)),
    "startup": (lambda: startup(15), lambda: startup(3)),
}
"""The measurements: in full, and quick."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few programs, bugs and turns: rough figures")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts of it")
    options = parser.parse_args(arguments)
    rows = [row for name in options.only for row in PARTS[name][options.quick]()]
    return tell(rows, "harness", "what checking costs")


if __name__ == "__main__":
    sys.exit(main())
