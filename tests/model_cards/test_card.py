"""Cards: what is read from where, metadata the hub can read, and no figure without a file."""

import ast
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from common.errors import UserError
from common.files import whole_file
from common.markdown import plain
from conversion.export import export_checkpoint
from conversion.port import Blocks, Form, port_checkpoint
from conversion.upcycle import upcycle_checkpoint
from model_cards.__main__ import app
from model_cards.card import CardError, write_card
from model_cards.provenance import Provenance, Verified, hash_files, of_card, read
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
    port_checkpoint(str(source), tmp_path / "ported", Blocks(number=3), verify=True)
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


def made_as(ported, *fields, **named):
    """Let a checkpoint have been made otherwise."""
    (ported / "provenance.json").unlink()
    Provenance(*fields, **named).write(ported)


def test_a_port_writes_its_card(source, ported):
    card = ModelCard.load(ported / "README.md")
    assert (card.data.license, card.data.base_model, card.data.language) == ("mit", "owner/original", ["en", "zh"])
    assert (card.data.pipeline_tag, card.data.library_name) == ("text-generation", "transformers")
    assert "attention-residuals" in card.data.tags
    assert card.data.eval_results is None
    assert "# ported" in card.text
    assert "\n`source` with Attention Residuals, ported without changing what it computes" in card.text
    origin = "[owner/original](https://huggingface.co/owner/original)"
    assert f"Ported from `source`, which was made from {origin}." in card.text
    assert card.data.base_model_relation == "finetune"
    assert "[E] [0 1] [2 3] [4 5] → output" in card.text
    assert "This model has not been measured" in card.text
    assert "Mine" not in card.text
    digest = hash_files([source / "model.safetensors"])["model.safetensors"]
    assert f"| model.safetensors | `{digest}` |" in card.text


def test_the_lossless_figure_is_the_one_that_was_verified(source, ported, tmp_path):
    verified = read(ported).verified
    assert verified.relative_error < 3e-6
    assert f"{verified.relative_error:.1e} over {verified.tokens} tokens" in (ported / "README.md").read_text()
    port_checkpoint(str(source), tmp_path / "unverified")
    assert read(tmp_path / "unverified").verified is None
    text = (tmp_path / "unverified" / "README.md").read_text()
    assert "was not checked when it was made" in text
    assert not re.search(r"\d[.\d]*e-\d", text)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("head", [True, False])
def test_every_family_has_a_card(family, head, tmp_path):
    model = family.base_causal_lm()
    (model if head else model.model).save_pretrained(tmp_path / "base")
    port_checkpoint(str(tmp_path / "base"), tmp_path / "ported", Blocks("full"))
    text = (tmp_path / "ported" / "README.md").read_text()
    assert f"`{family.ours('Config').model_type}`" in text
    assert ("AutoModelForCausalLM.from_pretrained" in text) == head
    parameters = int(re.search(r"parameters \| ([\d,]+),", text)[1].replace(",", ""))
    ours = family.causal_lm(attn_res_mode="full")
    assert parameters == sum(p.numel() for p in (ours if head else ours.model).parameters())


def test_an_upcycled_model_and_an_export(source, tmp_path):
    upcycle_checkpoint(str(source), tmp_path / "moe", experts=4, top_k=2, blocks=Blocks(), expert_noise=0.0, seed=0)
    text = (tmp_path / "moe" / "README.md").read_text()
    assert "Upcycled from `source`" in text
    assert "4, 2 of them a token" in text
    assert "Its routers are new" in text
    port_checkpoint(str(source), tmp_path / "ported")
    export_checkpoint(str(tmp_path / "ported"), tmp_path / "back")
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


def training(tmp_path, data="/far/away/notes.txt", lora="all-linear"):
    """A result.json as `python -m training finetune` writes it."""
    recipe = {"data": [data], "lora": lora, "rank": 8, "alpha": 16, "depth": None, "control": False, "length": 128}
    content = {"held_out_loss": {"before": 2.75, "after": 2.5}, "steps": 20, "recipe": recipe}
    (tmp_path / "result.json").write_text(json.dumps(content))


def test_training_is_told_with_its_figures(ported, tmp_path):
    training(tmp_path)
    text = write_card(ported, training=tmp_path).read_text()
    assert "Fine-tuned for 20 steps on `notes.txt`" in text
    assert "LoRA on all-linear (rank 8, alpha 16) and the depth parameters in full" in text
    assert "from 2.7500 to 2.5000 nats a token" in text
    assert "does not compute what its source does" in text
    assert "relative error" not in text
    assert "/far/away" not in text
    training(tmp_path, lora="full")
    text = write_card(ported, training=tmp_path).read_text()
    assert ": all weights of the base family and the depth parameters in full. The loss" in text
    assert "rank" not in text


