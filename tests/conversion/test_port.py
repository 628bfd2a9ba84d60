"""`conversion port`: what it writes computes what its source computes, loads everywhere, and names every mistake."""

import json
import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import modeling_attnres
from common.errors import AnswerIsNo, UserError
from conversion.__main__ import app
from conversion.port import Blocks, port_checkpoint, try_command
from tests.conftest import CODE_FILES
from tests.conversion.checkpoints import all_tensors, command, edit_config, edit_header
from tests.families import FAMILIES, Family, tokens
from tests.oracle import relative_error


BLOCKS = {
    "block": Blocks(),
    "full": Blocks("full"),
    "block size": Blocks(size=4),
    "number of blocks": Blocks(number=4),
    "one block": Blocks(number=1),
}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("shard_size", ["5GB", "30KB"], ids=["single file", "sharded"])
@pytest.mark.parametrize("published", [True, False], ids=["published layout", "merged layout"])
def test_port_is_lossless(family, tmp_path, blocks, shard_size, published):
    """For the names a family was published with (a tensor an expert, …) and those transformers has in memory."""
    base = family.base_causal_lm()
    base.save_pretrained(tmp_path / "source", max_shard_size=shard_size, save_original_format=published)
    before = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}

    report = port_checkpoint(str(tmp_path / "source"), tmp_path / "target", blocks)

    assert {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()} == before
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert type(model) is family.ours("ForCausalLM")
    assert not any(info.values()), info
    assert model.config.attn_res_scale_norm_eps
    assert report.parameters_added == sum(parameter.numel() for parameter in model.model.attn_res.parameters())
    ids = tokens(length=60)
    with torch.no_grad():
        assert relative_error(model.eval()(ids).logits, base(ids).logits) <= 3e-6
    kept, added = all_tensors(tmp_path / "source"), all_tensors(tmp_path / "target")
    assert all(torch.equal(added[name], value) for name, value in kept.items())
    assert added.keys() - kept.keys() == {"model.attn_res.query", "model.attn_res.norm"}


def test_port_loads_as_remote_code(family, tmp_path, run_isolated):
    base = family.base_causal_lm()
    base.save_pretrained(tmp_path / "source")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    torch.save(tokens(), tmp_path / "ids.pt")
    printed = run_isolated(
        """
import torch, transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("target", trust_remote_code=True).eval()
torch.save(model(torch.load("ids.pt")).logits, "logits.pt")
for name in model.config.auto_map:
    print(name, type(getattr(transformers, name).from_pretrained("target", trust_remote_code=True)).__name__)
"""
    )
    config_class = family.ours("Config")
    expected = {"AutoConfig": config_class.__name__} | config_class.class_names()
    assert dict(line.split() for line in printed.splitlines()) == expected
    assert relative_error(torch.load(tmp_path / "logits.pt"), base(tokens()).logits) <= 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_kept_and_depth_parameters_are_fp32(family, tmp_path, dtype):
    family.base_causal_lm().to(dtype).save_pretrained(tmp_path / "source")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto")
    assert model.dtype == dtype
    assert {p.dtype for p in model.model.attn_res.parameters()} == {torch.float32}


def test_base_model_without_a_head(family, tmp_path):
    """Its tensors have no `model.` prefix, and neither have the depth tensors added to them."""
    base = family.base_causal_lm().model
    base.save_pretrained(tmp_path / "source")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    assert not any(name.startswith("model.") for name in all_tensors(tmp_path / "target"))
    model, info = family.ours("Model").from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(info.values()), info
    assert relative_error(model.eval()(tokens()).last_hidden_state, base(tokens()).last_hidden_state) <= 3e-6


def test_tied_embeddings(tmp_path):
    base = FAMILIES[0].base_causal_lm(tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "source")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert relative_error(model.eval()(tokens()).logits, base(tokens()).logits) <= 3e-6


def test_other_files_are_kept_and_other_weights_are_not(base_checkpoint, tmp_path):
    (base_checkpoint / "LICENSE").write_text("mine")
    (base_checkpoint / "original").mkdir()
    (base_checkpoint / "original" / "params.json").write_text("{}")
    (base_checkpoint / "assets").mkdir()
    (base_checkpoint / "assets" / "picture.svg").write_text("<svg/>")
    (base_checkpoint / "pytorch_model.bin").write_bytes(b"old")
    generation_config = (base_checkpoint / "generation_config.json").read_text()
    port_checkpoint(str(base_checkpoint), tmp_path / "target")
    assert (tmp_path / "target" / "LICENSE").read_text() == "mine"
    assert (tmp_path / "target" / "assets" / "picture.svg").read_text() == "<svg/>"
    assert (tmp_path / "target" / "generation_config.json").read_text() == generation_config
    assert not (tmp_path / "target" / "pytorch_model.bin").exists()
    assert {path.name for path in (tmp_path / "target").glob("*.py")} == CODE_FILES


