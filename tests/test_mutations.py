"""Every equality check is able to fail: each mutant changes one operation in the source.

A mutant is the module with one piece of its text replaced, loaded beside the true one; the checks
are those that tests/kernels makes.
"""

import dataclasses
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import block_cases
import pytest
import torch
from block_cases import BLOCKS, BLOCKS_OF_4_BITS, LINEAR, assert_stored, random_values
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
    block_combinations,
    buffers,
    copied,
    name_of,
    oracle_step,
    reference_step,
    triton_step,
    with_format,
    with_rule,
)

from megaopt import kernels
from megaopt.kernels.chunks import codes
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.formats.base import Format
from megaopt.kernels.place import Place
from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.base import Rule
from megaopt.kernels.step import kernel, update

ADAMW = RULES["adamw", "ieee"]
FORMATS = {
    name_of(each): each
    for each in (*CURATED, *block_combinations([128]), *block_combinations([32]))
}
PLAIN = FORMATS["bfloat16-bfloat16-float32-float32-float32"]
REMAINDER = FORMATS["bfloat16-bfloat16-remainder16-float32-float32"]
SCALED = FORMATS["float32-float32-none-scaled_float16-bfloat16"]
FLOAT8 = FORMATS["float32-float32-none-scaled_float8_e4m3-float32"]
KAHAN = next(each for each in CURATED if each.master.name == "kahan_stochastic")
IN_BLOCKS = FORMATS["bfloat16-bfloat16_stochastic-none-block_e4m3-block_e5m3"]
OF_4_BITS = FORMATS["bfloat16-bfloat16_stochastic-none-block32_e3m0-block32_e4m0"]
COUNTS = [1, 1000]


def named(module, name):
    """A module's rule or format of a name."""
    own = [each for value in vars(module).values() for each in _all_of(value)]
    return next(each for each in own if isinstance(each, (Rule, Format)) and each.name == name)


def _all_of(value):
    return value if isinstance(value, tuple) else [value]


# --- the checks: of a module, true or changed, and what more a mutant says


class Here(NamedTuple):
    """What checks are made with."""

    device: torch.device
    patch: pytest.MonkeyPatch
    folder: Path


def steps(module, here, name="adamw", formats=PLAIN, step=GROUP["step"]):
    """name: of the rule."""
    rule = named(module, name)
    if rule.name == "galore_direction":  # it has neither weight nor master
        formats = with_format(with_format(formats, "weight", WEIGHTS["float32"]), "master", NONE)
    group = {**GROUP, "scale": 0.3, "step": step}
    assert_all_agree(with_rule(formats, rule), rule, group, COUNTS, here.device)


def steps_of_galore(module, here):
    steps(module, here, "galore_direction", FORMATS["float32-float32-none-float32-float32"])
    steps(module, here, "galore_apply", FORMATS["float32-float32-none-float32-float32"])


def steps_of_muon(module, here):
    for nesterov in (True, False):
        for name in ("muon_direction", "muon_apply"):
            rule, formats = named(module, name), FORMATS["float32-float32-none-float32-float32"]
            own = {**GROUP, "nesterov": nesterov, "weight_decay": 300.0}
            assert_all_agree(with_rule(formats, rule), rule, own, COUNTS, here.device)


def steps_with(module, here, formats, slot):
    mutated = with_format(formats, slot, named(module, formats.by_slot[slot].name))
    group = {**GROUP, "weight_decay": 0.0}  # it would move ties
    assert_all_agree(mutated, ADAMW, group, COUNTS, here.device, ties=True)


def encodes(module, here, name):
    form, values = named(module, name), upper_halves().view(-1, 9)[::8].flatten()
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**16, values.shape, generator=generator, dtype=torch.int32)
    assert_encoded(form, values, here.device, bits if form.draws else None)


def encodes_fp8(module, here):
    form, values = module.FLOAT8_E4M3, every_pattern_of_16_bits()
    assert_encodes(form, values, oracle_codes(form, values).view(form.dtype), here.device)
    assert_encodes(form, *ties(form), here.device)


def scales(module, here):
    amax = torch.cat([EDGES, random_amaxes(500)])
    for epsilon in (0.0, 2.0):
        for power_of_two in (False, True):
            assert_scales(module, amax, 448.0, epsilon, power_of_two, here.device)


