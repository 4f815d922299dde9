"""The checks of moments of 4 bits are able to fail: each mutant changes one operation."""

import sys
from pathlib import Path

import block_cases
import pytest
import torch
from block_cases import BLOCKS_OF_4_BITS, assert_stored, random_values
from mutants import mutant
from step_cases import GROUP, assert_all_agree, block_combinations, name_of

from megaopt import kernels
from megaopt.kernels.chunks import codes
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.place import Place
from megaopt.kernels.rules import RULES
from megaopt.kernels.step import kernel, update

SOURCES = Path(kernels.__file__).parent
# beside 2: numbers, ties, one below the smallest, and what rounds to 0 with a sign
TIES = torch.tensor([2.0, 1.5, 1.125, -0.5625, 0.375, 1e-4, -1e-9, 0.75] * 4)
# in blocks of their own: a power of two, beyond the smallest scale and the largest, an infinity
EDGES = torch.zeros(6, 32)
EDGES[:, 20] = torch.tensor([1.0, 1e-40, 3.4e38, torch.inf, 0.75, 0.0])
EDGES[:, 21] = 1e-42
VALUES = torch.cat([TIES, EDGES.view(-1), random_values(2000)])
LEAD = 14
DRAWN = "(bits << 7) | 64"

FORMAT_MUTANTS = {
    "kernel: no floor": (
        "block32_e4m0",
        f"tl.maximum(cut(pattern, {DRAWN}, NAN_OF_E4M0, 23), some(value))",
        f"cut(pattern, {DRAWN}, NAN_OF_E4M0, 23)",
    ),
    "twin: no floor": (
        "block32_e4m0",
        "torch.maximum(code, (value.view(torch.int32) != 0).int())",
        "code",
    ),
    "kernel: exp_avg_sq to nearest": (
        "block32_e4m0",
        f"{DRAWN}, NAN_OF_E4M0",
        "half(pattern, 23), NAN_OF_E4M0",
    ),
    "kernel: exp_avg to nearest": (
        "block32_e3m0",
        f"{DRAWN}, LARGEST_MAGNITUDE",
        "half(pattern, 23), LARGEST_MAGNITUDE",
    ),
    "twin: to nearest": ("block32_e3m0", "E3M0_DOWN, bits, LARGEST", "E3M0_DOWN, (), LARGEST"),
    "kernel: the lower of the bits": (
        "block32_e3m0",
        f"{DRAWN}, LARGEST_MAGNITUDE",
        "((bits & 0xFF) << 15) | 64, LARGEST_MAGNITUDE",
    ),
    "kernel: ties away": (
        "block32_e4m0_nearest",
        "half(pattern, 23), NAN_OF_E4M0",
        "0x400000, NAN_OF_E4M0",
    ),
    "twin: ties away": (
        "block32_e4m0_nearest",
        "cut_reference(value.abs() * inverse * E4M0_DOWN, bits, UNSIGNED_NAN, 23)",
        "(((value.abs() * inverse * E4M0_DOWN).view(torch.int32).long() + 0x400000) >> 23).int()",
    ),
    "kernel: the sign is lost": (
        "block32_e3m0",
        "tl.where((value < 0.0) & (code > 0), code | 8, code)",
        "code",
    ),
    "kernel: a sign of what rounds to 0": (
        "block32_e3m0",
        "(value < 0.0) & (code > 0)",
        "value < 0.0",
    ),
    "twin: a sign of what rounds to 0": ("block32_e3m0", "(value < 0) & (code > 0)", "value < 0"),
    "kernel: the sign is not read": ("block32_e3m0", "((code & 8) << 28)", "0"),
    "kernel: NaN of exp_avg is a number": (
        "block32_e3m0",
        "tl.where(code == NAN_OF_4_BITS, NAN, value)",
        "value",
    ),
    "kernel: NaN of exp_avg_sq is a number": (
        "block32_e4m0",
        "tl.where(code == NAN_OF_E4M0, NAN, value)",
        "value",
    ),
    "kernel: infinities are the largest": (
        "block32_e3m0_nearest",
        "tl.where(scaled <= 2.0, code, NAN_OF_4_BITS)",
        "code",
    ),
    "twin: NaN is a number": (
        "block32_e4m0",
        "return value.masked_fill(code == UNSIGNED_NAN, torch.nan)",
        "return value",
    ),
    "the numbers are powers of two": (
        "block32_e3m0",
        "TWO_THIRDS * 2.0**-120, 1.5 * 2.0**120",
        "2.0**-120, 2.0**120",
    ),
    "exp_avg_sq's window is one off": (
        "block32_e4m0",
        "2.0**-114, 2.0**114",
        "2.0**-115, 2.0**115",
    ),
}
QUICK = (
    "kernel: no floor",
    "kernel: exp_avg_sq to nearest",
    "kernel: exp_avg to nearest",
    "twin: to nearest",
    "kernel: the sign is lost",
    "exp_avg_sq's window is one off",
)
TILE_MUTANTS = {
    "halves of a byte exchanged when stored": (
        "(even | (odd << 4))",
        "(odd | (even << 4))",
    ),
    "halves of a byte exchanged when read": (
        "tl.join(pair & 15, pair >> 4)",
        "tl.join(pair >> 4, pair & 15)",
    ),
    "both codes of a byte are one": (
        "tl.join(pair & 15, pair >> 4)",
        "tl.join(pair & 15, pair & 15)",
    ),
    "the neighbour's scale is read": (
        "pointers = scale_ptr + rows.to(tl.uint32) // FORMAT.block\n",
        "pointers = scale_ptr + tl.maximum(rows // FORMAT.block - 1, 0)\n",
    ),
    "one scale a tile": (
        "largest = tl.max(tl.reshape(key, SHAPE), 1)",
        "largest = tl.max(key, 0) + tl.zeros((SHAPE[0],), tl.uint32)",
    ),
}
WINDOW = ("(amax_bits - 1) >> 23, SMALLEST_SCALE", "((amax_bits - 1) >> 23) + 1, SMALLEST_SCALE")
TWIN_MUTANTS = {
    "halves of a byte exchanged when stored": (
        "code[..., ::2] | code[..., 1::2] << 4",
        "code[..., 1::2] | code[..., ::2] << 4",
    ),
    "halves of a byte exchanged when read": (
        "(stored & 15, stored >> 4)",
        "(stored >> 4, stored & 15)",
    ),
    "the window is counted from the tensor": (
        "padded[lead : lead + value.numel()] = magnitude",
        "padded[: value.numel()] = magnitude",
    ),
}  # fmt: skip


