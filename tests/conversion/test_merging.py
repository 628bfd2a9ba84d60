"""Ports merged by mergekit, as conversion/README.md says; each merge is compared with one made by hand."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from modeling_attnres import modeling_attnres
from tests.conversion.checkpoints import command
from tests.families import BY_NAME, randomise_depth, tokens


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mergekit") is None, reason="mergekit: pip install '.[merging]'"),
]

CODE = Path(modeling_attnres.__file__).parent
LINEAR = {
    "models": [{"model": f"port{index}", "parameters": {"weight": weight}} for index, weight in ((0, 0.3), (1, 0.7))],
    "merge_method": "linear",
}
ARITHMETIC = {
    "models": [{"model": f"port{index}", "parameters": {"weight": weight}} for index, weight in ((1, 0.5), (2, 0.8))],
    "merge_method": "task_arithmetic",
    "base_model": "port0",
}
# The same model, as shares of the three ports
SHARES = {"linear": (LINEAR, (0.3, 0.7, 0)), "task arithmetic": (ARITHMETIC, (-0.3, 0.5, 0.8))}


def slices(*ranges):
    """Merge layers of ports into one stack, each as it is."""
    sources = [{"sources": [{"model": f"port{index}", "layer_range": layers}]} for index, *layers in ranges]
    return {"slices": sources, "merge_method": "passthrough"}


def merge(folder, recipe):
    """Run mergekit in a folder, and put the model's code file beside what it wrote."""
    (folder / "recipe.yml").write_text(yaml.safe_dump(recipe | {"dtype": "float32"}))
    options = ["--trust-remote-code", "--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
    arguments = ["-m", "mergekit.scripts.run_yaml", "recipe.yml", "merged", *options]
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, capture_output=True)
    for path in CODE.glob("*.py"):
        (folder / "merged" / path.name).write_bytes(path.read_bytes())
    return folder / "merged"


@pytest.fixture(params=["Llama", "Mixtral"])
def models(request, tmp_path):
    """Three ports of one shape with trained depth parameters, saved as port0, port1 and port2."""
    fields = {"attn_res_block_size": 2, "attn_res_scale_norm_eps": True}
    models = [BY_NAME[request.param].causal_lm(seed=seed, **fields) for seed in range(3)]
    for index, model in enumerate(models):
        randomise_depth(model, seed=10 + index)
        model.save_pretrained(tmp_path / f"port{index}")
    return models


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", SHARES)
@torch.no_grad()
def test_weighted_merges(method, models, tmp_path, run_isolated):
    recipe, shares = SHARES[method]
    merged = merge(tmp_path, recipe)
    states = [model.state_dict() for model in models]
    by_hand = {name: sum(share * state[name] for share, state in zip(shares, states)) for name in states[0]}
    models[2].load_state_dict(by_hand)
    expected = models[2](tokens()).logits
    model = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(model.model.attn_res.query, by_hand["model.attn_res.query"])
    torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    # The folder carries all of its code.
    torch.save((tokens(), model(tokens()).logits), tmp_path / "logits.pt")
    run_isolated(
        "import torch; from transformers import AutoModelForCausalLM\n"
        "tokens, expected = torch.load('logits.pt')\n"
        "model = AutoModelForCausalLM.from_pretrained('merged', trust_remote_code=True)\n"
        "torch.testing.assert_close(model(tokens).logits, expected)"
    )


@pytest.mark.parametrize("models", ["Llama"], indirect=True)
@torch.no_grad()
def test_stacking_as_many_layers(models, tmp_path):
    """Layers of two ports: all depth rows are the first one's, those of the second's layers included."""
    model = AutoModelForCausalLM.from_pretrained(merge(tmp_path, slices((0, 0, 4), (1, 4, 6))))
    for index in (4, 5):
        models[0].model.layers[index] = models[1].model.layers[index]
    torch.testing.assert_close(model(tokens()).logits, models[0](tokens()).logits)


@pytest.mark.parametrize("models", ["Llama"], indirect=True)
@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([(0, 0, 2), (0, 4, 6)], "num_hidden_layers is 6, but the tensors' names have 4 layers"),
        ([(0, 0, 4), (0, 2, 6)], "has no place in the model that config.json describes"),
    ],
    ids=["fewer", "more"],
)
def test_stacking_fewer_or_more_layers(ranges, says, models, tmp_path):
    """mergekit keeps num_hidden_layers and the depth rows: refused by `inspect`, and with the number set right."""
    merged = merge(tmp_path, slices(*ranges))
    status, told = command("inspect", merged)
    assert status == 2
    assert says in told
    layers = sum(end - start for _, start, end in ranges)
    with pytest.raises(RuntimeError, match=f"has 13 rows, expected {2 * layers + 1}"):
        AutoModelForCausalLM.from_pretrained(merged, num_hidden_layers=layers)
