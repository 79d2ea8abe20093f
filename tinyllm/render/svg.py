"""A film as one SVG without script, font or id; words repeat what colours say."""

from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tinyllm.render import labels
from tinyllm.render.frames import Block, Frame
from tinyllm.testing.contract import Config

PANELS = 24
"""The most panels; a longer film shows its first 15 and last 8 lines, and a note between them."""
LAST = 8
BLOCKS = 16  # of a pool
SEQUENCES = 4
COLUMNS = 3
MARGIN, GAP, PANEL, PAD = 12, 10, 318, 12
CELL, CELL_GAP, BOX, CELL_ROW, MARK = 69, 6, 38, 58, 12
LINE, SIZE = 15, 11
TEXT_COLUMNS = 43  # in a panel
SLOTS = 8  # as squares; more are a bar

# Okabe and Ito's palette, safe for any colour vision; tints of it are behind text.
INK, GREY, PAPER = "#1a1a1a", "#595959", "#ffffff"
BLUE, PALE_BLUE, ORANGE, PALE_ORANGE, RED = "#0072b2", "#e3f1fa", "#b34700", "#fdf0dc", "#b00020"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"

MEANINGS = ("free", "one holder", "taken now", "shared", "copied now", "given back now")
LEGEND = Frame(
    number=0,
    line="",
    note="",
    error="",
    law=0,
    open=True,
    config=Config(len(MEANINGS), 2, 1, 1, 1),
    blocks={
        1: Block((0,), 2),
        2: Block((0,), 1, new=True),
        3: Block((0, 1), 2),
        4: Block((1,), 2, copy_of=3),
    },
    sequences={},
    named=(),
    freed=(5,),
)
"""One block for each meaning."""


class _Panel(NamedTuple):
    drawing: ET.Element
    height: float


def svg(frames: Iterable[Frame], *, title: str = "") -> str:
    """The frames as a film strip, one panel a line, as an SVG for a file or inside a page."""
    reel = list(frames)
    title = labels.short(title or "A trace of a paged KV cache", 100)
    shown, skipped = reel, 0
    if len(reel) > PANELS:
        skipped = len(reel) - (PANELS - 1)
        shown = [*reel[: PANELS - 1 - LAST], *reel[-LAST:]]
    panels = [_panel(frame) for frame in shown]
    if skipped:
        panels.insert(PANELS - 1 - LAST, _skipped(reel[PANELS - 1 - LAST], reel[-LAST - 1], skipped))
    columns = max(1, min(COLUMNS, len(panels)))
    wide = 2 * MARGIN + columns * PANEL + (columns - 1) * GAP

    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": title})
    root.attrib.update({"font-family": MONO, "font-size": str(SIZE), "fill": INK})
    _add(root, "title", title)
    _add(
        root,
        "desc",
        "\n".join([*map(labels.sentence, shown), *([f"{skipped:,} lines left out."] if skipped else [])]),
    )
    paper = _add(root, "rect", x=0, y=0, width="100%", height="100%", fill=PAPER)
    y: float = MARGIN
    _text(root, MARGIN, y + 14, title, size=15, font_weight="bold", font_family=SANS)
    y += 26
    for row in range(0, len(panels), columns):
        line = panels[row : row + columns]
        tall = max(panel.height for panel in line)
        for column, panel in enumerate(line):
            x = MARGIN + column * (PANEL + GAP)
            panel.drawing.attrib.update(
                {"x": str(x), "y": f"{y:g}", "width": str(PANEL), "height": f"{tall:g}"}
            )
            panel.drawing[0].attrib["height"] = f"{tall - 2:g}"
            root.append(panel.drawing)
        y += tall + GAP
    y = _legend(root, y, wide)
    paper.attrib.update({"width": str(wide), "height": f"{y:g}"})
    root.attrib.update({"viewBox": f"0 0 {wide} {y:g}", "width": "100%", "style": f"max-width: {wide}px"})
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


