"""Configs of the Megatron-Core regression: those that have a table [megatron]."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megaopt.lab.config import GaLoreConfig, NamedVariant, TrainingConfig, need_once
from megaopt.lab.toml_tables import ByKind, Count, Number, Ranks, Several, Table, Threads, read_run

StateDtype = Literal[
    "float32", "bfloat16", "float16", "float8",
    "block_e4m3", "block_e5m3", "block_int8", "block64_e4m3", "block64_e5m3", "block64_int8",
]  # fmt: skip


class MegatronConfig(Table):
    """The settings of Megatron-Core that all variants share."""

    ranks: Ranks  # processes, a GPU for each where there are some
    micro_batch_size: Count
    """Sequences of a forward pass; a rank has as many micro batches as the batch needs."""
    tensor_parallel: Ranks = 1  # ranks that share each matrix; divides the ranks and the heads
    pipeline_parallel: Ranks = 1
    """Stages, each with as many of the layers; tensor_parallel times it divides the ranks."""
    experts: Count | None = (
        None  # feed-forward parts of a layer, of which tokens take two; None: one
    )
    expert_parallel: Ranks = 1  # ranks that share out the experts; divides both
    optimizer: Literal["adam", "muon"] = "adam"
    """muon: matrices are stepped by Muon, everything else by Adam."""
    muon_tp_mode: Literal["duplicated", "blockwise"] = "duplicated"
    """Whether Muon makes whole matrices orthogonal, or each tensor-parallel rank its part."""
    bucket_size: Count | None = None  # elements of a bucket of gradients; None: Megatron's default
    overlap_grad_reduce: bool = True
    """Gradients are reduced during the backward pass. Without, there is one bucket, whatever
    bucket_size says: another order of the norm's sum."""
    overlap_param_gather: bool = True
    """Weights are gathered during the next forward pass instead of within the optimizer step."""
    grad_reduce_in_fp32: bool = True
    """Whether gradients are summed, and kept for the step, in fp32; else in the weights' dtype."""
    clip_grad: Number = 1.0  # largest norm of the gradient; 0: it is not clipped
    precision: Literal["bf16", "fp32"] = "bf16"  # of the weights
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] | None = None
    """TransformerEngine's layers multiply in fp8 by this recipe; None: Megatron's own layers."""
    fp8_param_gather: bool = False  # weights of matrices are fp8, gathered as such

    @property
    def shares(self) -> int:
        """Ranks that have parts of one model, each of which trains on the same sequences."""
        return self.tensor_parallel * self.pipeline_parallel

    def _check(self) -> None:
        divides = self.ranks % self.tensor_parallel == 0
        self.need(divides, "tensor_parallel", f"a divisor of ranks = {self.ranks}")
        groups = self.ranks // self.tensor_parallel
        divides = groups % self.pipeline_parallel == 0
        self.need(divides, "pipeline_parallel", f"a divisor of the {groups} tensor-parallel groups")
        parts = self.experts or 1
        divides = parts % self.expert_parallel == 0 and self.ranks % self.expert_parallel == 0
        allowed = f"a divisor of ranks = {self.ranks} and of experts = {parts}"
        self.need(divides, "expert_parallel", allowed)
        if self.optimizer == "muon":
            self.need(self.fp8_recipe is None, "fp8_recipe", "left out with optimizer = 'muon'")
            self.need(self.precision == "bf16", "precision", "'bf16' with optimizer = 'muon'")
        if self.fp8_recipe is None:
            self.need(not self.fp8_param_gather, "fp8_param_gather", "false without fp8_recipe")
        else:
            self.need(self.precision == "bf16", "precision", "'bf16' with fp8_recipe")


