"""Read nothing but files, write what is complete or absent, and take over large files cheaply."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from .errors import UserError, describe


FICLONE = 0x40049409  # ioctl of Linux: share the blocks of a file, copy on write
NO_CLONES = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)
CHUNK = 16 * 2**20  # bytes copied between two steps of the progress bar


def check_target(target: Path, source: str) -> None:
    """Refuse a target that is taken, being written, within the source, or cannot be written.

    Raises:
        UserError: says which, before anything is written.
    """
    target, source_path = Path(target).resolve(), expand_user(source)
    if source_path.exists():
        source_path = source_path.resolve()
        if target == source_path:
            raise UserError(f"{target}: the target is the source.")
        if target.is_relative_to(source_path):
            raise UserError(f"{target} lies inside the source {source_path}.")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} exists and is no folder.")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target} exists and is not empty.")
    ancestor = next(parent for parent in target.parents if parent.exists())
    if not ancestor.is_dir():
        raise UserError(f"{target}: {ancestor} is no folder.")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UserError(f"{target}: no permission to write in {ancestor}.")
    if _is_being_written(target):
        raise UserError(f"{target}: another process is writing it ({incomplete(target)}).")


def expand_user(path: str) -> Path:
    """Return a path with the folder that `~` or `~name` stands for.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {describe(error)}") from error


def check_file(path: Path) -> None:
    """Refuse what is no file, before it is opened: a pipe or a device would keep its reader waiting.

    Raises:
        UserError: names the path, and where a dead link leads.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        link = f"a link to {path.readlink()}, which is " if path.is_symlink() else ""
        raise UserError(f"{path} is {link}missing.") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is no file but {'a folder' if stat.S_ISDIR(mode) else 'a pipe, socket or device'}.")


def check_link(path: Path, folder: Path) -> None:
    """Refuse a link that leads out of a folder; a snapshot of the hub's cache links to the blobs beside it.

    Raises:
        UserError: says where it leads.
    """
    real, folder = path.resolve(), folder.resolve()
    inside = [folder, *(above.parent / "blobs" for above in folder.parents if above.name == "snapshots")]
    if not any(real.is_relative_to(place) for place in inside):
        raise UserError(
            f"{path} is a link to {real}, outside of {folder}: it is not followed. Put a copy there, or remove it."
        )


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, sorted, without hidden ones.

    A link to a folder counts as a file: to follow it could lead in circles.

    Raises:
        OSError: a folder cannot be read.
    """

    def fail(error: OSError):
        raise error

    for directory, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        yield from (Path(directory) / name for name in sorted(names + links) if not name.startswith("."))


@contextlib.contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes `target` when the `with` block ends without an error.

    It is a sibling `.NAME.incomplete`, synced and then renamed, so a kill at any moment leaves `target` absent or
    complete. A lock tells a running writer from a leftover, which the next run removes.

    Raises:
        UserError: another process writes the same target, or wrote it meanwhile.
    """
    target = Path(target).resolve()
    folder = incomplete(target)
    with _claimed(target, folder, lambda: folder.mkdir(exist_ok=True), os.O_DIRECTORY):
        try:
            _empty(folder)
            if target.exists() and any(target.iterdir()):
                raise UserError(f"{target} has been written by another process meanwhile.")
            yield folder
            _sync(folder)
            os.rename(folder, target)  # replaces an empty folder
            _sync_file(target.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a file to write, which becomes `path` (whose folder is made) when the `with` block ends without an error.

    Raises:
        UserError: another process writes the same file.
    """
    path = Path(path)
    partial = incomplete(path)
    with _claimed(path, partial, partial.touch):
        try:
            yield partial
            _sync_file(partial)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def incomplete(path: Path) -> Path:
    """Return the path where a file or folder is written before it is complete."""
    return path.with_name(f".{path.name}.incomplete")


@contextlib.contextmanager
def _claimed(final: Path, partial: Path, make: Callable[[], object], flags: int = 0) -> Iterator[None]:
    """Make the place where `final` is written, and hold a lock on it that one process at a time can have.

    A link under that name is not followed: it would have another folder emptied, or another file written. Folders that
    are made on the way are removed after an error.
    """
    made = [parent for parent in final.parents if not parent.exists()]
    final.parent.mkdir(parents=True, exist_ok=True)
    with _removed_after_an_error(made), _locked(final, partial, make, flags):
        yield


