"""A broken law, told on one screen: the law, expected and found, the program, the tables drawn."""

from tinyllm.testing.laws import LAWS, LawBroken, View, sharing
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.subject import Subject

LINES = 40  # of a program; more do not fit on a screen, and `LawBroken.trace` has them all
BLOCKS = 8  # of a table
SEQUENCES = 8  # likewise


def tell(broken: LawBroken, trace: str, subject: Subject, oracle: Oracle, view: View) -> str:
    """The story of `broken`, which the program `trace` shows; `view` is what the cache showed last."""
    title, text = LAWS[broken.law]
    program = trace.splitlines()
    if len(program) > LINES:
        program = [f"# ... {len(program) - LINES} lines, all of them in .trace", *program[-LINES:]]
    return "\n".join(
        [
            f"law {broken.law}, {title}: {text}",
            "",
            f"  expected  {broken.expected}",
            f"  found     {broken.found}",
            "",
            "The program; its last line is where the law breaks:",
            "",
            *(f"  {line}" for line in subject.imports),
            "",
            f'  replay({subject.name}, """',
            *(f"  {line}" for line in program),
            '  """)',
            "",
            *_drawn(oracle, view),
        ]
    )


def _drawn(oracle: Oracle, view: View) -> list[str]:
    size = oracle.config.block_size
    held_by = sharing(view.tables)
    lines = [
        f"The block tables as last seen (B = {size}; # a filled slot, . an empty one, * a shared block):",
        "",
    ]
    if view.lens and not view.tables:
        lines = ["The lengths of the layers as last seen:", ""]
    for seq, lens in list(view.lens.items())[:SEQUENCES]:
        table = view.tables.get(seq, [])
        shown = range(min(len(table), BLOCKS))
        marks = [f"b{table[i]}{'*' if len(held_by[seq, i]) > 1 else ''}" for i in shown]
        width = max([size + 2, *map(len, marks)]) + 1
        more = f"... {len(table) - BLOCKS} more" if len(table) > BLOCKS else ""
        lines.append(
            (f"  {f'sequence {seq}':13}" + "".join(f"{mark:{width}}" for mark in marks) + more).rstrip()
        )
        for layer, length in enumerate(lens):
            cells = [min(max(length - i * size, 0), size) for i in shown]
            drawn = "".join(f"{'[' + '#' * n + '.' * (size - n) + ']':{width}}" for n in cells)
            lines.append(f"  {f'  layer {layer}':13}{drawn}{length} long".rstrip())
    if len(view.lens) > SEQUENCES:
        lines.append(f"  ... {len(view.lens) - SEQUENCES} more sequences")
    free = [f"  {view.stats['free']} of {oracle.config.num_blocks} blocks free"] if view.stats else []
    return [*lines, *free]
