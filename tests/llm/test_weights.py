"""What a GGUF file holds is what the decoder gets; what it cannot decode right, it refuses."""

import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from tinyllm.infer.attention import in_place
from tinyllm.infer.kvcache import KVCache
from tinyllm.llm.gguf_file import TYPES, Values
from tinyllm.llm.llama import toy
from tinyllm.llm.weights import GGUF, QUICK, ModelError, config, load

Write = Callable[..., Path]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def logits(llama: Any) -> Any:
    sizes = llama.config
    return llama.forward(IDS, KVCache(8, sizes.n_layers, sizes.n_kv_heads, sizes.d_head))


def test_a_model_comes_back_as_it_was_written(write: Write) -> None:
    llama = load(write(), in_place)
    # The one number that no float32 holds, and that the decoder takes as one.
    assert vars(llama.config) == vars(toy().config) | {"rms_eps": float(np.float32(1e-5))}
    assert llama.attention is in_place
    assert (logits(llama) == logits(toy())).all()


def test_a_tied_head_is_the_embedding(write: Write) -> None:
    llama = load(GGUF(write({}, {"output.weight": None})))
    assert llama.weights.head is None
    assert not np.allclose(logits(llama), logits(toy()))


def test_what_may_be_left_out(write: Write) -> None:
    settings = {"llama.rope.freq_base": None, "llama.attention.head_count_kv": None}
    with pytest.raises(ModelError, match=r"attn_k.weight of shape \[16, 32\]; by its metadata .* \[32, 32\]"):
        load(write(settings))  # as many heads of keys as of queries
    assert config(GGUF(write({"llama.rope.freq_base": None}))).rope_theta == 10_000


def test_settings_that_ask_for_nothing(write: Write) -> None:
    neutral = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "llama.vocab_size": 64}
    neutral |= {"llama.attention.key_length": 8, "llama.rope.dimension_count": 8, "general.alignment": 64}
    assert (logits(load(write(neutral))) == logits(toy())).all()


def floats(raw: bytes) -> list[float]:
    return [float(x) for x in np.frombuffer(raw, np.float16)]


def nibbles(raw: bytes) -> list[int]:
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def fifth_bits(raw: bytes) -> list[int]:
    return [16 * (int.from_bytes(raw, "little") >> j & 1) for j in range(32)]


def scale_min(j: int, raw: bytes) -> tuple[int, int]:
    if j < 4:
        return raw[j] & 63, raw[j + 4] & 63
    return raw[j + 4] & 15 | raw[j - 4] >> 6 << 4, raw[j + 4] >> 4 | raw[j] >> 6 << 4


