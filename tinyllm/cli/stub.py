"""The files of `tinyllm start`: a stub of `paged.py` from the contract, a first test, settings."""

import inspect
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from tinyllm.grading import report
from tinyllm.testing.contract import Config, PagedCache

FILES = ("paged.py", "tests/test_paged.py", "pyproject.toml")


def write(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Write the missing files; yields each path and whether it was written. Raises OSError."""
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if new := not os.path.lexists(path):
            report.write(path, text(name))
        yield path, new


def text(name: str) -> str:
    """One of `FILES`. The stub has the methods of `PagedCache`, with their docstrings, not yet written."""
    methods = [
        {"name": method_name, "parameters": ", ".join(_parameters(method)), "doc": inspect.getdoc(method)}
        for method_name, method in vars(PagedCache).items()
        if inspect.isfunction(method) and not method_name.startswith("_")
    ]
    template = resources.files("tinyllm.cli") / "learner" / f"{name}.jinja"
    # No escaping: the output is Python, made of the project's own text.
    environment = Environment(keep_trailing_newline=True, trim_blocks=True, autoescape=False)  # noqa: S701
    source = template.read_text(encoding="utf-8")
    return environment.from_string(source).render(sizes=", ".join(Config._fields), methods=methods)


def _parameters(method: object) -> list[str]:
    shown = []
    for parameter in inspect.signature(method).parameters.values():  # type: ignore[arg-type]
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return shown
