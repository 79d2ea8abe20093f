"""`tinyllm batch` on a toy in a file; what it promises is in tests/model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.llm.batch import Batch, Finished
from tinyllm.llm.generate import generate
from tinyllm.llm.gguf_file import GGUF
from tinyllm.llm.sampling import Sampling
from tinyllm.llm.tokenizer import Tokenizer
from tinyllm.llm.weights import load

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
    chat = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert [row["prompt_ids"] for row in rows] == [tokenizer.encode("hello"), [5, 6, 7], chat]
    assert len(rows[0]["ids"]) == 3
    assert (
        rows[1]["ids"]
        == generate(llama, [5, 6, 7], max_tokens=5, sampling=Sampling(1, 0.9, 4)).outputs[0].ids
    )


def test_lines_end_with_a_line_feed_alone(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    texts = ["he\u2028llo", "h\x85e", "a\x0cb", "a\x0bb\x1cc", "a\rb"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts[:2]] + texts[2:]
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, " \x0c ", ""]).encode())
    rows, _ = answers(invoke("batch", "p.txt", "--max-tokens", 1, "--model", model, "--json"))
    tokenizer = Tokenizer(GGUF(model))
    assert [row["prompt_ids"] for row in rows] == [tokenizer.encode(text) for text in texts]


def test_a_line_draws_with_the_seed_of_the_run_plus_its_number(
    invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text('hello\n\nhello\nhello\n{"prompt": "hello", "seed": 4}\n')
    arguments = ("--max-tokens", 6, "--temperature", 1.2, "--model", model)
    rows, _ = answers(invoke("batch", "p.txt", *arguments, "--seed", 7, "--json"))
    assert [(row["line"], row["seed"]) for row in rows] == [(1, 8), (3, 10), (4, 11), (5, 4)]
    assert len({tuple(row["ids"]) for row in rows}) == 4
    for row in rows:
        alone = invoke("generate", "hello", *arguments, "--seed", row["seed"], "--json")
        assert json.loads(alone.stdout)["ids"] == [row["ids"]]
    shown = invoke("batch", "p.txt", *arguments, "--seed", 7).stdout
    for text in ("1 (seed 8) ", "2 (seed 10) ", "4 (seed 4) "):
        assert text in shown
    assert "seed" not in invoke("batch", "p.txt", "--max-tokens", 6, "--model", model).stdout


def test_stop_texts_of_all_lines_and_of_one(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(GGUF(model))
    plain = generate(load(model), tokenizer.encode("hello"), max_tokens=9).outputs[0].ids
    first, second = (tokenizer.decode(plain[at : at + 2]) for at in (2, 5))
    lines: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"prompt": "hello", "stop": second},
        {"prompt": "hello", "stop": ["never", second]},
        {"prompt_ids": tokenizer.encode("hello")},
        {"prompt": "hello", "stop": []},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows, _ = answers(
        invoke("batch", "p.jsonl", "--max-tokens", 9, "--stop", first, "--model", model, "--json")
    )
    assert [len(row["ids"]) for row in rows] == [4, 7, 7, 4, 9]
    assert [row["finish"] for row in rows] == ["stop"] * 4 + ["length"]
    texts = [tokenizer.decode(plain[:n]) for n in (2, 5, 5, 2, 9)]
    assert [row["text"] for row in rows] == texts


def test_a_message_in_a_batch_is_text(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(GGUF(model))
    end = tokenizer.decode([tokenizer.eos], special=True)
    (tmp_path / "p.txt").write_text(f"he{end}")
    for chat, ends in (([], 0), (["--chat"], 1)):
        rows, _ = answers(invoke("batch", "p.txt", "--max-tokens", 1, "--model", model, "--json", *chat))
        assert rows[0]["prompt_ids"].count(tokenizer.eos) == ends


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "has no prompt in it"),
        ('{"prompt": "a"', "line 1 is not valid JSON"),
        ('a\n{"promt": "a"}', "line 2: there is no field 'promt'; expected one of prompt, prompt_ids"),
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
        ('{"prompt": "a", "stop": 3}', "line 1: stop is 3; it must be a list"),
        ('{"prompt": "a", "stop": ["b", 3]}', "line 1: stop has 3; it must be a str, or a list of them"),
        ('{"prompt": "a", "stop": ""}', "line 1: a stop text is empty"),
        ('{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}", "line 1 is not valid JSON: Exceeds the limit"),
        ('{"prompt": ' * 9999, "line 1 is not valid JSON: maximum recursion depth"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "line 1: int too large to convert to float"),
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
