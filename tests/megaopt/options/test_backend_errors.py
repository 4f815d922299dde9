"""A backend that does not work here says why, and the other one serves."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from megaopt import FusedAdam


def test_triton_on_a_device_without_kernels_is_refused():
    with pytest.raises(
        RuntimeError, match=r"backend='triton' .*parameter 0 of group 0 on meta: .*'meta'"
    ):
        FusedAdam([torch.zeros(3, device="meta")], backend="triton")


def python(code, **environment):
    """Runs code in a fresh Python; gives what it printed."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_without_triton_the_reference_serves_and_triton_says_why():
    """As on macOS: the numbers are those of a run with Triton, without its interpreter."""
    code = """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    raise ModuleNotFoundError("No module named 'triton'", name="triton")
        {block}
        import torch
        from megaopt import FusedAdam
        param = torch.nn.Parameter(torch.linspace(-1, 1, 7).bfloat16())
        optimizer = FusedAdam([param], dtype=torch.float32, exp_avg_dtype=torch.float16)
        for step in range(3):
            param.grad = torch.full((7,), 0.1 + step).bfloat16()
            optimizer.step()
        print(optimizer.get_unscaled_state(param, "master_param").view(torch.int32).tolist())
        try:
            FusedAdam([param], backend="triton")
        except RuntimeError as error:
            print(error)
        print("triton" in sys.modules)
    """
    without = python(code.replace("{block}", "sys.meta_path.insert(0, Blocked())")).splitlines()
    installed = python(code.replace("{block}", "")).splitlines()
    assert without[0] == installed[0]
    assert "Triton cannot be imported (No module named 'triton')" in without[1]
    assert "set TRITON_INTERPRET=1 before megaopt is imported" in installed[1]
    for message in (without[1], installed[1]):
        assert "backend='triton' does not work for parameter 0 of group 0 on cpu" in message
        assert "backend='reference' works everywhere" in message
    assert without[2] == "False"
    assert installed[2] == "True"
