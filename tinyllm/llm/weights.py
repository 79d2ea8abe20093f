"""The weights and the sizes of a Llama model, from a GGUF file; needs the extra `model`.

A file that `llama` would decode wrongly is refused: another architecture, scaled rotary embeddings, experts,
biases, unknown tensors or settings.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.infer.attention import Attention, gathered
from tinyllm.llm.gguf_file import GGUF, ModelError, Tensor, Values
from tinyllm.llm.llama import Array, LayerWeights, Llama, LlamaConfig, Weights, layer_shapes

__all__ = ["GGUF", "ModelError", "config", "load"]

LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""The GGUF names of the fields of `LayerWeights`; the rows of q and k have the same order."""

READ = frozenset({
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
})  # fmt: skip
"""The settings, after `llama.`, that `config` reads."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.finetuned": (False,),
    "rope.scale_linear": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}
"""Settings that the decoder ignores, with their neutral values."""

QUICK = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of 32 numbers, for the common types of 4 and 8 bits. `_quick` unpacks them in less than half the time
of the `gguf` package, which needs more than a second for 135 million numbers."""


def load(source: GGUF | Path | str, attention: Attention = gathered) -> Llama:
    """The decoder of a GGUF file, its weights float32.

    Args:
        source: the file or its path.
        attention: see `Llama`.

    Raises:
        ModelError: the file is damaged, or the decoder does not support the model.
    """
    file = source if isinstance(source, GGUF) else GGUF(source)
    sizes = config(file)
    left = dict(file.tensors)

    def take(name: str, shape: tuple[int, ...]) -> Array:
        if (tensor := left.pop(name, None)) is None:
            raise ModelError(f"{file.path.name} has no tensor {name}")
        if tensor.shape != shape:
            bound = f"by its metadata it must be {list(shape)}"
            raise ModelError(f"{file.path.name} has {name} of shape {list(tensor.shape)}; {bound}")
        return _dequantize(file, tensor)

    _no_strange_tensors(file, sizes)
    table = (sizes.vocab, sizes.d_model)
    shapes = layer_shapes(sizes)
    layers = tuple(
        LayerWeights(**{field: take(f"blk.{i}.{LAYER[field]}.weight", shapes[field]) for field in LAYER})
        for i in range(sizes.n_layers)
    )
    embedding, norm = take("token_embd.weight", table), take("output_norm.weight", table[1:])
    head = take("output.weight", table) if "output.weight" in left else None
    return Llama(sizes, Weights(embedding, layers, norm, head), attention)


def config(file: GGUF) -> LlamaConfig:
    """The sizes of the model in a file.

    Raises:
        ModelError: a size is missing or impossible, or the decoder does not support a setting.
    """
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise ModelError(f"{file.path.name} is of architecture {architecture!r}; only 'llama' is decoded")
    _no_strange_settings(file)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path.name} has no tensor token_embd.weight")
    d_model, heads = _whole(file, "embedding_length"), _whole(file, "attention.head_count")
    if d_model % heads and "llama.attention.key_length" not in file.metadata:
        raise ModelError(f"{file.path.name}: {d_model} dimensions cannot be split into {heads} heads")
    d_head = _whole(file, "attention.key_length", d_model // heads)
    vocab = file.tensors["token_embd.weight"].shape[0]
    for key, bound in {
        "attention.value_length": d_head,
        "rope.dimension_count": d_head,
        "vocab_size": vocab,
    }.items():
        if (size := _whole(file, key, bound)) != bound:
            raise ModelError(f"{file.path.name}: llama.{key} is {size}; it must be {bound}")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Values) and tokens.count != vocab:
        raise ModelError(f"{file.path.name} names {tokens.count} tokens; token_embd.weight has {vocab} rows")
    layers = _whole(file, "block_count")
    if layers > len(file.tensors):  # checked before anything is allocated for each
        raise ModelError(f"{file.path.name} says {layers} layers; it has {len(file.tensors)} tensors")
    try:
        return LlamaConfig(
            vocab=vocab,
            d_model=d_model,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=_whole(file, "attention.head_count_kv", heads),
            d_head=d_head,
            d_ff=_whole(file, "feed_forward_length"),
            max_context=_whole(file, "context_length"),
            rope_theta=_positive(file, "rope.freq_base", 10_000.0),
            rms_eps=_positive(file, "attention.layer_norm_rms_epsilon"),
        )
    except ValueError as error:
        raise ModelError(f"{file.path.name}: {error}") from error


def _whole(file: GGUF, setting: str, default: int | None = None) -> int:
    key = f"llama.{setting}"
    value = file.get(key, int) if default is None or key in file.metadata else default
    if value < 1:
        raise ModelError(f"{file.path.name}: {key} is {value}; it must be at least 1")
    return value


def _positive(file: GGUF, setting: str, default: float | None = None) -> float:
    key = f"llama.{setting}"
    value = file.get(key, float) if default is None or key in file.metadata else default
    if not (value > 0 and math.isfinite(value)):
        raise ModelError(f"{file.path.name}: {key} is {value}; it must be above 0, and finite")
    return value


def _no_strange_settings(file: GGUF) -> None:
    for key, value in file.metadata.items():
        space, _, setting = key.partition(".")
        if space == "llama" and setting not in READ and value not in NEUTRAL.get(setting, ()):
            raise ModelError(f"{file.path.name} has {key}, {value!r}, which this decoder does not support")


def _no_strange_tensors(file: GGUF, sizes: LlamaConfig) -> None:
    known = {"token_embd.weight", "output_norm.weight", "output.weight"}
    known |= {f"blk.{i}.{name}.weight" for i in range(sizes.n_layers) for name in LAYER.values()}
    for name, tensor in file.tensors.items():
        if name not in known:
            what = "scaled rotary embeddings" if name.startswith("rope_") else "not known to this decoder"
            raise ModelError(f"{file.path.name} has {name}, {tensor.type} {list(tensor.shape)}: {what}")


def _dequantize(file: GGUF, tensor: Tensor) -> Array:
    from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415 - the extra may be missing

    raw = file.raw(tensor)
    with np.errstate(all="ignore"):  # non-finite values are checked below
        if tensor.type in QUICK:
            array = _quick(raw.reshape(-1, QUICK[tensor.type]), tensor.type).reshape(tensor.shape)
        else:
            array = dequantize(raw, GGMLQuantizationType[tensor.type])
        finite = math.isfinite(array.min()) and math.isfinite(array.max())  # both are NaN if any number is
    if not finite:
        raise ModelError(f"{file.path.name} is damaged: {tensor.name} has weights that are not finite")
    return array


def _quick(blocks: NDArray[np.uint8], kind: str) -> Array:
    """The numbers of blocks of a type in QUICK, `[blocks, 32]`, equal to the `gguf` package's bit for bit."""
    numbers = np.empty((len(blocks), 32), np.float32)
    for at in range(0, len(blocks), 1024):  # intermediate arrays stay in the processor's cache
        part, into = blocks[at : at + 1024], numbers[at : at + 1024]
        scale = part[:, :2].copy().view(np.float16).astype(np.float32)
        if kind == "Q8_0":
            np.multiply(part[:, 2:].view(np.int8), scale, out=into)
            continue
        quants = part[:, -16:]
        for half, four in ((into[:, :16], quants & 15), (into[:, 16:], quants >> 4)):
            np.multiply(four.view(np.int8) - 8 if kind == "Q4_0" else four, scale, out=half)
        if kind == "Q4_1":
            into += part[:, 2:4].copy().view(np.float16).astype(np.float32)
    return numbers
