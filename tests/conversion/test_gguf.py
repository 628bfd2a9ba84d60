"""GGUF files: what transformers would leave out of a model is named, not ported."""

import gguf
import numpy as np
import pytest

from tests.conversion.checkpoints import command


WIDTH, HIDDEN, LAYERS, VOCABULARY, HEADS = 32, 64, 2, 64, 4
SHAPES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
}


def write_gguf(path, tensors=(), drop=(), settings=None, layers=LAYERS):
    """A tiny Llama with random weights; more tensors or settings, or fewer tensors, if asked."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCABULARY)
    for key, value in (settings or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", "AB", *(chr(ord("A") + index) for index in range(VOCABULARY - 3))])
    writer.add_token_types([3, 3, *[1] * (VOCABULARY - 2)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    generator = np.random.default_rng(0)
    for name, shape in (shapes | dict(tensors)).items():
        if name not in drop:
            writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_ported_and_its_temporary_model_is_gone(tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    before = source.read_bytes()
    status, output = command("port", source, tmp_path / "port", "--verify")
    assert status == 0, output
    assert "portable   yes" in command("inspect", source)[1]
    assert command("verify", source, tmp_path / "port")[0] == 0
    assert source.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "port"]
    assert not [path.name for path in (tmp_path / "port").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tensors": {"rope_freqs": (WIDTH // HEADS // 2,)}}, "leaves out rope_freqs.weight, so"),
        ({"tensors": {"blk.0.attn_sinks": (HEADS,)}}, "leaves out blk.0.attn_sinks.weight, so"),
        ({"tensors": {f"blk.{LAYERS}.attn_norm": (WIDTH,)}}, f"leaves out blk.{LAYERS}.attn_norm.weight, so"),
        ({"settings": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}}, "llama.rope.scaling"),
        ({"drop": {"blk.1.ffn_up"}}, "no tensor for model.layers.1.mlp.up_proj.weight"),
        ({"layers": 10**9}, "1000000000 blocks of 21 tensors"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(tmp_path, change, named):
    source = write_gguf(tmp_path / "model.gguf", **change)
    status, line = command("port", source, tmp_path / "port")
    assert status == 2
    assert named in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_positions_that_are_not_scaled(tmp_path):
    source = write_gguf(tmp_path / "model.gguf", settings={"llama.rope.scaling.type": "none"})
    assert command("port", source, tmp_path / "port")[0] == 0


@pytest.mark.parametrize("size", [0, 3, 100, 1000, 20000])
def test_files_cut_short(tmp_path, size):
    source = write_gguf(tmp_path / "model.gguf")
    source.write_bytes(source.read_bytes()[:size])
    status, line = command("port", source, tmp_path / "port")
    assert status == 2
    assert "model.gguf" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]
