"""A grade as one HTML page: the verdict, what survives and why it matters, and which tests kill what.

The page needs no network, and its one script sorts tables. Its Content-Security-Policy allows its own style
and script by their hashes and nothing else, so titles, test ids and diffs stay text.
"""

import base64
import hashlib
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tinyllm.exit_codes import INVALID, PASS, TIMEOUT, WEAK
from tinyllm.grading.bugs import Bug
from tinyllm.grading.foreign import visible
from tinyllm.grading.junit import repeat
from tinyllm.grading.verdict import THRESHOLD, Grade, Result

FOLDER = Path(str(files("tinyllm.grading"))) / "templates"
MEANING: dict[int, str] = {
    PASS: "pass",
    WEAK: "the tests are too weak",
    INVALID: "a bug is invalid: its run says nothing",
    TIMEOUT: "timeouts decide the verdict",
}
WORDS = {"survived": "survives", "timeout": "timeout", "invalid": "invalid"}
SHADES = 4  # of the heat map, besides none
SHORT = 28  # characters of a test's name at the head of its column


def as_html(
    grade: Grade,
    *,
    command: str = "",
    whole: bool = False,
    draw: Callable[[Bug], str] = lambda _: "",
    catchers: Callable[[Bug], Sequence[str]] = lambda bug: bug.caught_by,
) -> str:
    """The grade as a page.

    Args:
        grade: what to show.
        command: the command that repeats the run.
        whole: whether every test ran on every bug, past the first kill.
        draw: a picture of a bug's witness as an inline SVG, or "" for none.
        catchers: the kinds of test that would catch a bug, a line each.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=_finalize,
    )
    style, script = (_text(name) for name in ("page.css", "page.js"))
    alive, dead = _parts(grade)
    return environment.get_template("page.html.jinja").render(
        grade=grade,
        meaning=MEANING[grade.code],
        threshold=THRESHOLD,
        alive=alive,
        dead=dead,
        word=_word,
        colour=_colour,
        diff=lambda bug: list(_diff(grade.diff(bug))),
        plant=lambda bug: repeat(grade, bug) if grade.in_reference else "",
        local=_local,
        draw=lambda bug: _picture(draw(bug)),
        catchers=catchers,
        matrix=_matrix(grade),
        whole=whole,
        bars=_bars(grade),
        command=command,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.machine()}",
        versions={name: version(name) for name in ("tinyllm-paged", "pytest", "hypothesis", "numpy")},
        style=style,
        script=script,
        policy=(
            f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
    )


def digest(text: str) -> str:
    """The hash by which a Content-Security-Policy allows an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _text(name: str) -> Markup:
    return Markup("\n" + (FOLDER / name).read_text(encoding="utf-8"))  # noqa: S704 - a file of ours


def _parts(grade: Grade) -> tuple[list[Result], list[Result]]:
    """The results that need attention, and those that are right; required bugs first."""
    alive: list[Result] = []
    dead: list[Result] = []
    for result in sorted(grade.results, key=lambda result: (result.bug.survives, not result.bug.required)):
        (dead if result.is_right else alive).append(result)
    return alive, dead


def _colour(result: Result) -> str:
    return "good" if result.is_right else "odd" if result.status in {"timeout", "invalid"} else "bad"


def _word(result: Result) -> str:
    """The status in words, with the number of kills of several trials."""
    if result.label == "as it must":
        return result.label
    some = f" {result.kills}/{len(result.trials)}" if result.kills and len(result.trials) > 1 else ""
    if result.status == "killed" or (result.objected and result.status == "survived"):
        return f"killed{some}" + (", yet no bug" if result.bug.survives else "")
    return WORDS[result.status] + (f", killed{some}" if some else "")


def _diff(text: str) -> Iterator[tuple[str, str]]:
    """The lines of a diff: `add`, `del`, `at` for a place, or `same`; and the text."""
    kinds = {"+": "add", "-": "del", "@": "at"}
    for line in text.split("\n")[2:]:
        if line:
            yield kinds.get(line[0], "same"), line


def _local(text: str) -> str:
    """The text without the current folder and the home folder."""
    home = str(Path.home())
    return text.replace(f"{Path.cwd()}/", "").replace(home, "~" if len(home) > 1 else home)


def _picture(svg: str) -> Markup:
    """The SVG in its own size, without the style attribute that the policy forbids."""
    wide = re.sub(r'width="100%" style="max-width: (\d+)px"', r'width="\1"', svg, count=1)
    return Markup(wide)  # noqa: S704 - a picture of ours


@dataclass(frozen=True)
class Cell:
    """One bug and one test: the trials that it killed in, and those it killed in first."""

    kills: int
    first: int
    shade: int


@dataclass(frozen=True)
class Matrix:
    """Bugs by the tests that killed anything; `names` are short, in the order of `tests`."""

    tests: list[str]
    names: list[str]
    rows: list[tuple[Result, list[Cell]]]


def _matrix(grade: Grade) -> Matrix:
    tests = grade.killers
    return Matrix(
        tests,
        [_short(name) for name in tests],
        [(result, [_cell(result, test) for test in tests]) for result in grade.results],
    )


def _cell(result: Result, test: str) -> Cell:
    by = [[kill.test for kill in trial.outcome.kills] for trial in result.trials]
    kills = sum(test in names for names in by)
    first = sum(names[:1] == [test] for names in by)
    return Cell(kills, first, -(-SHADES * kills // max(len(by), 1)))


def _short(test: str) -> str:
    """The name of a test without its file and class, cut; the end of its parameters tells it apart."""
    name, bracket, parameters = test.partition("[")  # `::` may stand in these too
    short = name.rpartition("::")[2].removeprefix("test_") + bracket + parameters
    if len(short) <= SHORT:
        return short
    tail = SHORT // 2 if bracket else 0
    return f"{short[: SHORT - tail]}…{short[len(short) - tail :]}"


@dataclass(frozen=True)
class Bar:
    """A number, and its share of the largest in percent."""

    value: float
    share: float


def _bars(grade: Grade) -> list[tuple[Result, Bar, Bar]]:
    """Seconds and examples to a kill, of each bug that was killed in some trial."""
    killed = [result for result in grade.results if result.kills]
    columns = []
    for what in ("seconds", "examples"):
        values = [result.median(what) or 0.0 for result in killed]
        largest = max(values, default=0.0) or 1.0
        columns.append([Bar(value, round(100 * value / largest, 2)) for value in values])
    return list(zip(killed, *columns))
