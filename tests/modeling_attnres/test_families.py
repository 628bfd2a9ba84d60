"""The table of families: what every one of them holds, and so what the README may say of it."""

import re

import pytest
import torch
from transformers import AutoConfig

from modeling_attnres import ADDITIVE_FAMILIES, LOSSLESS_FAMILIES
from tests.conftest import ROOT
from tests.families import ADDITIVE_TABLE, CACHE, TABLE, cache_of, randomise_depth, tokens
from tests.oracle import Recorder, expected_inputs, relative_error


LAYOUTS = {
    "full": {"attn_res_mode": "full"},
    "blocks": {"attn_res_block_size": 2},
    "uneven blocks": {"attn_res_block_boundaries": [0, 1]},
}
# The parts by name, told here once more: the tests do not ask the code that they test
MIXERS = ("self_attn", "linear_attn", "mamba")
MLPS = ("mlp", "feed_forward", "block_sparse_moe")
POST_NORMS = {  # of families that normalise what a sublayer adds: after attention, after the MLP
    **dict.fromkeys(("gemma2", "gemma3_text"), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "afmoe": ("post_attention_layernorm", "post_mlp_layernorm"),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
}
FIRST_NORMS, SECOND_NORMS = (
    ("input_layernorm",),
    ("pre_feedforward_layernorm", "pre_ff_layernorm", "pre_mlp_layernorm", "post_attention_layernorm"),
)
FINAL_NORMS = ("norm", "final_layernorm")

# Families whose cached decoding differs from the full pass in transformers itself
BASE_DECODES_DIFFERENTLY = {"bamba"}


@pytest.fixture(params=TABLE)
def model_type(request):
    return request.param


def part(module, names):
    found = [part for name in names if (part := getattr(module, name, None)) is not None]
    assert found, f"{type(module).__name__} has none of {', '.join(names)}: name its part at the top of this file."
    return found[0]


def key_norm_eps(config):
    """That of the family's norms, by the names it has in configs; OLMo's has none and takes the default."""
    names = ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "norm_epsilon", "norm_eps")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 1e-6)


class FamilyRecorder(Recorder):
    """What each sublayer adds to the residual stream, and what its norm reads, in a family of the table."""

    def __init__(self, model, model_type):
        self.embedding, self.outputs, self.inputs, self.handles = None, {}, {}, []
        post_norms = POST_NORMS.get(model_type)
        for index, layer in enumerate(model.layers):
            self.scale = getattr(layer, "residual_multiplier", 1)
            for sublayer, (modules, norms) in enumerate(((MIXERS, FIRST_NORMS), (MLPS, SECOND_NORMS))):
                adds = part(layer, post_norms[sublayer : sublayer + 1] if post_norms else modules)
                site = 2 * index + sublayer
                self.handles.append(adds.register_forward_hook(self.keep_scaled_output(site)))
                self.handles.append(part(layer, norms).register_forward_pre_hook(self._keep_input(site)))
        self.handles.append(model.layers[0].register_forward_pre_hook(self.keep_first_input))
        final = part(model, FINAL_NORMS)
        self.handles.append(final.register_forward_pre_hook(self._keep_input(2 * len(model.layers))))

    def keep_first_input(self, module, args):
        self.embedding = args[0].detach().double()

    def keep_scaled_output(self, site):
        keep = self._keep_output(site)

        def hook(module, args, output):
            keep(module, args, output)
            self.outputs[site] = self.outputs[site].view(self.embedding.shape) * self.scale

        return hook


