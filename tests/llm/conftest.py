"""GGUF files: the toy of `tinyllm.llm.llama` as a file, and a small tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from tinyllm.llm.llama import Llama, toy
from tinyllm.llm.tokenizer import ALPHABET

NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
NAMES |= {name: f"ffn_{name}" for name in ("gate", "up", "down")}
Write = Callable[..., Path]


def toy_settings(llama: Llama) -> dict[str, Any]:
    sizes = llama.config
    return {
        "llama.context_length": sizes.max_context,
        "llama.embedding_length": sizes.d_model,
        "llama.block_count": sizes.n_layers,
        "llama.feed_forward_length": sizes.d_ff,
        "llama.attention.head_count": sizes.n_heads,
        "llama.attention.head_count_kv": sizes.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": sizes.rms_eps,
        "llama.rope.freq_base": sizes.rope_theta,
    }


def toy_tensors(llama: Llama) -> dict[str, Any]:
    tensors = {"token_embd.weight": llama.weights.embedding, "output_norm.weight": llama.weights.norm}
    tensors |= {"output.weight": llama.weights.head}  # type: ignore[dict-item]
    for i, layer in enumerate(llama.weights.layers):
        tensors |= {f"blk.{i}.{NAMES.get(name, name)}.weight": array for name, array in vars(layer).items()}
    return tensors


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the seeded toy as a GGUF file, with other settings or tensors; None leaves one out.

    A tensor can be an array, or the name of a type and bytes `[rows, bytes of a row]`.
    """

    def call(
        settings: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
        *,
        architecture: str = "llama",
        name: str = "toy.gguf",
    ) -> Path:
        writer = GGUFWriter(tmp_path / name, architecture)
        llama = toy()
        for key, value in (toy_settings(llama) | (settings or {})).items():
            if value is not None:
                name_of_type = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
                getattr(writer, f"add_{name_of_type[type(value)]}")(key, value)
        for key, data in (toy_tensors(llama) | (tensors or {})).items():
            if isinstance(data, tuple):
                raw = np.asarray(data[1], np.uint8)
                writer.add_tensor(key, raw, raw_dtype=GGMLQuantizationType[data[0]])
            elif data is not None:
                writer.add_tensor(key, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return call


LOST = b"\x04\xf1"
SPECIAL = ["<|end|>", "<|end|>of", "<|start|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'system'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


@pytest.fixture
def words() -> dict[str, Any]:
    """Settings of a tokenizer: control tokens, one of a user's, bytes but two, merges."""
    letters = [letter for byte, letter in sorted(ALPHABET.items()) if byte not in LOST]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
    merged = [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*SPECIAL, "  own ", *letters, *merged],
        "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(letters) + len(merged))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
