"""The fetched model. Where it is missing these tests are skipped, unless TINYLLM_MODEL=required."""

from pathlib import Path

import pytest

from tinyllm.llm import model
from tinyllm.llm.gguf_file import GGUF, ModelError
from tinyllm.llm.llama import Llama
from tinyllm.llm.tokenizer import Tokenizer
from tinyllm.llm.weights import load


@pytest.fixture(scope="session")
def path() -> Path:
    try:
        return model.find()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def file(path: Path) -> GGUF:
    return GGUF(path)


@pytest.fixture(scope="session")
def llama(file: GGUF) -> Llama:
    return load(file)


@pytest.fixture(scope="session")
def tokenizer(file: GGUF) -> Tokenizer:
    return Tokenizer(file)
