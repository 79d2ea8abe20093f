"""A folder of counterexamples, written as soon as they are found and run first by the next soak."""

import hashlib
from pathlib import Path

from tinyllm import __version__
from tinyllm.grading import report
from tinyllm.testing.laws import LAWS, LawBroken
from tinyllm.testing.trace import VERSION


def keep(folder: Path, broken: LawBroken, *, whole: bool = True) -> Path:
    """Write the program of a broken law; `whole` says that it was shortened. Raises OSError."""
    title = f"law {broken.law}, {LAWS[broken.law][0]}: expected {broken.expected}; found {broken.found}"
    notes = [title] if whole else [title, "not shortened yet"]
    return _write(folder, f"law-{broken.law:02}", broken.trace, notes)


def keep_last(folder: Path, program: str, how: str) -> Path:
    """Write the program that a process was running when it ended. Raises OSError."""
    return _write(folder, "died", program, [f"while this ran, {how.splitlines()[0].partition(',')[0]}"])


def _write(folder: Path, kind: str, program: str, notes: list[str]) -> Path:
    notes.append(f"found by tinyllm {__version__}")
    head = "".join(f"# {' '.join(note.split())[:300]}\n" for note in notes)
    folder.mkdir(parents=True, exist_ok=True)
    # Named by its content: the same program from several machines is one file.
    path = folder / f"{kind}-{hashlib.sha256(program.encode()).hexdigest()[:10]}.trace"
    report.write(path, f"{head}trace {VERSION}\n{program}")
    return path


def known(folder: Path) -> list[Path]:
    """The traces in the folder, sorted. Raises OSError."""
    return sorted(one for one in folder.iterdir() if one.suffix == ".trace") if folder.is_dir() else []
