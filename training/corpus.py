"""Text to train on from the start: read piece by piece, tokenised once into shards on disk, read from there row by row.

A *shard* is a folder with the tokens of some documents, one after another, in two arrays: those to train on, and those
of every n-th document, which are held out. A *row* is `length` tokens of either, wherever documents begin and end.
Nothing is ever in memory but a shard that is being made, and the rows of a batch.
"""

import contextlib
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.errors import reading
from common.files import check_file, complete_or_absent, hold_folder, whole_file
from conversion.checkpoint import read_json

from .checkpoints import hash_file
from .data import DataError, json_lines, text_of, tokenise_texts
from .loading import load_tokenizer


PIECE = 2**18  # characters; a text of more than two pieces counts as several documents
BATCH = 2**19  # characters that are tokenised at once
SHARD = 2**24  # tokens
TOKENIZER_TEXT = 2**24  # characters, at most, of each source that a tokenizer is trained on
SOURCE, COMPLETE = "source.json", "corpus.json"  # written first, and last


@dataclass(frozen=True)
class Corpus:
    """Tokenised data in a folder.

    Args:
        folder: where the shards lie.
        source: what they were made from.
        tokenizer: that made them.
    """

    folder: Path
    source: dict
    tokenizer: PreTrainedTokenizerBase

    def rows(self, part: str, length: int) -> "Rows":
        """Return the rows of `training` or `held_out`.

        Raises:
            DataError: there is none.
        """
        rows = Rows(sorted(self.folder.glob(f"[0-9]*/{part}.npy")), length)
        if not len(rows):
            raise DataError(
                f"{self.folder}: no row of {length} tokens is {part.replace('_', ' ')}, of {rows.ends[-1]} tokens. "
                "Give more data, a lower --length or another --held-out."
            )
        return rows


class Rows(Dataset):
    """Rows by their number, each read from disk when it is asked for."""

    def __init__(self, files: list[Path], length: int):
        self.files, self.length = files, length
        self.ends = np.cumsum([len(np.load(file, mmap_mode="r")) for file in files])

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start, stop = index * self.length, (index + 1) * self.length
        # From the shard that holds the first token to the one that holds the last
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right")
        parts = []
        for shard in range(first, last + 1):
            tokens = np.load(self.files[shard], mmap_mode="r")  # anew: pages of an old map would add up in memory
            offset = self.ends[shard] - len(tokens)
            parts.append(tokens[max(start - offset, 0) : stop - offset])
        ids = np.concatenate(parts).astype(np.int64)
        return {"input_ids": ids, "labels": ids}


def stream_texts(source: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a source in order, each with where it stands.

    Args:
        source: a file, `.jsonl` or `.parquet` with `text`, any other being one text; or a data set of the hub.

    Raises:
        UserError: it cannot be read; names the line or row.
    """
    path = Path(source)
    if is_on_hub(source):
        texts = _rows_of(source, source)
    elif path.suffix.lower() == ".parquet":
        texts = _rows_of(source, "parquet", data_files=source, columns=["text"])
    elif path.suffix.lower() == ".jsonl":
        with open(path, encoding="utf-8", errors="surrogateescape") as file:  # a line that is no UTF-8 is refused
            yield from _pieces((where, text_of(row, where)) for where, row in json_lines(path, file))
        return
    else:
        texts = _pieces_of_file(path)
    yield from _pieces(texts)


def is_on_hub(source: str) -> bool:
    """Say whether a source is a data set of the hub, `owner/name`: nothing of that name lies here, nor is it a file's.

    A name may hold a version, as in `owner/name-1.0`.
    """
    return not Path(source).exists() and source.count("/") == 1 and not Path(source).suffix[1:].isalpha()


def _rows_of(source: str, *args, **kwargs) -> Iterator[tuple[str, str]]:
    with reading(source):
        rows = iter(load_dataset(*args, split="train", streaming=True, **kwargs))
    for number in count(1):
        where = f"{source}, row {number}"
        with reading(where):
            row = next(rows, None)
        if row is None:
            return
        yield where, text_of(row, where)


def _pieces_of_file(path: Path) -> Iterator[tuple[str, str]]:
    line = 1
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        while piece := file.read(PIECE):
            piece += file.readline(PIECE)
            try:
                piece.encode()
            except UnicodeEncodeError as error:
                found = line + piece.count("\n", 0, error.start)
                raise DataError(f"{path}, line {found}: cannot be read as UTF-8 text.") from error
            yield f"{path}, line {line}", piece
            line += piece.count("\n")


def _pieces(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for where, text in texts:
        for start in range(0, len(text), 2 * PIECE):
            yield where, text[start : start + 2 * PIECE]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE, with an end and a padding token.

    Example:
        ```python
        from training.corpus import train_tokenizer

        print(train_tokenizer(["to be or not to be"], 300)("be")["input_ids"])
        ```
    """
    end, padding = "<|endoftext|>", "<|padding|>"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end, padding],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=padding)


