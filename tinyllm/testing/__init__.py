"""The kit: hold any paged KV cache to the laws of docs/laws.md.

`check_cache(factory)` is the whole of it in one call. Names are looked up when first used, so that loading
the pytest plugin imports nothing heavy.
"""

import importlib
from typing import Any

_HOMES = {
    "CAPABILITIES": "contract",
    "CATALOGUE": "catalogue",
    "CacheMachine": "machine",
    "Config": "contract",
    "DIRECTED": "directed",
    "ImplementationError": "adapters.loading",
    "LAWS": "laws",
    "LawBroken": "laws",
    "Oracle": "oracle",
    "PagedCache": "contract",
    "Report": "check",
    "Run": "run",
    "TraceError": "trace",
    "check_cache": "check",
    "load": "adapters.loading",
    "parse": "trace",
    "profile": "profiles",
    "replay": "run",
    "shadow": "adapters.block_manager",
    "shorten": "shrink",
    "state_machine_test": "machine",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
