"""Write the golden traces, which any engine can replay: `python tests/golden/generate.py`."""

from pathlib import Path

from tinyllm.grading.bugs import load_set
from tinyllm.render import EXAMPLE
from tinyllm.testing.directed import TRACES
from tinyllm.testing.trace import VERSION

FOLDER = Path(__file__).parent


def golden() -> dict[str, str]:
    """File names and texts: the worked example, the directed cases, the witnesses of the bugs."""
    cases = {name.replace(",", "").replace(" ", "-"): text for name, text in TRACES.items()}
    bugs = [*load_set("course"), *load_set("wild")]  # those of the ten methods, which any engine has
    witnesses = {bug.id: f"# {bug.title}\n{bug.witness}" for bug in bugs if bug.witness}
    texts = {"worked-example": EXAMPLE, **cases, **witnesses}
    return {f"{name}.trace": f"trace {VERSION}\n{text.strip()}\n" for name, text in texts.items()}


if __name__ == "__main__":
    for path in FOLDER.glob("*.trace"):
        path.unlink()
    for name, text in golden().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
