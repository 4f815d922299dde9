"""Training runs as data: TOML files that `read_config` reads into frozen models."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NoReturn

from pydantic import BeforeValidator, Field

from megaopt.kernels.refusals import shown
from megaopt.lab.toml_tables import (
    ByKind,
    ConfigError,
    Count,
    Number,
    Ranks,
    Several,
    Table,
    Threads,
    read_run,
    require,
)
from megaopt.options.choices import ProjType

Recipe = Literal["delayed", "current", "block_128x128", "mxfp8"]
"""Names in megaopt.float8.RECIPES, which is not imported to read a file."""


def _refuse(value: object) -> NoReturn:
    raise ConfigError(f"recipe must be left out: [float8] has them, got {shown(value)}")


class ModelConfig(Table):
    """The shape of a byte-level GPT."""

    layers: Count  # transformer blocks
    heads: Count  # attention heads per block; divides width
    width: Count  # elements of the residual stream
    context: Count  # bytes in a training sequence, fewer than the text has
    vocabulary_size: Annotated[Count, Field(ge=256)]
    """Rows of the token embedding: the bytes. Further rows are padding."""

    def _check(self) -> None:
        self.need(self.width % self.heads == 0, "width", f"a multiple of heads = {self.heads}")


class OptimizerConfig(Table):
    """Hyper-parameters of Adam, the same for all variants of a run."""

    learning_rate: Number  # at its peak
    warmup_steps: int = Field(default=0, ge=0, le=2**31 - 1)
    """Steps over which the learning rate rises linearly to its peak; then it is constant."""
    beta1: float = Field(default=0.9, ge=0, lt=1)  # decay of exp_avg per step
    beta2: float = Field(default=0.999, ge=0, lt=1)  # decay of exp_avg_sq per step
    eps: Number = 1e-8  # added to the denominator outside the root
    weight_decay: Number = 0.0  # for matrices only: norm weights do not decay
    bias_correction: bool = True  # whether moments are divided by 1 - beta**step
    adam_w_mode: bool = True
    """True: AdamW, decay is decoupled from the gradient. False: decay is added to the gradient."""


class Float8Config(Table):
    """The fp8 weights of all linear layers; every variant runs once for each recipe."""

    recipes: Several[Recipe]  # each once
    scaled_matmul: bool = False
    """Layers with a scale per tensor quantize their input too and multiply in fp8; sizes are then
    multiples of 16."""

    def _check(self) -> None:
        once = len(set(self.recipes)) == len(self.recipes)
        self.need(once, "recipes", "a list that has each recipe once")


class GaLoreConfig(Table):
    """Projection of variants of kind "galore", or of all of Megatron's; GaLoreAdamW's arguments."""

    rank: Count
    """Dimensions of the projected gradients, at most the smaller dimension of each matrix."""
    update_proj_gap: Count = 200  # steps from one projection to the next
    scale: Number = 1.0  # what updates that are projected back are multiplied by
    refresh: Literal["subspace", "svd"] = "subspace"  # how projections are made
    stagger: bool = True  # whether they are made anew one after another, or all in one step
    proj_type: ProjType = "std"
    """The side on which gradients are projected; with ranks one process's bits are left's."""


class NamedVariant(Table):
    """The fields of all kinds of variant."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
    """Name in tables and records, and of files."""

    def need(self, holds: bool, key: str, allowed: str) -> None:
        """`require` of a key of this variant, whose name the message has."""
        if not holds:
            require(False, f"{self.name}.{key}", getattr(self, key), allowed)


class Own(NamedVariant):
    """A variant of `RunConfig`."""

    recipe: Annotated[Recipe | None, BeforeValidator(_refuse)] = None
    """The recipe under [float8], which sets it: how weights of linear layers are kept in fp8, or
    cast to it and back."""


class Baseline(Own):
    """A variant that others are compared with, and that runs straight through."""

    baseline: ClassVar[None] = None
    resume_after: ClassVar[None] = None


class UnfusedVariant(Baseline):
    """Adam in plain torch operations on fp32 masters, then a cast into the weights."""

    kind: Literal["unfused"] = "unfused"
    rounding: Literal["nearest_even", "nearest_away"] = "nearest_even"
    """The rounding of a master to its bf16 weight: where ties between two neighbours go."""


class PeerVariant(Baseline):
    """Another library's fused Adam with fp32 masters: a baseline for the contract of its bits."""

    kind: Literal["peer"] = "peer"
    library: Literal["transformer_engine"]
    """The library whose optimizer trains; it must be installed, and needs an NVIDIA GPU."""


class FusedVariant(Own):
    """`megaopt.FusedAdam` in one of its forms, compared with a baseline."""

    kind: Literal["fused"] = "fused"
    baseline: str  # name of the unfused or peer variant that this one must equal bit for bit
    contract: Literal["ieee", "te", "torch"] = "ieee"
    backend: Literal["auto", "triton", "reference"] = "auto"
    masters: Literal["created", "external", "remainders"] = "created"
    """fp32 masters that FusedAdam creates, a list of ours that it uses, or int16 remainders."""
    layout: Literal["whole", "groups_and_views"] = "whole"
    """The model's parameters, or two unaligned views of each, spread over four param groups."""
    resume_after: Count | None = None
    """Step after which the run is saved and continued in a fresh process; None: never."""
    ranks: Ranks | None = None
    """Processes that share the step: each has an uneven, unaligned part of every weight and its
    state, and then gathers the others' weights. None: the step is of this process alone."""

    def _check(self) -> None:
        if self.ranks is not None:
            self.need(self.masters == "created", "masters", "'created' with ranks")
            self.need(self.layout == "whole", "layout", "'whole' with ranks")
            self.need(self.resume_after is None, "resume_after", "left out with ranks")


