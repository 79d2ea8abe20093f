"""The catalogue is the chapter's, and each of the chapter's bugs is caught where its entry says."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tinyllm.grading.bugs import Bug, load_set
from tinyllm.infer import paged
from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.laws import LAWS, LawBroken
from tinyllm.testing.run import replay

SOURCE = Path(paged.__file__).read_text(encoding="utf-8")
COURSE = load_set("course")
BUGS = [bug for bug in COURSE if not bug.survives]
ALL = [bug for bug in load_set("all") if not (bug.survives or bug.implementation)]
(HARMLESS,) = [bug for bug in COURSE if bug.survives]

# Name, kind, what is checked, why it matters: the table of the chapter's section 4.
CHAPTER = [
    (
        "test_hand_example_block_table",
        "unit",
        "a block only when a position needs it; the gathered token values; allocation counts",
        "you and the tests agree on the mapping",
    ),
    (
        "test_gather_preserves_head_token_dimension_order",
        "unit",
        "gathered arrays use [heads, tokens, dimensions] order",
        "attention receives the expected layout",
    ),
    (
        "test_gather_matches_contiguous_float16",
        "differential",
        "chunks of 1 to 7 tokens, 3 layers, 2 interleaved sequences equal a contiguous float16 cache exactly",
        "positions in order across block boundaries",
    ),
    (
        "test_layers_keep_independent_lengths",
        "unit",
        "each layer can append independently while sharing the sequence block table",
        "transformer layers advance in order",
    ),
    (
        "test_fork_shares_until_a_write",
        "unit",
        "a fork allocates nothing; the first write into the shared partial block copies it; "
        "full blocks stay shared",
        "beam search and parallel sampling",
    ),
    (
        "test_free_restores_the_pool",
        "unit",
        "a forked block returns only when both holders free it; freeing all restores every block",
        "KV usage back to baseline after each request",
    ),
    (
        "test_out_of_blocks_changes_nothing",
        "fault",
        "a multi-block append that cannot be satisfied leaves length, values, and allocation counts as they "
        "were",
        "the scheduler preempts and retries safely",
    ),
    (
        "test_bad_arguments",
        "boundary",
        "bad shapes, empty chunks, unknown or reused ids, bad layers, sizes below 1",
        "engine bugs fail loudly",
    ),
    (
        "test_paged_matches_contiguous_decoding",
        "differential",
        "a 2-layer toy decoder: logits within 1e-5 and the same greedy ids from the paged cache and from "
        "your L8.2 KVCache(dtype=float16), through a prompt and two forked branches",
        "the equivalence generate --cache paged relies on",
    ),
    (
        "test_random_ops_conserve_blocks",
        "property",
        "10^4 seeded add, fork, append, free operations against a numpy oracle; allocated and free block "
        "counts add up after each; freeing all restores every block",
        "no refcount drifts or leaks over a long run",
    ),
]

# Pitfall, symptom, caught by: the table of the chapter's section 5.
PITFALLS = {
    "s01": ("test_hand_example_block_table",),
    "s02": ("test_hand_example_block_table",),
    "s03": ("test_gather_preserves_head_token_dimension_order",),
    "s04": ("test_gather_matches_contiguous_float16",),
    "s05": ("test_gather_matches_contiguous_float16",),
    "s06": ("test_fork_shares_until_a_write", "test_random_ops_conserve_blocks"),
    "s07": ("test_fork_shares_until_a_write", "test_paged_matches_contiguous_decoding"),
    "s08": ("test_free_restores_the_pool",),
    "s09": ("test_free_restores_the_pool",),
    "s10": ("test_out_of_blocks_changes_nothing",),
    "s11": ("test_out_of_blocks_changes_nothing",),
    "s12": ("test_layers_keep_independent_lengths",),
    "s13": ("test_bad_arguments",),
}


def buggy(bug: Bug) -> Any:
    module = ModuleType(f"paged_with_{bug.id}")
    exec(compile(bug.apply(SOURCE), f"<paged with {bug.id}>", "exec"), module.__dict__)
    return module.PagedKVCache


def test_the_catalogue_has_the_ten_tests_of_the_chapter() -> None:
    assert set(CATALOGUE) == {name for name, *_ in CHAPTER}
    assert len(CATALOGUE) == 10


@pytest.mark.parametrize("row", CHAPTER, ids=lambda row: row[0])
def test_an_entry_is_in_the_chapters_words(row: tuple[str, str, str, str]) -> None:
    name, kind, checks, matters = row
    entry = CATALOGUE[name]
    assert (entry.name, entry.kind, entry.matters) == (name, kind, matters)
    assert entry.checks == checks.replace("your L8.2 KVCache", "the contiguous KVCache")
    assert entry.test.__name__ == name
    assert entry.test.__doc__
    assert entry.laws
    assert set(entry.laws) <= set(LAWS)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_reference_passes(name: str) -> None:
    CATALOGUE[name].test(paged.PagedKVCache)


def test_the_bugs_are_the_chapters() -> None:
    assert {bug.id: bug.caught_by for bug in BUGS} == PITFALLS
    assert [bug.id for bug in BUGS if bug.required] == ["s06", "s07"]


KILLS = [(bug, name) for bug in BUGS for name in bug.caught_by]


@pytest.mark.parametrize(("bug", "name"), KILLS, ids=[f"{bug.id}-{name}" for bug, name in KILLS])
def test_a_bug_is_caught_by_each_test_that_its_entry_names(bug: Bug, name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - a test may fail in any way
        CATALOGUE[name].test(buggy(bug))


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.id)
def test_a_witness_tells_the_bug_from_clean_code(bug: Bug) -> None:
    replay(paged.PagedKVCache, bug.witness)
    with pytest.raises(LawBroken) as caught:
        replay(buggy(bug), bug.witness)
    assert caught.value.law in bug.laws


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.id)
def test_a_witness_has_no_line_too_many(bug: Bug) -> None:
    """Without any one of its lines, it tells nothing, or makes no sense; `check` and `gather_runs`, which few
    engines have, might say more.
    """
    lines = bug.witness.splitlines()
    factory = buggy(bug)
    factory.check = factory.gather_runs = None
    for i in range(len(lines)):
        try:
            replay(factory, "\n".join([*lines[:i], *lines[i + 1 :]]))
        except LawBroken:
            pytest.fail(f"line {i + 1} of the witness is not needed: {lines[i]}")
        except ValueError:  # a trace that makes no sense
            pass


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_order_of_free_blocks_is_nobodys_business(name: str) -> None:
    """check_cache passes it too; that is tests/testing/test_check.py."""
    assert not HARMLESS.required
    CATALOGUE[name].test(buggy(HARMLESS))
