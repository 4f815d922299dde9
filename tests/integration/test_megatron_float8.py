"""fp8 parameters that Megatron shares out: parts of weights, and ranks that have nothing of some.

TransformerEngine's tensors are stand-ins here; Megatron itself makes them on GPUs alone.
"""

import megatron_float8 as cases
import pytest
import torch
from bits import assert_same_bits
from how_to import needs

pytestmark = needs("megatron")
SCALINGS = ("delayed", "current", "block_128x128")


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_shards_step_as_whole_weights(on_ranks, scaling, world):
    """Resumed half-way; scales on every rank, of weights too of which it has nothing."""
    whole = cases.step_whole(scaling)
    for rank, (bounds, found) in enumerate(on_ranks(world, cases.step_shards, scaling)):
        for index, ((first, last), own, expected) in enumerate(
            zip(bounds, found, whole, strict=True)
        ):
            for name, tensor in expected.items():
                if tensor is None:
                    continue
                what = f"rank {rank}, weight {index}, {name}"
                if name.endswith("_data"):
                    own_part = own[name].flatten()[first:last]
                    assert_same_bits(own_part, tensor.flatten()[first:last], what)
                else:
                    assert_same_bits(own[name], tensor, what)
    unstepped = cases.found_in(cases.weights_of(scaling)[0])
    codes = next(name for name in whole[0] if name.endswith("_data"))
    assert not torch.equal(whole[0][codes], unstepped[0][codes])


@pytest.mark.parametrize("has_part", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_loaded_weights_are_gathered_where_no_forward_pass_does(on_ranks, overlaps, has_part):
    """A rank's new codes would stand beside those that were loaded, under one scale_inv."""
    (found,) = on_ranks(1, cases.calls_of_refresh, overlaps, has_part)
    assert found == (["cast"] if overlaps else ["cast", "gather", "gather"])
