"""megaopt's fused step inside Megatron-Core's distributed optimizer.

    from megaopt.integration.megatron import get_megatron_optimizer

in the place of megatron.core.optimizer's is all it takes. Megatron-Core is imported by the call.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from megaopt.integration.megatron.checks import check_arguments
from megaopt.integration.megatron.choices import MUON, Choices
from megaopt.kernels.refusals import one_of

__all__ = ["SUPPORTED", "get_megatron_optimizer", "plugged_in"]

SUPPORTED = ("0.16.1", "0.19.2")
"""The releases of megatron-core whose insides this was written against and tested with."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: list[Any],
    *args: Any,
    mode: str = "main_shards",
    contract: str = "ieee",
    backend: str = "auto",
    exp_avg_dtype: torch.dtype | str | None = None,
    exp_avg_sq_dtype: torch.dtype | str | None = None,
    master_weight_dtype: torch.dtype | str | None = None,
    store_param_remainders: bool | None = None,
    round_scaled_grads: bool | None = None,
    seed: int = 0,
    capturable: bool | None = None,
    divides_matrices: bool = True,
    galore: Mapping[str, Any] | None = None,
    any_version: bool = False,
    **kwargs: Any,
) -> Any:
    """Megatron's optimizer for its model chunks, stepped by megaopt.FusedAdam.

    With config.optimizer="muon" or "dist_muon" matrices are stepped by megaopt.FusedMuon, by the
    config's muon_ fields: docs/how-to/megatron.md has what goes with it.

    Args:
        config: Megatron's OptimizerConfig, which stays as it is; with use_distributed_optimizer,
            but for Muon. optimizer may be "adam", "lion", "sgd" or "muon": FusedAdam, FusedLion,
            FusedSGD, FusedMuon.
        model_chunks: as Megatron takes them.
        args: Megatron's other arguments, as kwargs are.
        mode: "main_shards": Megatron keeps its fp32 main shards. "precision_aware": the optimizer
            owns the 16-bit shards of the weights and keeps masters in its state. fp32 moments and
            masters have the same bits in both.
        contract: how operations are rounded, as for megaopt.FusedAdam; with Muon "ieee" or "eo", as
            for megaopt.FusedMuon, and Adam's are ieee's.
        backend: as for megaopt.FusedAdam.
        exp_avg_dtype: of exp_avg, or of SGD's momentum_buffer, as for megaopt.FusedAdam
            ("block64_e4m3" and, for exp_avg_sq, "block64_e5m3": 8 bits, docs/how-to/megatron.md);
            None: config.exp_avg_dtype if config has use_precision_aware_optimizer, else
            torch.float32.
        exp_avg_sq_dtype: likewise.
        master_weight_dtype: as for megaopt.FusedAdam, in mode "precision_aware" alone; None: fp32,
            or as Megatron asks.
        store_param_remainders: as for megaopt.FusedAdam, in mode "precision_aware" alone; None:
            config.store_param_remainders if config has use_precision_aware_optimizer, else False.
        round_scaled_grads: as for megaopt.FusedAdam; None: True if config has
            use_precision_aware_optimizer, where Megatron clips bf16 gradients in bf16, else False.
        seed: as for megaopt.FusedAdam; the same on all ranks. A parameter's number is its place in
            DDP's buffers, so that ranks with copies of it draw the same random bits.
        capturable: as for megaopt.FusedAdam: a CUDA graph may capture the step; None:
            config.optimizer_cuda_graph, with which Megatron's training loop captures it.
        divides_matrices: with Muon and without the distributed optimizer, where every data-parallel
            rank steps all matrices, each is made orthogonal by one of them, which sends the update
            to the others. False: every rank makes all, and a step takes less memory for messages
            (docs/how-to/muon.md). The bits are the same.
        galore: steps matrices but embeddings and output layers by megaopt.GaLoreAdamW, with these
            arguments of its: rank, and any of update_proj_gap, scale, proj_type, precision, refresh
            and stagger; beside optimizer="adam" and mode "main_shards". None: all by FusedAdam.
        any_version: go on with a megatron-core that is not among SUPPORTED.
        kwargs: Megatron's.

    Returns:
        Megatron's ChainedOptimizer.

    Raises:
        ImportError: megatron-core is not installed.
        RuntimeError: it is another release.
        ValueError: an argument, a field of config or the kind of a parameter cannot be used.
    """
    # what was given of megaopt's own options, by the names of Choices
    arguments = locals()
    options = {
        field.name: arguments[field.name] for field in fields(Choices) if field.name in arguments
    }

    _check_version(any_version)
    check_arguments(config, model_chunks)
    one_of("config.optimizer", config.optimizer, ("adam", "lion", "sgd", *MUON))

    # Muon has a function of its own, which Megatron's reaches only in releases after 0.16
    if config.optimizer in MUON:
        with plugged_in(any_version=any_version, **options):
            muon: Any = importlib.import_module("megaopt.integration.megatron.muon")
            return muon.get_muon_optimizer(config, model_chunks, *args, **kwargs)

    # Lion and SGD: Megatron hears of Adam, and Choices.make_adam makes what config names
    adam_config = config
    if config.optimizer != "adam":
        # of its own paths to them none is the distributed optimizer's
        options["original_config"] = config
        # a copy: the caller's config stays
        adam_config = copy.copy(config)
        adam_config.optimizer = "adam"
    with plugged_in(any_version=any_version, **options):
        module = importlib.import_module("megatron.core.optimizer")
        return module.get_megatron_optimizer(adam_config, model_chunks, *args, **kwargs)


@contextlib.contextmanager
def plugged_in(*, any_version: bool = False, **options: Any) -> Iterator[None]:
    """Makes Megatron's own get_megatron_optimizer make what ours makes, within it.

    For scripts that call it deep inside: names of megatron.core.optimizer stand for ours until the
    end of the block, and for Megatron's own again after it. What was made keeps working.

    Args:
        any_version: as for get_megatron_optimizer.
        options: mode, contract, backend, exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype,
            store_param_remainders, round_scaled_grads, seed, capturable, divides_matrices and
            galore, as for get_megatron_optimizer.

    Raises:
        ImportError: megatron-core is not installed.
        RuntimeError: it is another release.
        ValueError: an option is out of its range, or contradicts another.
    """
    choices = Choices(**options)
    _check_version(any_version)
    # by name: it imports Megatron, which this module does not
    names = ("megaopt.integration.megatron.distributed", "megaopt.integration.megatron.muon")
    plugs: Any = [importlib.import_module(name) for name in names]
    # each name gets its old value back at the end, the last replaced first
    with contextlib.ExitStack() as stack:
        for module, name, value in [
            entry for plug in plugs for entry in plug.replacements(choices)
        ]:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def _check_version(any_version: bool) -> None:
    one_of("any_version", any_version, (True, False))
    supported = " and ".join(SUPPORTED)
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise ImportError(
            f"megaopt.integration.megatron needs megatron-core, of which {supported} are supported"
        ) from error
    # "+" and the commit follow where it lies within a git repository
    version = str(core.__version__).partition("+")[0]
    if version not in SUPPORTED and not any_version:
        raise RuntimeError(
            f"megatron-core {version} is not supported: {supported} are, whose insides are known; "
            "any_version=True tries"
        )
