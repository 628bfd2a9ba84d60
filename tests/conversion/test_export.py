"""`conversion export`: back to the base family, or a refusal that says why."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import UserError
from conversion.export import export_checkpoint
from conversion.inspection import inspect_checkpoint
from conversion.port import Blocks, Form, port_checkpoint
from conversion.verify import verify_port
from tests.conversion.checkpoints import all_tensors, edit_config, edit_tensors, merge_shards, set_query, train_queries
from tests.families import BY_NAME, tokens


@pytest.mark.parametrize("blocks", [Blocks(), Blocks("full")], ids=["block", "full"])
def test_there_and_back(family, base_checkpoint, tmp_path, blocks):
    port_checkpoint(str(base_checkpoint), tmp_path / "port", blocks)
    report = export_checkpoint(str(tmp_path / "port"), tmp_path / "back")
    assert report.tensors_dropped == 2
    back, base = all_tensors(tmp_path / "back"), all_tensors(base_checkpoint)
    assert back.keys() == base.keys()
    assert all(torch.equal(back[name], value) for name, value in base.items())
    config, expected = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", base_checkpoint)
    )
    assert config == expected
    assert not list((tmp_path / "back").glob("*.py"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(model) is family.base("ForCausalLM")
    assert not any(info.values())


@pytest.mark.parametrize("shard_size", ["5GB", "30KB"])
def test_after_saving_with_transformers(family, base_checkpoint, tmp_path, shard_size):
    """Depth tensors then lie among the others, in any shard."""
    port_checkpoint(str(base_checkpoint), tmp_path / "port")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "port")
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    export_checkpoint(str(tmp_path / "saved"), tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    base = AutoModelForCausalLM.from_pretrained(base_checkpoint)
    assert torch.equal(back(tokens()).logits, base(tokens()).logits)


def test_the_control(family, tmp_path):
    """Mode "none" has no depth tensors and is the base already."""
    model = family.causal_lm(attn_res_mode="none")
    model.save_pretrained(tmp_path / "control")
    export_checkpoint(str(tmp_path / "control"), tmp_path / "back")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "back")(tokens()).logits, model(tokens()).logits)


def test_refusals(base_checkpoint, tmp_path):
    port_checkpoint(str(base_checkpoint), tmp_path / "port")
    set_query(tmp_path / "port", site=0, value=1.0)  # without effect
    export_checkpoint(str(tmp_path / "port"), tmp_path / "with a query that is never read")

    set_query(tmp_path / "port", site=7, value=2.0)
    with pytest.raises(UserError, match=r"1 of 12 queries are trained \(the largest norm is 11.3\)"):
        export_checkpoint(str(tmp_path / "port"), tmp_path / "back")
    train_queries(tmp_path / "port")
    with pytest.raises(UserError, match="12 of 12 queries are trained"):
        export_checkpoint(str(tmp_path / "port"), tmp_path / "back")

    port_checkpoint(str(base_checkpoint), tmp_path / "unscaled")
    edit_config(tmp_path / "unscaled", attn_res_scale_norm_eps=False)
    with pytest.raises(UserError, match="attn_res_scale_norm_eps is off"):
        export_checkpoint(str(tmp_path / "unscaled"), tmp_path / "back")
    with pytest.raises(UserError, match="is no Attention Residuals checkpoint"):
        export_checkpoint(str(base_checkpoint), tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda _: None, r"expected the depth tensors model.attn_res.norm and model.attn_res.query, found "),
        ("norm", lambda _: None, r"found model.attn_res.query\."),
        ("query", lambda old: old[:-1], r"query has shape \[12, 32\], but config.json implies \[13, 32\]"),
        ("norm", lambda old: old[:, :-1], r"norm has shape \[13, 31\], but config.json implies \[13, 32\]"),
        ("query", lambda old: old.index_fill(0, torch.tensor([5]), float("nan")), "query.* are not finite"),
        (
            "norm",
            lambda old: old.index_fill(0, torch.tensor([0]), float("inf")),
            "norm holds values that are not finite",
        ),
    ],
)
def test_depth_tensors_that_are_not_those_of_a_port(tmp_path, name, change, message):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "base")
    port_checkpoint(str(tmp_path / "base"), tmp_path / "port")
    name = f"model.attn_res.{name}"
    new = change(all_tensors(tmp_path / "port")[name])
    edit_tensors(tmp_path / "port", **{name: new if new is None else new.contiguous()})
    if new is None:
        merge_shards(tmp_path / "port")
    for refuse in (
        lambda: export_checkpoint(str(tmp_path / "port"), tmp_path / "back"),
        lambda: inspect_checkpoint(str(tmp_path / "port")),
    ):
        with pytest.raises(UserError, match=message):
            refuse()
    assert not (tmp_path / "back").exists()


FORMS = {
    "add": (Form("add", heads=4), "gate", "13 of 13 gates are trained"),
    "heads": (Form(heads=4), "query", "12 of 12 queries"),
    "input": (Form(query="input", query_rank=3), "query_up", "12 of 12 query projections"),
    "sigmoid": (Form(weights="sigmoid"), "query", "13 of 13 queries"),
    "static": (Form(weights="static"), "static", "12 of 12 static weights"),
    "static_raw": (Form(weights="static_raw", window=100), "static", "13 of 13 static weights"),
    "no key norm": (Form(key_norm=False), "query", "12 of 12 queries"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_there_and_back(name, tmp_path):
    """Ported and verified, inspected, exported; and no longer once what starts at zero has moved."""
    form, moving, refusal = FORMS[name]
    BY_NAME["Qwen3Moe"].base_causal_lm().save_pretrained(tmp_path / "base")
    report = port_checkpoint(str(tmp_path / "base"), tmp_path / "port", Blocks("full"), verify=True, form=form)
    assert report.verification.passed
    assert verify_port(str(tmp_path / "base"), str(tmp_path / "port")).passed
    assert f"{moving} of 0 of " in str(inspect_checkpoint(str(tmp_path / "port")))
    export_checkpoint(str(tmp_path / "port"), tmp_path / "back")
    back, base = all_tensors(tmp_path / "back"), all_tensors(tmp_path / "base")
    assert back.keys() == base.keys()
    assert all(torch.equal(back[name], value) for name, value in base.items())
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("base", "back")]
    assert configs[0] == configs[1]
    name = f"model.attn_res.{moving}"
    edit_tensors(tmp_path / "port", **{name: all_tensors(tmp_path / "port")[name] + 0.5})
    with pytest.raises(UserError, match=refusal):
        export_checkpoint(str(tmp_path / "port"), tmp_path / "again")


def test_a_window_is_lossless_beside_the_stream_only(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"A window of 2 hides sources.*'add' goes with a window"):
        port_checkpoint(str(tmp_path / "base"), tmp_path / "port", form=Form(window=2))
    report = port_checkpoint(str(tmp_path / "base"), tmp_path / "port", form=Form("add", window=2), verify=True)
    assert report.verification.relative_error == 0
