"""The cases of the record, in its two parts.

Not every combination: each format of a slot stands beside each format that it is read or written
with, and each option stands where it has something to do.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaopt.commands.golden.case import Case
from megaopt.float8 import RECIPES

ANY_MACHINE, NVIDIA_GPU = "any machine", "NVIDIA GPU"

# each exp_avg beside each exp_avg_sq, each of both beside each master (a Latin square), each weight
# beside each master, each gradient beside each weight
FORMATS = (
    "fp32-weight/no-master/fp32-fp32",
    "fp32-weight/no-master/fp32-fp32/fp16-grad",
    "fp32-weight/no-master/fp8-bf16/bf16-grad",
    "fp16-weight/no-master/fp16-fp16",
    "bf16-weight/no-master/bf16-fp8",
    "bf16-weight/fp32-master/fp32-fp32",
    "bf16-weight/fp32-master/fp32-bf16/fp32-grad",
    "fp16-weight/fp32-master/bf16-fp32/bf16-grad",
    "bf16-weight/fp32-master/fp16-fp8",
    "fp16-weight/fp32-master/fp8-fp16/fp32-grad",
    "bf16-weight/fp16-master/fp32-fp16/fp16-grad",
    "bf16-weight/fp16-master/bf16-bf16",
    "fp16-weight/fp16-master/fp16-fp32",
    "bf16-weight/fp16-master/fp8-fp8/fp32-grad",
    "bf16-weight/remainder/fp32-fp8",
    "bf16-weight/remainder/bf16-fp16/fp32-grad",
    "bf16-weight/remainder/fp16-bf16/fp16-grad",
    "bf16-weight/remainder/fp8-fp32",
    # what torch and TransformerEngine keep
    "bf16-weight/remainder/fp32-fp32",
    "bf16-weight/no-master/bf16-bf16",
    "fp16-weight/no-master/fp32-fp32",
)

# what is rounded stochastically, and masters beside their weights that lose bits
ROUNDED = (
    "bf16-weight/no-master-stochastic/stochastic-stochastic",
    "bf16-weight/no-master-stochastic/fp32-fp32/capturable",
    "fp16-weight/no-master-stochastic/bf16-stochastic",
    "bf16-weight/no-master-stochastic/stochastic-stochastic/overflow",
    "bf16-weight/no-master-stochastic/stochastic-stochastic/nonfinite",
    "fp16-weight/no-master-stochastic/stochastic-fp32/nonfinite",
    "bf16-weight/no-master-stochastic/stochastic-stochastic/resume",
    "fp32-weight/no-master/stochastic-stochastic/late",
    "bf16-weight/fp32-master/stochastic-fp8",
    "bf16-weight/remainder8-master/fp32-fp32",
    "bf16-weight/remainder8-stochastic-master/stochastic-stochastic/fp32-grad",
    "bf16-weight/remainder8-stochastic-master/fp32-fp32/nonfinite",
    "bf16-weight/kahan-master/fp32-fp32",
    "bf16-weight/kahan-stochastic-master/stochastic-bf16",
    "bf16-weight/kahan-stochastic-master/fp32-fp32/nonfinite",
    "fp16-weight/kahan-master/fp16-fp16",
    "fp16-weight/kahan-stochastic-master/fp32-stochastic/clip",
    "current-weight/fp32-master/stochastic-fp32",
)

# moments in blocks; a master or weight of each kind beside them
BLOCKS = (
    "bf16-weight/no-master-stochastic/block_e4m3-block_e5m3",
    "bf16-weight/no-master-stochastic/block_e4m3-block_e5m3/nonfinite",
    "bf16-weight/fp32-master/block_e4m3-block_e5m3",
    "bf16-weight/fp32-master/block_e4m3-block_e5m3/resume",
    "fp32-weight/no-master/block64_e4m3-block64_e5m3",
    "fp32-weight/no-master/block64_e4m3-block64_e5m3/capturable",
    "bf16-weight/remainder/block_e4m3_nearest-block_e5m3_nearest",
    "bf16-weight/remainder8-stochastic-master/block64_e4m3_nearest-block64_e5m3_nearest/fp32-grad",
    "bf16-weight/kahan-master/bf16-block_e5m3",
    "fp16-weight/no-master-stochastic/block_e4m3-fp32/clip",
    # of 4 bits
    "bf16-weight/no-master-stochastic/block32_e3m0-block32_e4m0",
    "bf16-weight/no-master-stochastic/block32_e3m0-block32_e4m0/nonfinite",
    "bf16-weight/fp32-master/block32_e3m0_nearest-block32_e4m0/resume",
    "fp32-weight/no-master/block32_e3m0-block32_e4m0_nearest/capturable",
)

# decay that is added to the gradient: moments depend on the parameter, in whatever format
L2 = (
    "fp32-weight/no-master/fp32-fp32",
    "fp32-weight/no-master/fp32-fp32/no-bias-correction",
    "fp32-weight/no-master/fp32-fp32/capturable",
    "bf16-weight/fp32-master/fp32-fp32",
    "bf16-weight/remainder/bf16-bf16",
    "fp16-weight/fp16-master/fp16-fp16",
    "bf16-weight/no-master/fp8-fp8",
)

OPTIONS = (
    "bf16-weight/no-master/fp32-fp32",
    "fp16-weight/fp32-master/fp32-fp32",
    "fp32-weight/no-master/fp32-fp32/no-bias-correction",
    "fp32-weight/no-master/fp32-fp32/late",
    "fp32-weight/no-master/fp32-fp32/capturable/late",
    "bf16-weight/fp32-master/fp32-fp32/capturable",
    "bf16-weight/fp32-master/fp32-fp32/capturable/overflow",
    "bf16-weight/remainder/fp16-fp8/capturable",
    "bf16-weight/fp32-master/fp32-fp32/clip",
    "bf16-weight/fp32-master/fp32-fp32/clip/round-scaled-grads",
    "fp16-weight/fp32-master/fp32-fp32/clip/grad-scale",
    "fp16-weight/fp32-master/fp32-fp32/clip/grad-scale/round-scaled-grads",
    "fp16-weight/fp32-master/fp32-fp32/overflow",
    "bf16-weight/fp32-master/fp8-fp16/clip/overflow",
    "bf16-weight/fp32-master/fp32-fp32/skip",
    "bf16-weight/fp16-master/fp16-fp8/skip/capturable",
    "fp32-weight/no-master/fp32-fp32/nonfinite",
    "fp32-weight/no-master/fp32-fp32/infinite/clip",
    "bf16-weight/no-master/bf16-bf16/nonfinite",
    "bf16-weight/remainder/bf16-bf16/nonfinite",
    "fp16-weight/fp16-master/fp16-fp16/nonfinite",
    "bf16-weight/fp32-master/fp8-fp8/nonfinite",
    "bf16-weight/fp32-master/fp32-fp32/external-masters",
    "bf16-weight/fp16-master/fp32-fp32/external-write",
    "bf16-weight/fp32-master/fp32-fp32/external-write",
    "bf16-weight/remainder/fp32-fp32/external-write",
    "bf16-weight/fp32-master/fp32-fp32/resume",
    "bf16-weight/remainder/fp8-fp8/resume",
    "fp16-weight/fp16-master/fp16-fp16/resume",
    "bf16-weight/no-master/bf16-fp8/resume",
    "bf16-weight/fp32-master/fp32-fp32/capturable/resume",
)

FLOAT8 = (
    *(f"{recipe}-weight/fp32-master/fp32-fp32" for recipe in RECIPES),
    *(f"{recipe}-weight/no-master/fp32-fp32" for recipe in RECIPES),
    *(f"{recipe}-weight/fp16-master/fp32-bf16" for recipe in RECIPES),
    *(f"{recipe}-weight/fp32-master/fp8-fp16" for recipe in RECIPES),
    *(f"{recipe}-weight/fp32-master/fp32-fp32/nonfinite" for recipe in RECIPES),
    *(f"{recipe}-weight/fp32-master/fp32-fp32/direct-cast" for recipe in RECIPES),
    "delayed-weight/fp32-master/fp32-fp32/resume",
    "mxfp8-weight/fp32-master/fp32-fp32/resume",
    "current_direct-weight/fp32-master/fp32-fp32",
    "current_direct-weight/fp32-master/fp32-fp32/rounded-cast",
    "current_powers-weight/fp32-master/fp32-fp32",
    "delayed_short-weight/fp32-master/bf16-bf16",
    "delayed_recent-weight/fp32-master/fp32-fp32",
    "current-weight/fp32-master/fp32-fp32/fp32-values",
    "mxfp8-weight/fp32-master/fp32-fp32/fp16-values",
    "block_128x128-weight/fp32-master/fp32-fp32/fp32-grad",
    "block_128x128-weight/fp32-master/fp32-fp32/external-masters",
    "delayed-weight/fp32-master/fp32-fp32/capturable/overflow",
    "current-weight/fp32-master/fp32-fp32/clip",
    "mxfp8-weight/no-master/fp32-fp32/clip/round-scaled-grads",
    "delayed-weight/no-master/fp32-fp32/skip",
    "block_128x128-weight/no-master/fp8-fp8/resume",
    # without fp32 masters: drawn, and with remainders
    *(f"{recipe}-weight/no-master-stochastic/fp32-fp32" for recipe in RECIPES),
    *(f"{recipe}-weight/remainder8-stochastic-master/fp32-fp32" for recipe in RECIPES),
)

# TransformerEngine's and torch's own bits: beside the formats, what their kernels do otherwise
TE = (
    "fp32-weight/no-master/fp32-fp32/no-bias-correction",
    "bf16-weight/fp32-master/fp32-fp32/late",
    "bf16-weight/fp32-master/fp32-fp32/capturable",
    "bf16-weight/fp32-master/fp32-fp32/capturable/late",
    "bf16-weight/fp32-master/fp32-fp32/capturable/overflow",
    "fp16-weight/fp32-master/fp32-fp32/grad-scale",
    "bf16-weight/fp32-master/fp32-fp32/clip",
    "bf16-weight/remainder/fp32-fp32/nan",
    "bf16-weight/fp32-master/fp8-fp8/nan",
    "bf16-weight/remainder/fp8-fp8/resume",
    *(f"{recipe}-weight/fp32-master/fp32-fp32" for recipe in RECIPES),
    "delayed-weight/fp32-master/fp32-fp32/direct-cast",
    "block_128x128-weight/no-master/fp8-fp8",
)
TORCH = (
    "fp16-weight/no-master/fp16-fp16/capturable",
    "bf16-weight/no-master/bf16-bf16/capturable/late",
    "fp32-weight/no-master/fp32-fp32/no-bias-correction",
    "fp32-weight/no-master/fp32-fp32/late",
    "fp32-weight/no-master/fp32-fp32/capturable",
    "fp32-weight/no-master/fp32-fp32/grad-scale",
    "fp16-weight/no-master/fp16-fp16/capturable/overflow",
    "fp32-weight/no-master/fp32-fp32/clip",
    "fp32-weight/no-master/fp32-fp32/nan",
    "fp32-weight/no-master/fp32-fp32/resume",
    *(f"{recipe}-weight/fp32-master/fp32-fp32" for recipe in RECIPES),
)
L2_OF_TORCH = (
    *(name for name in L2 if "fp8" not in name),
    # torch's kernel contracts otherwise under a scale
    "fp32-weight/no-master/fp32-fp32/grad-scale",
)


AMSGRAD = (
    "fp32-weight/no-master/fp32-fp32",
    "fp32-weight/no-master/fp32-fp32/capturable",
    "bf16-weight/remainder/bf16-fp8",
    "bf16-weight/fp32-master/fp32-fp32/nonfinite",
    "bf16-weight/fp32-master/fp8-fp16/resume",
    "block_128x128-weight/fp32-master/fp32-fp32",
)
LION = (
    "fp32-weight/no-master/fp32",
    "fp32-weight/no-master/fp32/nonfinite",
    "fp32-weight/no-master/fp32/maximize",
    "bf16-weight/fp32-master/bf16/capturable",
    "bf16-weight/remainder/fp8",
    "fp16-weight/fp16-master/fp16/clip",
    "bf16-weight/no-master/fp32/resume",
    "delayed-weight/fp32-master/fp32",
    "bf16-weight/no-master-stochastic/stochastic",
)
MOMENTUM = (
    "fp32-weight/no-master/fp32",
    "fp32-weight/no-master/fp32/capturable",
    "bf16-weight/fp32-master/fp32/nonfinite",
    "bf16-weight/remainder/fp8",
    "mxfp8-weight/fp32-master/bf16",
    "bf16-weight/remainder8-stochastic-master/stochastic",
)
NO_MOMENTUM = (
    "fp32-weight/no-master/no-moments",
    "bf16-weight/fp32-master/no-moments/capturable",
    "fp16-weight/fp16-master/no-moments",
    "current-weight/fp32-master/no-moments",
)
AMSGRAD_OF_TORCH = (
    "fp32-weight/no-master/fp32-fp32",
    "fp32-weight/no-master/fp32-fp32/capturable",
    "fp32-weight/no-master/fp32-fp32/maximize",
    "bf16-weight/no-master/bf16-bf16/nan",
)
# by projections with which products are exact; none is made anew within a case
GALORE = (
    "fp32-weight/no-master/fp32-fp32",
    "fp32-weight/no-master/fp32-fp32/no-bias-correction",
    "fp32-weight/no-master/fp32-fp32/capturable/late",
    "fp32-weight/no-master/fp32-fp32/late",
    "fp32-weight/no-master/fp32-fp32/maximize",
    "bf16-weight/fp32-master/fp32-fp32/capturable",
    "bf16-weight/fp32-master/fp32-bf16/clip",
    "bf16-weight/remainder/bf16-fp32/resume",
    "fp16-weight/fp16-master/fp16-fp8/overflow",
    "bf16-weight/no-master-stochastic/stochastic-stochastic",
    "fp16-weight/kahan-stochastic-master/stochastic-fp32",
    "bf16-weight/remainder8-master/block_e4m3-block_e5m3",
    "bf16-weight/no-master-stochastic/block64_e4m3-block64_e5m3/capturable",
)
MAXIMIZE = "bf16-weight/fp32-master/fp32-fp32/maximize"


def _of(contract: str, rule: str, rows: Iterable[str]) -> list[Case]:
    return [Case(f"{contract}/{rule}/{row}") for row in rows]


def _without_fp8_moments(rows: Iterable[str]) -> list[str]:
    return [row for row in rows if "fp8" not in row.split("/")[2]]


CASES: dict[str, list[Case]] = {
    ANY_MACHINE: [
        *_of("ieee", "adamw", (*FORMATS, *OPTIONS, *FLOAT8, *ROUNDED, *BLOCKS)),
        *_of("ieee", "adam", (*L2, "delayed-weight/fp32-master/fp32-fp32")),
        *_of("ieee", "adam", ("block_128x128-weight/fp32-master/fp8-fp32",)),
        *_of("ieee", "adam", ("bf16-weight/fp32-master/block_e4m3-block_e5m3",)),
        *(case for rule in ("adamw", "adam") for case in _of("ieee", rule, (MAXIMIZE,))),
        *_of("ieee", "adamw_amsgrad", AMSGRAD),
        *_of("ieee", "adam_amsgrad", AMSGRAD),
        *_of("ieee", "adamw_amsgrad", ("bf16-weight/fp32-master/block_e4m3-block_e5m3_nearest",)),
        *_of("ieee", "galore", GALORE),
        *_of("ieee", "lion", LION),
        *_of("ieee", "lion", ("bf16-weight/no-master-stochastic/block_e4m3",)),
        *_of("ieee", "lion", ("fp32-weight/no-master/block64_e4m3_nearest/maximize",)),
        *(case for rule in ("sgd", "sgdw") for case in _of("ieee", rule, NO_MOMENTUM)),
        *_of("ieee", "sgd_momentum", (*MOMENTUM, "fp32-weight/no-master/fp32/late")),
        *_of("ieee", "sgd_momentum", ("fp32-weight/no-master/fp32/resume",)),
        *_of("ieee", "sgd_momentum", ("bf16-weight/remainder/block64_e4m3",)),
        *_of("ieee", "sgd_momentum", ("bf16-weight/remainder/block32_e3m0",)),
        *_of("ieee", "sgd_nesterov", MOMENTUM),
        *_of("ieee", "sgdw_nesterov", ("bf16-weight/kahan-stochastic-master/block_e4m3",)),
        *_of("ieee", "sgdw_momentum", MOMENTUM),
        *_of("ieee", "sgdw_nesterov", MOMENTUM),
    ],
    NVIDIA_GPU: [
        *_of("te", "adamw", (*FORMATS, *TE)),
        *_of("te", "adam", L2),
        *_of("torch", "adamw", (*_without_fp8_moments(FORMATS), *TORCH)),
        *_of("torch", "adam", L2_OF_TORCH),
        *_of("torch", "adamw_amsgrad", AMSGRAD_OF_TORCH),
        *_of("torch", "adam_amsgrad", AMSGRAD_OF_TORCH),
    ],
}
"""The cases of each part: those for any machine, and those for an NVIDIA GPU alone."""
