"""The checks of moments in blocks are able to fail: each mutant changes one operation."""

import sys
from pathlib import Path

import block_cases
import pytest
import torch
from block_cases import assert_stored, random_values
from mutants import mutant
from step_cases import GROUP, assert_all_agree, block_combinations, name_of

from megaopt import kernels
from megaopt.kernels.chunks import codes
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.place import Place
from megaopt.kernels.rules import RULES
from megaopt.kernels.step import kernel, update

SOURCES = Path(kernels.__file__).parent
TIES = torch.tensor([2.0, 1.0625, 1.1875, 1.3125, -1.0625, 0.53125])
VALUES = torch.cat([TIES, torch.zeros(122), random_values(2000)])
# in blocks of their own: a power of two, beyond the smallest scale and the largest, an infinity
EDGES = torch.zeros(6, 128)
EDGES[:, 20] = torch.tensor([1.0, 1e-40, 3.4e38, torch.inf, 0.75, 0.0])
EDGES[:, 21] = 1e-42
EDGES = EDGES.view(-1)
LEAD = 13

FORMAT_MUTANTS = {
    "kernel: no floor": (
        "block_e5m3",
        "tl.maximum(cut(pattern, rest, LARGEST_UNSIGNED, 20), some(value))",
        "cut(pattern, rest, LARGEST_UNSIGNED, 20)",
    ),
    "twin: no floor": (
        "block_e5m3",
        "torch.maximum(code, (value.view(torch.int32) != 0).int())",
        "code",
    ),
    "kernel: exp_avg_sq to nearest": (
        "block_e5m3",
        "code = unsigned_code(value, pattern, (bits << 4) | 8)",
        "code = unsigned_code(value, pattern, half(pattern, 20))",
    ),
    "kernel: exp_avg to nearest": (
        "block_e4m3",
        "code = signed_code(value, pattern, (bits << 4) | 8)",
        "code = signed_code(value, pattern, half(pattern, 20))",
    ),
    "twin: to nearest": ("block_e4m3", "    if bits:", "    if False:"),
    "kernel: the lower of the bits": (
        "block_e4m3",
        "code = signed_code(value, pattern, (bits << 4) | 8)",
        "code = signed_code(value, pattern, ((bits & 0xFF) << 12) | 8)",
    ),
    "kernel: ties away": (
        "block_e4m3_nearest",
        "((1 << (DROPPED - 1)) - 1) + ((pattern >> DROPPED) & 1)",
        "1 << (DROPPED - 1)",
    ),
    "twin: ties away": (
        "block_e5m3_nearest",
        "rest = (1 << (dropped - 1)) - 1 + ((pattern >> dropped) & 1)",
        "rest = 1 << (dropped - 1)",
    ),
    "kernel: NaN of exp_avg is a number": (
        "block_e4m3",
        "tl.where(tl.abs(number) == E4M3_NAN, NAN, value)",
        "value",
    ),
    "kernel: NaN without a sign alone": (
        "block_e4m3",
        "tl.where(tl.abs(number) == E4M3_NAN, NAN, value)",
        "tl.where(number == E4M3_NAN, NAN, value)",
    ),
    "kernel: NaN of exp_avg_sq is a number": (
        "block_e5m3",
        "tl.where(number == E5M3_NAN, NAN, value)",
        "value",
    ),
    "twin: NaN is a number": (
        "block_e5m3",
        "return value.masked_fill(code == UNSIGNED_NAN, torch.nan)",
        "return value",
    ),
    "kernel: no sign": ("block_e4m3", "tl.where(value < 0.0, code | 0x80, code)", "code"),
    "kernel: a sign of zeros": (
        "block_e4m3",
        "tl.where(value < 0.0, code | 0x80, code)",
        "code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)",
    ),
    "kernel: no NaN code": (
        "block64_e5m3",
        "return tl.minimum(code, LARGEST).to(tl.int32)",
        "return tl.minimum(code, LARGEST - 1).to(tl.int32)",
    ),
}
WINDOW_MUTANTS = {
    "off by one": (
        "(amax_bits - 1) >> 23, SMALLEST_SCALE",
        "((amax_bits - 1) >> 23) + 1, SMALLEST_SCALE",
    ),
    "a power of two is the next one": (
        "(amax_bits - 1) >> 23, SMALLEST_SCALE",
        "amax_bits >> 23, SMALLEST_SCALE",
    ),
    "no smallest": (
        "tl.maximum((amax_bits - 1) >> 23, SMALLEST_SCALE)",
        "tl.maximum((amax_bits - 1) >> 23, 0)",
    ),
    "no largest": ("SMALLEST_SCALE), LARGEST_SCALE)", "SMALLEST_SCALE), 254)"),
    "infinities count": ("<< 1) + 0x1000000", "<< 1) + 0x0FFFFFF"),
}
TILE_MUTANTS = {
    "the neighbour's scale is read": (
        "pointers = scale_ptr + rows.to(tl.uint32) // FORMAT.block\n",
        "pointers = scale_ptr + tl.maximum(rows // FORMAT.block - 1, 0)\n",
    ),
    "one scale a tile": (
        "largest = tl.max(tl.reshape(key, SHAPE), 1)",
        "largest = tl.max(key, 0) + tl.zeros((SHAPE[0],), tl.uint32)",
    ),
    "what lies outside counts": (
        "key = tl.where(mask, key, 0)",
        "key = tl.where(mask, key, 0xFE000000)",
    ),
}
TWIN_MUTANTS = {
    "the window is counted from the tensor": (
        "padded[lead : lead + value.numel()] = magnitude",
        "padded[: value.numel()] = magnitude",
    ),
    "the scale is the neighbour's": (
        "[lead : lead + like.numel()]",
        "[: like.numel()]",
    ),
    "infinities count": (
        "magnitude = torch.where(value.isfinite(), value.abs(), 0.0).reshape(-1)",
        "magnitude = value.abs().nan_to_num(0.0).reshape(-1)",
    ),
}  # fmt: skip