def _add(parent: ET.Element, tag: str, text: str = "", /, **attributes: object) -> ET.Element:
    given = {
        name.replace("_", "-"): f"{v:g}" if isinstance(v, float) else str(v) for name, v in attributes.items()
    }
    element = ET.SubElement(parent, tag, given)
    element.text = text or None
    return element


def _text(parent: ET.Element, x: float, y: float, text: str, *, size: float = SIZE, **more: object) -> None:
    given: dict[str, object] = {} if size == SIZE else {"font_size": size}
    _add(parent, "text", text, x=x, y=y, **(given | more))


def _panel(frame: Frame) -> _Panel:
    panel = ET.Element("svg")
    stopped = bool(frame.law or frame.error)
    _add(
        panel, "rect", x=1, y=1, width=PANEL - 2, height=0, rx=5, fill=PAPER,
        stroke=RED if stopped else "#8c8c8c", stroke_width=2 if stopped else 1,
    )  # fmt: skip
    number = str(frame.number)
    _text(panel, PAD, 20, number, size=12, fill=GREY)
    x = PAD + 7.3 * (len(number) + 1)
    room = int((PANEL - PAD - x) / 7.3)
    _text(panel, x, 20, labels.short(frame.line, room), size=12, font_weight="bold")
    y: float = 20
    for note in labels.folded(frame.note, 48, 2):
        y += LINE
        _text(panel, PAD, y, note, font_family=SANS, font_style="italic", fill=GREY)
    if stopped:
        y += LINE
        said = f"law {frame.law} breaks here" if frame.law else f"✗ refused: {frame.error}"
        _text(panel, PAD, y, labels.short(said, TEXT_COLUMNS), fill=RED, font_weight="bold")
    y += 10
    if not frame.open:
        _text(panel, PAD, y + 10, "no cache", fill=GREY)
        return _Panel(panel, y + 22)
    y = _tables(panel, frame, _pool(panel, frame, y))
    for said in labels.balance(frame, TEXT_COLUMNS):
        y += LINE
        _text(panel, PAD, y, labels.short(said, TEXT_COLUMNS))
    return _Panel(panel, y + 11)


def _skipped(first: Frame, last: Frame, count: int) -> _Panel:
    panel = ET.Element("svg")
    _add(
        panel,
        "rect",
        x=1,
        y=1,
        width=PANEL - 2,
        height=0,
        rx=5,
        fill=PAPER,
        stroke="#8c8c8c",
        stroke_dasharray="6 4",
    )
    _text(panel, PAD, 20, "...", size=12, font_weight="bold")
    _text(panel, PAD, 40, f"{count:,} lines are left out,")
    _text(panel, PAD, 40 + LINE, f"from line {first.number:,} to line {last.number:,}")
    return _Panel(panel, 70)


def _pool(panel: ET.Element, frame: Frame, y: float) -> float:
    drawn = labels.chosen(frame, BLOCKS)
    across = (PANEL - 2 * PAD + CELL_GAP) // (CELL + CELL_GAP)
    for start in range(0, len(drawn), across):
        row = drawn[start : start + across]
        for column, number in enumerate(row):
            _cell(panel, PAD + column * (CELL + CELL_GAP), y, frame, number)
        y += CELL_ROW + MARK * any(labels.mark(frame.blocks.get(number)) for number in row)
    if more := labels.left_out(frame, BLOCKS):
        y += 10
        _text(panel, PAD, y, labels.short(more, TEXT_COLUMNS), fill=GREY)
        y += 4
    return y


