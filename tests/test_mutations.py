"""Every equality check is able to fail: each mutant changes one operation in the source.

A mutant is the module with one piece of its text replaced, loaded beside the true one; the check is
the one that tests/kernels/test_step.py makes.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from draw_cases import CASES, assert_words
from encoding_cases import (
    assert_encoded,
    assert_encodes,
    every_pattern_of_16_bits,
    oracle_codes,
    ties,
    upper_halves,
)
from float8_cases import EDGES, assert_e8m0, assert_scales, hard_amaxes, random_amaxes
from mutants import mutant
from step_cases import (
    CURATED,
    GROUP,
    assert_all_agree,
    assert_same_buffers,
    buffers,
    copied,
    name_of,
    oracle_step,
    reference_step,
    triton_step,
    with_format,
)

from megaopt import kernels
from megaopt.kernels.chunks import draws as true_draws
from megaopt.kernels.formats import FLOAT8_E4M3
from megaopt.kernels.formats.base import Format
from megaopt.kernels.quantizers import scale as true_scale
from megaopt.kernels.rules import RULES

SOURCES = Path(kernels.__file__).parent
PLAIN = next(f for f in CURATED if name_of(f) == "bfloat16-bfloat16-float32-float32-float32")
REMAINDER = next(
    f for f in CURATED if name_of(f) == "bfloat16-bfloat16-remainder16-float32-float32"
)
SCALED = next(f for f in CURATED if name_of(f) == "float32-float32-none-scaled_float16-bfloat16")
FLOAT8 = next(f for f in CURATED if name_of(f) == "float32-float32-none-scaled_float8_e4m3-float32")
KAHAN = next(f for f in CURATED if f.master.name == "kahan_stochastic")
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
        "return param - lr * update, after",
        "return (param.to(tl.float64) - lr.to(tl.float64) * update.to(tl.float64)).to(tl.float32)"
        ", after",
    ),
    "kernel: eps outside the root": (
        "exp_avg_sq * correction2, eps)",
        "exp_avg_sq * correction2 + eps, 0.0)",
    ),
    "kernel: other association of the square": (
        "one_minus_beta2 * (grad * grad)\n    return exp_avg, exp_avg_sq\n\n\n@helper",
        "(one_minus_beta2 * grad) * grad\n    return exp_avg, exp_avg_sq\n\n\n@helper",
    ),
    "kernel: reciprocal instead of division": (
        "quotient(exp_avg * correction1, exp_avg_sq",
        "(exp_avg * correction1) * quotient(tl.full((), 1.0, tl.float32), exp_avg_sq",
    ),
    "kernel: no weight decay": (
        "update = update + weight_decay * param",
        "pass",
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
        "return param - found * lr, after",
        "return (param.double() - found.double() * lr).float(), after",
    ),
    "both: bias correction off by one step": (
        'power(beta, group["step"])',
        'power(beta, group["step"] - 1)',
    ),
    "both: beta rounded to fp32 before the power": (
        'power(beta, group["step"])',
        'power(round_row([beta])[0], group["step"])',
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
        (SCALED, "exp_avg"),
    ),
    "scaled fp16 twin: other largest code": (
        "float16.py",
        ("CODE_MAX = 32752.0", "CODE_MAX = 65504.0"),
        (SCALED, "exp_avg"),
    ),
    "scaled fp8 kernel: scale left out": (
        "float8.py",
        ("return decode_e4m3(code, scale) * scale", "return decode_e4m3(code, scale)"),
        (FLOAT8, "exp_avg"),
    ),
    "scaled fp8 kernel: infinities saturate": (
        "float8.py",
        ("& 0x7FFFFFFF) < 0x7F800000", "& 0x7FFFFFFF) <= 0x7F800000"),
        (FLOAT8, "exp_avg"),
    ),
    "scaled fp8 twin: infinities saturate": (
        "float8.py",
        ("torch.where(value.isfinite(), scaled, torch.nan)", "scaled"),
        (FLOAT8, "exp_avg"),
    ),
    "scaled fp8 twin: other largest code": (
        "float8.py",
        ("CODE_MAX = 448.0", "CODE_MAX = 224.0"),
        (FLOAT8, "exp_avg"),
    ),
}  # fmt: skip

FLOAT8_MUTANTS = {
    "kernel: truncation": (
        "power = (tl.maximum(magnitude, E4M3_NORMAL) & 0x7F800000) + (DROPPED << 23)\n",
        "power = (tl.maximum(magnitude, E4M3_NORMAL) & 0x7F800000) + (DROPPED << 23)\n"
        "    magnitude = tl.where(magnitude < E4M3_NORMAL, magnitude, (magnitude >> DROPPED)"
        " << DROPPED)\n",
    ),
    "kernel: ties away": (
        "total = magnitude.to(tl.float32, bitcast=True)",
        "total = (magnitude | 1).to(tl.float32, bitcast=True)",
    ),
    "kernel: no subnormal codes": (
        "tl.maximum(magnitude, E4M3_NORMAL) & 0x7F800000",
        "magnitude & 0x7F800000",
    ),
    "kernel: subnormals end one binade too early": (
        "tl.maximum(magnitude, E4M3_NORMAL) & 0x7F800000",
        "tl.maximum(magnitude, E4M3_NORMAL - 0x800000) & 0x7F800000",
    ),
    "kernel: nothing saturates": (
        "tl.minimum(bits & 0x7FFFFFFF, E4M3_LARGEST)",
        "(bits & 0x7FFFFFFF)",
    ),
    "kernel: no sign": (" | ((bits >> 24) & 0x80)", ""),
    "twin: nothing saturates": (
        "value.clamp(-CODE_MAX, CODE_MAX).to(",
        "torch.where(value.abs() > CODE_MAX, torch.nan, value).to(",
    ),
    "twin: NaN as torch casts it": (
        "torch.where(value.isnan(), 0x7F, code)",
        "torch.where(value.isnan() & (value > 0), 0x7F, code)",
    ),
    "twin: rounded to bf16 first": (
        "value.clamp(-CODE_MAX, CODE_MAX).to(",
        "value.clamp(-CODE_MAX, CODE_MAX).bfloat16().to(",
    ),
}


SCALE_MUTANTS = {
    "kernel: approximate quotient": (
        "quotient = tl.math.div_rn(tl.full((), code_max, tl.float32), tl.where(usable, amax, 1.0))",
        "quotient = code_max * tl.math.div_rn(tl.full((), 1.0, tl.float32), "
        "tl.where(usable, amax, 1.0))",
    ),
    "kernel: infinite scales": ("tl.minimum(quotient.to(tl.int32, bitcast=True), LARGEST)",
                                "quotient.to(tl.int32, bitcast=True)"),
    "kernel: epsilon left out": ("tl.where(amax < epsilon, epsilon, amax)", "amax"),
    "kernel: infinite amaxes": ("(bits < INFINITY)", "(bits <= INFINITY)"),
    "kernel: powers of two to nearest": ("bits & INFINITY  #", "(bits + 0x400000) & INFINITY  #"),
    "kernel: 1 in place of the scale there is": (
        "bits.to(tl.float32, bitcast=True), otherwise)", "bits.to(tl.float32, bitcast=True), 1.0)",
    ),
    "kernel: subnormal reciprocals flushed": (
        "    return tl.math.div_rn(tl.full((), 1.0, tl.float32), scale)",
        "    inverse = tl.math.div_rn(tl.full((), 1.0, tl.float32), scale)\n"
        "    return tl.where(inverse < 2.0**-126, 0.0, inverse)",
    ),
    "twin: approximate quotient": (
        "torch.full_like(amax, code_max) / amax.masked_fill(~usable, 1.0)",
        "code_max / amax.masked_fill(~usable, 1.0)",
    ),
    "twin: infinite scales": ("quotient.clamp(max=FP32_MAX)", "quotient"),
    "twin: NaN is below epsilon": (
        "torch.where(amax < epsilon,", "torch.where(~(amax >= epsilon),",
    ),
    "twin: powers of two up": (
        "(quotient.view(torch.int32) & int(INFINITY))",
        "((quotient.view(torch.int32) + 0x7FFFFF) & int(INFINITY))",
    ),
}  # fmt: skip
ENCODING_MUTANTS = {
    "bf16 kernel: 15 bits": (
        ("bfloat16.py", "bfloat16_stochastic"),
        ("tl.where(value == value, pattern + bits", "tl.where(value == value, pattern + bits // 2"),
    ),
    "bf16 twin: to nearest": (
        ("bfloat16.py", "bfloat16_stochastic"),
        ("value.view(torch.int32) + bits)", "value.view(torch.int32) + 0x8000)"),
    ),
    "fp16 kernel: the lower of the bits": (
        ("float16.py", "float16_stochastic"),
        ("normal = ((magnitude + (bits >> 3)) >> 13) - ((127 - 15) << 10)\n    small = tl.",
         "normal = ((magnitude + (bits & 0x1FFF)) >> 13) - ((127 - 15) << 10)\n    small = tl."),
    ),
    "fp16 kernel: no subnormals": (
        ("float16.py", "float16_stochastic"),
        ("tl.where(magnitude < SMALLEST_NORMAL, (multiples + bits) >> 16, normal)", "normal"),
    ),
    "fp16 kernel: beyond infinity": (
        ("float16.py", "float16_stochastic"),
        ("tl.minimum(code, INFINITY)", "code"),
    ),
    "fp16 twin: no sign": (
        ("float16.py", "float16_stochastic"),
        ("code.clamp(max=INFINITE) | ((pattern >> 16) & 0x8000)",
         "code.clamp(max=INFINITE)"),
    ),
    "24 bits kernel: truncation": (
        ("remainder8.py", "remainder8"),
        ("split(value, bits + 0x7F + ((bits >> 8) & 1))", "split(value, bits)"),
    ),
    "24 bits kernel: ties away": (
        ("remainder8.py", "remainder8"),
        ("split(value, bits + 0x7F + ((bits >> 8) & 1))", "split(value, bits + 0x80)"),
    ),
    "24 bits kernel: no carry": (
        ("remainder8.py", "remainder8"),
        ("tl.where(code < 0, upper + 1, upper)", "upper"),
    ),
    "24 bits twin: no carry": (
        ("remainder8.py", "remainder8_stochastic"),
        ("upper = (pattern >> 16) + (code < 0).int()", "upper = (pattern >> 16) + 0 * code"),
    ),
    "24 bits kernel: the lower of the bits": (
        ("remainder8.py", "remainder8_stochastic"),
        ("value.to(tl.int32, bitcast=True) + (bits >> 8)",
         "value.to(tl.int32, bitcast=True) + (bits & 0xFF)"),
    ),
    "Kahan kernel: zeros without a sign": (
        ("kahan.py", "kahan"),
        ("(weight.to(tl.int32, bitcast=True) & -2147483648)",
         "(weight.to(tl.int32, bitcast=True) & 0)"),
    ),
    "Kahan kernel: infinities less infinity": (
        ("kahan.py", "kahan_float16"),
        ("is_some = (tl.abs(difference) > 0.0) & (tl.abs(weight) < float(\"inf\"))",
         "is_some = tl.abs(difference) > 0.0"),
    ),
    "Kahan twin: zeros without a sign": (
        ("kahan.py", "kahan_stochastic"),
        ("torch.copysign(torch.zeros_like(weight), weight)", "torch.zeros_like(weight)"),
    ),
    "Kahan twin: what the weight has too much": (
        ("kahan.py", "kahan"),
        ("difference = value - weight\n    is_some = (difference.abs()",
         "difference = weight - value\n    is_some = (difference.abs()"),
    ),
}  # fmt: skip
DRAW_MUTANTS = {
    "kernel: constant seed": ("none + key[2], key[0], key[1])", "none + key[2], none, none)"),
    "kernel: half of the seed": ("none + key[2], key[0], key[1])", "none + key[2], key[0], none)"),
    "kernel: step left out": ("none + key[2], key[0]", "none, key[0]"),
    "kernel: the step's upper half left out": (
        "sixteens(row_ptr, 4))",
        "tl.load(row_ptr + 4).to(tl.uint32))",
    ),
    "kernel: number left out": ("high, none + number,", "high, none,"),
    "kernel: local index": ("index = first + place\n", "index = place\n"),
    "kernel: local index, four at a time": ("quad = (first + start) // 4", "quad = start // 4"),
    "kernel: index in the chunk": ("place = start + offsets", "place = offsets"),
    "kernel: index of 32 bits": ("high = (index >> 32).to(tl.uint32)", "high = tl.zeros_like(low)"),
    "kernel: rows without their distance": ("(place // run) * stride", "(place // run) * run"),
    "kernel: another order": (
        "tl.join(words[0], words[2]), tl.join(words[1], words[3])",
        "tl.join(words[0], words[1]), tl.join(words[2], words[3])",
    ),
    "kernel: moments draw the same": ("    if INDEX != 1:", "    if INDEX != 2:"),
    "kernel: a third moment draws the first's": (
        "tl.static_range(INDEX - 1)",
        "tl.static_range(0)",
    ),
    "kernel: another polynomial": ("& 1) * REDUCED_BY", "& 1) * (REDUCED_BY ^ 2)"),
    "kernel: weights draw as exp_avg_sq": (
        "return word & 0xFFFF\n",
        "return (word >> 16) & 0xFFFF\n",
    ),
    "twin: constant seed": ("index >> 32, *rest), key)", "index >> 32, *rest), (0, 0))"),
    "twin: step left out": ("torch.full_like(index, step)", "torch.zeros_like(index)"),
    "twin: number left out": ("torch.full_like(index, number)", "torch.zeros_like(index)"),
    "twin: local index": ("index = place.first + offset", "index = offset"),
    "twin: lanes not skipped": ("skipped = place.first % 4", "skipped = 0"),
    "twin: exp_avg draws as the weight": ("upper = upper ^ words", "upper = words"),
}
E8M0_MUTANTS = {
    "kernel: rounded down": ("tl.minimum(exponent + 1, E8M0_LARGEST)", "exponent"),
    "kernel: 2**-127 rounded up": ("(bits <= TWO_TO_MINUS_127)", "(bits < TWO_TO_MINUS_127)"),
    "kernel: infinity is the NaN": ("tl.where(bits == INFINITY, E8M0_LARGEST, code)", "code"),
    "kernel: multiplier of 0xFE": (
        "tl.where(code == E8M0_LARGEST, TWO_TO_MINUS_127, (E8M0_LARGEST - code) << 23)",
        "(E8M0_LARGEST - code) << 23",
    ),
    "kernel: value of 0": ("tl.where(code == 0, TWO_TO_MINUS_127, code << 23)", "code << 23"),
    "twin: infinity is the NaN": (
        "masked_fill(quotient == torch.inf, 0xFE)",
        "masked_fill(quotient == torch.inf, 0xFF)",
    ),
    "twin: always up": ("torch.where(mantissa == 0.5, exponent - 1, exponent)", "exponent"),
    "twin: no NaN": (".masked_fill(nan, torch.nan)", ""),
}  # fmt: skip


@pytest.mark.parametrize("formats", [PLAIN, REMAINDER, SCALED, FLOAT8, KAHAN], ids=name_of)
def test_the_check_passes_on_the_true_source(formats, device):
    assert_all_agree(formats, RULES["adamw", "ieee"], GROUP, COUNTS, device)


@pytest.mark.parametrize("change", RULE_MUTANTS.values(), ids=RULE_MUTANTS)
def test_the_check_notices_a_mutant_of_the_rule(change, tmp_path, device):
    module = mutant(SOURCES / "rules" / "adam_ieee.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(PLAIN, module.ADAMW_IEEE, GROUP, COUNTS, device)


def test_the_check_notices_a_decay_without_the_compensation(tmp_path, device):
    """Of the weight as it is stored, instead of the value that it and what it lost are."""
    stored = "(param.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"
    old = "update = update + weight_decay * "
    module = mutant(SOURCES / "rules" / "adam_ieee.py", (f"{old}param", f"{old}{stored}"), tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(KAHAN, module.ADAMW_IEEE, GROUP, COUNTS, device)


def form_of(module, name):
    """A module's format of a name."""
    return next(f for f in vars(module).values() if isinstance(f, Format) and f.name == name)


