"""megaopt's own optimizers are held to the bit; what differs in a bit is found."""

import warnings

import pytest
import torch
from wrong_steps import Model, audited

from megaopt import FusedAdam, FusedLion, FusedSGD

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ADAM = {"weight_decay": 0.1, "eps": 1e-6}
SGD = {"momentum": 0.9, "weight_decay": 0.01}
KINDS = {
    "fp32": (FusedAdam, FP32, ADAM),
    "fp16 weights": (FusedAdam, FP16, {**ADAM, "master_weights": False}),
    "masters": (FusedAdam, BF16, {**ADAM, "dtype": FP32}),
    "fp16 masters": (FusedAdam, BF16, {"master_weights": True, "master_weight_dtype": FP16}),
    "remainders": (FusedAdam, BF16, {"dtype": FP32, "store_param_remainders": True}),
    "remainder8": (FusedAdam, BF16, {"master_weights": True, "master_weight_dtype": "remainder8"}),
    "kahan": (FusedAdam, FP16, {"master_weights": True, "master_weight_dtype": "kahan_stochastic"}),
    "fp8 moments": (FusedAdam, FP32, {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": FP16}),
    "drawn moments": (FusedAdam, FP32, {"exp_avg_dtype": "bfloat16_stochastic", "seed": 7}),
    "drawn weights": (FusedAdam, BF16, {**ADAM, "weight_rounding": "stochastic", "seed": 9}),
    "amsgrad": (FusedAdam, FP32, {"amsgrad": True, "maximize": True}),
    "L2": (FusedAdam, FP32, {**ADAM, "adam_w_mode": False, "bias_correction": False}),
    "lion": (FusedLion, BF16, {"weight_decay": 0.1, "dtype": FP32}),
    "sgd": (FusedSGD, FP32, {"weight_decay": 0.1}),
    "nesterov": (FusedSGD, FP32, {**SGD, "nesterov": True}),
    "dampening": (FusedSGD, FP32, {**SGD, "dampening": 0.5, "decoupled_weight_decay": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_bits_are_the_twins(tmp_path, kind):
    make, dtype, options = KINDS[kind]
    model = Model(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = audited(tmp_path, model, make(model.parameters(), lr=1e-3, **options), 4)
    # a first step makes fp16 masters of a scale that nobody sees
    assert report.checked == (9 if kind == "fp16 masters" else 12)
    assert (report.obeys, report.equal_bits) == (True, report.checked)


@pytest.mark.parametrize("kind", ["fp32", "masters", "remainders", "drawn weights", "sgd"])
def test_a_bit_is_found(tmp_path, kind):
    make, dtype, options = KINDS[kind]
    model = Model(dtype=dtype)
    optimizer = make(model.parameters(), lr=1e-3, **options)

    def flip(*_):
        if optimizer.param_groups[0]["step"] == 3 or make is FusedSGD:
            number = model.parts[1].detach().view(torch.int32 if dtype == FP32 else torch.int16)
            number[5] ^= 1

    optimizer.register_step_post_hook(flip)
    report = audited(tmp_path, model, optimizer, 3)
    first = report.findings[0]
    # weight and remainder are one number
    expected = "master" if kind == "remainders" else "weight"
    assert (first.name, first.quantity) == ("parts.1", expected)


def test_formats_in_blocks_are_not_checked(tmp_path):
    model = Model(((64, 128),))
    optimizer = FusedAdam(model.parameters(), exp_avg_dtype="block_e4m3")
    report = audited(tmp_path, model, optimizer)
    assert report.obeys is None
    assert dict(report.not_checked) == {"the blocks of exp_avg are not sampled": {"parts.0"}}
