"""Write the golden traces, which any engine can replay: `python tests/golden/generate.py`."""

from pathlib import Path

from mutants.bugs import load_set
from tinyllm.testing.directed import TRACES

FOLDER = Path(__file__).parent
EXAMPLE = """\
new 4 2 1 1 2            # the chapter's section 3: blocks of two positions, a pool of four
add 0
append 0 0 1             # b0 slot 0
append 0 0 1             # b0 slot 1
append 0 0 1             # b1 slot 0
append 0 0 1             # b1 slot 1
append 0 0 1             # b2 slot 0
fork 0 1                 # allocates nothing
append 1 0 1             # b2 is copied first
append 0 0 1             # in place: the last holder
append 0 0 1 ! OutOfBlocks
free 0
append 1 0 2
free 1
"""


def golden() -> dict[str, str]:
    """File names and texts: the worked example, the directed cases, the witnesses of the bugs."""
    cases = {name.replace(",", "").replace(" ", "-"): text for name, text in TRACES.items()}
    bugs = [*load_set("course"), *load_set("wild")]  # those of the ten methods, which any engine has
    witnesses = {bug.id: f"# {bug.title}\n{bug.witness}" for bug in bugs if bug.witness}
    texts = {"worked-example": EXAMPLE, **cases, **witnesses}
    return {f"{name}.trace": text.strip() + "\n" for name, text in texts.items()}


if __name__ == "__main__":
    for path in FOLDER.glob("*.trace"):
        path.unlink()
    for name, text in golden().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
