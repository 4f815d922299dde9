"""Prints the way of a step: its functions, their files, and how often it goes from file to file.

    python tools/step_way.py            # a line for each kind of step
    python tools/step_way.py --list     # and the functions

Counted by sys.setprofile in the fifth step, of the reference backend, with new gradients. What a
twin calls to compute does not count, nor do comprehensions and functions outside the package. A
switch is a call from a function in one file to one in another.
"""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import megaopt
from megaopt.float8 import RECIPES, Float8Weight

ROOTS = [Path(megaopt.__file__).parent.resolve()]
ROOTS += [Path(sys.modules["megaopt.kernels"].__path__[0]).resolve()]
SHAPES = [(16, 32), (32,), (8, 16)]
TWINS = ("step", "accumulate", "renew", "cast")
"""Methods of plans that compute."""


class Way:
    """What a step calls of the package."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.switches = 0
        self._below = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """As sys.setprofile calls it."""
        if event not in ("call", "return") or not self._is_counted(frame):
            return
        computes = frame.f_code.co_name in TWINS and "kernels" in file_of(frame)
        if event == "return":
            self._below -= computes
            return
        if not self._below:
            caller = frame.f_back
            while caller is not None and not self._is_counted(caller):
                caller = caller.f_back
            self.switches += caller is not None and file_of(caller) != file_of(frame)
            self.calls.append((file_of(frame), frame.f_code.co_qualname))
        self._below += computes

    @staticmethod
    def _is_counted(frame: FrameType) -> bool:
        is_named = not frame.f_code.co_name.startswith("<")
        return is_named and any(file_of(frame).startswith(str(root)) for root in ROOTS)


def file_of(frame: FrameType) -> str:
    """The file of a function."""
    return frame.f_code.co_filename


def plain(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters of some shapes."""
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def float8() -> list[torch.nn.Parameter]:
    """Weights in fp8 with current scaling."""
    values = [torch.randn(shape).bfloat16() for shape in SHAPES if len(shape) == 2]
    weights = [Float8Weight.from_values(value, RECIPES["current"]) for value in values]
    return [torch.nn.Parameter(weight) for weight in weights]


def kinds() -> dict[str, tuple[Any, dict[str, Any]]]:
    """An optimizer of each kind, and the arguments of its steps."""
    fp32, bf16 = torch.float32, torch.bfloat16
    kept = {"backend": "reference", "lr": 1e-3}
    return {
        "fp32": (megaopt.FusedAdam(plain(fp32), **kept), {}),
        "bf16, fp32 masters": (megaopt.FusedAdam(plain(bf16), dtype=fp32, **kept), {}),
        "the same, clipped": (
            megaopt.FusedAdam(plain(bf16), dtype=fp32, **kept),
            {"clip_norm": 1.0},
        ),
        "fp8 current": (megaopt.FusedAdam(float8(), dtype=fp32, **kept), {}),
        "GaLore": (megaopt.GaLoreAdamW(plain(fp32), rank=4, update_proj_gap=2, **kept), {}),
    }


def way_of(optimizer: Any, arguments: dict[str, Any]) -> Way:
    """The way of its fifth step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in range(5):
        for param in params:
            param.grad = torch.randn(param.shape, dtype=param.dtype)
        way = Way()
        if number == 4:
            sys.setprofile(way)
        optimizer.step(**arguments)
        sys.setprofile(None)
    return way


def main() -> None:
    """Prints a line for each kind of step."""
    torch.manual_seed(0)
    os.environ["MEGAOPT_NATIVE"] = "0"  # wherever it is built, the twin counts
    print(f"{'':20} {'functions':>9} {'files':>5} {'switches':>8} {'calls':>5}")
    for name, (optimizer, arguments) in kinds().items():
        way = way_of(optimizer, arguments)
        functions = list(dict.fromkeys(way.calls))
        files = {file for file, _ in functions}
        row = f"{len(functions):9} {len(files):5} {way.switches:8} {len(way.calls):5}"
        print(f"{name:20} {row}")
        if "--list" in sys.argv:
            for file, function in functions:
                print(f"    {'/'.join(Path(file).parts[-2:])}: {function}")


if __name__ == "__main__":
    main()
