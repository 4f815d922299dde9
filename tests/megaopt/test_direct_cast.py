"""direct_cast: fp8 weights of fp32 values as they are, whatever their recipe says."""

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam
from megaopt.float8 import Float8Recipe, Float8Weight
from megaopt.kernels.float8 import quantize_reference

SCALINGS = ("delayed", "current", "block_128x128", "mxfp8")


def stepped(recipe, direct_cast):
    torch.manual_seed(0)
    values = torch.randn(130, 260).bfloat16()
    weight = torch.nn.Parameter(Float8Weight.from_values(values, recipe))
    scale = None if weight.scale is None else weight.scale.clone()
    optimizer = FusedAdam([weight], lr=0.1, dtype=torch.float32, direct_cast=direct_cast)
    weight.grad = torch.randn(130, 260).bfloat16()
    optimizer.step()
    return weight, optimizer.state[weight]["master_param"], scale


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_optimizers_word_comes_before_the_recipes(scaling, asked, own):
    weight, master, scale = stepped(Float8Recipe(scaling, direct=own), asked)
    direct = own if asked is None else asked
    made = quantize_reference(master, Float8Recipe(scaling, direct=direct), torch.bfloat16, scale)
    other = quantize_reference(
        master, Float8Recipe(scaling, direct=not direct), torch.bfloat16, scale
    )
    assert_same_bits(weight.data8.view(torch.uint8), made.codes.view(torch.uint8))
    assert_same_bits(weight.scale_inv, made.scale_inv)
    assert not torch.equal(made.codes.view(torch.uint8), other.codes.view(torch.uint8))


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="direct_cast must be one of None, True, False, got 'yes'"):
        FusedAdam([torch.nn.Parameter(torch.ones(2))], direct_cast="yes")