class PostNormRecorder(FamilyRecorder):
    """The same where attention and MLP read the stream, and a norm after each makes what is added."""

    def __init__(self, model):
        self.embedding, self.outputs, self.inputs, self.handles, self.scale = None, {}, {}, [], 1
        for index, layer in enumerate(model.layers):
            for sublayer, (module, norm) in enumerate(
                ((layer.self_attn, layer.post_attention_layernorm), (layer.mlp, layer.post_feedforward_layernorm))
            ):
                site = 2 * index + sublayer
                self.handles.append(norm.register_forward_hook(self.keep_scaled_output(site)))
                self.handles.append(module.register_forward_pre_hook(self._keep_input(site)))
        self.handles.append(model.layers[0].register_forward_pre_hook(self.keep_first_input))
        self.handles.append(model.norm.register_forward_pre_hook(self._keep_input(2 * len(model.layers))))


def test_the_table_is_what_is_listed():
    assert TABLE.keys() <= LOSSLESS_FAMILIES
    assert ADDITIVE_TABLE.keys() <= ADDITIVE_FAMILIES
    missing = ADDITIVE_FAMILIES - ADDITIVE_TABLE.keys()
    for model_type in missing:  # this release of transformers lacks them, and says so when one is asked for
        with pytest.raises(ValueError, match=model_type):
            AutoConfig.for_model(f"attnres_{model_type}")


def test_zero_queries_compute_what_the_base_computes(model_type):
    family, ids = TABLE[model_type], tokens()
    base = family.base_causal_lm()
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones(2, 10)}
    with torch.no_grad():
        expected, text = base(ids).logits, base.generate(ids[:, :10], **greedy)
    for fields in LAYOUTS.values():
        port = family.ours("ForCausalLM")(family.config(attn_res_scale_norm_eps=True, **fields)).eval()
        assert not port.load_state_dict(base.state_dict(), strict=False).unexpected_keys
        for reader in ("auto", "eager"):
            port.config.attn_res_implementation = reader
            with torch.no_grad():
                assert relative_error(port(ids).logits, expected) <= 3e-6
        assert torch.equal(port.generate(ids[:, :10], **greedy), text)


def test_every_sublayer_reads_what_the_oracle_says(model_type):
    for fields in LAYOUTS.values():
        model = TABLE[model_type].causal_lm(**fields)
        with torch.no_grad(), FamilyRecorder(model.model, model_type) as record:
            model(tokens())
        model.config.rms_norm_eps = key_norm_eps(model.config)
        expected, _ = expected_inputs(record, model.model.attn_res, model.config)
        for site, value in enumerate(expected):
            assert relative_error(record.inputs[site], value) <= 2e-6, f"site {site}"


def test_cached_pieces_equal_the_full_pass(model_type):
    family, ids = TABLE[model_type], tokens(length=20)
    base = model_type in BASE_DECODES_DIFFERENTLY  # then the base is what does not hold it
    model = family.base_causal_lm() if base else family.causal_lm(attn_res_block_size=2)
    with torch.no_grad():
        expected = model(ids).logits
        pieces, cache = [], {}
        for piece in ids.split([15, 1, 1, 1, 1, 1], dim=1):
            outputs = model(piece, use_cache=True, **cache)
            pieces.append(outputs.logits)
            cache = {CACHE: cache_of(outputs)}
    same = torch.allclose(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert same == (model_type not in BASE_DECODES_DIFFERENTLY)


def test_left_padding_changes_nothing_for_real_tokens(model_type):
    model, ids = TABLE[model_type].causal_lm(attn_res_block_size=2), tokens(batch=1, length=12)
    padded, mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1), torch.ones(1, 17, dtype=torch.long)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["block", "full"])
def test_gradient_checkpointing_changes_no_gradient(model_type, mode):
    model, ids = TABLE[model_type].causal_lm(attn_res_mode=mode).train(), tokens()

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)  # dropout, where a family has some by default
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    expected = gradients()
    assert {"model.attn_res.query", "model.attn_res.norm"} <= expected.keys()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients()
        assert found.keys() == expected.keys()
        largest = max(gradient.norm() for gradient in expected.values())
        for name, gradient in expected.items():  # reentrant recomputation adds up a block's gradients in another order
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * largest, name


