"""The recipe of docs/adding.md: quantizers from a file outside the package."""

import importlib.util

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight
from megaopt.kernels.quantizers import QUANTIZERS

SOURCE = '''
"""Codes are sixteenths whatever the values are; and blocks of 64, put together of what there is."""

import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.quantizers import QUANTIZERS, Left, Quantizer, Store
from megaopt.kernels.quantizers.cast import noted, raise_amax, scale_inv_pointer
from megaopt.kernels.quantizers.current import OPTIONS, scale_of_amax, scales_of_amax_reference
from megaopt.kernels.quantizers.tiles import store_of_tiles, tile_in_lines
from megaopt.kernels.chunks.blocks import store_block


@helper
def scale(column, amax_bits, FORMATS: tl.constexpr):
    return 16.0, 0.0625


def scales_reference(amax, recipe, scale):
    return torch.full_like(amax, 16.0), torch.full_like(amax, 0.0625)


@helper
def put(pointers, block, param, scale, bits, words, FORMATS: tl.constexpr):
    value, bits = noted(param, bits, block.mask, FORMATS)
    code = FORMATS.weight.encode(value * 16.0, 1.0)
    store_block(pointers.weight, block.offsets, code, block.mask)
    return bits


@helper
def finish(column, start, scale, bits, FORMATS: tl.constexpr):
    raise_amax(column, start, scale, bits, FORMATS)
    tl.store(scale_inv_pointer(column, FORMATS), 0.0625)


STORE = Store("sixteenths", Left.NOTHING, put=put, finish=finish)
LINES = store_of_tiles("block_1x64", tile_in_lines, PIECE=1024, PIECE_AGAIN=1024, num_warps=4)
for each in (
    Quantizer("sixteenths", (), STORE, scale, scales_reference),
    Quantizer("block_1x64", OPTIONS, LINES, scale_of_amax, scales_of_amax_reference, 1, 64),
):
    QUANTIZERS[each.name] = each
'''
FP16_MASTERS = {"master_weights": True, "master_weight_dtype": torch.float16}


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    del QUANTIZERS["sixteenths"], QUANTIZERS["block_1x64"]


def trained(recipe, backend, options, device):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(130, 160, generator=generator).bfloat16().to(device)
    weight = torch.nn.Parameter(Float8Weight.from_values(values, recipe))
    optimizer = FusedAdam([weight], lr=0.1, backend=backend, **options)
    for _ in range(2):
        weight.grad = torch.randn(values.shape, generator=generator).bfloat16().to(device)
        optimizer.step()
    state = {name: each for name, each in optimizer.state[weight].items() if each is not None}
    return {**weight.tensors(), **state}, Float8Weight.from_values(values, recipe).data8


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float32}, FP16_MASTERS], ids=["along", "later"]
)
@pytest.mark.parametrize("scaling", ["sixteenths", "block_1x64"])
def test_kernel_and_twin_take_the_same_steps(own, scaling, options, device):
    recipe = Float8Recipe(scaling)
    kernel, start = trained(recipe, "triton", options, device)
    twin, _ = trained(recipe, "reference", options, device)
    for name, tensor in kernel.items():
        assert_same_bits(tensor, twin[name], name)
    assert (kernel["data8"].float() != start.float()).any()
    assert kernel["scale_inv"].shape == ((1,) if scaling == "sixteenths" else (130, 3))
    plain, _ = trained(RECIPES["current"], "triton", options, device)
    assert (plain["data8"].float() != kernel["data8"].float()).any()
