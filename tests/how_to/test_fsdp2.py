"""docs/how-to/fsdp2.py, as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import how_to
import pytest

SCRIPT = Path(__file__).parents[2] / "docs/how-to/fsdp2.py"


def run(ranks, folder):
    """The losses that the script prints."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += ["--nproc-per-node", str(ranks), str(SCRIPT), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.sub(r"(?m)^\[Gloo\] .*$", "", done.stdout)  # torch 2.10's own lines
    return [float(number) for number in said.split()]


@pytest.mark.slow
def test_resumed_on_one_rank_what_two_ranks_saved(on_ranks, tmp_path):
    """Both ranks have the same batches, and means of two equal gradients are exact."""
    straight = run(2, tmp_path)
    assert len(straight) == 6
    assert straight[-1] < straight[0]
    assert on_ranks(1, how_to.train, str(SCRIPT), str(tmp_path)) == [straight[3:]]
