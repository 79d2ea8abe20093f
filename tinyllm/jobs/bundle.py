"""The files that a unit of work carries to another machine, as an archive."""

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SETTINGS = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
"""Files that make a folder pytest's root."""
ALONG = (*SETTINGS, "conftest.py", "__init__.py")
"""Files that affect a test from a folder above it."""
LITTER = frozenset({"__pycache__", "node_modules", "site-packages"})
MADE = frozenset({"venv", "build", "dist"})
"""Generated folders of a project, unless they are packages."""
CACHES = frozenset({".git", ".hg", ".svn", ".venv", ".tox", ".nox", ".eggs", ".hypothesis", ".pytest_cache"})
CACHES |= {".mypy_cache", ".ruff_cache", ".ipynb_checkpoints"}
OURS = frozenset({"tinyllm"})
MOST = 10_000_000  # bytes: each unit carries all of them
MANY = 100_000  # files and folders to visit at most: a link may lead anywhere


class BundleError(Exception):
    """The files are too many or too large, or cannot be read."""


@dataclass(frozen=True)
class Bundle:
    """Files below a folder, packed.

    Attributes:
        root: the folder on the packing machine.
        archive: a compressed tar, names relative to `root`.
        folder: the current folder, relative to `root`.
        path: folders for the end of `sys.path`, relative to `root`.
    """

    root: Path
    archive: bytes
    folder: str
    path: tuple[str, ...] = ()

    def place(self, named: str) -> str:
        """The name of a path or node id, relative to the current folder there."""
        path, *test = named.split("::")
        full = _full(path)
        if not full.is_relative_to(self.root):
            return named
        up = Path(*[".."] * len(Path(self.folder).parts))
        return "::".join([(up / full.relative_to(self.root)).as_posix(), *test])

    def unpack(self, folder: Path) -> Path:
        """Unpack the files below `folder`; returns the folder to run in."""
        with tarfile.open(fileobj=io.BytesIO(self.archive)) as tar:
            tar.extractall(folder, filter="data")
        there = folder / self.folder
        there.mkdir(parents=True, exist_ok=True)
        return there


def of_suite(tests: Iterable[str], module: str, source: Path) -> Bundle:
    """The files of a suite, the settings and conftests above them, and the tested package.

    All Python files of the project below the settings are included, since tests may import any, and all files
    of the tests' folders but caches. A link is packed as its target; a dangling or circular link is left out.
    Everything else must be installed on the other machine.

    Raises:
        BundleError: the files are too large, or one cannot be read.
    """
    paths = [_full(test.split("::")[0]) for test in tests]
    root = _root(paths)
    files = {file for path in paths for file in _files(path, _kept)}
    above = {folder for path in paths for folder in path.parents if folder.is_relative_to(root)}
    files |= {file for folder in above for name in ALONG if (file := folder / name).is_file()}
    if any((root / name).is_file() for name in SETTINGS):
        files |= {
            file
            for file in _files(root, _importable)
            if file.suffix == ".py" and file.relative_to(root).parts[0] not in OURS
        }
    path = []
    top = _full(source)
    for _ in range(module.count(".") + (source.name == "__init__.py")):
        top = top.parent
    if top.is_relative_to(root) and module.partition(".")[0] not in OURS:
        files |= set(_files(top, _kept))
        path.append(top.parent.relative_to(root).as_posix())
    return _packed(root, files, tuple(path))


def of_file(path: Path) -> Bundle:
    """A Python file, and the Python files beside and below it."""
    folder = _full(path).parent
    return _packed(folder, {file for file in _files(folder, _importable) if file.suffix == ".py"})


def nothing() -> Bundle:
    """An empty bundle, for work that needs no files."""
    return _packed(Path.cwd(), set())


def _root(paths: list[Path]) -> Path:
    """The nearest folder above all paths with settings of pytest, or the current or common folder."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    common = next(
        one for one in (folders[0], *folders[0].parents) if all(f.is_relative_to(one) for f in folders)
    )
    here = Path.cwd().resolve()
    for folder in (common, *common.parents):
        if any((folder / name).is_file() for name in SETTINGS):
            return folder
    return here if common.is_relative_to(here) else common


def _full(path: str | Path) -> Path:
    """The absolute path with its links, as pytest has it; below the current folder, if it resolves there."""
    full, here = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100 - `absolute` leaves `..` in it
    real = full.resolve()
    return real if real.is_relative_to(here) and not full.is_relative_to(here) else full


def _kept(path: Path) -> bool:
    """Whether a path may be data of the tests: no cache and no virtual environment."""
    return path.name not in LITTER | CACHES and not (path / "pyvenv.cfg").is_file()


def _importable(path: Path) -> bool:
    """Whether a path may be or contain a module of the project."""
    made = path.name in MADE and path.is_dir() and not (path / "__init__.py").is_file()
    return _kept(path) and not made and not path.name.startswith(".")


def _files(path: Path, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """The path and all wanted files and folders below it; links are followed, but not in a circle."""
    seen = 0
    left: list[tuple[Path, tuple[Path, ...]]] = [(path, (Path(os.path.realpath(path)),))]
    # Each path comes with the resolved folders around it, and its own.
    while left:
        here, around = left.pop()
        seen += 1
        if seen > MANY:
            raise BundleError(f"below {path} are more than {MANY:,} files, too many to visit: a link?")
        if here.is_file():
            yield here
        elif here.is_dir():
            yield here
            for one in _listed(here):
                real = Path(os.path.realpath(one)) if one.is_symlink() else around[-1] / one.name
                if wanted(one) and real not in around:
                    left.append((one, (*around, real)))


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise BundleError(f"{folder} cannot be read: {error.strerror}") from error


def _packed(root: Path, files: set[Path], path: tuple[str, ...] = ()) -> Bundle:
    total = 0
    packed = io.BytesIO()
    try:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6, dereference=True) as tar:
            for file in sorted(files - {root}):
                total += file.stat().st_size if file.is_file() else 0
                if total > MOST:
                    raise BundleError(
                        f"the files below {root} are more than {MOST // 10**6} MB, too much to send"
                    )
                tar.add(file, file.relative_to(root).as_posix(), recursive=False)
    except OSError as error:
        raise BundleError(f"{error.filename} cannot be read: {error.strerror}") from error
    here = Path.cwd().resolve()
    folder = here.relative_to(root).as_posix() if here.is_relative_to(root) else "."
    return Bundle(root, packed.getvalue(), folder, path)
