"""The cases of the record, in its two parts.

Not every combination: each format of a slot stands beside each format that it is read or written
with, and each option stands where it has something to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaopt.commands.golden.case import Case
from megaopt.float8 import RECIPES

ANY_MACHINE, NVIDIA_GPU = "any machine", "NVIDIA GPU"


def _rows(text: str) -> tuple[str, ...]:
    """The ends of names, from lines of a weight, a master, and moments with variations.

    The weight "every" stands for each recipe of fp8 in turn.
    """
    return tuple(_names(text))


def _names(text: str) -> Iterator[str]:
    for weight, master, *ends in map(str.split, text.strip().splitlines()):
        for end in ends:
            for each in RECIPES if weight == "every" else (weight,):
                yield f"{each}-weight/{master}/{end}"


# each exp_avg beside each exp_avg_sq, each of both beside each master (a Latin square), each weight
# beside each master, each gradient beside each weight; the last three are what torch and
# TransformerEngine keep
FORMATS = _rows("""
    fp32 no-master     fp32-fp32 fp32-fp32/fp16-grad fp8-bf16/bf16-grad
    fp16 no-master     fp16-fp16
    bf16 no-master     bf16-fp8
    bf16 fp32-master   fp32-fp32 fp32-bf16/fp32-grad
    fp16 fp32-master   bf16-fp32/bf16-grad
    bf16 fp32-master   fp16-fp8
    fp16 fp32-master   fp8-fp16/fp32-grad
    bf16 fp16-master   fp32-fp16/fp16-grad bf16-bf16
    fp16 fp16-master   fp16-fp32
    bf16 fp16-master   fp8-fp8/fp32-grad
    bf16 remainder     fp32-fp8 bf16-fp16/fp32-grad fp16-bf16/fp16-grad fp8-fp32
    bf16 remainder     fp32-fp32
    bf16 no-master     bf16-bf16
    fp16 no-master     fp32-fp32
""")

# what is rounded stochastically, and masters beside their weights that lose bits
ROUNDED = _rows("""
    bf16 no-master-stochastic          stochastic-stochastic fp32-fp32/capturable
    fp16 no-master-stochastic          bf16-stochastic
    bf16 no-master-stochastic          stochastic-stochastic/overflow
    bf16 no-master-stochastic          stochastic-stochastic/nonfinite
    fp16 no-master-stochastic          stochastic-fp32/nonfinite
    bf16 no-master-stochastic          stochastic-stochastic/resume
    fp32 no-master                     stochastic-stochastic/late
    bf16 fp32-master                   stochastic-fp8
    bf16 remainder8-master             fp32-fp32
    bf16 remainder8-stochastic-master  stochastic-stochastic/fp32-grad fp32-fp32/nonfinite
    bf16 kahan-master                  fp32-fp32
    bf16 kahan-stochastic-master       stochastic-bf16 fp32-fp32/nonfinite
    fp16 kahan-master                  fp16-fp16
    fp16 kahan-stochastic-master       fp32-stochastic/clip
    current fp32-master                stochastic-fp32
""")

# moments in blocks; a master or weight of each kind beside them; the last rows are of 4 bits
BLOCKS = _rows("""
    bf16 no-master-stochastic  block_e4m3-block_e5m3 block_e4m3-block_e5m3/nonfinite
    bf16 fp32-master           block_e4m3-block_e5m3 block_e4m3-block_e5m3/resume
    fp32 no-master             block64_e4m3-block64_e5m3 block64_e4m3-block64_e5m3/capturable
    bf16 remainder             block_e4m3_nearest-block_e5m3_nearest
    bf16 remainder8-stochastic-master block64_e4m3_nearest-block64_e5m3_nearest/fp32-grad
    bf16 kahan-master          bf16-block_e5m3
    fp16 no-master-stochastic  block_e4m3-fp32/clip
    bf16 no-master-stochastic  block_int8-block_e5m3/nonfinite
    bf16 fp32-master           block_int8_nearest-block_e5m3
    fp32 no-master             block64_int8-block64_e5m3/resume
    bf16 remainder             block64_int8_nearest-bf16/capturable
    bf16 no-master-stochastic  block32_e3m0-block32_e4m0 block32_e3m0-block32_e4m0/nonfinite
    bf16 fp32-master           block32_e3m0_nearest-block32_e4m0/resume
    fp32 no-master             block32_e3m0-block32_e4m0_nearest/capturable
""")

# decay that is added to the gradient: moments depend on the parameter, in whatever format
L2 = _rows("""
    fp32 no-master    fp32-fp32 fp32-fp32/no-bias-correction fp32-fp32/capturable
    bf16 fp32-master  fp32-fp32
    bf16 remainder    bf16-bf16
    fp16 fp16-master  fp16-fp16
    bf16 no-master    fp8-fp8
