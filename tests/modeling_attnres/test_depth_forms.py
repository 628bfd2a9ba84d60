"""Forms of depth attention and interventions: every combination that is allowed, against the oracle and the readers."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from modeling_attnres import DepthAttention, depth_interventions
from modeling_attnres.depth_attention import EagerReader
from modeling_attnres.depth_forms import GeneralReader
from modeling_attnres.depth_readers import TrainingReader
from modeling_attnres.residual_stream import AddPass, ReplacePass
from tests.conftest import ROOT
from tests.families import BY_NAME, CACHE, TABLE, Family, cache_of, randomise_depth, tokens
from tests.oracle import Recorder, expected_inputs, relative_error


LLAMA = BY_NAME["Llama"]
LAYOUTS = {
    "full": {"attn_res_mode": "full"},
    "blocks of 2": {"attn_res_block_size": 2},
    "uneven blocks": {"attn_res_block_boundaries": [0, 1, 4]},
}
FAST = {  # read by every reader
    "1 head": {},
    "4 heads": {"attn_res_heads": 4},
    "add": {"attn_res_form": "add"},
    "add, 4 heads": {"attn_res_form": "add", "attn_res_heads": 4},
}
GENERAL = {
    "input query": {"attn_res_query": "input"},
    "input query of rank 3, 2 heads": {"attn_res_query": "input", "attn_res_query_rank": 3, "attn_res_heads": 2},
    "sigmoid": {"attn_res_weights": "sigmoid"},
    "sigmoid, input query, 4 heads": {"attn_res_weights": "sigmoid", "attn_res_query": "input", "attn_res_heads": 4},
    "static": {"attn_res_weights": "static"},
    "static_raw": {"attn_res_weights": "static_raw"},
    "no key norm": {"attn_res_key_norm": False},
    "no key norm, sigmoid, 2 heads": {
        "attn_res_key_norm": False,
        "attn_res_weights": "sigmoid",
        "attn_res_heads": 2,
    },
    "no key norm, input query": {"attn_res_key_norm": False, "attn_res_query": "input"},
    "add, static": {"attn_res_form": "add", "attn_res_weights": "static"},
    "add, input query, no key norm, 2 heads": {
        "attn_res_form": "add",
        "attn_res_query": "input",
        "attn_res_key_norm": False,
        "attn_res_heads": 2,
    },
}
FORMS = FAST | GENERAL
WINDOWS = [None, 1, 3]
SIX = BY_NAME | {"Gemma2": TABLE["gemma2"]}


def readers_of(name: str) -> list[str]:
    return ["eager", "training", "two_phase", "general"] if name in FAST else ["general"]


def model_of(name: str, layout: str, window: int | None = None, family: Family = LLAMA, **fields):
    return family.causal_lm(**FORMS[name], **LAYOUTS[layout], attn_res_window=window, **fields)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMS)
def test_every_sublayer_reads_what_the_oracle_says(name, layout, window):
    model = model_of(name, layout, window)
    for reader in readers_of(name):
        model.config.attn_res_implementation = reader
        wanted = reader in ("eager", "general")
        with torch.no_grad(), Recorder(model.model) as record:
            outputs = model(tokens(), output_depth_attentions=wanted)
        expected, weights = expected_inputs(record, model.model.attn_res, model.config)
        for site, value in enumerate(expected):
            assert relative_error(record.inputs[site], value) <= 2e-6, f"{reader}, site {site}"
        for found, value in zip(outputs.depth_attentions if wanted else (), weights, strict=wanted):
            torch.testing.assert_close(found.double(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAST)
def test_every_reader_gives_the_same_gradients(name):
    model, ids = model_of(name, "uneven blocks", window=2).double().train(), tokens(length=8)
    gradients = {}
    for reader in ("general", "eager", "training"):
        model.config.attn_res_implementation = reader
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients[reader] = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    expected = gradients.pop("general")
    assert any("attn_res" in name for name in expected)
    for found in gradients.values():
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-12, msg=parameter)


@pytest.mark.parametrize("layout", ["full", "blocks of 2"])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_finite_differences(name, layout):
    """In float64, through all reads of a pass, of every depth parameter, the embedding and what sublayers add."""
    small = Family("Llama", LLAMA.tiny | {"num_hidden_layers": 3, "hidden_size": 8})
    config = small.config(**FORMS[name], **LAYOUTS[layout], attn_res_window=3)
    depth = DepthAttention.from_config(config).double()
    randomise_depth(torch.nn.ModuleDict({"attn_res": depth, "other": torch.nn.Module()}))
    names = [name for name, _ in depth.named_parameters()]
    generator = torch.Generator().manual_seed(0)
    sums = [torch.randn(1, 2, 8, generator=generator, dtype=torch.float64) for _ in range(7)]
    leaves = [leaf.detach().requires_grad_() for leaf in (*depth.parameters(), *sums)]

    def read_all(reader_class, *leaves):
        parameters = torch.func.functional_call(depth, dict(zip(names, leaves)), ())
        embedding, *outputs = leaves[len(names) :]
        reader = reader_class(parameters, 1e-6, config.attn_res_layout)
        reader.form = config.attn_res_depth_form
        additive = reader.form.additive
        depth_pass, read, hidden = (AddPass if additive else ReplacePass)(reader), [], embedding
        for layer in range(3):
            stream = depth_pass.stream_maker()(depth_pass.enter_layer(layer, hidden), depth_pass.inputs_for(layer))
            current = stream.hidden_states
            for sublayer in range(2):
                read.append(stream.read(current, "norm", sublayer, 1))
                current = current + outputs[2 * layer + sublayer]
            hidden = depth_pass.leave_layer(current if additive else current.running_sum, stream.kept_apart)
        read.append(depth_pass.read_output(hidden))
        return torch.stack(read)

    readers = {"general": GeneralReader, "eager": EagerReader, "training": TrainingReader}
    for reader in readers.keys() & set(readers_of(name)):
        assert torch.autograd.gradcheck(partial(read_all, readers[reader]), leaves, fast_mode=True), reader


@pytest.mark.parametrize("mode", ["full", "blocks of 2"])
@pytest.mark.parametrize("name", FORMS)
def test_checkpointing_changes_no_gradient(name, mode):
    model, ids = model_of(name, mode).double().train(), tokens(length=6)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    expected = gradients()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for parameter, gradient in gradients().items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-9, atol=1e-12, msg=parameter)


@pytest.mark.parametrize("name", FORMS)
def test_cached_pieces_equal_the_full_pass_and_padding_changes_nothing(name):
    model, ids = model_of(name, "blocks of 2", window=2), tokens(batch=1, length=20)
    with torch.no_grad():
        expected = model(ids).logits
        pieces, cache = [], {}
        for piece in ids.split([15, 1, 1, 3], dim=1):
            outputs = model(piece, use_cache=True, **cache)
            pieces.append(outputs.logits)
            cache = {CACHE: cache_of(outputs)}
        torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)
        padded, mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1), torch.ones(1, 25, dtype=torch.long)
        mask[0, :5] = 0
        found = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[:, 5:]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SIX)
@pytest.mark.parametrize("name", FORMS)
def test_at_the_start_a_base_checkpoint_computes_what_it_did(name, family):
    base = SIX[family].base_causal_lm()
    add = FORMS[name].get("attn_res_form") == "add"
    for layout in ("full", "blocks of 2"):
        config = SIX[family].config(**FORMS[name], **LAYOUTS[layout], attn_res_scale_norm_eps=not add)
        port = SIX[family].ours("ForCausalLM")(config).eval()
        port.load_state_dict(base.state_dict(), strict=False)
        with torch.no_grad():
            error = relative_error(port(tokens()).logits, base(tokens()).logits)
        assert error == 0 if add else error <= 3e-6


@pytest.mark.parametrize("name", FORMS)
def test_saved_and_loaded_it_is_the_same(name, tmp_path):
    model = model_of(name, "blocks of 2", window=3)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)


def test_as_remote_code(tmp_path, run_isolated):
    models = {name: model_of(name, "uneven blocks") for name in FORMS}
    torch.save(tokens(), tmp_path / "ids.pt")
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    run_isolated(
        f"""