def test_a_control_is_called_one(tmp_path):
    BY_NAME["Llama"].causal_lm(attn_res_mode="none").save_pretrained(tmp_path / "control")
    text = write_card(tmp_path / "control").read_text()
    assert "\nA model with standard residuals.\n" in text
    assert "Every attention and MLP reads the sum of all that came before, as in its base family" in text
    assert "modules_to_save" not in text
    assert "depth parameters" not in text


def test_figures_in_a_card_have_a_file(ported, tmp_path):
    """Every number with a decimal point comes from the config, a version, the provenance or the results."""
    results = table(tmp_path, ported)
    text = write_card(ported, results=results).read_text()
    backing = "".join(file.read_text() for file in (ported / "config.json", ported / "provenance.json", results))
    shown = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", re.sub(r"arxiv\S+|[0-9a-f]{64}", "", text)))
    rounded = {f"{float(number):.1e}" for number in re.findall(r"\d\.\d+e-\d+", backing)}
    for number in shown:
        assert number.rstrip("0").rstrip(".") in backing or any(number in figure for figure in rounded), number


def test_a_model_trained_from_random_weights_says_so(tmp_path):
    BY_NAME["Llama"].causal_lm().save_pretrained(tmp_path / "model")
    recipe = {"config": "demo/tiny", "data": ["texts/a.jsonl"], "length": 64}
    result = {"steps": 7, "held_out_loss": {"before": 8.5, "after": 4.25}, "recipe": recipe}
    (tmp_path / "result.json").write_text(json.dumps(result))
    card = write_card(tmp_path / "model", training=tmp_path).read_text()
    assert "Trained from random weights for 7 steps on `a.jsonl`, rows of 64 tokens." in card
    assert "went from 8.5000 to 4.2500 nats a token" in card


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json as a config of transformers"),
        (
            lambda folder: (folder / "provenance.json").write_text('{"made": 1}'),
            "provenance.json as the provenance of a checkpoint",
        ),
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
    with pytest.raises(UserError, match=r"result\.json is missing"):
        write_card(ported, training=tmp_path)
    with pytest.raises(CardError, match="owner/name is no folder"):
        write_card(Path("owner/name"))
    with pytest.raises(CardError, match="has no column for ported; it has other, theirs"):
        write_card(ported, results=table(tmp_path, "/theirs", name="theirs"))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("provenance.json", [3, [], "x", {}, {"shards": []}, {"made_by": "hand"}, {"license": 1.0}, {"verified": 1}]),
        (
            "provenance.json",
            [{"verified": {"relative_error": float("nan"), "tokens": 1, "text": ""}}, {"source": None}],
        ),
        ("table.json", [[], 3, {}, {"models": {}}, {"models": [1]}, {"rows": 3}, {"rows": [{}]}]),
        ("table.json", [{"models": [{"name": "ported", "model": "\0", "adapter": None}]}]),
        ("result.json", [[], 3, {}, {"held_out_loss": 1}, {"recipe": []}, {"steps": "many"}]),
        ("result.json", [{"held_out_loss": {"before": 10**400, "after": float("nan")}}]),
    ],
)
def test_a_file_of_another_shape_is_named_in_one_line(ported, tmp_path, name, broken):
    table(tmp_path, ported)
    training(tmp_path)
    before = (ported / "README.md").read_text()
    file = (ported if name == "provenance.json" else tmp_path) / name
    whole = json.loads(file.read_text())
    options = {"table.json": ["--results", file], "result.json": ["--training", tmp_path]}.get(name, [])
    for fields in [*broken, None]:
        file.write_text(json.dumps(whole | fields if isinstance(fields, dict) and fields else fields))
        result = invoke("write", ported, *options)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {file} ")
        assert result.stderr.count("\n") == 1
    os.unlink(file)
    file.write_text("[" * 100_000)
    assert f"{file} " in invoke("write", ported, *options).stderr
    assert (ported / "README.md").read_text() == before


