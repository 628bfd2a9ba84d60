"""How much the loss rises when a source is hidden, against the loss computed by hand."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.families import BY_NAME, tokens
from tests.oracle import Recorder
from tests.training.conftest import succeed, words
from training.ablate import ablate_sources, hide_block


LLAMA = BY_NAME["Llama"]
BLOCKS = {"attn_res_block_size": 2}


def test_hiding_a_source_of_the_output_is_reading_the_others():
    """The float64 sum of the other sources, by their own softmax, through the model's norm and head."""
    model, ids = LLAMA.causal_lm(**BLOCKS), tokens(batch=1)
    with torch.no_grad(), Recorder(model.model) as record:
        plain = model(ids, labels=ids)
    ablation = ablate_sources(model, ids)
    assert ablation.loss == pytest.approx(plain.loss.item())
    outputs = [record.outputs[site] for site in range(12)]
    sources = [record.embedding, *(sum(outputs[start : start + 4]) for start in (0, 4, 8))]
    query = (model.model.attn_res.query * model.model.attn_res.norm)[-1].double()
    assert len(ablation.by_site[-1]) == len(sources)
    for hidden, rise in enumerate(ablation.by_site[-1]):
        others = torch.stack([source for index, source in enumerate(sources) if index != hidden])
        keys = others / (others**2).mean(-1, keepdim=True).add(model.config.rms_norm_eps).sqrt()
        mixture = ((keys @ query).softmax(0)[..., None] * others).sum(0)
        with torch.no_grad():
            logits = model.lm_head(model.model.norm(mixture.float()))
        loss = cross_entropy(logits[0, :-1], ids[0, 1:]).item()
        assert rise == pytest.approx(loss - ablation.loss, abs=1e-5)


def test_a_block_hidden_from_all_is_hidden_wherever_it_is_read():
    layout = LLAMA.config(**BLOCKS).attn_res_layout
    assert hide_block(layout, 1) == dict.fromkeys(range(4, 13), 1)  # closed where layer 2 starts
    assert hide_block(layout, 0) == dict.fromkeys(range(1, 13), 0)  # site 0 reads nothing else
    model, ids = LLAMA.causal_lm(**BLOCKS), tokens(batch=1)
    ablation = ablate_sources(model, ids)
    assert ablation.by_site[0] == [None]
    assert len(ablation.from_all) == 3
    assert all(abs(rise) > 1e-4 for rise in ablation.from_all)


@pytest.mark.parametrize(
    "fields", [{"attn_res_form": "add", "attn_res_heads": 4}, {"attn_res_weights": "static"}, {"attn_res_window": 2}]
)
def test_every_form_can_be_diagnosed(fields, tmp_path, save_model):
    """The command, on a form other than the paper's: pictures and figures for it, the null source included."""
    (tmp_path / "text.txt").write_text(words(40))
    options = ("--text", tmp_path / "text.txt", "--output", tmp_path / "out", "--ablate")
    printed = succeed("diagnose", save_model(**fields), *options)
    assert "rise of the loss" in printed
    diagnosis = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    shape = [len(weights) for weights in diagnosis["weights"]]
    assert [len(rises) for rises in diagnosis["ablation"]["by_site"]] == shape
    assert (tmp_path / "out" / "ablation.png").stat().st_size > 10_000
