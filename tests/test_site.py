"""The site builds, every link within it leads somewhere, and its exit codes are those of the grader."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems() -> Callable[[Path], list[str]]:
    """The function of docs/links.py, which is in no package."""
    spec = spec_from_file_location("links", ROOT / "docs" / "links.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    check: Callable[[Path], list[str]] = module.problems
    return check


def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert problems()(tmp_path) == []
    for page in ("bugs/s06", "commands", "api/kit", "trace", "sources/examples/rust/engine.rs"):
        assert (tmp_path / f"{page}.html").is_file()


def test_bad_links_are_found(tmp_path: Path) -> None:
    found = problems()
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
