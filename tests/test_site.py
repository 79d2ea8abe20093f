"""The site builds, every link within it leads somewhere, and its exit codes are those of the grader."""

import os
import re
import subprocess
import sys
from html import unescape
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """A file of docs/, which is in no package."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks, links = script("hooks"), script("links")


@pytest.mark.long
def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert links.problems(tmp_path) == []
    for page in ("bugs/s06", "commands", "api/kit", "trace", "getting", "sources/examples/rust/engine.rs"):
        assert (tmp_path / f"{page}.html").is_file()


def test_bad_links_are_found(tmp_path: Path) -> None:
    found = links.problems
    assert found(tmp_path) == [f"{tmp_path} holds no page"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<p id="x"><a href="../none"><a href="#x">', encoding="utf-8")
    (tmp_path / "404.html").write_text('<a href="/anything">', encoding="utf-8")
    text = '<script src="https://far/a.js"></script><a href="a/#y"><a href="a/#x"><a href="https://far/">'
    (tmp_path / "index.html").write_text(text, encoding="utf-8")
    assert found(tmp_path) == [
        "a/index.html: ../none is not there",
        "index.html: loads https://far/a.js",
        "index.html: a/#y has no such place",
    ]


@pytest.mark.parametrize("page", hooks.WRITTEN)
def test_what_hooks_write_is_what_lies_there(page: str) -> None:
    there = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert there == hooks.WRITTEN[page](), "write it anew: python docs/hooks.py"


def dead(root: Path) -> list[str]:
    """The relative links in Markdown files below a folder that lead to no file there, or to no heading."""
    top = [path for path in root.iterdir() if path.name[0] != "."]
    files = {path for path in top if path.suffix == ".md"}
    files.update(*(path.rglob("*.md") for path in top if path.is_dir()))
    found = []
    for path in sorted(files):
        for link in links.Links(html(path)).links:
            parts = urlsplit(link)
            target = path.parent / unquote(parts.path) if parts.path else path
            if parts.scheme or parts.netloc:
                continue
            inside = target.resolve().is_relative_to(root)
            heading = not parts.fragment or target.suffix != ".md" or parts.fragment in headings(target)
            if not inside or not target.is_file() or not heading:
                found.append(f"{path.relative_to(root)}: {link}")
    return found


def html(path: Path) -> str:
    return str(MarkdownIt().enable("table").render(path.read_text(encoding="utf-8")))


def headings(path: Path) -> set[str]:
    """As GitHub names them."""
    lines = re.findall(r"^<h\d>(.*)</h\d>$", html(path), re.MULTILINE)
    texts = [unescape(re.sub(r"<.*?>", "", line)).lower() for line in lines]
    return {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in texts}


def test_every_link_in_the_repository_leads_to_a_file_in_it() -> None:
    assert dead(ROOT) == []


def test_dead_links_of_each_kind_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("a/b.md", ".venv/c.md"):
        (tmp_path / name).write_text(
            "[1](../none.md) [2](../d.md#y) [3][r] ![4](p.svg) <img src='q.svg'>\n\n[r]: e\n"
        )
    (tmp_path / "d.md").write_text(
        "# `An x` & more\n\n| [5](a/b.md) |\n|---|\n| [6](f) |\n\n[7](#an-x--more) [8](#no) [9](../g) [10](http://h)\n"
    )
    wrong = ["../none.md", "../d.md#y", "e", "p.svg", "q.svg"]
    assert dead(tmp_path) == [
        *(f"a/b.md: {one}" for one in wrong),
        *(f"d.md: {one}" for one in ("f", "#no", "../g")),
    ]
