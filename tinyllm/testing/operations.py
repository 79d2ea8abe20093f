"""The operations of a trace in one table: the method each calls, its arguments, its law, what it needs."""

from typing import NamedTuple

from tinyllm.testing.contract import Capability


class Operation(NamedTuple):
    """One operation.

    Attributes:
        method: of the cache; empty for `new`, which calls the factory.
        arguments: what the numbers of its line are, in order.
        law: what breaks when it raises although nothing is wrong with it.
        needs: the capability or the extension without which a cache is not asked for it.
    """

    method: str
    arguments: tuple[str, ...]
    law: int
    needs: str = ""


OPERATIONS = {
    "new": Operation("", ("blocks", "block size", "layers", "heads", "dims"), 15),
    "add": Operation("add_seq", ("sequence",), 13),
    "fork": Operation("fork", ("parent", "child"), 7, Capability.FORK),
    "append": Operation("append", ("sequence", "layer", "tokens"), 9),
    "free": Operation("free", ("sequence",), 6),
    "truncate": Operation("truncate", ("sequence", "length"), 17, "truncate"),
    "table": Operation("block_table", ("sequence",), 1, Capability.BLOCK_TABLES),
    "len": Operation("seq_len", ("sequence", "layer"), 4),
    "gather": Operation("gather", ("sequence", "layer"), 3),
    "stats": Operation("stats", (), 5, Capability.COUNTS),
    "needed": Operation("blocks_needed", ("sequence", "layer", "tokens"), 16, "blocks_needed"),
    "pages": Operation("page_table", ("layer", "sequence"), 18, "page_table"),
    "runs": Operation("gather_runs", ("sequence", "layer"), 20, "gather_runs"),
    "check": Operation("check", (), 19, "check"),
    "close": Operation("close", (), 14),
}
METHODS = {operation.method: name for name, operation in OPERATIONS.items()} | {"num_free_blocks": "stats"}
"""The operation of each method."""
READS_BEYOND = frozenset({"needed", "pages", "runs", "check"})
"""The operations that read, and call a method beyond the ten."""
SEQUENCES = frozenset({"sequence", "parent", "child"})
"""The arguments that are ids."""
WITH_LAYER = frozenset(name for name, one in OPERATIONS.items() if "layer" in one.arguments)
