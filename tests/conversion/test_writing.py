"""What is copied beside the weights, and that nothing of a source is ever changed."""

import json
from pathlib import Path

import pytest

import modeling_attnres
from conversion.port import port_checkpoint
from tests.conversion.checkpoints import all_tensors, command, contents, edit_config, merge_shards
from tests.families import BY_NAME


@pytest.fixture
def source(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


LEFTOVERS = (  # by path: weights that no index names, adapters, checkpoints of a training
    *("model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("MODEL.SAFETENSORS", "w.npz", "model.pth.tar"),
    *("consolidated.safetensors", "adapter_model.safetensors", "model.safetensors.index.json", "optimizer.pt"),
    *("sub/model.safetensors", "sub/pytorch_model.bin", "checkpoint-5/tokenizer.json", "sub/checkpoint-5/file"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/README.md", "adapter/sub/file"),
    *("modeling_attnres.py", "provenance.json", "original/sub/params.json"),
)
KEPT = ("LICENSE", "tokenizer_config.json", "sub/picture.svg", "tokenization_mine.py")


def litter(folder):
    for name in LEFTOVERS + KEPT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("mine")


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_only_what_an_index_names_is_weights(source, tmp_path, link):
    litter(source)
    before = contents(source)
    status, output = command("port", source, tmp_path / "port", "--verify", *(["--link"] if link else []))
    assert status == 0, output
    written = contents(tmp_path / "port")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    ours = ["config.json", "generation_config.json", "model.safetensors.index.json", "README.md", "provenance.json"]
    code = sorted(
        path.name for path in Path(modeling_attnres.__file__).parent.glob("*.py") if path.name != "__init__.py"
    )
    assert sorted(map(str, written)) == sorted([*KEPT, *shards, *ours, *code])
    assert contents(source) == before
    assert all_tensors(tmp_path / "port").keys() > {"model.attn_res.query", "model.norm.weight"}


def test_no_command_changes_what_it_is_given(source, tmp_path):
    litter(source)
    port_checkpoint(str(source), tmp_path / "linked", link=True)
    before = contents(source), contents(tmp_path / "linked")
    for arguments in (
        ("port", source, tmp_path / "port"),
        ("port", source, tmp_path / "linked again", "--link", "--verify"),
        ("verify", source, tmp_path / "linked"),
        ("inspect", tmp_path / "linked", "--entropy"),
        ("inspect", source),
        ("export", tmp_path / "linked", tmp_path / "exported"),
        ("upcycle", source, tmp_path / "upcycled", "--experts", 2, "--top-k", 1),
        ("port", source, tmp_path / "port"),  # is there
    ):
        status, output = command(*arguments)
        assert status == (2 if output.startswith("error") else 0), output
        assert (contents(source), contents(tmp_path / "linked")) == before, arguments
    assert (tmp_path / "exported").exists()
    assert (tmp_path / "upcycled").exists()


def test_links_out_of_the_source_are_not_followed(source, tmp_path):
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "secrets").mkdir()
    for name, leads_to in (("LICENSE.txt", "../id_rsa"), ("assets", "../secrets"), ("README.md", "../id_rsa")):
        (source / name).symlink_to(leads_to)
        status, line = command("port", source, tmp_path / "port")
        assert status == 2
        assert f"{name} is a link to" in line
        assert "it is not followed. Put a copy there, or remove it." in line
        assert "portable   no: " in command("inspect", source)[1]
        (source / name).unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["id_rsa", "secrets", "source"]


def test_links_within_the_source_are_followed_once(source, tmp_path):
    (source / "LICENSE").write_text("mine")
    (source / "COPYING").symlink_to("LICENSE")
    for name in ("a", "b"):
        (source / name).symlink_to(".")  # would double with each level
    assert command("port", source, tmp_path / "port")[0] == 0
    assert not (tmp_path / "port" / "COPYING").is_symlink()
    assert (tmp_path / "port" / "COPYING").read_text() == "mine"
    assert not (tmp_path / "port" / "a").exists()


def test_weights_may_lie_on_another_disk(source, tmp_path):
    (source / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (source / "model.safetensors").symlink_to("../weights.safetensors")
    assert command("port", source, tmp_path / "port", "--verify")[0] == 0
    assert not any(path.is_symlink() for path in (tmp_path / "port").iterdir())


def test_what_is_recorded_is_what_was_written(source, tmp_path):
    """The hashes of weights and code: a file that was changed since, at either end of a hard link, is named."""
    port_checkpoint(str(source), tmp_path / "port", link=True)
    recorded = json.loads((tmp_path / "port" / "provenance.json").read_text())["files"]
    assert sorted(recorded) == sorted(
        path.name for path in (tmp_path / "port").iterdir() if path.suffix in (".py", ".safetensors")
    )
    assert command("verify", source, tmp_path / "port")[0] == 0
    with open(source / "model.safetensors", "r+b") as file:  # of both folders
        file.seek(-1, 2)
        last = file.read()[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    status, output = command("verify", source, tmp_path / "port")
    assert status == 1
    assert "DIFFERS: model-00001-of-00002.safetensors is not what provenance.json has" in output


def test_an_adapter_is_no_model(source, tmp_path):
    (source / "adapter_config.json").write_text("{}")
    for arguments in (("port", source, tmp_path / "port"), ("inspect", source)):
        status, line = command(*arguments)
        assert status == 2
        assert "holds an adapter (adapter_config.json)" in line
    (source / "config.json").unlink()
    assert command("port", source, tmp_path / "port")[0] == 2


def test_temporary_models_lie_with_the_target(source, tmp_path, monkeypatch):
    """An upcycled base may be large: it is not written to the system's folder for small things."""
    made = []
    real = __import__("tempfile").mkdtemp
    monkeypatch.setattr("tempfile.mkdtemp", lambda *args, **kwargs: made.append(real(*args, **kwargs)) or made[-1])
    edit_config(source, tie_word_embeddings=False)
    merge_shards(source)
    command("upcycle", source, tmp_path / "upcycled", "--experts", 2, "--top-k", 1)
    assert [path for path in made if ".base-" in path and path.startswith(str(tmp_path / ".upcycled.incomplete"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "upcycled"]
    assert not [path.name for path in (tmp_path / "upcycled").iterdir() if path.name.startswith(".")]