def k_block(raw: bytes, high: bytes, quants: bytes) -> Iterator[float]:
    d, least = floats(raw[:4])
    for j in range(8):
        scale, offset = scale_min(j, raw[4:16])
        for i in range(32):
            byte = quants[j // 2 * 32 + i]
            yield d * scale * ((byte >> 4 * (j % 2) & 15) + 16 * (high[i] >> j & 1)) - least * offset


def q6_k(raw: bytes) -> Iterator[float]:
    d, scales = floats(raw[208:])[0], np.frombuffer(raw[192:208], np.int8).tolist()
    for half in range(2):
        for part in range(4):
            for i in range(32):
                low = raw[half * 64 + part % 2 * 32 + i] >> part // 2 * 4 & 15
                high = raw[128 + half * 32 + i] >> 2 * part & 3
                yield d * scales[half * 8 + part * 2 + i // 16] * ((low | high << 4) - 32)


BLOCKS: dict[str, tuple[int, int, list[int], Callable[[bytes], Any]]] = {
    # numbers, bytes, where the float16 scales are, and the numbers of a block as ggml-quants.c has them
    "F32": (1, 4, [2], lambda b: struct.unpack("<f", b)),
    "F16": (1, 2, [0], floats),
    "BF16": (1, 2, [0], lambda b: struct.unpack("<f", b"\0\0" + b)),
    "Q4_0": (32, 18, [0], lambda b: [floats(b[:2])[0] * (q - 8) for q in nibbles(b[2:])]),
    "Q4_1": (32, 20, [0, 2], lambda b: [floats(b[:2])[0] * q + floats(b[2:4])[0] for q in nibbles(b[4:])]),
    "Q5_0": (
        32,
        22,
        [0],
        lambda b: [floats(b[:2])[0] * (q + h - 16) for q, h in zip(nibbles(b[6:]), fifth_bits(b[2:6]))],
    ),
    "Q5_1": (
        32,
        24,
        [0, 2],
        lambda b: [
            floats(b[:2])[0] * (q + h) + floats(b[2:4])[0] for q, h in zip(nibbles(b[8:]), fifth_bits(b[4:8]))
        ],
    ),
    "Q8_0": (32, 34, [0], lambda b: [floats(b[:2])[0] * q for q in np.frombuffer(b[2:], np.int8).tolist()]),
    "Q4_K": (256, 144, [0, 2], lambda b: k_block(b[:16], bytes(32), b[16:])),
    "Q5_K": (256, 176, [0, 2], lambda b: k_block(b[:16], b[16:48], b[48:])),
    "Q6_K": (256, 210, [208], q6_k),
}


@pytest.mark.parametrize("kind", TYPES)
def test_what_the_bytes_of_a_type_mean(write: Write, kind: str) -> None:
    numbers, size, scales, decode = BLOCKS[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (64 * 256 // numbers, size), np.uint8)
    for at in scales:  # halves between 0.01 and 2; of BF16 and F32, the upper half of one
        raw[:, at + 1] = rng.integers(0x20, 0x40, len(raw))
    d_model = {"output_norm.weight": np.ones(256, np.float32), "output.weight": None}
    shapes = {"attn_norm": (256,), "attn_q": (32, 256), "attn_k": (16, 256), "attn_v": (16, 256)}
    shapes |= {"attn_output": (256, 32), "ffn_norm": (256,), "ffn_gate": (64, 256), "ffn_up": (64, 256)}
    shapes |= {"ffn_down": (256, 64)}
    layers = {f"blk.{i}.{name}.weight": np.ones(s, np.float32) for i in (0, 1) for name, s in shapes.items()}
    file = write(
        {"llama.embedding_length": 256, "llama.attention.key_length": 8},
        {"token_embd.weight": (kind, raw.reshape(64, -1)), **d_model, **layers},
    )
    expected = [number for block in raw for number in decode(block.tobytes())]
    found = load(file).weights.embedding
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.ravel(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", QUICK)
def test_the_quick_way_is_that_of_the_gguf_package(write: Write, kind: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (9000, QUICK[kind]), np.uint8)
    raw[:, 1] &= 0xBB  # scales that are finite, with either sign
    raw[:, 3] &= 0xBB if kind == "Q4_1" else 0xFF
    tensors = {"token_embd.weight": (kind, raw)}
    found = load(write({}, tensors | {"output.weight": None})).weights.embedding
    assert (found.view(np.uint32) == dequantize(raw, GGMLQuantizationType[kind]).view(np.uint32)).all()


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"llama.rope.scaling.type": "linear"}, {}, "llama.rope.scaling.type, 'linear', .* not support"),
        ({"llama.rope.scaling.factor": 2.0}, {}, "llama.rope.scaling.factor, 2.0"),
        ({"llama.expert_count": 8}, {}, "llama.expert_count, 8"),
        ({"llama.something_new": [1, 2]}, {}, "llama.something_new, a list of 2"),
        ({}, {"rope_freqs.weight": np.ones(4, np.float32)}, r"rope_freqs.weight, F32 \[4\]: scaled rotary"),
        ({}, {"blk.0.attn_q.bias": np.ones(32, np.float32)}, r"blk.0.attn_q.bias, F32 \[32\]: not known"),
        ({}, {"blk.2.attn_q.weight": np.ones((32, 32), np.float32)}, "blk.2.attn_q.weight, .* not known"),
        ({}, {"blk.1.ffn_up.weight": None}, "has no tensor blk.1.ffn_up.weight"),
        ({}, {"token_embd.weight": None}, "has no tensor token_embd.weight"),
        (
            {},
            {"output_norm.weight": np.ones(31, np.float32)},
            r"output_norm.weight of shape \[31\]; .*\[32\]",
        ),
        ({}, {"token_embd.weight": ("Q2_K", np.zeros((64, 84)))}, "token_embd.weight of type Q2_K; .* Q4_1"),
        ({}, {"token_embd.weight": np.ones((64, 32), np.int8)}, "token_embd.weight of type I8"),
        (
            {},
            {"output_norm.weight": np.full(32, np.nan, np.float32)},
            "output_norm.weight has weights .* not",
        ),
        ({}, {"blk.0.ffn_norm.weight": np.full(32, -np.inf, np.float32)}, "ffn_norm.weight .* not finite"),
        ({"llama.block_count": None}, {}, "does not say llama.block_count"),
        ({"llama.block_count": 2.0}, {}, "llama.block_count is 2.0; it must be of type int"),
        ({"llama.block_count": True}, {}, "llama.block_count is True; it must be of type int"),
        ({"llama.attention.head_count": [4, 4]}, {}, "head_count is a list of 2; it must be of type int"),
        ({"llama.block_count": 4_000_000_000}, {}, "says 4000000000 layers; it has 21 tensors"),
        ({"llama.block_count": 3}, {}, "has no tensor blk.2.attn_norm.weight"),
        ({"llama.block_count": 0}, {}, "llama.block_count is 0; it must be at least 1"),
        ({"llama.attention.head_count": 5}, {}, "32 dimensions cannot be split into 5 heads"),
        ({"llama.attention.head_count_kv": 3}, {}, "n_heads is 4; it must be a multiple of n_kv_heads, 3"),
        ({"llama.attention.key_length": 7}, {}, "d_head is 7; it must be even"),
        ({"llama.attention.value_length": 4}, {}, "llama.attention.value_length is 4; it must be 8"),
        ({"llama.rope.dimension_count": 4}, {}, "llama.rope.dimension_count is 4; it must be 8"),
        ({"llama.vocab_size": 63}, {}, "llama.vocab_size is 63; it must be 64"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, {}, "names 2 tokens; token_embd.weight has 64 rows"),
        ({"llama.rope.freq_base": float("inf")}, {}, "llama.rope.freq_base is inf; .* above 0, and finite"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, {}, "rms_epsilon is 0.0; it must be above 0"),
        ({"general.alignment": 24}, {}, "general.alignment 24; it must be a power of two"),
    ],
)
def test_what_is_not_decoded_is_refused(
    write: Write, settings: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(write(settings, tensors))
    assert "toy.gguf" in str(caught.value)


def test_another_architecture_is_named(write: Write) -> None:
    with pytest.raises(ModelError, match=r"toy.gguf is of architecture 'qwen2'; only 'llama' is decoded"):
        load(write(architecture="qwen2"))


def test_a_file_cut_off_anywhere_is_refused(write: Write) -> None:
    path = write()
    whole = path.read_bytes()
    data = whole.index(toy().weights.embedding.tobytes())
    for length in [*range(len(whole) - 128, data, -997), *range(data, -1, -1)]:
        os.truncate(path, length)
        with pytest.raises(ModelError, match=r"toy.gguf is truncated"):
            GGUF(path)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 7])
