"""fp8 weights that ranks share, alone and beside DTensors: what one rank does to them."""

import torch
import torch.distributed as dist
from agreement_ranks import (
    DTENSORS,
    HYPER,
    MASTERS,
    Kind,
    is_odd_one,
    outcome,
)
from float8_ranks import gradients, initial_weights, shards_of
from runs import params_of

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight
from megaopt.float8.shard import Float8Shard


def give(shards, step):
    """A gradient for every shard: the part of its weight's, by the weight's shape."""
    grads = {grad.shape: grad for grad in gradients(step)}
    for shard in shards:
        whole = grads.get(shard.weight.shape, torch.ones(shard.weight.shape).bfloat16())
        shard.grad = whole.flatten()[shard.start : shard.start + shard.numel()]


def shards(recipe="current", group=None):
    weights = initial_weights(RECIPES[recipe])
    return shards_of(weights, dist.get_world_size(), dist.get_rank(), group)


# --- built otherwise


def other_order():
    return shards()[::-1], MASTERS


def one_less():
    return shards()[:-1], MASTERS


def one_more():
    weight = Float8Weight.from_values(torch.ones(4, 8).bfloat16(), RECIPES["current"])
    return [*shards(), Float8Shard(torch.nn.Parameter(weight), 0, 0)], MASTERS


def another_recipe():
    return [*shards()[:-1], shards("delayed")[-1]], MASTERS


def no_masters():
    return shards(), HYPER


def bf16_moments():
    return shards(), {**MASTERS, "exp_avg_dtype": torch.bfloat16}


BUILT = (other_order, one_less, one_more, another_recipe, no_masters, bf16_moments)
BUILT = {make.__name__: make for make in BUILT}


# --- changed between steps


def no_gradient(optimizer):
    params_of(optimizer)[0].grad = None


def no_gradients(optimizer):
    for shard in params_of(optimizer):
        shard.grad = None


def gradient_of_float64(optimizer):
    optimizer.use_decoupled_grad = True
    for shard in params_of(optimizer):
        shard.decoupled_grad = shard.grad.double()


def bad_lr(optimizer):
    optimizer.param_groups[0]["lr"] = -1.0


BETWEEN = (no_gradient, no_gradients, gradient_of_float64, bad_lr)
BETWEEN = {change.__name__: change for change in BETWEEN}


SHARDS = Kind(shards, give, BUILT, BETWEEN)


def both():
    return [*DTENSORS.made(), *shards()]


def give_both(params, step):
    count = len(DTENSORS.made())
    DTENSORS.give(params[:count], step)
    give(params[count:], step)


def no_gradient_of_a_shard(optimizer):
    params_of(optimizer)[-1].grad = None


BOTH = Kind(both, give_both, {}, {**DTENSORS.between, "of_a_shard": no_gradient_of_a_shard})


def warm_up(look):
    """A first step with lr=0, before which one rank may have looked at a state."""
    optimizer = FusedAdam(shards(), **{**MASTERS, "lr": 0.0})
    if look and is_odd_one():
        assert optimizer.state[params_of(optimizer)[0]] == {}
    give(params_of(optimizer), 0)
    return outcome(optimizer, optimizer.step)


def inner_group(innermost_first):
    """All ranks share one weight, the last two another, of which one of them has no gradient."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inner = dist.new_group([world - 2, world - 1])
    weights = initial_weights(RECIPES["current"])
    own = [shards_of(weights, 3, rank, None)[1]]
    if rank >= world - 2:
        place = rank - (world - 2)
        bounds = [(0, 4097), (4097, 26000)][place]
        own.insert(0 if innermost_first else 1, Float8Shard(weights[0], *bounds, inner))
    optimizer = FusedAdam(own, **MASTERS)
    give(params_of(optimizer), 0)
    if is_odd_one():
        for shard in own:
            shard.grad = None if shard.weight is weights[0] else shard.grad
    return outcome(optimizer, optimizer.step)
