"""Every kind of optimizer, a row for each rule and format; and short runs of one."""

import copy
import functools

import torch
from runs import BF16, FORMATS, FP8, FP16, FP32, MASTER, REMAINDERS, parameters, values

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD
from megaopt.float8 import RECIPES, Float8Weight

HYPER = {"lr": 0.01, "weight_decay": 0.1}
SEED = {"seed": 0x1234_5678_9ABC_DEF0}
STOCHASTIC = {"weight_rounding": "stochastic", **SEED}
DRAWN = {"exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic"}
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
NEAREST = {"exp_avg_dtype": "block_e4m3_nearest", "exp_avg_sq_dtype": "block_e5m3_nearest"}
BLOCKS4 = {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"}
NEAREST4 = {"exp_avg_dtype": "block32_e3m0_nearest", "exp_avg_sq_dtype": "block32_e4m0_nearest"}


def kept_as(dtype, **more):
    """Options of masters by their name; more: other options."""
    return {"master_weights": True, "master_weight_dtype": dtype, **SEED, **more}


def large():
    """Of which the first has moments in blocks, the others fp32 ones."""
    return parameters([(33, 128), (40, 104), (10,)])


def float8(recipe):
    weights = [values(shape, 3, BF16) for shape in ((40, 128), (3, 32))]
    return [torch.nn.Parameter(Float8Weight.from_values(w, RECIPES[recipe])) for w in weights]


PLAIN = {
    **{name: (FusedAdam, options) for name, options in FORMATS.items()},
    "counts apart": (FusedAdam, {**MASTER, "step_counts": "parameter"}),
    "l2": (FusedAdam, {**FORMATS["fp16_moments"], "adam_w_mode": False}),
    "amsgrad": (FusedAdam, {**MASTER, "amsgrad": True}),
    "maximize": (FusedAdam, {**REMAINDERS, "maximize": True, "bias_correction": False}),
    "drawn": (FusedAdam, {**STOCHASTIC, **DRAWN}),
    "24 bits": (FusedAdam, kept_as("remainder8")),
    "24 bits, drawn": (FusedAdam, kept_as("remainder8_stochastic", exp_avg_dtype=FP16)),
    "kahan": (FusedAdam, kept_as("kahan", **DRAWN)),
    "lion": (FusedLion, MASTER),
    "lion, kahan": (FusedLion, kept_as("kahan_stochastic", exp_avg_dtype="bfloat16_stochastic")),
    "sgd": (FusedSGD, STOCHASTIC),
    "momentum": (FusedSGD, {**MASTER, "momentum": 0.9, "dampening": 0.25}),
    "nesterov": (FusedSGD, {**REMAINDERS, "momentum": 0.9, "nesterov": True,
                            "momentum_buffer_dtype": FP8}),
    "sgdw": (FusedSGD, {"momentum": 0.9, "decoupled_weight_decay": True}),
}  # fmt: skip
IN_BLOCKS = {
    "blocks": (FusedAdam, {**BLOCKS, **STOCHASTIC}),
    "blocks, masters": (FusedAdam, {**NEAREST, **MASTER}),
    "blocks, 24 bits": (FusedAdam, kept_as("remainder8", **BLOCKS)),
    "blocks, kahan": (FusedAdam, kept_as("kahan_stochastic", **BLOCKS)),
    "blocks, exp_avg_sq": (FusedAdam, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": "block_e5m3"}),
    "blocks, amsgrad": (FusedAdam, {**NEAREST, "amsgrad": True}),
    "blocks, lion": (FusedLion, {"exp_avg_dtype": "block_e4m3", **MASTER}),
    "4 bits": (FusedAdam, {**BLOCKS4, **STOCHASTIC}),
    "4 bits, masters": (FusedAdam, {**NEAREST4, **MASTER}),
    "4 bits, remainders": (FusedAdam, {**BLOCKS4, **REMAINDERS, "adam_w_mode": False}),
    "4 bits, 24 bits": (FusedAdam, kept_as("remainder8_stochastic", **BLOCKS4)),
    "4 bits, sgd": (FusedSGD, {"momentum": 0.9, "nesterov": True,
                               "momentum_buffer_dtype": "block32_e3m0"}),
}  # fmt: skip
OF_MATRICES = {
    "muon": (FusedMuon, {**MASTER, "nesterov": False}),
    "muon, fp16": (FusedMuon, {**REMAINDERS, "precision": "fp16", "momentum_buffer_dtype": BF16}),
    "muon, drawn": (FusedMuon, {**STOCHASTIC, **DRAWN,
                                "momentum_buffer_dtype": "bfloat16_stochastic"}),
    "muon, kahan": (FusedMuon, kept_as("kahan_stochastic", maximize=True)),
    "muon, 24 bits": (FusedMuon, kept_as("remainder8_stochastic", momentum_buffer_dtype=FP16)),
    "muon, blocks": (FusedMuon, {**BLOCKS, **MASTER, "momentum_buffer_dtype": "block_e4m3"}),
    "muon, 4 bits": (FusedMuon, {**NEAREST4, **SEED, "momentum_buffer_dtype": "block32_e3m0"}),
    "normuon": (FusedMuon, {"second_moment": "normuon", "momentum_buffer_dtype": FP8}),
}  # fmt: skip
FLOAT8_KEPT = {
    "masters": MASTER,
    "stochastic": {**STOCHASTIC, **BLOCKS},
    "remainder8": kept_as("remainder8_stochastic", exp_avg_dtype=FP8, exp_avg_sq_dtype=FP16),
    "nothing": {},
}
IN_FP8 = {
    f"fp8 {recipe}, {name}": (FusedAdam, options)
    for place, recipe in enumerate(RECIPES)
    for name, options in list(FLOAT8_KEPT.items())[: 4 if place == 0 else 3]
}
KINDS = {**PLAIN, **IN_BLOCKS, **OF_MATRICES, **IN_FP8}


def params_for(kind):
    """New parameters, the same each time, that a kind is for."""
    if kind in IN_FP8:
        return float8(kind.split()[1].rstrip(","))
    return large() if kind in IN_BLOCKS or kind in OF_MATRICES else parameters()


def made(kind, params=None, **more):
    make, options = KINDS[kind]
    params = params_for(kind) if params is None else params
    return make(params, **{**HYPER, **options, **more})


def maker(kind):
    return functools.partial(made, kind)


def on_the_host(found):
    """A snapshot with lr and step counts as numbers, lr rounded to fp32."""
    for group in found["groups"]:
        group["lr"] = float(torch.as_tensor(group["lr"], dtype=FP32))
    for counted in (*found["groups"], *filter(None, found["states"])):
        if "step" in counted:
            counted["step"] = int(counted["step"])
    return found


def with_weights_of(optimizer, kind, **more):
    """Another optimizer of a kind, of the same weights, which it shares no memory with."""
    params = copy.deepcopy([param for g in optimizer.param_groups for param in g["params"]])
    return made(kind, params, **more)