def scales_e8m0(module, here):
    assert_e8m0(module, hard_amaxes(448.0), 448.0, here.device)


def draws(module, here):
    for place, start in CASES:
        assert_words(place, start, 32, here.device, module=module)


def hard_blocks(size):
    """A power of two, beyond the smallest scale and the largest, an infinity; each in a block."""
    values = torch.zeros(6, size)
    values[:, 20] = torch.tensor([1.0, 1e-40, 3.4e38, torch.inf, 0.75, 0.0])
    values[:, 21] = 1e-42
    return values.view(-1)


TIES = torch.tensor([2.0, 1.0625, 1.1875, 1.3125, -1.0625, 0.53125])
# beside 2: numbers, ties, one below the smallest, and what rounds to 0 with a sign
TIES_OF_4_BITS = torch.tensor([2.0, 1.5, 1.125, -0.5625, 0.375, 1e-4, -1e-9, 0.75] * 4)
VALUES = {
    1: torch.cat([TIES, torch.zeros(122), random_values(2000)]),
    2: torch.cat([TIES_OF_4_BITS, hard_blocks(32), random_values(2000)]),
}


def assert_stores(form, here, values=None, **more):
    values = VALUES[form.packed] if values is None else values
    assert_stored(form, values, here.device, 12 + form.packed, **more)


def stores(module, here, name):
    assert_stores(named(module, name), here)


def stores_in_windows(module, here):
    """By tiles that take their windows from the module."""
    here.patch.setitem(sys.modules, module.__name__, module)
    imports = ("from megaopt.kernels.formats.block8 import", f"from {module.__name__} import")
    tiles = mutant(SOURCES / "chunks" / "blocks.py", imports, here.folder)
    assert_stores(BLOCKS[0], here, hard_blocks(128), module=tiles)
    assert_stores(BLOCKS_OF_4_BITS[0], here, module=tiles)


def stores_tiles(module, here, form):
    assert_stores(form, here, module=module)


def stores_as_twin(module, here, form):
    for name in ("store_blocks", "decoded"):
        here.patch.setattr(block_cases, name, getattr(module, name))
    assert_stores(form, here)


def steps_in_blocks(module, here, name, formats):
    """The kernel as a whole; name: of the changed function."""
    for where in (kernel, update, codes):
        if hasattr(where, name):
            here.patch.setattr(where, name, getattr(module, name))
    places = [Place(0), Place(1, 128 + 5 if formats is IN_BLOCKS else 32 + 6)]
    own = (ADAMW, GROUP, [4000, 700], here.device, Geometry(1024, 3))
    assert_all_agree(formats, *own, places=places)


# --- the mutants


