"""The examples in docstrings run as they stand, one after another; the checkpoint they name is a tiny one here."""

import inspect
import os
import subprocess
import sys
import textwrap

import pytest

from conversion.export import export_checkpoint
from conversion.inspection import inspect_checkpoint
from conversion.port import port_checkpoint
from conversion.upcycle import upcycle_checkpoint
from conversion.verify import verify_port
from model_cards.card import write_card
from modeling_attnres import depth_interventions, depth_read, register_depth_reader, register_family_parts
from tests.conftest import ROOT
from tests.families import BY_NAME


# In an order in which each finds what it needs.
FUNCTIONS = [
    *(depth_read, register_depth_reader, register_family_parts),
    *(
        port_checkpoint,
        depth_interventions,
        verify_port,
        inspect_checkpoint,
        write_card,
        export_checkpoint,
        upcycle_checkpoint,
    ),
]


@pytest.mark.slow
def test_examples(tmp_path):
    BY_NAME["Llama"].base_causal_lm(num_hidden_layers=8).save_pretrained(
        tmp_path / "demo/checkpoints/SmolLM2-135M-Instruct"
    )
    codes = [inspect.getdoc(function).partition("\nExample:\n")[2] for function in FUNCTIONS]
    assert all(codes)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(map(textwrap.dedent, codes))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for folder in ("ported", "exported", "upcycled"):
        assert (tmp_path / folder / "config.json").is_file()
