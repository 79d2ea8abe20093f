"""How a command line names a cache, and what it says when there is none."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.adapters.loading import ImplementationError, load, spelling

HERE = Path(__file__).parent
OTHERS = HERE / "other_caches.py"


def test_a_module_and_a_class_of_it() -> None:
    assert load() is PagedKVCache
    assert load("tinyllm.infer.paged") is PagedKVCache
    assert load("tinyllm.infer.paged:PagedKVCache") is PagedKVCache
    assert load("tinyllm.infer.kvcache:KVCache").__name__ == "KVCache"


def test_a_path_and_a_class_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Any = load(f"{OTHERS}:Naive")
    assert loaded(4, 2, 1, 1, 1).num_free_blocks() == 4
    monkeypatch.chdir(HERE)
    assert load("other_caches.py:Naive").__name__ == "Naive"
    assert load("./other_caches.py").__name__ == "PagedKVCache"
    assert load("../testing/other_caches.py:make").__name__ == "make"


def test_a_file_imports_what_lies_beside_it_and_leaves_no_path(tmp_path: Path) -> None:
    (tmp_path / "its_own_errors.py").write_text("class Full(Exception): pass\n")
    (tmp_path / "cache.py").write_text(
        "from dataclasses import dataclass\nfrom its_own_errors import Full\n"
        "@dataclass\nclass PagedKVCache:\n    blocks: 'int'\n"
    )
    before = list(sys.path)
    assert load(str(tmp_path / "cache.py"))(3).blocks == 3  # type: ignore[call-arg, attr-defined]
    assert sys.path == before


REFUSED = {
    "no.such.module": "there is no module 'no.such.module' here; a file is named with its .py",
    "tinyllm.nothing": "there is no module 'tinyllm.nothing' here",
    "tinyllm.infer.paged:Missing": "defines no Missing; write tinyllm.infer.paged:NAME if yours",
    "json": "json defines no PagedKVCache; write json:NAME if yours has another name",
    "json:__name__": "__name__ of json is not callable; the kit needs a class or a factory",
    "": "cannot be imported: ValueError",
    "nowhere/paged.py": "there is no file nowhere/paged.py",
    "nowhere.py:Cache": "there is no file nowhere.py",
    "a/b": "there is no file a/b",
}


@pytest.mark.parametrize("impl", REFUSED)
def test_what_cannot_be_used_is_said_in_words(impl: str) -> None:
    with pytest.raises(ImplementationError, match=re.escape(REFUSED[impl])):
        load(impl)


FILES = {
    "import not_installed_at_all": r"^{path} imports 'not_installed_at_all', which is not installed$",
    "\n\nclass (:\n": r"^{path}, line 3: invalid syntax$",
    "1 / 0": r"^{path} cannot be imported: ZeroDivisionError: division by zero$",
    "raise SystemExit(2)": r"^{path} cannot be imported: SystemExit: 2$",
    "": r"^{path} defines no PagedKVCache; write {path}:NAME if yours has another name$",
    "PagedKVCache = 3": r"^PagedKVCache of {path} is not callable; the kit needs a class or a factory$",
}


@pytest.mark.parametrize("text", FILES, ids=repr)
@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
def test_a_file_that_cannot_be_used_is_said_in_words(
    text: str, as_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"given_{abs(hash(text)) % 10**6}_{as_module}"
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.path)
    impl = name if as_module else str(path)
    pattern = FILES[text].replace("{path}", re.escape(impl))
    if as_module and "line 3" in pattern:
        pattern = f"^{name} cannot be imported: SyntaxError: invalid syntax"
    with pytest.raises(ImplementationError, match=pattern):
        load(impl)
    assert sys.path == before


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "paged.txt"
    path.write_text("PagedKVCache = int\n")
    with pytest.raises(ImplementationError, match=r"is not a Python file; its name must end in \.py"):
        load(str(path))


def test_a_factory_is_spelled_as_it_was_named() -> None:
    assert spelling(load("tinyllm.infer.paged:PagedKVCache")) == (
        [
            "from tinyllm.testing import load, replay",
            "PagedKVCache = load('tinyllm.infer.paged:PagedKVCache')",
        ],
        "PagedKVCache",
    )
    imports, name = spelling(load(f"{OTHERS}:Naive"))
    assert (imports[1], name) == (f"Naive = load({f'{OTHERS}:Naive'!r})", "Naive")
    imports, name = spelling(load(str(OTHERS)))
    assert imports[1] == f"PagedKVCache = load({f'{OTHERS}:PagedKVCache'!r})"


@pytest.mark.parametrize("name", ["maker", "another"])
def test_an_object_and_a_lambda_are_spelled_as_they_were_named(name: str) -> None:
    assert spelling(load(f"{OTHERS}:{name}")) == (
        ["from tinyllm.testing import load, replay", f"factory = load({f'{OTHERS}:{name}'!r})"],
        "factory",
    )


def test_what_cannot_be_named_is_left_to_the_reader() -> None:
    class Local:
        pass

    imports, name = spelling(Local)  # type: ignore[arg-type]
    assert imports == ["from tinyllm.testing import replay", "Local = ...  # the cache under test"]
    assert name == "Local"
    Local.__module__ = "__main__"
    assert spelling(Local)[0] == imports  # type: ignore[arg-type]


def test_what_was_never_loaded_but_can_be_imported_is_imported() -> None:
    assert spelling(ImplementationError) == (  # type: ignore[arg-type]
        [
            "from tinyllm.testing import replay",
            "from tinyllm.named import ImplementationError",
        ],
        "ImplementationError",
    )
