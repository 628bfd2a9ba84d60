"""Gather real text of several kinds from this machine: Python's library, documentation of Debian packages, licences.

    python -m training.reports.replication.corpus results/replication/corpus.jsonl

A line per file, `{"text": …, "kind": …}`, in the order of the hashes of file names (those of one name, as the licences
called `copyright`, as the file system has them); and a line on the screen with what there is of each kind and the
SHA-256 of the whole, which says whether two machines have the same.
"""

import gzip
import hashlib
import json
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common.errors import run_command
from common.files import whole_file


DOCUMENTATION = (".txt", ".md", ".rst", "")
LARGEST = 200_000  # characters of a file: no single one is much of the whole


def find_texts() -> Iterator[tuple[str, Path]]:
    """Give the files of each kind; a compressed `changelog` counts as documentation, a `changelog.Debian` does not."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in library.rglob("*.py"):
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            yield "library", path
    for path in Path("/usr/share/doc").rglob("*"):
        name = Path(path.stem) if path.suffix == ".gz" else path
        if name.suffix in DOCUMENTATION and path.is_file() and not path.is_symlink():
            yield "licence" if name.name == "copyright" else "documentation", path
    for path in Path("/usr/share/common-licenses").iterdir():
        if not path.is_symlink():
            yield "licence", path


def read(path: Path) -> str:
    """Return a file's text, or nothing where it is none."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()[:LARGEST]
    except (UnicodeDecodeError, OSError, EOFError, zlib.error):
        return ""


def main(target: Path) -> None:
    """Write real text of this machine to a JSON Lines file; texts that are there twice count once."""
    characters, seen, lines = Counter(), set(), []
    # by the hash of the name, so that kinds are mixed, and the held-out documents, every n-th, are of all of them
    files = sorted(find_texts(), key=lambda found: hashlib.sha256(str(found[1].name).encode()).hexdigest())
    for kind, path in files:
        text = read(path)
        if len(text) > 200 and text not in seen:
            seen.add(text)
            characters[kind] += len(text)
            lines.append(json.dumps({"text": text, "kind": kind}) + "\n")
    target.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(lines)
    with whole_file(target) as file:
        file.write_text(content)
    kinds = ", ".join(f"{count / 1e6:.1f} million of {kind}" for kind, count in sorted(characters.items()))
    print(f"{target}: {len(lines)} texts, characters: {kinds}; SHA-256 {hashlib.sha256(content.encode()).hexdigest()}")


if __name__ == "__main__":
    run_command(main, "python -m training.reports.replication.corpus results/replication/corpus.jsonl")
