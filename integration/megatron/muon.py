"""Megatron's `--optimizer muon` by FusedMuon: what the config says, and where it gets in."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as factory
from megatron.core.optimizer import layer_wise_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import get_pg_size
from torch.distributed.device_mesh import DeviceMesh

import megaopt
from megaopt.integration.megatron.adam import Shards
from megaopt.integration.megatron.checks import (
    IN_SHARDS,
    WITH_MATRICES,
    check_fields,
    check_matrices,
)
from megaopt.integration.megatron.choices import MUON, Choices
from megaopt.integration.megatron.distributed import (
    MEGATRONS,
    Chained,
    MatrixShards,
    made_of_shards,
    megatrons_own,
    standing_in,
)
from megaopt.integration.megatron.whole import LayerWise, Meshes, WholeFloat16, WholeFloat32
from megaopt.kernels.muon.orthogonal import COEFFICIENTS, MOST_STEPS
from megaopt.kernels.refusals import one_of, refuse
from megaopt.muon import SPLIT_SIZES
from megaopt.options.checks import DECAY, number

CONTRACTS = ("ieee", "eo")
SCALES = {
    "spectral": "spectral",
    "unit_rms_norm": "spectral_unclamped",
    "shape_scaling": "original",
}
"""FusedMuon's adjust_lr_fn for each muon_scale_mode."""
MATCHED = ("spectral", 0.2)
"""The scale mode and the extra factor that are adjust_lr_fn="match_rms_adamw" here."""
BLOCKWISE, DUPLICATED = "blockwise", "duplicated"
QKV = ".linear_qkv.weight"


class ShardMuon(Shards, megaopt.FusedMuon):
    """megaopt.FusedMuon over whole weights of Megatron's."""

    meshes: Meshes
    """The ranks that bring their parts of a matrix together; none where each steps its own."""
    copies: Mapping[torch.Tensor, Any]
    """The process group of the ranks that have copies of a weight, and divide the work."""


@dataclass(frozen=True)
class Recipe:
    """The part of Megatron's config about Muon, checked; `options` are FusedMuon's."""

    options: dict[str, Any]
    splits_qkv: bool
    tp_mode: str
    is_layer_wise: bool


def recipe_of(config: Any) -> Recipe:
    """Reads an OptimizerConfig; raises ValueError for a field that is out of its range."""
    one_of("config.optimizer", config.optimizer, MUON)
    number("config.muon_momentum", config.muon_momentum, DECAY)
    steps = config.muon_num_ns_steps
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        refuse("config.muon_num_ns_steps", f"a whole number from 1 to {MOST_STEPS}", steps)

    # names of these fields differ between releases
    nesterov = "muon_nesterov" if hasattr(config, "muon_nesterov") else "muon_use_nesterov"
    coefficients = getattr(config, "muon_coefficient_type", "quintic")  # not in 0.16

    # fields whose values FusedMuon has no more of than these; some are not in all releases
    allowed = {
        nesterov: (True, False),
        "muon_scale_mode": tuple(SCALES),
        "muon_fp32_matmul_prec": ("medium",),
        "muon_tp_mode": (BLOCKWISE, DUPLICATED),
        "muon_split_qkv": (True, False),
        "muon_scalar_optimizer": ("adam",),
    }
    for name, values in allowed.items():
        if hasattr(config, name):
            one_of(f"config.{name}", getattr(config, name), values)
    one_of("config.muon_coefficient_type", coefficients, COEFFICIENTS)
    own_layer_wise = getattr(config, "use_layer_wise_distributed_optimizer", False)
    mode, factor = config.muon_scale_mode, config.muon_extra_scale_factor
    if (mode, factor) != MATCHED and factor != 1.0:
        refuse(
            "config.muon_extra_scale_factor",
            f"1.0, or {MATCHED[1]} with config.muon_scale_mode={MATCHED[0]!r}",
            factor,
        )

    # the same numbers under FusedMuon's names
    options = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.muon_momentum,
        "nesterov": getattr(config, nesterov),
        "ns_coefficients": coefficients,
        "ns_steps": steps,
        "adjust_lr_fn": "match_rms_adamw" if (mode, factor) == MATCHED else SCALES[mode],
        "betas": (config.adam_beta1, config.adam_beta2),
        "adam_eps": config.adam_eps,
    }
    is_layer_wise = own_layer_wise or config.optimizer == "dist_muon"
    return Recipe(options, config.muon_split_qkv, config.muon_tp_mode, is_layer_wise)


