"""The page of a grade: what it says, in which order; nothing from elsewhere; hostile text stays text."""

import os
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tinyllm.grading import html_report
from tinyllm.grading.bugs import Bug, Edit, load_set
from tinyllm.grading.foreign import visible
from tinyllm.grading.html_report import as_html, digest
from tinyllm.grading.plant import Place, Target
from tinyllm.grading.verdict import Grade, Result, Trial
from tinyllm.grading.worker import Failure, Outcome

VOID = {"meta", "link", "br"}
Attributes = list[tuple[str, str | None]]


class Page(HTMLParser):
    """Its elements with their attributes, and its text; every element is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.within: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()
        assert self.within == []

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.within.append(tag)

    def handle_startendtag(self, tag: str, attrs: Attributes) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.within.pop() == tag
        if tag in {"dt", "dd", "li", "th", "td"}:
            self.texts.append(" ")

    def handle_data(self, data: str) -> None:
        if (tag := self.within[-1] if self.within else "") in self.raw:
            self.raw[tag].append(data)
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def values(self, *names: str) -> list[str]:
        return [value for _, one in self.elements for name, value in one.items() if name in names]


@pytest.fixture(scope="module")
def html(weak: Grade) -> str:
    return as_html(weak, command="tinyllm grade 'tests/my own' t.py", whole=True)


@pytest.fixture(scope="module")
def parsed(html: str) -> Page:
    return Page(html)


def grade_of(*statuses: str, count: int = 3, **more: bool) -> Grade:
    """A grade of another module's bugs, one a status."""
    source = "first\nsecond line\n\nthird\n"
    results = []
    for number, status in enumerate(statuses):
        bug = Bug(f"b{number}", "title", "symptom", (Edit("second line", "other"),), **more)  # type: ignore[arg-type]
        kills = [Failure("t::a", "call", "")] if status == "killed" else []
        results.append(Result(bug, [Trial(0, status, Outcome(3, kills, seconds=0.0))]))
    return Grade(Target("pkg.mod", "pkg/mod.py", source), ("tests",), count, results, [0], 1.0)


def test_the_verdict_comes_first(weak: Grade, parsed: Page) -> None:
    assert parsed.text.startswith(
        "FAIL: 2 of 8 planted bugs killed Skip to the bugs FAIL 2 of 8 planted bugs killed"
    )
    for reason in weak.reasons:
        assert reason in parsed.text
    assert "Score 25 % a pass is 80 %" in parsed.text
    assert "Exit code 4: a bug is invalid" in parsed.text
    assert Counter(tag for tag, _ in parsed.elements)["h1"] == 1


def test_every_bug_is_there_required_ones_first(weak: Grade, parsed: Page) -> None:
    shown = [one["id"].removeprefix("bug-") for one in parsed.all("details") if "id" in one]
    assert sorted(shown) == sorted(result.bug.id for result in weak.results)
    assert shown == ["s06", "s07", "w01", "x1", "x2", "x3", "x4", "s02", "s03", "order"]
    is_open = [one["id"].removeprefix("bug-") for one in parsed.all("details") if "open" in one]
    assert is_open == ["s06", "s07", "w01", "x1", "x2", "x3", "x4"]
    for result in weak.results:
        for text in (result.bug.title, result.bug.symptom):
            assert " ".join(visible(text).split()) in parsed.text


def test_what_a_survivor_says(weak: Grade, html: str, parsed: Page) -> None:
    text = parsed.text
    bug = next(result.bug for result in weak.results if result.bug.id == "s06")
    assert f"s06 survives, killed 1/2 required {bug.title}" in text
    assert f"A test that catches it {bug.caught_by[0]} {bug.caught_by[1]}" in text
    assert "See it pytest --plant s06 'tests/my own' t.py" in text
    assert "<del>-        new_refs = zip(table, [refs[block] + 1 for block in table])\n</del>" in html
    assert "<ins>+        new_refs = zip(table, [refs[block] for block in table])\n</ins>" in html
    assert bug.witness.strip() in html
    assert "x2 timeout, killed 1/2" in text
    assert "What happened no end within 3 s" in text
    assert "No kill t.py::slow: DeadlineExceeded" in text
    assert "x4 killed 2/2, yet no bug " in text
    assert "It is no bug A test objects to it all the same" in text
    assert "order as it must" in text


