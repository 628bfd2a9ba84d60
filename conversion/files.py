"""Writing folders and files that are complete or absent, and taking over large files cheaply."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from .checkpoint import CheckpointError


FICLONE = 0x40049409  # ioctl of Linux: share the blocks of a file, copy on write
CHUNK = 16 * 2**20


def check_target(target: Path, source: str) -> None:
    """Refuse a target that is taken, lies within the source, or cannot be written.

    Raises:
        CheckpointError: says which, before anything is written.
    """
    target, source_path = Path(target).resolve(), Path(source).expanduser()
    if source_path.exists():
        source_path = source_path.resolve()
        if target == source_path:
            raise CheckpointError(f"{target}: the target is the source.")
        if target.is_relative_to(source_path):
            raise CheckpointError(f"{target} lies inside the source {source_path}.")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} exists and is no folder.")
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is not empty.")
    ancestor = next(parent for parent in target.parents if parent.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        raise CheckpointError(f"{target}: no permission to write in {ancestor}.")


@contextlib.contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """A folder to write to, that becomes `target` when the block ends without an error.

    It is a sibling `.NAME.incomplete`, synced and then renamed, so a kill at any moment leaves `target` absent or
    complete. A lock tells a running writer from a leftover, which the next run removes.
    """
    target = Path(target).resolve()
    folder = target.with_name(f".{target.name}.incomplete")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{target}: another process is writing it ({folder}).") from None
        try:
            _empty(folder)
            yield folder
            _sync(folder)
            os.rename(folder, target)  # replaces an empty folder
            _sync_file(target.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write, that becomes `path` (whose folder is made) when the block ends without an error."""
    partial = path.with_name(f".{path.name}.incomplete")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _sync(folder: Path) -> None:
    for directory, _, names in os.walk(folder):
        for name in names:
            _sync_file(Path(directory) / name)
        _sync_file(Path(directory))


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_over(files: dict[Path, Path], link: bool = False) -> None:
    """Make each target file the same as its source: by a clone where the file system can, else by a copy.

    Args:
        files: from source to target. A symbolic link (as in the hub's cache) counts as the file it points to.
        link: make hard links. Cheap everywhere on one file system, but whoever writes into one file writes into both.

    Raises:
        CheckpointError: not enough space for a copy, or no hard link possible.
    """
    files = {source.resolve(): target for source, target in files.items()}
    if link:
        for source, target in files.items():
            try:
                os.link(source, target)
            except OSError as error:
                raise CheckpointError(f"{source} cannot be hard-linked to {target}: {error.strerror}.") from error
        return

    to_copy = {source: target for source, target in files.items() if not _clone(source, target)}
    needed, parent = sum(source.stat().st_size for source in to_copy), next(iter(files.values())).parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(f"{parent.parent}: {needed / 2**20:,.0f} MiB are needed, {free / 2**20:,.0f} are free.")
    with tqdm(total=needed, unit="B", unit_scale=True, desc="copying shards", disable=not to_copy) as bar:
        for source, target in to_copy.items():
            with open(source, "rb") as reader, open(target, "wb") as writer:
                while chunk := reader.read(CHUNK):
                    writer.write(chunk)
                    bar.update(len(chunk))


def _clone(source: Path, target: Path) -> bool:
    """Share the source's blocks copy-on-write; False where the file system cannot."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM):
                return False
            raise
    return True
