"""What a unit takes along: a suite as pytest would see it, a file with its neighbours, and no more."""

import os
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
            path.write_text(f"# {name}\n", encoding="utf-8", errors="surrogateescape")
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
        "p/tests/deep/.data/x.json",
        "p/tests/deep/build/test_c.py",
        "p/tests/deep/dist",
        "p/tests/deep/__pycache__/x.pyc",
        "p/tests/deep/.hypothesis/x",
        "p/tests/other/test_b.py",
        "p/tests/other/data.bin",
        "p/tinyllm/infer/paged.py",
        "p/.venv/lib/x.py",
        "p/env/pyvenv.cfg",
        "p/env/lib/x.py",
        "p/build/lib/x.py",
        "p/dist/__init__.py",
        "conftest.py",
    )
    packed = bundle.of_suite([str(root / "p/tests/deep")], "tinyllm.infer.paged", Path("/nowhere/paged.py"))
    assert packed.root == root / "p"
    assert unpacked(packed, tmp_path / "there") == [
        "conftest.py",
        "dist/__init__.py",
        "notes.py",
        "pyproject.toml",
        "tests/__init__.py",
        "tests/conftest.py",
        "tests/deep/.data/x.json",
        "tests/deep/build/test_c.py",
        "tests/deep/data.bin",
        "tests/deep/dist",
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


def test_links_come_as_what_they_point_to(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("a/test_a.py", "shared/test_b.py", "shared/deep/data.bin", "outside/test_c.py")
    (root / "a/test_relative.py").symlink_to("../shared/test_b.py")
    (root / "a/test_absolute.py").symlink_to(root / "outside/test_c.py")
    (root / "a/folder").symlink_to("../shared")
    (root / "a/test_twice.py").symlink_to("test_relative.py")
    (root / "a/test_nothing.py").symlink_to("nothing.py")
    packed = bundle.of_suite(["a"], "m", Path("/nowhere/m.py"))
    there = tmp_path / "there"
    assert unpacked(packed, there) == [
        "a/folder/deep/data.bin",
        "a/folder/test_b.py",
        "a/test_a.py",
        "a/test_absolute.py",
        "a/test_relative.py",
        "a/test_twice.py",
    ]
    assert not any(path.is_symlink() for path in there.rglob("*"))
    assert (there / "a/test_twice.py").read_text(encoding="utf-8") == "# shared/test_b.py\n"


def test_links_in_a_circle(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("a/test_a.py", "a/b/test_b.py")
    (root / "a/up").symlink_to(root)
    (root / "a/here").symlink_to(".")
    (root / "a/itself").symlink_to("itself")
    (root / "a/b/around").symlink_to("../c")
    (root / "a/c").symlink_to("b")
    packed = bundle.of_suite(["a"], "m", Path("/nowhere/m.py"))
    files = unpacked(packed, tmp_path / "there")
    assert {"a/test_a.py", "a/b/test_b.py", "a/c/test_b.py"} <= set(files)
    assert all(file.count("around") + file.count("up") <= 1 for file in files)


def test_a_link_that_leads_to_too_much(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("a/test_a.py", "b/x", "b/y")
    (root / "a/b").symlink_to("../b")
    monkeypatch.setattr(bundle, "MANY", 4)
    with pytest.raises(BundleError, match=f"below {root}/a are more than 4 files, too many to visit"):
        bundle.of_suite(["a"], "m", Path("/nowhere/m.py"))


def test_tests_named_by_a_link(tree: Callable[..., Path], tmp_path: Path) -> None:
    """As pytest has them: with the conftest beside the link."""
    root = tree("a/conftest.py", "elsewhere/test_b.py")
    (root / "a/test_b.py").symlink_to(root / "elsewhere/test_b.py")
    packed = bundle.of_suite(["a/test_b.py"], "m", Path("/nowhere/m.py"))
    assert packed.place("a/test_b.py::test") == "a/test_b.py::test"
    assert unpacked(packed, tmp_path / "there") == ["a/conftest.py", "a/test_b.py"]


def test_by_another_way_to_the_current_folder(
    tree: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tree("a/test_a.py")
    way = tmp_path_factory.mktemp("way") / "link"
    way.symlink_to(root)
    packed = bundle.of_suite([str(way / "a")], "m", Path("/nowhere/m.py"))
    assert (packed.root, packed.place(str(way / "a/test_a.py"))) == (root, "a/test_a.py")


def test_empty_folders_modes_and_names(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("a/test_a.py", "a/run.sh", os.fsdecode(b"a/caf\xe9.txt"))
    (root / "a/empty").mkdir()
    (root / "a/run.sh").chmod(0o755)
    os.mkfifo(root / "a/pipe")
    os.link(root / "a/run.sh", root / "a/hard")
    packed = bundle.of_suite(["a"], "m", Path("/nowhere/m.py"))
    files = unpacked(packed, tmp_path / "there")
    assert files == sorted(["a/test_a.py", "a/run.sh", "a/hard", os.fsdecode(b"a/caf\xe9.txt")])
    assert (tmp_path / "there/a/empty").is_dir()
    assert os.access(tmp_path / "there/a/run.sh", os.X_OK)
    assert not os.access(tmp_path / "there/a/test_a.py", os.X_OK)


def test_nothing(tmp_path: Path) -> None:
    assert unpacked(bundle.nothing(), tmp_path / "there") == []
