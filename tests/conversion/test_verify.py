"""`conversion verify`, and `port --verify`."""

import re

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from common.errors import UserError
from common.text import SAMPLE
from conversion.__main__ import app
from conversion.port import Blocks, port_checkpoint
from conversion.verify import verify_port
from tests.conversion.checkpoints import (
    add_tokenizer,
    all_tensors,
    command,
    edit_config,
    edit_json,
    edit_tensors,
    train_queries,
)
from tests.families import BY_NAME, Family


@pytest.fixture
def ported(base_checkpoint, tmp_path):
    port_checkpoint(str(base_checkpoint), tmp_path / "port")
    return tmp_path / "port"


def test_a_port_passes(base_checkpoint, ported):
    verification = verify_port(str(base_checkpoint), str(ported))
    assert verification.passed
    assert verification.tensors == len(all_tensors(base_checkpoint))
    assert verification.depth_tensors == verification.expected_depth_tensors == 2
    assert 0 < verification.relative_error <= 3e-6
    assert verification.top1_agreement == 1.0


def test_a_trained_port_fails_by_its_logits_alone(base_checkpoint, ported):
    train_queries(ported)
    verification = verify_port(str(base_checkpoint), str(ported))
    assert not verification.passed
    assert verification.differing == ()
    assert verification.relative_error > 1e-3
    assert verification.top1_agreement < 1


def test_one_changed_bit_is_named(base_checkpoint, ported):
    """Too small a change for the logits to show."""
    weight = all_tensors(ported)["model.layers.2.self_attn.o_proj.weight"].clone()
    weight.view(torch.int32)[0, 0] ^= 1
    edit_tensors(ported, **{"model.layers.2.self_attn.o_proj.weight": weight})
    verification = verify_port(str(base_checkpoint), str(ported))
    assert verification.differing == ("model.layers.2.self_attn.o_proj.weight",)
    assert verification.relative_error <= 3e-6
    assert not verification.passed
    assert "differs: model.layers.2.self_attn.o_proj.weight" in str(verification)


@pytest.mark.parametrize(("field", "value"), [("initializer_range", 0.5), ("use_cache", False), ("bos_token_id", 5)])
def test_a_setting_that_the_text_does_not_show(base_checkpoint, ported, field, value):
    edit_config(ported, **{field: value})
    verification = verify_port(str(base_checkpoint), str(ported))
    assert verification.relative_error <= 3e-6
    assert not verification.passed
    assert f"DIFFERS: {field}: {value}, the source's is" in str(verification)


def test_unscaled_eps_fails(base_checkpoint, ported):
    edit_config(ported, attn_res_scale_norm_eps=False)
    edit_config(ported, rms_norm_eps=1e-2)
    edit_config(base_checkpoint, rms_norm_eps=1e-2)
    assert not verify_port(str(base_checkpoint), str(ported)).passed


def test_text_file(base_checkpoint, ported, tmp_path):
    (tmp_path / "text").write_text("Some words of mine.")
    verification = verify_port(str(base_checkpoint), str(ported), tmp_path / "text")
    assert verification.tokens == 19  # bytes: this checkpoint has no tokenizer
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xfa")
    for name, message in {"empty": "is empty", "latin": "UTF-8", "nowhere": "is missing"}.items():
        with pytest.raises(UserError, match=message):
            verify_port(str(base_checkpoint), str(ported), tmp_path / name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mixtral", {"tokenizer_class": "LlamaTokenizer"}),  # the class of the file, or one of the family's
        ("Qwen2", {"tokenizer_class": "LlamaTokenizer"}),  # a class known to be wrong for the family
        ("Qwen2", {}),  # the class goes by the config's
        ("Gemma", {"tokenizer_class": "GemmaTokenizer"}),
    ],
)
def test_a_port_tokenises_as_its_source(tmp_path, name, settings, run_isolated):
    """Transformers chooses a tokenizer's class by the family's model type, also where this project is not installed."""
    family = BY_NAME.get(name) or Family(name, BY_NAME["Llama"].tiny | {"head_dim": 8})
    family.base_causal_lm().save_pretrained(tmp_path / "source")
    add_tokenizer(tmp_path / "source", **settings)
    report = port_checkpoint(str(tmp_path / "source"), tmp_path / "target", verify=True)
    source, target = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("source", "target"))
    assert type(source) is type(target)
    assert source(SAMPLE)["input_ids"] == target(SAMPLE)["input_ids"]
    (tmp_path / "text").write_text(SAMPLE)
    elsewhere = """
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("target", trust_remote_code=True)
print(type(tokenizer).__name__, tokenizer(open("text").read())["input_ids"])
"""
    assert run_isolated(elsewhere).strip() == f"{type(source).__name__} {source(SAMPLE)['input_ids']}"
    assert report.verification.same_tokenizer
    assert "tokenizer  the same token ids" in str(report)


