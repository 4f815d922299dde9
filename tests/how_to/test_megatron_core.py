"""docs/how-to/megatron_core.py, as a user starts it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from how_to import needs

pytestmark = needs("megatron", "psutil")
SCRIPT = Path(__file__).parents[2] / "docs/how-to/megatron_core.py"
PAGE = SCRIPT.with_name("megatron.md").read_text(encoding="utf-8")


def run(ranks, folder):
    """The losses that the script prints."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += ["--nproc-per-node", str(ranks), str(SCRIPT), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        start, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(number) for number in done.stdout.split("\n")[-2].split()]


@pytest.mark.slow
def test_what_two_ranks_saved_is_resumed_on_two_and_on_one(tmp_path):
    """Both ranks have the same batches, and means of two equal gradients are exact."""
    straight = run(2, tmp_path)
    assert len(straight) == 6
    assert straight[-1] < straight[0]
    assert run(2, tmp_path) == straight[3:]
    assert run(1, tmp_path) == straight[3:]


def calls(source):
    """What a source calls, by name."""
    nodes = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {ast.unparse(node).rpartition(".")[2] for node in nodes}


def test_the_page_shows_what_the_script_does():
    section = PAGE.split("## A whole script\n")[1].split("\n## ")[0]
    (shown,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert calls(shown) <= calls(SCRIPT.read_text(encoding="utf-8"))
    ours = {"get_megatron_optimizer", "finalize_model_grads", "zero_grad_buffer", "step"}
    assert ours <= calls(shown)
