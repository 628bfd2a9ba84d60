"""`provenance.json`: how a checkpoint was made, written beside its weights by whatever made it, read by its card."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from tqdm import tqdm
from yaml import YAMLError


NAME = "provenance.json"


def installed() -> dict[str, str]:
    """The versions of what makes a checkpoint."""
    return {name: version(name) for name in ("modeling-attnres", "transformers", "torch", "safetensors")}


@dataclass(frozen=True)
class Verified:
    """A comparison of logits with the source's, in fp32: relative error (norm-wise) over `tokens` of a text."""

    relative_error: float
    tokens: int
    text: str


@dataclass(frozen=True)
class Provenance:
    """How a checkpoint was made.

    Attributes:
        made_by: "port", "upcycle" or "merge".
        source: the hub id, or the name of the folder or file, it was made from.
        base_model: the hub id of `source`, if it is one or its own card names one.
        license, license_name, license_link, languages: those of the source's card.
        shards: SHA-256 of each of the source's weight files.
        details: what else it was made with.
        verified: how far it computes what the source does, if that was checked.
    """

    made_by: str
    source: str
    base_model: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: list[str] = field(default_factory=list)
    shards: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    verified: Verified | None = None
    versions: dict[str, str] = field(default_factory=installed)

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> Provenance | None:
    """What a folder says of itself, if anything.

    Raises:
        ValueError: the file is malformed.
    """
    file = folder / NAME
    if not file.exists():
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        verified = fields.pop("verified", None)
        return Provenance(**fields, verified=Verified(**verified) if verified else None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no provenance of a checkpoint: {error}.") from error


def of_card(folder: Path) -> dict[str, Any]:
    """What a folder's own card says of its license, languages and base model, as fields of `Provenance`."""
    try:
        data = ModelCard.load(folder / REPOCARD_NAME).data
    except (OSError, ValueError, YAMLError):
        return {}  # no card, or none that can be read
    base, languages = data.base_model, data.language
    return {
        "base_model": base[0] if isinstance(base, list) else base,
        "license": data.license,
        "license_name": data.license_name,
        "license_link": data.license_link,
        "languages": [languages] if isinstance(languages, str) else list(languages or []),
    }


def hash_files(files: list[Path]) -> dict[str, str]:
    """The SHA-256 of each file by its name. In the hub's cache large files are named by it, and are not read."""
    hashes = {}
    with tqdm(
        total=sum(file.stat().st_size for file in files), unit="B", unit_scale=True, desc="hashing shards"
    ) as bar:
        for file in files:
            blob = file.resolve()
            if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
                hashes[file.name] = blob.name
            else:
                with open(file, "rb") as content:
                    hashes[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
            bar.update(blob.stat().st_size)
    return hashes