def form_of(module, name):
    return next(form for form in module.BLOCKS_OF_4_BITS if form.name == name)


def test_the_check_passes_on_the_true_source(device):
    for form in BLOCKS_OF_4_BITS:
        assert_stored(form, VALUES, device, LEAD)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, case in FORMAT_MUTANTS.items()
    ],
)
def test_the_check_notices_a_mutant_of_a_format(case, tmp_path, device):
    name, *change = case
    module = mutant(SOURCES / "formats" / "block4.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(form_of(module, name), VALUES, device, LEAD)


@pytest.mark.parametrize("change", TILE_MUTANTS.values(), ids=TILE_MUTANTS)
def test_the_check_notices_a_mutant_of_the_tiles(change, tmp_path, device):
    module = mutant(SOURCES / "chunks" / "blocks.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(BLOCKS_OF_4_BITS[0], VALUES, device, LEAD, module=module)


def test_the_check_notices_a_window_that_is_one_off(tmp_path, device, monkeypatch):
    module = mutant(SOURCES / "formats" / "block8.py", WINDOW, tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    imports = ("from megaopt.kernels.formats.block8 import", f"from {module.__name__} import")
    tiles = mutant(SOURCES / "chunks" / "blocks.py", imports, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(BLOCKS_OF_4_BITS[0], VALUES, device, LEAD, module=tiles)


@pytest.mark.parametrize("change", TWIN_MUTANTS.values(), ids=TWIN_MUTANTS)
def test_the_check_notices_a_mutant_of_the_twin(change, tmp_path, device, monkeypatch):
    module = mutant(SOURCES / "step" / "reference.py", change, tmp_path)
    monkeypatch.setattr(block_cases, "store_blocks", module.store_blocks)
    monkeypatch.setattr(block_cases, "decoded", module.decoded)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(BLOCKS_OF_4_BITS[0], VALUES, device, LEAD)


# --- the kernel as a whole

STEP_MUTANTS = {
    "a chunk's bytes are another chunk's": (
        "start = start // 2",
        "start = start // 4",
        "pointers_of",
    ),
    "moments draw as weights": (
        "FORMAT.encode(value, inverse, moment_bits(words, INDEX))",
        "FORMAT.encode(value, inverse, words & 0xFFFF)",
        "stored_moments",
    ),
    "the neighbour's scale is read": (
        "pointers = scale_ptr + rows.to(tl.uint32) // FORMAT.block\n",
        "pointers = scale_ptr + tl.maximum(rows // FORMAT.block - 1, 0)\n",
        "load_scale",
    ),
}


def assert_steps(device):
    name = "bfloat16-bfloat16_stochastic-none-block32_e3m0-block32_e4m0"
    formats = next(each for each in block_combinations([32]) if name_of(each) == name)
    places = [Place(0), Place(1, 32 + 6)]
    rule, geometry = RULES["adamw", "ieee"], Geometry(1024, 3)
    assert_all_agree(formats, rule, GROUP, [4000, 700], device, geometry, places=places)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is compiled keeps what it calls")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name, marks=[] if "bytes" in name else pytest.mark.slow)
        for name, change in STEP_MUTANTS.items()
    ],
)
def test_the_check_notices_a_mutant_of_the_step(change, tmp_path, device, monkeypatch):
    assert_steps(device)
    *change, name = change
    module = mutant(SOURCES / "chunks" / "blocks.py", change, tmp_path)
    for where in (kernel, update, codes):
        if hasattr(where, name):
            monkeypatch.setattr(where, name, getattr(module, name))
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_steps(device)
