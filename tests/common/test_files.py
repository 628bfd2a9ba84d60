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
from common.files import complete_or_absent, whole_file
from conversion.checkpoint import Checkpoint
from conversion.port import port
from tests.conversion.checkpoints import all_tensors
from tests.families import BY_NAME, tokens


@pytest.fixture
def source(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "source", max_shard_size="100KB")
    return tmp_path / "source"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def port_and_die(source, target, fatal_event: int) -> bool:
    """Port in a child process that is killed at its n-th file operation. Returns whether it lived to the end."""
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
            port(str(source), target)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


def test_killed_at_any_moment(source, tmp_path):
    """The target is absent or complete, the source is untouched, and what is left over does not hinder the next run."""
    before, target = contents(source), tmp_path / "target"
    port(str(source), tmp_path / "expected" / "target")  # a card has its folder's name
    expected = contents(tmp_path / "expected" / "target")
    leftovers, event, lived = 0, 1, False
    while not lived:
        lived = port_and_die(source, target, event)
        assert contents(source) == before
        if target.exists():
            assert contents(target) == expected
            shutil.rmtree(target)
        leftovers += (tmp_path / ".target.incomplete").exists()
        event += 7  # some 30 moments
    assert leftovers > 5
    port(str(source), target)
    assert contents(target) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "source", "target"]


def test_a_full_disk(source, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        with pytest.raises(UserError, match=r"MiB are needed, 0 are free"):
            port(str(source), disk / "target")
        assert list(disk.iterdir()) == []
        monkeypatch.setattr("common.files.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))
        with pytest.raises(OSError, match="No space left"):  # another program was faster
            port(str(source), disk / "target")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_running_writer_is_not_disturbed(source, tmp_path):
    with complete_or_absent(tmp_path / "target") as folder:
        (folder / "file").write_text("mine")
        with pytest.raises(UserError, match="another process is writing it"):
            port(str(source), tmp_path / "target")
    assert contents(tmp_path / "target") == {(tmp_path / "target" / "file").relative_to(tmp_path / "target"): b"mine"}


def test_an_error_leaves_nothing(tmp_path):
    def write_half():
        with complete_or_absent(tmp_path / "target") as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_links(source, tmp_path):
    port(str(source), tmp_path / "target", link=True)
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
    port(str(source), tmp_path / "target", link=True)
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
    port(str(source), tmp_path / "target")
    assert len(cloned) == len(Checkpoint(source).shards)
    kept = all_tensors(tmp_path / "target")
    assert all(torch.equal(kept[name], value) for name, value in all_tensors(source).items())


def test_no_write_permission(source, tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir(mode=0o555)
    if os.geteuid() == 0:  # root may write anywhere; ask as someone else
        monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)
    with pytest.raises(UserError, match=r"no permission to write in .*closed"):
        port(str(source), tmp_path / "closed" / "target")
