"""What a unit of work takes along to another machine: an archive of files, unpacked into a folder there."""

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
"""What makes a folder the root of a suite, for pytest."""
ALONG = (*SETTINGS, "conftest.py", "__init__.py")
"""What counts for a test although it lies in a folder above."""
LITTER = frozenset({"__pycache__", "node_modules", "site-packages"})
MADE = frozenset({"venv", "build", "dist"})
"""Folders of a project that somebody made, unless they are packages."""
CACHES = frozenset({".git", ".hg", ".svn", ".venv", ".tox", ".nox", ".eggs", ".hypothesis", ".pytest_cache"})
CACHES |= {".mypy_cache", ".ruff_cache", ".ipynb_checkpoints"}
OURS = frozenset({"tinyllm"})
MOST = 10_000_000  # bytes: each unit carries all of them
MANY = 100_000  # files and folders that are looked at: a link may lead anywhere


class BundleError(Exception):
    """The files cannot be taken along: they are too many, or cannot be read."""


@dataclass(frozen=True)
class Bundle:
    """Files below a folder, packed.

    Attributes:
        root: the folder, on the machine where they were packed.
        archive: a compressed tar, names relative to `root`.
        folder: the current folder, relative to `root`.
        path: folders for the end of `sys.path`, relative to `root`.
    """

    root: Path
    archive: bytes
    folder: str
    path: tuple[str, ...] = ()

    def place(self, named: str) -> str:
        """How a path, or the node id of a test, is named from the current folder there."""
        path, *test = named.split("::")
        full = _full(path)
        if not full.is_relative_to(self.root):
            return named
        up = Path(*[".."] * len(Path(self.folder).parts))
        return "::".join([(up / full.relative_to(self.root)).as_posix(), *test])

    def unpack(self, folder: Path) -> Path:
        """Write the files below `folder`; the folder to be in."""
        with tarfile.open(fileobj=io.BytesIO(self.archive)) as tar:
            tar.extractall(folder, filter="data")
        there = folder / self.folder
        there.mkdir(parents=True, exist_ok=True)
        return there


def of_suite(tests: Iterable[str], module: str, source: Path) -> Bundle:
    """What a suite needs: its files, the settings and conftests above them, and the package that is tested.

    All Python files of the project, below the settings, come along, for tests and conftests may import any;
    of the tests' own folders, all but caches. A link comes as what it points to; one that points to nothing,
    or to a folder that it lies in, stays behind. What lies elsewhere has to be installed there too.

    Raises:
        BundleError: too large, or a file that cannot be read.
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
    """A Python file, and the Python files beside and below it, which it may import."""
    folder = _full(path).parent
    return _packed(folder, {file for file in _files(folder, _importable) if file.suffix == ".py"})


def nothing() -> Bundle:
    """No file at all: what is installed is enough."""
    return _packed(Path.cwd(), set())


def _root(paths: list[Path]) -> Path:
    """The nearest folder above all of them that pytest would take for their root, as far up as we are."""
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
    """The path from the top, links in it left as they are, as pytest has it; from here, if it is below."""
    full, here = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100 - `absolute` leaves `..` in it
    real = full.resolve()
    return real if real.is_relative_to(here) and not full.is_relative_to(here) else full


def _kept(path: Path) -> bool:
    """Whether it may be data of the tests: anything but caches, and environments."""
    return path.name not in LITTER | CACHES and not (path / "pyvenv.cfg").is_file()


def _importable(path: Path) -> bool:
    """Whether it may be, or hold, modules of the project."""
    made = path.name in MADE and path.is_dir() and not (path / "__init__.py").is_file()
    return _kept(path) and not made and not path.name.startswith(".")


def _files(path: Path, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """The path and all that is wanted below it, folders as well; links are followed, but not in a circle."""
    seen = 0
    left: list[tuple[Path, tuple[Path, ...]]] = [(path, (Path(os.path.realpath(path)),))]
    # Each with the folders that it is in, and itself, links resolved.
    while left:
        here, around = left.pop()
        seen += 1
        if seen > MANY:
            raise BundleError(f"below {path} are more than {MANY:,} files, too many to look at: a link?")
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
