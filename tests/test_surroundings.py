"""The settings of a shell or a launcher decide no test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHELL = {
    "FORCE_COLOR": "1",
    "COLUMNS": "30",
    "TRITON_INTERPRET": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "TZ": "Pacific/Kiritimati",
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}
LAUNCHER = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def passes(settings, *tests):
    without = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-q", *without]
    done = subprocess.run(
        [*command, *(str(HERE / test) for test in tests)],
        env={**os.environ, **settings}, cwd=HERE.parent, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_shell():
    table = "test_table_has_figures_and_no_speed_for_a_failed_case"
    passes(
        SHELL,
        f"megaopt/lab/bench/test_bench_report.py::{table}",
        "kernels/test_scales.py::test_steps_in_a_row_are_the_twins",
    )


@pytest.mark.slow
def test_a_launcher():
    """Trainers ask the environment for the ranks that they are to wait for."""
    passes(LAUNCHER, "how_to/test_hugging_face.py")
