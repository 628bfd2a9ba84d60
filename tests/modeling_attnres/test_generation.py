"""Generation: the KV cache changes nothing, whatever the strategy, the padding or the cache."""

import pytest
import torch
from transformers import DynamicCache, StaticCache, set_seed

from tests.families import CACHE, FAMILIES, tokens


GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
STRATEGIES = {
    "greedy": GREEDY,
    "sampling": GREEDY | {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "beams": GREEDY | {"num_beams": 3},
    "beam sampling": GREEDY | {"num_beams": 3, "do_sample": True},
}


def generate(model, ids, **kwargs):
    set_seed(0)
    return model.generate(ids, attention_mask=kwargs.pop("attention_mask", torch.ones_like(ids)), **kwargs)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_cached_equals_uncached(family, mode, strategy):
    model, ids = family.causal_lm(**mode), tokens(length=10)
    cached = generate(model, ids, **strategy)
    assert cached.shape == (2, 18)
    assert torch.equal(cached, generate(model, ids, use_cache=False, **strategy))


def test_cached_pieces_equal_the_full_pass(family, layout):
    model, ids = family.causal_lm(**layout), tokens(length=30)
    with torch.no_grad():
        expected = model(ids).logits
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, **{CACHE: cache}, use_cache=True).logits for piece in ids.split([13, 1, 9, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_left_padded_rows_do_not_depend_on_their_neighbours(family, mode):
    model = family.causal_lm(**mode)
    prompts = [tokens(batch=1, length=length, seed=length) for length in (4, 9, 13)]
    batch = torch.cat([torch.nn.functional.pad(prompt, (13 - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (13 - p.shape[1], 0)) for p in prompts])
    together = generate(model, batch, attention_mask=mask, **GREEDY)[:, 13:]
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row], generate(model, prompt, **GREEDY)[0, prompt.shape[1] :])


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_prefill_in_chunks(family, mode, chunk):
    model, ids = family.causal_lm(**mode), tokens(length=18)
    assert torch.equal(generate(model, ids, prefill_chunk_size=chunk, **GREEDY), generate(model, ids, **GREEDY))


def test_static_cache(family, mode):
    model, ids = family.causal_lm(**mode), tokens(length=10)
    expected = generate(model, ids, **GREEDY)
    assert torch.equal(generate(model, ids, cache_implementation="static", disable_compile=True, **GREEDY), expected)
    cache = StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(generate(model, ids, **{CACHE: cache}, **GREEDY), expected)


def test_a_cache_made_for_the_base_family_works(family, mode):
    """Nothing of depth attention enters the KV cache; the name used before transformers 5.24 is still accepted."""
    model, ids = family.causal_lm(**mode), tokens(length=10)
    cache = DynamicCache(config=family.base("Config")(**family.tiny))
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache, use_cache=True)
        found = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, model(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)


def test_prompt_lookup(mode):
    model = FAMILIES[0].causal_lm(**mode)
    ids = tokens(batch=1, length=6).repeat(1, 4)
    found = generate(model, ids, prompt_lookup_num_tokens=4, **GREEDY)
    assert torch.equal(found, generate(model, ids, **GREEDY))


def test_two_interleaved_generations(family, mode):
    """No state survives a step in the model: two caches can be advanced in turn."""
    model = family.causal_lm(**mode)
    prompts = tokens(batch=1, length=8, seed=3), tokens(batch=1, length=11, seed=4)
    expected = [generate(model, prompt, **GREEDY)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    caches = [DynamicCache(config=model.config) for _ in prompts]
    steps, found = list(prompts), ([], [])
    with torch.no_grad():
        for _ in range(GREEDY["max_new_tokens"]):
            for index, cache in enumerate(caches):
                logits = model(steps[index], **{CACHE: cache}, use_cache=True).logits
                steps[index] = logits[:, -1:].argmax(-1)
                found[index].append(steps[index].item())
    assert list(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("compile_mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.exhaustive)])
def test_compiled_decoding_with_a_static_cache(compile_mode):
    """One graph for the prompt and one for a decoded token: no step compiles again."""
    model, ids = FAMILIES[0].causal_lm(num_hidden_layers=3, attn_res_block_size=2), tokens(length=10)
    expected = generate(model, ids, **GREEDY)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward, fullgraph=True, mode=compile_mode)
    assert torch.equal(generate(model, ids, cache_implementation="static", disable_compile=True, **GREEDY), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert torch._dynamo.utils.counters["frames"]["total"] <= 3


@torch.no_grad()
def test_compiled_ahead_of_time_as_engines_do(mode):
    """Torch binds the arguments by the signature of the function that it compiles."""
    decoder, asked = FAMILIES[0].causal_lm(**mode).model, {"input_ids": tokens(), "use_cache": False}
    expected = decoder(**asked).last_hidden_state
    torch.compiler.reset()
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    with torch._dynamo.config.patch(enable_aot_compile=True):
        to_compile = torch.compile(decoder.forward, fullgraph=True, backend="eager", options=options)
        compiled = to_compile.aot_compile(((), asked))
    assert torch.equal(compiled(decoder, **asked).last_hidden_state, expected)
