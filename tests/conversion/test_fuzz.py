"""Damaged checkpoints, at random but with a seed: a port that is right, or one line; nothing partial, no traceback."""

import json
import random
import struct

import pytest
import torch

from tests.conversion.checkpoints import all_tensors, command, contents
from tests.families import BY_NAME


CASES = 40  # of each kind and family
WRONG = (None, True, -1, 0, 10**9, 10**30, 1.5, float("nan"), float("inf"), "", "x", [], [[]], [10**9], {}, {"a": []})


@pytest.fixture(scope="module", params=["Llama", "Qwen3Moe"])
def checkpoint(request, tmp_path_factory):
    """A checkpoint of two layers, in several shards."""
    folder = tmp_path_factory.mktemp(request.param) / "source"
    fields = {"mlp_only_layers": [1]} if request.param == "Qwen3Moe" else {}
    model = BY_NAME[request.param].base_causal_lm(num_hidden_layers=2, hidden_size=16, intermediate_size=8, **fields)
    model.save_pretrained(folder, max_shard_size="10KB")
    return folder


def check(original, tmp_path, name, content, tag):
    """Port and verify the checkpoint with one file's content changed; a port that passes has the source's tensors."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for path in original.iterdir():
        (source / path.name).write_bytes(content if path.name == name else path.read_bytes())
    before = contents(source)
    status, output = command("port", source, target, "--verify")
    assert contents(source) == before, tag
    assert target.exists() == (status == 0), (tag, output)
    assert not list(tmp_path.glob(".*")), tag
    if status == 0:
        assert command("verify", source, target)[0] == 0, tag
        kept, expected = all_tensors(target), all_tensors(source)
        assert all(
            torch.equal(kept[key].view(torch.uint8), value.view(torch.uint8)) for key, value in expected.items()
        ), tag
    return status


def run(original, tmp_path, cases):
    """Check every case in a folder of its own; both outcomes occur, or the cases show little."""
    statuses = set()
    for number, (name, content, tag) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        statuses.add(check(original, tmp_path / str(number), name, content, tag))
    assert 2 in statuses
    return statuses


def json_paths(value, path=()):
    """Every place in a JSON value, by keys."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from json_paths(inner, (*path, key))


def replaced(value, path, new):
    value = json.loads(json.dumps(value))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return json.dumps(value).encode()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_fields_of_the_wrong_type(checkpoint, tmp_path, name):
    value = json.loads((checkpoint / name).read_text())
    every = [(path, wrong) for path in json_paths(value) for wrong in WRONG]
    chosen = random.Random(0).sample(every, min(len(every), 3 * CASES))
    run(checkpoint, tmp_path, [(name, replaced(value, *case), case) for case in chosen])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_bytes_of_json(checkpoint, tmp_path, name):
    generator, whole = random.Random(1), (checkpoint / name).read_bytes()
    cases = [(name, whole[: generator.randrange(len(whole))], f"cut {number}") for number in range(CASES // 2)]
    cases += [(name, flipped(whole, generator, len(whole)), f"flip {number}") for number in range(CASES)]
    run(checkpoint, tmp_path, cases)


@pytest.mark.parametrize("part", ["header", "all"])
def test_bytes_of_shards(checkpoint, tmp_path, part):
    generator = random.Random(2)
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    cases = []
    for number in range(CASES):
        name = generator.choice(shards)
        whole = (checkpoint / name).read_bytes()
        end = 8 + struct.unpack("<Q", whole[:8])[0] if part == "header" else len(whole)
        cases.append((name, flipped(whole, generator, end), f"{name} flip {number}"))
        if number % 4 == 0:
            cases.append((name, whole[: generator.randrange(end)], f"{name} cut {number}"))
    run(checkpoint, tmp_path, cases)


def flipped(content, generator, end):
    """Bytes with one bit changed, before `end`."""
    new, position = bytearray(content), generator.randrange(end)
    new[position] ^= 1 << generator.randrange(8)
    return bytes(new)
