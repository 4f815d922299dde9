"""Stands for Emerging-Optimizers where it is not installed, so that Megatron's own Muon can run.

What Megatron-Core 0.16 and 0.19 import of it, written anew from the mathematics: momentum as an
average, five steps of Newton and Schulz with numbers of bf16, decoupled decay.
"""

import contextlib
import importlib
import sys
from types import ModuleType
from typing import Literal

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
FACTORS = {
    "shape_scaling": lambda rows, columns: max(1, rows / columns) ** 0.5,
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
}


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum, *, weight_decay, scaled_orthogonalize_fn, **others):
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        # of releases 0.2 and 0.1
        self.nesterov = others.get("nesterov", others.get("use_nesterov"))
        assert others["weight_decay_method"] == "decoupled"
        assert others["fp32_matmul_prec"] == "medium"
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _init_group(self, group, skip_non_grad_params=True):
        for param in group["params"]:
            if not self.state[param] and not (skip_non_grad_params and param.grad is None):
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group)

    def _step_one(self, param, group):
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        param.add_(param, alpha=-decay * lr)
        buffer = self.state[param]["momentum_buffer"]
        buffer.lerp_(param.grad, 1 - momentum)
        direction = param.grad.lerp(buffer, momentum) if self.nesterov else buffer
        param.add_(self.orthogonalize(param, direction), alpha=-lr)


def newton_schulz(x, steps, coefficient_type):
    turned = x.size(0) > x.size(1)
    now = torch.nn.functional.normalize(x.mT if turned else x, p=2, dim=(-2, -1), eps=1e-7)
    now, own = now.bfloat16(), SETS[coefficient_type]
    for step in range(steps):
        a, b, c = own[step % len(own)]
        square = now @ now.mT
        now = torch.addmm(now, torch.addmm(square, square, square, beta=b, alpha=c), now, beta=a)
    return now.float().mT if turned else now.float()


def newton_schulz_tp(x, steps, coefficient_type, tp_group, partition_dim=None, **mode):
    assert mode in ({"mode": "duplicated"}, {"tp_mode": "duplicated"})
    if partition_dim is None:
        return newton_schulz(x, steps, coefficient_type)
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(parts, x.contiguous(), tp_group)
    whole = newton_schulz(torch.cat(parts, partition_dim), steps, coefficient_type)
    return whole.chunk(tp_group.size(), partition_dim)[tp_group.rank()]


def modules():
    """Those that Megatron imports, by name."""
    root = "emerging_optimizers"
    registry = {"get_optimizer_name_list": list, "get_optimizer_cls": None}
    muon = {
        "OrthogonalizedOptimizer": OrthogonalizedOptimizer,
        "AdaptiveMuon": OrthogonalizedOptimizer,
        "get_muon_scale_factor": lambda rows, columns, mode: FACTORS[mode](rows, columns),
    }
    utils = {"newton_schulz_tp": newton_schulz_tp, "NSCoeffT": Literal["simple", "quintic"]}
    contents = {
        root: {},
        f"{root}.registry": registry,
        f"{root}.orthogonalized_optimizers": muon,
        f"{root}.orthogonalized_optimizers.muon_utils": utils,
        f"{root}.scalar_optimizers": {"Lion": object},
        f"{root}.soap": {"SOAP": object},
    }
    found = {name: ModuleType(name) for name in contents}
    for name, content in contents.items():
        vars(found[name]).update(content)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(found[parent], last, found[name])
    return found


@contextlib.contextmanager
def megatrons_muon():
    """Within it Megatron's own Muon works: with Emerging-Optimizers, or with what stands for it."""
    if importlib.util.find_spec("emerging_optimizers") is not None:
        yield
        return
    factory = importlib.import_module("megatron.core.optimizer")
    is_16 = not hasattr(factory, "_get_megatron_emerging_optimizer")
    name = "muon" if is_16 else "emerging_optimizers"
    own = importlib.import_module(f"megatron.core.optimizer.{name}")
    taken = () if is_16 else ("_EMERGING_OPTIMIZERS", "_create_emerging_optimizer",
                              "HAVE_EMERGING_OPTIMIZERS")  # fmt: skip
    standing = modules()

    def load():
        importlib.reload(own)
        for each in taken:
            setattr(factory, each, getattr(own, each))

    sys.modules.update(standing)
    try:
        load()
        yield
    finally:
        for each in standing:
            del sys.modules[each]
        load()
