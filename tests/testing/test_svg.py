"""A film as a picture: small, alone, the same each time, and read without colour."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from tinyllm.render import EXAMPLE, PANELS, frames, labels, svg

ROOT = Path(__file__).parents[2]
TITLE = "The worked example"
HOSTILE = f"""\
new 4096 16 40 1 1   # {"on and on " * 100}<script>alert("1")</script> & \x00\x1b[31m\u202e{"日本語" * 99}
add {2**63}
add -1
append {2**63} 0 700
append {2**63} 1 650
append {2**63} 3 17
fork {2**63} {10**300}
append {10**300} 39 5000
append -1 0 1 {"0000803f"} {"000080bf"}
append -1 7 1 as rank2 ! ValueError
append 77 0 1 ! KeyError
add 1.5 ! TypeError
append {2**63} 0 70000 ! OutOfBlocks
truncate {10**300} 3
{"".join(f"fork -1 {seq}{chr(10)}" for seq in range(11, 30))}append 14 7 3
close
add 0 ! ValueError
"""
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def test_the_picture_in_the_docs_is_current() -> None:
    """`tinyllm show --example --svg docs/example.svg` writes it again."""
    assert (ROOT / "docs" / "example.svg").read_text(encoding="utf-8") == svg(frames(EXAMPLE), title=TITLE)


def test_the_picture_is_the_same_in_another_process() -> None:
    code = "from tinyllm.render import *\nprint(svg(frames(EXAMPLE), title='x'), end='')"
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        assert done.stdout.decode() == svg(frames(EXAMPLE), title="x")


def test_the_picture_stands_alone() -> None:
    """No script, no style sheet, nothing fetched, no id that another picture on the page could have."""
    root = ET.fromstring(svg(frames(EXAMPLE), title="A <title> & more"))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg", "title", "desc", "rect", "path", "text",
    }  # fmt: skip
    for element in root.iter():
        assert not {"id", "class", "href", "onload"} & element.attrib.keys()
        assert "url(" not in "".join(element.attrib.values())
    assert root.attrib["role"] == "img"
    assert root.attrib["viewBox"].startswith("0 0 ")
    assert (root[0].tag, root[0].text) == (f"{SVG}title", "A <title> & more")
    assert root.attrib["aria-label"] == root[0].text
    assert root[2].attrib["fill"] == "#ffffff"  # so that a dark page does not show through


def test_the_picture_is_told_to_who_cannot_see_it() -> None:
    told = ET.fromstring(svg(frames(EXAMPLE)))[1].text or ""
    lines = told.splitlines()
    assert len(lines) == 14
    copy = "Line 9, append 1 0 1: cost 1 (1 copied); 0 of 4 blocks free. Copied: b2 to b3. Shared: b0 b1."
    assert lines[8] == copy
    assert lines[10] == "Line 11, append 0 0 1: refused with OutOfBlocks; nothing changes."


def test_no_state_is_told_by_colour_alone() -> None:
    """Under each block of the ninth panel stands who holds it; a shared one has hatching and a count."""
    root = ET.fromstring(svg(frames(EXAMPLE)))
    panel = [element for element in root if element.tag == f"{SVG}svg"][8]
    said = [element.text for element in panel.iter(f"{SVG}text")]
    assert said == [
        "9", "append 1 0 1", "b2 is copied first",
        "b0", "2×", "s0 s1", "b1", "2×", "s0 s1", "b2", "s0", "b3", "s1", "copy of b2",  # noqa: RUF001
        "s0", "b0 b1 b2", "5 long", "s1", "b0 b1 b3", "6 long",
        "cost 1 (1 copied); 0 of 4 blocks free",
    ]  # fmt: skip
    assert len(panel.findall(f"{SVG}path")) == 2
    thick = [e for e in panel.iter(f"{SVG}rect") if float(e.attrib.get("stroke-width", 1)) > 3]
    assert len(thick) == 1
    first = next(element for element in root if element.tag == f"{SVG}svg")
    dashed = [element for element in first.iter(f"{SVG}rect") if "stroke-dasharray" in element.attrib]
    assert len(dashed) == 4
    legend = texts(svg([]))
    assert [text for text in legend if text in {"free", "s0", "new", "s0 s1", "copy of b3", "freed"}] == [
        "free", "free", "s0", "s0", "new", "s0 s1", "copy of b3", "freed",
    ]  # fmt: skip


def test_a_hostile_trace_stays_small_and_inside_its_panels() -> None:
    picture = svg(frames(HOSTILE), title="\x00\ud800 title " * 99)
    assert len(picture) < 400_000
    assert "<script" not in picture
    for panel in ET.fromstring(picture).findall(f"{SVG}svg"):
        for element in panel.iter(f"{SVG}text"):
            size, at = float(element.attrib.get("font-size", 11)), float(element.attrib["x"])
            wide = labels.width(element.text or "") * size * 0.605
            start = at - wide if element.attrib.get("text-anchor") == "end" else at
            italic = 0.92 if "font-style" in element.attrib else 1  # a proportional font
            assert start >= 0
            assert start + wide * italic <= float(panel.attrib["width"]) + 1, element.text
            assert float(element.attrib["y"]) < float(panel.attrib["height"])
    said = texts(picture)
    assert "and 4,080 more blocks, 28 of them held" in said
    assert "0 in each of 40 layers" in said
    assert any(text.startswith("and ") and text.endswith(" more sequences") for text in said)


def test_a_long_trace_has_its_middle_left_out() -> None:
    text = "new 4 2 1 1 1\n" + "add 0\nfree 0\n" * 50
    picture = svg(frames(text))
    assert len(ET.fromstring(picture).findall(f"{SVG}svg")) == PANELS
    assert {"78 lines are left out,", "from line 16 to line 93"} <= set(texts(picture))
    assert "78 lines left out." in picture
    just = svg(frames("new 4 2 1 1 1\nadd 0\n" + "stats\n" * (PANELS - 2)))
    assert len(ET.fromstring(just).findall(f"{SVG}svg")) == PANELS
    assert "left out" not in just


def test_why_a_line_is_not_like_the_others() -> None:
    said = texts(svg(frames("new 0 1 1 1 1 ! ValueError\nnew 2 1 1 1 1\nclose\nadd 0 ! ValueError")))
    assert said.count("no cache") == 3
    assert said.count("✗ refused: ValueError") == 2
    film = frames(EXAMPLE)
    assert "law 8 breaks here" in texts(svg([*film[:8], film[8]._replace(law=8)]))