def prepare_corpus(
    sources: list[str],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    held_out: float,
) -> Corpus:
    """Tokenise data into a folder, or what is missing there of it; where it is complete it is taken as it is.

    Args:
        sources: what `stream_texts` takes.
        folder: for the shards.
        tokenizer: `None` trains one on the data.
        vocab_size: the largest there may be, and that of a tokenizer that is trained.
        held_out: the share of documents that is held out.

    Raises:
        UserError: data cannot be read, the folder has other data, or the tokenizer has tokens from `vocab_size` on.
    """
    for source in sources:
        if not is_on_hub(source):
            check_file(Path(source))
    source = {
        "data": [source if is_on_hub(source) else hash_file(source) for source in sources],
        "tokenizer": f"byte-level BPE of {vocab_size}" if tokenizer is None else _fingerprint(tokenizer),
        "held_out": held_out,
    }
    complete = (folder / COMPLETE).exists()
    with contextlib.nullcontext() if complete else hold_folder(folder, "another process tokenises there."):
        _claim(folder, source)
        if tokenizer is None:
            tokenizer = _tokenizer_of(sources, folder, vocab_size)
        largest = max(tokenizer.get_vocab().values())
        if largest >= vocab_size:
            raise DataError(
                f"the tokenizer has the token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), but the model "
                f"has embeddings for {vocab_size}: --set vocab_size={largest + 1}."
            )
        if not complete:
            kind = "H" if largest < 2**16 else "I"  # 2 or 4 bytes a token
            _tokenise(sources, folder, tokenizer, every=round(1 / held_out), kind=kind)
    return Corpus(folder, source, tokenizer)


def _claim(folder: Path, source: dict) -> None:
    """Say in a folder what is tokenised there; refuse one where something else is."""
    file = folder / SOURCE
    if not file.exists():
        with whole_file(file) as written:
            written.write_text(json.dumps(source, indent=1) + "\n")
    for field, found in read_json(file).items():
        if source.get(field) != found:
            raise DataError(
                f"{folder} holds other data: {field} is {found!s:.80}, not {source.get(field)!s:.80}. Choose "
                "another --shards."
            )


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash what a tokenizer does, as far as it can be told."""
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(sorted(tokenizer.get_vocab()))
    return hashlib.sha256(f"{tokenizer.eos_token}{whole}".encode()).hexdigest()


def _tokenizer_of(sources: list[str], folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer that was trained on the data, or train it, on as many texts from all over it as are enough."""
    target = folder / "tokenizer"
    if not target.exists():
        size = sum(Path(source).stat().st_size for source in sources if not is_on_hub(source))
        some = _some_texts(sources, every=-(-size // TOKENIZER_TEXT) or 1)
        trained = train_tokenizer(tqdm(some, desc="training a tokenizer", unit="text"), vocab_size)
        with complete_or_absent(target) as written:
            trained.save_pretrained(written)
    return load_tokenizer(target, trust_remote_code=False)


def _some_texts(sources: list[str], every: int) -> Iterator[str]:
    """Yield texts from all over the files, and from the beginning of a data set of the hub, whose size is not known."""
    for source in sources:
        characters = 0
        for _, text in islice(stream_texts(source), 0, None, every):
            yield text
            characters += len(text)
            if characters >= TOKENIZER_TEXT:
                break


def _tokenise(sources: list[str], folder: Path, tokenizer: PreTrainedTokenizerBase, every: int, kind: str) -> None:
    """Write the shards that a folder lacks, each complete or absent; the last of `every` documents is held out."""
    made = [read_json(file)["documents"] for file in folder.glob("[0-9]*/shard.json")]
    number, documents = len(made), sum(made)
    texts = islice((text for source in sources for _, text in stream_texts(source)), documents, None)
    with tqdm(desc="tokenising", unit="char", unit_scale=True) as bar:
        for parts, new in _shards(_batches(texts, bar), tokenizer, documents, every, kind):
            with complete_or_absent(folder / f"{number:05}") as shard:
                for part, ids in parts.items():
                    np.save(shard / f"{part}.npy", np.asarray(ids))
                (shard / "shard.json").write_text(json.dumps({"documents": new}) + "\n")
            number, documents = number + 1, documents + new
    if documents == 0:
        raise DataError(f"{', '.join(sources)}: there is no text.")
    with whole_file(folder / COMPLETE) as file:
        file.write_text(json.dumps({"documents": documents}) + "\n")


def _batches(texts: Iterable[str], bar: tqdm) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            bar.update(size)
            batch, size = [], 0
    yield batch
    bar.update(size)


def _shards(
    batches: Iterable[list[str]], tokenizer: PreTrainedTokenizerBase, documents: int, every: int, kind: str
) -> Iterator[tuple[dict[str, array], int]]:
    """Yield the tokens of each shard by part, and how many documents they are; a shard ends with a batch."""

    def new_shard() -> dict[str, array]:
        return {"training": array(kind), "held_out": array(kind)}

    parts, first = new_shard(), documents
    for batch in batches:
        for document in tokenise_texts(batch, tokenizer) if batch else ():
            documents += 1
            parts["training" if documents % every else "held_out"].extend(document.ids)
        if sum(map(len, parts.values())) >= SHARD:
            yield parts, documents - first
            parts, first = new_shard(), documents
    if documents > first:
        yield parts, documents - first
