"""Configs of the Megatron-Core regression: those that have a table [megatron]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict
from pydantic.dataclasses import dataclass

from megaopt.commands.config import ModelConfig, OptimizerConfig, require_name
from megaopt.commands.toml_tables import (
    WHOLE,
    ByKind,
    Count,
    Flag,
    Number,
    Ranks,
    Seed,
    Table,
    Threads,
    build_run,
    only,
    read_toml,
    require,
)

Mode = Literal["main_shards", "precision_aware"]
StateDtype = Literal[
    "float32", "bfloat16", "float16", "float8",
    "block_e4m3", "block_e5m3", "block64_e4m3", "block64_e5m3",
]  # fmt: skip
Runs = Annotated[int, Strict(), Field(ge=1, le=1000), only(f"{WHOLE} 1 to 1000")]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig(Table):
    """How Megatron-Core trains: what all variants share."""

    ranks: Ranks
    """Processes, 1 to 64, a GPU for each where there are some; data-parallel over tensor-parallel
    groups."""
    micro_batch_size: Count
    """Sequences of a forward pass; a rank has as many micro batches as the batch needs."""
    tensor_parallel: Ranks = 1
    """Ranks that share each matrix; divides the ranks and the heads."""
    pipeline_parallel: Ranks = 1
    """Stages, each with as many of the layers; tensor_parallel times it divides the ranks."""
    bucket_size: Count | None = None
    """Elements of a bucket of gradients, at least 1; None: Megatron's default."""
    overlap_grad_reduce: Flag = True
    """Gradients are reduced during the backward pass. Without, there is one bucket, whatever
    bucket_size says: another order of the norm's sum."""
    overlap_param_gather: Flag = True
    """Weights are gathered during the next forward pass instead of within the optimizer step."""
    grad_reduce_in_fp32: Flag = True
    """Whether gradients are summed, and kept for the step, in fp32; else in the weights' dtype."""
    clip_grad: Number = 1.0
    """Largest norm of the gradient, from 0 to fp32's largest number; 0: it is not clipped."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """The dtype of the weights."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] | None = None
    """TransformerEngine's layers multiply in fp8 by this recipe; None: Megatron's own layers."""
    fp8_param_gather: Flag = False
    """Weights of matrices are fp8, gathered as such."""

    @property
    def shares(self) -> int:
        """Ranks that have parts of one model, each of which trains on the same sequences."""
        return self.tensor_parallel * self.pipeline_parallel

    def __post_init__(self) -> None:
        divides = self.ranks % self.tensor_parallel == 0
        allowed = f"a divisor of ranks, which is {self.ranks}"
        require(divides, "tensor_parallel", self.tensor_parallel, allowed)
        stages, groups = self.pipeline_parallel, self.ranks // self.tensor_parallel
        allowed = f"a divisor of the {groups} tensor-parallel groups"
        require(groups % stages == 0, "pipeline_parallel", stages, allowed)
        if self.fp8_recipe is not None:
            require(self.precision == "bf16", "precision", self.precision, "'bf16' with fp8_recipe")
        recipe_or_none = self.fp8_recipe is not None or not self.fp8_param_gather
        require(
            recipe_or_none, "fp8_param_gather", self.fp8_param_gather, "false without fp8_recipe"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedKeys(Table):
    """The keys that both kinds of variant have."""

    name: str
    """Name in tables and records."""
    mode: Mode = "main_shards"
    """Who owns the fp32 masters: Megatron, or, precision_aware, the inner optimizer: ours, or of
    the others TransformerEngine's alone."""
    store_param_remainders: Flag = False
    """With precision_aware: int16 remainders instead of fp32 masters; ties go away from zero."""
    baseline: str | None = None
    """Name of the variant that this one must equal bit for bit; None: it is not compared."""
    runs: Runs = 1
    """Times that it runs, 1 to 1000; all must equal the first."""
    resume_after: Count | None = None
    """Step after which the run is saved, and continued in fresh processes; None: never."""
    resume_ranks: Ranks | None = None
    """Ranks that continue it; None: as many as before."""
    cuda_graph: Flag = False
    """The optimizer's step is captured at the second step, by Megatron's own wrapper, and repeated
    from then on; on GPUs, with TransformerEngine."""
    overlap_grad_reduce: Flag | None = None
    """Instead of the table [megatron]'s."""
    overlap_param_gather: Flag | None = None
    """Instead of the table [megatron]'s."""
    grad_reduce_in_fp32: Flag | None = None
    """Instead of the table [megatron]'s."""

    def __post_init__(self) -> None:
        if self.resume_ranks is not None:
            allowed, ranks = "left out without resume_after", self.resume_ranks
            require(self.resume_after is not None, "resume_ranks", ranks, allowed)
        if self.mode != "precision_aware":
            remainders = self.store_param_remainders
            allowed = f"false with mode = {self.mode!r}"
            require(not remainders, "store_param_remainders", remainders, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class StockVariant(SharedKeys):
    """Megatron's own optimizer step."""

    kind: Literal["stock"] = "stock"
    """Which of the kinds of variant this is."""
    inner: Literal["transformer_engine", "torch", "unfused"]
    """Whose Adam is inside: TransformerEngine's FusedAdam, torch's AdamW, or this command's own in
    plain torch operations."""
    cast_after_load: Flag = False
    """Casts the masters to weights once they are loaded, as a megaopt variant does; Megatron does
    not, and under delayed scaling its fp8 weights were others then."""

    def __post_init__(self) -> None:
        SharedKeys.__post_init__(self)  # not super(): a class with slots is made twice
        if self.inner != "transformer_engine":
            allowed = f"'main_shards' with inner = {self.inner!r}"
            require(self.mode == "main_shards", "mode", self.mode, allowed)
        if self.inner == "torch":
            # Megatron asks a fresh optimizer for its step count, and torch's has none yet
            allowed = "left out with inner = 'torch', whose checkpoints Megatron cannot load"
            require(self.resume_after is None, "resume_after", self.resume_after, allowed)
        if self.cast_after_load:
            allowed = "false without resume_after"
            require(self.resume_after is not None, "cast_after_load", True, allowed)
            allowed = "false with mode = 'precision_aware', whose masters Megatron does not cast"
            require(self.mode == "main_shards", "cast_after_load", True, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaoptVariant(SharedKeys):
    """Megatron with the optimizer step of megaopt.integration.megatron."""

    kind: Literal["megaopt"] = "megaopt"
    """Which of the kinds of variant this is."""
    contract: Literal["ieee", "te", "torch"] = "ieee"
    """Contract of the step."""
    backend: Literal["auto", "triton", "reference"] = "auto"
    """Backend of the step."""
    exp_avg_dtype: StateDtype = "float32"
    """How exp_avg is stored; other than float32 with mode = "precision_aware" alone."""
    exp_avg_sq_dtype: StateDtype = "float32"
    """How exp_avg_sq is stored; other than float32 with mode = "precision_aware" alone."""
    cpu_offload: Flag = False
    """Moments, and with mode = "precision_aware" masters, are in the host's memory."""
    round_scaled_grads: Flag = False
    """Rounds clipped bf16 gradients to bf16, as a stock variant with precision_aware does."""

    def __post_init__(self) -> None:
        SharedKeys.__post_init__(self)  # not super(): a class with slots is made twice
        if self.mode == "main_shards":
            for key in ("exp_avg_dtype", "exp_avg_sq_dtype"):
                value = getattr(self, key)
                require(value == "float32", key, value, "'float32' with mode = 'main_shards'")


MegatronVariant = StockVariant | MegaoptVariant


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronRun(Table):
    """A training run of Megatron-Core: model, text, optimizer, and the variants to compare."""

    name: str
    """The config file's name without its ending; names the folder of the run's output."""
    seed: Seed
    """Seed of the initial weights and of the batches, >= 0."""
    steps: Count
    """Optimizer steps, at least 1."""
    batch_size: Count
    """Sequences in a step, over all ranks and micro batches: the same for every number of ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: on GPUs where there are some, a rank on each."""
    cpu_threads: Threads = 1
    """Threads of torch in each rank on the CPU: fixed, because sums depend on it."""
    patience: Count = 300
    """Seconds within which a rank must start, or finish a step, or the variant is ended."""
    model: ModelConfig
    """The model."""
    optimizer: OptimizerConfig
    """The hyper-parameters."""
    megatron: MegatronConfig
    """How Megatron trains."""
    variant: tuple[ByKind[MegatronVariant], ...]
    """What is trained and compared, in any order."""

    def __post_init__(self) -> None:
        require(len(self.variant) > 0, "variant", [], "at least one table, [[variant]]")
        corrected = self.optimizer.bias_correction
        allowed = "true, as Megatron has no other Adam"
        require(corrected, "optimizer.bias_correction", corrected, allowed)
        heads, shares = self.model.heads, self.megatron.tensor_parallel
        allowed = f"a multiple of tensor_parallel, which is {shares}"
        require(heads % shares == 0, "model.heads", heads, allowed)
        stages, layers = self.megatron.pipeline_parallel, self.model.layers
        allowed = f"a multiple of pipeline_parallel, which is {stages}"
        require(layers % stages == 0, "model.layers", layers, allowed)
        self._check_batch(self.megatron.ranks, "batch_size")
        for variant in self.variant:
            require_name(variant.name, [each.name for each in self.variant])
            self._check_resume(variant)
        for variant in self.variant:
            self._check_baseline(variant)

    def _check_batch(self, ranks: int, key: str) -> None:
        size = self.megatron.micro_batch_size * (ranks // self.megatron.shares)
        allowed = f"a multiple of {size}, the micro batches of {ranks} ranks"
        if key != "batch_size":
            allowed = f"a number whose micro batches divide batch_size, which is {self.batch_size}"
        value = self.batch_size if key == "batch_size" else ranks
        require(self.batch_size % size == 0, key, value, allowed)

    def _check_resume(self, variant: MegatronVariant) -> None:
        after, ranks = variant.resume_after, variant.resume_ranks
        if after is not None:
            key, allowed = f"{variant.name}.resume_after", f"less than steps, which is {self.steps}"
            require(after < self.steps, key, after, allowed)
        if ranks is not None:
            key, shares = f"{variant.name}.resume_ranks", self.megatron.shares
            allowed = f"a multiple of the {shares} ranks that share a model"
            require(ranks % shares == 0, key, ranks, allowed)
            self._check_batch(ranks, key)

    def _check_baseline(self, variant: MegatronVariant) -> None:
        if variant.baseline is None:
            return
        key = f"{variant.name}.baseline"
        others = {each.name: each for each in self.variant if each.baseline is None}
        others.pop(variant.name, None)
        names = ", ".join(others) or "there is none"
        allowed = f"the name of another variant, without a baseline: {names}"
        require(variant.baseline in others, key, variant.baseline, allowed)
        baseline = others[variant.baseline]
        allowed = "a variant with the same overlap_grad_reduce: it decides about the buckets"
        same = self.overlaps_grad_reduce(variant) == self.overlaps_grad_reduce(baseline)
        require(same, key, variant.baseline, allowed)
        allowed = "a variant with the same grad_reduce_in_fp32: sums are rounded by it"
        same = self.reduces_in_fp32(variant) == self.reduces_in_fp32(baseline)
        require(same, key, variant.baseline, allowed)
        allowed = "a variant whose number of ranks changes at the same step: sums have their order"
        same = self.ranks_after(variant) == self.ranks_after(baseline)
        require(same, key, variant.baseline, allowed)

    def ranks_after(self, variant: MegatronVariant) -> tuple[int, int]:
        """The step after which the number of ranks changes, and the new one; else (0, ranks)."""
        ranks = self.megatron.ranks
        if variant.resume_ranks in (None, ranks):
            return 0, ranks
        return variant.resume_after or 0, variant.resume_ranks or ranks

    def overlaps_grad_reduce(self, variant: MegatronVariant) -> bool:
        """Whether the variant reduces gradients during the backward pass."""
        own = variant.overlap_grad_reduce
        return self.megatron.overlap_grad_reduce if own is None else own

    def reduces_in_fp32(self, variant: MegatronVariant) -> bool:
        """Whether the variant's gradients are fp32, as those of fp32 weights are anyway."""
        own = variant.grad_reduce_in_fp32
        chosen = self.megatron.grad_reduce_in_fp32 if own is None else own
        return chosen or self.megatron.precision == "fp32"

    def overlaps_param_gather(self, variant: MegatronVariant) -> bool:
        """Whether the variant gathers weights during the forward pass; never without the other."""
        own = variant.overlap_param_gather
        overlaps = self.megatron.overlap_param_gather if own is None else own
        return overlaps and self.overlaps_grad_reduce(variant)

    @property
    def most_ranks(self) -> int:
        """Ranks of the largest group."""
        return max(self.megatron.ranks, *(each.resume_ranks or 1 for each in self.variant))


def read_megatron_run(path: Path) -> MegatronRun:
    """Reads a run from a TOML file.

    Args:
        path: the file; its stem becomes the run's name.

    Raises:
        ConfigError: as megaopt.commands.config.read_config.
    """
    return build_run(MegatronRun, path, read_toml(path))