@pytest.mark.parametrize("score", [{"stderr": float("nan")}, {"value": "12"}, {"items": None}, {"value": 10**400}, []])
def test_a_score_of_another_shape_is_refused(ported, tmp_path, score):
    content = json.loads(table(tmp_path, ported).read_text())
    content["rows"][0]["scores"][1] = content["rows"][0]["scores"][1] | score if score else score
    (tmp_path / "table.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"table\.json as a table of `python -m eval run` cannot be read"):
        write_card(ported, results=tmp_path / "table.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_has_no_figure(ported, tmp_path, value):
    write_card(ported, results=table(tmp_path, ported, scores=((value, None), (0.95, None))))
    text = (ported / "README.md").read_text()
    assert [result.dataset_name for result in ModelCard(text).data.eval_results] == ["Text"]
    assert "HumanEval" not in text


def test_provenance_that_is_no_file_and_a_config_of_no_model_are_refused(ported):
    (ported / "provenance.json").unlink()
    os.mkfifo(ported / "provenance.json")
    assert "provenance.json is no file" in invoke("write", ported).stderr
    (ported / "provenance.json").unlink()
    config = json.loads((ported / "config.json").read_text())
    (ported / "config.json").write_text(json.dumps(config | {"vocab_size": -1}))
    result = invoke("write", ported)
    assert result.exit_code == 2
    assert "ported: its config describes no model" in result.stderr


def test_two_writers_do_not_mix(ported):
    before = (ported / "README.md").read_text()
    with whole_file(ported / "README.md") as other:
        other.write_text(before)
        result = invoke("write", ported)
        assert result.exit_code == 2
        assert "another process is writing it" in result.stderr
    assert (ported / "README.md").read_text() == before


HOSTILE = [
    "x](http://evil.example) | a",
    "a | b ` c `` d\n\n# e\n```\nf\n\n---\n",
    "<img src=x onerror=alert(1)> <!-- &lt; **b** _c_",
    "quote \" and ' and \\ and {{ name }} {% if",
    "https://evil.example www.evil.example @you #1 $x$ ~~y~~",
    "ünï 文件夹 \u2028 \x07 \udcff 🙂",
    "- 1. > ===",
]


def test_foreign_text_is_text_wherever_it_comes_from(ported, tmp_path):
    """The card has the same parts, links and code, whatever folders, files, cards and results are named."""

    def card_with(text):
        verified = Verified(relative_error=1e-6, tokens=9, text=text)
        made = {"license": text, "license_name": text, "license_link": text, "languages": [text], "base_model": text}
        made |= {"shards": {text: text}, "details": {text: text}, "versions": {text: text}}
        made_as(ported, "port", text, verified=verified, **made)
        results = table(tmp_path, ported, name=text)
        rows = json.loads(results.read_text())
        for row in rows["rows"]:
            row |= dict.fromkeys(("title", "dataset", "metric"), text)
        results.write_text(json.dumps(rows))
        training(tmp_path, data=text, lora=text)
        for options in ({}, {"training": tmp_path}):  # how it was verified is not told after training
            yield write_card(ported, results, output=tmp_path / "card.md", name=text, **options).read_text()

    def parts(card):
        text = re.sub(r"Evaluate it with lm-eval:\n\n```\n(.*)\n```\n", "", ModelCard(card).text)
        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        inline = [child for token in tokens for child in token.children or []]
        kinds = [token.type for token in tokens]
        assert not {"html_block", "html_inline", "image"} & {*kinds, *(token.type for token in inline)}
        links = [token.attrs["href"] for token in inline if token.type == "link_open"]
        return kinds, links, [ast.dump(ast.parse(token.content)) for token in tokens if token.info == "python"]

    expected = [parts(card) for card in card_with("name")]
    for text in HOSTILE:
        for card, (kinds, links, examples) in zip(card_with(text), expected):
            of_name = [example.replace("value='name'", f"value={text!r}") for example in examples]
            assert parts(card) == (kinds, links, of_name)
            assert f"# {plain(text)}\n" in card
            data = ModelCard(card).data
            assert (data.license, data.license_link, data.language, data.model_name) == (text, text, [text], text)
            assert (data.base_model, data.eval_results[0].dataset_name) == (None, text)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a model's $(name)", ["pretrained=a model's $(name),trust_remote_code=True"]),
        ("a,b", []),  # lm-eval parts arguments at commas
        ("a\nb", []),
    ],
)
def test_the_shell_is_given_the_name(ported, name, command):
    text = write_card(ported, name=name).read_text()
    found = re.findall(r"--model_args (.*) --tasks hellaswag", text)
    assert [word for line in found for word in shlex.split(line)] == command


