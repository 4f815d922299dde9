"""All kernels compile for a Hopper GPU, where there is none: the interpreter takes more than it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megaopt.kernels

# a minute on one core
pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"


def kernels():
    """The names of the functions under @jit."""
    folder = Path(megaopt.kernels.__file__).parent
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    return set(re.findall(r"^@jit\b.*\ndef (\w+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What was compiled, and how it was launched again.

    In a process of its own: Triton compiles or interprets, as decided when it is imported.
    """
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    cache = str(tmp_path_factory.mktemp("cache"))
    environment |= {"TRITON_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SUPPORT / "direct_launches.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def test_kernels_compile_for_a_gpu_that_is_not_there(launched):
    assert {each["kernel"] for each in launched[0]} == kernels()


@pytest.mark.parametrize("kernel", ["products_kernel", "back_strips_kernel", "back_blocks_kernel"])
def test_products_are_made_by_tensor_cores_without_spills(kernel, launched):
    found = [each for each in launched[0] if each["kernel"] == kernel]
    assert [each for each in found if each["STACK"] or each["LOCAL"] or not each["HGMMA"]] == []


def test_direct_launches_pass_what_triton_passes(launched):
    launches = launched[1]["launches"]
    assert {each["kernel"] for each in launches} == kernels()
    assert [each for each in launches if not (each["direct"] and each["same"])] == []


def test_triton_looks_at_arguments_that_it_has_another_kernel_for(launched):
    """At the first launch, not at the second; and what is launched is what Triton launches."""
    changes = launched[1]["changes"]
    assert [name for name, (_, again, same) in changes.items() if again or not same] == []
    assert {name for name, (first, _, _) in changes.items() if first} == {
        "8 bytes further",
        "another dtype",
        "no None",
        "None in another's place",
        "wide",
        "huge",
        "a whole factor",
        "no factor",
        "another constant",
        "more warps",
    }


def test_direct_launches_are_seen_by_hooks(launched):
    assert launched[1]["hooked"] == {"names": ["small_kernel"], "direct": True, "before": 1}