E8, E4, LINEAR8 = BLOCKS[0], BLOCKS_OF_4_BITS[0], LINEAR[0]
INT8 = "block_int8"
E4M3, E5M3, E3M0, E4M0 = "block_e4m3", "block_e5m3", "block32_e3m0", "block32_e4m0"
FP16, BF16, DRAWN24 = "float16_stochastic", "bfloat16_stochastic", "remainder8_stochastic"
AVERAGE = "beta1 * exp_avg + one_minus_beta1 * grad"
TWIN_AVERAGE = "exp_avg * beta1 + grad * one_minus_beta1"
AMSGRAD = "adamw_amsgrad"
DECAYED = "update + weight_decay * param"
MOVED = "return param - lr * update, after"
WIDE = "(param.to(tl.float64) - lr.to(tl.float64) * update.to(tl.float64)).to(tl.float32)"
DRAWN, DRAWN_OF_4_BITS = "(bits << 4) | 8", "(bits << 7) | 64"
MUTANTS = {
    ("rules/adam_ieee.py", steps): {
        # in fp64, since the interpreter's fma rounds twice
        "kernel: contraction of exp_avg": (
            AVERAGE,
            "(beta1.to(tl.float64) * exp_avg.to(tl.float64)"
            " + (one_minus_beta1 * grad).to(tl.float64)).to(tl.float32)",
        ),
        "kernel: contraction of param": (MOVED, MOVED.replace("param - lr * update", WIDE)),
        "kernel: eps outside the root": ("correction2, eps)", "correction2 + eps, 0.0)"),
        "kernel: other association of the square": (
            "_beta2 * (grad * grad)",
            "_beta2 * grad * grad",
        ),
        "kernel: reciprocal instead of division": (
            "quotient(exp_avg * correction1",
            "(exp_avg * correction1) * quotient(tl.full((), 1.0, tl.float32)",
        ),
        "kernel: no weight decay": (DECAYED, "update"),
        # of the weight as it is stored, instead of the value that it and what it lost are
        "kernel: a decay without the compensation": (
            DECAYED,
            "update + weight_decay"
            " * (param.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)",
            "adamw",
            KAHAN,
        ),
        "twin: eps outside the root": ("correction2) + eps", "correction2 + eps)"),
        "twin: contraction of exp_avg": (
            TWIN_AVERAGE,
            "(exp_avg.double() * beta1 + (grad * one_minus_beta1).double()).float()",
        ),
        "twin: update in fp64": (
            "return param - direction * lr",
            "return (param.double() - direction.double() * lr).float()",
        ),
        "both: bias correction off by one step": ('group["step"])', 'group["step"] - 1)'),
        "both: beta rounded before the power": ("power(beta,", "power(round_row([beta])[0],"),
        "kernel: AMSGrad by the newest": (
            "exp_avg, squares, s",
            "exp_avg, exp_avg_sq, s",
            AMSGRAD,
        ),
        "kernel: AMSGrad forgets NaN": ("max_exp_avg_sq != max_exp_avg_sq", "False", AMSGRAD),
        "twin: AMSGrad by fmax": ("torch.maximum(", "torch.fmax(", AMSGRAD),
    },
    ("rules/lion.py", steps): {
        "kernel: the direction by beta2": (AVERAGE, AVERAGE.replace("beta1", "beta2"), "lion"),
        "kernel: sign of a zero is 1": ("value > 0.0", "value >= 0.0", "lion"),
        "kernel: no decay": (" grad) + weight_decay * param", " grad)", "lion"),
        "twin: average by beta1": (TWIN_AVERAGE.replace("beta1", "beta2"), TWIN_AVERAGE, "lion"),
    },
    ("rules/sgd.py", steps): {
        "kernel: Nesterov is plain momentum": (
            "update + momentum * momentum_b",
            "momentum_b",
            "sgd_nesterov",
        ),
        "kernel: dampening left out": ("grad_share * update", "update", "sgd_momentum"),
        "twin: decay before the momentum": (
            "grad if decoupled",
            "grad if not decoupled",
            "sgdw_momentum",
        ),
        "both: the first step is dampened": (
            'group["step"] == 1',
            'group["step"] == 0',
            "sgd_momentum",
            PLAIN,
            1,
        ),
    },
    ("rules/galore.py", steps_of_galore): {
        "no scale": ('lr * float(group["scale"])', "lr"),
        "no bias correction": ('if group["bias_correction"]:', "if False:"),
        "bias correction of the next step": ('beta1, group["step"])', 'beta1, group["step"] + 1)'),
        "kernel: eps under the root": ("(exp_avg_sq) + eps", "(exp_avg_sq + eps)"),
        "kernel: decay of the weight before": ("grad\n    param = param", "grad"),
        "twin: eps under the root": ("root = exp_avg_sq", "root = (exp_avg_sq + scalars[6])"),
        "twin: decay first": (
            "param - grad * step_size\n    return param - param * decay",
            "param - param * decay\n    return param - grad * step_size",
        ),
        "twin: the root in fp32": ("exp_avg_sq.double()", "(exp_avg_sq * (1 + 2**-23))"),
    },
    ("rules/muon.py", steps_of_muon): {
        "never nesterov": ("mixed = momentum if nesterov else 1.0", "mixed = 1.0"),
        "decay by an lr of fp64": ('lr = round_to_fp32(float(group["lr"]))', 'lr = group["lr"]'),
        "kernel: the buffer as it was": (
            "mixed * buffer + grad_share",
            "mixed * moments[0] + grad_share",
        ),
        "kernel: decay of what is updated": (
            "decay_factor * param - lr * grad",
            "decay_factor * (param - lr * grad)",
        ),
        "twin: the gradient whole": ("buffer * mixed + grad * grad_share", "buffer * mixed + grad"),
        "twin: decay of what is updated": (
            "param * decay_factor - grad * lr",
            "(param - grad * lr) * decay_factor",
        ),
    },
    ("formats/bfloat16.py", steps_with): {
        "kernel: ties away": ("0x7FFF + ((bits >> 16) & 1)", "0x8000", PLAIN, "weight"),
        "twin: truncation": (
            "code = value.to",
            "code = (value.view(torch.int32) & -65536).view(torch.float32).to",
            PLAIN,
            "weight",
        ),
    },
    ("formats/remainder16.py", steps_with): {
        "kernel: no carry": ("upper + 1, upper)", "upper, upper)", REMAINDER, "master"),
        "kernel: no carry taken back": (
            "code - 1, weight_code)",
            "code, weight_code)",
            REMAINDER,
            "master",
        ),
    },
    ("formats/float16.py", steps_with): {
        "kernel: scale left out": ("decode(code, scale) * scale", "code", SCALED, "exp_avg"),
        "twin: other largest code": ("32752.0", "65504.0", SCALED, "exp_avg"),
    },
    ("formats/float8.py", steps_with): {
        "kernel: scale left out": ("scale) * scale", "scale)", FLOAT8, "exp_avg"),
        "kernel: infinities saturate": ("< 0x7F800000", "<= 0x7F800000", FLOAT8, "exp_avg"),
        "twin: infinities saturate": (
            "torch.where(value.isfinite(), scaled, torch.nan)",
            "scaled",
            FLOAT8,
            "exp_avg",
        ),
        "twin: other largest code": ("CODE_MAX = 448.0", "CODE_MAX = 224.0", FLOAT8, "exp_avg"),
    },
    ("formats/float8.py", encodes_fp8): {
        "kernel: ties away": ("= magnitude.to", "= (magnitude | 1).to"),
        "kernel: subnormals end too early": (
            "(magnitude, E4M3_NORMAL)",
            "(magnitude, E4M3_NORMAL - 0x800000)",
        ),
        "kernel: nothing saturates": (", E4M3_LARGEST)", ", 0x7FFFFFFF)"),
        "kernel: no sign": (" | ((bits >> 24) & 0x80)", ""),
        "twin: nothing saturates": (
            "value.clamp(-CODE_MAX, CODE_MAX)",
            "torch.where(value.abs() > CODE_MAX, torch.nan, value)",
        ),
        "twin: NaN as torch casts it": ("value.isnan(), 0x7F", "value.isnan() & (value > 0), 127"),
        "twin: rounded to bf16 first": ("CODE_MAX).to(", "CODE_MAX).bfloat16().to("),
    },
    ("formats/bfloat16.py", encodes): {
        "kernel: 15 bits": ("pattern + bits,", "pattern + bits // 2,", BF16),
        "twin: to nearest": ("+ bits)", "+ 0x8000)", BF16),
    },
    ("formats/float16.py", encodes): {
        "kernel: the lower of the bits": (
            "(bits >> 3)) >> 13) - ((127 - 15) << 10)\n    small = tl",
            "(bits & 0x1FFF)) >> 13) - ((127 - 15) << 10)\n    small = tl",
            FP16,
        ),
        "kernel: no subnormals": ("< SMALLEST_NORMAL", "< 0", FP16),
        "kernel: beyond infinity": ("(code, INFINITY)", "(code, code)", FP16),
        "twin: no sign": ("INFINITE) | ((pattern >> 16) & 0x8000)", "INFINITE)", FP16),
    },
    ("formats/remainder8.py", encodes): {
        "kernel: ties away": ("0x7F + ((bits >> 8) & 1))\n\n\n@", "0x80)\n\n\n@", "remainder8"),
        "kernel: no carry": ("upper + 1, upper)", "upper, upper)", "remainder8"),
        "twin: no carry": ("(code < 0).int()", "0 * code", DRAWN24),
        "kernel: the lower of the bits": (
            "(bits >> 8))\n\n\ndef",
            "(bits & 0xFF))\n\n\ndef",
            DRAWN24,
        ),
    },
    ("formats/kahan.py", encodes): {
        "kernel: zeros without a sign": ("& -2147483648", "& 0", "kahan"),
        "kernel: infinities less infinity": (
            ' & (tl.abs(weight) < float("inf"))',
            "",
            "kahan_float16",
        ),
        "twin: zeros without a sign": (
            "torch.copysign(torch.zeros_like(weight), weight)",
            "torch.zeros_like(weight)",
            "kahan_stochastic",
        ),
        "twin: what the weight has too much": (
            "value - weight\n    is_some",
            "weight - value\n    is_some",
            "kahan",
        ),
    },
    ("quantizers/scale.py", scales): {
        "kernel: approximate quotient": (
            "tl.math.div_rn(tl.full((), code_max,",
            "code_max * tl.math.div_rn(tl.full((), 1.0,",
        ),
        "kernel: infinite scales": ("bitcast=True), LARGEST)", "bitcast=True), 0x7FFFFFFF)"),
        "kernel: epsilon left out": ("amax < epsilon, epsilon, amax)", "False, amax, amax)"),
        "kernel: infinite amaxes": ("(bits < INFINITY)", "(bits <= INFINITY)"),
        "kernel: powers of two to nearest": ("= bits & INF", "= (bits + 0x400000) & INF"),
        "kernel: 1 in place of the scale there is": ("True), otherwise)", "True), 1.0)"),
        "kernel: subnormal reciprocals flushed": (
            "    return tl.math.div_rn(tl.full((), 1.0, tl.float32), scale)",
            "    inverse = tl.math.div_rn(tl.full((), 1.0, tl.float32), scale)\n"
            "    return tl.where(inverse < 2.0**-126, 0.0, inverse)",
        ),
        "twin: approximate quotient": ("torch.full_like(amax, code_max)", "code_max"),
        "twin: infinite scales": (".clamp(max=FP32_MAX)", ""),
        "twin: NaN is below epsilon": ("amax < epsilon, torch", "~(amax >= epsilon), torch"),
        "twin: powers of two up": (
            "(quotient.view(torch.int32)",
            "((quotient.view(torch.int32) + 0x7FFFFF)",
        ),
    },
    ("quantizers/scale.py", scales_e8m0): {
        "kernel: rounded down": ("tl.minimum(exponent + 1, E8M0_LARGEST)", "exponent"),
        "kernel: 2**-127 rounded up": ("<= TWO_TO_MINUS_127", "< TWO_TO_MINUS_127"),
        "kernel: infinity is the NaN": ("INFINITY, E8M0_LARGEST, code", "INFINITY, code, code"),
        "kernel: multiplier of 0xFE": ("(code == E8M0_LARGEST, TWO", "(code == 999, TWO"),
        "kernel: value of 0": ("(code == 0, TWO", "(code == 999, TWO"),
        "twin: infinity is the NaN": ("torch.inf, 0xFE)", "torch.inf, 0xFF)"),
        "twin: always up": ("(mantissa == 0.5, exponent - 1", "(mantissa == 0.5, exponent"),
        "twin: no NaN": (".masked_fill(nan, torch.nan)", ""),
    },
    ("chunks/draws.py", draws): {
        "kernel: half of the seed": ("key[0], key[1]", "key[0], none"),
        "kernel: half of the step": ("sixteens(row_ptr, 4)", "tl.load(row_ptr + 4).to(tl.uint32)"),
        "kernel: number left out": ("high, none + number,", "high, none,"),
        "kernel: local index": ("index = first + place\n", "index = place\n"),
        "kernel: local index, four at a time": ("(first + start) // 4", "start // 4"),
        "kernel: index in the chunk": ("place = start + offsets", "place = offsets"),
        "kernel: index of 32 bits": ("(index >> 32).to(tl.uint32)", "tl.zeros_like(low)"),
        "kernel: rows without their distance": ("(place // run) * stride", "place // run * run"),
        "kernel: another order": ("words[2]), tl.join(words[1],", "words[1]), tl.join(words[2],"),
        "kernel: moments draw the same": ("if INDEX != 1:", "if INDEX != 2:"),
        "kernel: a third moment draws the first's": ("range(INDEX - 1)", "range(0)"),
        "kernel: another polynomial": ("& 1) * REDUCED_BY", "& 1) * (REDUCED_BY ^ 2)"),
        "kernel: weights draw as exp_avg_sq": ("word & 0xFFFF\n", "(word >> 16) & 0xFFFF\n"),
        "twin: constant seed": ("index >> 32, *rest), key)", "index >> 32, *rest), (0, 0))"),
        "twin: step left out": ("torch.full_like(index, step)", "torch.zeros_like(index)"),
        "twin: number left out": ("torch.full_like(index, number)", "torch.zeros_like(index)"),
        "twin: local index": ("place.first + offset", "offset"),
        "twin: lanes not skipped": ("place.first % 4", "0"),
        "twin: exp_avg draws as the weight": ("upper ^ words", "words"),
    },
    ("formats/block8.py", stores): {
        "kernel: no floor": (
            "LARGEST_UNSIGNED, 20), some(value))",
            "LARGEST_UNSIGNED, 20), 0)",
            E5M3,
        ),
        "twin: no floor": ("(value.view(torch.int32) != 0).int()", "code", E5M3),
        "kernel: exp_avg_sq to nearest": (
            f"unsigned_code(value, pattern, {DRAWN})",
            "unsigned_code(value, pattern, half(pattern, 20))",
            E5M3,
        ),
        "twin: to nearest": ("    if bits:", "    if False:", E4M3),
        "kernel: the lower of the bits": (
            f"= signed_code(value, pattern, {DRAWN})",
            "= signed_code(value, pattern, ((bits & 0xFF) << 12) | 8)",
            E4M3,
        ),
        "kernel: ties away": (
            "((1 << (DROPPED - 1)) - 1) + ((pattern >> DROPPED) & 1)",
            "1 << (DROPPED - 1)",
            "block_e4m3_nearest",
        ),
        "twin: ties away": (
            "rest = (1 << (dropped - 1)) - 1 + ((pattern >> dropped) & 1)",
            "rest = 1 << (dropped - 1)",
            "block_e5m3_nearest",
        ),
        "kernel: NaN without a sign alone": ("tl.abs(number)", "number", E4M3),
        "kernel: NaN of exp_avg_sq is a number": ("== E5M3_NAN, NAN", "== E5M3_NAN, value", E5M3),
        "twin: NaN is a number": ("(code == UNSIGNED_NAN, torch.nan)", "(code < 0, 0)", E5M3),
        "kernel: no sign": ("value < 0.0, code | 0x80", "value < 0.0, code", E4M3),
        "kernel: a sign of zeros": (
            "tl.where(value < 0.0, code | 0x80, code)",
            "code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)",
            E4M3,
        ),
        "kernel: no NaN code": ("(code, LARGEST)", "(code, LARGEST - 1)", "block64_e5m3"),
    },
    ("formats/block8.py", stores_in_windows): {
        "off by one": ("(amax_bits + OFFSET) >> 23", "((amax_bits + OFFSET) >> 23) + 1"),
        "a power of two is the next one": ("(amax_bits + OFFSET)", "amax_bits"),
        "no smallest": (">> 23, SMALLEST_SCALE)", ">> 23, 0)"),
        "no largest": ("SMALLEST_SCALE), LARGEST_SCALE)", "SMALLEST_SCALE), 254)"),
        "infinities count": ("0x1000000", "0x0FFFFFF"),
    },
    ("formats/block_int8.py", stores): {
        "the windows of the others": ("OFFSET = 0x1FFFF", "OFFSET = -1", INT8),
        "kernel: the lower of the bits": ("(bits << 1) | 1", "((bits & 0xFF) << 9) | 1", INT8),
        "kernel: NaN is a number": ("NAN_BYTE, NAN", "NAN_BYTE, value", INT8),
        "kernel: no sign": ("code | 0x80, code).to(tl", "code, code).to(tl", INT8),
        "kernel: a sign of what rounds to 0": ("(value < 0.0) & (code > 0)", "value < 0.0", INT8),
        "kernel: the sign is not read": ("& -0x7F020000", "& 0xFE0000", INT8),
        "kernel: infinities are the largest": (
            "half(pattern, 17), NAN_CODE",
            "half(pattern, 17), 127",
            "block64_int8_nearest",
        ),
        "twin: to nearest": ("bits, NAN_MAGNITUDE", "(), NAN_MAGNITUDE", INT8),
        "twin: NaN is a number": ("(code == NAN_MAGNITUDE, torch.nan)", "(code < 0, 0)", INT8),
        "twin: a sign of what rounds to 0": ("(value < 0) & (code > 0)", "value < 0", INT8),
    },
    ("formats/block4.py", stores): {
        "kernel: no floor": ("NAN_OF_E4M0, 23), some(value))\n", "NAN_OF_E4M0, 23), 0)\n", E4M0),
        "twin: no floor": ("(value.view(torch.int32) != 0).int()", "code", E4M0),
        "kernel: exp_avg_sq to nearest": (
            f"{DRAWN_OF_4_BITS}, NAN_OF_E4M0",
            "half(pattern, 23), NAN_OF_E4M0",
            E4M0,
        ),
        "twin: to nearest": ("E3M0_DOWN, bits, LARGEST", "E3M0_DOWN, (), LARGEST", E3M0),
        "kernel: the lower of the bits": (
            f"{DRAWN_OF_4_BITS}, LARGEST_MAGNITUDE",
            "((bits & 0xFF) << 15) | 64, LARGEST_MAGNITUDE",
            E3M0,
        ),
        "kernel: ties away": (
            "half(pattern, 23), NAN_OF_E4M0",
            "0x400000, NAN_OF_E4M0",
            "block32_e4m0_nearest",
        ),
        "twin: ties away": (
            "cut_reference(value.abs() * inverse * E4M0_DOWN, bits, UNSIGNED_NAN, 23)",
            "(((value.abs() * inverse * E4M0_DOWN).view(torch.int32).long() + 0x400000)"
            " >> 23).int()",
            "block32_e4m0_nearest",
        ),
        "kernel: the sign is lost": (
            "0.0) & (code > 0), code | 8",
            "0.0) & (code > 0), code",
            E3M0,
        ),
        "kernel: a sign of what rounds to 0": ("(value < 0.0) & (code > 0)", "value < 0.0", E3M0),
        "twin: a sign of what rounds to 0": ("(value < 0) & (code > 0)", "value < 0", E3M0),
        "kernel: the sign is not read": ("((code & 8) << 28)", "0", E3M0),
        "kernel: NaN of exp_avg is a number": ("NAN_OF_4_BITS, NAN", "NAN_OF_4_BITS, value", E3M0),
        "kernel: NaN of exp_avg_sq is a number": ("NAN_OF_E4M0, NAN", "NAN_OF_E4M0, value", E4M0),
        "kernel: infinities are the largest": (
            "code, NAN_OF_4_BITS)",
            "code, code)",
            "block32_e3m0_nearest",
        ),
        "twin: NaN is a number": ("(code == UNSIGNED_NAN, torch.nan)", "(code < 0, 0)", E4M0),
        "the numbers are powers of two": (
            "TWO_THIRDS * 2.0**-120, 1.5 * 2.0**120",
            "2.0**-120, 2.0**120",
            E3M0,
        ),
        "exp_avg_sq's window is one off": ("2.0**-114, 2.0**114", "2.0**-115, 2.0**115", E4M0),
    },
    ("chunks/blocks.py", stores_tiles): {
        "another format's windows": (
            "scale_of_key(largest, FORMAT.window_offset)",
            "scale_of_key(largest, -1)",
            LINEAR8,
        ),
        "the neighbour's scale is read": (
            "scale_ptr + rows.to(tl.uint32) // FORMAT.block",
            "scale_ptr + tl.maximum(rows // FORMAT.block - 1, 0)",
            E8,
        ),
        "one scale a tile": (
            "largest = tl.max(tl.reshape(key, SHAPE), 1)",
            "largest = tl.max(key, 0) + tl.zeros((SHAPE[0],), tl.uint32)",
            E8,
        ),
        "what lies outside counts": ("(mask, key, 0)", "(mask, key, 0xFE000000)", E8),
        "halves exchanged when stored": ("even | (odd << 4)", "odd | (even << 4)", E4),
        "halves exchanged when read": ("pair & 15, pair >> 4", "pair >> 4, pair & 15", E4),
        "both codes of a byte are one": ("pair & 15, pair >> 4", "pair & 15, pair & 15", E4),
    },
    ("step/reference.py", stores_as_twin): {
        "a window counted from the tensor": (
            "[lead : lead + value.numel()]",
            "[: value.numel()]",
            E8,
        ),
        "another format's windows": ("amax(1), form.window_offset", "amax(1), -1", LINEAR8),
        "the scale is the neighbour's": ("[lead : lead + like.numel()]", "[: like.numel()]", E8),
        "infinities count": (
            "torch.where(value.isfinite(), value.abs(), 0.0).r",
            "value.abs().nan_to_num(0.0).r",
            E8,
        ),
        "halves exchanged when stored": (
            "new_codes[..., ::2] | new_codes[..., 1::2]",
            "new_codes[..., 1::2] | new_codes[..., ::2]",
            E4,
        ),
        "halves exchanged when read": ("stored & 15, stored >> 4", "stored >> 4, stored & 15", E4),
    },
    ("chunks/blocks.py", steps_in_blocks): {
        "a lead is ignored": ("% FORMATS.block", "* 0", "lead_of", IN_BLOCKS),
        "moments draw as weights": (
            "moment_bits(words, INDEX)",
            "words & 0xFFFF",
            "stored_moments",
            IN_BLOCKS,
        ),
        "the neighbour's scale is read": (
            "scale_ptr + rows.to(tl.uint32) // FORMAT.block",
            "scale_ptr + tl.maximum(rows // FORMAT.block - 1, 0)",
            "load_scale",
            OF_4_BITS,
        ),
        "another tile's first elements": (
            "rows = index * SPEC.block + tl",
            "rows = tl",
            "rows_of",
            IN_BLOCKS,
        ),
        "another chunk's bytes": ("start // 2", "start // 4", "pointers_of", OF_4_BITS),
    },
}
"""By source and check: what goes wrong, by the old text, the new one, and what more checks take."""
SOURCES = Path(kernels.__file__).parent


