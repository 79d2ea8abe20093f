"""The film of a trace: the facts of each frame, and a picture that is read without colour."""

from pathlib import Path

from tinyllm.testing.film import EXAMPLE, frames, svg

ROOT = Path(__file__).parents[2]
TITLE = "The chapter's worked example"


def test_the_picture_in_the_docs_is_current() -> None:
    """`tinyllm show --example --svg docs/example.svg` writes it again."""
    assert (ROOT / "docs" / "example.svg").read_text(encoding="utf-8") == svg(frames(EXAMPLE), title=TITLE)
