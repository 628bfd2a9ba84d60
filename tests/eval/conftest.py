import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.benchmarks import task_manager
from tests.eval.samples import write_samples
from tests.families import BY_NAME


@pytest.fixture(scope="session")
def manager():
    return task_manager()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """A few rows for each of the 15 benchmarks."""
    folder = tmp_path_factory.mktemp("data")
    write_samples(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<pad>", "<s>", "</s>", *letters])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def save_model(tmp_path_factory, tokenizer):
    """Save a tiny model of a family with its tokenizer, and return the folder."""

    def save(family="Llama", name=None, base=False, **fields):
        folder = tmp_path_factory.mktemp("models") / (name or family)
        make = BY_NAME[family].base_causal_lm if base else BY_NAME[family].causal_lm
        make(vocab_size=259, **fields).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save