@pytest.mark.parametrize(
    ("front_matter", "fields"),
    [
        ("license: mit\nmodel-index: [{name: 3, results: [{task: 1}]}]", {"license": "mit"}),
        ("license: mit\nmodel-index: 7\neval_results: 3", {"license": "mit"}),
        ("license: [mit, apache-2.0]", {"license": ["mit", "apache-2.0"]}),
        ("license: 1.0\nlicense_name: 2024-01-01\nlicense_link: yes", {"license": "1.0", "license_link": "yes"}),
        ("license: null\nlanguage:", {"license": None, "languages": []}),
        ("language: no", {"languages": ["no"]}),
        ("language: [en, no, y, on, 1e3]", {"languages": ["en", "no", "y", "on", "1e3"]}),
        ("language: [[en], {a: b}, de]", {"languages": ["de"]}),
        ("base_model: meta/x\nbase_model_relation: merge", {"base_model": "meta/x", "base_model_relation": "merge"}),
        ("base_model: [meta/x, ./out, a/b/c, meta/y]", {"base_model": ["meta/x", "meta/y"]}),
        ('base_model: "x](http://evil) | a"', {"base_model": None}),
        ("base_model: /mnt/models/x", {"base_model": None}),
        ("base_model: {a: b}", {"base_model": None}),
        ("license: !!python/object/apply:os.abort []", {"license": None}),
    ],
)
def test_what_a_sources_card_says(tmp_path, front_matter, fields):
    (tmp_path / "README.md").write_text(f"---\n{front_matter}\n---\n# Mine\n")
    found = of_card(tmp_path)
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize("key", ["lol", "<<"])
def test_aliases_cost_no_more_than_their_text(source, tmp_path, key):
    """Ten names, each for ten of the one before; `<<` merges them."""
    lines = ["a0: &a0 {x: y}"]
    lines += [f"a{i}: &a{i} {{{key}: [{','.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 11)]
    (source / "README.md").write_text("\n".join(["---", "license: mit", *lines, "language: [*a10, no]", "---", ""]))
    port_checkpoint(str(source), tmp_path / "ported")
    data = ModelCard.load(tmp_path / "ported" / "README.md").data
    assert (data.license, data.language) == ("mit", ["no"])


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: os.symlink("nowhere", path),
        lambda path: path.write_bytes(bytes(range(256)) * 99),
        lambda path: (path.touch(), os.truncate(path, 2**34)),
        lambda path: path.write_text("---\nlicense: " + "[" * 100_000 + "\n---\n"),
        lambda path: path.write_text('---\nlicense: "\\UFFFFFFFF"\n---\n'),
        lambda path: path.write_text("---\n- license\n---\n"),
    ],
    ids=["fifo", "folder", "device", "broken link", "binary", "huge", "deep", "no character", "list"],
)
def test_what_is_no_card_says_nothing(tmp_path, make):
    make(tmp_path / "README.md")
    assert of_card(tmp_path) == {}


@pytest.mark.parametrize("content", ["no front matter", "---\nlicense: [\n---\n", ""])
def test_a_source_with_another_card_is_ported_all_the_same(source, tmp_path, content):
    (source / "README.md").write_text(content)
    port_checkpoint(str(source), tmp_path / "ported")
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


def test_a_hub_source_is_the_base_model(ported):
    """And what it was made from itself is told by its own card."""
    made_as(ported, "port", "owner/model", base_model="owner/model", base_model_relation="merge")
    card = ModelCard.load(write_card(ported))
    assert card.data.base_model == "owner/model"
    assert "base_model_relation" not in card.data
    assert "Ported from [owner/model](https://huggingface.co/owner/model). Made with modeling-attnres" in card.text


def test_a_source_made_from_several_names_them_all(ported):
    made_as(ported, "port", "mine", base_model=["a/b", "c/d"], base_model_relation="a relation of its own")
    card = ModelCard.load(write_card(ported))
    assert (card.data.base_model, card.data.base_model_relation) == (["a/b", "c/d"], "merge")
    assert "Ported from `mine`, which was made from [a/b](https://huggingface.co/a/b) and [c/d](" in card.text


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("configuration/*/config.json")))
def test_the_cards_of_the_configurations_are_up_to_date(name, tmp_path):
    written = write_card(ROOT / "configuration" / name, output=tmp_path / "card.md")
    assert written.read_text() == (ROOT / "model_cards" / f"{name}.md").read_text()
    assert "without weights" in written.read_text()


def test_a_card_says_which_form_it_is(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "base")
    form = Form("add", heads=4, weights="softmax")
    port_checkpoint(str(tmp_path / "base"), tmp_path / "port", form=form)
    card = (tmp_path / "port" / "README.md").read_text()
    assert "times a learned gate, beside the sum of all that came before" in card
    assert re.search(r"\| form +\| form add, heads 4 +\|", card)
    port_checkpoint(str(tmp_path / "base"), tmp_path / "static", form=Form(weights="static_raw"))
    card = (tmp_path / "static" / "README.md").read_text()
    assert "reads a weighted sum of the embedding and of earlier blocks of layers, with weights that no token" in card
