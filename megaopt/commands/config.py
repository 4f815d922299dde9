"""Training runs as data: TOML files read into frozen dataclasses that refuse what they do not know.

`read_config` is the only entry. Every refusal is a `ConfigError` that names the file, the key, the
value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from megaopt.commands.toml_tables import (
    DERIVED,
    ByKind,
    Count,
    Decay,
    Flag,
    Number,
    Ranks,
    Rows,
    Seed,
    Steps,
    Table,
    Threads,
    build_run,
    read_toml,
    require,
    shown,
)
from megaopt.commands.toml_tables import ConfigError as ConfigError

NAME = r"[A-Za-z0-9_.-]{1,100}"
"""A variant's name: files are named by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Table):
    """The shape of a byte-level GPT."""

    layers: Count
    """Number of transformer blocks, at least 1."""
    heads: Count
    """Attention heads per block; divides width."""
    width: Count
    """Elements of the residual stream."""
    context: Count
    """Bytes in a training sequence, fewer than the text has."""
    vocabulary_size: Rows
    """Rows of the token embedding, at least 256: the bytes. Further rows are padding."""

    def __post_init__(self) -> None:
        allowed = f"a multiple of heads, which is {self.heads}"
        require(self.width % self.heads == 0, "width", self.width, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Table):
    """Hyper-parameters of Adam, the same for all variants of a run."""

    learning_rate: Number
    """Peak learning rate, from 0 to fp32's largest number."""
    warmup_steps: Steps = 0
    """Steps over which the learning rate rises linearly to its peak; then it is constant."""
    beta1: Decay = 0.9
    """Decay of exp_avg per step, in [0, 1)."""
    beta2: Decay = 0.999
    """Decay of exp_avg_sq per step, in [0, 1)."""
    eps: Number = 1e-8
    """Added to the denominator outside the root, from 0 to fp32's largest number."""
    weight_decay: Number = 0.0
    """From 0 to fp32's largest number; for matrices only: norm weights do not decay."""
    bias_correction: Flag = True
    """Whether moments are divided by 1 - beta**step."""
    adam_w_mode: Flag = True
    """True: AdamW, decay is decoupled from the gradient. False: decay is added to the gradient."""

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""
        if step >= self.warmup_steps:
            return self.learning_rate
        return self.learning_rate * step / self.warmup_steps


Recipe = Literal["delayed", "current", "block_128x128", "mxfp8"]
"""Names in megaopt.float8.RECIPES, which is not imported to read a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Config(Table):
    """Which linear layers have fp8 weights: all, with every variant once for each recipe."""

    recipes: tuple[Recipe, ...]
    """At least one, each once."""
    scaled_matmul: Flag = False
    """Layers with a scale per tensor quantize their input too and multiply in fp8; sizes are then
    multiples of 16."""

    def __post_init__(self) -> None:
        require(len(self.recipes) > 0, "recipes", [], "a list of at least one recipe")
        once = len(set(self.recipes)) == len(self.recipes)
        require(once, "recipes", [*self.recipes], "a list that has each recipe once")


@dataclass(frozen=True, kw_only=True, slots=True)
class GaLoreConfig(Table):
    """How variants of kind "galore" project gradients; as GaLoreAdamW's arguments."""

    rank: Count
    """Dimensions of the projected gradients, at most the smaller dimension of each matrix."""
    update_proj_gap: Count = 200
    """Steps from one projection to the next."""
    scale: Number = 1.0
    """What updates that are projected back are multiplied by."""
    refresh: Literal["subspace", "svd"] = "subspace"
    """How projections are made."""
    stagger: Flag = True
    """Whether they are made anew one after another, or all in one step."""