def test_a_hub_id_is_found_in_the_cache(base_checkpoint, tmp_path, monkeypatch):
    """The hub's cache links a snapshot's files to blobs; the port holds real files."""
    repository = tmp_path / "cache" / "models--someone--tiny"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for index, path in enumerate(sorted(base_checkpoint.iterdir())):
        shutil.copy(path, blobs / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    port_checkpoint("someone/tiny", tmp_path / "target")
    assert not any(path.is_symlink() for path in (tmp_path / "target").iterdir())
    AutoModelForCausalLM.from_pretrained(tmp_path / "target")


def test_a_name_that_is_nowhere(tmp_path):
    with pytest.raises(UserError, match="no local path, and not to be had from the hub"):
        port_checkpoint("no-such/model", tmp_path / "target")


def test_the_number_of_blocks_is_exact(tmp_path):
    FAMILIES[0].base_causal_lm(num_hidden_layers=7).save_pretrained(tmp_path / "source")
    for count in range(1, 8):
        config = port_checkpoint(str(tmp_path / "source"), tmp_path / str(count), Blocks(number=count)).config
        sizes = [b - a for a, b in pairwise((*config.attn_res_layout.starts, 7))]
        assert len(sizes) == count
        assert min(sizes) >= 1


# ---------------------------------------------------------------------------- families that are not in the table


def save_family(folder, name, **fields):
    """A tiny random checkpoint of a family that tests/families.py does not have."""
    Family(name, FAMILIES[0].tiny | {"head_dim": 8} | fields).base_causal_lm().save_pretrained(folder)


@pytest.mark.parametrize("blocks", [Blocks(size=2), Blocks("full")], ids=["block", "full"])
def test_a_family_outside_the_table_is_verified_and_ported(tmp_path, blocks, monkeypatch):
    """Gemma 2 has norms behind its sublayers, too (sandwich): what a sublayer adds is what its last norm gives."""
    monkeypatch.setattr(modeling_attnres, "LOSSLESS_FAMILIES", modeling_attnres.LOSSLESS_FAMILIES - {"gemma2"})
    save_family(tmp_path / "source", "Gemma2")
    report = port_checkpoint(str(tmp_path / "source"), tmp_path / "target", blocks)
    assert report.verification.passed
    assert report.verification.tokens == 512
    assert "verified, for its family is not among those tested to be lossless:" in str(report)
    assert "verified, for" not in str(port_llama(tmp_path, verify=True))
    source, target = (AutoModelForCausalLM.from_pretrained(tmp_path / f).eval() for f in ("source", "target"))
    assert type(target).__name__ == "AttnResGemma2ForCausalLM"
    assert relative_error(target(tokens()).logits, source(tokens()).logits) <= 3e-6


def port_llama(tmp_path, **arguments):
    FAMILIES[0].base_causal_lm().save_pretrained(tmp_path / "llama")
    return port_checkpoint(str(tmp_path / "llama"), tmp_path / "ported llama", **arguments)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        (
            "Olmo2",
            {},
            r"'olmo2' cannot be ported: .*Olmo2DecoderLayer.*attn_res_form=\"add\" takes this layer as it is",
        ),
        ("Cohere", {}, r"'cohere' cannot be ported: .*and one before the MLP .*CohereDecoderLayer does not"),
        ("GPTNeoX", {}, r"'gpt_neox' cannot be ported: .*has no final norm by a known name"),
        ("Doge", {}, r"'doge' cannot be ported: .*residual stream.*attn_res_form=\"add\".* can go with it"),
    ],
    ids=["no pre-norm", "one norm for parallel sublayers", "names of parts", "found by a run"],
)
def test_what_cannot_be_lossless_is_refused_by_what_is_found(tmp_path, name, fields, reason):
    save_family(tmp_path / "source", name, **fields)
    with pytest.raises(UserError, match=f"(?s){reason}"):
        port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_add_ports_what_the_papers_form_cannot_take(tmp_path):
    save_family(tmp_path / "source", "Olmo2")
    status, output = command(
        "port", tmp_path / "source", tmp_path / "port", "--form", "add", "--heads", "4", "--verify"
    )
    assert status == 0, output
    assert "form add, heads 4" in output
    source, target = (AutoModelForCausalLM.from_pretrained(tmp_path / f).eval() for f in ("source", "port"))
    assert torch.equal(target(tokens()).logits, source(tokens()).logits)