class MatrixVariant(Own):
    """An optimizer of matrices, compared with another run of it: no other step has its bits."""

    baseline: str | None = None
    """Name of the variant of this kind that this one must equal bit for bit; None: it is a
    baseline."""
    layout: Literal["whole", "groups"] = "whole"
    """The parameters in the model's order, or in the opposite one, spread over three times as many
    param groups."""
    resume_after: Count | None = None
    """Step after which the run is saved and continued in a fresh process; None: never."""
    ranks: Ranks | None = None
    """Processes of which each has rows of every weight and its state, as under FSDP2, and then
    gathers the others'. None: the step is of this process alone."""

    def _check(self) -> None:
        straight = self.baseline is not None or self.resume_after is None
        self.need(straight, "resume_after", "left out of a baseline")
        if self.ranks is not None:
            self.need(self.resume_after is None, "resume_after", "left out with ranks")


class GaLoreVariant(MatrixVariant):
    """`megaopt.GaLoreAdamW`."""

    kind: Literal["galore"] = "galore"
    kernel: Literal["auto", "torch", "hybrid"] = "torch"
    """Kernel of GaLoreAdamW; with "hybrid" the rest goes by Triton too."""


class MuonVariant(MatrixVariant):
    """`megaopt.FusedMuon` of the matrices of blocks; AdamW steps the rest."""

    kind: Literal["muon"] = "muon"
    backend: Literal["auto", "triton", "reference"] = "auto"
    precision: Literal["bf16", "fp16"] = "bf16"
    momentum: Literal["float32", "bfloat16", "bfloat16_stochastic", "block_e4m3", "block_int8"] = (
        "float32"
    )
    """The format of momentum_buffer."""


Variant = UnfusedVariant | PeerVariant | FusedVariant | GaLoreVariant | MuonVariant

UNDER_FLOAT8 = {
    "kind": ("unfused", "fused"),
    "rounding": ("nearest_even",),
    "masters": ("created", "external"),
    "layout": ("whole",),
}
"""The values that variants with fp8 weights may have."""


class TrainingConfig(Table):
    """The fields of every training run."""

    name: str = Field(pattern=r"[^.]")  # out / ".." would be another folder than --out
    """The config file's name without its ending; names the folder of the run's output."""
    seed: int = Field(ge=0, le=2**63 - 1)  # of the initial weights and of the batches
    steps: Count  # of the optimizer
    batch_size: Count  # sequences in a step, over all ranks, whatever their number
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to train on; auto: the GPU where there is one, with ranks one rank on each."""
    cpu_threads: Threads = 2  # of torch on the CPU: fixed, because sums depend on it
    model: ModelConfig
    optimizer: OptimizerConfig


def need_once(variants: tuple[NamedVariant, ...]) -> None:
    """Raises a `ConfigError` where two variants have one name."""
    names = [variant.name for variant in variants]
    for variant in variants:
        variant.need(names.count(variant.name) == 1, "name", "a name of one variant alone")


class RunConfig(TrainingConfig):
    """A training run: a model, its text, its optimizer, and the variants to compare."""

    float8: Float8Config | None = None  # fp8 weights
    galore: GaLoreConfig | None = None  # there where a variant is of kind "galore"
    variant: Several[ByKind[Variant]]
    """The variants to train and compare; baselines first or last, as you like."""

    def _check(self) -> None:
        need_once(self.variant)
        for variant in self.variant:
            projects = self.galore is not None or not isinstance(variant, GaLoreVariant)
            self.need(projects, "galore", "a table, as a variant is 'galore'")
            family = [member for member in self.variant if _family(member) is _family(variant)]
            names = [member.name for member in family if member.baseline is None]
            allowed = f"the name of a baseline variant: {', '.join(names) or 'there is none'}"
            variant.need(variant.baseline in (None, *names), "baseline", allowed)
            after = variant.resume_after
            inside = after is None or after < self.steps
            variant.need(inside, "resume_after", f"less than steps = {self.steps}")
            for key, values in UNDER_FLOAT8.items() if self.float8 else ():
                words = f"one of {', '.join(values)} under [float8]"
                variant.need(getattr(variant, key, values[0]) in values, key, words)
        scaled = self.float8 is not None and self.float8.scaled_matmul
        fits = not scaled or self.model.width % 16 == 0
        self.need(fits, "model.width", "a multiple of 16 with float8.scaled_matmul = true")

    @property
    def runs(self) -> tuple[Variant, ...]:
        """The variants that are trained; under [float8] one for each recipe, "recipe.variant"."""
        if self.float8 is None:
            return self.variant
        runs = []
        for recipe, variant in product(self.float8.recipes, self.variant):
            # the recipe leads the names of a variant and of its baseline
            changes = {"recipe": recipe, "name": f"{recipe}.{variant.name}"}
            if variant.baseline is not None:
                changes["baseline"] = f"{recipe}.{variant.baseline}"
            runs.append(variant.model_copy(update=changes))
        return tuple(runs)

    def find_variant(self, name: str) -> Variant:
        """Returns the variant of that name; a `ConfigError` lists the names where there is none."""
        variants = {variant.name: variant for variant in self.runs}
        require(name in variants, "variant", name, f"one of {', '.join(variants)}")
        return variants[name]


def _family(variant: Variant) -> type:
    """The class of variants among which a variant's baseline is."""
    return type(variant) if isinstance(variant, MatrixVariant) else Own


def read_config(path: str | Path) -> RunConfig:
    """A run from a TOML file; raises ConfigError as `read_run`."""
    return read_run(RunConfig, Path(path))