class Baseline(Table):
    """A variant that others are compared with."""

    __slots__ = ()

    @property
    def baseline(self) -> None:
        """A baseline is compared with nothing."""
        return None

    @property
    def resume_after(self) -> None:
        """A baseline runs straight through."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfusedVariant(Baseline):
    """Adam in plain torch operations on fp32 masters, then a cast into the weights: a baseline."""

    name: str
    """Name in tables and records."""
    kind: Literal["unfused"] = "unfused"
    """Which of the kinds of variant this is."""
    rounding: Literal["nearest_even", "nearest_away"] = "nearest_even"
    """How a master is rounded to its bf16 weight: where ties between two neighbours go."""
    recipe: Recipe | None = field(default=None, metadata=DERIVED)
    """Under [float8]: how bf16 weights are cast to fp8 and back in the forward pass."""

    @property
    def recipe_misfit(self) -> tuple[str, object, str] | None:
        """The key, its value and what is allowed, where no recipe goes with this variant."""
        even = self.rounding == "nearest_even"
        return None if even else ("rounding", self.rounding, "'nearest_even' under [float8]")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerVariant(Baseline):
    """Another library's fused Adam with fp32 masters: a baseline for the contract of its bits."""

    name: str
    """Name in tables and records."""
    kind: Literal["peer"] = "peer"
    """Which of the kinds of variant this is."""
    library: Literal["transformer_engine"]
    """Whose optimizer trains; it must be installed, and the device be an NVIDIA GPU."""
    recipe: Recipe | None = field(default=None, metadata=DERIVED)
    """The recipe of an fp8 variant: None, as none goes with this kind."""

    @property
    def recipe_misfit(self) -> tuple[str, object, str] | None:
        """The key, its value and what is allowed: there are no peers for fp8 weights."""
        return "kind", self.kind, "'unfused' or 'fused' under [float8]"


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedVariant(Table):
    """`megaopt.FusedAdam` in one of its forms, compared with a baseline."""

    name: str
    """Name in tables and records."""
    kind: Literal["fused"] = "fused"
    """Which of the kinds of variant this is."""
    baseline: str
    """Name of the unfused or peer variant that this one must equal bit for bit."""
    contract: Literal["ieee", "te", "torch"] = "ieee"
    """Contract of FusedAdam."""
    backend: Literal["auto", "triton", "reference"] = "auto"
    """Backend of FusedAdam."""
    masters: Literal["created", "external", "remainders"] = "created"
    """fp32 masters that FusedAdam creates, a list of ours that it uses, or int16 remainders."""
    layout: Literal["whole", "groups_and_views"] = "whole"
    """The model's parameters, or two unaligned views of each, spread over four param groups."""
    resume_after: Count | None = None
    """Step after which the run is saved and continued in a fresh process; None: never."""
    ranks: Ranks | None = None
    """Processes that share the step, 1 to 64: each has an uneven, unaligned part of every weight
    and its state, and then gathers the others' weights. None: the step is of this process alone."""
    recipe: Recipe | None = field(default=None, metadata=DERIVED)
    """Under [float8]: how the weights of linear layers are kept in fp8."""

    def __post_init__(self) -> None:
        require(bool(self.baseline), "baseline", self.baseline, "the name of a baseline variant")
        if self.ranks is not None:
            for key, allowed in (("masters", "created"), ("layout", "whole")):
                value = getattr(self, key)
                require(value == allowed, key, value, f"{allowed!r} for a variant with ranks")
            resume = self.resume_after
            require(resume is None, "resume_after", resume, "left out of a variant with ranks")

    @property
    def recipe_misfit(self) -> tuple[str, object, str] | None:
        """The key, its value and what is allowed, where no recipe goes with this variant."""
        if self.masters == "remainders":
            return "masters", self.masters, "'created' or 'external' under [float8]"
        if self.layout != "whole":
            return "layout", self.layout, "'whole' under [float8], whose weights `ranks` cuts"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class GaLoreVariant(Table):
    """`megaopt.GaLoreAdamW`, compared with another run of it: no other step has its bits."""

    name: str
    """Name in tables and records."""
    kind: Literal["galore"] = "galore"
    """Which of the kinds of variant this is."""
    baseline: str | None = None
    """Name of the galore variant that this one must equal bit for bit; None: it is a baseline."""
    kernel: Literal["auto", "torch", "hybrid"] = "torch"
    """Kernel of GaLoreAdamW; with "hybrid" the rest goes by Triton too."""
    layout: Literal["whole", "groups"] = "whole"
    """The parameters in the model's order, or in the opposite one, spread over three times as many
    param groups."""
    resume_after: Count | None = None
    """Step after which the run is saved and continued in a fresh process; None: never."""
    recipe: Recipe | None = field(default=None, metadata=DERIVED)
    """The recipe of an fp8 variant: None, as none goes with this kind."""

    def __post_init__(self) -> None:
        if self.baseline is None:
            resume = self.resume_after
            require(resume is None, "resume_after", resume, "left out of a baseline")

    @property
    def recipe_misfit(self) -> tuple[str, object, str] | None:
        """The key, its value and what is allowed: fp8 weights are not projected."""
        return "kind", self.kind, "'unfused' or 'fused' under [float8]"