@contextlib.contextmanager
def _removed_after_an_error(folders: list[Path]) -> Iterator[None]:
    """Remove folders, the innermost first, where the `with` block ends with an error and nothing lies in them."""
    try:
        yield
    except BaseException:
        for folder in folders:
            with contextlib.suppress(OSError):  # another writer's work lies there
                folder.rmdir()
        raise


@contextlib.contextmanager
def _locked(final: Path, partial: Path, make: Callable[[], object], flags: int) -> Iterator[None]:
    """Make `partial` and lock it; once more where another writer moved it away between the two."""
    kind = stat.S_IFDIR if flags & os.O_DIRECTORY else stat.S_IFREG
    while True:
        if partial.is_symlink():
            raise UserError(f"{partial} is a link, expected nothing there: remove it.")
        try:
            make()
            descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags)
        except FileNotFoundError:  # another writer was just done with it
            continue
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{partial} is there and is no folder: remove it.") from None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)  # which lets go of the lock, too
            if stat.S_IFMT(os.fstat(descriptor).st_mode) != kind:
                raise UserError(f"{partial} is there and is no file: remove it.")
            _lock(descriptor, f"{final}: another process is writing it ({partial}).")
            if _is_at(descriptor, partial):  # else the lock is on what another writer has moved to its final name
                yield
                return


@contextlib.contextmanager
def hold_folder(folder: Path, refusal: str) -> Iterator[None]:
    """Make a folder, and keep other processes that hold it from working in it within the `with` block.

    Folders that it makes are removed after an error that leaves them empty.

    Raises:
        UserError: another one holds it; says `refusal` after the folder's name.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, f"{folder}: {refusal}")
        with _removed_after_an_error(made):
            yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, refusal: str) -> None:
    """Lock an open file or folder for this process alone, until it is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(refusal) from None


def _is_being_written(final: Path) -> bool:
    """Say whether another process holds the lock on the place where `final` is written."""
    try:
        descriptor = os.open(incomplete(final), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    """Say whether an open file is the one that a path names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(folder: Path) -> None:
    """Have the disk hold a folder's files, and their names."""
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


def write_new(path: Path, text: str) -> None:
    """Write a text to a file that does not exist: a file that does may be shared with others, by a hard link."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)


def copy_new(source: Path, target: Path) -> None:
    """Copy a file to a path where nothing is yet, making its folder."""
    check_file(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as reader, open(target, "xb") as writer:
        shutil.copyfileobj(reader, writer)


def move(files: dict[Path, Path]) -> None:
    """Move each file to a path on the same file system where nothing is yet."""
    for source, target in files.items():
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)


def take_over(files: dict[Path, Path], link: bool = False) -> None:
    """Make each target, where nothing is yet, the same as its source: a clone where possible, else a copy.

    Args:
        files: from source to target. A symbolic link (as in the hub's cache) counts as the file it points to.
        link: make hard links. Cheap everywhere on one file system, but whoever writes into one file writes into both.

    Raises:
        UserError: not enough space for a copy, or no hard link possible.
    """
    files = {source.resolve(): target for source, target in files.items()}
    # Hard links, all or an error
    if link:
        for source, target in files.items():
            try:
                os.link(source, target)
            except OSError as error:
                raise UserError(f"{source} cannot be hard-linked to {target}: {error.strerror}.") from error
        return

    # Clones, and copies of what cannot be cloned
    to_copy = {source: target for source, target in files.items() if not _clone(source, target)}
    needed = sum(source.stat().st_size for source in to_copy)
    check_space(next(iter(files.values())).parent, needed)
    with tqdm(total=needed, unit="B", unit_scale=True, desc="copying shards", disable=not to_copy) as bar:
        for source, target in to_copy.items():
            with open(source, "rb") as reader, open(target, "xb") as writer:
                while chunk := reader.read(CHUNK):
                    writer.write(chunk)
                    bar.update(len(chunk))


def check_space(folder: Path, needed: int) -> None:
    """Refuse to write more bytes to a folder than fit.

    Raises:
        UserError: says how many are needed and free.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{folder.parent}: {needed / 2**20:,.0f} MiB are needed, {free / 2**20:,.0f} are free.")


def _clone(source: Path, target: Path) -> bool:
    """Share the source's blocks copy-on-write. Return False, and leave no target, where the file system cannot."""
    with open(source, "rb") as reader, open(target, "xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
        except OSError as error:
            if error.errno not in NO_CLONES:
                raise
        else:
            return True
    target.unlink()
    return False