import pickle, torch
from transformers import AutoModelForCausalLM
for name in {list(models)}:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    with torch.no_grad():
        torch.save(model(torch.load("ids.pt")).logits, name + "/logits.pt")
"""
    )
    for name, model in models.items():
        with torch.no_grad():
            torch.testing.assert_close(torch.load(tmp_path / name / "logits.pt"), model(tokens()).logits, msg=name)


@pytest.mark.parametrize("name", ["4 heads", "add, 4 heads", "sigmoid", "static", "input query"])
def test_bf16_stays_within_tolerance(name):
    model = model_of(name, "blocks of 2").to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.model.attn_res.parameters()} == {torch.float32}
    with torch.no_grad(), Recorder(model.model) as record:
        model(tokens())
    expected, _ = expected_inputs(record, model.model.attn_res, model.config)
    for site, value in enumerate(expected):
        # The stream of "add" is rounded at each addition, as in the base, the oracle's is not; a query that is made of
        # the input has the input's rounding in every logit.
        tolerance = {"add, 4 heads": 2e-2, "input query": 8e-3}.get(name, 4e-3)
        assert relative_error(record.inputs[site], value) <= tolerance, f"site {site}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_res_heads": 5}, "attn_res_heads must divide hidden_size .32."),
        ({"attn_res_heads": 0}, "attn_res_heads must divide"),
        ({"attn_res_window": 0}, "attn_res_window must be at least 1"),
        ({"attn_res_query_rank": 4}, "needs attn_res_query='input'"),
        ({"attn_res_query": "input", "attn_res_query_rank": 33}, "attn_res_query_rank must be from 1 to"),
        ({"attn_res_weights": "static", "attn_res_heads": 2}, "attn_res_heads=2 does not go with .*'static'"),
        ({"attn_res_weights": "static_raw", "attn_res_query": "input"}, "attn_res_query='input' does not go with"),
        ({"attn_res_weights": "static", "attn_res_key_norm": False}, "attn_res_key_norm=False does not go with"),
        ({"attn_res_weights": "sigmoid", "attn_res_form": "add"}, "attn_res_form='add' does not go with .*'sigmoid'"),
        ({"attn_res_form": "beside"}, "attn_res_form"),
    ],
)
def test_what_has_no_meaning_is_refused_when_a_config_is_made(fields, message):
    with pytest.raises(Exception, match=f"(?s){message}"):
        LLAMA.config(**fields)


@pytest.mark.parametrize("name", GENERAL)
def test_a_reader_refuses_by_name_what_it_cannot_read(name):
    model = model_of(name, "blocks of 2")
    for reader in ("eager", "training", "two_phase"):
        model.config.attn_res_implementation = reader
        with pytest.raises(ValueError, match=f"'{reader}' does not support attn_res_.*'auto' or 'general'"):
            model(tokens())


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_res_heads": 2},
        {"attn_res_weights": "sigmoid"},
        {"attn_res_query": "input"},
        {"attn_res_key_norm": False},
        {"attn_res_form": "add"},
        {"attn_res_window": 1},
        {"attn_res_scale_norm_eps": True},
        {"attn_res_mode": "none"},
    ],
)
def test_a_config_that_is_changed_later_has_no_effect_and_is_not_saved(fields, tmp_path):
    model = model_of("1 head", "blocks of 2")
    with torch.no_grad():
        expected = model(tokens()).logits
        for name, value in fields.items():
            setattr(model.config, name, value)
        assert torch.equal(model(tokens()).logits, expected)
    with pytest.raises(ValueError, match=r"The config was changed since this model was made .*Set it back"):
        model.save_pretrained(tmp_path)


def test_standard_residuals_whose_config_is_changed_later_are_not_saved_as_something_else(tmp_path):
    model = LLAMA.causal_lm(attn_res_mode="none")
    model.save_pretrained(tmp_path / "none", True)  # is_main_process, as the base takes it
    model.config.attn_res_mode = "block"
    with pytest.raises(ValueError, match=r"The config was changed since this model was made .*Set it back"):
        model.save_pretrained(tmp_path / "block")


@pytest.mark.parametrize("name", ["1 head", "4 heads", "add", "static", "input query"])
def test_parameters_may_lie_elsewhere_than_a_module_keeps_its_own(name):
    """As plain attributes in the replicas of DataParallel, as properties where they are parametrised."""
    model = model_of(name, "blocks of 2")
    with torch.no_grad():
        expected = model(tokens()).logits
        depth = model.model.attn_res
        given, depth._parameters = dict(depth._parameters), {}
        for key, parameter in given.items():
            object.__setattr__(depth, key, parameter * 1)
        assert torch.equal(model(tokens()).logits, expected)


# ------------------------------------------------------------------------------------------------ the form "add"


def test_blocks_of_add_are_held_in_the_models_dtype():
    model = model_of("add", "blocks of 2").to(torch.bfloat16)
    held = []
    depth_pass = model.model.new_depth_pass
    model.model.new_depth_pass = lambda weights: held.append(depth_pass(weights)) or held[-1]
    with torch.no_grad():
        model(tokens())
    assert {block.dtype for block in held[0].reader.blocks} == {torch.bfloat16}


def test_hidden_states_of_add_are_the_residual_stream():
    base, ids = LLAMA.base_causal_lm(), tokens()
    port = LLAMA.ours("ForCausalLM")(LLAMA.config(attn_res_form="add")).eval()
    port.load_state_dict(base.state_dict(), strict=False)
    with torch.no_grad():
        expected, found = (model(ids, output_hidden_states=True).hidden_states for model in (base, port))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["full", "blocks of 2"])
def test_layers_cut_or_replaced_compute_what_they_do_in_the_base(mode):
    base, ids = LLAMA.base_causal_lm(), tokens()
    port = LLAMA.ours("ForCausalLM")(LLAMA.config(attn_res_form="add", **LAYOUTS[mode])).eval()
    port.load_state_dict(base.state_dict(), strict=False)

    class Identity(torch.nn.Module):
        attention_type = "full_attention"

        def forward(self, hidden_states, **kwargs):
            return hidden_states

    for change in (lambda layers: layers[:3], lambda layers: [*layers[:2], Identity(), *layers[3:]]):
        logits = []
        for model in (base, port):
            layers = model.model.layers
            model.model.layers = torch.nn.ModuleList(change(layers))
            model.config.num_hidden_layers = len(model.model.layers)
            with torch.no_grad():
                logits.append(model(ids, use_cache=False).logits)
            model.model.layers, model.config.num_hidden_layers = layers, len(layers)
        assert torch.equal(*logits)


def test_layers_of_add_recomputed_from_outside_have_the_same_gradients():
    model, ids = model_of("add, 4 heads", "full").double().train(), tokens(length=6)
    embeddings = model.model.embed_tokens(ids).detach().requires_grad_()

    def gradients():
        model.zero_grad()
        model(inputs_embeds=embeddings, labels=ids, use_cache=False).loss.backward()
        found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        return {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}

    expected = gradients()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


# ---------------------------------------------------------------------------------------------------- interventions


@pytest.mark.parametrize("name", ["1 head", "4 heads", "add", "static", "sigmoid"])
def test_interventions_change_what_a_site_reads(name):
    """Against the oracle's numbers: masked, the others share; forced, the mixture is that of the weights given."""
    model, ids, site = model_of(name, "blocks of 2"), tokens(), 8
    with torch.no_grad():
        plain = model(ids, output_depth_attentions=True)
        before = plain.depth_attentions[site]
        sources = before.shape[-1]
        hidden = torch.ones(sources, dtype=torch.bool)
        hidden[1] = False
        forced = torch.softmax(torch.arange(sources, dtype=torch.float32), 0)
        with depth_interventions(model, {site: hidden}):
            masked = model(ids, output_depth_attentions=True)
        with depth_interventions(model, {site: forced}):
            replaced = model(ids, output_depth_attentions=True).depth_attentions[site]
        after = model(ids, output_depth_attentions=True)
    expected = before * hidden
    if name != "sigmoid":
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(masked.depth_attentions[site], expected)
    assert relative_error(masked.logits, plain.logits) > 1e-3
    torch.testing.assert_close(replaced, forced.expand_as(before))
    torch.testing.assert_close(after.logits, plain.logits)


