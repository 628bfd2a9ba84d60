"""The diagnosis of a checkpoint: complete, right, and refused where there is nothing to see."""

import json

import matplotlib.image
import pytest
import torch

from tests.families import BY_NAME
from tests.training import conftest
from training.diagnose import layer_curves, standard_residuals

from .conftest import succeed, words
from .test_finetune import command


def diagnose(*args):
    return succeed("diagnose", *args)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(words(60))
    return path


def test_figures_of_every_family(family, mode, save_model, text, tmp_path):
    model, output = save_model(family.name, **mode), tmp_path / "out"
    diagnose(model, "--output", output, "--text", text, "--tokens", 40)
    found = json.loads((output / "diagnosis.json").read_text())
    assert found["tokens"] == 40
    assert len(found["weights"]) == len(found["entropy_of_mean"]) == len(found["reach"]) == 13
    assert all(sum(weights) == pytest.approx(1, abs=1e-5) for weights in found["weights"])
    assert 0 < min(found["entropy_of_mean"]) <= max(found["entropy_of_mean"]) <= 1 + 1e-9
    for of_models in found["by layer"].values():
        assert set(of_models) == {str(model), "standard residuals"}
        assert all(len(values) == 6 and min(values) > 0 for values in of_models.values())
    assert found["semiseparable rank"]["exact"] >= 1
    pictures = {path.name for path in output.glob("*.png")}
    assert pictures == {"depth_weights.png", "by_layer.png", "sites.png", "mixing_matrix.png"}
    for name in pictures:
        assert matplotlib.image.imread(output / name).std() > 0.01  # not blank


def test_magnitudes_and_gradients_by_layer():
    """Against a second computation: finite differences of the loss, and hidden states as transformers returns them."""
    model = BY_NAME["Llama"].causal_lm(dtype=torch.float64, attn_res_mode="none")
    ids = torch.arange(3, 20)[None]
    found = layer_curves(model, ids)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
        assert found["output magnitude"][1] == pytest.approx(hidden[2].square().mean().sqrt().item(), rel=1e-6)
        along = torch.randn(hidden[2].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

        def loss(step):
            handle = model.model.layers[1].register_forward_hook(lambda m, a, output: output + step * along)
            value = model(ids, labels=ids).loss.item()
            handle.remove()
            return value

        slope = (loss(1e-2) - loss(-1e-2)) / 2e-2  # the loss is computed in fp32
    gradients = []

    def keep_gradient(module, args, output):
        output.register_hook(gradients.append)

    handle = model.model.layers[1].register_forward_hook(keep_gradient)
    model(ids, labels=ids).loss.backward()
    handle.remove()
    assert (gradients[0] * along).sum().item() == pytest.approx(slope, rel=2e-3)
    assert found["gradient norm"][1] == pytest.approx(gradients[0].norm().item(), rel=1e-5)


def test_the_control_shares_the_weights():
    model = BY_NAME["Llama"].causal_lm()
    control = standard_residuals(model)
    assert control.config.attn_res_mode == "none"
    for name, tensor in control.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_a_second_model_and_an_adapter(save_model, text, tmp_path, text_file):
    from .test_finetune import run

    model = save_model()
    run(model, text_file, tmp_path / "tuned")
    output = tmp_path / "out"
    diagnose(model, "--output", output, "--text", text, "--adapter", tmp_path / "tuned/adapter", "--against", model)
    found = json.loads((output / "diagnosis.json").read_text())
    assert found["adapter"] == str(tmp_path / "tuned/adapter")
    magnitudes = found["by layer"]["output magnitude"]
    adapted, alone = magnitudes.values()
    assert list(magnitudes) == [f"{model} with {tmp_path / 'tuned/adapter'}", str(model)]
    assert adapted != alone
    diagnose(model, "--output", tmp_path / "plain", "--text", text)
    assert json.loads((tmp_path / "plain/diagnosis.json").read_text())["weights"] != found["weights"]


def test_what_cannot_be_diagnosed(save_model, text_file, text, tmp_path):
    def refused(message, model, *args, output=tmp_path / "out"):
        conftest.refused(message, "diagnose", model, "--output", output, *args)
        assert not (tmp_path / "out").exists()

    model, text = save_model(), ("--text", text)
    refused("has no depth attention to diagnose", save_model("Mixtral", attn_res_mode="none"), *text)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    refused("exists and is not empty", model, *text, output=tmp_path / "full")
    refused("missing", model, "--text", tmp_path / "missing.txt")
    refused("1 tokens of it, with --tokens 1; expected 2 or more", model, *text, "--tokens", 1)
    refused("0 tokens of it", model, *text, "--tokens", 0)
    refused("no adapter", model, *text, "--adapter", model)
    succeed(*command(model, text_file, tmp_path / "tuned", "--control"))
    refused("tuned/adapter .* has no depth attention", model, *text, "--adapter", tmp_path / "tuned/adapter")
    refused("is an adapter, expected a model. Merge it first", tmp_path / "tuned/adapter", *text)
    refused("is an adapter, expected a model", model, *text, "--against", tmp_path / "tuned/adapter")
    small = save_model("Qwen3Moe", vocab_size=20)
    refused("the token 95|the token .*, but .* has embeddings for 20", small, *text)
    refused("is the model itself", model, *text, "--against", model)
    refused("has embeddings for 20", model, *text, "--against", small)
