"""Local data: every format, every way to be malformed, all that is missing at once, and filling a folder."""

import csv
import json
import os
import re
import resource
from contextlib import nullcontext

import datasets
import huggingface_hub
import hypothesis.strategies as st
import pytest
from hypothesis import given

from eval import data
from eval.benchmarks import build, names_of
from eval.data import COLUMNS, DataError, read
from tests.eval.samples import ROWS, write_rows


pytestmark = pytest.mark.xdist_group("eval tasks")

COLUMNS_OF = {"question": str, "choices": [str], "answer": int}
ROW = {"question": 'Why, "so"?\nTell.', "choices": ["a", "b,c", "d", "é"], "answer": 2}

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=20)
rows_of_mmlu = st.lists(
    st.fixed_dictionaries(
        {"question": texts, "choices": st.lists(texts, min_size=1, max_size=4), "answer": st.integers(0, 3)}
    ),
    min_size=1,
    max_size=5,
)


def write_csv(file, rows):
    with open(file, "w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        for row in rows:
            writer.writerow({key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()})


@given(rows=rows_of_mmlu)
def test_all_formats_hold_the_same(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    write_rows(folder / "a.jsonl", rows)
    write_csv(folder / "a.csv", rows)
    datasets.Dataset.from_list(rows).to_parquet(folder / "a.parquet")
    for ending in data.FORMATS:
        assert list(read(folder / f"a{ending}", COLUMNS_OF)) == rows


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"question": "q"\n', "line 1: expected JSON, found"),
        ("a.jsonl", f"{json.dumps(ROW)}\n\n[1]\n", "line 3: expected an object"),
        ("a.jsonl", f'{json.dumps(ROW)}\n{{"question": "q"}}\n', "line 2: no column 'choices'; found 'question'"),
        ("a.jsonl", json.dumps(ROW | {"answer": "2"}), "line 1: 'answer' must be of type int, found '2'"),
        ("a.jsonl", json.dumps(ROW | {"question": None}), "line 1: 'question' must be of type str, found None"),
        ("a.jsonl", json.dumps(ROW | {"answer": True}), "line 1: 'answer' must be of type int, found True"),
        (
            "a.jsonl",
            json.dumps(ROW | {"choices": ["a", 1]}),
            "line 1: 'choices' must be of type list of str, found ['a'",
        ),
        (
            "a.jsonl",
            f"{json.dumps(ROW)}\n{json.dumps(ROW | {'choices': [chr(0xD800)]})}\n",
            "line 2: no text, for it has half",
        ),
        ("a.jsonl", "[" * 10**5, "line 1: expected JSON, found '[[[["),
        ("a.jsonl", f'{{"answer": {"1" * 5000}}}', "line 1: expected JSON, found"),
        ("a.jsonl", json.dumps(ROW | {"answer": 10**30}), "differ in type"),
        ("a.csv", f"question,choices,answer\nq,{'[' * 10**5},1\n", "line 2: 'choices' must be list of str as JSON"),
        ("a.jsonl", "\n", "is empty; expected rows with question, choices, answer"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        (
            "a.jsonl",
            f"{json.dumps(ROW | {'more': 1})}\n{json.dumps(ROW | {'more': 'x'})}\n",
            "differ in type",
        ),
        ("a.csv", "question,choices,answer\nq,[],1\nq,[]\n", "line 3: expected 3 cells"),
        ("a.csv", "question,choices,answer\nq,[],1,2\n", "line 2: expected 3 cells"),
        (
            "a.csv",
            'question,choices,answer\n"q\nq",a b,1\n',
            "line 3: 'choices' must be list of str as JSON, found 'a b'",
        ),
        ("a.csv", 'question,choices,answer\n"q,[],1\n', "cannot be read"),
        ("a.csv", "", "is empty"),
        ("a.parquet", "no parquet", "cannot be read as Parquet"),
    ],
)
def test_what_is_malformed_is_named_with_its_line(tmp_path, name, content, says):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=r"a\.\w+") as raised:
        read(file, COLUMNS_OF)
    assert says in str(raised.value)
    assert str(file) in str(raised.value)


def test_every_row_of_the_samples_has_the_documented_columns(tmp_path):
    assert ROWS.keys() == COLUMNS.keys()
    for path, rows in ROWS.items():
        for split in ("test", "dev", "train", "validation", "prompt"):
            write_rows(tmp_path / "a.jsonl", rows(split))
            assert len(read(tmp_path / "a.jsonl", COLUMNS[path])) == len(rows(split)), path


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_what_is_no_file_is_not_waited_for(manager, tmp_path, kind):
    file = tmp_path / "openai/gsm8k/main/test.jsonl"
    file.parent.mkdir(parents=True)
    {"a FIFO": os.mkfifo, "a folder": os.mkdir, "a device": lambda path: os.symlink("/dev/zero", path)}[kind](file)
    with data.local(tmp_path) as missing, pytest.raises(DataError, match=rf"{file} is no regular file"):
        build(manager, ["attnres_gsm8k"], missing)


