"""`tinyllm soak`: what it finds is kept at once and run again first; however it ends, it says what it did."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from tinyllm.cli.executor import Pool
from tinyllm.cli.reach import Report
from tinyllm.cli.search import Search, _seed
from tinyllm.cli.slice import Slice, _again, search
from tinyllm.cli.soak import duration, shard_of
from tinyllm.cli.traces import keep, known
from tinyllm.grading.bugs import load_set, reference
from tinyllm.jobs.cluster import ClusterError
from tinyllm.jobs.process import Cancel, Here
from tinyllm.testing.contract import CAPABILITIES
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.soak import Soaked

from .conftest import plain_environment

Call = Callable[..., Any]
PASS, WEAK, USAGE, LOST, INTERRUPTED = 0, 1, 2, 6, 130
CEILING = 300.0  # seconds, for what comes sooner on any machine
AT_ONCE = "class PagedKVCache(Right):\n    def num_free_blocks(self): return -1\n"
"""Breaks law 5 with its first line."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a cache: the reference with one bug, or a subclass of it with this body."""
    known = {bug.id: bug for bug in load_set("all")}

    def make(name: str, what: str) -> Path:
        path = tmp_path / name
        if what in known:
            text = known[what].planted(reference()).source
        else:
            text = f"import os\nfrom tinyllm.infer.paged import PagedKVCache as Right\n{what}"
        path.write_text(text, encoding="utf-8")
        return path

    return make