EVERY = [
    pytest.param(file, check, change, id=f"{check.__name__} {file}: {name}")
    for (file, check), own in MUTANTS.items()
    for name, change in own.items()
    if not (torch.cuda.is_available() and check is steps_in_blocks)
]
"""What is compiled keeps what it calls."""


@pytest.fixture
def here(device, monkeypatch, tmp_path):
    return Here(device, monkeypatch, tmp_path)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("file", "check", "change"), EVERY)
def test_the_check_notices_a_mutant(file, check, change, here):
    old, new, *more = change
    module = mutant(SOURCES / file, (old, new), here.folder)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        check(module, here, *more)


# the unchanged encodings are checked in tests/kernels/test_stochastic.py
@pytest.mark.parametrize(("file", "check"), [each for each in MUTANTS if each[1] is not encodes])
@pytest.mark.sample(2)
def test_the_checks_pass_on_the_true_sources(file, check, here):
    module, seen = import_module(f"megaopt.kernels.{file[:-3].replace('/', '.')}"), []
    for _, _, *more in MUTANTS[file, check].values():
        if more not in seen:
            seen.append(more)
            check(module, here, *more)


@pytest.mark.parametrize("step", [triton_step, reference_step], ids=["kernel", "twin"])
def test_the_check_notices_an_fp8_scale_that_is_the_quotient(step, device):
    """Most quotients are the reciprocal of their own reciprocal: it takes some tensors."""
    other = dataclasses.replace(FLOAT8.by_slot["exp_avg"], scale_of_inverse=False)
    found = buffers(FLOAT8, [3] * 40, device)
    wrong, expected = copied(found), copied(found)
    oracle_step(expected, FLOAT8, ADAMW, GROUP)
    step(found, FLOAT8, ADAMW, GROUP)
    assert_same_buffers(found, expected)
    step(wrong, with_format(FLOAT8, "exp_avg", other), ADAMW, GROUP)
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