def test_a_composite_checkpoint_is_refused(tmp_path):
    save_family(tmp_path / "source", "Qwen2")
    text = json.loads((tmp_path / "source" / "config.json").read_text())
    for model_type in ("qwen3_5", "gemma3", "llava"):
        composite = {"model_type": model_type, "text_config": text | {"model_type": "qwen3_5_text"}}
        (tmp_path / "source" / "config.json").write_text(json.dumps(composite))
        with pytest.raises(UserError, match=f"'{model_type}' cannot be ported"):
            port_checkpoint(str(tmp_path / "source"), tmp_path / "target")


def test_a_port_that_is_not_lossless_is_refused_with_its_error(tmp_path, monkeypatch):
    """NanoChat normalises its embedding with its final norm: one whose eps is divided is another model."""
    save_family(tmp_path / "source", "NanoChat", rms_norm_eps=1e-3)
    parts = dict.fromkeys(("attention_norm", "mlp_norm", "final_norm"))
    monkeypatch.setitem(modeling_attnres.modeling_attnres._FAMILY_PARTS, "nanochat", parts)
    port_checkpoint(str(tmp_path / "source"), tmp_path / "unverified")
    monkeypatch.setattr(modeling_attnres, "LOSSLESS_FAMILIES", modeling_attnres.LOSSLESS_FAMILIES - {"nanochat"})
    with pytest.raises(AnswerIsNo, match=r"does not compute.*relative error \d\.\de-0[1-5].*verified NO"):
        port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    assert not (tmp_path / "target").exists()


# ------------------------------------------------------------------------------------------------------- bad input


def overlap(header):
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    header[second]["shape"], header[second]["dtype"] = header[first]["shape"], header[first]["dtype"]


def past_the_end(header):
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    begin, end = header[last]["data_offsets"]
    header[last]["data_offsets"] = [begin, 2 * end - begin]
    header[last]["shape"] = [2 * header[last]["shape"][0], *header[last]["shape"][1:]]


def truncate(path, size):
    with open(path, "r+b") as file:
        file.truncate(size)


def add_tensor(folder, name, tensor):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})