def _cell(panel: ET.Element, x: float, y: float, frame: Frame, number: int) -> None:
    """Draw a block; its outline and the words under it give its state."""
    block = frame.blocks.get(number)
    holders, filled = (len(block.holders), block.filled) if block else (0, 0)
    shared = holders > 1
    look: dict[str, object] = {"fill": PALE_BLUE, "stroke": INK, "stroke_width": 1}
    if block is None:
        look = {"fill": PAPER, "stroke": GREY, "stroke_dasharray": "4 3"}
    elif shared:
        look["fill"] = PALE_ORANGE
    if block and block.copy_of is not None:
        look["stroke_width"] = 3.5
    _add(panel, "rect", x=x, y=y, width=CELL, height=BOX, rx=3, **look)
    if shared:
        lines = [f"M{x + at:g} {y + BOX - 3:g}l14 -14" for at in range(4, CELL - 14, 6)]
        _add(panel, "path", d="".join(lines), stroke=ORANGE, fill="none")
        _add(panel, "rect", x=x + 3, y=y + 3, width=CELL - 6, height=BOX - 6, rx=1, fill="none", stroke=INK)
    _text(panel, x + 6, y + 14, labels.short(f"b{number}", 7), size=10.5, font_weight="bold")
    if shared:
        count = f"{holders:,}\u00d7"
        _text(panel, x + CELL - 6, y + 14, count, size=10.5, text_anchor="end", font_weight="bold")
    ink = ORANGE if shared else BLUE if block else GREY
    _slots(panel, x + 6, y + BOX - 18, frame.config.block_size, filled, ink)
    said, weight = labels.state(frame, number, 11), "bold" if number in frame.freed else "normal"
    _text(
        panel,
        x + 1,
        y + BOX + MARK,
        said,
        size=10,
        fill=INK if block or weight == "bold" else GREY,
        font_weight=weight,
    )
    if mark := labels.mark(block):
        _text(panel, x + 1, y + BOX + 2 * MARK, labels.short(mark, 12), size=10, font_weight="bold")


def _slots(panel: ET.Element, x: float, y: float, size: int, filled: int, ink: str) -> None:
    """Draw the slots of a block, filled ones dark; more than `SLOTS` are a bar."""
    room = CELL - 12
    if size > SLOTS:
        _add(panel, "rect", x=x, y=y, width=room, height=11, fill=PAPER, stroke=ink)
        if filled:
            _add(panel, "rect", x=x, y=y, width=room * filled / size, height=11, fill=ink)
        return
    wide = min(13, room / size - 2)
    for slot in range(size):
        fill = ink if slot < filled else PAPER
        _add(panel, "rect", x=x + slot * (wide + 2), y=y, width=wide, height=11, fill=fill, stroke=ink)


def _tables(panel: ET.Element, frame: Frame, y: float) -> float:
    for seq in labels.sequences(frame, SEQUENCES):
        held = frame.sequences[seq]
        name, lens = labels.sequence(seq, 22), labels.lengths(held.lens, TEXT_COLUMNS - 2)
        room = TEXT_COLUMNS - max(len(name), 3) - 1
        beside = len(lens) <= room // 2
        table = labels.listed(
            [f"b{block}" for block in held.table], 12, room - (len(lens) + 1 if beside else 0)
        )
        y += LINE
        _text(panel, PAD, y, name, font_weight="bold")
        _text(panel, PAD + 6.7 * (max(len(name), 3) + 1), y, table)
        if beside:
            _text(panel, PANEL - PAD, y, lens, text_anchor="end")
        else:
            y += LINE
            _text(panel, PAD + 6.7 * 2, y, labels.short(lens, TEXT_COLUMNS - 2))
    if (more := len(frame.sequences) - SEQUENCES) > 0:
        y += LINE
        _text(panel, PAD, y, f"and {more:,} more sequences", fill=GREY)
    return y + (4 if frame.sequences else -4)


def _legend(root: ET.Element, y: float, wide: float) -> float:
    """Draw a block of each state with its name."""
    room = 158
    across = max(1, int((wide - 2 * MARGIN) // room))
    for number, meaning in enumerate(MEANINGS):
        row, column = divmod(number, across)
        x, top = MARGIN + column * room, y + 4 + row * (CELL_ROW + MARK)
        _cell(root, x, top, LEGEND, number)
        _text(root, x + CELL + 8, top + BOX / 2 + 4, meaning, font_family=SANS)
    return y + 4 + -(-len(MEANINGS) // across) * (CELL_ROW + MARK) + MARGIN / 2
