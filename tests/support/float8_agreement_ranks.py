"""fp8 weights that ranks share, of which one rank does something else: what each of them says."""

import torch
import torch.distributed as dist
from agreement_ranks import is_odd_one, outcome, without_waiting
from float8_ranks import HYPER, gradients, initial_weights, shards_of
from runs import FP32, params_of

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight
from megaopt.float8.shard import Float8Shard

MASTERS = {**HYPER, "dtype": FP32}


def give(optimizer, step):
    """A gradient for every shard: the part of its weight's, by the weight's shape."""
    grads = {grad.shape: grad for grad in gradients(step)}
    for shard in params_of(optimizer):
        whole = grads.get(shard.weight.shape, torch.ones(shard.weight.shape).bfloat16())
        shard.grad = whole.flatten()[shard.start : shard.start + shard.numel()]


def shards(recipe="current", group=None):
    weights = initial_weights(RECIPES[recipe])
    return shards_of(weights, dist.get_world_size(), dist.get_rank(), group)


def weights_of(optimizer):
    """Bytes of weights and of states, and step counts."""
    parts = [
        {name: tensor.clone() for name, tensor in shard.weight.tensors().items()}
        for shard in params_of(optimizer)
    ]
    states = [
        {name: None if t is None else t.clone() for name, t in state.items()}
        for state in optimizer.state.values()
    ]
    return [parts, states, [int(group["step"]) for group in optimizer.param_groups]]


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


def built(name, options, step):
    own, own_options = BUILT[name]() if is_odd_one() else (shards(), MASTERS)
    optimizer = FusedAdam(own, **{**own_options, **options})
    give(optimizer, 0)
    return outcome(optimizer, lambda: optimizer.step(**step), weights_of)


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


def between(name, options, step):
    optimizer = FusedAdam(shards(), **{**MASTERS, **options})
    give(optimizer, 0)
    optimizer.step(**step)
    give(optimizer, 1)
    if is_odd_one():
        BETWEEN[name](optimizer)
    return outcome(optimizer, lambda: optimizer.step(**step), weights_of)


def heard_later(name, options, step):
    """As `between` on a GPU, where only the rank that changed waits; then another step."""
    optimizer = FusedAdam(shards(), **{**MASTERS, **options})
    with without_waiting():
        for number in range(2):
            give(optimizer, number)
            optimizer.step(**step)
        give(optimizer, 2)
        if is_odd_one():
            BETWEEN[name](optimizer)
        found = outcome(optimizer, lambda: optimizer.step(**step), weights_of)
        if is_odd_one():
            return found, ("", *[weights_of(optimizer)] * 2)
        return found, outcome(optimizer, lambda: optimizer.step(**step), weights_of)


def warm_up(look):
    """A first step with lr=0, before which one rank may have looked at a state."""
    optimizer = FusedAdam(shards(), **{**MASTERS, "lr": 0.0})
    if look and is_odd_one():
        assert optimizer.state[params_of(optimizer)[0]] == {}
    give(optimizer, 0)
    return outcome(optimizer, optimizer.step, weights_of)


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
    give(optimizer, 0)
    if is_odd_one():
        for shard in own:
            shard.grad = None if shard.weight is weights[0] else shard.grad
    return outcome(optimizer, optimizer.step, weights_of)