# --- what it does not go with


def check(config: Any, recipe: Recipe, model_chunks: Sequence[Any], choices: Choices) -> None:
    """Raises ValueError where Megatron's settings, its parameters or choices are not supported."""
    # the choices that only Adam alone has
    one_of("contract", choices.contract, CONTRACTS)
    one_of("mode", choices.mode, ("main_shards",))
    chosen = ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype")
    for name in chosen:
        one_of(name, getattr(choices, name), (None, torch.float32))
    condition = f"config.optimizer={config.optimizer!r}"
    if choices.galore is not None:
        refuse("galore", f"None with {condition}", choices.galore)

    # fields of the config that matrices, or their owners, exclude
    fields: list[tuple[str, object, str]] = [
        ("fp16", False, "as in Megatron"),
        ("loss_scale", None, "Megatron unscales no gradients of Muon's"),
        *WITH_MATRICES,
    ]
    if recipe.is_layer_wise:
        reason = "the layer-wise optimizer makes the fp32 masters of bf16 weights alone"
        fields.append(("bf16", True, reason))
    # the same optimizer steps the other parameters of the shards, by AdamW alone
    if is_cut(config, recipe, model_chunks):
        fields.append(IN_SHARDS)
    check_fields(config, fields, condition)
    for chunk in model_chunks:
        check_matrices(chunk, "Muon")
        # (DDP's, the config's): whether gradients are reduced into shards
        shares = chunk.ddp_config.use_distributed_optimizer, config.use_distributed_optimizer
        is_alike = shares[0] == shares[1] and not (shares[0] and recipe.is_layer_wise)
        if not has_whole_layout(chunk, recipe) and not is_alike:
            raise ValueError(
                "use_distributed_optimizer must be the same in config and DistributedDataParallel, "
                "and False with a layer-wise optimizer (after tag_params_for_buffer_routing, and "
                "with the full_param_layout of LayerWiseDistributedOptimizer given to "
                f"DistributedDataParallel, True there), got {shares[1]} and {shares[0]}"
            )
        # Megatron of these releases would step such a matrix by Muon all the same
        for name, param in chunk.named_parameters():
            is_adams = getattr(param, "use_muon", None) is False
            if is_adams and param.requires_grad and param.dim() == 2:
                raise ValueError(
                    f"parameter {name!r} must not be marked use_muon=False, which Megatron's "
                    "releases up to 0.19 do not know; is_embedding_or_output_parameter=True leaves "
                    "it to Adam"
                )