def test_a_disk_that_is_full_leaves_no_part_of_a_data_set(manager, tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "q" * 10**4, "golden": "5"}] * 10)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with data.fetching(tmp_path), pytest.raises(DataError, match="File too large") as raised:
            build(manager, ["attnres_cmath"], [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(raised.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_all_missing_files_are_named_at_once(manager, tmp_path):
    with data.local(tmp_path) as missing, pytest.raises(DataError) as raised:
        build(manager, names_of(manager, ["attnres_paper"]), missing)
    message = str(raised.value)
    for stem in (
        "cais/mmlu/virology/dev",
        "cais/mmlu/virology/test",
        "allenai/ai2_arc/ARC-Challenge/train",
        "openai/gsm8k/main/test",
    ):
        assert f"{tmp_path / stem}(.jsonl, .csv, .parquet)" in message
    assert "openai_humaneval" not in message  # the package has it
    assert len(message.splitlines()) > 400


@pytest.mark.parametrize("open_data", [data.local, data.fetching])
def test_a_task_that_names_files_of_its_own_is_refused(manager, tmp_path, open_data):
    with (
        open_data(tmp_path) as found,
        pytest.raises(DataError, match=r"A task reads json with data_files=.*which --data has no place for"),
    ):
        build(manager, ["arithmetic_1dc"], found)


def test_all_malformed_files_are_named_at_once(manager, tmp_path):
    for split in ("train", "test"):
        write_rows(tmp_path / f"openai/gsm8k/main/{split}.jsonl", [{"question": "q"}])
    write_rows(tmp_path / "weitianwen/cmath/test.jsonl", [{"question": "q", "golden": 5}])
    with data.local(tmp_path) as missing, pytest.raises(DataError) as raised:
        build(manager, ["attnres_gsm8k", "attnres_cmath"], missing)
    assert str(raised.value).count("line 1: ") == 2


def test_the_package_holds_humaneval(manager, tmp_path):
    with data.local(tmp_path) as missing:
        (benchmark,) = build(manager, ["attnres_humaneval"], missing)
    docs = list(benchmark.tasks["attnres_humaneval"].eval_docs)
    assert len(docs) == 164
    assert docs[0]["entry_point"] == "has_close_elements"


def test_a_folder_is_filled_once_and_then_enough(manager, tmp_path, data_folder, monkeypatch):
    asked = []

    def hub(path, name=None, split=None, **_):
        asked.append((path, name, split))
        return datasets.Dataset.from_list(ROWS[path](split))

    monkeypatch.setattr(datasets, "load_dataset", hub)
    names = ["attnres_arc_challenge", "attnres_cmath", "attnres_humaneval"]
    with data.fetching(tmp_path) as written:
        build(manager, names, [])
    assert asked == [
        ("allenai/ai2_arc", "ARC-Challenge", "train"),
        ("allenai/ai2_arc", "ARC-Challenge", "test"),
        ("weitianwen/cmath", None, "test"),
    ]
    assert [str(file.relative_to(tmp_path)) for file in written] == [
        "allenai/ai2_arc/ARC-Challenge/train.parquet",
        "allenai/ai2_arc/ARC-Challenge/test.parquet",
        "weitianwen/cmath/test.parquet",
        "openai/openai_humaneval/test.parquet",
    ]
    with data.fetching(tmp_path) as written_again:
        build(manager, names, [])
    assert (len(asked), written_again) == (3, [])
    with data.local(tmp_path) as missing:
        benchmarks = build(manager, names, missing)
    assert [len(next(iter(b.tasks.values())).eval_docs) for b in benchmarks] == [4, 4, 164]


def test_a_gated_data_set_says_how_to_get_access(manager, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with (
        data.fetching(tmp_path),
        pytest.raises(DataError, match=r"accept its terms at https://huggingface\.co/\S+gpqa"),
    ):
        build(manager, ["attnres_gpqa_diamond"], [])
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("fetching", [False, True])
@pytest.mark.parametrize(("offline", "asked_for"), [(False, 1), (True, 3)])
def test_a_hub_out_of_reach_is_waited_for_once(manager, tmp_path, monkeypatch, fetching, offline, asked_for):
    asked = []

    def wait(path, *args, **kwargs):
        asked.append(path)
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", wait)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    names = ["attnres_cmath", "attnres_gsm8k", "attnres_arc_challenge"]
    with data.fetching(tmp_path) if fetching else nullcontext(), pytest.raises(DataError) as raised:
        build(manager, names, [])
    assert len(asked) == asked_for
    lines = str(raised.value).splitlines()
    assert len(lines) == asked_for
    assert lines[0].startswith("attnres_cmath: Couldn't reach 'weitianwen/cmath' on the Hub.")
    assert "`python -m eval fetch`, run where there is a network" in lines[-1]


def test_tasks_of_one_data_set_are_missed_in_one_line(manager, tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with data.fetching(tmp_path), pytest.raises(DataError) as raised:
        build(manager, ["attnres_mgsm"], [])
    assert re.match(r"mgsm_native_cot_\w+ and 10 more: Couldn't reach 'juletxara/mgsm' on the Hub\.", str(raised.value))
    assert len(str(raised.value).splitlines()) == 1


def test_loading_is_put_back(tmp_path):
    before = datasets.load_dataset
    with pytest.raises(ZeroDivisionError), data.local(tmp_path):
        1 / 0  # noqa: B018
    assert datasets.load_dataset is before
