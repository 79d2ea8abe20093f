"""A paged KV cache in NumPy, the kit that proves any such cache, and the bugs that prove any such tests.

Nothing is imported here: pytest loads this package with the plugin, before a bug can be planted in
`tinyllm.infer.paged`, so names are looked up when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "PagedKVCache": "tinyllm.infer.paged",
    "OutOfBlocks": "tinyllm.infer.paged",
    "KVCache": "tinyllm.infer.kvcache",
    "CacheFull": "tinyllm.infer.kvcache",
}
__all__ = ["CacheFull", "KVCache", "OutOfBlocks", "PagedKVCache", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