def mark_qkv(recipe: Recipe, chunks: Sequence[Any]) -> None:
    """Says of each QKV weight in how many rows its parts come, or that it is one matrix.

    Not by Megatron's own function, which goes by the config of the whole model (in 0.16 without the
    gate): layers may have others. Raises ValueError where the parts are not known.
    """
    # QKV weights, fp32 or 16 bits, [rows of all query groups of this rank, hidden]
    named = [
        (name, param, chunk.get_submodule(name.removesuffix(QKV)))
        for chunk in chunks
        for name, param in chunk.named_parameters()
        if name.endswith(QKV) and param.dim() == 2 and param.requires_grad
    ]
    # all sizes are known before the first mark is set
    sizes_by_param: dict[int, tuple[int, ...]] = {}
    for name, param, attention in named if recipe.splits_qkv else ():
        what = f"config.muon_split_qkv must be False with parameter {name!r}, got True: "
        if not isinstance(attention, SelfAttention):
            raise ValueError(
                f"{what}its parts are not known, as its {type(attention).__name__} is not "
                "Megatron's SelfAttention"
            )
        # rows of a query group: heads of q, as many of gate where there is one, a head of k, of v
        config: Any = attention.config
        heads, groups = config.num_attention_heads, config.num_query_groups
        size, has_gate = config.kv_channels, getattr(config, "attention_output_gate", False)
        sizes = (*[heads // groups * size] * (1 + has_gate), size, size)
        # this tensor-parallel rank has some of the query groups, whole
        local = attention.num_query_groups_per_partition
        if param.shape[0] != local * sum(sizes):
            raise ValueError(
                f"{what}it has {param.shape[0]} rows, and {local} query groups of {list(sizes)} "
                f"rows (num_attention_heads={heads}, num_query_groups={groups}, "
                f"kv_channels={size}, attention_output_gate={has_gate}) have {local * sum(sizes)}"
            )
        sizes_by_param[id(param)] = sizes
    for _, param, _ in named:
        setattr(param, SPLIT_SIZES, sizes_by_param.get(id(param)))


def has_whole_layout(chunk: Any, recipe: Recipe) -> bool:
    """Returns whether DDP keeps each matrix on one rank, as the layer-wise optimizer needs it."""
    layout = getattr(chunk, "full_param_layout", None)
    keys = getattr(layout, "layouts", {})
    name = "is_managed_by_layer_wise_optimizer"
    return recipe.is_layer_wise and any(getattr(key, name, False) for key in keys)


def is_cut(config: Any, recipe: Recipe, chunks: Sequence[Any]) -> bool:
    """Returns whether shards of the ordinary distributed optimizer cut the matrices."""
    return bool(config.use_distributed_optimizer) and not any(
        has_whole_layout(chunk, recipe) for chunk in chunks
    )


def meshes_of(recipe: Recipe, choices: Choices, chunks: Sequence[Any], groups: Any) -> Meshes:
    """The tensor-parallel ranks that bring their parts of a matrix together.

    None, with a warning, where each makes its own part orthogonal. Raises ValueError where Muon
    cannot step what they share.
    """
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    params = [param for chunk in chunks for param in chunk.parameters()]
    # process groups by whether a parameter is an expert's (True) or dense (False)
    names = {False: "tp"}
    # experts have tensor parallelism of their own
    if not all(getattr(param, "allreduce", True) for param in params):
        names[True] = "expt_tp"
    sharing = {key: getattr(groups, name) for key, name in names.items()}
    sharing = {key: group for key, group in sharing.items() if get_pg_size(group) > 1}
    if not sharing:
        return {}

    # duplicated: these ranks bring their parts together, for the update of the whole matrix
    if recipe.tp_mode == DUPLICATED:
        kind = params[0].device.type
        return {key: DeviceMesh.from_group(group, kind) for key, group in sharing.items()}

    # blockwise: no rank sends anything, at the price of another update
    sizes = [get_pg_size(group) for group in sharing.values()]
    warnings.warn(
        "config.muon_tp_mode='blockwise' makes each tensor-parallel rank's part of a matrix "
        "orthogonal by itself, and scales it by the part's shape: updates are other ones than of "
        f"whole matrices, and change with the number of ranks, {max(sizes)} here",
        stacklevel=4,
    )
    return {}


def copies_of(
    recipe: Recipe, choices: Choices, chunks: Sequence[Any]
) -> dict[torch.Tensor, dist.ProcessGroup]:
    """Returns for each weight the data-parallel ranks that step all of it, and divide the work.

    None where the layer-wise optimizer gives weights to ranks, or where it was not chosen.
    """
    if recipe.is_layer_wise or not choices.divides_matrices:
        return {}
    # the very ranks over which DDP adds up gradients: of experts other ones
    buffers = [
        buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    return {param: buffer.data_parallel_group for buffer in buffers for param in buffer.params}


# --- the optimizers


def make_muon(
    groups: list[dict[str, Any]],
    recipe: Recipe,
    choices: Choices,
    meshes: Meshes,
    copies: Mapping[torch.Tensor, Any],
    has_all: bool = False,
) -> ShardMuon:
    """FusedMuon of Megatron's groups.

    Args:
        groups: of matrices.
        recipe: what the config says.
        choices: megaopt's options.
        meshes: the ranks that share parts of matrices.
        copies: the ranks that divide the work on whole weights.
        has_all: the groups have all parameters, of which Adam's are marked.
    """
    # True: all are matrices; None: shapes and marks of the parameters decide
    for group in groups:
        group["use_muon"] = None if has_all else True
    muon = ShardMuon(
        groups,
        **recipe.options,
        contract=choices.contract,  # type: ignore[arg-type]  # `check` knows
        backend=choices.backend,
        dtype=torch.float32,  # masters, which Megatron makes
        use_decoupled_grad=True,
        # Megatron's own gathers write the weights that its masters made
        on_external_write="ignore",
    )
    muon.meshes, muon.copies = meshes, copies
    return muon


@contextlib.contextmanager
def rebound(names: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Lets names of modules stand for other values within it."""
    with contextlib.ExitStack() as stack:
        for module, name, value in names:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def common_names(choices: Choices) -> list[tuple[Any, str, Any]]:
    """Names that both releases have, with our values in Megatron's place."""
    # for Adam's parameters: ours for the distributed optimizer's shards, and Megatron's own for
    # whole weights
    sharded = made_of_shards(choices)
    make = getattr(sharded, MEGATRONS)

    def adam_beside(config: Any, *args: Any, **kwargs: Any) -> Any:
        # a layer-wise optimizer asks for it with a config of the distributed optimizer, where DDP
        # has a layout of whole matrices
        if config.use_distributed_optimizer:
            return sharded(config, *args, **kwargs)
        # whole weights: Megatron's own function makes groups, of our Adam
        factory.Adam = choices.make_adam
        return make(config, *args, **kwargs)

    return [
        (factory, "_get_megatron_optimizer_based_on_param_groups", adam_beside),
        (factory, "Adam", choices.make_adam),
        (factory, "USING_PYTORCH_OPTIMIZER", False),
        (factory, "Float16OptimizerWithFloat16Params", WholeFloat16),
        (layer_wise_optimizer, "Float16OptimizerWithFloat16Params", WholeFloat16),
    ]


def make_of_shards(
    config: Any, recipe: Recipe, choices: Choices, model_chunks: list[Any], **arguments: Any
) -> Any:
    """Megatron's optimizer of the distributed optimizer's shards, all stepped by one FusedMuon."""
    # parts of tensor-parallel parts: two kinds of cuts through one matrix
    if meshes_of(recipe, choices, model_chunks, arguments["pg_collection"]):
        raise ValueError(
            f"config.muon_tp_mode must be {BLOCKWISE!r} beside use_distributed_optimizer=True with "
            f"tensor parallelism, got {DUPLICATED!r}: the distributed optimizer's shards are cut "
            "out of tensor-parallel parts; the layer-wise optimizer, and "
            "use_distributed_optimizer=False, go with it"
        )

    # all parameters, Adam's too, are of one FusedMuon: ranks bring shards of matrices together
    def make_adam(params: list[dict[str, Any]], **kwargs: Any) -> ShardMuon:
        return make_muon(params, recipe, choices, {}, {}, has_all=True)

    # Megatron takes its own path for Adam with the distributed optimizer, on a copy of the config
    adam_config = copy.copy(config)
    adam_config.optimizer = "adam"
    with rebound(standing_in(megatrons_own(), make_adam, MatrixShards)):
        return factory.get_megatron_optimizer(adam_config, model_chunks, **arguments)


def get_muon_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
) -> Any:
    """Megatron's optimizer where its config names Muon; within `replacements`."""
    # releases after 0.16 call the replaced function below this one; 0.16 has a function for Muon
    if hasattr(factory, EMERGING):
        make = factory.get_megatron_optimizer
    else:
        make = getattr(importlib.import_module(MODULE_OF_16), OF_16)
    options = {"use_gloo_process_groups": use_gloo_process_groups, "pg_collection": pg_collection}
    return make(config, model_chunks, config_overrides, **options)


def replacements(choices: Choices) -> list[tuple[Any, str, Any]]:
    """Modules, names in them, and what these are to be while Megatron makes an optimizer."""
    # Adam's parameters beside Muon's: under ieee where Muon's contract is "eo"
    adams = replace(choices, contract=choices.adam_contract)
    if hasattr(factory, EMERGING):
        return [(factory, EMERGING, _emerging(choices, adams))]
    module = importlib.import_module(MODULE_OF_16)
    replacement, original = _of_16(module, choices, adams), getattr(module, OF_16)
    # Megatron's training has it by name
    modules = [holder for holder in sys.modules.values() if isinstance(holder, ModuleType)]
    holders = [holder for holder in modules if vars(holder).get(OF_16) is original]
    return [(holder, OF_16, replacement) for holder in holders]


EMERGING = "_get_megatron_emerging_optimizer"
"""The function of releases after 0.16."""
MODULE_OF_16, OF_16 = "megatron.core.optimizer.muon", "get_megatron_muon_optimizer"


def _emerging(choices: Choices, adams: Choices) -> Callable[..., Any]:
    megatrons = getattr(factory, EMERGING)
    megatrons = getattr(megatrons, MEGATRONS, megatrons)  # within another's block

    def emerging(
        config: Any,
        model_chunks: list[Any],
        config_overrides: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        # other emerging optimizers stay Megatron's
        if config.optimizer not in MUON:
            return megatrons(config, model_chunks, config_overrides, pg_collection)
        # the config is checked before the first mark is set on a parameter
        recipe = recipe_of(config)
        check(config, recipe, model_chunks, choices)
        mark_qkv(recipe, model_chunks)
        # the ordinary distributed optimizer cuts matrices
        if is_cut(config, recipe, model_chunks):
            arguments = {"config_overrides": config_overrides, "pg_collection": pg_collection}
            return make_of_shards(config, recipe, choices, model_chunks, **arguments)

        # whole matrices: which ranks share parts, and which have copies and divide the work
        meshes = meshes_of(recipe, choices, model_chunks, pg_collection)
        copies = copies_of(recipe, choices, model_chunks)

        # Megatron's create function returns an optimizer and what makes its states: ours does
        def create(config: Any, groups: Any, *args: Any) -> tuple[Any, Any]:
            return make_muon(groups, recipe, choices, meshes, copies), lambda *args, **kwargs: None

        # names in Megatron's module, while it makes groups and chains their optimizers
        names = [
            *common_names(adams),
            (factory, "HAVE_EMERGING_OPTIMIZERS", True),
            (factory, "_create_emerging_optimizer", create),
            (factory, "FP32Optimizer", WholeFloat32),
            (factory, "ChainedOptimizer", Chained),
            (factory, "LayerWiseDistributedOptimizer", LayerWise),
        ]
        with rebound(names):
            return megatrons(config, model_chunks, config_overrides, pg_collection)

    setattr(emerging, MEGATRONS, megatrons)
    return emerging


def _of_16(module: Any, choices: Choices, adams: Choices) -> Callable[..., Any]:
    megatrons = getattr(module, OF_16)
    megatrons = getattr(megatrons, MEGATRONS, megatrons)

    def muon_optimizer(
        config: Any,
        model_chunks: list[Any],
        config_overrides: Any = None,
        use_gloo_process_groups: bool = True,
        layer_wise_distributed_optimizer: bool = False,
        pg_collection: Any = None,
    ) -> Any:
        # layer-wise by its name in config, or by the argument of release 0.16
        recipe = recipe_of(config)
        recipe = replace(
            recipe, is_layer_wise=recipe.is_layer_wise or layer_wise_distributed_optimizer
        )
        check(config, recipe, model_chunks, choices)
        mark_qkv(recipe, model_chunks)
        # the ordinary distributed optimizer cuts matrices
        if is_cut(config, recipe, model_chunks):
            arguments = {
                "config_overrides": config_overrides,
                "use_gloo_process_groups": use_gloo_process_groups,
                "pg_collection": pg_collection,
            }
            return make_of_shards(config, recipe, choices, model_chunks, **arguments)

        # whole matrices: which ranks share parts, and which have copies and divide the work
        meshes = meshes_of(recipe, choices, model_chunks, pg_collection)
        copies = copies_of(recipe, choices, model_chunks)

        def create(groups: Any, **kwargs: Any) -> Any:
            return make_muon(groups, recipe, choices, meshes, copies)

        # layer-wise, it takes optimizers out of this before it gives them masters
        fp32 = FP32Optimizer if recipe.is_layer_wise else WholeFloat32
        names = [
            *common_names(adams),
            (factory, "FP32Optimizer", fp32),
            (factory, "ChainedOptimizer", ChainedOptimizer),  # taken apart again
            (module, "HAVE_EMERGING_OPTIMIZERS", True),
            (module, "TensorParallelMuon", create),
            (module, "Float16OptimizerWithFloat16Params", WholeFloat16),
            (module, "FP32Optimizer", fp32),
            (module, "ChainedOptimizer", Chained),
            (module, "LayerWiseDistributedOptimizer", LayerWise),
        ]
        config_copy = copy.copy(config)  # which it writes into
        with rebound(names):
            return megatrons(
                config_copy,
                model_chunks,
                config_overrides,
                use_gloo_process_groups,
                recipe.is_layer_wise,
                pg_collection,
            )

    setattr(muon_optimizer, MEGATRONS, megatrons)
    return muon_optimizer