def test_another_tokenizer_fails(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "source")
    add_tokenizer(tmp_path / "source", tokenizer_class="TokenizersBackend")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    assert verify_port(str(tmp_path / "source"), str(tmp_path / "target")).passed
    file = tmp_path / "target" / "tokenizer.json"
    edit_json(file, normalizer={"type": "Lowercase"})
    verification = verify_port(str(tmp_path / "source"), str(tmp_path / "target"))
    assert verification.relative_error <= 3e-6
    assert verification.differing == ()
    assert not verification.passed
    assert "tokenizer  OTHER TOKEN IDS than the source's" in str(verification)


def change_a_line(folder):
    file = folder / "depth_readers.py"
    file.write_text(file.read_text() + "# changed\n")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (change_a_line, "depth_readers.py"),
        (lambda folder: (folder / "depth_attention.py").unlink(), "depth_attention.py"),
        (lambda folder: (folder / "extra.py").write_text(""), "extra.py"),
        (lambda folder: (folder / "sub").mkdir() or (folder / "sub" / "extra.py").write_text(""), "sub/extra.py"),
        (lambda folder: edit_config(folder, auto_map={"AutoConfig": "other/repo--file.Class"}), "auto_map"),
    ],
)
def test_other_code_fails_and_is_named(tmp_path, damage, named):
    """That of a tokenizer, which the source has too, does not."""
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenization_mine.py").write_text("")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "port")
    assert verify_port(str(tmp_path / "source"), str(tmp_path / "port")).passed
    damage(tmp_path / "port")
    status, output = command("verify", tmp_path / "source", tmp_path / "port")
    assert status == 1
    assert re.search(f"DIFFERS: .*{named}", output)


def test_a_tokenizer_on_one_side_fails(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "source")
    add_tokenizer(tmp_path / "source", tokenizer_class="TokenizersBackend")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "port")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "port" / name).unlink()
    assert verify_port(str(tmp_path / "source"), str(tmp_path / "port")).same_tokenizer is False


def test_a_base_checkpoint_is_no_port(base_checkpoint):
    with pytest.raises(UserError, match="no Attention Residuals family"):
        verify_port(str(base_checkpoint), str(base_checkpoint))


def test_exit_status(base_checkpoint, ported):
    arguments = ["verify", str(base_checkpoint), str(ported)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    train_queries(ported)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "verified   NO" in result.output


def test_port_verifies_before_the_target_appears(base_checkpoint, tmp_path, monkeypatch):
    report = port_checkpoint(str(base_checkpoint), tmp_path / "good", Blocks("full"), verify=True)
    assert report.verification.passed
    assert "verified   yes" in str(report)
    monkeypatch.setattr("conversion.port.depth_tensors", lambda config, prefix: {"foo": torch.zeros(1)})
    with pytest.raises(UserError, match=r"(?s)does not compute.*0 of 2 depth tensors"):
        port_checkpoint(str(base_checkpoint), tmp_path / "bad", verify=True)
    assert not (tmp_path / "bad").exists()
    assert not list(tmp_path.glob(".bad*"))


def test_models_too_large_for_memory_are_offloaded(base_checkpoint, ported, monkeypatch):
    class NoMemory:
        available = 0

    placements = []
    from transformers import PreTrainedModel

    real = PreTrainedModel.from_pretrained.__func__

    def spy(cls, *args, **kwargs):
        placements.append(kwargs.get("device_map"))
        return real(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(spy))
    monkeypatch.setattr("conversion.verify.psutil.virtual_memory", lambda: NoMemory)
    assert verify_port(str(base_checkpoint), str(ported)).passed
    assert "auto" in placements
