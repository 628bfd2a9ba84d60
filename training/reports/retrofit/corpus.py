"""Gather real text for retrofits: to train on, held out of the same kinds, and unlike all that is trained on.

    python -m training.reports.retrofit.corpus results/retrofit

In the folder: `train.jsonl`, and rows of 600 characters: `choosing.jsonl` and `held_out.jsonl` (other documents of the
same kinds, the first to choose rates by) and `unlike.jsonl` (worked answers to questions of exams and puzzles, which
lm-eval holds for its prompts), which measures what is forgotten. A line on the screen has the number and SHA-256 of
each.
"""

import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from common.errors import UserError, run_command
from common.files import whole_file
from training.reports.replication.corpus import find_texts, read


CHOOSING, HELD_OUT, UNLIKE = 20, 80, 40  # rows of each kind
ROW = 600  # characters of a row
TRAIN, LARGEST = 700_000, 20_000  # characters of each kind to train on, and of one document


def mix(texts: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Order (name, kind, text) by the hash of the name, and leave out a text whose middle has been there."""
    seen, mixed = set(), []
    for _, kind, text in sorted(texts, key=lambda one: (hash_text(one[0]), one[2])):
        if len(text) > ROW // 4 and (middle := middle_of(text)) not in seen:
            seen.add(middle)
            mixed.append((kind, text))
    return mixed


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def middle_of(text: str) -> str:
    """Cut a row out of the middle of a text, where files of a kind differ most."""
    start = max(0, (len(text) - ROW) // 2)
    return text[start : start + ROW]


def split_documents(documents: list[tuple[str, str]]) -> dict[str, list[dict]]:
    """Take the first documents of each kind for rows, and those after them to train on, kinds mixed."""
    taken, characters, parts = Counter(), Counter(), {"train": [], "choosing": [], "held_out": []}
    for kind, text in documents:
        if taken[kind] < CHOOSING + HELD_OUT:
            part = "choosing" if taken[kind] < CHOOSING else "held_out"
            parts[part].append({"text": middle_of(text), "kind": kind})
            taken[kind] += 1
        elif characters[kind] < TRAIN:
            parts["train"].append({"text": text[:LARGEST]})
            characters[kind] += len(parts["train"][-1]["text"])
    parts["train"].sort(key=lambda row: hash_text(row["text"]))
    return parts


def find_answers() -> Iterator[tuple[str, str, str]]:
    """Give the worked examples that lm-eval's prompts show: of MMLU's subjects, and of BBH's puzzles."""
    if (package := importlib.util.find_spec("lm_eval")) is None:
        raise UserError("lm_eval is not installed: `pip install -e '.[eval]'`.")
    tasks = Path(package.origin).parent / "tasks"
    for kind, folder in (("exam", "mmlu/flan_cot_fewshot"), ("puzzle", "bbh/cot_fewshot")):
        for path in (tasks / folder).glob("[!_]*.yaml"):
            for sample in yaml.safe_load(path.read_text())["fewshot_config"]["samples"]:
                question = sample.get("question") or sample["input"]
                yield path.name, kind, f"Question: {question}\nAnswer: {sample['target']}"


def find_unlike() -> list[dict]:
    """Make the rows of worked answers."""
    taken, rows = Counter(), []
    for kind, text in mix(list(find_answers())):
        if taken[kind] < UNLIKE:
            taken[kind] += 1
            rows.append({"text": text[:ROW], "kind": kind})
    return rows


def main(folder: Path) -> None:
    """Write real text of this machine into a folder: to train on, to choose rates by, held out, and unlike all that."""
    documents = mix([("/".join(path.parts[-2:]), kind, read(path)) for kind, path in find_texts()])
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (split_documents(documents) | {"unlike": find_unlike()}).items():
        content = "".join(json.dumps(row) + "\n" for row in rows)
        with whole_file(folder / f"{name}.jsonl") as file:
            file.write_text(content)
        kinds = sorted(Counter(row.get("kind", "texts") for row in rows).items())
        print(f"{folder / name}.jsonl: {', '.join(f'{count} {kind}' for kind, count in kinds)}; {hash_text(content)}")


if __name__ == "__main__":
    run_command(main, "python -m training.reports.retrofit.corpus results/retrofit")
