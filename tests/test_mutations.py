"""Every equality check is able to fail: each mutant changes one operation in the source.

A mutant is the module with one piece of its text replaced, loaded beside the true one; the check is
the one that tests/kernels/test_step.py makes.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from mutants import mutant
from step_cases import CURATED, GROUP, assert_all_agree, name_of

from megaopt import kernels
from megaopt.kernels.rules import RULES

SOURCES = Path(kernels.__file__).parent
PLAIN = next(f for f in CURATED if name_of(f) == "bfloat16-bfloat16-float32-float32-float32")
REMAINDER = next(
    f for f in CURATED if name_of(f) == "bfloat16-bfloat16-remainder16-float32-float32"
)
SCALED = next(f for f in CURATED if name_of(f) == "float32-float32-none-scaled_float16-bfloat16")
COUNTS = [1, 1000]

RULE_MUTANTS = {
    "kernel: contraction of exp_avg": (
        "exp_avg = beta1 * exp_avg + one_minus_beta1 * grad\n    exp_avg_sq = beta2 * exp_avg_sq",
        # in fp64, since the interpreter's fma rounds twice
        "exp_avg = (beta1.to(tl.float64) * exp_avg.to(tl.float64)"
        " + (one_minus_beta1 * grad).to(tl.float64)).to(tl.float32)\n"
        "    exp_avg_sq = beta2 * exp_avg_sq",
    ),
    "kernel: contraction of param": (
        "param = param - lr * update\n    return canonical(param)",
        "param = (param.to(tl.float64) - lr.to(tl.float64) * update.to(tl.float64)).to(tl.float32)"
        "\n    return canonical(param)",
    ),
    "kernel: eps outside the root": (
        "tl.math.sqrt_rn(exp_avg_sq * correction2) + eps",
        "tl.math.sqrt_rn(exp_avg_sq * correction2 + eps)",
    ),
    "kernel: other association of the square": (
        "one_minus_beta2 * (grad * grad)\n    return exp_avg, exp_avg_sq\n\n\n@helper",
        "(one_minus_beta2 * grad) * grad\n    return exp_avg, exp_avg_sq\n\n\n@helper",
    ),
    "kernel: reciprocal instead of division": (
        "tl.math.div_rn(exp_avg * correction1, denominator)",
        "(exp_avg * correction1) * tl.math.div_rn(tl.full((), 1.0, tl.float32), denominator)",
    ),
    "kernel: NaN left as it comes": (
        "canonical(param), canonical(exp_avg), canonical(exp_avg_sq)\n\n\n@helper\ndef adam(",
        "param, canonical(exp_avg), canonical(exp_avg_sq)\n\n\n@helper\ndef adam(",
    ),
    "kernel: no weight decay": (
        "direction(exp_avg, exp_avg_sq, scalars) + weight_decay * param",
        "direction(exp_avg, exp_avg_sq, scalars)",
    ),
    "twin: eps outside the root": (
        "square_root_reference(exp_avg_sq * correction2) + eps",
        "square_root_reference(exp_avg_sq * correction2 + eps)",
    ),
    "twin: contraction of exp_avg": (
        "exp_avg * beta1 + grad * one_minus_beta1",
        "(exp_avg.double() * beta1 + (grad * one_minus_beta1).double()).float()",
    ),
    "twin: update in fp64": (
        "param = param - update * lr",
        "param = (param.double() - update.double() * lr).float()",
    ),
    "both: bias correction off by one step": (
        'power(beta, group["step"])',
        'power(beta, group["step"] - 1)',
    ),
    "both: beta rounded to fp32 before the power": (
        'power(beta, group["step"])',
        'power(round_to_fp32(beta), group["step"])',
    ),
}

FORMAT_MUTANTS = {
    "bfloat16 kernel: truncation": (
        "bfloat16.py",
        ("rounded = bits + 0x7FFF + ((bits >> 16) & 1)", "rounded = bits"),
        (PLAIN, "weight"),
    ),
    "bfloat16 kernel: ties away": (
        "bfloat16.py",
        ("rounded = bits + 0x7FFF + ((bits >> 16) & 1)", "rounded = bits + 0x8000"),
        (PLAIN, "weight"),
    ),
    "bfloat16 twin: truncation": (
        "bfloat16.py",
        (
            "code = value.to(torch.bfloat16)",
            "code = (value.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)",
        ),
        (PLAIN, "weight"),
    ),
    "remainder16 kernel: no carry": (
        "remainder16.py",
        ("tl.where(code < 0, upper + 1, upper)", "upper"),
        (REMAINDER, "master"),
    ),
    "remainder16 kernel: no carry taken back": (
        "remainder16.py",
        ("tl.where(code < 0, weight_code - 1, weight_code)", "weight_code"),
        (REMAINDER, "master"),
    ),
    "scaled fp16 kernel: scale left out": (
        "float16.py",
        ("return decode(code, scale) * scale", "return decode(code, scale)"),
        (SCALED, "first"),
    ),
    "scaled fp16 twin: other largest code": (
        "float16.py",
        ("CODE_MAX = 32752.0", "CODE_MAX = 65504.0"),
        (SCALED, "first"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("formats", [PLAIN, REMAINDER, SCALED], ids=name_of)
def test_the_check_passes_on_the_true_source(formats, device):
    assert_all_agree(formats, RULES["adamw", "ieee"], GROUP, COUNTS, device)


@pytest.mark.parametrize("change", RULE_MUTANTS.values(), ids=RULE_MUTANTS)
def test_the_check_notices_a_mutant_of_the_rule(change, tmp_path, device):
    module = mutant(SOURCES / "rules" / "adam_ieee.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(PLAIN, module.ADAMW_IEEE, GROUP, COUNTS, device)


@pytest.mark.parametrize("case", FORMAT_MUTANTS.values(), ids=FORMAT_MUTANTS)
def test_the_check_notices_a_mutant_of_a_format(case, tmp_path, device):
    file, change, (formats, slot) = case
    module = mutant(SOURCES / "formats" / file, change, tmp_path)
    name = {
        "bfloat16": "BFLOAT16",
        "remainder16": "REMAINDER16",
        "scaled_float16": "SCALED_FLOAT16",
    }
    changed = getattr(module, name[getattr(formats, slot).name])
    mutated = dataclasses.replace(formats, **{slot: changed})
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(mutated, RULES["adamw", "ieee"], GROUP, COUNTS, device)


def test_the_check_notices_another_optimizer(device):
    """An L2 Adam in the place of AdamW does not pass."""
    rule = dataclasses.replace(RULES["adam", "ieee"], name="adamw")
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(PLAIN, rule, GROUP, COUNTS, device)


def test_torch_is_on_the_cpu_as_the_oracle_expects():
    """No flush to zero: the oracle's denormals would differ from the twin's."""
    assert bool(torch.tensor(1e-41) * 1.0 > 0)