def test_of_many_that_killed_it_eight_are_named() -> None:
    grade = grade_of("killed")
    grade.results[0].trials[0].outcome.kills[:] = [Failure(f"t::{i}", "call", "") for i in range(10)]
    assert "t::6 t::7 and 2 more, in the table" in Page(as_html(grade)).text


def test_a_picture_where_there_is_one(weak: Grade) -> None:
    asked: list[str] = []

    def draw(bug: Bug) -> str:
        asked.append(bug.id)
        return '<svg width="100%" style="max-width: 998px"></svg>' if bug.id == "s06" else ""

    html = as_html(weak, draw=draw)
    assert asked == ["s06", "s07", "w01", "x1"], "for what needs a look, and has a witness"
    assert html.count("<figure>") == 1
    assert '<svg width="998"></svg>' in html


def test_the_kinds_of_test_can_be_told_from_elsewhere(weak: Grade) -> None:
    text = Page(as_html(weak, catchers=lambda bug: [f"a kind for {bug.id}"])).text
    assert "A test that catches it a kind for s07" in text
    assert "a kind for order" not in text, "nothing is to catch what is no bug"


def test_the_matrix(parsed: Page, html: str) -> None:
    assert "Every test ran on every bug. A number says in how many of 2 trials" in parsed.text
    assert "The tests that killed nothing are left out: 7 of 9." in parsed.text
    body = html[
        html.index('class="sortable heat"') : html.index("</table>", html.index('class="sortable heat"'))
    ]
    rows = re.findall(r'bug-(\w+)">.*?</tr>', body, re.DOTALL)
    assert rows == ["w01", "s02", "s03", "order", "s06", "s07", "x1", "x2", "x3", "x4"], "as they were graded"
    cells = dict(re.findall(r'bug-(\w+)">.*?</td>.*?</td>(.*?)</tr>', body, re.DOTALL))
    assert re.findall(r'class="shade-(\d)">(\d)(<span)?', cells["s02"]) == [
        ("2", "1", "<span"),
        ("4", "2", "<span"),
    ]
    assert re.findall(r'class="shade-(\d)">(\d)(<span)?', cells["s06"]) == [
        ("2", "1", "<span"),
        ("0", "0", ""),
    ]
    scopes = [one["scope"] for one in parsed.all("th")]
    assert Counter(scopes) == {"col": 3 + 2 + 3, "row": 10 + 5}


def test_the_first_to_kill_is_marked_apart_from_the_others(weak: Grade) -> None:
    cells = html_report._matrix(weak).rows[1][1]
    assert [(cell.kills, cell.first) for cell in cells] == [(1, 1), (2, 1)]


def test_the_bars(parsed: Page) -> None:
    shares = [one["width"] for one in parsed.all("rect")]
    assert shares == ["100.0"] * 10
    assert "s02 0.25 40" in parsed.text
    assert html_report._bars(grade_of("killed"))[0][1] == html_report.Bar(0.0, 0.0)


def test_the_short_name_of_a_test() -> None:
    assert html_report._short("a/b.py::Test::test_it[x::y]") == "it[x::y]"
    assert html_report._short("it") == "it"
    assert html_report._short("a.py::test_" + "a" * 28) == "a" * 28
    assert html_report._short("a.py::test_" + "a" * 28 + "b") == "a" * 28 + "…"
    assert html_report._short("a.py::test_" + "a" * 99 + "[one-parameter]") == "a" * 14 + "…one-parameter]"


def test_nothing_was_killed_and_nothing_survives() -> None:
    text = Page(as_html(grade_of("survived"))).text
    assert "No test killed anything." in text
    assert "Nothing was killed." in text
    assert "FAIL 0 of 1 planted bugs killed" in text
    text = Page(as_html(grade_of("killed", "killed"))).text
    assert "PASS 2 of 2 planted bugs killed" in text
    assert "Nothing: every bug is killed that must be." in text
    assert "Each run ended with its first kill" in text
    assert "Seed 0 Trials 1" in text
    assert "pytest --plant" not in text, "it plants in the reference alone"
    assert "Repeat it" not in text
    assert "there is no test to grade" in Page(as_html(grade_of("survived", count=0))).text


