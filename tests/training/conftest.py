import json
import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.families import BY_NAME
from training.__main__ import app


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """One token a word of a small vocabulary; ids below 3 are special."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>", *(f"w{i}" for i in range(90))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


@pytest.fixture
def save_model(tokenizer, tmp_path):
    """Save a tiny model of a family with its tokenizer, and return the folder."""

    def save(family="Llama", **fields):
        folder = tmp_path / f"model-{family}"
        BY_NAME[family].causal_lm(**fields).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def save_config(tokenizer, tmp_path):
    """Save the config of a tiny model with its tokenizer, and return the folder."""

    def save(family="Llama", **fields):
        folder = tmp_path / f"config-{family}"
        BY_NAME[family].config(**{"initializer_range": 0.02} | fields).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


def words(count: int, seed: int = 0) -> str:
    """A text with something to learn: mostly the word after the last one."""
    found, word = [], seed
    for index in range(count):
        word = (word + (1 if index % 7 else 5)) % 90
        found.append(f"w{word}")
    return " ".join(found)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": words(5 + 7 * (seed % 5), seed)}) for seed in range(60)]
    path.write_text("\n".join(lines) + "\n")
    return path


def succeed(*args) -> str:
    """What a command prints that does what it was asked to."""
    result = CliRunner().invoke(app, list(map(str, args)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(message: str, *args) -> None:
    """A command is refused in one line, with status 2."""
    result = CliRunner().invoke(app, list(map(str, args)), catch_exceptions=False)
    assert result.exit_code == 2, result.output
    *_, error, end = result.stderr.split("\n")
    assert error.startswith("error: "), result.stderr
    assert re.search(message, error), error
    assert end == ""