class SharedKeys(NamedVariant):
    """The keys that both kinds of variant have."""

    mode: Literal["main_shards", "precision_aware"] = "main_shards"
    """The owner of the fp32 masters: Megatron, or, precision_aware, the inner optimizer: ours, or
    of the others TransformerEngine's alone."""
    layout: Literal["shards", "whole", "owners"] = "shards"
    """Whether a data-parallel rank steps shards, as the distributed optimizer cuts them, or, with
    Muon and GaLore, whole weights: all of them, or those that the layer-wise optimizer gives it."""
    store_param_remainders: bool = False
    """With precision_aware: int16 remainders instead of fp32 masters; ties go away from zero."""
    baseline: str | None = None
    """Name of the variant that this one must equal bit for bit; None: it is not compared."""
    runs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Times that it runs; all must equal the first."""
    resume_after: Count | None = None
    """Step after which the run is saved, and continued in fresh processes; None: never."""
    resume_ranks: Ranks | None = None  # ranks that continue it; None: as many as before
    cuda_graph: bool = False
    """The optimizer's step is captured at the second step, by Megatron's own wrapper, and repeated
    from then on; on GPUs, with TransformerEngine."""
    # instead of the table [megatron]'s
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    grad_reduce_in_fp32: bool | None = None

    def _check(self) -> None:
        if self.resume_after is None:
            self.need(self.resume_ranks is None, "resume_ranks", "left out without resume_after")
        if self.mode == "main_shards":
            allowed = "false with mode = 'main_shards'"
            self.need(not self.store_param_remainders, "store_param_remainders", allowed)


class StockVariant(SharedKeys):
    """Megatron's own optimizer step."""

    kind: Literal["stock"] = "stock"
    inner: Literal["transformer_engine", "torch", "unfused"]
    """The Adam inside: TransformerEngine's FusedAdam, torch's AdamW, or this command's own in
    plain torch operations; with Muon the last, and Emerging-Optimizers' Muon or, where that is not
    installed, what stands for it."""
    cast_after_load: bool = False
    """Casts the masters to weights once they are loaded, as a megaopt variant does; Megatron does
    not, and under delayed scaling its fp8 weights were others then."""

    def _check(self) -> None:
        super()._check()
        if self.inner != "transformer_engine":
            allowed = f"'main_shards' with inner = {self.inner!r}"
            self.need(self.mode == "main_shards", "mode", allowed)
        if self.inner == "torch":
            # Megatron asks a fresh optimizer for its step count, and torch's has none yet
            allowed = "left out with inner = 'torch', whose checkpoints Megatron cannot load"
            self.need(self.resume_after is None, "resume_after", allowed)
        if self.resume_after is None or self.mode != "main_shards":
            allowed = "false without resume_after and mode = 'main_shards'"
            self.need(not self.cast_after_load, "cast_after_load", allowed)


class MegaoptVariant(SharedKeys):
    """Megatron with the optimizer step of megaopt.integration.megatron."""

    kind: Literal["megaopt"] = "megaopt"
    contract: Literal["ieee", "te", "torch", "eo"] = "ieee"
    """eo: with Muon alone, the bits of Emerging-Optimizers, which a stock variant has."""
    backend: Literal["auto", "triton", "reference"] = "auto"
    # other than float32 with mode = "precision_aware" alone
    exp_avg_dtype: StateDtype = "float32"
    exp_avg_sq_dtype: StateDtype = "float32"
    cpu_offload: bool = False
    """Moments, and with mode = "precision_aware" masters, are in the host's memory."""
    round_scaled_grads: bool = False
    """Rounds clipped bf16 gradients to bf16, as a stock variant with precision_aware does."""

    def _check(self) -> None:
        super()._check()
        for key in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            allowed = self.mode == "precision_aware" or getattr(self, key) == "float32"
            self.need(allowed, key, "'float32' with mode = 'main_shards'")


MegatronVariant = StockVariant | MegaoptVariant

_BESIDE_MATRICES = {"mode": ("main_shards",), "cuda_graph": (False,), "cpu_offload": (False,)}
ALLOWED: dict[str, dict[str, tuple[object, ...]]] = {
    "adam": {"layout": ("shards",), "contract": ("ieee", "te", "torch")},
    "muon": {**_BESIDE_MATRICES, "contract": ("ieee", "eo")},
    "galore": {
        "kind": ("megaopt",),
        "layout": ("shards", "whole"),
        **_BESIDE_MATRICES,
        "contract": ("ieee",),
        "round_scaled_grads": (False,),
    },
}
"""Values that variants may have, by the rule of matrices; a key that a kind lacks is allowed."""
OF_GALORE = {
    "megatron.optimizer": "adam",
    "megatron.tensor_parallel": 1,
    "megatron.fp8_param_gather": False,
    "optimizer.adam_w_mode": True,
}
"""Values that a run with a table [galore] must have."""


