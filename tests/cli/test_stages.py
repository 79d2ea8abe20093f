"""The learner's path: what is shown depends on what is built, and gives nothing away."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.cli.stages import stages
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing import replay
from tinyllm.testing.catalogue import CATALOGUE

Invoke = Callable[..., Any]

FIRST = '''
import numpy as np


class PagedKVCache:
    """One token at a time, and gather: what stage 1 asks for."""

    def __init__(self, num_blocks, block_size, n_layers, n_kv_heads, d_head):
        self.blocks, self.size, self.layers = num_blocks, block_size, n_layers
        self.k = np.zeros((n_layers, n_kv_heads, num_blocks * block_size, d_head), np.float16)
        self.v = self.k.copy()
        self.spare, self.seqs = list(range(num_blocks)), {}

    def add_seq(self, seq):
        self.seqs[seq] = [], [0] * self.layers

    def append(self, seq, layer, k, v):
        table, lens = self.seqs[seq]
        if lens[layer] == len(table) * self.size:
            table.append(self.spare.pop(0))
        at = table[-1] * self.size + lens[layer] % self.size
        self.k[layer, :, at], self.v[layer, :, at] = k[:, 0], v[:, 0]
        lens[layer] += 1

    def gather(self, seq, layer):
        table, lens = self.seqs[seq]
        at = [table[p // self.size] * self.size + p % self.size for p in range(lens[layer])]
        return self.k[layer][:, at], self.v[layer][:, at]

    def seq_len(self, seq, layer=0):
        return self.seqs[seq][1][layer]

    def block_table(self, seq):
        return np.array(self.seqs[seq][0], np.int32)

    def stats(self):
        return {"free": len(self.spare), "used": self.blocks - len(self.spare), "cached": 0, "evictions": 0}

    def num_free_blocks(self):
        return len(self.spare)

    def fork(self, parent, child):
        raise NotImplementedError

    def free(self, seq):
        raise NotImplementedError

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()
'''


def test_every_test_of_the_catalogue_is_in_one_stage() -> None:
    assert sorted(name for stage in stages() for name in stage.tests) == sorted(CATALOGUE)


@pytest.mark.parametrize("stage", stages(), ids=lambda stage: stage.title)
def test_a_program_is_right_and_asks_for_no_more_than_its_stage(stage: Any) -> None:
    replay(PagedKVCache, stage.program)
    later = (["fork", "free", "!"], ["fork", "free", "!"], ["free", "!"], [], [])[stages().index(stage)]
    for word in later:
        assert word not in stage.program


def shown(done: Any) -> dict[int, tuple[str, str]]:
    """The mark and the count of each stage."""
    rows = re.findall(r"^ +stage (\d) (.) .*? +(\d of \d)$", done.stdout, re.MULTILINE)
    return {int(number): (mark, count) for number, mark, count in rows}


def test_the_stub_begins_with_stage_1(invoke: Invoke) -> None:
    invoke("start")
    done = invoke("check", "paged.py")
    assert done.exit_code == 1
    assert shown(done) == {
        1: ("✗", "0 of 1"),
        2: ("✗", "0 of 4"),
        3: ("✗", "0 of 2"),
        4: ("✗", "0 of 4"),
        5: ("✗", "0 of 4"),
    }
    for part in (
        "Next: write __init__.",
        "new 4 2 1 2 2",
        "a hint: Which block and which slot",
        "[b0 ## s0] [b1 #. s0 new]",
        "test_fork_shares_until_a_write: __init__ is not written yet",
    ):
        assert part in done.stdout


def test_a_stage_is_passed_before_the_next_is_begun(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "paged.py").write_text(FIRST)
    done = invoke("check", "paged.py")
    assert shown(done)[1] == ("✓", "1 of 1")
    assert shown(done)[2] == ("✗", "0 of 4")
    assert "Next: chunks across blocks, layers of unequal length" in done.stdout
    assert "law 4 (layers): expected seq_len(0, 0) == 3; found seq_len(0, 0) == 1" in done.stdout


def test_the_next_test_comes_with_its_hint(invoke: Invoke, tmp_path: Path, reference: str) -> None:
    wrong = reference.replace("by_block.take(blocks, axis=1)", "by_block.take(blocks[::-1], axis=1)").replace(
        "if consecutive(blocks):", "if len(blocks) < 2:"
    )
    (tmp_path / "paged.py").write_text(wrong)
    done = invoke("check", "paged.py")
    assert shown(done)[1][0] == "✗"
    (tmp_path / "paged.py").write_text(
        reference.replace('raise IndexError(f"layer', "print(").replace(
            "as_layer(layer, self.n_layers)", "int(layer) % self.n_layers"
        )
    )
    done = invoke("check", "paged.py")
    assert [mark for mark, _ in shown(done).values()] == list("✓✓✓✓✗")
    assert "Next: test_bad_arguments" in done.stdout
    assert CATALOGUE["test_bad_arguments"].checks in done.stdout
    assert "a hint: What does each method do with an id it has never seen" in " ".join(done.stdout.split())


@pytest.mark.long
def test_a_cache_that_passes_the_ten_tests_sees_no_stages(
    invoke: Invoke, tmp_path: Path, reference: str
) -> None:
    (tmp_path / "paged.py").write_text(reference)
    done = invoke("check", "paged.py", "--profile", "dev")
    assert done.exit_code == 0
    assert not shown(done)


def test_what_is_left_after_the_ten_tests_is_a_law(invoke: Invoke, tmp_path: Path, reference: str) -> None:
    (tmp_path / "paged.py").write_text(reference.replace("self._check_open()", "pass"))
    done = invoke("check", "paged.py", "--profile", "dev")
    assert done.exit_code == 1
    assert not shown(done)
    assert "The ten tests pass; law 14 is still broken: tinyllm laws 14" in done.stdout
