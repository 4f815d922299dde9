"""Rules beside Adam's two: any number of moments, on kernel, twin and an independent oracle."""

from pathlib import Path

import pytest
from mutants import mutant
from step_cases import (
    CURATED,
    GROUP,
    OTHER_RULES,
    assert_all_agree,
    with_rule,
)

from megaopt import kernels
from megaopt.kernels.rules import RULES

SOURCES = Path(kernels.__path__[0])


MUTANTS = {
    "lion kernel: the direction by beta2": (
        "lion.py",
        (
            "sign(beta1 * exp_avg + one_minus_beta1 * grad)",
            "sign(beta2 * exp_avg + one_minus_beta2 * grad)",
        ),
        "LION",
    ),
    "lion kernel: sign of a zero is 1": (
        "lion.py",
        ("tl.where(value > 0.0", "tl.where(value >= 0.0"),
        "LION",
    ),
    "lion kernel: no decay": (
        "lion.py",
        (" grad) + weight_decay * param\n    param = param - lr", " grad)\n    param = param - lr"),
        "LION",
    ),
    "lion twin: average by beta1": (
        "lion.py",
        ("exp_avg * beta2 + grad * one_minus_beta2", "exp_avg * beta1 + grad * one_minus_beta1"),
        "LION",
    ),
    "sgd kernel: Nesterov is plain momentum": (
        "sgd.py",
        ("update + momentum * momentum_buffer if NESTEROV", "momentum_buffer if NESTEROV"),
        "SGD_RULES",
        2,
    ),
    "sgd kernel: dampening left out": (
        "sgd.py",
        ("momentum * moments[0] + kept * update", "momentum * moments[0] + update"),
        "SGD_RULES",
        1,
    ),
    "sgd twin: decay before the momentum": (
        "sgd.py",
        ("found = grad if decoupled else", "found = grad if not decoupled else"),
        "SGD_RULES",
        4,
    ),
    "both: the first step is dampened": (
        "sgd.py",
        ('1.0 if group["step"] == 1 else', '1.0 if group["step"] == 0 else'),
        "SGD_RULES",
        1,
        1,
    ),
    "amsgrad kernel: the root of the newest": (
        "adam_ieee.py",
        (
            "update = direction(exp_avg, squares, scalars)",
            "update = direction(exp_avg, exp_avg_sq, scalars)",
        ),
        "ADAMW_AMSGRAD_IEEE",
    ),
    "amsgrad kernel: NaN forgotten": (
        "adam_ieee.py",
        (
            "(max_exp_avg_sq >= exp_avg_sq) | (max_exp_avg_sq != max_exp_avg_sq)",
            "max_exp_avg_sq >= exp_avg_sq",
        ),
        "ADAMW_AMSGRAD_IEEE",
    ),
    "amsgrad twin: fmax": (
        "adam_ieee.py",
        ("torch.maximum(moments[2], exp_avg_sq)", "torch.fmax(moments[2], exp_avg_sq)"),
        "ADAMW_AMSGRAD_IEEE",
    ),
}


@pytest.mark.parametrize("case", MUTANTS.values(), ids=MUTANTS)
def test_the_check_notices_a_mutant(case, tmp_path, device):
    file, change, name, *more = case
    module = mutant(SOURCES / "rules" / file, change, tmp_path)
    rule = getattr(module, name)
    rule = rule[more[0]] if more else rule
    group = {**GROUP, "step": more[1]} if len(more) > 1 else GROUP
    formats = with_rule(CURATED[0], rule)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(formats, rule, group, [1, 1000], device)


def test_a_mutant_is_not_noticed_for_nothing(device):
    for rule in OTHER_RULES:
        assert_all_agree(with_rule(CURATED[0], rule), rule, GROUP, [1, 1000], device)
    assert RULES["lion", "ieee"] in OTHER_RULES
