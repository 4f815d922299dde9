"""All kernels compile for a Hopper GPU, where there is none: the interpreter takes more than it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import megaopt.kernels

SUPPORT = Path(__file__).parents[1] / "support"


def kernels():
    """The names of the functions under @jit."""
    folder = Path(megaopt.kernels.__file__).parent
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    return set(re.findall(r"^@jit\b.*\ndef (\w+)", text, re.MULTILINE))


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    """In a process of its own: Triton compiles or interprets, as decided when it is imported."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SUPPORT / "gpu_compiler.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    launched = json.loads(done.stdout.splitlines()[-1])
    assert {each["kernel"] for each in launched} == kernels()
