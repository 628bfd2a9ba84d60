"""A policy that is trained and its reference compute the same numbers, where a reader was chosen by name."""

import pytest
import torch

from tests.families import BY_NAME, tokens


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("reader", ["training", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_policy_and_reference_agree_bit_for_bit_in_bf16(name, reader, checkpointing, mode):
    """As DPO and GRPO compare them: with "auto" each has the reader that is best for it, and they round differently."""
    model = BY_NAME[name].causal_lm(dtype=torch.bfloat16, attn_res_implementation=reader, **mode)
    reference = BY_NAME[name].causal_lm(dtype=torch.bfloat16, attn_res_implementation=reader, **mode)
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = tokens()
    policy = model.train()(ids, use_cache=False).logits
    with torch.no_grad():
        frozen = reference(ids).logits
        assert torch.equal(policy, frozen)
    policy.float().logsumexp(-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model.model.attn_res.query.grad.any()
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, frozen)


def test_the_reader_of_inference_refuses_gradients_where_it_was_chosen_by_name():
    model = BY_NAME["Llama"].causal_lm(attn_res_implementation="two_phase").train()
    with pytest.raises(ValueError, match="'two_phase' does not support gradients"):
        model(tokens())
