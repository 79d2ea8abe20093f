"""Optional dependencies: which extra installs what a command needs."""

from importlib.util import find_spec

EXTRAS = {
    **dict.fromkeys(("hypothesis", "jinja2", "pytest", "rich", "typer"), "check"),
    **dict.fromkeys(("gguf", "platformdirs", "tokenizers"), "model"),
    "distributed": "cluster",
}
"""Modules that a command may need, and the extra that installs each."""


def need(*modules: str) -> None:
    """Raise ModuleNotFoundError unless these modules are installed; called before the work begins."""
    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