class MegatronRun(TrainingConfig):
    """A training run of Megatron-Core: model, text, optimizer, and the variants to compare."""

    cpu_threads: Threads = 1  # of torch in each rank on the CPU: fixed, as sums depend on it
    patience: Count = 300
    """Seconds within which a rank must start, or finish a step, or the variant is ended."""
    megatron: MegatronConfig
    galore: GaLoreConfig | None = None
    """Matrices are stepped by GaLoreAdamW, everything else by its AdamW, in variants of kind
    "megaopt": there are no others; None: by megatron.optimizer."""
    variant: Several[ByKind[MegatronVariant]]
    """The variants to train and compare, in any order."""

    def _check(self) -> None:
        need_once(self.variant)
        corrected = self.optimizer.bias_correction
        self.need(corrected, "optimizer.bias_correction", "true, as Megatron has no other Adam")
        for key, by in (("heads", "tensor_parallel"), ("layers", "pipeline_parallel")):
            parts = getattr(self.megatron, by)
            divides = getattr(self.model, key) % parts == 0
            self.need(divides, f"model.{key}", f"a multiple of {by} = {parts}")
        allowed = f"a multiple of the micro batches of {self.megatron.ranks} ranks"
        self.need(self._divides_batch(self.megatron.ranks), "batch_size", allowed)
        for key, value in OF_GALORE.items() if self.galore else ():
            is_so = attrgetter(key)(self) == value
            self.need(is_so, key, f"{spelled(value)} with a table [galore]")
        for variant in self.variant:
            self._check_variant(variant)

    def _divides_batch(self, ranks: int) -> bool:
        size = self.megatron.micro_batch_size * (ranks // self.megatron.shares)
        return self.batch_size % size == 0

    @property
    def rule(self) -> str:
        """The rule of matrices: "adam", "muon" or "galore"."""
        return self.megatron.optimizer if self.galore is None else "galore"

    def _check_variant(self, variant: MegatronVariant) -> None:
        # what the rule of matrices allows
        config, rule = self.megatron, self.rule
        condition = "a table [galore]" if rule == "galore" else f"optimizer = {rule!r}"
        for key, values in ALLOWED[rule].items():
            is_so = getattr(variant, key, values[0]) in values
            variant.need(is_so, key, f"{spelled(*values)} with {condition}")
        if rule == "muon" and isinstance(variant, StockVariant):
            variant.need(variant.inner == "unfused", "inner", f"'unfused' with {condition}")
            words = "'whole' or 'owners', as Megatron's own Muon has no others"
            variant.need(variant.layout != "shards", "layout", words)
        elif rule == "muon":
            parts = config.tensor_parallel > 1 and config.muon_tp_mode == "duplicated"
            words = "'whole' or 'owners' where tensor-parallel ranks bring matrices together"
            variant.need(variant.layout != "shards" or not parts, "layout", words)
        # a place to resume, and ranks that can
        after, ranks = variant.resume_after, variant.resume_ranks
        saves = rule != "galore" or variant.layout == "shards"
        words = "left out with layout = 'whole', whose projections Megatron's checkpoints lack"
        variant.need(after is None or saves, "resume_after", words)
        inside = after is None or after < self.steps
        variant.need(inside, "resume_after", f"less than steps = {self.steps}")
        if ranks is not None:
            words = f"a multiple of the {config.shares} ranks that share a model"
            variant.need(ranks % config.shares == 0, "resume_ranks", words)
            words = f"a number whose micro batches divide batch_size = {self.batch_size}"
            variant.need(self._divides_batch(ranks), "resume_ranks", words)
        # a baseline whose sums have the same order
        if variant.baseline is None:
            return
        baselines = {member.name: member for member in self.variant if member.baseline is None}
        names = ", ".join(baselines) or "there is none"
        words = f"the name of another variant, without a baseline: {names}"
        variant.need(variant.baseline in baselines, "baseline", words)
        baseline = baselines[variant.baseline]
        reduced = self.reduces_in_fp32(variant) == self.reduces_in_fp32(baseline)
        overlap = self.overlaps_grad_reduce(variant) == self.overlaps_grad_reduce(baseline)
        changes = [
            v.resume_ranks not in (None, config.ranks) and (v.resume_after, v.resume_ranks)
            for v in (variant, baseline)
        ]
        for same, words in (
            (
                not self.clips or variant.layout == baseline.layout,
                "with the same layout, or clip_grad = 0: the norm's sums have its order",
            ),
            (overlap, "with the same overlap_grad_reduce: it decides about the buckets"),
            (reduced, "with the same grad_reduce_in_fp32: sums are rounded by it"),
            (
                changes[0] == changes[1],
                "whose number of ranks changes at the same step: sums have their order",
            ),
        ):
            variant.need(same, "baseline", f"a variant {words}")

    @property
    def clips(self) -> bool:
        """Returns whether gradients are clipped by their norm; else nobody compares the norm."""
        return self.megatron.clip_grad > 0

    def overlaps_grad_reduce(self, variant: MegatronVariant) -> bool:
        """Returns whether the variant reduces gradients during the backward pass."""
        return self._setting(variant, "overlap_grad_reduce")

    def reduces_in_fp32(self, variant: MegatronVariant) -> bool:
        """Returns whether the variant's gradients are fp32, as those of fp32 weights are anyway."""
        return self._setting(variant, "grad_reduce_in_fp32") or self.megatron.precision == "fp32"

    def _setting(self, variant: MegatronVariant, key: str) -> bool:
        setting: bool | None = getattr(variant, key)
        return bool(getattr(self.megatron, key) if setting is None else setting)

    @property
    def runs(self) -> tuple[MegatronVariant, ...]:
        """Returns the variants that are trained."""
        return self.variant


def spelled(*values: object) -> str:
    """Values of a config as a message has them, where a file has them."""
    return " or ".join(repr(value).lower() for value in values)


def read_megatron_run(path: Path) -> MegatronRun:
    """A run from a TOML file; raises ConfigError as `read_run`."""
    return read_run(MegatronRun, path)
