"""Source text in a module's place: found under its names alone, again and again, and seen by who looks."""

import importlib
import itertools
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyllm.grading import bugs, by_hand, handover
from tinyllm.grading.plant import Planted, PlantError, Target, elsewhere, find, install

TEXT = "value = 'planted'\ndef fail():\n    raise ValueError  # the planted line\n"
Write = Callable[..., Path]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules into a folder on the path; forgets them, and what was planted, in the end."""
    meta_path, known = list(sys.meta_path), set(sys.modules)

    def write(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        importlib.invalidate_caches()
        return path

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.meta_path[:] = meta_path
    for name in set(sys.modules) - known:
        if name.startswith("sown"):
            del sys.modules[name]


def test_a_module_is_found_and_not_imported(module: Write) -> None:
    path = module("sown_one.py", "raise SystemExit")
    assert find("sown_one") == Target("sown_one", str(path), "raise SystemExit")
    assert "sown_one" not in sys.modules


def test_a_module_in_a_package_and_a_package(module: Write) -> None:
    init, inner = module("sown_pkg/__init__.py", "a = 1"), module("sown_pkg/inner.py", "b = 2")
    assert find("sown_pkg") == Target("sown_pkg", str(init), "a = 1")
    assert find("sown_pkg.inner") == Target("sown_pkg.inner", str(inner), "b = 2")


def test_a_text_in_another_encoding_and_with_other_line_ends(module: Write) -> None:
    module("sown_latin.py", "# coding: latin-1\r\na = 'ä'\r\n".encode("latin-1"))
    assert find("sown_latin").source == "# coding: latin-1\na = 'ä'\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sown_nothing", "there is no module 'sown_nothing'"),
        ("sown_nothing.inner", "there is no module 'sown_nothing.inner': ModuleNotFoundError"),
        ("os.path.inner", "there is no module 'os.path.inner': ModuleNotFoundError"),
        ("", "there is no module '': ValueError: "),
        (".relative", "there is no module '.relative': "),
        ("sown_bad.inner", "there is no module 'sown_bad.inner': ZeroDivisionError"),
        ("sown_exit.inner", "there is no module 'sown_exit.inner': SystemExit"),
        ("sown_space", "sown_space has no Python source to plant a bug in (None)"),
        ("sys", "sys has no Python source to plant a bug in (built-in)"),
        ("sown_bytes", "sown_bytes.py cannot be read: "),
        ("sown_coding", "sown_coding.py cannot be read: "),
    ],
)
def test_what_cannot_be_found(module: Write, name: str, words: str) -> None:
    module("sown_bad/__init__.py", "1 / 0")
    module("sown_exit/__init__.py", "raise SystemExit")
    module("sown_space/inner.py", "")
    module("sown_bytes.py", b"a = '\xff'")
    module("sown_coding.py", "# coding: no-such-thing\n")
    with pytest.raises(PlantError) as info:
        find(name)
    assert words in str(info.value)


def test_it_takes_the_modules_place(module: Write) -> None:
    path = module("sown_one.py", "value = 'on disk'")
    target = find("sown_one").with_source(TEXT)
    told: list[int] = []
    install(target, lambda: told.append(1))
    assert told == []
    one = importlib.import_module("sown_one")
    assert (one.value, one.__file__, told) == ("planted", str(path), [1])
    vars(one)["value"] = "changed"
    assert importlib.reload(one).value == "planted"
    del sys.modules["sown_one"]
    assert importlib.import_module("sown_one").value == "planted"
    assert path.read_text(encoding="utf-8") == "value = 'on disk'"


def test_a_package_keeps_what_is_in_it(module: Write) -> None:
    module("sown_pkg/__init__.py", "value = 1")
    module("sown_pkg/inner.py", "inner = 3")
    install(find("sown_pkg").with_source("value = 2"))
    package = importlib.import_module("sown_pkg")
    assert package.value == 2
    assert importlib.import_module("sown_pkg.inner").inner == 3


def test_a_class_tells_when_it_is_first_constructed(module: Write) -> None:
    """And is as it was then; one that has no constructor of its own, too."""
    module("sown_one.py", "")
    text = "class A:\n    def __init__(self, n): self.n = n\nclass B(A): pass\ninit = A.__init__\n"
    for cls in ("A", "B"):
        told: list[int] = []
        sys.modules.pop("sown_one", None)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Planted)]
        install(Target("sown_one", "sown_one.py", text, cls), lambda told=told: told.append(1))  # type: ignore[misc]
        one = importlib.import_module("sown_one")
        made = getattr(one, cls)
        assert (told, made.__init__ is one.init) == ([], False)
        assert [made(3).n, made(4).n, told] == [3, 4, [1]]
        assert made.__init__ is one.init
        assert ("__init__" in vars(made)) == (cls == "A")


def test_other_modules_are_left_to_others(module: Write) -> None:
    planted = Planted(Target("sown_one", "sown_one.py", TEXT), lambda: None)
    sys.meta_path.insert(0, planted)
    assert planted.find_spec("sown_two") is None
    assert not planted.is_package("sown_two")
    module("sown_two.py", "value = 2")
    assert importlib.import_module("sown_two").value == 2


def test_tracebacks_show_the_planted_line(module: Write) -> None:
    path = module("sown_one.py", "# other\n# lines\n# on disk\n")
    install(find("sown_one").with_source(TEXT))
    with pytest.raises(ValueError) as info:  # noqa: PT011 - the traceback is the point
        importlib.import_module("sown_one").fail()
    shown = "".join(traceback.format_exception(info.value))
    assert f'File "<planted {path}>", line 3, in fail' in shown
    assert "raise ValueError  # the planted line" in shown


def test_too_late_is_an_error(module: Write) -> None:
    module("sown_one.py", "")
    importlib.import_module("sown_one")
    with pytest.raises(PlantError, match="sown_one was imported before its text could be replaced"):
        install(find("sown_one"))


def test_once_is_enough(module: Write) -> None:
    module("sown_one.py", "")
    target = find("sown_one").with_source(TEXT)
    install(target)
    importlib.import_module("sown_one")
    install(target)
    assert sum(isinstance(finder, Planted) and finder.target == target for finder in sys.meta_path) == 1
    with pytest.raises(PlantError):
        install(target.with_source("value = 'another'"))


def test_another_module_under_its_name_is_seen(module: Write) -> None:
    path = module("sown_one.py", "value = 'on disk'")
    target = find("sown_one").with_source(TEXT)
    assert not elsewhere(target)
    install(target)
    assert not elsewhere(target)
    importlib.import_module("sown_one")
    assert not elsewhere(target)
    spec = importlib.util.spec_from_file_location("sown_one", path)
    assert spec
    sys.modules["sown_one"] = importlib.util.module_from_spec(spec)
    assert elsewhere(target)
    sys.modules["sown_one"] = types.ModuleType("sown_one")
    assert elsewhere(target)
    sys.modules["sown_one"] = None  # type: ignore[assignment]  # as tests do which must not import it
    assert elsewhere(target)


def test_a_finder_is_a_loader_of_text() -> None:
    planted: Any = Planted(Target("sown_one", "sown_one.py", TEXT), lambda: None)
    assert planted.get_source("sown_one") == TEXT


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was, in the end."""
    for name in (handover.VARIABLE, "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(handover, "_watching", [])


@pytest.mark.usefixtures("environment")
def test_a_text_is_handed_over_by_the_environment(module: Write, tmp_path: Path) -> None:
    module("sown_one.py", "")
    target = find("sown_one").with_source(TEXT)
    handover.offer(target, tmp_path)
    handover.take()
    assert not handover.used()
    assert importlib.import_module("sown_one").value == "planted"
    assert handover.used()
    handover.take()  # it is there already


@pytest.mark.usefixtures("environment")
def test_a_bug_is_handed_over_by_its_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the reference, and to stand in for a class of one's own."""
    mine = tmp_path / "mine.py"
    mine.write_text("class Cache: pass\n")
    made = itertools.count()

    def folder(prefix: str) -> str:
        path = tmp_path / f"{prefix}{next(made)}"
        path.mkdir()
        return str(path)

    left: list[Any] = []
    path = list(sys.path)
    for named, name in (("s06", None), (f"s06:{mine}:Cache", "Cache")):
        with monkeypatch.context() as patched:
            patched.setattr(by_hand, "mkdtemp", folder)
            patched.setattr(by_hand, "register", lambda *call, **named: left.append((call, named)))
            by_hand.offer_bug(named, ["--plant", named, str(tmp_path)])
        fields = json.loads(Path(os.environ[handover.VARIABLE]).read_text(encoding="utf-8"))
        assert fields["module"] == bugs.MODULE
        assert (fields["place"] and fields["place"]["name"]) == name
        assert fields["source"] != bugs.reference().source
    sys.path[:] = path
    assert len(list(tmp_path.glob("tinyllm-plant*"))) == 2
    for (remove, path_of_it), options in left:
        remove(path_of_it, **options)
    assert not list(tmp_path.glob("tinyllm-plant*")), "the files go with the process"


@pytest.mark.usefixtures("environment")
def test_what_cannot_be_handed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PlantError, match="there is no bug 'nope'; expected one of s01, s02, "):
        by_hand.offer_bug("nope")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(PlantError, match="no temporary file can be written: No such file"):
        by_hand.offer_bug("s06")
    monkeypatch.setenv(handover.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(PlantError, match="none, named by TINYLLM_PLANT, cannot be read: No such file"):
        handover.take()
