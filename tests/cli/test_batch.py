"""`tinyllm batch` on a toy in a file; what it promises is in tests/model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.infer.batch import Batch, Finished
from tinyllm.infer.generate import generate
from tinyllm.infer.gguf_file import GGUF
from tinyllm.infer.sampling import Sampling
from tinyllm.infer.tokenizer import Tokenizer
from tinyllm.infer.weights import load

Invoke = Callable[..., Any]
LINES = ["hello world", "12 12", "he", "  world  ", "hello hello hello hello", "w"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(LINES), encoding="utf-8")
    return path


def answers(done: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    assert done.exit_code == 0, done.output
    *rows, last = map(json.loads, done.stdout.splitlines())
    return rows, last


def test_a_small_pool_answers_what_a_large_one_does_in_the_order_of_the_file(
    invoke: Invoke, model: Path, prompts: Path
) -> None:
    arguments = ("batch", prompts, "--max-tokens", 12, "--block-size", 2, "--model", model, "--json")
    rows, last = answers(invoke(*arguments))
    llama, tokenizer = load(model), Tokenizer(GGUF(model))
    assert [row["index"] for row in rows] == list(range(6))
    for row, line in zip(rows, LINES):
        assert row["prompt_ids"] == tokenizer.encode(line)
        alone = generate(llama, row["prompt_ids"], max_tokens=12, stop=[tokenizer.eos]).outputs[0]
        assert (row["ids"], row["finish"]) == (alone.ids, alone.finish)
        assert row["text"] == tokenizer.decode(alone.ids)
    assert last["figures"]["preemptions"] == 0
    assert last["figures"]["blocks"] == last["figures"]["blocks_needed"]
    small, few = answers(invoke(*arguments, "--num-blocks", "30%"))
    assert few["figures"]["preemptions"] > 0 < few["figures"]["replayed_tokens"]
    assert few["figures"]["blocks"] == few["figures"]["blocks_needed"] * 30 // 100
    assert sum(row["preemptions"] for row in small) == few["figures"]["preemptions"]
    assert max(few["used"]) <= few["figures"]["peak_blocks"] <= few["figures"]["blocks"]
    assert [{**row, "preemptions": 0} for row in small] == rows


def test_people_see_the_texts_and_one_line(invoke: Invoke, model: Path, prompts: Path) -> None:
    done = invoke("batch", prompts, "--max-tokens", 3, "--model", model)
    assert done.exit_code == 0
    for part in (
        "6 requests, 18 tokens",
        "100% of what all need at once",
        "0 preemptions, 0 tokens replayed",
    ):
        assert part in done.stdout
    assert "\n6 " in done.stdout


def test_lines_of_json_say_each_what_they_want(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello", "max_tokens": 3},
        {"prompt_ids": [5, 6, 7], "temperature": 1, "seed": 4, "top_p": 0.9},
        {"prompt": "hello", "chat": True},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows, _ = answers(invoke("batch", "p.jsonl", "--max-tokens", 5, "--model", model, "--json"))
    llama, tokenizer = load(model), Tokenizer(GGUF(model))
    chat = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "hello"}]), special=True)
    assert [row["prompt_ids"] for row in rows] == [tokenizer.encode("hello"), [5, 6, 7], chat]
    assert len(rows[0]["ids"]) == 3
    assert (
        rows[1]["ids"]
        == generate(llama, [5, 6, 7], max_tokens=5, sampling=Sampling(1, 0.9, 4)).outputs[0].ids
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "has no prompt in it"),
        ('{"prompt": "a"', "line 1 is no JSON"),
        ('a\n{"promt": "a"}', "line 2: there is no field 'promt'; there are prompt, prompt_ids"),
        ('{"prompt": 3}', "line 1: prompt is 3; it must be a str"),
        ('{"prompt": "a", "max_tokens": true}', "line 1: max_tokens is true; it must be a int"),
        ('{"prompt": "a", "temperature": -1}', "line 1: temperature is -1"),
        ('{"prompt_ids": [99999]}', "line 1: id 99999 is outside the vocabulary"),
        ('{"prompt_ids": []}', "line 1: the prompt has 0 tokens"),
        ('{"prompt_ids": ["a"]}', "line 1: id must be an integer, not 'a'"),
        ('{"prompt": "a", "prompt_ids": [1]}', "line 1 must have prompt or prompt_ids, one of the two"),
        ('{"max_tokens": 3}', "line 1 must have prompt or prompt_ids"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ("he\n" + "h" * 300, "line 2: the prompt has 300 tokens; the model takes at most 256"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens is 0; it must be at least 1"),
        (b"\xff\xfe", "cannot read prompts.txt"),
    ],
)
def test_a_file_that_is_wrong_names_the_line(
    invoke: Invoke, model: Path, tmp_path: Path, text: str | bytes, message: str
) -> None:
    (tmp_path / "prompts.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    done = invoke("batch", "prompts.txt", "--model", model)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("blocks", ["0", "-1", "x", "0%", "25 %", ""])
def test_a_pool_that_is_no_number(invoke: Invoke, model: Path, prompts: Path, blocks: str) -> None:
    done = invoke("batch", prompts, f"--num-blocks={blocks}", "--model", model)
    assert done.exit_code == 2
    assert "is neither a number of blocks, at least 1, nor a share such as 25%" in done.stderr


def test_a_pool_too_small_names_the_least_one(invoke: Invoke, model: Path, prompts: Path) -> None:
    arguments = ("batch", prompts, "--max-tokens", 12, "--block-size", 2, "--model", model)
    lengths = [len(Tokenizer(GGUF(model)).encode(line)) + 11 for line in LINES]
    least = max(-(-length // 2) for length in lengths)
    done = invoke(*arguments, "--num-blocks", least - 1)
    assert done.exit_code == 2
    assert f"The least pool for this file is --num-blocks {least}" in done.stderr
    assert invoke(*arguments, "--num-blocks", least).exit_code == 0


def test_ctrl_c_keeps_what_is_finished(
    invoke: Invoke, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Batch.step
    steps = 0

    def interrupted(self: Batch) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            self.finished = [Finished(2, [5], "length", 0)]  # within the step that is interrupted
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Batch, "step", interrupted)
    lines = [{"prompt": "hello", "max_tokens": most} for most in (9, 2, 9, 3)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    done = invoke("batch", prompts, "--model", model, "--json")
    assert done.exit_code == 130
    *rows, last = map(json.loads, done.stdout.splitlines())
    assert [row["index"] for row in rows] == [1, 2, 3]
    assert last["figures"]["requests"] == 4
    assert "interrupted: 3 of 4 requests are finished, 1 are not" in done.stderr