def assert_encodes_upper_halves(form, device):
    values = upper_halves()
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**16, values.shape, generator=generator, dtype=torch.int32)
    assert_encoded(form, values, device, bits if form.draws else None)


@pytest.mark.parametrize("case", ENCODING_MUTANTS.values(), ids=ENCODING_MUTANTS)
@pytest.mark.halved
def test_the_check_notices_a_mutant_of_an_encoding(case, tmp_path, device):
    """The unchanged formats are checked in tests/kernels/test_stochastic.py."""
    (file, name), change = case
    module = mutant(SOURCES / "formats" / file, change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_encodes_upper_halves(form_of(module, name), device)


def assert_draws_all(module, device):
    for place, start in CASES:
        assert_words(place, start, 32, device, module=module)


@pytest.mark.parametrize("change", DRAW_MUTANTS.values(), ids=DRAW_MUTANTS)
def test_the_check_notices_a_mutant_of_the_draws(change, tmp_path, device):
    assert_draws_all(true_draws, device)
    module = mutant(SOURCES / "chunks" / "draws.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_draws_all(module, device)


@pytest.mark.parametrize("case", FORMAT_MUTANTS.values(), ids=FORMAT_MUTANTS)
def test_the_check_notices_a_mutant_of_a_format(case, tmp_path, device):
    file, change, (formats, slot) = case
    module = mutant(SOURCES / "formats" / file, change, tmp_path)
    mutated = with_format(formats, slot, getattr(module, formats.by_slot[slot].name.upper()))
    group = {**GROUP, "weight_decay": 0.0}  # it would move ties
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(mutated, RULES["adamw", "ieee"], group, COUNTS, device, ties=True)


def assert_encodes_all(form, device):
    values = every_pattern_of_16_bits()
    assert_encodes(form, values, oracle_codes(form, values).view(form.dtype), device)
    assert_encodes(form, *ties(form), device)


@pytest.mark.parametrize("change", FLOAT8_MUTANTS.values(), ids=FLOAT8_MUTANTS)
def test_the_check_notices_a_mutant_of_fp8(change, tmp_path, device):
    assert_encodes_all(FLOAT8_E4M3, device)
    module = mutant(SOURCES / "formats" / "float8.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_encodes_all(module.FLOAT8_E4M3, device)


def assert_scales_all(module, device):
    amax = torch.cat([EDGES, random_amaxes(500)])
    for epsilon in (0.0, 2.0):
        for power_of_two in (False, True):
            assert_scales(module, amax, 448.0, epsilon, power_of_two, device)


def assert_e8m0_all(module, device):
    assert_e8m0(module, hard_amaxes(448.0), 448.0, device)


@pytest.mark.parametrize(
    ("check", "change"),
    [(assert_scales_all, change) for change in SCALE_MUTANTS.values()]
    + [(assert_e8m0_all, change) for change in E8M0_MUTANTS.values()],
    ids=[*(f"scale {name}" for name in SCALE_MUTANTS), *(f"e8m0 {name}" for name in E8M0_MUTANTS)],
)
def test_the_check_notices_a_mutant_of_fp8_scales(check, change, tmp_path, device):
    check(true_scale, device)
    module = mutant(SOURCES / "quantizers" / "scale.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        check(module, device)


@pytest.mark.parametrize("step", [triton_step, reference_step], ids=["kernel", "twin"])
def test_the_check_notices_an_fp8_scale_that_is_the_quotient(step, device):
    """Most quotients are the reciprocal of their own reciprocal: it takes some tensors."""
    other = dataclasses.replace(FLOAT8.by_slot["exp_avg"], scale_of_inverse=False)
    found = buffers(FLOAT8, [3] * 40, device)
    wrong, expected = copied(found), copied(found)
    rule = RULES["adamw", "ieee"]
    oracle_step(expected, FLOAT8, rule, GROUP)
    step(found, FLOAT8, rule, GROUP)
    assert_same_buffers(found, expected)
    step(wrong, with_format(FLOAT8, "exp_avg", other), rule, GROUP)
    with pytest.raises(AssertionError, match="exp_avg_scale"):
        assert_same_buffers(wrong, expected)


def test_the_check_notices_another_optimizer(device):
    """An L2 Adam in the place of AdamW does not pass."""
    rule = dataclasses.replace(RULES["adam", "ieee"], name="adamw")
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(PLAIN, rule, GROUP, COUNTS, device)


def test_torch_is_on_the_cpu_as_the_oracle_expects():
    """No flush to zero: the oracle's denormals would differ from the twin's."""
    assert bool(torch.tensor(1e-41) * 1.0 > 0)
