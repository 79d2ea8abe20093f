"""The trace language: every line says one thing, prints as it was read, and is refused by its number."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.contract import CAPABILITIES, Config
from tinyllm.testing.forms import FORMS
from tinyllm.testing.operations import OPERATIONS
from tinyllm.testing.run import replay
from tinyllm.testing.trace import (
    PATTERN,
    VERSION,
    Op,
    TooLarge,
    TraceError,
    encode,
    parse,
    pattern,
    values,
)

numbers = st.one_of(
    st.integers(-(10**30), 10**30), st.floats(allow_nan=False).filter(lambda x: not x.is_integer())
)
names = st.sampled_from(["ValueError", "KeyError", "OutOfBlocks", "my_error"])
floats = st.lists(st.floats(width=32), min_size=1, max_size=6).map(lambda x: encode(np.array(x)))


@st.composite
def ops(draw: st.DrawFn) -> Op:
    name = draw(st.sampled_from(sorted(OPERATIONS)))
    args = [draw(numbers) for _ in OPERATIONS[name].arguments]
    op = Op(name, tuple(args), refusal=draw(st.just("") | names), quiet=draw(st.booleans()))
    if name == "append":
        op = op._replace(args=(*args[:2], draw(st.integers())))
        extra = draw(st.sampled_from(["", "form", "data", "places"]))
        if extra == "form":
            op = op._replace(form=draw(st.sampled_from(sorted(FORMS))))
        elif extra == "data":
            op = op._replace(data=(draw(floats), draw(floats)))
        elif extra == "places":
            op = op._replace(places=draw(st.tuples(*[st.integers(0, 10**12 - 1)] * 2)))
    return op


@given(st.lists(ops()), st.sampled_from(["", "  # a comment", "\t#!as ! 1", "   "]))
def test_what_is_printed_reads_as_it_was(program: list[Op], after: str) -> None:
    text = "".join(f"{op}{after}\n" for op in program)
    assert parse(text) == program
    assert parse(f"# first\n\n  {text.strip()}\r\n") == program


def test_the_example_of_the_design() -> None:
    text = """
    new 4 2 1 1 2        # blocks, block size, layers, heads, dims
    add 0
    append 0 0 3         # sequence, layer, tokens
    fork 0 1
    append 1 0 9 ! OutOfBlocks
    free 0
    """
    names = [op.name for op in parse(text)]
    assert names == ["new", "add", "append", "fork", "append", "free"]
    assert replay(PagedKVCache, text).oracle.lens(1) == [3]


WRONG = {
    "append1 0 0 1": "'append1' is no operation; there are new, add, fork, append",
    "! ValueError": "'!' is no operation",
    "add": "add takes sequence",
    "add 0 1": "add takes sequence",
    "new 1 2 3 4": "new takes blocks, block size, layers, heads, dims",
    "stats 1": "stats takes nothing",
    "append 0 0": "append takes sequence, layer, tokens",
    "append 0 0 1 00000000": "append takes",
    "append 0 0 1 00000000 00000000 00000000": "append takes",
    "append 0 0 1 00000000 00000000 as list": "append takes",
    "add x": "'x' is no number",
    "add 0x10": "'0x10' is no number",
    "append 0 0 1.5": "1.5 tokens: a number of tokens is whole",
    "append 0 0 inf ! TypeError": "inf tokens: a number of tokens is whole",
    "add 0 !": "! is followed by the name of one error",
    "add 0 ! Key Error": "! is followed by the name of one error",
    "add 0 ! Key-Error": "! is followed by the name of one error",
    "append 0 0 1 as": "as is followed by one of strided, reversed",
    "append 0 0 1 as set": "as is followed by one of strided, reversed",
    "append 0 0 1 as list list": "as is followed by one of strided, reversed",
    "add 0 as list": "add takes sequence",
    "append 0 0 1 0000000 00000000": "'0000000' is not the hex of float32 values",
    "append 0 0 1 00000000 000000": "'000000' is not the hex of float32 values",
    "append 0 0 1 zzzzzzzz 00000000": "'zzzzzzzz' is not the hex of float32 values",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_syntax_error_names_its_line(line: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse(f"new 1 1 1 1 1\n\n  {line}\nadd 0\n")
    assert str(caught.value).startswith(f"line 3: {WRONG[line]}")
    assert str(caught.value).endswith(f": {line}")


VERSIONS = {
    "trace": "line 1: trace is followed by the version of the language, a whole number from 1: trace",
    "trace 0": "line 1: trace is followed by",
    "trace 1 2": "line 1: trace is followed by",
    "trace 1.0": "line 1: trace is followed by",
    f"trace {VERSION + 1}": f"line 1: version {VERSION + 1} of the trace language; this kit reads ",
    f"add 0\ntrace {VERSION}": "line 2: 'trace' is no operation",
}


@pytest.mark.parametrize("text", VERSIONS)
def test_a_version_that_is_none_or_unknown_is_refused(text: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse(text)
    assert str(caught.value).startswith(VERSIONS[text])


def test_the_first_line_may_say_the_version() -> None:
    assert parse(f"# a title\ntrace {VERSION}  # so\nadd 0\n") == parse("add 0\n")


LIES = {
    "add 0": "'add 0' comes before 'new'",
    "close": "'close' comes before 'new'",
    "new 1 1 1 1 1\nadd 0 ! ValueError": "expects ValueError, but a right cache would succeed here",
    "new 1 1 1 1 1\nfree 0": "expects success, but a right cache would be refused with KeyError here",
    "new 1 1 1 1 1\nfree 0 ! ValueError": "but a right cache would be refused with KeyError here",
    "new 1 1 1 1 1\nadd 0\nappend 0 0 2": "would be refused with OutOfBlocks",
    "new 1 1 1 1 1\nadd 0\nappend 0 0 1 ! OutOfBlocks": "would succeed",
    "new 1 1 1 1 1\nadd 0\nappend 0 1 2 ! OutOfBlocks": "would be refused with IndexError here",
    "new 0 1 1 1 1": "would be refused with ValueError",
    "new 1 1 1 1 1 ! ValueError": "would succeed",
    "new 1 1 1 1 1\nclose\nadd 0": "would be refused with ValueError",
    "new 1 1 1 1 1\nadd 0\nappend 0 9 0 ! KeyError": "would be refused with IndexError or ValueError",
    "new 1 1 1 2 1\nadd 0\nappend 0 0 1 00000000 00000000": "data of 1 and 1 values for shape (2, 1, 1)",
    "new 1 2 1 1 1\nadd 0\nappend 0 0 1 00000000 0000000000000000": "data of 1 and 2 values",
}


@pytest.mark.parametrize("text", LIES)
def test_a_trace_that_lies_is_no_broken_law(text: str) -> None:
    with pytest.raises(TraceError) as caught:
        replay(PagedKVCache, text)
    assert LIES[text] in str(caught.value)


TOO_LARGE = {
    "new 1000000000000 2 1 1 1": "blocks are at most 2,147,483,647",
    "new 1 2 99999999999999999999999999 1 1 ! ValueError": "layers are at most 4,096",
    "new 2147483647 2147483647 1 1 1": "a pool of 18,446,744,056,529,682,436 bytes, at most 140,737,",
    "new 4 2 1 1 1\nadd 0\nappend 0 0 4000000000": "at most 16,777,216 tokens of this cache",
    "new 4 2 1 4 4\nadd 0\nappend 0 0 4000000000 ! OutOfBlocks": "at most 1,048,576 tokens of this cache",
    f"new 4 2 1 1 1\nadd 0\nappend 0 0 {10**30} as list ! OutOfBlocks": "at most 16,777,216 tokens of this",
    f"new 4 2 1 1 1\nappend 0 0 {10**30} ! KeyError": "at most 16,777,216 tokens of this cache",
}


@pytest.mark.parametrize("text", TOO_LARGE)
def test_what_no_machine_could_run_is_not_tried(text: str) -> None:
    with pytest.raises(TooLarge) as caught:
        replay(PagedKVCache, text)
    assert TOO_LARGE[text] in str(caught.value)
    assert str(caught.value).startswith(f"'{text.splitlines()[-1]}' ")


def test_large_numbers_that_are_refused_anyway_cost_nothing() -> None:
    many = 10**30
    lines = [f"truncate 0 {many} ! ValueError", f"len 0 {many} ! IndexError", f"add {many}", f"free {many}"]
    lines += [
        f"append 0 0 -{many} ! ValueError",
        f"new -{many} 1 1 1 1 ! ValueError",
        "append 0 0 16000000 ! OutOfBlocks",
    ]
    replay(PagedKVCache, "\n".join(["new 4 2 1 1 1", "add 0", *lines]))


def test_a_line_of_megabytes_is_told_in_a_few_words() -> None:
    for line, said in (
        (
            "add " + "9" * 100_000,
            "9... (100,000 characters) is too long for a number, of 4,300 digits at most: add",
        ),
        ("add -" + "9" * 5000, "(5,001 characters) is too long for a number"),
        ("add " + "x" * 10**6, "' is no number: add xxx"),
        ("x" * 10**6, "' is no operation; there are new"),
        ("add 0 " + "x" * 10**6, "add takes sequence: add 0 xxx"),
    ):
        with pytest.raises(TraceError) as caught:
            parse(line)
        assert said in str(caught.value)
        assert len(str(caught.value)) < 1000


REFUSALS = {
    "add": ["add 0 ! ValueError", "add 0.5 ! TypeError"],
    "fork": ["fork 0 0 ! ValueError", "fork 5 6 ! KeyError", "fork 5 0 ! KeyError", "fork 0 0.5 ! TypeError"],
    "append": ["append 5 7 0 ! KeyError", "append 5 7 0 ! IndexError", "append 5 7 0 ! ValueError"],
    "reads": ["table 5 ! KeyError", "len 0 7 ! IndexError", "gather 0 -1 ! IndexError", "free 5 ! KeyError"],
    "forms": ["append 0 0 1 as bool ! TypeError", "append 0 0 1 as broken-k ! Exception"],
    "new": ["new 0 1 1 1 1 ! ValueError", "new 1 1.5 1 0 1 ! TypeError", "new 1 1.5 1 0 1 ! ValueError"],
    "closed": ["close", "close", "table 0 ! ValueError", "table 0 ! KeyError", "stats ! ValueError"],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_of_several_errors_that_apply_any_will_do(name: str) -> None:
    class Lenient(PagedKVCache):
        """Declares no exact errors, so that the trace alone is judged."""

        capabilities = frozenset(CAPABILITIES) - {"exact-errors"}

    run = replay(Lenient, "\n".join(["new 4 2 2 1 1", "add 0", *REFUSALS[name]]))
    assert len(run.ops) == 2 + len(REFUSALS[name])


def test_the_pattern_is_exact_and_never_equal_for_k_and_v() -> None:
    k, v = pattern(0, Config(1, 1, 1, 3, 1), PATTERN)
    flat = k.ravel()
    assert flat[:3].tolist() == [1, 2, 3]
    assert flat[PATTERN] == flat[0]  # it starts again
    assert len(set(flat.tolist())) == PATTERN
    for array in (k, v):
        np.testing.assert_array_equal(array.astype(np.float16).astype(np.float32), array)
    assert (v == -k).all()
    assert not set(k.ravel().tolist()) & set(v.ravel().tolist())
    assert (k > 0).all()


@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_the_pattern_counts_scalars_in_c_order(start: int, count: int, heads: int, dims: int) -> None:
    k, v = pattern(start, Config(1, 1, 1, heads, dims), count)
    assert k.shape == v.shape == (heads, count, dims)
    i = start
    for head in range(heads):
        for token in range(count):
            for dim in range(dims):
                assert k[head, token, dim] == 1 + i % 2039
                i += 1


def given_to(text: str) -> list[list[float]]:
    """K of each append that a cache accepted."""
    seen = []

    class Spy(PagedKVCache):
        def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
            super().append(seq_id, layer, k, v)
            seen.append(np.asarray(k).ravel().tolist())

    replay(Spy, text)
    return seen


def test_a_refused_append_and_one_with_data_do_not_advance_the_pattern() -> None:
    some = encode([7.5, 8.5])
    text = f"""
    new 2 2 1 1 2
    add 0
    append 0 0 1
    append 0 0 9 ! OutOfBlocks
    append 0 9 1 ! IndexError
    append 0 0 1 {some} {some}
    append 0 0 1 as fortran
    new 1 1 1 1 1
    add 0
    append 0 0 1
    """
    assert given_to(text) == [[1, 2], [7.5, 8.5], [3, 4], [1]]


def test_data_is_little_endian_float32() -> None:
    assert encode([1.0, -2.0]) == "0000803f000000c0"
    op = parse("append 0 0 2 0000803f000000c0 0000c07f00000080")[0]
    k, v = values(op, 0, Config(1, 1, 1, 1, 1))
    assert k.tolist() == [[[1], [-2]]]
    assert math.isnan(v[0, 0, 0])
    assert math.copysign(1, v[0, 1, 0]) == -1


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_what_its_name_says(name: str) -> None:
    k, v = pattern(0, Config(1, 1, 1, 2, 3), 4)
    made = FORMS[name].make(k.copy(), v.copy())
    if not FORMS[name].refusal:
        for array, plain in zip(made, (k, v), strict=True):
            np.testing.assert_array_equal(np.asarray(array).astype(np.float16), plain)
    facts: dict[str, Callable[[Any], bool]] = {
        "strided": lambda a: a.strides[2] == 2 * a.itemsize,
        "reversed": lambda a: a.strides[1] < 0,
        "flipped": lambda a: max(a.strides) < 0,
        "transposed": lambda a: a.strides[0] < a.strides[2] < a.strides[1],
        "tuple": lambda a: type(a) is type(a[0]) is type(a[0][0]) is tuple,
        "float64-near": lambda a: a.dtype == np.float64 and (a != a.astype(np.float32)).all(),
        "int16": lambda a: a.dtype == np.int16,
        "big-endian": lambda a: a.dtype == ">f4",
        "mixed": lambda a: a.dtype in {np.dtype(np.float64), np.dtype(np.int32)},
        "fewer-heads": lambda a: a.shape == (1, 4, 3),
        "fewer-dims": lambda a: a.shape == (2, 4, 2),
        "scalar": lambda a: a == 1.0,
        "ragged": lambda a: a[-1][-1] == [],
        "none": lambda a: a is None,
        "fortran": lambda a: a.flags.f_contiguous and not a.flags.c_contiguous,
        "readonly": lambda a: not a.flags.writeable,
        "list": lambda a: type(a) is type(a[0]) is type(a[0][0]) is list,
        "float16": lambda a: a.dtype == np.float16,
        "float64": lambda a: a.dtype == np.float64,
        "int64": lambda a: a.dtype == np.int64,
        "rank2": lambda a: a.shape == (4, 3),
        "rank4": lambda a: a.shape == (1, 2, 4, 3),
        "heads": lambda a: a.shape == (4, 4, 3),
        "dims": lambda a: a.shape == (2, 4, 6),
        "bool": lambda a: a.dtype == np.bool_,
        "complex": lambda a: a.dtype.kind == "c",
        "object": lambda a: a.dtype == object,
        "str": lambda a: a.dtype.kind == "U",
    }
    if name in facts:
        assert all(facts[name](array) for array in made)
    elif name in {"unequal", "longer-k"}:
        assert made[0].shape != made[1].shape
    elif not name.startswith("broken"):
        np.testing.assert_array_equal(made[0], k)
        assert name.endswith("-v")
        assert getattr(made[1], "shape", ()) != v.shape or made[1].dtype == np.bool_
    else:
        broken = made["kv".index(name[-1])]
        with pytest.raises(RuntimeError, match="refuses to become an array"):
            np.asarray(broken)