@pytest.mark.parametrize("model_type", ADDITIVE_TABLE)
def test_add_computes_exactly_what_the_base_computes(model_type):
    """Bit for bit, whatever norms and multipliers a family has; and a gate that is open changes every logit."""
    family, ids = ADDITIVE_TABLE[model_type], tokens(length=12)
    base = family.base_causal_lm()
    with torch.no_grad():
        expected = base(ids).logits
    for fields in ({"attn_res_mode": "full"}, {"attn_res_block_size": 2, "attn_res_heads": 2}):
        config = family.config(attn_res_form="add", **fields)
        port = family.ours("ForCausalLM")(config).eval()
        assert not port.load_state_dict(base.state_dict(), strict=False).unexpected_keys
        with torch.no_grad():
            assert torch.equal(port(ids).logits, expected)
            randomise_depth(port)
            assert relative_error(port(ids).logits, expected) > 1e-3


@pytest.mark.parametrize("model_type", ["olmo2", "exaone4"])
def test_add_in_a_family_without_pre_norms(model_type):
    """Attention and MLP read stream + gate × mixture themselves."""
    family = ADDITIVE_TABLE[model_type]
    for fields in LAYOUTS.values():
        model = family.causal_lm(attn_res_form="add", attn_res_heads=2, **fields)
        with torch.no_grad(), PostNormRecorder(model.model) as record:
            model(tokens())
        expected, _ = expected_inputs(record, model.model.attn_res, model.config)
        for site, value in enumerate(expected):
            assert relative_error(record.inputs[site], value) <= 2e-6, f"site {site}"


@pytest.mark.slow
def test_all_families_as_remote_code(tmp_path, run_isolated):
    """Loaded with only the files beside the checkpoints, in a process that cannot import this project."""
    torch.save(tokens(), tmp_path / "ids.pt")
    models = {model_type: family.causal_lm() for model_type, family in TABLE.items()}
    for model_type, model in models.items():
        model.save_pretrained(tmp_path / model_type)
    run_isolated(
        f"""
import torch
from transformers import AutoModelForCausalLM
for model_type in {list(models)}:
    model = AutoModelForCausalLM.from_pretrained(model_type, trust_remote_code=True).eval()
    with torch.no_grad():
        torch.save(model(torch.load("ids.pt")).logits, model_type + "/logits.pt")
""",
        timeout=600,
    )
    for model_type, model in models.items():
        with torch.no_grad():
            expected = model(tokens()).logits
        torch.testing.assert_close(torch.load(tmp_path / model_type / "logits.pt"), expected, msg=model_type)


def test_the_readme_lists_the_table():
    table = (ROOT / "README.md").read_text().partition("by model type:")[2].partition("\nAny other decoder")[0]
    lossless, _, additive = table.partition("attn_res_form")
    assert set(re.findall(r"`(\w+)`", lossless)) == LOSSLESS_FAMILIES
    assert set(re.findall(r"`(\w+)`", additive)) - {"add"} == ADDITIVE_FAMILIES - LOSSLESS_FAMILIES


def test_a_family_whose_parts_have_other_names(run_isolated):
    """The guide's whole code for one; before it is run, the family is refused by what was found."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert len(guide.splitlines()) < 20
    run_isolated(
        f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import modeling_attnres, torch, transformers
try:
    modeling_attnres.AttnResApertusForCausalLM
except AttributeError as error:
    assert "ApertusDecoderLayer does not" in str(error), error
else:
    raise AssertionError
{guide}
fields = dict({TABLE["llama"].tiny})
base = transformers.ApertusForCausalLM(transformers.ApertusConfig(**fields)).eval()
port = AttnResApertusForCausalLM(AttnResApertusForCausalLM.config_class(**fields, attn_res_scale_norm_eps=True)).eval()
port.load_state_dict(base.state_dict(), strict=False)
ids = torch.arange(3, 20)[None]
with torch.no_grad():
    expected = base(ids).logits
    assert (port(ids).logits - expected).norm() <= 3e-6 * expected.norm()
"""
    )
