"""`tinyllm generate` on a toy in a file; what it promises is in tests/model."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyllm.llm.generate import generate
from tinyllm.llm.gguf_file import GGUF
from tinyllm.llm.llama import TOY, LlamaConfig, toy
from tinyllm.llm.sampling import Sampling
from tinyllm.llm.tokenizer import Tokenizer
from tinyllm.llm.weights import load

Invoke = Callable[..., Any]
TEXT = "hello world 12"


@pytest.fixture
def ids(model: Path) -> list[int]:
    return Tokenizer(GGUF(model)).encode(TEXT)


def said(done: Any) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("lookup", [[], ["--lookup"]])
def test_both_caches_say_what_the_library_says(
    invoke: Invoke, model: Path, ids: list[int], cache: str, lookup: list[str]
) -> None:
    found = said(
        invoke("generate", TEXT, "--cache", cache, "--max-tokens", 9, "--model", model, "--json", *lookup)
    )
    llama, tokenizer = load(model), Tokenizer(GGUF(model))
    expected = generate(llama, ids, max_tokens=9, stop=[tokenizer.eos]).outputs[0]
    assert found["prompt_ids"] == ids
    assert found["ids"] == [expected.ids]
    assert found["text"] == [tokenizer.decode(expected.ids)]
    assert found["finish"] == [expected.finish]
    assert found["figures"]["cache"] == cache
    assert found["figures"]["prompt_tokens"] == len(ids)
    assert "score" not in found


def test_the_text_streams_and_a_line_of_figures_follows(invoke: Invoke, model: Path, ids: list[int]) -> None:
    done = invoke("generate", TEXT, "--max-tokens", 9, "--model", model)
    expected = generate(load(model), ids, max_tokens=9).outputs[0]
    *text, line = done.stdout.removesuffix("\n").rsplit("\n", 1)
    assert text == [Tokenizer(GGUF(model)).decode(expected.ids)]
    for part in (
        "prefill ",
        "decode ",
        "tokens/s",
        "KV ",
        "MB held, contiguous ",
        "0 blocks shared at the peak",
    ):
        assert part in line


def test_several_outputs_differ_share_and_repeat(invoke: Invoke, model: Path, ids: list[int]) -> None:
    arguments = (
        "generate",
        TEXT,
        "-n",
        3,
        "--max-tokens",
        6,
        "--block-size",
        4,
        "--model",
        model,
        "--ignore-eos",
    )
    found = said(invoke(*arguments, "--json"))
    assert len({tuple(output) for output in found["ids"]}) == 3
    assert found["ids"] == said(invoke(*arguments, "--json", "--temperature", 0.8))["ids"]
    assert found["ids"] != said(invoke(*arguments, "--json", "--seed", 1))["ids"]
    expected = generate(load(model), ids, max_tokens=6, n=3, sampling=Sampling(0.8))
    assert found["ids"] == [output.ids for output in expected.outputs]
    assert found["figures"]["shared_blocks"] == -(-len(ids) // 4)
    shown = invoke(*arguments).stdout
    assert [line[:2] for line in shown.splitlines() if line[:1].isdigit()][-3:] == ["1 ", "2 ", "3 "]


def test_beams_come_with_their_scores(invoke: Invoke, model: Path) -> None:
    arguments = ("generate", TEXT, "--beams", 3, "--max-tokens", 5, "--model", model)
    found = said(invoke(*arguments, "--json"))
    assert len(found["ids"]) == len(found["score"]) == 3
    assert found["score"][0] >= found["score"][1]
    assert found["ids"] == said(invoke(*arguments, "--json", "--cache", "contiguous"))["ids"]
    shown = invoke(*arguments).stdout
    assert f"{found['score'][0]:.2f} " in shown
    assert ", greedy" in shown


def test_prompt_ids_go_on_past_the_end_token(invoke: Invoke, model: Path) -> None:
    """So that a run can be compared id by id; a text ends where the model ends it."""
    llama, tokenizer = load(model), Tokenizer(GGUF(model))
    start = next(
        i for i in range(200) if tokenizer.eos in generate(llama, [i], max_tokens=40).outputs[0].ids[:-1]
    )
    arguments = ("generate", "--prompt-ids", f"{start}", "--max-tokens", 40, "--model", model, "--json")
    found = said(invoke(*arguments))
    assert len(found["ids"][0]) == 40
    assert (found["prompt_ids"], found["finish"]) == ([start], ["length"])
    ended = said(invoke(*arguments, "--eos"))
    assert ended["ids"][0] == found["ids"][0][: found["ids"][0].index(tokenizer.eos) + 1]
    assert ended["finish"] == ["stop"]


def test_a_chat_is_asked_by_the_template(invoke: Invoke, model: Path) -> None:
    found = said(invoke("generate", "hello", "--chat", "--max-tokens", 2, "--model", model, "--json"))
    tokenizer = Tokenizer(GGUF(model))
    assert found["prompt_ids"] == tokenizer.chat([{"role": "user", "content": "hello"}])


def test_names_of_control_tokens_are_text(invoke: Invoke, model: Path) -> None:
    tokenizer = Tokenizer(GGUF(model))
    end = tokenizer.decode([tokenizer.eos], special=True)
    arguments = ("generate", f"he{end}", "--max-tokens", 1, "--model", model, "--json")
    assert said(invoke(*arguments))["prompt_ids"] == tokenizer.encode(f"he{end}")
    found = said(invoke(*arguments, "--chat"))["prompt_ids"]
    assert found.count(tokenizer.eos) == 1
    assert f"he{end}{end}" in tokenizer.decode(found, special=True)


@pytest.mark.parametrize("how", [[], ["--lookup"], ["-n", 2, "--temperature", 0], ["--beams", 1]])
def test_a_stop_text_ends_an_output_and_is_not_shown(
    invoke: Invoke, model: Path, ids: list[int], how: list[object]
) -> None:
    tokenizer = Tokenizer(GGUF(model))
    plain = generate(load(model), ids, max_tokens=20).outputs[0].ids
    pairs = [tokenizer.decode(plain[at : at + 2]) for at in range(19)]
    at, stop = next((at, text) for at, text in enumerate(pairs) if at and len(text) > 1 and text.isascii())
    assert stop not in tokenizer.decode(plain[: at + 1])
    stops = ("--stop", "never", "--stop", stop, "--ignore-eos")
    arguments = ("generate", TEXT, "--max-tokens", 20, "--model", model, *stops, *how)
    found = said(invoke(*arguments, "--json"))
    assert {*found["finish"]} == {"stop"}
    assert {*map(tuple, found["ids"])} == {tuple(plain[: at + 2])}
    assert {*found["text"]} == {tokenizer.decode(plain[:at])}
    shown = invoke(*arguments).stdout
    assert tokenizer.decode(plain[:at]).strip() in shown
    assert tokenizer.decode(plain[: at + 2]).strip() not in shown


def test_what_ends_an_answer_ends_an_output(
    invoke: Invoke, model: Path, write: Callable[..., Path], words: dict[str, Any], ids: list[int]
) -> None:
    """By its id in the file, by the template, or by its name."""
    plain = generate(load(model), ids, max_tokens=12).outputs[0].ids
    arguments = ("generate", TEXT, "--max-tokens", 12, "--json")
    kinds = list(words["tokenizer.ggml.token_type"])
    kinds[plain[5]] = 3  # the sixth token becomes a control token
    name = words["tokenizer.ggml.tokens"][plain[5]]
    turns = "{% for m in messages %}{{ m.content }}" + name + "{% endfor %}"
    vocab = len(kinds)
    weights = toy(1, LlamaConfig(**{**vars(TOY), "vocab": vocab})).weights
    tensors = {"token_embd.weight": weights.embedding, "output.weight": weights.head}
    other = words | {"tokenizer.ggml.token_type": kinds}
    for more, options in (
        ({"tokenizer.ggml.eot_token_id": plain[5]}, []),
        ({"tokenizer.chat_template": turns}, []),
        ({}, ["--stop", name, "--ignore-eos"]),
    ):
        found = said(invoke(*arguments, "--model", write(other | more, tensors, name="b.gguf"), *options))
        assert (found["ids"], found["finish"]) == ([plain[:6]], ["stop"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a PROMPT or --prompt-ids, one of the two"),
        (["a", "--prompt-ids", "1"], "one of the two"),
        ([""], "the prompt is empty"),
        (["--prompt-ids", "1,,2"], "--prompt-ids: '' is no token id, 0 to "),
        (["--prompt-ids", "9999"], "--prompt-ids: '9999' is no token id"),
        (["--prompt-ids", "-1"], "--prompt-ids: '-1' is no token id"),
        (["a", "--beams", "2", "-n", "2"], "--beams searches for the likeliest outputs"),
        (["a", "--beams", "2", "--temperature", "1"], "--beams searches"),
        (["a", "--beams", "9999"], "beams is 9999; it must be at most"),
        (["a", "--lookup", "-n", "2"], "--lookup is for one greedy output: it excludes -n and --temperature"),
        (["a", "--cache", "contiguous", "--num-blocks", "3"], "--num-blocks is for --cache paged"),
        (["a", "--stop", ""], "a stop text is empty; it must have at least one letter"),
        (["a", "--top-p", "0", "--temperature", "1"], "top_p is 0.0; it must be above 0"),
        (["h" * 300], "the prompt has 300 tokens; the model takes at most 256"),
    ],
)
def test_what_makes_no_sense_is_refused(
    invoke: Invoke, model: Path, arguments: list[str], message: str
) -> None:
    done = invoke("generate", *arguments, "--model", model)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_pool_that_runs_dry_says_what_would_do(invoke: Invoke, model: Path, ids: list[int]) -> None:
    arguments = ("generate", TEXT, "--max-tokens", 20, "--block-size", 2, "--ignore-eos", "--model", model)
    needed = -(-(len(ids) + 19) // 2)
    done = invoke(*arguments, "--num-blocks", needed - 1)
    assert done.exit_code == 2
    assert "the pool ran dry: the append needs 1 blocks, but only 0 are free" in done.stderr
    assert f"With --num-blocks {needed} it cannot" in done.stderr
    assert invoke(*arguments, "--num-blocks", needed).exit_code == 0


def test_no_model_says_how_to_get_one(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLLM_CACHE", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("hello\n")
    for arguments in (("generate", "a"), ("batch", "prompts.txt")):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert "tinyllm model fetch" in done.stderr


def test_stdin_is_read_where_asked(model: Path, command: str, tmp_path: Path) -> None:
    for name in ("generate", "batch"):
        done = subprocess.run(
            [command, name, "-", "--max-tokens", "2", "--model", str(model), "--json"],
            input="\ufeffhello", capture_output=True, encoding="utf-8", cwd=tmp_path, timeout=60, check=True,
        )  # fmt: skip
        first = json.loads(done.stdout.splitlines()[0])
        assert first["prompt_ids"] == Tokenizer(GGUF(model)).encode("hello")


def test_an_encoding_that_lacks_a_letter_does_not_stop_it(model: Path, here: Callable[..., Any]) -> None:
    arguments = ("generate", "hello", "--max-tokens", 60, "--ignore-eos", "--model", model)
    done = here(*arguments, encoding="ascii", env={"NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert b"prefill" in done.stdout


def test_ctrl_c_ends_a_stream_with_its_figures(model: Path, tmp_path: Path) -> None:
    slow = f"""
import signal, sys
import tinyllm.llm.llama as llama
forward, passes = llama.Llama.forward, []
def wait(*arguments, **options):
    passes.append(1)
    if len(passes) == 4:
        signal.raise_signal(signal.SIGINT)
    return forward(*arguments, **options)
llama.Llama.forward = wait
from tinyllm.cli import main
main(["generate", "hello", "--max-tokens", "50", "--ignore-eos", "--model", {str(model)!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", slow], capture_output=True, cwd=tmp_path, timeout=60, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.returncode == 130
    assert b"prefill" in done.stdout
    assert b"Traceback" not in done.stderr


def test_a_terminal_shows_the_prompt_too(on_terminal: Callable[..., tuple[int, str]], model: Path) -> None:
    code, shown = on_terminal("generate", TEXT, "--max-tokens", "3", "--model", model)
    assert code == 0
    assert TEXT in shown
    assert "prefill" in shown
    assert np.char.count(shown, "tokens/s") == 2