def test_timeouts_that_decide() -> None:
    assert "Exit code 5: timeouts decide the verdict" in Page(as_html(grade_of("killed", "timeout"))).text


def test_the_run(parsed: Page) -> None:
    text = parsed.text[parsed.text.index("This run Repeat it") :]
    assert "Repeat it tinyllm grade 'tests/my own' t.py Exit code" in text
    assert re.search(r"Seeds 3, 4 Trials 2 Python \w+ 3\.\d+.* tinyllm-paged \d.* pytest \d.* numpy \d", text)


def test_nothing_comes_from_elsewhere(html: str, parsed: Page) -> None:
    links = parsed.values("href", "src", "srcset", "action", "data", "poster", "xlink:href")
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    ids = parsed.values("id")
    assert len(ids) == len(set(ids))
    targets = {link[1:] for link in links if link.startswith("#")} | set(parsed.values("aria-labelledby"))
    assert targets <= set(ids)
    assert "url(" not in html
    assert "@import" not in html
    names = {name for _, attributes in parsed.elements for name in attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]


def test_the_policy_allows_its_own_style_and_script_alone(html: str, parsed: Page) -> None:
    style, script = ("".join(parsed.raw[name]) for name in ("style", "script"))
    assert html.count("<script") == html.count("<style") == 1
    policy = next(one["content"] for one in parsed.all("meta") if one.get("http-equiv"))
    assert policy == (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert digest("") == "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="


def test_hostile_text_stays_text(html: str, parsed: Page) -> None:
    assert html.encode("utf-8"), "no half characters"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
    assert "<script>alert('x')</script> </style> \"q\" & \\u202egnippilf\\u202c \\x1b[31mred" in parsed.text
    assert "{{ 7 * 7 }}" in parsed.text
    assert {tag for tag, _ in parsed.elements} & {"b", "img", "iframe", "object", "form"} == set()


def test_what_shows_as_nothing_is_written_out() -> None:
    assert visible("a\tb\nc é 漢 👍 ★") == "a\tb\nc é 漢 👍 ★"
    assert visible("\x1b[0m\r\u200f\u2028\ufeff\udcff") == r"\x1b[0m\r\u200f\u2028\ufeff\udcff"


def test_no_path_of_this_machine(html: str) -> None:
    assert str(Path.cwd()) not in html
    assert f"{Path.home()}{os.sep}" not in html
    assert " in tests and ~/elsewhere" in html


def test_twice_the_same(weak: Grade, html: str) -> None:
    assert as_html(weak, command="tinyllm grade 'tests/my own' t.py", whole=True) == html


@pytest.mark.parametrize("name", ["all", "course"])
def test_every_bug_of_ours_fits_on_a_page(weak: Grade, name: str) -> None:
    results = [Result(bug, [Trial(0, "survived", Outcome(1))]) for bug in load_set(name)]
    text = Page(as_html(replace(weak, results=results, seeds=[0]))).text
    for result in results:
        assert " ".join(result.bug.symptom.split()) in text


def test_the_template_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that nobody gives is an error, no gap."""
    for name in ("page.css", "page.js"):
        (tmp_path / name).write_text("")
    (tmp_path / "page.html.jinja").write_text("{{ nobody }}")
    monkeypatch.setattr(html_report, "FOLDER", tmp_path)
    with pytest.raises(Exception, match="nobody"):
        as_html(grade_of("killed"))


def test_a_learners_own_file_is_planted_by_its_name(weak: Grade) -> None:
    target = replace(weak.target, place=Place("paged.py", "/x/paged.py", "PagedKVCache"))
    assert (
        "pytest --plant s06:paged.py 'tests/my own' t.py" in Page(as_html(replace(weak, target=target))).text
    )
