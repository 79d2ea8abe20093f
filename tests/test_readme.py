"""What the README says is so."""

import re
import subprocess
import sys
from pathlib import Path

from tinyllm.grading import bugs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_worked_example_prints_what_it_says() -> None:
    at = next(
        i for i, (language, text) in enumerate(BLOCKS) if language == "python" and "PagedKVCache(" in text
    )
    done = subprocess.run([sys.executable, "-c", BLOCKS[at][1]], capture_output=True, text=True, check=True)
    assert done.stdout == BLOCKS[at + 1][1]


def test_the_verdict_shown_names_every_bug_of_the_course() -> None:
    shown = next(text for language, text in BLOCKS if not language and "Is the cache right?" in text)
    course = bugs.load_set("course")
    counted = [bug for bug in course if not bug.survives]
    assert re.findall(r"^(\w+) +(?:killed|survives) ", shown, re.MULTILINE) == [bug.id for bug in course]
    assert f"PASS  {len(counted)} of {len(counted)} planted bugs killed: 100%" in shown


def test_its_two_commands_set_everything_up() -> None:
    commands = [
        text for language, text in BLOCKS if language == "sh" and text.startswith("python3 -m venv .venv")
    ]
    assert len(commands) == 2
    assert commands[0].strip().endswith(".venv/bin/tinyllm check")
    # .ci/run takes the second one from here, by this pattern.
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert r"s/^\(python3 -m venv .* pytest .*\)$/\1/p" in script
    assert re.findall(r"^python3 -m venv .* pytest .*$", README, re.MULTILINE) == [commands[1].strip()]


def test_no_path_of_a_machine_is_shown() -> None:
    paths = re.findall(r"(?<![\w./:])/(?:home|root|tmp|work|Users|opt)\b\S*", README)
    assert not paths, paths
