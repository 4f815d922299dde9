"""megaopt's own optimizers are held to the bit; what differs in a bit is found."""

import warnings

import pytest
import torch
from wrong_steps import Model, audited

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD

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
    "muon": (FusedMuon, FP32, {"weight_decay": 0.1, "adam_eps": 1e-6}),
    "muon's masters": (FusedMuon, BF16, {"dtype": FP32, "nesterov": False, "maximize": True}),
    "muon's remainders": (FusedMuon, BF16, {"dtype": FP32, "store_param_remainders": True,
                                            "momentum_buffer_dtype": FP16}),
    "drawn muon": (FusedMuon, BF16, {"weight_rounding": "stochastic", "seed": 9,
                                     "momentum_buffer_dtype": "bfloat16_stochastic"}),
    "dampening": (FusedSGD, FP32, {**SGD, "dampening": 0.5, "decoupled_weight_decay": True}),
}  # fmt: skip


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


@pytest.mark.parametrize("kind", ["fp32", "masters", "remainders", "drawn weights", "sgd", "muon"])
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


@pytest.mark.parametrize("contract", ["ieee", "eo"])
def test_a_wrong_momentum_of_muon_is_found(tmp_path, contract):
    """What is not checked is said: the update, which takes the whole gradient."""
    model = Model()
    groups = [
        {"params": [model.parts[0]], "split_sizes": None},
        {"params": list(model.parts[1:]), "use_muon": False, "eps": 1e-4},
    ]
    optimizer = FusedMuon(groups, contract=contract)
    report = audited(tmp_path / "right", model, optimizer)
    assert (report.obeys, report.checked) == (True, 12)
    assert report.equal_bits == (12 if contract == "ieee" else 8)
    assert dict(report.not_checked) == {
        "the update of a matrix takes its whole gradient": {"parts.0"}
    }

    def scale(*_):
        optimizer.state[model.parts[0]]["momentum_buffer"].mul_(1 + 2**-16)

    optimizer.register_step_post_hook(scale)
    first = audited(tmp_path / "wrong", model, optimizer, 2).findings[0]
    assert (first.name, first.quantity) == ("parts.0", "momentum_buffer")


def test_a_bit_of_muons_momentum_is_found(tmp_path):
    model = Model()
    optimizer = FusedMuon(model.parameters())

    def flip(*_):
        if optimizer.param_groups[0]["step"] == 3:
            optimizer.state[model.parts[0]]["momentum_buffer"].view(torch.int32).bitwise_xor_(1)

    optimizer.register_step_post_hook(flip)
    (first,) = audited(tmp_path, model, optimizer, 3).findings
    assert (first.step, first.name, first.quantity) == (3, "parts.0", "momentum_buffer")
    assert first.explanation == "other bits, within rounding"


def test_a_stale_master_beside_muon_is_found(tmp_path):
    model = Model(dtype=BF16)
    optimizer = FusedMuon(model.parameters(), lr=0.5, dtype=FP32)
    before = model.parts[0].detach().clone()
    optimizer.register_step_post_hook(lambda *_: model.parts[0].detach().copy_(before))
    first = audited(tmp_path, model, optimizer, 1).findings[0]
    assert (first.name, first.quantity) == ("parts.0", "weight")


def test_formats_in_blocks_are_not_checked(tmp_path):
    model = Model(((64, 128),))
    optimizer = FusedAdam(model.parameters(), exp_avg_dtype="block_e4m3")
    report = audited(tmp_path, model, optimizer)
    assert report.obeys is None
    assert dict(report.not_checked) == {"the blocks of exp_avg are not sampled": {"parts.0"}}