def form_of(module, name):
    return next(form for form in module.BLOCKS if form.name == name)


def test_the_check_passes_on_the_true_source(device):
    for form in block_cases.BLOCKS:
        assert_stored(form, VALUES, device, LEAD)


@pytest.mark.parametrize("case", FORMAT_MUTANTS.values(), ids=FORMAT_MUTANTS)
def test_the_check_notices_a_mutant_of_a_format(case, tmp_path, device):
    name, *change = case
    module = mutant(SOURCES / "formats" / "block8.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(form_of(module, name), VALUES, device, LEAD)


@pytest.mark.parametrize("change", WINDOW_MUTANTS.values(), ids=WINDOW_MUTANTS)
def test_the_check_notices_a_mutant_of_the_window(change, tmp_path, device, monkeypatch):
    module = mutant(SOURCES / "formats" / "block8.py", change, tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    imports = ("from megaopt.kernels.formats.block8 import", f"from {module.__name__} import")
    tiles = mutant(SOURCES / "chunks" / "blocks.py", imports, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(block_cases.BLOCKS[0], EDGES, device, LEAD, module=tiles)


@pytest.mark.parametrize("change", TILE_MUTANTS.values(), ids=TILE_MUTANTS)
def test_the_check_notices_a_mutant_of_the_tiles(change, tmp_path, device):
    module = mutant(SOURCES / "chunks" / "blocks.py", change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(block_cases.BLOCKS[0], VALUES, device, LEAD, module=module)


@pytest.mark.parametrize("change", TWIN_MUTANTS.values(), ids=TWIN_MUTANTS)
def test_the_check_notices_a_mutant_of_the_twin(change, tmp_path, device, monkeypatch):
    module = mutant(SOURCES / "step" / "reference.py", change, tmp_path)
    monkeypatch.setattr(block_cases, "store_blocks", module.store_blocks)
    monkeypatch.setattr(block_cases, "decoded", module.decoded)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_stored(block_cases.BLOCKS[0], VALUES, device, LEAD)


# --- the kernel as a whole

STEP_MUTANTS = {
    "a lead is ignored": (
        "lead = entry(column, FIRST_ELEMENT) % FORMATS.block",
        "lead = entry(column, FIRST_ELEMENT) * 0",
        "lead_of",
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
    "a tile's first elements are another tile's": (
        "rows = index * SPEC.block + tl.arange(0, SPEC.block // SPEC.width) * SPEC.width",
        "rows = tl.arange(0, SPEC.block // SPEC.width) * SPEC.width",
        "rows_of",
    ),
}


def assert_steps(device):
    name = "bfloat16-bfloat16_stochastic-none-block_e4m3-block_e5m3"
    formats = next(each for each in block_combinations() if name_of(each) == name)
    places = [Place(0), Place(1, 128 + 5)]
    rule, geometry = RULES["adamw", "ieee"], Geometry(1024, 3)
    assert_all_agree(formats, rule, GROUP, [4000, 700], device, geometry, places=places)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is compiled keeps what it calls")
@pytest.mark.parametrize("change", STEP_MUTANTS.values(), ids=STEP_MUTANTS)
def test_the_check_notices_a_mutant_of_the_step(change, tmp_path, device, monkeypatch):
    assert_steps(device)
    *change, name = change
    module = mutant(SOURCES / "chunks" / "blocks.py", change, tmp_path)
    for where in (kernel, update, codes):
        if hasattr(where, name):
            monkeypatch.setattr(where, name, getattr(module, name))
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_steps(device)
