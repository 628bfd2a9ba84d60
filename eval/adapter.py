"""Whether an adapter fits its model: found out without the model's weights, before anything is evaluated."""

import torch
from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import reading

from .benchmarks import EvalError


def check_adapter(model: str, adapter: str, trust_remote_code: bool = False, revision: str | None = None) -> None:
    """Refuse an adapter that is not one of this model.

    Raises:
        UserError: the adapter cannot be read, or its tensors are not those that the model and its settings imply.
    """
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, revision=revision)
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:  # what is wrong with the model is reported when it is loaded
        return
    with reading(f"--adapter {adapter}"):
        settings = PeftConfig.from_pretrained(adapter, revision=revision)
        stored = load_peft_weights(adapter, device="cpu", revision=revision)
    whole = {f"base_model.model.{name}" for name in base.state_dict()}  # embeddings that were enlarged are stored whole
    with reading(f"--adapter {adapter} as one of {model}"), torch.device("meta"):
        expected = get_peft_model_state_dict(get_peft_model(base, settings), save_embedding_layers=False)

    if missing := sorted(expected.keys() - stored.keys()):
        raise EvalError(f"--adapter {adapter}: {missing[0]} is missing, one of {len(missing)} that {model} implies.")
    if further := sorted(stored.keys() - expected.keys() - whole):
        raise EvalError(f"--adapter {adapter}: {further[0]} has no place in {model}, one of {len(further)}.")
    for name, tensor in expected.items():
        found, wanted = list(stored[name].shape), list(tensor.shape)
        # The harness fits the vocabulary to the tokenizer.
        if found != wanted and config.get_text_config().vocab_size not in wanted:
            raise EvalError(f"--adapter {adapter}: {name} has shape {found}, but {model} implies {wanted}.")
