"""What a unit takes along: a suite as pytest would see it, a file with its neighbours, and no more."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tinyllm.jobs import bundle
from tinyllm.jobs.bundle import BundleError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes files (some text each) below the test's folder, which is then the current one."""
    monkeypatch.chdir(tmp_path)

    def write(*names: str) -> Path:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name}\n", encoding="utf-8")
        return tmp_path

    return write


def unpacked(packed: bundle.Bundle, into: Path) -> list[str]:
    """The files that come out, and that the current folder there is the right one."""
    here = packed.unpack(into)
    assert here == into / packed.folder
    return sorted(path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file())


def test_a_suite_with_what_lies_above_it(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree(
        "p/pyproject.toml",
        "p/conftest.py",
        "p/notes.py",
        "p/tests/conftest.py",
        "p/tests/__init__.py",
        "p/tests/deep/test_a.py",
        "p/tests/deep/data.bin",
        "p/tests/deep/__pycache__/x.pyc",
        "p/tests/deep/.hypothesis/x",
        "p/tests/other/test_b.py",
        "p/tests/other/data.bin",
        "p/tinyllm/infer/paged.py",
        "p/.venv/lib/x.py",
        "conftest.py",
    )
    packed = bundle.of_suite([str(root / "p/tests/deep")], "tinyllm.infer.paged", Path("/nowhere/paged.py"))
    assert packed.root == root / "p"
    assert unpacked(packed, tmp_path / "there") == [
        "conftest.py",
        "notes.py",
        "pyproject.toml",
        "tests/__init__.py",
        "tests/conftest.py",
        "tests/deep/data.bin",
        "tests/deep/test_a.py",
        "tests/other/test_b.py",
    ]


def test_without_settings_the_current_folder_is_the_root(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("conftest.py", "a/test_a.py", "b/test_b.py")
    packed = bundle.of_suite(["a", "b/test_b.py::test"], "pkg.mod", Path("/nowhere/pkg/mod.py"))
    assert packed.root == root
    assert unpacked(packed, tmp_path / "there") == ["a/test_a.py", "b/test_b.py", "conftest.py"]
    assert packed.path == ()


def test_tests_elsewhere(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("a/test_a.py", "a/b/test_b.py", "here/x")
    monkeypatch.chdir(root / "here")
    packed = bundle.of_suite(["../a/test_a.py", "../a/b"], "m", Path("/nowhere/m.py"))
    assert (packed.root, packed.folder) == (root / "a", ".")
    assert packed.place("../a/b/test_b.py::test[x::y]") == "b/test_b.py::test[x::y]"


@pytest.mark.parametrize(
    ("module", "source", "path", "data"),
    [
        ("pkg.sub.mod", "src/pkg/sub/mod.py", "src", ["src/pkg/data.txt"]),
        ("pkg", "src/pkg/__init__.py", "src", ["src/pkg/data.txt"]),
        ("alone", "alone.py", ".", []),
    ],
)
def test_the_package_under_test_comes_along_with_its_data(
    tree: Callable[..., Path], tmp_path: Path, module: str, source: str, path: str, data: list[str]
) -> None:
    python = ["tests/test_a.py", "src/pkg/__init__.py", "src/pkg/sub/mod.py", "alone.py"]
    tree("pyproject.toml", "src/pkg/data.txt", "notes.txt", *python)
    packed = bundle.of_suite(["tests"], module, tmp_path / source)
    assert unpacked(packed, tmp_path / "there") == sorted(["pyproject.toml", *python, *data])
    assert packed.path == (path,)


def test_our_own_package_is_on_every_machine(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("pyproject.toml", "tests/test_a.py", "tinyllm/infer/paged.py")
    packed = bundle.of_suite(["tests"], "tinyllm.infer.paged", root / "tinyllm/infer/paged.py")
    assert unpacked(packed, tmp_path / "there") == ["pyproject.toml", "tests/test_a.py"]


def test_a_path_is_named_from_the_same_folder(
    tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("pyproject.toml", "sub/dir/test_a.py")
    monkeypatch.chdir(root / "sub")
    packed = bundle.of_suite(["dir"], "m", Path("/nowhere/m.py"))
    assert packed.folder == "sub"
    for named in ("dir/test_a.py", str(root / "sub/dir/test_a.py"), "../sub/dir/test_a.py"):
        assert packed.place(named) == "../sub/dir/test_a.py"
    assert packed.place("/elsewhere/x.py") == "/elsewhere/x.py"


def test_a_file_with_the_python_beside_it(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("mine/paged.py", "mine/helper.py", "mine/pkg/__init__.py", "mine/weights.bin", "other.py")
    packed = bundle.of_file(root / "mine/paged.py")
    assert unpacked(packed, tmp_path / "there") == ["helper.py", "paged.py", "pkg/__init__.py"]
    assert packed.place("mine/paged.py") == "paged.py"


def test_too_much(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("a/test_a.py", "a/test_b.py")
    monkeypatch.setattr(bundle, "MOST", 20)
    with pytest.raises(BundleError, match=rf"the files below {root} are more than 0 MB"):
        bundle.of_suite(["a"], "m", Path("/nowhere/m.py"))


def test_links_are_left_behind(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("a/test_a.py")
    (root / "a/loop").symlink_to(root / "a")
    packed = bundle.of_suite(["a"], "m", Path("/nowhere/m.py"))
    assert unpacked(packed, tmp_path / "there") == ["a/test_a.py"]


def test_nothing(tmp_path: Path) -> None:
    assert unpacked(bundle.nothing(), tmp_path / "there") == []
