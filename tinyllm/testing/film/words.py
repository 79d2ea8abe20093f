"""The short texts of a film, the same on the screen and in the picture."""

import unicodedata
from collections.abc import Iterable
from itertools import groupby, islice

from tinyllm.testing.film.record import Block, Frame


def width(text: str) -> int:
    """Columns of a text in a fixed font."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def short(text: str, most: int) -> str:
    """A text in at most so many columns, its middle left out if need be; what cannot be printed is a `?`."""
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


def listed(words: Iterable[str], most: int, room: int) -> str:
    """Words in at most `room` columns; what is left out of `most` is counted."""
    words = list(words)
    for shown in range(len(words), 0, -1):
        rest = len(words) - shown
        text = " ".join(words[:shown]) + (f" +{rest:,}" if rest else "")
        if shown <= most and len(text) <= room:
            return text
    return f"{len(words):,} of them" if words else ""


def sequence(seq: int, most: int = 9) -> str:
    """The name of a sequence: s0."""
    return short(f"s{seq}", most)


def cost(frame: Frame) -> str:
    """What a line took and gave back: `cost 1 (1 copied)`."""
    parts = [f"{count:,} {word}" for count, word in ((frame.taken, "new"), (frame.copied, "copied")) if count]
    text = f"cost {frame.taken + frame.copied:,}" + (f" ({', '.join(parts)})" if parts else "")
    return text + (f", {len(frame.freed):,} freed" if frame.freed else "")


def pool(frame: Frame) -> str:
    """How much is free: `1 of 4 blocks free`."""
    return f"{frame.free:,} of {frame.config.num_blocks:,} blocks free"


def state(block: Block | None, room: int) -> str:
    """Who holds a block: `free`, `s0`, `s0 s1`, or `256 holders`."""
    if block is None:
        return "free"
    names = " ".join(sequence(seq) for seq in block.holders[:room])
    return names if len(names) <= room else f"{len(block.holders):,} holders"


def mark(frame: Frame, number: int) -> str:
    """What the line did to a block: `copy of b2`, `new`, `freed`, or nothing."""
    block = frame.blocks.get(number)
    if block is None:
        return "freed" if number in frame.freed else ""
    if block.copy_of is not None:
        return f"copy of b{block.copy_of}"
    return "new" if block.new else ""


def lengths(lens: Iterable[int]) -> str:
    """The lengths of the layers: `5 long`, `5 in each of 40 layers`, `layers 0-38: 5, 39: 4`."""
    lens = tuple(lens)
    if len(lens) == 1:
        return f"{lens[0]:,} long"
    if len(set(lens)) == 1:
        return f"{lens[0]:,} in each of {len(lens):,} layers"
    runs, start = [], 0
    for length, group in groupby(lens):
        count = len(list(group))
        runs.append(f"{start}{f'-{start + count - 1}' if count > 1 else ''}: {length:,}")
        start += count
    return f"layers {', '.join(runs)}"


def chosen(frame: Frame, most: int) -> list[int]:
    """The blocks to be drawn: all, or first those that the line changed, then those held, then free ones."""
    total = frame.config.num_blocks
    if total <= most:
        return list(range(total))
    changed = [number for number, block in frame.blocks.items() if block.new or block.copy_of is not None]
    first = dict.fromkeys([*changed, *frame.freed][:most])
    first.update(dict.fromkeys(islice((b for b in frame.blocks if b not in first), most - len(first))))
    free = (b for b in range(total) if b not in frame.blocks and b not in first)
    first.update(dict.fromkeys(islice(free, most - len(first))))
    return sorted(first)


def left_out(frame: Frame, drawn: list[int]) -> str:
    """What is not drawn of the pool: `and 4,080 more blocks, 80 held`; nothing when all is."""
    more = frame.config.num_blocks - len(drawn)
    held = len(frame.blocks) - sum(number in frame.blocks for number in drawn)
    return f"and {more:,} more blocks, {held:,} of them held" if more else ""


def told(frame: Frame) -> str:
    """A frame in a sentence, for who cannot see the picture."""
    text = f"Line {frame.number}, {short(frame.line, 60)}: "
    if frame.law:
        return text + f"law {frame.law} breaks here."
    if frame.error:
        return text + f"refused with {short(frame.error, 40)}; nothing changes."
    if not frame.open:
        return text + "there is no cache any more."
    copies = [f"b{b.copy_of} to b{n}" for n, b in frame.blocks.items() if b.copy_of is not None]
    copied = f" Copied: {listed(copies, 4, 80)}." if copies else ""
    shared = [f"b{n}" for n, b in frame.blocks.items() if len(b.holders) > 1]
    return (
        text
        + f"{cost(frame)}; {pool(frame)}.{copied}"
        + (f" Shared: {listed(shared, 8, 80)}." if shared else "")
    )
