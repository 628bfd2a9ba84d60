"""Programs in several processes, as torchrun starts them."""

import os
import subprocess
import sys

from tests.conftest import ROOT


def launch(*program, ranks: int = 2) -> None:
    """Run a program in several processes."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            *map(str, program),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
