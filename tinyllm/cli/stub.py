"""A stub of `paged.py`, made from the contract, so that the two cannot drift apart."""

import inspect

from jinja2 import Environment

from tinyllm.testing.contract import Config, PagedCache

TEMPLATE = '''"""Your paged KV cache.

Build it in this order, and let `tinyllm check paged.py` say how far you are:

1. `add_seq`, `append` of one token at a time, `gather`, `seq_len`, `block_table`, `stats`;
2. chunks of several tokens, which cross block boundaries; layers of unequal length;
3. `fork`, with copy on write in `append`;
4. `free` and `OutOfBlocks`: an append that cannot be paid for changes nothing.

`tinyllm tests` lists the ten tests; `tinyllm diff paged.py` compares with the reference once yours passes.
"""

import numpy as np


class OutOfBlocks(RuntimeError):
    """An append needs more blocks than are free; nothing has changed."""


class PagedKVCache:
    """Keys and values of many sequences in one pool of fixed-size blocks.

    Position p of a sequence lives in slot `p % block_size` of block `table[p // block_size]`. A block holds
    all layers, K and V, float16; each layer has a length of its own.
    """

    def __init__(self, {{ sizes }}):
        raise NotImplementedError
{% for method in methods %}
    def {{ method.name }}({{ method.parameters }}):
        """{{ method.doc }}"""
        raise NotImplementedError
{% endfor %}
    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()
'''


def stub() -> str:
    """The text of the stub: the methods of `PagedCache`, with their docstrings, not yet written."""
    methods = [
        {
            "name": name,
            "parameters": ", ".join(_parameters(method)),
            "doc": (method.__doc__ or "").strip(),
        }
        for name, method in vars(PagedCache).items()
        if inspect.isfunction(method) and not name.startswith("_")
    ]
    # No escaping: what comes out is Python, made of the project's own text.
    environment = Environment(keep_trailing_newline=True, trim_blocks=True, autoescape=False)  # noqa: S701
    return environment.from_string(TEMPLATE).render(sizes=", ".join(Config._fields), methods=methods)


def _parameters(method: object) -> list[str]:
    shown = []
    for parameter in inspect.signature(method).parameters.values():  # type: ignore[arg-type]
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return shown
