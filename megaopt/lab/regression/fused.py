"""The variants under test: optimizers of ours, and of other libraries, on a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megaopt import FusedAdam, FusedMuon, GaLoreAdamW
from megaopt.float8 import Float8Weight
from megaopt.float8.shard import Float8Shard
from megaopt.lab.config import (
    FusedVariant,
    GaLoreVariant,
    MuonVariant,
    OptimizerConfig,
    PeerVariant,
    RunConfig,
)
from megaopt.lab.regression.weights import (
    OptimizerWeights,
    ParameterPiece,
    group_pieces,
    whole_pieces,
)


def arguments(config: OptimizerConfig) -> dict[str, Any]:
    """The hyper-parameters, by the names that all have for them."""
    betas = (config.beta1, config.beta2)
    return {"lr": config.learning_rate, "betas": betas, "eps": config.eps}


def fused(model: nn.Module, run: RunConfig, variant: FusedVariant) -> OptimizerWeights:
    """Owns a model's weights, or a rank's shards of them, through FusedAdam."""
    config, in_views = run.optimizer, variant.layout == "groups_and_views"
    pieces = whole_pieces(model) if variant.ranks is None else shard_pieces(model)
    if in_views:
        # two flat views of each parameter, like the shards of a distributed optimizer. They meet at
        # an odd element, so that the second is not aligned to 16 bytes, while the model goes on
        # computing with the whole, aligned weight: its products are those of the other variants
        whole, pieces = pieces, []
        for piece in whole:
            flat = piece.tensor.detach().view(-1)
            middle = min(flat.numel(), flat.numel() // 2 | 1)
            for start, stop in ((0, middle), (middle, flat.numel())):
                view = nn.Parameter(flat[start:stop])
                pieces.append(ParameterPiece(piece.name, piece.source, view, start))
    remainders = variant.masters == "remainders"
    optimizer = FusedAdam(
        group_pieces(pieces, config, ways=2 if in_views else 1),
        **arguments(config),
        dtype=None if remainders else torch.float32,
        master_weights=True if remainders else None,
        store_param_remainders=remainders,
        bias_correction=config.bias_correction,
        adam_w_mode=config.adam_w_mode,
        contract=variant.contract,
        backend=variant.backend,
    )
    if variant.masters != "external":
        return OptimizerWeights(pieces, optimizer)
    # masters of ours, which must stay ours: assigned after construction, as Megatron does
    params = [param for group in optimizer.param_groups for param in group["params"]]
    masters: list[torch.Tensor | None] = []
    for param in params:
        values = param.detach() if param.dtype != torch.float32 else None
        if isinstance(param, Float8Weight):
            values = param.high_precision_initial_value()
            values = (param.dequantize() if values is None else values).float().clone()
        masters.append(None if values is None else values.float())
    optimizer.master_weights = masters

    def look(*_: object) -> None:
        for param, master in zip(params, masters, strict=True):
            if optimizer.state[param]["master_param"] is not master:
                raise RuntimeError("FusedAdam replaced a master of the list it was given")

    optimizer.register_step_post_hook(look)
    return OptimizerWeights(pieces, optimizer)


# --- ranks that share the step: each owns a part of every weight, as ZeRO-1 shards them


@dataclass(frozen=True, slots=True, eq=False)
class ShardPiece(ParameterPiece):
    """A rank's shard of a parameter, of which every rank has the whole, with the same gradient."""

    bounds: Sequence[int] = ()
    """The first elements of the ranks' shards, and the end of the last."""

    def spread(self) -> None:
        """Takes the others' bytes as they lie: of an fp8 weight its codes."""
        source: Any = self.source
        held = source.data8 if isinstance(source, Float8Weight) else source.detach()
        for rank, (start, stop) in enumerate(pairwise(self.bounds)):
            if start < stop:
                dist.broadcast(held.view(-1)[start:stop].view(torch.uint8), rank)
        if isinstance(source, Float8Weight):
            source.values_changed()


