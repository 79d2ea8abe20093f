"""Anyone's bugs in anyone's module: `tinyllm grade --bugs FILE --module NAME PATH`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PASS, WEAK, USAGE, BASELINE, INVALID, TIMEOUT = range(6)

STACK = """
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)
"""
BUGS = """
[[bug]]
id = "queue"
title = "the first comes out first"
symptom = "it is a queue"
required = true
edits = [{find = "self.items.pop()", replace = "self.items.pop(0)"}]

[[bug]]
id = "keeps"
title = "what comes out stays in"
symptom = "it never shrinks"
edits = [{find = "self.items.pop()", replace = "self.items[-1]"}]

[[bug]]
id = "length"
title = "the length is one too many"
symptom = "an empty one has an item"
edits = [{find = "return len(self.items)", replace = "return len(self.items) + 1"}]

[[bug]]
id = "deque"
title = "it holds a list of another kind"
symptom = "none"
survives = true
edits = [{find = "self.items = []", replace = "self.items = list()"}]
"""
TESTS = """
from NAME import Stack

def test_order():
    stack = Stack()
    stack.push(1)
    stack.push(2)
    assert [stack.pop(), stack.pop()] == [2, 1]
    assert len(stack) == 0
"""
Write = Callable[..., Path]
Invoke = Callable[..., Any]

LAYOUTS = {
    "flat": ("stack", {"stack.py": STACK}),
    "a package": ("pkg.mod", {"pkg/__init__.py": "", "pkg/mod.py": STACK}),
    "a package itself": ("pkg", {"pkg/__init__.py": STACK}),
    "src": (
        "pkg.mod",
        {"src/pkg/__init__.py": "", "src/pkg/mod.py": STACK, "pytest.ini": "[pytest]\npythonpath = src\n"},
    ),
    "tests beside it, in importlib mode": (
        "pkg.mod",
        {
            "pkg/__init__.py": "from .mod import Stack",
            "pkg/mod.py": STACK,
            "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        },
    ),
}


@pytest.fixture
def project(suite: Write) -> Callable[..., Path]:
    """Writes a project with bugs and tests."""

    def write(name: str, files: dict[str, str], tests: str = TESTS) -> Path:
        own = {"bugs.toml": BUGS, "tests/test_stack.py": tests.replace("NAME", name)}
        return suite({**files, **own}, "project")

    return write


@pytest.mark.parametrize(("name", "files"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_module_of_ones_own(
    project: Callable[..., Path], invoke: Invoke, name: str, files: dict[str, str]
) -> None:
    root = project(name, files)
    chosen = [] if name == "stack" else ["--bug", "queue"]
    options = ("--bugs", "bugs.toml", "--module", name, "--json", "out.json", *chosen)
    done = invoke("grade", "tests", *options, cwd=root)
    assert done.exit_code == PASS, done.output
    assert f"{1 if chosen else 3} of {1 if chosen else 3} planted bugs killed: 100%" in done.stdout
    (file,) = json.loads((root / "out.json").read_text(encoding="utf-8"))["files"].items()
    assert file[0] == next(path for path in files if files[path] == STACK)
    killed = {"queue": "Killed"} if chosen else dict.fromkeys(("queue", "keeps", "length"), "Killed")
    found = {mutant["id"]: mutant["status"] for mutant in file[1]["mutants"]}
    assert found == killed | ({} if chosen else {"deque": "Ignored"})


def test_from_another_folder(project: Callable[..., Path], invoke: Invoke) -> None:
    root = project(*LAYOUTS["flat"])
    done = invoke("grade", "--bugs", root / "bugs.toml", "--module", "stack", root / "tests")
    assert done.exit_code == USAGE
    assert "there is no module 'stack'" in done.stderr


@pytest.mark.long
def test_a_module_of_the_path(project: Callable[..., Path], tinyllm: Invoke) -> None:
    root = project(*LAYOUTS["flat"])
    options = ("grade", "--bugs", root / "bugs.toml", "--module", "stack", root / "tests", "--bug", "queue")
    assert tinyllm(*options, PYTHONPATH=str(root)).returncode == PASS


def test_a_weak_suite(project: Callable[..., Path], invoke: Invoke) -> None:
    tests = "from NAME import Stack\ndef test(): assert len(Stack()) == 0"
    root = project(*LAYOUTS["flat"], tests)
    done = invoke("grade", "--bugs", "bugs.toml", "--module", "stack", "tests", cwd=root)
    assert done.exit_code == WEAK
    assert "queue SURVIVES" in done.stdout
    assert "a user would see: it is a queue" in done.stdout
    assert "pytest --plant" not in done.stdout  # which knows our own bugs alone
    assert "+        return self.items.pop(0)" in done.stdout
    assert "queue is required, and survives" in done.stdout


def test_one_that_must_survive_and_does_not(project: Callable[..., Path], invoke: Invoke) -> None:
    """The tests ask for more than the contract says: no pass, whatever else they kill."""
    tests = TESTS + "\nimport inspect\ndef test_text(): assert '[]' in inspect.getsource(Stack.__init__)"
    root = project(*LAYOUTS["flat"], tests)
    done = invoke("grade", "--bugs", "bugs.toml", "--module", "stack", "tests", cwd=root)
    assert done.exit_code == WEAK
    assert "deque is no bug, yet tests/test_stack.py::test_text objects" in done.stdout
    assert "\ndeque   KILLED" in done.stdout
    assert "FAIL  3 of 3 planted bugs killed: 100%" in done.stdout
    assert "      deque is no bug, and is killed\n" in done.stdout


def test_a_bug_that_does_not_apply_and_nothing_is_run(project: Callable[..., Path], invoke: Invoke) -> None:
    tests = "open('ran', 'w').close()\n" + TESTS
    root = project("stack", {"stack.py": STACK.replace("pop()", "pop( )")}, tests)
    done = invoke("grade", "--bugs", "bugs.toml", "--module", "stack", "tests", cwd=root)
    assert (done.exit_code, done.stdout) == (INVALID, "")
    assert "no verdict: a bug does not apply to stack" in done.stderr
    assert "queue: this text stands 0 times in the source:\nself.items.pop()" in done.stderr
    assert not (root / "ran").exists()


def test_tests_that_change_the_module_are_refused(project: Callable[..., Path], invoke: Invoke) -> None:
    """The file is left as the tests left it: whoever wrote them runs them elsewhere, too."""
    tests = TESTS + "\ndef test_edit():\n    with open('stack.py', 'a') as file: file.write('#')"
    root = project(*LAYOUTS["flat"], tests)
    done = invoke("grade", "--bugs", "bugs.toml", "--module", "stack", "tests", cwd=root)
    assert done.exit_code == BASELINE
    assert f"were not restored: {root / 'stack.py'}" in done.stderr


def test_the_module_is_not_written_to(project: Callable[..., Path], invoke: Invoke) -> None:
    root = project(*LAYOUTS["a package"])

    def texts() -> dict[Path, bytes]:
        return {
            path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"
        }

    before = texts()
    invoke("grade", "--bugs", "bugs.toml", "--module", "pkg.mod", "tests", "--bug", "queue", cwd=root)
    assert texts() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bugs", "bugs.toml"], "--bugs FILE and --module NAME go together"),
        (["--module", "stack"], "--bugs FILE and --module NAME go together"),
        (["--bugs", "none.toml", "--module", "stack"], "none.toml cannot be read: No such file"),
        (["--bugs", "stack.py", "--module", "stack"], "stack.py is not TOML"),
        (["--bugs", "bugs.toml", "--module", "no.such"], "there is no module 'no.such'"),
        (["--bugs", "bugs.toml", "--module", "sys"], "sys has no Python source"),
        (
            ["--bugs", "bugs.toml", "--module", "stack", "--bug", "s06"],
            "there is no bug s06 in bugs.toml; expected one of queue, keeps, length, deque",
        ),
    ],
)
def test_options_that_name_nothing(
    project: Callable[..., Path], invoke: Invoke, options: list[str], words: str
) -> None:
    root = project(*LAYOUTS["flat"])
    done = invoke("grade", "tests", *options, cwd=root)
    assert (done.exit_code, done.stdout) == (USAGE, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