def test_a_changed_byte_is_refused_or_changes_a_value(
    write: Write, words: dict[str, Any], every: int
) -> None:
    """Never another error, and never more memory than the file is large."""
    path = write({"tokenizer.ggml.merges": words["tokenizer.ggml.merges"], "llama.vocab_size": 64})
    whole = path.read_bytes()
    refused = 0
    with path.open("r+b", buffering=0) as file:
        for at in range(0, whole.index(toy().weights.embedding.tobytes()), every):
            for value in (255, whole[at] ^ 1, whole[at]):
                file.seek(at)
                file.write(bytes([value]))
                try:
                    load(path)
                except ModelError:
                    refused += 1
    assert refused > 1000 // every


HEADER = struct.pack("<4sI", b"GGUF", 3)


def key(name: str, type_: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", type_) + value


def tensor(name: str, shape: tuple[int, ...], offset: int, type_: int = 0) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}QIQ", *shape, type_, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is truncated or damaged: of 0 bytes, byte 3 is needed"),
        (b"PK\3\4" + bytes(40), "does not begin as a GGUF file does"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "is of GGUF version 1; versions 2 and 3"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is of GGUF version 50331648; .* little-endian"),
        (HEADER + struct.pack("<QQ", 2**63, 0), "has no room for 9,223,372,036,854,775,808 tensors"),
        (HEADER + struct.pack("<QQ", 0, 2**40), "has no room for 1,099,511,627,776 metadata values"),
        (HEADER + struct.pack("<QQ", 65_537, 0) + bytes(32 * 65_537), "65,537 tensors; at most 65,536 are"),
        (HEADER + struct.pack("<QQ", 0, 65_537) + bytes(13 * 65_537), "65,537 metadata values; at most"),
        (HEADER + struct.pack("<QQQ", 0, 1, 2**62) + bytes(20), "of 52 bytes, byte 4,611,686,018,427,387,9"),
        (HEADER + struct.pack("<QQ", 0, 1) + key("k", 13, bytes(8)), "k has type 13, which is none"),
        (HEADER + struct.pack("<QQ", 0, 1) + key("k", 9, struct.pack("<IQ", 9, 1)), "type 9, which is not"),
        (HEADER + struct.pack("<QQ", 0, 1) + key("k", 9, struct.pack("<IQ", 6, 2**60)), "numbers of k"),
        (HEADER + struct.pack("<QQ", 0, 1) + key("k", 9, struct.pack("<IQ", 8, 2**60)), "strings of k"),
        (HEADER + struct.pack("<QQ", 0, 1) + key("k", 8, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
        (HEADER + struct.pack("<QQ", 0, 2) + 2 * key("k", 0, b"1") + bytes(9), "has the key 'k' twice"),
        (HEADER + struct.pack("<QQ", 2, 0) + 2 * tensor("t", (1,), 0) + bytes(64), "the tensor 't' twice"),
        (HEADER + struct.pack("<QQ", 1, 0) + tensor("t", (1,) * 5, 0) + bytes(64), "t of 5 dimensions"),
        (HEADER + struct.pack("<QQ", 1, 0) + tensor("t", (2**40, 2**40), 0) + bytes(64), "t ends at byte"),
        (HEADER + struct.pack("<QQ", 1, 0) + tensor("t", (0,), 0) + bytes(64), r"t of shape \[0\]; .* some"),
        (HEADER + struct.pack("<QQ", 1, 0) + tensor("t", (31,), 0, 3) + bytes(64), "Q4_1 must be a multiple"),
        (
            HEADER + struct.pack("<QQ", 1, 0) + tensor("t", (1,), 0, 4) + bytes(64),
            "t of type 4; what is read",
        ),
        (HEADER + struct.pack("<QQ", 1, 0) + tensor("t", (1,), 32) + bytes(99), "t at 32 .* must be at 0"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"odd.gguf .*{message}"):
        GGUF(path)


@pytest.mark.parametrize(
    ("type_", "values"),
    [(0, bytes(1 << 20)), (10, bytes(1 << 20)), (8, struct.pack("<Q3s", 3, b"abc") * (1 << 16))],
)
def test_a_list_that_nobody_asks_for_takes_no_memory(tmp_path: Path, type_: int, values: bytes) -> None:
    path = tmp_path / "long.gguf"
    count = len(values) // {0: 1, 10: 8, 8: 11}[type_]
    listed = key("k", 9, struct.pack("<IQ", type_, count) + values)
    path.write_bytes(HEADER + struct.pack("<QQ", 0, 1) + listed)
    GGUF(path)  # what is imported or cached once
    tracemalloc.start()
    file = GGUF(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18
    assert file.get("k", Values).count == count


def test_lists_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "lists.gguf"
    lists = {"h": (2, struct.pack("<3H", 1, 2, 65535)), "s": (8, struct.pack("<Q1sQ", 1, b"a", 0))}
    lists |= {"q": (7, b"\0\1"), "none": (8, b"")}
    counts = {"h": 3, "s": 2, "q": 2, "none": 0}
    data = b"".join(key(k, 9, struct.pack("<IQ", t, counts[k]) + v) for k, (t, v) in lists.items())
    path.write_bytes(HEADER + struct.pack("<QQ", 0, 4) + data)
    file = GGUF(path)
    assert (file.numbers("h").tolist(), file.numbers("h").dtype) == ([1, 2, 65535], np.dtype("<u2"))
    assert file.numbers("q").tolist() == [False, True]
    assert file.strings("s") == ["a", ""]
    for name, read in (("h", file.strings), ("s", file.numbers), ("none", file.strings)):
        with pytest.raises(ModelError, match=f"lists.gguf has {name}, which is no list of "):
            read(name)
    with pytest.raises(ModelError, match=r"does not say x"):
        file.strings("x")
    os.truncate(path, 40)
    for name, read in (("h", file.numbers), ("s", file.strings)):
        with pytest.raises(ModelError, match=r"lists.gguf is truncated or damaged"):
            read(name)


def test_a_file_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ModelError, match=r"none.gguf cannot be read: No such file"):
        GGUF(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match=r"cannot be read: Is a directory"):
        GGUF(str(tmp_path))
    file = GGUF(write())
    file.path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"toy.gguf ends within blk.0.attn_norm.weight; it has been changed"):
        load(file)
    file.path.unlink()
    with pytest.raises(ModelError, match=r"toy.gguf cannot be read: No such file"):
        load(file)