""")

OPTIONS = _rows("""
    bf16 no-master    fp32-fp32
    fp16 fp32-master  fp32-fp32
    fp32 no-master    fp32-fp32/no-bias-correction fp32-fp32/late fp32-fp32/capturable/late
    bf16 fp32-master  fp32-fp32/capturable fp32-fp32/capturable/overflow
    bf16 remainder    fp16-fp8/capturable
    bf16 fp32-master  fp32-fp32/clip fp32-fp32/clip/round-scaled-grads
    fp16 fp32-master  fp32-fp32/clip/grad-scale fp32-fp32/clip/grad-scale/round-scaled-grads
    fp16 fp32-master  fp32-fp32/overflow
    bf16 fp32-master  fp8-fp16/clip/overflow fp32-fp32/skip
    bf16 fp16-master  fp16-fp8/skip/capturable
    fp32 no-master    fp32-fp32/nonfinite fp32-fp32/infinite/clip
    bf16 no-master    bf16-bf16/nonfinite
    bf16 remainder    bf16-bf16/nonfinite
    fp16 fp16-master  fp16-fp16/nonfinite
    bf16 fp32-master  fp8-fp8/nonfinite fp32-fp32/external-masters
    bf16 fp16-master  fp32-fp32/external-write
    bf16 fp32-master  fp32-fp32/external-write
    bf16 remainder    fp32-fp32/external-write
    bf16 fp32-master  fp32-fp32/resume
    bf16 remainder    fp8-fp8/resume
    fp16 fp16-master  fp16-fp16/resume
    bf16 no-master    bf16-fp8/resume
    bf16 fp32-master  fp32-fp32/capturable/resume
""")

# the last two are without fp32 masters: drawn, and with remainders
FLOAT8 = _rows("""
    every fp32-master           fp32-fp32
    every no-master             fp32-fp32
    every fp16-master           fp32-bf16
    every fp32-master           fp8-fp16 fp32-fp32/nonfinite fp32-fp32/direct-cast
    delayed fp32-master         fp32-fp32/resume
    mxfp8 fp32-master           fp32-fp32/resume
    current_direct fp32-master  fp32-fp32 fp32-fp32/rounded-cast
    current_powers fp32-master  fp32-fp32
    delayed_short fp32-master   bf16-bf16
    delayed_recent fp32-master  fp32-fp32
    current fp32-master         fp32-fp32/fp32-values
    mxfp8 fp32-master           fp32-fp32/fp16-values
    block_128x128 fp32-master   fp32-fp32/fp32-grad fp32-fp32/external-masters
    delayed fp32-master         fp32-fp32/capturable/overflow
    current fp32-master         fp32-fp32/clip
    mxfp8 no-master             fp32-fp32/clip/round-scaled-grads
    delayed no-master           fp32-fp32/skip
    block_128x128 no-master     fp8-fp8/resume
    every no-master-stochastic  fp32-fp32
    every remainder8-stochastic-master fp32-fp32
""")

# TransformerEngine's and torch's own bits: beside the formats, what their kernels do otherwise
TE = _rows("""
    fp32 no-master           fp32-fp32/no-bias-correction
    bf16 fp32-master         fp32-fp32/late fp32-fp32/capturable fp32-fp32/capturable/late
    bf16 fp32-master         fp32-fp32/capturable/overflow
    fp16 fp32-master         fp32-fp32/grad-scale
    bf16 fp32-master         fp32-fp32/clip
    bf16 remainder           fp32-fp32/nan
    bf16 fp32-master         fp8-fp8/nan
    bf16 remainder           fp8-fp8/resume
    every fp32-master        fp32-fp32
    delayed fp32-master      fp32-fp32/direct-cast
    block_128x128 no-master  fp8-fp8
""")
TORCH = _rows("""
    fp16 no-master     fp16-fp16/capturable
    bf16 no-master     bf16-bf16/capturable/late
    fp32 no-master     fp32-fp32/no-bias-correction fp32-fp32/late fp32-fp32/capturable
    fp32 no-master     fp32-fp32/grad-scale
    fp16 no-master     fp16-fp16/capturable/overflow
    fp32 no-master     fp32-fp32/clip fp32-fp32/nan fp32-fp32/resume
    every fp32-master  fp32-fp32
""")
# torch's kernel contracts otherwise under a scale
SCALED = _rows("fp32 no-master fp32-fp32/grad-scale")

AMSGRAD = _rows("""
    fp32 no-master             fp32-fp32 fp32-fp32/capturable
    bf16 remainder             bf16-fp8
    bf16 fp32-master           fp32-fp32/nonfinite fp8-fp16/resume
    block_128x128 fp32-master  fp32-fp32
""")
LION = _rows("""
    fp32 no-master             fp32 fp32/nonfinite fp32/maximize
    bf16 fp32-master           bf16/capturable
    bf16 remainder             fp8
    fp16 fp16-master           fp16/clip
    bf16 no-master             fp32/resume
    delayed fp32-master        fp32
    bf16 no-master-stochastic  stochastic block_e4m3
    fp32 no-master             block64_e4m3_nearest/maximize
""")
MOMENTUM = _rows("""
    fp32 no-master                     fp32 fp32/capturable
    bf16 fp32-master                   fp32/nonfinite
    bf16 remainder                     fp8
    mxfp8 fp32-master                  bf16
    bf16 remainder8-stochastic-master  stochastic
