"""Writing: complete or absent, whatever happens on the way; links, clones and copies."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import UserError
from common.files import (
    check_file,
    check_link,
    check_target,
    complete_or_absent,
    copy_new,
    files_below,
    move,
    take_over,
    whole_file,
    write_new,
)
from conversion.checkpoint import Checkpoint
from conversion.export import export_checkpoint
from conversion.port import port_checkpoint
from conversion.upcycle import upcycle_checkpoint
from tests.conversion.checkpoints import all_tensors, command, contents
from tests.families import BY_NAME, tokens


@pytest.fixture
def source(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "source", max_shard_size="100KB")
    return tmp_path / "source"


def do_and_die(action, fatal_event: int) -> bool:
    """Run an action in a child process, killed at its n-th file operation. Returns whether it lived to the end."""
    child = os.fork()
    if child == 0:
        try:
            seen = 0

            def count(event, _):
                nonlocal seen
                if event.split(".")[0] in ("open", "os", "shutil", "fcntl"):
                    seen += 1
                    if seen == fatal_event:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


@pytest.mark.parametrize(
    ("command", "given", "step"),
    [
        (lambda given, target: port_checkpoint(str(given), target), "source", 7),
        (lambda given, target: port_checkpoint(str(given), target, link=True, verify=True), "source", 11),
        (lambda given, target: export_checkpoint(str(given), target), "ported", 3),
        (lambda given, target: upcycle_checkpoint(str(given), target, experts=2, top_k=1), "source", 13),
    ],
    ids=["port", "port --link --verify", "export", "upcycle"],
)
def test_killed_at_any_moment(source, tmp_path, command, given, step):
    """The target is absent or complete, the source is untouched, and what is left over does not hinder the next run."""
    port_checkpoint(str(source), tmp_path / "ported")
    before, target = (contents(source), contents(tmp_path / "ported")), tmp_path / "target"
    command(tmp_path / given, tmp_path / "expected" / "target")  # a card has its folder's name
    expected = contents(tmp_path / "expected" / "target")
    leftovers, event, lived = 0, 1, False
    while not lived:
        lived = do_and_die(lambda: command(tmp_path / given, target), event)
        assert (contents(source), contents(tmp_path / "ported")) == before
        if target.exists():
            assert contents(target) == expected
            shutil.rmtree(target)
        leftovers += (tmp_path / ".target.incomplete").exists()
        event += step  # some 20 moments
    assert leftovers > 5
    command(tmp_path / given, target)
    assert contents(target) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "ported", "source", "target"]


def test_a_full_disk(source, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        with pytest.raises(UserError, match=r"MiB are needed, 0 are free"):
            port_checkpoint(str(source), disk / "target")
        assert list(disk.iterdir()) == []
        monkeypatch.setattr("common.files.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))
        with pytest.raises(OSError, match="No space left"):  # another program was faster
            port_checkpoint(str(source), disk / "target")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_running_writer_is_not_disturbed(source, tmp_path):
    with complete_or_absent(tmp_path / "target") as folder:
        (folder / "file").write_text("mine")
        with pytest.raises(UserError, match="another process is writing it"):
            port_checkpoint(str(source), tmp_path / "target")
    assert contents(tmp_path / "target") == {(tmp_path / "target" / "file").relative_to(tmp_path / "target"): b"mine"}


def test_a_second_writer_is_told_before_its_work(source, tmp_path, monkeypatch):
    """Whatever it would write: nothing of the source is read, and no folder is made."""
    port_checkpoint(str(source), tmp_path / "port")
    monkeypatch.setattr("conversion.checkpoint.Checkpoint.__post_init__", lambda _: pytest.fail("work was begun"))
    with complete_or_absent(tmp_path / "target"):
        for arguments in (
            ("port", source, tmp_path / "target"),
            ("export", tmp_path / "port", tmp_path / "target"),
            ("upcycle", source, tmp_path / "target", "--experts", 2, "--top-k", 1),
        ):
            assert command(*arguments) == (
                2,
                f"error: {tmp_path}/target: another process is writing it ({tmp_path}/.target.incomplete).",
            )
        with pytest.raises(UserError, match="another process is writing it"):
            check_target(tmp_path / "target", str(source))
    assert list((tmp_path / "target").iterdir()) == []


def test_a_planted_link_empties_no_other_folder(source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (tmp_path / ".target.incomplete").symlink_to("mine")
    assert command("port", source, tmp_path / "target") == (
        2,
        f"error: {tmp_path}/.target.incomplete is a link, expected nothing there: remove it.",
    )
    assert (tmp_path / "mine" / "file").read_text() == "mine"


def test_an_error_leaves_no_folder_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), complete_or_absent(tmp_path / "new" / "folder" / "target"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_there_is_written(tmp_path):
    """By none of the functions that write: what is there may be the source's own, through a link."""
    (tmp_path / "source").write_text("new")
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for target in (tmp_path / "there", tmp_path / "link"):
        for write in (
            lambda target: write_new(target, "new"),
            lambda target: copy_new(tmp_path / "source", target),
            lambda target: move({tmp_path / "source": target}),
            lambda target: take_over({tmp_path / "source": target}),
            lambda target: take_over({tmp_path / "source": target}, link=True),
        ):
            with pytest.raises((FileExistsError, UserError), match="File exists"):
                write(target)
    assert (tmp_path / "there").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "source", "there"]