Variant = UnfusedVariant | PeerVariant | FusedVariant | GaLoreVariant


def require_name(name: str, names: list[str]) -> None:
    """Raises a `ConfigError` unless a variant's name may name files, and is in `names` once."""
    named = re.fullmatch(NAME, name) is not None
    allowed = "1 to 100 letters, digits, '_', '-' and '.'"
    require(named, "variant.name", name, allowed)
    require(names.count(name) == 1, "variant.name", name, "a name of one variant alone")


def with_recipe(variant: Variant, recipe: Recipe) -> Variant:
    """The variant with fp8 weights by this recipe, which leads its name and its baseline's."""
    name = f"{recipe}.{variant.name}"
    if isinstance(variant, FusedVariant):
        baseline = f"{recipe}.{variant.baseline}"
        return dataclasses.replace(variant, recipe=recipe, name=name, baseline=baseline)
    return dataclasses.replace(variant, recipe=recipe, name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Table):
    """A training run: a model, its text, its optimizer, and the variants to compare."""

    name: str
    """The config file's name without its ending; names the folder of the run's output."""
    seed: Seed
    """Seed of the initial weights and of the batches, 0 to 2**63-1."""
    steps: Count
    """Optimizer steps, at least 1."""
    batch_size: Count
    """Sequences in a batch, at least 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: on the GPU where there is one."""
    cpu_threads: Threads = 2
    """Threads of torch on the CPU, 1 to 1024: fixed, because sums depend on it."""
    model: ModelConfig
    """The model."""
    optimizer: OptimizerConfig
    """The hyper-parameters."""
    float8: Float8Config | None = None
    """fp8 weights; None: there are none."""
    galore: GaLoreConfig | None = None
    """How gradients are projected; there where a variant is of kind "galore"."""
    variant: tuple[ByKind[Variant], ...]
    """What is trained and compared; baselines first or last, as you like."""

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variant]
        require(len(names) > 0, "variant", [], "at least one table, [[variant]]")
        for variant in self.variant:
            self._check_variant(variant, names)
        if self.float8 is not None:
            self._check_float8(self.float8)

    def _check_variant(self, variant: Variant, names: list[str]) -> None:
        require_name(variant.name, names)
        is_galore = isinstance(variant, GaLoreVariant)
        if is_galore:
            require(self.galore is not None, "galore", None, "a table, as a variant is 'galore'")
        if variant.baseline is None:
            return
        own = [v for v in self.variant if isinstance(v, GaLoreVariant) is is_galore]
        baselines = [v.name for v in own if v.baseline is None]
        allowed = f"the name of a baseline variant: {', '.join(baselines) or 'there is none'}"
        require(
            variant.baseline in baselines, f"{variant.name}.baseline", variant.baseline, allowed
        )
        if variant.resume_after is not None:
            inside = variant.resume_after < self.steps
            key = f"{variant.name}.resume_after"
            require(inside, key, variant.resume_after, f"less than steps, which is {self.steps}")

    def _check_float8(self, float8: Float8Config) -> None:
        for variant in self.variant:
            if variant.recipe_misfit is not None:
                key, value, allowed = variant.recipe_misfit
                require(False, f"{variant.name}.{key}", value, allowed)
        if float8.scaled_matmul:
            width = self.model.width
            allowed = "a multiple of 16 with float8.scaled_matmul = true"
            require(width % 16 == 0, "model.width", width, allowed)

    @property
    def runs(self) -> tuple[Variant, ...]:
        """What is trained: the variants; under [float8] for each recipe, as "recipe.variant"."""
        if self.float8 is None:
            return self.variant
        return tuple(
            with_recipe(variant, recipe)
            for recipe in self.float8.recipes
            for variant in self.variant
        )

    def find_variant(self, name: str) -> Variant:
        """What is trained under that name; a `ConfigError` lists the names where there is none."""
        for variant in self.runs:
            if variant.name == name:
                return variant
        names = ", ".join(variant.name for variant in self.runs)
        raise ConfigError(f"variant must be one of {names}, got {shown(name)}")


def read_config(path: str | Path) -> RunConfig:
    """Reads a run from a TOML file.

    Args:
        path: the file; its stem becomes the run's name.

    Raises:
        ConfigError: the file cannot be read, is no TOML, is larger than 64 KiB, has an unknown key,
            lacks one, or holds a value of another type or outside its range.
    """
    return build_run(RunConfig, Path(path), read_toml(Path(path)))