def shard_pieces(model: nn.Module) -> list[ParameterPiece]:
    """This rank's shards of each parameter.

    They begin at odd elements, so that they are not aligned, and have shares from 0 up to the
    number of ranks, which take turns, so that some ranks own nothing of a parameter.
    """
    rank, ranks, pieces = dist.get_rank(), dist.get_world_size(), list[ParameterPiece]()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        shares = [(r + number) % (ranks + 1) for r in range(ranks)] if ranks > 1 else [1]
        numel, bounds = parameter.numel(), [0]  # the first elements, and the end of the last
        for upto in accumulate(shares):
            place = numel if upto == sum(shares) else min(numel, numel * upto // sum(shares) | 1)
            bounds.append(place if upto else 0)
        start, stop = bounds[rank : rank + 2]
        if isinstance(parameter, Float8Weight):
            tensor: torch.Tensor = Float8Shard(parameter, start, stop, dist.group.WORLD)
        else:
            tensor = nn.Parameter(parameter.detach().view(-1)[start:stop])
        pieces.append(ShardPiece(name, parameter, tensor, start, bounds))
    return pieces


# --- other optimizers


def transformer_engine(groups: list[dict[str, Any]], config: OptimizerConfig) -> Any:
    """TransformerEngine's FusedAdam with fp32 masters; ImportError where it is not installed."""
    return import_module("transformer_engine.pytorch.optimizers").FusedAdam(
        groups,
        **arguments(config),
        bias_correction=config.bias_correction,
        adam_w_mode=config.adam_w_mode,
        master_weights=True,
    )


LIBRARIES = {"transformer_engine": transformer_engine}


def peer(model: nn.Module, run: RunConfig, variant: PeerVariant) -> OptimizerWeights:
    """Owns a model's weights through another library's optimizer."""
    pieces = whole_pieces(model)
    groups = group_pieces(pieces, run.optimizer)
    return OptimizerWeights(pieces, LIBRARIES[variant.library](groups, run.optimizer))


# --- optimizers of matrices


def numbered_groups(
    pieces: Sequence[ParameterPiece], config: OptimizerConfig, layout: str
) -> list[dict[str, Any]]:
    """Param groups by decay; "groups": each three, from the last parameter on.

    Parameters keep their place in the model as their number.
    """
    is_whole, numbers = layout == "whole", {piece.tensor: n for n, piece in enumerate(pieces)}
    ordered = pieces if is_whole else pieces[::-1]
    groups = group_pieces(ordered, config, ways=1 if is_whole else 3)
    for group in groups:
        group["param_numbers"] = [numbers[param] for param in group["params"]]
    return groups


def galore(model: nn.Module, run: RunConfig, variant: GaLoreVariant) -> OptimizerWeights:
    """Owns a model's weights, or a rank's rows, through GaLoreAdamW's projected gradients."""
    assert run.galore is not None  # as the config was checked
    pieces = whole_pieces(model) if variant.ranks is None else rows_pieces(model)
    optimizer = GaLoreAdamW(
        numbered_groups(pieces, run.optimizer, variant.layout),
        **arguments(run.optimizer),
        **run.galore.model_dump(),
        dtype=torch.float32,
        bias_correction=run.optimizer.bias_correction,
        kernel=variant.kernel,
    )
    return OptimizerWeights(pieces, optimizer)


def muon(model: nn.Module, run: RunConfig, variant: MuonVariant) -> OptimizerWeights:
    """Owns a model's weights, or a rank's rows, through FusedMuon.

    That leaves embeddings and norms to AdamW.
    """
    pieces = whole_pieces(model) if variant.ranks is None else rows_pieces(model)
    for piece in pieces:
        is_embedding = piece.name.endswith("embedding.weight")
        piece.tensor.use_muon = not is_embedding  # type: ignore[attr-defined]  # a mark
    options = arguments(run.optimizer)
    options["adam_eps"] = options.pop("eps")
    optimizer = FusedMuon(
        numbered_groups(pieces, run.optimizer, variant.layout),
        **options,
        adjust_lr_fn="match_rms_adamw",
        dtype=torch.float32,
        precision=variant.precision,
        momentum_buffer_dtype=getattr(torch, variant.momentum, variant.momentum),
        backend=variant.backend,
    )
    return OptimizerWeights(pieces, optimizer)


class RowsPiece(ParameterPiece):
    """A parameter of which each rank has rows: `tensor` is a DTensor."""

    def take_gradient(self) -> None:
        """Gives the tensor this rank's rows of the parameter's gradient."""
        grad = self.source.grad
        self.tensor.grad = None if grad is None else rows_of(grad)

    def spread(self) -> None:
        """Gathers the others' rows."""
        rows: Any = self.tensor.detach()
        self.source.detach().copy_(rows.full_tensor())


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor of which each rank of the default process group has rows."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(tensor.device.type, dist.get_world_size())
    return distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None)


@cache
def mesh_of(device: str, ranks: int) -> Any:
    """The mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (ranks,))


def rows_pieces(model: nn.Module) -> list[ParameterPiece]:
    """This rank's rows of each parameter."""
    return [
        RowsPiece(name, parameter, nn.Parameter(rows_of(parameter)))
        for name, parameter in model.named_parameters()
    ]