def test_files_and_links(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub" / ".hidden").mkdir(parents=True)
    (folder / "sub" / "file").write_text("x")
    (folder / "in").symlink_to("sub/file")
    (folder / "loop").symlink_to(".")
    (folder / "dead").symlink_to("nowhere")
    (folder / "out").symlink_to("../other")
    (tmp_path / "other").write_text("secret")
    os.mkfifo(folder / "pipe")
    names = [str(path.relative_to(folder)) for path in files_below(folder)]
    assert names == ["dead", "in", "loop", "out", "pipe", "sub/file"]
    for name in ("in", "out", "sub/file"):
        check_file(folder / name)
    for name, message in {
        "dead": "dead is a link to nowhere, which is missing",
        "loop": "loop is no file but a folder",
        "pipe": "pipe is no file but a pipe, socket or device",
        "nothing": "nothing is missing",
    }.items():
        with pytest.raises(UserError, match=message):
            check_file(folder / name)
    check_link(folder / "in", folder)
    check_link(folder / "loop", folder)
    with pytest.raises(UserError, match=r"out is a link to .*/other, outside of .*folder: it is not followed"):
        check_link(folder / "out", folder)


def test_an_error_leaves_nothing(tmp_path):
    def write_half():
        with complete_or_absent(tmp_path / "target") as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_links(source, tmp_path):
    port_checkpoint(str(source), tmp_path / "target", link=True)
    linked = Checkpoint(tmp_path / "target")
    for old, new in zip(Checkpoint(source).shards, linked.shards[:-1], strict=True):
        assert os.path.samefile(source / old, tmp_path / "target" / new)
    assert not os.path.samefile(source / "config.json", tmp_path / "target" / "config.json")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new folder" / "table.json"
    with whole_file(path) as file:
        file.write_text("first")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), whole_file(path) as file:
        file.write_text("half \udcff", encoding="utf-8")
    assert [(entry.name, entry.read_text()) for entry in path.parent.iterdir()] == [("table.json", "first")]


@pytest.mark.parametrize("shard_size", ["100KB", "5GB"])
def test_saving_over_a_linked_port_leaves_the_source_alone(source, tmp_path, shard_size):
    """`save_pretrained` replaces files and does not write into them, so links are cut; stale shards are removed."""
    before = contents(source)
    port_checkpoint(str(source), tmp_path / "target", link=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path / "target", max_shard_size=shard_size)
    assert contents(source) == before
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_shards_are_cloned_where_the_file_system_can(source, tmp_path, monkeypatch):
    """A clone is asked for with the ioctl; here it is answered by a copy, elsewhere by sharing blocks."""
    cloned = []

    def clone(target, request, reader):
        assert request == 0x40049409
        os.sendfile(target, reader, 0, os.fstat(reader).st_size)
        cloned.append(reader)

    monkeypatch.setattr(fcntl, "ioctl", clone)
    monkeypatch.setattr("common.files.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    port_checkpoint(str(source), tmp_path / "target")
    assert len(cloned) == len(Checkpoint(source).shards)
    kept = all_tensors(tmp_path / "target")
    assert all(torch.equal(kept[name], value) for name, value in all_tensors(source).items())


def test_no_write_permission(source, tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir(mode=0o555)
    if os.geteuid() == 0:  # root may write anywhere; ask as someone else
        monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)
    with pytest.raises(UserError, match=r"no permission to write in .*closed"):
        port_checkpoint(str(source), tmp_path / "closed" / "target")
