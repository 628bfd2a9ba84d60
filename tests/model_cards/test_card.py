"""Cards: what is read from where, metadata the hub can read, and no figure without a file."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from conversion.export import export
from conversion.port import Blocks, port
from conversion.upcycle import upcycle
from model_cards.__main__ import app
from model_cards.card import CardError, write_card
from model_cards.provenance import Provenance, hash_files, read
from tests.families import BY_NAME, FAMILIES


ROOT = Path(__file__).parents[2]


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def source(tmp_path):
    """A base checkpoint with a card of its own."""
    folder = tmp_path / "source"
    BY_NAME["Llama"].base_causal_lm().save_pretrained(folder)
    (folder / "README.md").write_text(
        "---\nlicense: mit\nbase_model: owner/original\nlanguage: [en, zh]\n---\n# Mine\n"
    )
    return folder


@pytest.fixture
def ported(source, tmp_path):
    port(str(source), tmp_path / "ported", Blocks(number=3), verify=True)
    return tmp_path / "ported"


def table(tmp_path, model, scores=((12.5, 2.0), (0.95, None)), name="ported"):
    """A table.json as `python -m eval run` writes it, with another model before this one."""

    def row(title, dataset, metric, score):
        other = {"value": 1.0, "stderr": None, "items": 3}
        found = score if isinstance(score, str) else {"value": score[0], "stderr": score[1], "items": 164}
        return {"title": title, "dataset": dataset, "metric": metric, "shots": 0, "scores": [other, found]}

    models = [
        {"name": "other", "model": "/other", "adapter": None},
        {"name": name, "model": str(model), "adapter": None},
    ]
    rows = [
        row("HumanEval", "openai/openai_humaneval", "pass_at_1", scores[0]),
        row("Text", "text", "bits_per_byte", scores[1]),
    ]
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"models": models, "rows": rows}))
    return file


def test_a_port_writes_its_card(source, ported):
    card = ModelCard.load(ported / "README.md")
    assert (card.data.license, card.data.base_model, card.data.language) == ("mit", "owner/original", ["en", "zh"])
    assert (card.data.pipeline_tag, card.data.library_name) == ("text-generation", "transformers")
    assert "attention-residuals" in card.data.tags
    assert card.data.eval_results is None
    assert "# ported" in card.text
    assert "Ported from `source`" in card.text
    assert "[E] [0 1] [2 3] [4 5] → output" in card.text
    assert "None of this model were measured" in card.text
    assert "Mine" not in card.text
    digest = hash_files([source / "model.safetensors"])["model.safetensors"]
    assert f"| model.safetensors | `{digest}` |" in card.text


def test_the_lossless_figure_is_the_one_that_was_verified(source, ported, tmp_path):
    verified = read(ported).verified
    assert verified.relative_error < 3e-6
    assert f"{verified.relative_error:.1e} over {verified.tokens} tokens" in (ported / "README.md").read_text()
    port(str(source), tmp_path / "unverified")
    assert read(tmp_path / "unverified").verified is None
    text = (tmp_path / "unverified" / "README.md").read_text()
    assert "was not checked when it was made" in text
    assert not re.search(r"\d[.\d]*e-\d", text)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("head", [True, False])
def test_every_family_has_a_card(family, head, tmp_path):
    model = family.base_causal_lm()
    (model if head else model.model).save_pretrained(tmp_path / "base")
    port(str(tmp_path / "base"), tmp_path / "ported", Blocks("full"))
    text = (tmp_path / "ported" / "README.md").read_text()
    assert f"`{family.ours('Config').model_type}`" in text
    assert ("AutoModelForCausalLM.from_pretrained" in text) == head
    parameters = int(re.search(r"parameters \| ([\d,]+),", text)[1].replace(",", ""))
    ours = family.causal_lm(attn_res_mode="full")
    assert parameters == sum(p.numel() for p in (ours if head else ours.model).parameters())


def test_an_upcycled_model_and_an_export(source, tmp_path):
    upcycle(str(source), tmp_path / "moe", experts=4, top_k=2, blocks=Blocks(), expert_noise=0.0, seed=0)
    text = (tmp_path / "moe" / "README.md").read_text()
    assert "Upcycled from `source`" in text
    assert "4, 2 of them a token" in text
    assert "Its routers are new" in text
    port(str(source), tmp_path / "ported")
    export(str(tmp_path / "ported"), tmp_path / "back")
    assert {path.name for path in (tmp_path / "back").iterdir()}.isdisjoint({"README.md", "provenance.json"})


def test_results_become_metadata_and_a_table(ported, tmp_path):
    write_card(ported, results=table(tmp_path, ported))
    card = ModelCard.load(ported / "README.md")
    found = [
        (result.dataset_name, result.dataset_type, result.metric_type, result.metric_value)
        for result in card.data.eval_results
    ]
    assert found == [
        ("HumanEval", "openai/openai_humaneval", "pass_at_1", 12.5),
        ("Text", "text", "bits_per_byte", 0.95),
    ]
    assert card.data.model_name == "ported"
    assert "| HumanEval | 0 | pass_at_1 | 12.5 ± 2.00 | 164 |" in card.text
    assert "| Text | 0 | bits_per_byte | 0.95 | 164 |" in card.text


def test_a_failed_benchmark_has_no_figure(ported, tmp_path):
    write_card(ported, results=table(tmp_path, ported, scores=("failed: no", (0.95, None))))
    card = ModelCard.load(ported / "README.md")
    assert [result.dataset_name for result in card.data.eval_results] == ["Text"]
    assert "HumanEval" not in card.text


def test_training_is_told_with_its_figures(ported, tmp_path):
    recipe = {
        "data": ["/far/away/notes.txt"],
        "lora": "all-linear",
        "rank": 8,
        "alpha": 16,
        "depth": None,
        "control": False,
        "length": 128,
    }
    content = {"held_out_loss": {"before": 2.75, "after": 2.5}, "steps": 20, "recipe": recipe}
    (tmp_path / "result.json").write_text(json.dumps(content))
    text = write_card(ported, training=tmp_path).read_text()
    assert "Fine-tuned for 20 steps on `notes.txt`" in text
    assert "LoRA on all-linear (rank 8, alpha 16) and the depth parameters in full" in text
    assert "from 2.7500 to 2.5000 nats a token" in text
    assert "does not compute what its source does" in text
    assert "relative error" not in text
    assert "/far/away" not in text


def test_figures_in_a_card_have_a_file(ported, tmp_path):
    """Every number with a decimal point comes from the config, a version, the provenance or the results."""
    results = table(tmp_path, ported)
    text = write_card(ported, results=results).read_text()
    backing = "".join(file.read_text() for file in (ported / "config.json", ported / "provenance.json", results))
    shown = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", re.sub(r"arxiv\S+|[0-9a-f]{64}", "", text)))
    rounded = {f"{float(number):.1e}" for number in re.findall(r"\d\.\d+e-\d+", backing)}
    for number in shown:
        assert number.rstrip("0").rstrip(".") in backing or any(number in figure for figure in rounded), number


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config of transformers"),
        (lambda folder: (folder / "provenance.json").write_text('{"made": 1}'), "is no provenance of a checkpoint"),
    ],
)
def test_a_broken_checkpoint_is_refused(ported, break_it, says):
    before = (ported / "README.md").read_text()
    break_it(ported)
    result = invoke("write", ported)
    assert result.exit_code == 2
    assert says in result.stderr
    assert (ported / "README.md").read_text() == before


def test_mistakes_name_the_file(source, ported, tmp_path):
    with pytest.raises(CardError, match="is no Attention Residuals family; port it first"):
        write_card(source)
    with pytest.raises(CardError, match=r"result\.json cannot be read"):
        write_card(ported, training=tmp_path)
    with pytest.raises(CardError, match="has no column for ported; it has other, theirs"):
        write_card(ported, results=table(tmp_path, "/theirs", name="theirs"))
    (tmp_path / "table.json").write_text('{"rows": []}')
    with pytest.raises(CardError, match=r"table\.json: expected an object with models, rows; missing: models"):
        write_card(ported, results=tmp_path / "table.json")


@pytest.mark.parametrize("content", ["no front matter", "---\nlicense: [\n---\n", ""])
def test_a_source_with_another_card_is_ported_all_the_same(source, tmp_path, content):
    (source / "README.md").write_text(content)
    port(str(source), tmp_path / "ported")
    assert ModelCard.load(tmp_path / "ported" / "README.md").data.license is None


def test_hashes_are_sha256_and_the_hubs_are_not_read(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    name = "0" * 64
    (blobs / name).write_bytes(b"a large file")
    (tmp_path / "link").symlink_to(blobs / name)
    assert hash_files([tmp_path / "abc", tmp_path / "link"]) == {
        "abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "link": name,
    }


def test_a_hub_source_is_the_base_model():
    made = Provenance(made_by="port", source="owner/model", base_model="owner/model")
    assert made.versions.keys() == {"modeling-attnres", "transformers", "torch", "safetensors"}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("configuration/*/config.json")))
def test_the_cards_of_the_configurations_are_up_to_date(name, tmp_path):
    written = write_card(ROOT / "configuration" / name, output=tmp_path / "card.md")
    assert written.read_text() == (ROOT / "model_cards" / f"{name}.md").read_text()
    assert "without weights" in written.read_text()
