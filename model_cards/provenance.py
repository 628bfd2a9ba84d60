"""`provenance.json`: how a checkpoint was made, written beside its weights by whatever made it, read by its card."""

import contextlib
import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id
from tqdm import tqdm

from common.errors import UserError, one_line, printable, reading
from common.files import write_new


NAME = "provenance.json"
NULLS = ("", "~", "null", "Null", "NULL")  # how YAML writes that there is no value
CARD_BYTES = 2**20  # how much of a card is read: its metadata are at its beginning


def installed() -> dict[str, str]:
    """Return the versions of the packages that make a checkpoint."""
    return {name: version(name) for name in ("modeling-attnres", "transformers", "torch", "safetensors")}


@strict
@dataclass
class Verified:
    """A comparison of logits with the source's, in fp32: relative error (norm-wise) over `tokens` of a text."""

    relative_error: float
    tokens: int
    text: str

    def validate_finite(self) -> None:
        if not math.isfinite(self.relative_error):
            raise ValueError(f"relative_error must be finite, got {self.relative_error}.")


@strict
@dataclass
class Provenance:
    """How a checkpoint was made.

    Attributes:
        made_by: what made it.
        source: the hub id, or the name of the folder or file, it was made from.
        base_model: `source`, if it is a hub id, else the hub ids of what its own card says that it was made from.
        base_model_relation: how the source was made from those, if its card says so.
        license, license_name, license_link, languages: those of the source's card.
        shards: SHA-256 of each of the source's weight files.
        files: SHA-256 of each of the checkpoint's own weight and code files.
        details: what else it was made with.
        verified: how far it computes what the source does, if that was checked.
    """

    made_by: Literal["port", "upcycle", "merge"]
    source: str
    base_model: str | list[str] | None = None
    base_model_relation: str | None = None
    license: str | list[str] | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: list[str] = field(default_factory=list)
    shards: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    verified: Verified | None = None
    versions: dict[str, str] = field(default_factory=installed)

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        # the name of a folder may hold bytes that are no UTF-8: JSON writes them as Python does
        write_new(folder / NAME, printable(text) + "\n")


def read(folder: Path) -> Provenance | None:
    """Read the provenance of a folder, or return `None` where there is none.

    Raises:
        UserError: the file is malformed.
    """
    file = folder / NAME
    if not file.exists():
        return None
    if not file.is_file():
        raise UserError(f"{file} is no file; expected how the checkpoint was made.")
    with reading(f"{file} as the provenance of a checkpoint"):
        fields = json.loads(file.read_text(encoding="utf-8"))
        verified = fields.pop("verified", None)
        return Provenance(**fields, verified=None if verified is None else Verified(**verified))


def of_card(folder: Path) -> dict[str, Any]:
    """Read what a folder's own card says of its license, languages and base, as fields of `Provenance`.

    A card that cannot be read says nothing.
    """
    path = folder / REPOCARD_NAME
    data = None
    with contextlib.suppress(OSError, UserError):
        if path.is_file():  # no pipe, which would be waited for
            with open(path, "rb") as file:
                head = file.read(CARD_BYTES).decode("utf-8-sig", errors="replace")
            # BaseLoader leaves every scalar a text: YAML 1.1 reads the language `no` as false, a license `1.0` as a
            # number. Fields that are not needed, as a malformed model-index, cannot fail.
            with reading(path):
                data = yaml.load(block[2], yaml.BaseLoader) if (block := REGEX_YAML_BLOCK.search(head)) else None
    if not isinstance(data, dict):
        return {}
    singles = {name: _texts(data.get(name)) for name in ("base_model_relation", "license_name", "license_link")}
    return {name: next(iter(texts), None) for name, texts in singles.items()} | {
        "base_model": _one_or_list([base for base in _texts(data.get("base_model")) if is_hub_id(base)]),
        "license": _one_or_list(_texts(data.get("license"))),
        "languages": _texts(data.get("language")),
    }


def is_hub_id(text: str) -> bool:
    """Say whether a text could be the `owner/name` of a model on the hub."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return "/" in text


def _texts(value: Any) -> list[str]:
    """Return the texts in a value of YAML, a scalar or a list."""
    values = value if isinstance(value, list) else [value]
    return [one_line(text) for text in values if isinstance(text, str) and text not in NULLS]


def _one_or_list(texts: list[str]) -> str | list[str] | None:
    return texts[0] if len(texts) == 1 else texts or None


def hash_files(files: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file, by its name. In the hub's cache large files are named by it, and not read."""
    hashes = {}
    with tqdm(total=sum(file.stat().st_size for file in files), unit="B", unit_scale=True, desc="hashing files") as bar:
        for file in files:
            blob = file.resolve()
            if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
                hashes[file.name] = blob.name
            else:
                with open(file, "rb") as content:
                    hashes[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
            bar.update(blob.stat().st_size)
    return hashes
