"""A frame of a film on the terminal; words repeat what colours say."""

from collections.abc import Iterator

from rich.text import Text

from tinyllm.render import Frame, labels

BLOCKS = 24  # of a pool
SEQUENCES = 8
SLOTS = 8  # of a block, each as a character; more are counted
INDENT = 4
WIDE = 60  # from here on there is room for longer names


def drawn(frame: Frame, width: int) -> Iterator[Text]:
    """The lines of a frame, folded to a width in columns."""
    room = max(width - INDENT, 20)
    yield Text.assemble((f"{frame.number:>{INDENT - 1}} ", "dim"), (labels.short(frame.line, room), "bold"))
    for line in [*_said(frame, room), *(_state(frame, room) if frame.open else [Text("no cache", "dim")])]:
        yield Text(" " * INDENT) + line


def _said(frame: Frame, room: int) -> Iterator[Text]:
    """The comment of the line, its broken law, or its refusal."""
    for line in labels.folded(frame.note, room, 3):
        yield Text(line, "italic")
    if frame.law:
        yield Text(f"law {frame.law} breaks here", "bold red")
    elif frame.error:
        yield Text(f"refused: {labels.short(frame.error, room - 9)}", "bold red")


def _state(frame: Frame, room: int) -> Iterator[Text]:
    most = BLOCKS if room >= WIDE else BLOCKS // 2
    names = 24 if room >= WIDE else 11
    yield from _rows([_cell(frame, number, names) for number in labels.chosen(frame, most)], room)
    for line in labels.folded(labels.left_out(frame, most), room, 2):
        yield Text(line, "dim")
    for seq in labels.sequences(frame, SEQUENCES):
        yield from _sequence(frame, seq, room)
    if (rest := len(frame.sequences) - SEQUENCES) > 0:
        yield Text(f"and {rest:,} more sequences", "dim")
    yield from map(Text, labels.balance(frame, room))


def _cell(frame: Frame, number: int, names: int) -> Text:
    """A block in its colour."""
    block, size = frame.blocks.get(number), frame.config.block_size
    state = labels.state(frame, number, names)
    if block is None:
        return Text(f"[b{number} {state}]", "bold" if number in frame.freed else "dim")
    slots = "#" * block.filled + "." * (size - block.filled) if size <= SLOTS else f"{block.filled}/{size}"
    count = len(block.holders)
    if count > 1 and state.startswith("s"):
        state = f"{count}x {state}"
    text = Text(f"[b{number} {slots} {state}", "yellow" if count > 1 else "cyan")
    if mark := labels.mark(block):
        text.append(" ").append(mark, "bold reverse" if block.copy_of is not None else "bold")
    return text.append("]")


def _rows(cells: list[Text], room: int) -> Iterator[Text]:
    """The cells in one row, or in as many columns as fit."""
    if sum(map(len, cells)) + len(cells) - 1 <= room:
        yield Text(" ").join(cells)
        return
    wide = max(map(len, cells))
    across = max(1, (room + 1) // (wide + 1))
    for start in range(0, len(cells), across):
        row = cells[start : start + across]
        for cell in row[:-1]:
            cell.pad_right(wide - len(cell))
        yield Text(" ").join(row)


def _sequence(frame: Frame, seq: int, room: int) -> Iterator[Text]:
    """The block table and the lengths of a sequence, side by side if they fit."""
    held = frame.sequences[seq]
    name, lens = (
        labels.sequence(seq, 22 if room >= WIDE else 12).ljust(3),
        labels.lengths(held.lens, room - 2),
    )
    ids = [f"b{block}" for block in held.table]
    table = labels.listed(ids, 24, room - len(name) - 1)
    left = room - len(name) - len(lens) - 3
    text = Text.assemble((name, "bold"), " ")
    if len(table) <= left or left >= 30:
        yield text.append("  ".join(filter(None, [labels.listed(ids, 24, left), lens])))
    else:
        yield text.append(table)
        yield Text(f"  {lens}")
