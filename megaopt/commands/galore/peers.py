"""What GaLoreAdamW's step is timed beside: its request's reference, compiled, and galore_torch."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import Parameter

from megaopt.commands.bench.peers import SHARED
from megaopt.commands.galore.errors import Setup
from megaopt.kernels.matrix.galore import RIGHT
from megaopt.kernels.matrix.launch import why_not_kernel
from megaopt.kernels.matrix.products import BF16, TF32

COMPILED, GALORE_TORCH = "compiled", "galore_torch"
PEERS = (COMPILED, GALORE_TORCH)
BETAS, EPS = (0.9, 0.999), 1e-6
PACKAGES = ("galore_torch", "transformers")


def is_there(setup: Setup) -> bool:
    """Whether there is such a case: galore_torch's products are of its weights' dtype."""
    if setup.kernel != GALORE_TORCH:
        return True
    is_plain = setup.grad is None and setup.moments == "float32"
    return is_plain and (setup.precision == BF16) == (setup.weights == "bfloat16")


def why_not_peer(name: str, device: torch.device) -> str | None:
    """The reason why a peer does not run on a device; None where it does."""
    if name == COMPILED:
        return why_not_kernel("compiled", device)
    missing = [each for each in PACKAGES if each not in sys.modules and find_spec(each) is None]
    return f"it needs {', '.join(missing)}" if missing else None


def reference(
    grad: torch.Tensor,
    projection: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    param: torch.Tensor,
    weight: torch.Tensor,
    right: bool,
) -> None:
    """GaLore's pull request's reference: projection, Adam, back-projection and update, in place.

    Products are of the dtype of grad [m, n] and projection, rounded by torch's global settings;
    moments and param [m, n] are fp32. weight: param in 16 bits, or param itself.
    """
    low = (grad @ projection.mT if right else projection.mT @ grad).float()
    exp_avg.mul_(BETAS[0]).add_(low, alpha=1 - BETAS[0])
    exp_avg_sq.mul_(BETAS[1]).addcmul_(low, low, value=1 - BETAS[1])
    direction = (exp_avg / (exp_avg_sq.sqrt() + EPS)).to(projection.dtype)
    back = direction @ projection if right else projection @ direction
    param.add_(back, alpha=-SHARED["lr"])
    if weight is not param:
        weight.copy_(param)


class Compiled:
    """`reference` of each matrix, as the pull request compiles it: fullgraph, max-autotune."""

    def __init__(self, params: Sequence[Parameter], setup: Setup) -> None:
        """Makes states and projections, random ones: no step makes one."""
        self._setup = setup
        self.state: dict[Parameter, dict[str, Any]] = {param: {} for param in params}
        self._step = torch.compile(reference, fullgraph=True, mode="max-autotune", dynamic=False)
        dtype = torch.bfloat16 if setup.precision == BF16 else torch.float32
        for param in params:
            own, low = self.state[param], setup.low_rank.low_shape(param.shape)
            own["exp_avg"] = torch.zeros(low, device=param.device)
            own["exp_avg_sq"] = torch.zeros_like(own["exp_avg"])
            own["projection"] = _projection(setup, param, dtype)
            is_plain = param.dtype == torch.float32
            own["master_param"] = None if is_plain else param.detach().float()

    @torch.no_grad()
    def step(self) -> None:
        """One step of every matrix."""
        with _tf32(self._setup.precision == TF32), warnings.catch_warnings():
            # the compiler advises TF32 where fp32 was asked for
            warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)
            for param, own in self.state.items():
                weight = param.detach()
                projection, master = own["projection"], own["master_param"]
                grad = getattr(param, self._setup.grad_name).to(projection.dtype)
                tensors = (grad, projection, own["exp_avg"], own["exp_avg_sq"])
                right = self._setup.low_rank.side == RIGHT
                self._step(*tensors, weight if master is None else master, weight, right)


class GaLoreTorch:
    """galore_torch's AdamW, without masters, in the dtype of the weights."""

    def __init__(self, params: Sequence[Parameter], setup: Setup) -> None:
        """Makes galore_torch's optimizer, and its projections, which would take an SVD each."""
        own: dict[str, Any] = {"rank": setup.rank, "update_proj_gap": 2**30, "scale": 1.0}
        own["proj_type"] = setup.proj_type
        module = _adamw()
        group = {"params": list(params), **own}
        self._own = module.AdamW([group], **SHARED, no_deprecation_warning=True)
        self.state, self._tf32 = self._own.state, setup.precision == TF32
        for param in params:
            projector = module.GaLoreProjector(**own)
            projector.ortho_matrix = _projection(setup, param, param.dtype)
            self.state[param] |= {"step": 1, "projector": projector}

    def step(self) -> None:
        """One step of every matrix."""
        with _tf32(self._tf32):
            self._own.step()


def peer(params: Sequence[Parameter], setup: Setup) -> Any:
    """The peer that a case names, of these parameters."""
    return (Compiled if setup.kernel == COMPILED else GaLoreTorch)(params, setup)


def _projection(setup: Setup, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A random one, whose rows or columns are about as long as those of an orthonormal one."""
    size = setup.low_rank.projection_shape(param.shape)
    return torch.randn(size, device=param.device).div_(max(size) ** 0.5).to(dtype)


@contextmanager
def _tf32(is_on: bool) -> Iterator[None]:
    """Products of fp32 numbers in TF32, or not, by torch's own switch."""
    place: Any = torch.backends.cuda.matmul
    before = place.fp32_precision
    place.fp32_precision = TF32 if is_on else "ieee"
    try:
        yield
    finally:
        place.fp32_precision = before


def _adamw() -> Any:
    """The module galore_torch.adamw; the package's own __init__ wants more than AdamW does."""
    if "galore_torch" not in sys.modules:
        package, spec = types.ModuleType("galore_torch"), find_spec("galore_torch")
        assert spec is not None
        package.__path__, package.__spec__ = list(spec.submodule_search_locations or ()), spec
        sys.modules["galore_torch"] = package
    return importlib.import_module("galore_torch.adamw")
