"""The short texts of a film, for the terminal and the SVG."""

import unicodedata
from collections.abc import Sequence
from itertools import groupby, islice

from tinyllm.render.frames import Block, Frame

FEW = 6  # layers whose lengths are listed one by one


def width(text: str) -> int:
    """Columns of a text in a fixed font."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def short(text: str, most: int) -> str:
    """A text in at most `most` columns, cut in its middle; unprintable characters become `?`."""
    text = "".join(char if char.isprintable() and not unicodedata.combining(char) else "?" for char in text)
    if width(text) <= most:
        return text
    head, tail = "", ""
    for char in text:
        if width(head + char) > (most - 3) - (most - 3) // 3:
            break
        head += char
    for char in reversed(text):
        if width(tail + char) > (most - 3) // 3:
            break
        tail = char + tail
    return f"{head}...{tail}"


def folded(text: str, most: int, rows: int) -> list[str]:
    """A text in at most `rows` rows of `most` columns, folded at spaces if possible."""
    lines = [""]
    for word in short(text, most * rows).split():
        if lines[-1] and width(lines[-1]) + 1 + width(word) <= most:
            lines[-1] += f" {word}"
            continue
        if lines[-1]:
            lines.append("")
        for char in word:
            if width(lines[-1] + char) > most:
                lines.append("")
            lines[-1] += char
    if len(lines) > rows:
        lines = [*lines[: rows - 1], short(" ".join(lines[rows - 1 :]), most)]
    return lines if lines[0] else []


def listed(words: Sequence[str], most: int, room: int) -> str:
    """The first words, at most `most` of them in `room` columns, and the number of the rest."""
    for shown in range(min(len(words), most), 0, -1):
        rest = len(words) - shown
        text = " ".join(words[:shown]) + (f" +{rest:,}" if rest else "")
        if len(text) <= room:
            return text
    return f"{len(words):,} of them" if words else ""


def sequence(seq: int, most: int = 9) -> str:
    """The name of a sequence: s0."""
    return short(f"s{seq}", most)


def cost(frame: Frame) -> str:
    """The cost of a line, and its freed blocks: `cost 1 (1 copied)`."""
    parts = [f"{count:,} {word}" for count, word in ((frame.taken, "new"), (frame.copied, "copied")) if count]
    text = f"cost {frame.taken + frame.copied:,}" + (f" ({', '.join(parts)})" if parts else "")
    return text + (f", {len(frame.freed):,} freed" if frame.freed else "")


def pool(frame: Frame) -> str:
    """The free blocks: `1 of 4 blocks free`."""
    return f"{frame.free:,} of {frame.config.num_blocks:,} blocks free"


def balance(frame: Frame, room: int) -> list[str]:
    """The cost and the free blocks, on one line if they fit."""
    both = [cost(frame), pool(frame)]
    return ["; ".join(both)] if len("; ".join(both)) <= room else both


def state(frame: Frame, number: int, room: int) -> str:
    """The holders of a block: `free`, `freed` by this line, `s0`, `s0 s1`, or `256 holders`."""
    block = frame.blocks.get(number)
    if block is None:
        return "freed" if number in frame.freed else "free"
    names = " ".join(sequence(seq) for seq in block.holders[:room])
    return names if len(names) <= room else f"{len(block.holders):,} holders"


def mark(block: Block | None) -> str:
    """The reason why the line took a block: `copy of b2`, `new`, or empty."""
    if block is None:
        return ""
    if block.copy_of is not None:
        return f"copy of b{block.copy_of}"
    return "new" if block.new else ""


def lengths(lens: tuple[int, ...], room: int) -> str:
    """The lengths of the layers: `5 long`, `lens 5 5 4`, `5 in each of 40 layers`, `layers 0-38: 5, 39: 4`.

    If that does not fit: `4 to 5 in 40 layers`.
    """
    if len(lens) == 1:
        return f"{lens[0]:,} long"
    if len(set(lens)) == 1 and len(lens) > FEW:
        return f"{lens[0]:,} in each of {len(lens):,} layers"
    runs, start = [], 0
    for length, group in groupby(lens):
        count = len(list(group))
        runs.append(f"{start}{f'-{start + count - 1}' if count > 1 else ''}: {length:,}")
        start += count
    text = f"lens {' '.join(map(str, lens))}" if len(lens) <= FEW else f"layers {', '.join(runs)}"
    return text if len(text) <= room else f"{min(lens):,} to {max(lens):,} in {len(lens):,} layers"


def sequences(frame: Frame, most: int) -> list[int]:
    """The sequences to draw, in order; those that the line names come first in the choice."""
    first = sorted(frame.sequences, key=lambda seq: seq not in frame.named)[:most]
    return [seq for seq in frame.sequences if seq in first]


def chosen(frame: Frame, most: int) -> list[int]:
    """The blocks to draw: all, or first the changed ones, then held ones, then free ones."""
    total = frame.config.num_blocks
    if total <= most:
        return list(range(total))
    changed = [number for number, block in frame.blocks.items() if block.new or block.copy_of is not None]
    first = dict.fromkeys([*changed, *frame.freed][:most])
    first.update(dict.fromkeys(islice((b for b in frame.blocks if b not in first), most - len(first))))
    free = (b for b in range(total) if b not in frame.blocks and b not in first)
    first.update(dict.fromkeys(islice(free, most - len(first))))
    return sorted(first)


def left_out(frame: Frame, most: int) -> str:
    """The blocks not drawn: `and 4,080 more blocks, 80 of them held`; empty if there are none."""
    drawn = chosen(frame, most)
    more = frame.config.num_blocks - len(drawn)
    held = len(frame.blocks) - sum(number in frame.blocks for number in drawn)
    return f"and {more:,} more blocks, {held:,} of them held" if more else ""


def sentence(frame: Frame) -> str:
    """A frame as a sentence, for readers who cannot see the picture."""
    text = f"Line {frame.number}, {short(frame.line, 60)}: "
    if frame.law:
        return text + f"law {frame.law} breaks here."
    if frame.error:
        return text + f"refused with {short(frame.error, 40)}; nothing changes."
    if not frame.open:
        return text + "the cache is closed."
    copies = [f"b{b.copy_of} to b{n}" for n, b in frame.blocks.items() if b.copy_of is not None]
    copied = f" Copied: {listed(copies, 4, 80)}." if copies else ""
    shared = [f"b{n}" for n, b in frame.blocks.items() if len(b.holders) > 1]
    return (
        text
        + f"{cost(frame)}; {pool(frame)}.{copied}"
        + (f" Shared: {listed(shared, 8, 80)}." if shared else "")
    )