@pytest.fixture
def terminal_process(command: str, tmp_path: Path) -> Iterator[Call]:
    """Starts the command on a terminal: the process, and a function that reads what it has written there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    started: list[subprocess.Popen[bytes]] = []

    def read() -> str:
        assert select.select([ours], [], [], CEILING)[0], "it says nothing"
        try:
            return os.read(ours, 65536).decode(errors="replace")
        except OSError:  # nobody is at the other end any more
            return ""

    def start(*arguments: object) -> tuple[subprocess.Popen[bytes], Call]:
        line, env = [command, *map(str, arguments)], plain_environment(TERM="xterm-256color")
        started.append(
            subprocess.Popen(line, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
        )
        os.close(theirs)
        return started[0], read

    yield start
    os.close(ours)
    for process in started:
        process.kill()
        process.wait()


def folder(tmp_path: Path) -> list[str]:
    """The files of the default folder of traces, by name."""
    return sorted(path.name for path in (tmp_path / "tinyllm-traces").glob("*"))


def test_the_report_says_what_was_reached_and_what_was_not(invoke: Call, tmp_path: Path) -> None:
    done = invoke("soak", "--for", "1s", "--seed", 5, "--json", "r.json")
    assert done.exit_code == PASS, done.output
    assert "PASS" in done.stdout
    assert "(seed 5, shard 1/1)" in done.stdout
    assert "tables that hold one block" in done.stdout
    assert "Out of reach: " in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert f"{report['programs']:,} programs, {report['steps']:,} steps" in done.stdout
    assert (report["seed"], report["shard"], report["exitCode"], report["law"]) == (5, "1/1", PASS, None)
    missed = [name for name, steps in report["reach"].items() if not all(steps.values())]
    assert len(missed) == len(report["notReached"])
    for one in report["notReached"]:
        assert one in " ".join(done.stdout.split())
    assert folder(tmp_path) == []


def test_what_is_found_is_kept_and_run_again_first(invoke: Call, tmp_path: Path, write: Call) -> None:
    path = write("mine.py", "s07")
    done = invoke("soak", path, "--for", "5m", "-j", 1, "--seed", 1, "--json", "r.json")
    assert done.exit_code == WEAK, done.output
    (name,) = folder(tmp_path)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["trace"] == f"tinyllm-traces/{name}"
    assert f"The trace: tinyllm-traces/{name}; tinyllm replay runs it again." in done.stdout
    law = report["law"]
    assert name.startswith(f"law-{law:02}-")
    assert f"law {law}, " in done.stdout
    text = (tmp_path / "tinyllm-traces" / name).read_text()
    assert text.startswith(f"# law {law}, ")
    assert "not shortened" not in text
    assert invoke("replay", f"tinyllm-traces/{name}", path).exit_code == WEAK

    again = invoke("soak", path, "--for", "5m", "-j", 1, "--json", "r.json")
    assert again.exit_code == WEAK
    assert f"tinyllm-traces/{name} still fails" in again.stdout
    assert f"law {law}, " in again.stdout
    assert json.loads((tmp_path / "r.json").read_text())["programs"] == 0

    right = invoke("soak", "--for", "1s")
    assert right.exit_code == PASS
    assert "1 known counterexamples hold, from tinyllm-traces" in right.stdout


def test_a_cache_that_ends_its_process(invoke: Call, tmp_path: Path, write: Call) -> None:
    body = "class PagedKVCache(Right):\n  def free(self, seq):\n    print('bye', flush=True); os._exit(3)\n"
    path = write("mine.py", body)
    for _ in range(2):  # the second time it is what is run first
        done = invoke("soak", path, "--for", "5m", "-j", 1)
        assert done.exit_code == WEAK, done.output
        assert "the process ended, after this was printed:\nbye" in done.stdout
    (name,) = folder(tmp_path)
    text = (tmp_path / "tinyllm-traces" / name).read_text()
    assert name.startswith("died-")
    assert text.splitlines()[-1].startswith("free ")
    assert invoke("soak", "--for", "1s").exit_code == PASS


def test_a_law_broken_is_known_before_it_is_made_shorter(write: Call) -> None:
    """The cache ends its process while its counterexample is made shorter: the long one is told."""
    body = (
        "class PagedKVCache(Right):\n"
        "    made = 0\n"
        "    def free(self, seq):\n"
        "        PagedKVCache.made += 1\n"
        "        if PagedKVCache.made > 1: os._exit(1)\n"
    )
    heard: list[Any] = []
    found = search(str(write("mine.py", body)), 1, 300.0, Cancel(), Here(heard.append))
    assert isinstance(found.soaked.broken, LawBroken)
    told = [one for one in heard if isinstance(one, LawBroken)]
    assert [one.trace for one in told] == [found.soaked.broken.trace]
    assert "free " in found.soaked.broken.trace


def test_traces_that_say_nothing(invoke: Call, tmp_path: Path, write: Call) -> None:
    """One that is damaged is told, and the night goes on."""
    body = "class PagedKVCache(Right):\n    def __init__(self, *sizes):\n"
    body += "        if sizes[0] == 100_000: raise MemoryError\n        super().__init__(*sizes)\n"
    path = write("mine.py", body)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/half.trace").write_bytes(b"new 4 2 1 1 1\nadd 0\nappend 0 \xff")
    (tmp_path / "kept/good.trace").write_text("new 4 2 1 1 1\nadd 0\n")
    (tmp_path / "kept/notes.txt").write_text("not a trace")
    (tmp_path / "kept/folder.trace").mkdir()
    (tmp_path / "kept/gone.trace").symlink_to("nowhere")
    os.mkfifo(tmp_path / "kept/pipe.trace")
    (tmp_path / "kept/endless.trace").symlink_to("/dev/zero")
    with (tmp_path / "kept/long.trace").open("wb") as file:
        file.truncate(2**40)  # takes no room
    (tmp_path / "kept/empty.trace").write_text("# nothing\n")
    (tmp_path / "kept/large.trace").write_text("new 100000 1024 8 8 128\nadd 0\n")
    (tmp_path / "kept/append.trace").write_text("new 4 2 1 1 1\nadd 0\nappend 0 0 4000000000 ! OutOfBlocks\n")
    done = invoke("soak", path, "--for", "1s", "--traces", "kept")
    assert done.exit_code == PASS, done.output
    assert "kept/half.trace: not run: " in done.stdout
    assert "kept/folder.trace: not run: Is a directory" in done.stdout
    assert "kept/gone.trace: not run: No such file or directory" in done.stdout
    assert "kept/pipe.trace: not run: it is no regular file" in done.stdout
    assert "kept/endless.trace: not run: it is no regular file" in done.stdout
    assert "kept/long.trace: not run: it has more than 67,108,864 bytes" in done.stdout
    assert "kept/empty.trace: not run: there is no line to run" in done.stdout
    assert re.search(r"kept/large.trace: not run: .* more memory than this machine has", done.stdout)
    assert re.search(r"kept/append.trace: not run: .* at most 16,777,216 tokens", done.stdout)
    assert "1 known counterexamples hold, from kept" in done.stdout
    (tmp_path / "link").symlink_to("nowhere")
    refused = invoke("soak", "--for", "1s", "--traces", "link")
    assert (refused.exit_code, refused.stderr) == (USAGE, "tinyllm: --traces link is no folder\n")


def test_a_find_is_named_by_its_program_alone(tmp_path: Path) -> None:
    """The same from two machines is one file, whatever was said of it."""
    for found, program in (
        ("this", "new 1 1 1 1 1\n"),
        ("that", "new 1 1 1 1 1\n"),
        ("this", "new 2 1 1 1 1\n"),
    ):
        broken = LawBroken(8, "sharing", "one", found)
        broken.trace = program
        keep(tmp_path, broken)
    assert len(known(tmp_path)) == 2


def test_a_long_trace_is_no_silence() -> None:
    """It may take longer than a process may be silent: each line is a word."""
    heard: list[Any] = []
    _again(heard.append, "tinyllm.infer.paged", "new 4 2 1 1 1\nadd 0\nfree 0\n")
    assert len(heard) == 3


def test_a_folder_that_cannot_be_written(invoke: Call, tmp_path: Path, write: Call) -> None:
    """The program is told all the same."""
    (tmp_path / "file").write_text("")
    done = invoke("soak", write("mine.py", AT_ONCE), "--for", "5m", "-j", 1, "--traces", "file/below")
    assert done.exit_code == WEAK, done.stderr
    assert "the trace cannot be written to file/below: Not a directory" in done.stdout
    assert "replay(PagedKVCache" in done.stdout


def test_a_broken_law_decides_whatever_else_fails(invoke: Call, write: Call) -> None:
    done = invoke("soak", write("mine.py", AT_ONCE), "--for", "5m", "-j", 1, "--json", "/dev/full")
    assert done.exit_code == WEAK, done.stderr
    assert "FAIL" in done.stdout
    assert done.stderr == "tinyllm: /dev/full cannot be written: No space left on device\n"


def test_a_search_that_tells_of_a_second_law_keeps_the_last_file(tmp_path: Path) -> None:
    """The first showed in extensions alone; before either is made shorter."""
    work = Search(Console(quiet=True), Report("x", 1), (1, 1), tmp_path)
    for law, operation in ((16, "needed"), (8, "append")):
        work._hear(0, LawBroken(law, operation, "one", "two", trace=f"new 1 1 1 1 {law}\n"))
    (path,) = known(tmp_path)
    assert path.name.startswith("law-08-")


def test_a_find_beside_a_lost_cluster(tmp_path: Path) -> None:
    found: Future[Slice] = Future()
    found.set_result(Slice(died="the process ended", program="new 1 1 1 1 1\n"))
    lost: Future[Slice] = Future()
    lost.set_exception(ClusterError("it is gone"))
    for order in ([found, lost], [lost, found]):
        work = Search(Console(quiet=True), Report("x", 1), (1, 1), tmp_path)
        work._running = {one: number for number, one in enumerate(order)}
        work._take(0)
        assert (work.report.code, work.problem, work._running) == (WEAK, "it is gone", {})
        assert Path(work.report.trace).parent == tmp_path


@pytest.mark.long
def test_ctrl_c_twice_while_a_program_is_made_shorter(command: str, tmp_path: Path, write: Call) -> None:
    """What was found is told, and is the verdict."""
    body = (
        "import time\n"
        "class PagedKVCache(Right):\n"
        "    def fork(self, parent, child):\n"
        "        super().fork(parent, child)\n"
        "        if len(self.block_table(parent)) > 3: time.sleep(0.5); raise RuntimeError('deep')\n"
    )
    process = subprocess.Popen(
        [command, "soak", write("mine.py", body), "--for", "5m", "-j", "1", "--json", "r.json"],
        cwd=tmp_path,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + CEILING
    while not folder(tmp_path) or not folder(tmp_path)[0].startswith("law-"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    said, error = process.communicate(timeout=CEILING)
    assert process.returncode == WEAK, said + error
    assert error == ""
    assert "law 7, fork" in said
    (name,) = folder(tmp_path)
    assert "# not shortened yet\n" in (tmp_path / "tinyllm-traces" / name).read_text()
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["law"], report["trace"]) == (7, f"tinyllm-traces/{name}")


def test_it_ends_with_its_report_when_it_is_told_to(terminal_process: Call, tmp_path: Path) -> None:
    """And not before a search has said that it has run a program."""
    process, read = terminal_process("soak", "--for", "1h", "-j", 1, "--json", "r.json")
    said = ""
    while not re.search(r"[1-9][\d,]* programs, ", said):
        said += read()
    process.terminate()
    while more := read():
        said += more
    assert process.wait(timeout=CEILING) == 128 + signal.SIGTERM, said
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["programs"] > 0, "what a search had done by then is counted"
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    assert f"PASS  {report['programs']:,} programs" in said
    assert "ended early" in said


def test_live_progress(on_terminal: Call) -> None:
    code, shown = on_terminal("soak", "--for", "1s", "-j", "1", columns=100)
    assert code == PASS
    assert "1 searches under way, " in shown
    assert "left; Ctrl-C ends it with its report" in shown


@pytest.mark.long
def test_a_narrow_terminal(on_terminal: Call) -> None:
    code, shown = on_terminal("soak", "--for", "2s", "-j", "1", columns=40)
    assert code == PASS
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert max(map(len, plain.splitlines())) <= 40
    assert "never" in plain


def test_an_engine_behind_a_pipe(invoke: Call) -> None:
    engine = Path(__file__).parents[1] / "testing" / "pipe_engine.py"
    command = shlex.join([sys.executable, str(engine), "--offers", " ".join(CAPABILITIES)])
    done = invoke("soak", "--exec", command, "--for", "1s", "-j", 1)
    assert done.exit_code == PASS, done.output
    assert "blocks that one truncate gave back" not in done.stdout, "it does not offer that"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--for", "soon"), "soon is not a time such as 8h, 1h30m, 90s or 90"),
        (("--for", "0"), "0 is less than a second"),
        (("--for", ""), "is not a time such as"),
        (("--shard", "3/2"), "3/2 is not a shard such as 2/8"),
        (("--shard", "0/2"), "0/2 is not a shard"),
        (("--shard", "1"), "1 is not a shard"),
        (("nowhere.py",), "there is no file nowhere.py"),
        (("no.such.module",), "there is no module 'no.such.module' here"),
        (("--traces", __file__), "is no folder"),
        (("--json", "/nowhere/r.json"), "/nowhere/r.json cannot be written"),
        (("mine.py", "--exec", "x"), "name one of the two"),
        (("--exec", "/nowhere/engine"), "/nowhere/engine"),
        (("-j", "0"), "0 is no whole number of at least 1"),
    ],
)
def test_wrong_options_are_refused(invoke: Call, arguments: tuple[str, ...], said: str) -> None:
    done = invoke("soak", *arguments)
    assert done.exit_code == USAGE, done.stdout
    assert "PASS" not in done.stdout
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_times() -> None:
    times = {"8h": 28800, "1h30m": 5400, "90s": 90, "90": 90, "1m1s": 61, "1.5s": 1.5, " 2m ": 120}
    assert {text: duration(text) for text in times} == times
    with pytest.raises(typer.BadParameter):
        duration("1s1h")


def test_shards_and_soaks_draw_programs_of_their_own() -> None:
    assert shard_of("2/8") == (2, 8)
    seeds = {_seed(base, number) for base in range(50) for number in range(50)}
    assert len(seeds) == 2500
    assert max(seeds) < 2**64


class Recorded(Executor):
    """Does nothing; says that every third search found something."""

    def __init__(self) -> None:
        self.units: list[tuple[Any, ...]] = []

    def submit(self, _: Any, /, *args: Any, **more: Any) -> Future[Any]:
        assert not more
        self.units.append(args)
        done: Future[Slice] = Future()
        found = Slice(died="the process ended", program="new 1 1 1 1 1\n")
        done.set_result(Slice(Soaked(1, 20)) if len(self.units) % 3 else found)
        return done


def test_a_shard_searches_what_no_other_does_and_no_longer_than_is_left(tmp_path: Path) -> None:
    seeds: set[int] = set()
    for number in (1, 2, 3):
        workers = Recorded()
        work = Search(Console(quiet=True), Report("x", 7), (number, 3), tmp_path / str(number))
        work.run(Pool(workers, lambda: 1, str, away=False), 5.0)
        assert (work.report.code, work.report.programs, work.report.lines) == (WEAK, 2, 40)
        seeds |= {seed for _, seed, *_ in workers.units}
        assert all(0 < seconds <= 5.0 for _, _, seconds, *_ in workers.units)
    assert len(seeds) == 9


def test_a_cluster_that_does_not_come_back_is_no_pass(tmp_path: Path) -> None:
    work = Search(Console(quiet=True), Report("x", 7), (1, 1), tmp_path)
    work._running = {Future(): 0}
    work._end(Pool(Recorded(), lambda: 1, str, away=True))
    assert (work.report.code, work.problem) == (LOST, "1 searches did not come back in time")


@pytest.mark.long
def test_nothing_is_left_behind(tinyllm: Call, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    assert tinyllm("soak", "--for", "1s", TMPDIR=str(temporary)).returncode == PASS
    assert list(temporary.iterdir()) == []


def test_a_soak_without_a_program_has_checked_nothing(
    invoke: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Search, "run", lambda *_: None)
    done = invoke("soak", "--for", "1s", "--json", "r.json")
    assert done.exit_code == USAGE
    assert "no program ran to its end, so nothing was checked" in done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["exitCode"] == USAGE