def test_an_intervention_per_token_and_in_training():
    model, ids = model_of("1 head", "blocks of 2").train(), tokens()
    with torch.no_grad():
        weights = model(ids, output_depth_attentions=True).depth_attentions
    same = dict(enumerate(weights))  # forcing what is read anyway changes nothing
    with depth_interventions(model, same):
        forced = model(ids, labels=ids, use_cache=False)
        forced.loss.backward()
    assert model.model.attn_res.query.grad is None or not model.model.attn_res.query.grad.any()
    torch.testing.assert_close(forced.logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_interventions_reach_a_decoder_that_is_wrapped():
    model = model_of("1 head", "blocks of 2").model
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with torch.no_grad():
        plain = adapted(tokens()).last_hidden_state
        with depth_interventions(adapted, {5: torch.tensor([True, False, True])}):
            assert relative_error(adapted(tokens()).last_hidden_state, plain) > 1e-3


def test_what_cannot_be_intervened_in_is_refused():
    model = model_of("1 head", "blocks of 2")
    for interventions, message in (
        ({99: torch.ones(2)}, "Site 99 does not exist"),
        ({5: torch.ones(2)}, "Site 5 reads 3 sources"),
        ({5: torch.zeros(3, dtype=torch.bool)}, "at least one source must stay"),
        ({5: torch.ones(3, dtype=torch.long)}, "expected a mask .* got torch.int64"),
        ({5: [True, False, True]}, "expected a mask .* got list"),
        ({5: torch.full((3,), float("nan"))}, "must be finite"),
        ({5: torch.tensor(1.0)}, "expected a shape"),
        ({5: torch.ones(4, 3)}, "expected a shape"),
        ({"5": torch.ones(3)}, "Site '5' does not exist"),
    ):
        with pytest.raises((ValueError, TypeError), match=message), depth_interventions(model, interventions):
            pass
    with pytest.raises(ValueError, match="no depth attention"), depth_interventions(LLAMA.base_causal_lm(), {}):
        pass
    for mask in (torch.ones(3, 24, 3), torch.ones(2, 24, 4, 3)):  # rows and heads that this pass has not
        with depth_interventions(model, {5: mask}), pytest.raises(ValueError, match="does not fit this pass"):
            model(tokens())
    model.config.attn_res_implementation = "two_phase"
    with depth_interventions(model, {5: torch.ones(3)}), pytest.raises(ValueError, match="interventions"):
        model(tokens())


def test_the_matrix_of_what_goes_together_is_what_configs_accept():
    """configuration/README.md: a row and a column per setting."""
    text = (ROOT / "configuration" / "README.md").read_text().partition("| together |")[2].partition("\n\n")[0]
    header, _, *rows = text.splitlines()
    settings = {
        "add": {"attn_res_form": "add"},
        "heads": {"attn_res_heads": 2},
        "input query": {"attn_res_query": "input"},
        "sigmoid": {"attn_res_weights": "sigmoid"},
        "static": {"attn_res_weights": "static"},
        "static_raw": {"attn_res_weights": "static_raw"},
        "no key norm": {"attn_res_key_norm": False},
        "window": {"attn_res_window": 2},
    }
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert [row.strip("|").split("|")[0].strip() for row in rows] == columns == list(settings)
    for row in rows:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        for column, cell in zip(columns, cells, strict=True):
            first, second = settings[name], settings[column]
            if cell == "":
                assert name == column or first.keys() == second.keys()
                continue
            try:
                LLAMA.config(**first, **second)
                accepted = True
            except Exception:  # of strict dataclasses
                accepted = False
            assert accepted == (cell == "yes"), f"{name}, {column}"


def test_randomised_parameters_cover_every_form():
    """The tests above mean something only if no depth parameter is at its start."""
    for name in FORMS:
        model = LLAMA.causal_lm(**FORMS[name])
        assert all(model.model.attn_res.distance_from_start().values())
        fresh = LLAMA.ours("ForCausalLM")(LLAMA.config(**FORMS[name]))
        assert not any(fresh.model.attn_res.distance_from_start().values())
        randomise_depth(fresh)
        assert len(fresh.model.attn_res.distance_from_start()) >= 12
        assert all(fresh.model.attn_res.distance_from_start().values())
