"""Stands for Emerging-Optimizers where it is not installed, so that Megatron's own Muon can run.

It has what Megatron-Core 0.16 and 0.19 import of it, written anew from the mathematics: momentum as
an average, steps of Newton and Schulz with numbers of bf16, decoupled decay.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

SETS = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}
REGISTRIES = ("registry", "scalar_optimizers", "soap")
FACTORS: dict[str, Callable[[int, int], float]] = {
    "shape_scaling": lambda rows, columns: float(max(1, rows / columns) ** 0.5),
    "spectral": lambda rows, columns: float(max(rows, columns) ** 0.5),
    "unit_rms_norm": lambda rows, columns: float((rows / columns) ** 0.5),
}


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum, `orthogonalize` of the direction, decoupled decay; of releases 0.1 and 0.2."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        *,
        weight_decay: float,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        **options: Any,
    ) -> None:
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        self.nesterov = options.get("nesterov", options.get("use_nesterov"))
        assert options["weight_decay_method"] == "decoupled"
        assert options["fp32_matmul_prec"] == "medium"
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _init_group(self, group: Any, skip_non_grad_params: bool = True) -> None:
        for param in group["params"]:
            if not self.state[param] and not (skip_non_grad_params and param.grad is None):
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def orthogonalize(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The update of a direction; Megatron's subclass has it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss
        """Steps each parameter that has a gradient."""
        for group in self.param_groups:
            self._init_group(group)
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            for param in (param for param in group["params"] if param.grad is not None):
                param.add_(param, alpha=-decay * lr)
                buffer = self.state[param]["momentum_buffer"]
                buffer.lerp_(param.grad, 1 - momentum)
                direction = param.grad.lerp(buffer, momentum) if self.nesterov else buffer
                param.add_(self.orthogonalize(param, direction), alpha=-lr)


def newton_schulz(x: torch.Tensor, steps: int, coefficient_type: str) -> torch.Tensor:
    """A matrix made orthogonal, fp32."""
    turned = x.size(0) > x.size(1)
    normal: Any = torch.nn.functional.normalize  # takes several dimensions
    now = normal(x.mT if turned else x, p=2, dim=(-2, -1), eps=1e-7)
    now, coefficients = now.bfloat16(), SETS[coefficient_type]
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        square = now @ now.mT
        now = torch.addmm(now, torch.addmm(square, square, square, beta=b, alpha=c), now, beta=a)
    matrix: torch.Tensor = now.float()
    return matrix.mT if turned else matrix


def newton_schulz_tp(
    x: torch.Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: Any,
    partition_dim: int | None = None,
    **mode: str,
) -> torch.Tensor:
    """This rank's part of a matrix made orthogonal, of the parts of all ranks, or of its own."""
    assert mode in ({"mode": "duplicated"}, {"tp_mode": "duplicated"})
    if partition_dim is None:
        return newton_schulz(x, steps, coefficient_type)
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(parts, x.contiguous(), tp_group)
    whole = newton_schulz(torch.cat(parts, partition_dim), steps, coefficient_type)
    part: torch.Tensor = whole.chunk(tp_group.size(), partition_dim)[tp_group.rank()]
    return part


@contextlib.contextmanager
def megatrons_muon() -> Iterator[None]:
    """Within it Megatron's own Muon works: with Emerging-Optimizers, or with what stands for it."""
    if find_spec("emerging_optimizers") is not None:
        yield
        return
    factory = importlib.import_module("megatron.core.optimizer")
    is_16 = not hasattr(factory, "_get_megatron_emerging_optimizer")
    name = "muon" if is_16 else "emerging_optimizers"
    muon_module = importlib.import_module(f"megatron.core.optimizer.{name}")
    # one module with all that Megatron takes of several
    root = "emerging_optimizers"
    orthogonalized, module = f"{root}.orthogonalized_optimizers", ModuleType(root)
    vars(module).update(
        OrthogonalizedOptimizer=OrthogonalizedOptimizer,
        AdaptiveMuon=OrthogonalizedOptimizer,
        get_muon_scale_factor=lambda rows, columns, mode: FACTORS[mode](rows, columns),
        newton_schulz_tp=newton_schulz_tp,
        NSCoeffT=Literal["simple", "quintic"],
        get_optimizer_name_list=list,
        get_optimizer_cls=None,
        Lion=object,
        SOAP=object,
    )
    parts = (f"{orthogonalized}.muon_utils", *(f"{root}.{part}" for part in REGISTRIES))
    modules = dict.fromkeys((root, orthogonalized, *parts), module)
    names = ("_EMERGING_OPTIMIZERS", "_create_emerging_optimizer", "HAVE_EMERGING_OPTIMIZERS")

    def load() -> None:
        importlib.reload(muon_module)
        for attribute in () if is_16 else names:
            setattr(factory, attribute, getattr(muon_module, attribute))

    sys.modules.update(modules)
    try:
        load()
        yield
    finally:
        for module_name in modules:
            del sys.modules[module_name]
        load()


def make_muon(config: Any, chunk: Any, is_layer_wise: bool) -> Any:
    """Megatron's own optimizer of a model chunk, as its training asks for one with Muon."""
    factory = importlib.import_module("megatron.core.optimizer")
    with megatrons_muon():
        if hasattr(factory, "_get_megatron_emerging_optimizer"):
            return factory.get_megatron_optimizer(config, [chunk])
        make = importlib.import_module("megatron.core.optimizer.muon").get_megatron_muon_optimizer
        return make(config, [chunk], layer_wise_distributed_optimizer=is_layer_wise)
