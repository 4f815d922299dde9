"""fp8 parameters that Megatron shares out: parts of weights, and ranks that have nothing of some.

TransformerEngine's tensors are stand-ins here; Megatron itself makes them on GPUs alone.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from how_to import needs
from transformer_engine_fakes import fake

from megaopt import FusedAdam
from megaopt.float8 import Float8Recipe, Float8Weight
from megaopt.integration import transformer_engine_weights  # noqa: F401 the adapter
from megaopt.integration.megatron.adam import ShardAdam

# fp8 parameters under the face that Megatron's distributed optimizer gets, on several ranks.

SHAPES = [(40, 48), (130, 160), (16, 32)]
STEPS = 4


def weights_of(scaling):
    torch.manual_seed(0)
    recipe = Float8Recipe(scaling)
    own = [Float8Weight.from_values(torch.randn(s).bfloat16(), recipe) for s in SHAPES]
    return [fake(weight) for weight in own], [w.high_precision_initial_value() for w in own]


def grads_of(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def found_in(weights):
    """Codes and scale_inv, amaxes where there are any."""
    names = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
    return [
        {name: getattr(weight, name) for name in names if hasattr(weight, name)}
        | {"amax": getattr(weight._quantizer, "amax", None)}
        for weight in weights
    ]


def step_whole(scaling):
    """Without ranks: what all of them together have to have."""
    weights, starts = weights_of(scaling)
    options = {"dtype": torch.float32, "use_decoupled_grad": True}
    optimizer = FusedAdam(weights, lr=1e-2, weight_decay=0.1, **options)
    for weight, start in zip(weights, starts, strict=True):
        optimizer.set_scaled_state(weight, "master_param", start.float())
    for step in range(STEPS):
        for weight, grad in zip(weights, grads_of(step), strict=True):
            weight.decoupled_grad = grad
        optimizer.step()
    return found_in(weights)


def plugged(fused, weights, bounds):
    """What MainShards makes of an inner optimizer, where Megatron has no shards of fp8 weights."""
    from megaopt.integration.megatron.distributed import MainShards

    own = [weights[index] for index in bounds]
    places = {weights[i]: SimpleNamespace(start=s, end=e) for i, (s, e) in bounds.items()}
    made = MainShards.__new__(MainShards)
    vars(made).update(
        optimizer=fused, shards={}, fused=None, data_parallel_group=dist.group.WORLD,
        model_fp32_groups=[[]], shard_fp32_groups=[[]],
        model_float16_groups=[own], shard_float16_groups=[[None] * len(own)],
        shard_fp32_from_float16_groups=[[None] * len(own)], _outside={},
        buffers=[SimpleNamespace(params=weights)], model_param_gbuf_map=places,
        _get_model_param_range_map=lambda param: {"param": places[param]},
    )  # fmt: skip
    made._take_shards()
    made._adapt()
    return made


def step_shards(scaling):
    """As Megatron shares out a buffer: equal parts of all elements, few weights on a rank."""
    weights, starts = weights_of(scaling)
    rank, world = dist.get_rank(), dist.get_world_size()
    bounds, start = [], 0
    share = -(-sum(weight.numel() for weight in weights) // world)
    for weight in weights:
        first = min(max(rank * share - start, 0), weight.numel())
        last = min(max((rank + 1) * share - start, 0), weight.numel())
        bounds.append((first, last))
        start += weight.numel()
    held = [index for index, (first, last) in enumerate(bounds) if first < last]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    mains = {i: starts[i].float().flatten()[slice(*bounds[i])].clone() for i in held}

    def face():
        fused = ShardAdam(
            [{"params": list(mains.values())}],
            lr=1e-2, weight_decay=0.1, use_decoupled_grad=True,
        )  # fmt: skip
        owner = plugged(fused, weights, {i: bounds[i] for i in held})
        return owner.optimizer, {i: owner.shards[weights[i]] for i in held}

    optimizer, shards = face()
    for step in range(STEPS):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            assert saved["state"].keys() >= set(range(len(held)))
            assert len(saved["param_groups"]) == 1
            optimizer, shards = face()
            optimizer.load_state_dict(saved)
        grads = grads_of(step)
        for index, shard in shards.items():
            shard.decoupled_grad = grads[index].flatten()[slice(*bounds[index])]
        optimizer.step()
    return bounds, found_in(weights)


def calls_of_refresh(overlaps, has_part):
    """What refresh_weights has Megatron do, in order."""
    weights, calls = weights_of("delayed")[0], []
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    held = [weights[0].numel()] if has_part else []
    mains = [torch.zeros(numel) for numel in held]
    fused = ShardAdam([{"params": mains}], lr=1e-2, use_decoupled_grad=True)
    owner = plugged(fused, weights, {index: (0, numel) for index, numel in enumerate(held)})
    chunks = [SimpleNamespace(start_param_sync=lambda: calls.append("gather")) for _ in range(2)]
    vars(owner).update(
        model_chunks=chunks,
        ddp_config=SimpleNamespace(overlap_param_gather=overlaps),
        _copy_main_params_to_model_params=lambda: calls.append("cast"),
    )
    owner.refresh_weights()
    return calls


pytestmark = needs("megatron")
SCALINGS = ("delayed", "current", "block_128x128")


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_shards_step_as_whole_weights(on_ranks, scaling, world):
    """Resumed half-way; scales on every rank, of weights too of which it has nothing."""
    whole = step_whole(scaling)
    for rank, (bounds, found) in enumerate(on_ranks(world, step_shards, scaling)):
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
    unstepped = found_in(weights_of(scaling)[0])
    codes = next(name for name in whole[0] if name.endswith("_data"))
    assert not torch.equal(whole[0][codes], unstepped[0][codes])


@pytest.mark.parametrize("has_part", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_loaded_weights_are_gathered_where_no_forward_pass_does(on_ranks, overlaps, has_part):
    """A rank's new codes would stand beside those that were loaded, under one scale_inv."""
    (found,) = on_ranks(1, calls_of_refresh, overlaps, has_part)
    assert found == (["cast"] if overlaps else ["cast", "gather", "gather"])
