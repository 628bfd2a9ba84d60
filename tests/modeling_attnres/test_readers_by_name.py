"""Which reader a pass takes: by name, chosen by `"auto"`, or one's own; what it cannot do it refuses by name."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch.func import functional_call, grad, vmap

from modeling_attnres import DepthReader, register_depth_reader
from modeling_attnres.depth_attention import EagerReader, choose_depth_reader
from modeling_attnres.depth_readers import TrainingReader, TwoPhaseReader
from tests.families import BY_NAME, tokens
from tests.oracle import relative_error


LLAMA = BY_NAME["Llama"]
BLOCKS = {"attn_res_block_size": 2}


class CountingReader(EagerReader):
    """Counts the sites it read."""

    reads = 0

    @staticmethod
    def read(running_sum_BTD, inputs):
        CountingReader.reads += 1
        return EagerReader.read(running_sum_BTD, inputs)


class MeanReader(DepthReader):
    """A reader of one's own, from the protocol alone: the plain mean of the sources, whatever the queries say."""

    def __init__(self, parameters, eps, layout):
        super().__init__(parameters, eps, layout)
        self.sums = []

    @property
    def blocks(self):
        return self.sums

    def append(self, block_BTD):
        self.sums.append(block_BTD)

    def drop_blocks(self, count):
        del self.sums[count:]

    def inputs_for(self, site):
        return tuple(self.sums)

    @staticmethod
    def read(running_sum_BTD, inputs):
        sources = [*inputs, *([] if running_sum_BTD is None else [running_sum_BTD])]
        return sum(sources) / len(sources), None


register_depth_reader("counting", CountingReader)
register_depth_reader("mean", MeanReader)


def with_reader(name, **fields):
    """A model that is told at once which reader to take."""
    model = LLAMA.causal_lm(**fields)
    model.config.attn_res_implementation = name
    return model


@pytest.mark.parametrize("gradients", [False, True])
def test_a_reader_of_ones_own_is_used_by_name(mode, gradients):
    model = with_reader("counting", **mode)
    CountingReader.reads = 0
    with torch.set_grad_enabled(gradients):
        found = model(tokens())
    assert CountingReader.reads == 13  # two sites a layer, and the output
    model.config.attn_res_implementation = "auto"
    torch.testing.assert_close(found.logits, model(tokens()).logits, rtol=1e-4, atol=1e-4)
    assert CountingReader.reads == 13


def test_a_reader_needs_the_protocol_only(mode):
    """The mean of the sources is what zero queries read."""
    found = with_reader("mean", **mode)
    expected = LLAMA.causal_lm(**mode)
    torch.nn.init.zeros_(expected.model.attn_res.query)
    for training in (False, True):
        for one in (found, expected):
            one.train(training)
            one.gradient_checkpointing_enable({"use_reentrant": False})
        logits = [one(tokens(), use_cache=False).logits for one in (found, expected)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        logits[0].sum().backward()
    assert found.model.layers[0].mlp.up_proj.weight.grad.isfinite().all()


def test_a_name_can_be_given_at_load_and_in_a_config(tmp_path):
    LLAMA.causal_lm().save_pretrained(tmp_path)
    assert LLAMA.config(attn_res_implementation="counting").attn_res_implementation == "counting"
    model = LLAMA.ours("ForCausalLM").from_pretrained(tmp_path, attn_res_implementation="counting")
    assert model.config.attn_res_implementation == "counting"


@pytest.mark.parametrize("wrong", ["fast", "sdpa", "", None])
def test_unknown_names_are_refused_listing_the_known(wrong):
    message = r"must be one of 'auto', 'eager', 'general', 'training', 'two_phase'.*'counting'"
    with pytest.raises(ValueError, match=message):
        LLAMA.config(attn_res_implementation=wrong)
    config = LLAMA.config()
    with pytest.raises(ValueError, match=message):
        config.attn_res_implementation = wrong


def test_what_is_no_reader_cannot_be_registered():
    with pytest.raises(ValueError, match="'auto'"):
        register_depth_reader("auto", CountingReader)
    for wrong in (dict, CountingReader(torch.zeros(5, 8), 1e-6, None), lambda: None):
        with pytest.raises(TypeError, match="subclass of DepthReader"):
            register_depth_reader("wrong", wrong)


def test_what_a_reader_cannot_do_is_refused_by_name():
    model = with_reader("two_phase")
    with pytest.raises(ValueError, match=r"'two_phase' does not support gradients.*'training'.*torch.no_grad"):
        model(tokens())
    with pytest.raises(ValueError, match="'two_phase' does not support depth weights"), torch.no_grad():
        model(tokens(), output_depth_attentions=True)
    model.config.attn_res_implementation = "training"
    with pytest.raises(ValueError, match=r"'training' does not support depth weights.*'auto' or 'eager'"):
        model(tokens(), output_depth_attentions=True)
    model.config.attn_res_implementation = "mean"
    with pytest.raises(ValueError, match="'mean' does not support depth weights"):
        model(tokens(), output_depth_attentions=True)


def test_auto_takes_the_first_that_can():
    assert choose_depth_reader("auto", gradients=False, weights=False) is TwoPhaseReader
    assert choose_depth_reader("auto", gradients=True, weights=False) is TrainingReader
    assert choose_depth_reader("auto", gradients=False, weights=True) is EagerReader
    assert choose_depth_reader("auto", gradients=True, weights=True) is EagerReader


@pytest.mark.parametrize(
    ("gradients", "weights", "expected"),
    [(False, False, TwoPhaseReader), (True, False, TrainingReader), (False, True, EagerReader)],
)
def test_auto_in_a_pass(gradients, weights, expected):
    model, readers = LLAMA.causal_lm(), []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: readers.append(kwargs["depth_pass"].reader), with_kwargs=True
    )
    with torch.set_grad_enabled(gradients):
        model(tokens(), output_depth_attentions=weights)
    assert [type(reader) for reader in readers] == [expected]


