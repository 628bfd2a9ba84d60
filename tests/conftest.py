import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import hypothesis
import pytest
import torch


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: threads that wait for each other spin
torch.set_num_threads(1)  # tests run in parallel processes
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

from tests.families import FAMILIES, LAYOUTS  # noqa: E402


ROOT = Path(__file__).parent.parent
# What a checkpoint carries as remote code
CODE_FILES = {
    "configuration_attnres.py",
    "depth_attention.py",
    "depth_forms.py",
    "depth_readers.py",
    "modeling_attnres.py",
    "residual_stream.py",
    "sequence_shards.py",
}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request):
    """Config fields of one block layout."""
    return request.param


@pytest.fixture(params=["block", "full"])
def mode(request):
    return {"attn_res_mode": request.param}


@pytest.fixture
def base_checkpoint(family, tmp_path):
    """A tiny base checkpoint as transformers saves it."""
    folder = tmp_path / "base"
    family.base_causal_lm().save_pretrained(folder)
    return folder


@pytest.fixture
def run_isolated(tmp_path):
    """Run Python code in a fresh process that has the installed packages but cannot import this project."""

    def run(code: str, timeout: int = 300, **environment: str) -> str:
        guard = "import importlib.util as u; assert not any(map(u.find_spec, ('modeling_attnres', 'conversion')))\n"
        process = subprocess.run(
            [sys.executable, "-S", "-c", guard + code],  # -S: no editable install
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": sysconfig.get_paths()["purelib"],
                "HF_HOME": str(tmp_path / "hf_home"),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",  # as here: sums are then added up in the same order
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run