""")
HEAVY_BALL = _rows("""
    fp32 no-master  fp32/late fp32/resume
    bf16 remainder  block64_e4m3 block32_e3m0 block_int8
""")
NO_MOMENTUM = _rows("""
    fp32 no-master       no-moments
    bf16 fp32-master     no-moments/capturable
    fp16 fp16-master     no-moments
    current fp32-master  no-moments
""")
AMSGRAD_OF_TORCH = _rows("""
    fp32 no-master  fp32-fp32 fp32-fp32/capturable fp32-fp32/maximize
    bf16 no-master  bf16-bf16/nan
""")
# by projections with which products are exact; none is made anew within a case
GALORE = _rows("""
    fp32 no-master                fp32-fp32 fp32-fp32/no-bias-correction fp32-fp32/capturable/late
    fp32 no-master                fp32-fp32/late fp32-fp32/maximize
    bf16 fp32-master              fp32-fp32/capturable fp32-bf16/clip
    bf16 remainder                bf16-fp32/resume
    fp16 fp16-master              fp16-fp8/overflow
    bf16 no-master-stochastic     stochastic-stochastic
    fp16 kahan-stochastic-master  stochastic-fp32
    bf16 remainder8-master        block_e4m3-block_e5m3
    bf16 no-master-stochastic     block64_e4m3-block64_e5m3/capturable
""")
# by projections of any numbers: the products are tensor cores'
PRODUCTS = _rows("""
    fp32 no-master    fp32-fp32/tf32 fp32-fp32/bf16-products fp32-fp32/tf32/larger-side/capturable
    bf16 fp32-master  fp32-fp32/tf32 fp32-bf16/bf16-products/larger-side/clip
    bf16 remainder    bf16-fp32/bf16-products fp32-fp32/tf32/larger-side/resume
    fp16 fp16-master  fp16-fp32/bf16-products/larger-side/overflow
""")
# all products are tensor cores'
MUON = _rows("""
    fp32 no-master                     fp32 fp32/capturable fp32/nonfinite fp32/maximize
    bf16 fp32-master                   fp32/clip bf16/fp16-products fp32/capturable/overflow
    bf16 remainder                     bf16/gram bf16/gram/resume fp32/quintic
    fp16 fp16-master                   fp16/fp16-products/overflow fp8
    bf16 no-master-stochastic          stochastic block_e4m3/normuon
    bf16 remainder8-stochastic-master  block64_e4m3/gram
    bf16 remainder                     block_int8
    fp16 kahan-stochastic-master       stochastic/normuon/capturable
    fp32 no-master                     block32_e3m0/normuon/fp16-products/resume
""")
MAXIMIZE = _rows("bf16 fp32-master fp32-fp32/maximize")


def _cases(*rules: tuple[str, tuple[str, ...]]) -> list[Case]:
    return [Case(f"{rule}/{row}") for rule, rows in rules for row in rows]


def _without_fp8_moments(rows: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(row for row in rows if "fp8" not in row.split("/")[2])


CASES: dict[str, list[Case]] = {
    ANY_MACHINE: _cases(
        ("ieee/adamw", FORMATS + OPTIONS + FLOAT8 + ROUNDED + BLOCKS),
        ("ieee/adam", L2 + _rows("delayed fp32-master fp32-fp32")),
        ("ieee/adam", _rows("block_128x128 fp32-master fp8-fp32")),
        ("ieee/adam", _rows("bf16 fp32-master block_e4m3-block_e5m3")),
        ("ieee/adamw", MAXIMIZE),
        ("ieee/adam", MAXIMIZE),
        ("ieee/adamw_amsgrad", AMSGRAD),
        ("ieee/adam_amsgrad", AMSGRAD),
        ("ieee/adamw_amsgrad", _rows("bf16 fp32-master block_e4m3-block_e5m3_nearest")),
        ("ieee/galore", GALORE + PRODUCTS),
        ("ieee/muon", MUON),
        ("ieee/lion", LION),
        ("ieee/sgd", NO_MOMENTUM),
        ("ieee/sgdw", NO_MOMENTUM),
        ("ieee/sgd_momentum", MOMENTUM + HEAVY_BALL),
        ("ieee/sgd_nesterov", MOMENTUM),
        ("ieee/sgdw_nesterov", _rows("bf16 kahan-stochastic-master block_e4m3")),
        ("ieee/sgdw_momentum", MOMENTUM),
        ("ieee/sgdw_nesterov", MOMENTUM),
    ),
    NVIDIA_GPU: _cases(
        ("te/adamw", FORMATS + TE),
        ("te/adam", L2),
        ("torch/adamw", _without_fp8_moments(FORMATS) + TORCH),
        ("torch/adam", _without_fp8_moments(L2) + SCALED),
        ("torch/adamw_amsgrad", AMSGRAD_OF_TORCH),
        ("torch/adam_amsgrad", AMSGRAD_OF_TORCH),
    ),
}
"""The cases of each part: those for any machine, and those for an NVIDIA GPU alone."""