@pytest.mark.parametrize("name", ["training", "eager"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_a_reader_by_name_gives_the_same_bits_with_and_without_gradients(family, mode, name):
    """What DPO, GRPO and the like need of policy and reference, in bf16."""
    model = BY_NAME[family].causal_lm(dtype=torch.bfloat16, **mode)
    model.config.attn_res_implementation = name
    with_gradients = model(tokens()).logits
    with torch.no_grad():
        without = model(tokens()).logits
    with torch.inference_mode():
        inference = model(tokens()).logits
    assert torch.equal(with_gradients, without)
    assert torch.equal(with_gradients, inference)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(model(tokens(), use_cache=False).logits, without)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_length(mode, strict):
    """As the base exports; the program computes what the model computes at sizes it was not traced with."""
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=200)}

    def exported(model):
        model.config.use_cache = False
        with torch.no_grad():
            return torch.export.export(
                model, (), {"input_ids": tokens(length=9)}, dynamic_shapes={"input_ids": sizes}, strict=strict
            ).module()

    small = {"num_hidden_layers": 2}
    base = [] if strict else [LLAMA.base_causal_lm(**small)]
    for one in (*base, LLAMA.causal_lm(**mode, **small)):
        program = exported(one)
        for batch, length in ((2, 9), (3, 17), (5, 4)):
            ids = tokens(batch, length, seed=length)
            torch.testing.assert_close(program(input_ids=ids).logits, one(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_reader_that_does_not_export_is_refused():
    model = with_reader("two_phase", num_hidden_layers=2)
    with pytest.raises(Exception, match="'two_phase' does not support export"), torch.no_grad():
        torch.export.export(model, (), {"input_ids": tokens()}, strict=False)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("implementation", ["auto", "eager"])
@pytest.mark.parametrize("name", ["inputs_embeds", "model.attn_res.query"])
def test_a_batch_of_passes_mapped_by_torch_func(mode, name, implementation):
    """Over inputs, or over queries: what the passes one by one compute, and their gradients."""
    model = with_reader(implementation, num_hidden_layers=2, attn_implementation="eager", **mode)
    model.config.use_cache = False
    embeddings = torch.randn(2, 7, 32)
    batch = torch.randn(3, *(embeddings if name == "inputs_embeds" else model.get_parameter(name)).shape)

    def computed(one):
        given = {"inputs_embeds": embeddings} | ({name: one} if name == "inputs_embeds" else {})
        return functional_call(model, {} if name in given else {name: one}, (), given).logits

    with torch.no_grad():
        expected = torch.stack([computed(one) for one in batch])
        assert relative_error(vmap(computed)(batch), expected) <= 1e-5
    gradient = grad(lambda one: computed(one).square().mean())
    expected = torch.stack([gradient(one) for one in batch])
    assert relative_error(vmap(gradient)(batch), expected) <= 1e-4


def test_readers_that_torch_func_cannot_transform_are_refused(mode):
    model = with_reader("training", num_hidden_layers=2, **mode)
    query, ids = model.get_parameter("model.attn_res.query").detach(), tokens()
    with pytest.raises(ValueError, match=r"'training' does not support torch\.func's transforms, .* or 'eager'"):
        grad(lambda one: functional_call(model, {"model.attn_res.query": one}, (ids,)).logits.sum())(query)
    model.config.attn_res_implementation = "two_phase"
    with torch.no_grad(), pytest.raises(ValueError, match=r"'two_phase' does not support torch\.func's transforms"):
        vmap(lambda one: functional_call(model, {"model.attn_res.query": one}, (ids,)).logits)(query[None])


@pytest.mark.parametrize("cast", ["half", "bfloat16", "to", "double"])
def test_casting_a_model_does_not_narrow_depth_parameters(cast):
    """Queries as small as early training's would be lost in fp16."""
    model = LLAMA.causal_lm(**BLOCKS)
    model.model.attn_res.query.data.mul_(1e-9)
    before = copy.deepcopy(model.model.attn_res.state_dict())
    model = model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
    expected = {"half": torch.float16, "double": torch.float64}.get(cast, torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == expected
    for name, value in model.model.attn_res.state_dict().items():
        assert value.dtype == (torch.float64 if cast == "double" else torch.float32)
        assert torch.equal(value, before[name].to(value.dtype))
    assert model(tokens()).logits.dtype == expected
    assert {parameter.dtype for parameter in model.float().parameters()} == {torch.float32}


def test_deepcopy_and_pickle(family, mode):
    model = family.causal_lm(**mode)
    expected = model(tokens()).logits
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again) is type(model)
        assert type(again.model.layers[0]) is type(model.model.layers[0])
        assert torch.equal(again(tokens()).logits, expected)
        again.model.attn_res.query.data.zero_()
    assert torch.equal(model(tokens()).logits, expected)
    config = pickle.loads(pickle.dumps(model.config))
    assert config.to_dict() == model.config.to_dict()
    assert config.attn_res_implementation == "auto"


def test_unpickling_where_nothing_was_imported(tmp_path):
    model = LLAMA.causal_lm()
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    code = "import pickle, sys; print(type(pickle.load(open(sys.argv[1], 'rb'))).__name__)"
    command = [sys.executable, "-c", code, tmp_path / "model.pickle"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == type(model).__name__


def test_outputs_with_depth_weights_can_be_copied_and_pickled():
    """As dataloaders, pools of processes and caches of activations do."""
    with torch.no_grad():
        outputs = LLAMA.causal_lm(**BLOCKS)(tokens(), output_depth_attentions=True)
    for again in (copy.deepcopy(outputs), pickle.loads(pickle.dumps(outputs))):
        assert again.keys() == outputs.keys()
        assert all(map(torch.equal, again.depth_attentions, outputs.depth_attentions))


def test_generate_returns_depth_attentions_of_every_pass(mode):
    model, ids = LLAMA.causal_lm(**mode), tokens(length=6)
    kwargs = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    plain = model.generate(ids, **kwargs)
    assert "depth_attentions" not in plain
    found = model.generate(ids, output_depth_attentions=True, **kwargs)
    assert torch.equal(found.sequences, plain.sequences)
    assert len(found.depth_attentions) == 4
    with torch.no_grad():
        whole = model(found.sequences[:, :-1], output_depth_attentions=True).depth_attentions
    for site, expected in enumerate(whole):
        pieces = [of_pass[site] for of_pass in found.depth_attentions]
        assert [piece.shape[1] for piece in pieces] == [6, 1, 1, 1]
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert isinstance(model.generate(ids, output_depth_attentions=True, max_new_tokens=2), torch.Tensor)
    # Passes that a processor of logits makes for itself are not asked for any, nor are those of a call that says no
    guided = model.generate(ids, output_depth_attentions=True, guidance_scale=2.0, **kwargs)
    assert len(guided.depth_attentions) == len(found.depth_attentions)
    model.config.output_depth_attentions = True
    assert "depth_attentions" not in model.generate(ids, output_depth_attentions=False, **kwargs)
    assert not model._forward_hooks
