"""Data in shards: what is read, by line and row; the same whatever happened on the way; never all of it in memory."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset

from training import corpus
from training.corpus import Rows, prepare_corpus, stream_texts, train_tokenizer
from training.data import DataError

from .conftest import words
from .test_checkpoints import die


TEXTS = [words(5 + 7 * (seed % 5), seed) for seed in range(60)]


@pytest.fixture
def small_shards(monkeypatch):
    """A few documents a shard."""
    monkeypatch.setattr(corpus, "BATCH", 200)
    monkeypatch.setattr(corpus, "SHARD", 100)


def prepare(sources, folder, tokenizer, **how):
    return prepare_corpus(list(map(str, sources)), folder, tokenizer, **{"vocab_size": 99, "held_out": 0.1} | how)


def tokens(rows: Rows) -> list[int]:
    assert all((row["labels"] == row["input_ids"]).all() and len(row["labels"]) == rows.length for row in rows)
    return np.concatenate([row["input_ids"] for row in rows]).tolist()


def plainly(texts, tokenizer, held_out: bool, every: int = 10) -> list[int]:
    return [
        token
        for number, text in enumerate(texts, start=1)
        if (number % every == 0) == held_out
        for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ]


def write(kind, texts, path):
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text, "source": "made"}) + "\n\n" for text in texts))
    elif kind == "parquet":
        Dataset.from_dict({"source": ["made"] * len(texts), "text": texts}).to_parquet(path, batch_size=7)
    else:
        path.write_text(texts[0])
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_the_texts_in_order_the_held_out_ones_aside(kind, tokenizer, tmp_path, small_shards):
    half = len(TEXTS) // 2
    files = [write(kind, part, tmp_path / f"{i}.{kind}") for i, part in enumerate((TEXTS[:half], TEXTS[half:]))]
    made = prepare(files, tmp_path / "shards", tokenizer)
    assert len(list((tmp_path / "shards").glob("0*"))) > 5
    for part, held_out in (("training", False), ("held_out", True)):
        expected = plainly(TEXTS, tokenizer, held_out)
        for length in (2, 16, 100):
            found = tokens(made.rows(part, length))
            assert found == expected[: len(expected) // length * length]


def test_a_long_text_counts_as_several(tokenizer, tmp_path, monkeypatch):
    """Cut at ends of lines."""
    monkeypatch.setattr(corpus, "PIECE", 50)
    lines = [f"{words(8, seed)}\n" for seed in range(40)]
    (tmp_path / "long.txt").write_text("".join(lines))
    pieces = [text for _, text in stream_texts(str(tmp_path / "long.txt"))]
    assert "".join(pieces) == "".join(lines)
    assert len(pieces) > 10
    assert all(piece.endswith("\n") and len(piece) <= 100 for piece in pieces)
    long = "".join(words(30, seed) for seed in range(3))
    pieces = [text for _, text in stream_texts(str(write("jsonl", [long], tmp_path / "long.jsonl")))]
    assert "".join(pieces) == long
    assert max(map(len, pieces)) == 100


@pytest.mark.parametrize("moment", ["complete_or_absent", "whole_file"])
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_killed_at_any_moment_it_goes_on_to_the_same_shards(
    moment, calls, tokenizer, tmp_path, small_shards, monkeypatch
):
    """Killed as a shard, or what says that all are there, is to be written; a complete shard is not made again."""
    source = write("jsonl", TEXTS, tmp_path / "data.jsonl")
    whole = prepare([source], tmp_path / "whole", tokenizer)
    child = os.fork()
    if child == 0:
        write_, seen = getattr(corpus, moment), []
        monkeypatch.setattr(
            corpus, moment, lambda path: (seen.append(path), len(seen) == calls and die(), write_(path))[2]
        )
        prepare([source], tmp_path / "killed", tokenizer)
        os._exit(0)
    os.waitpid(child, 0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("0*/*.npy")}
    again = prepare([source], tmp_path / "killed", tokenizer)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shards = [sorted(path.relative_to(made.folder) for path in made.folder.rglob("*")) for made in (whole, again)]
    assert shards[0] == shards[1]
    for path in whole.folder.rglob("*.*"):
        assert path.read_bytes() == (again.folder / path.relative_to(whole.folder)).read_bytes()


def test_data_is_tokenised_once(tokenizer, tmp_path, monkeypatch):
    source = write("jsonl", TEXTS, tmp_path / "data.jsonl")
    first = tokens(prepare([source], tmp_path / "shards", tokenizer).rows("training", 16))
    monkeypatch.setattr(corpus, "tokenise_texts", lambda *_: pytest.fail("tokenised again"))
    moved = source.rename(tmp_path / "moved.jsonl")
    assert tokens(prepare([moved], tmp_path / "shards", tokenizer).rows("training", 16)) == first


def test_shards_of_other_data_are_refused(tokenizer, tmp_path):
    source = write("jsonl", TEXTS, tmp_path / "data.jsonl")
    prepare([source], tmp_path / "shards", tokenizer)
    other = write("jsonl", TEXTS[1:], tmp_path / "other.jsonl")
    with pytest.raises(DataError, match="shards holds other data: data is "):
        prepare([other], tmp_path / "shards", tokenizer)
    with pytest.raises(DataError, match=r"shards holds other data: tokenizer is .*, not byte-level BPE of 300"):
        prepare([source], tmp_path / "shards", None, vocab_size=300)


BAD = {
    "not JSON": (".jsonl", b'{"text": "w1"}\n{"text": \n', r"bad.jsonl, line 2: no JSON"),
    "no text": (".jsonl", b'{"text": "w1"}\n\n{"content": "w1"}\n', r"bad.jsonl, line 3: expected a text in 'text'"),
    "an empty text": (".jsonl", b'{"text": " "}\n', r"bad.jsonl, line 1: expected a text in 'text'; found ' '"),
    "no UTF-8 in JSON": (".jsonl", b'{"text": "w1"}\n{"text": "\xff"}\n', r"bad.jsonl, line 2: no JSON .*surrogates"),
    "no UTF-8": (".txt", b"w1\nw2\nw3 \xff\n", r"bad.txt, line 3: cannot be read as UTF-8"),
    "an empty file": (".txt", b"", r"bad.txt: there is no text"),
    "empty lines": (".jsonl", b"\n\n", r"bad.jsonl: there is no text"),
    "no parquet": (".parquet", b"PAR1 or not", r"bad.parquet.* cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_by_its_line(case, tokenizer, tmp_path):
    suffix, content, message = BAD[case]
    (tmp_path / f"bad{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / f"bad{suffix}"], tmp_path / "shards", tokenizer)
    assert not (tmp_path / "shards/corpus.json").exists()


def test_parquet_without_texts_is_refused_by_its_row(tokenizer, tmp_path):
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"text": ["w1", None]}).to_parquet(path)
    with pytest.raises(DataError, match="parquet, row 2: expected a text in 'text'; found None"):
        prepare([path], tmp_path / "shards", tokenizer)
    Dataset.from_dict({"content": ["w1"]}).to_parquet(path)
    with pytest.raises(ValueError, match=r"parquet.* cannot be read: .*text"):
        prepare([path], tmp_path / "others", tokenizer)


def test_a_data_set_of_the_hub_is_streamed(monkeypatch):
    def load_dataset(name, split, streaming):
        assert (name, split, streaming) == ("owner/texts", "train", True)
        return [{"text": "one", "id": 1}, {"text": "two", "id": 2}]

    monkeypatch.setattr(corpus, "load_dataset", load_dataset)
    assert list(stream_texts("owner/texts")) == [("owner/texts, row 1", "one"), ("owner/texts, row 2", "two")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [("owner/texts", True), ("owner/texts-1.0", True), ("data/texts.jsonl", False), ("a/b/texts", False)],
)
def test_what_is_not_here_and_no_file_is_a_data_set_of_the_hub(source, expected):
    assert corpus.is_on_hub(source) is expected


def test_a_tokenizer_needs_no_more_than_the_beginning_of_the_hubs(tmp_path, monkeypatch):
    def load_dataset(name, split, streaming):
        return ({"text": f"text number {number}"} for number in itertools.count())

    monkeypatch.setattr(corpus, "load_dataset", load_dataset)
    monkeypatch.setattr(corpus, "TOKENIZER_TEXT", 1000)
    monkeypatch.setattr(corpus, "_tokenise", lambda *args, **kwargs: None)  # which would read all
    made = prepare(["owner/texts"], tmp_path / "shards", None, vocab_size=300)
    assert "number" in "".join(made.tokenizer.get_vocab())


def test_a_trained_tokenizer_is_the_same_again_and_reads_every_byte(tmp_path):
    source = write("jsonl", TEXTS, tmp_path / "data.jsonl")
    made = [prepare([source], tmp_path / name, None, vocab_size=300).tokenizer for name in ("one", "two", "one")]
    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in made}) == 1
    text = "".join(map(chr, range(1, 0x3000)))
    assert made[0].decode(made[0](text)["input_ids"], clean_up_tokenization_spaces=False) == text
    assert len(train_tokenizer(["w1"], 300)) < len(made[0]) <= 300


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path):
    """Peak memory of a process that tokenises, and reads all rows, of 1 MB and of 12 MB."""
    program = (
        "import json, resource, sys; from pathlib import Path; from training import corpus\n"
        "corpus.PIECE, corpus.BATCH, corpus.SHARD = 2**12, 2**16, 2**18\n"
        "path = Path(sys.argv[1]); tokenizer = corpus.train_tokenizer(['w12 w3\\n'], 300)\n"
        "made = corpus.prepare_corpus([str(path)], path.with_suffix(''), tokenizer, vocab_size=300, held_out=0.1)\n"
        "rows = made.rows('training', 4096); print(len(rows), sum(int(row['labels'][0]) for row in rows))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
    )
    peaks = []
    for megabytes in (1, 12):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text("w12 w3\n" * (megabytes * 2**20 // 7))
        done = subprocess.run(
            [sys.executable, "-c", program, path],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
            check=True,
            capture_output=True,
            text=True,
        )
        peaks.append(float(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 40