def only_pickles(folder):
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def drop_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BAD_SOURCES = {
    "no family of transformers": (
        lambda f: edit_config(f, model_type="lama"),
        r"source: transformers 5\.\d+\.\d+ has no family 'lama'",
    ),
    "no causal LM": (
        lambda f: edit_config(f, model_type="t5"),
        r"source: the family 't5' cannot be ported: .*has no causal language model",
    ),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), r"config.json: no model_type"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json is missing"),
    "config no JSON": (
        lambda f: (f / "config.json").write_text("{\n oops"),
        r"as JSON cannot be read.*line 2",
    ),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), r"expected a JSON object, found a list"),
    "wider config": (
        lambda f: edit_config(f, hidden_size=64),
        r"weight has shape \[.*\], but config.json implies \[.*64\]",
    ),
    "more layers": (
        lambda f: edit_config(f, num_hidden_layers=7),
        r"num_hidden_layers is 7, .* have 6 layers",
    ),
    "fewer layers": (lambda f: edit_config(f, num_hidden_layers=5), r"layers\.5\..* has no place in the model"),
    "a tensor short": (drop_tensor, r"no shard holds model.layers.1.mlp.down_proj.weight"),
    "a tensor too many": (lambda f: add_tensor(f, "foo", torch.zeros(2)), r"foo has no place"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"neither model.safetensors nor"),
    "pickles only": (only_pickles, r"pickled weights \(pytorch_model.bin\); only safetensors.*save_pretrained"),
    "header cut": (
        lambda f: truncate(f / "model.safetensors", 100),
        r"as a whole safetensors file cannot",
    ),
    "data cut": (
        lambda f: truncate(f / "model.safetensors", os.path.getsize(f / "model.safetensors") - 4),
        r"as a whole safetensors file cannot",
    ),
    "empty": (
        lambda f: truncate(f / "model.safetensors", 0),
        r"as a whole safetensors file cannot",
    ),
    "overlap": (lambda f: edit_header(f / "model.safetensors", overlap), r"as a whole safetensors file cannot"),
    "past the end": (
        lambda f: edit_header(f / "model.safetensors", past_the_end),
        r"as a whole safetensors file cannot",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_bad_sources(tmp_path, damage, message):
    source, target = tmp_path / "source", tmp_path / "target"
    FAMILIES[0].base_causal_lm().save_pretrained(source)
    damage(source)
    with pytest.raises(UserError, match=f"(?s){message}"):
        port_checkpoint(str(source), target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def copy_a_tensor_to_another_shard(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name, value = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: value}, second, metadata={"format": "pt"})


def name_a_tensor_twice(folder):
    path = folder / "model.safetensors.index.json"
    text = path.read_text()
    line = re.search(r'\n( *"model\.norm\.weight": "[^"]*")', text).group(1)
    path.write_text(text.replace(line, f"{line},\n{line}"))


BAD_INDICES = {
    "missing shard": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        r"names the shard model-00002-of-\d+.*missing",
    ),
    "unnamed tensor": (
        lambda f: edit_index(f, lambda m: m.update({"foo": sorted(set(m.values()))[0]})),
        r"foo should lie in model-00001.*no shard holds it",
    ),
    "wrong shard": (
        lambda f: edit_index(f, lambda m: m.update({"model.norm.weight": sorted(set(m.values()))[0]})),
        r"model.norm.weight should lie in model-00001.*but it lies in",
    ),
    "in two shards": (copy_a_tensor_to_another_shard, r"lies in two shards: model-00001.* and model-00002"),
    "named twice": (name_a_tensor_twice, r"'model.norm.weight' is named twice"),
    "no map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), r"no weight_map"),
    "elsewhere": (
        lambda f: edit_index(f, lambda m: m.update({"model.norm.weight": "../other.safetensors"})),
        r"'../other.safetensors' is not a plain file name",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD_INDICES.values(), ids=BAD_INDICES.keys())
def test_bad_indices(tmp_path, damage, message):
    FAMILIES[0].base_causal_lm().save_pretrained(tmp_path / "source", max_shard_size="30KB")
    damage(tmp_path / "source")
    with pytest.raises(UserError, match=f"(?s){message}"):
        port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_port_is_not_ported_again(base_checkpoint, tmp_path):
    port_checkpoint(str(base_checkpoint), tmp_path / "target")
    with pytest.raises(UserError, match="an Attention Residuals checkpoint already"):
        port_checkpoint(str(tmp_path / "target"), tmp_path / "again")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"mode": "blocks"}, "must be 'block' or 'full', got 'blocks'"),
        ({"size": 0}, "at least 1 decoder layer, got 0"),
        ({"number": 0}, "between 1 and the 6 layers, got 0"),
        ({"number": 7}, "between 1 and the 6 layers, got 7"),
        ({"size": 2, "number": 3}, "not both"),
        ({"mode": "full", "number": 3}, "Full mode has no blocks"),
    ],
)
def test_bad_blocks(tmp_path, blocks, message):
    FAMILIES[0].base_causal_lm().save_pretrained(tmp_path / "source")
    with pytest.raises(UserError, match=message):
        port_checkpoint(str(tmp_path / "source"), tmp_path / "target", Blocks(**blocks))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_bad_targets(base_checkpoint, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target, message in {
        tmp_path / "full": "is not empty",
        tmp_path / "file": "is no folder",
        base_checkpoint: "the target is the source",
        base_checkpoint / "inside": "lies inside the source",
        tmp_path / "file" / "below": "file is no folder",
    }.items():
        with pytest.raises(UserError, match=message):
            port_checkpoint(str(base_checkpoint), target)
    assert (tmp_path / "full" / "file").read_text() == "mine"
    with pytest.raises(UserError, match="~nobody-of-this-name/source: "):
        port_checkpoint("~nobody-of-this-name/source", tmp_path / "target")


def test_an_empty_folder_may_be_the_target_even_the_current_one(base_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    port_checkpoint(str(base_checkpoint), Path())
    assert "\n# empty\n" in (tmp_path / "empty" / "README.md").read_text()


def test_command_line(base_checkpoint, tmp_path):
    result = CliRunner().invoke(app, ["port", str(base_checkpoint), str(tmp_path / "target"), "--num-blocks", "3"])
    assert result.exit_code == 0
    for line in ("block", "3 (decoder layers 0-1, 2-3, 4-5)", "parameters 832", "trust_remote_code=True"):
        assert line in result.output
    assert "Example: python -m conversion port" in CliRunner().invoke(app, ["port", "--help"]).output

    result = CliRunner().invoke(app, ["port", str(base_checkpoint), str(tmp_path / "target")])
    assert result.exit_code == 2
    assert re.fullmatch(r"error: .*is not empty\.\n", result.output)


@pytest.mark.parametrize("name", ["it's", 'a "quoted" name', "$(touch x); `y`", "-x", "ü 😀"])
def test_the_command_to_try_is_quoted(tmp_path, name):
    """For the shell, and for Python: what it loads is the target, whatever its name."""
    line = try_command(tmp_path / name)
    shell = f"python() {{ printf '%s\\0' \"$@\"; }}; {line}"
    option, code, target = subprocess.run(["sh", "-c", shell], capture_output=True).stdout.decode().split("\0")[:-1]
    assert (option, target) == ("-c", str(tmp_path / name))
    compile(code, "", "exec")
