"""Moments of 4 bits on the public interface: which have them, what is kept, what is refused."""

import copy
from itertools import pairwise

import block_oracle
import pytest
import torch
from bits import assert_same_bits
from runs import (
    BF16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
    values,
)

from megaopt import FusedAdam, FusedLion, FusedSGD

BITS4 = {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"}
NEAREST = {"exp_avg_dtype": "block32_e3m0_nearest", "exp_avg_sq_dtype": "block32_e4m0_nearest"}
STOCHASTIC = {"weight_rounding": "stochastic"}
# the last two keep fp32: rows that are no whole blocks, and few elements
SHAPES = [(33, 128), (5, 8, 128), (40, 104), (10,)]
KINDS = {
    "adam": (FusedAdam, {**BITS4, **STOCHASTIC}),
    "adam, masters": (FusedAdam, {**NEAREST, **MASTER}),
    "adam, remainders": (FusedAdam, {**BITS4, **REMAINDERS, "adam_w_mode": False}),
    "adam, 24 bits": (
        FusedAdam,
        {**BITS4, "master_weights": True, "master_weight_dtype": "remainder8_stochastic"},
    ),
    "adam, exp_avg_sq": (FusedAdam, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": "block32_e4m0"}),
    "amsgrad": (FusedAdam, {**NEAREST, "amsgrad": True}),
    "lion": (FusedLion, {"exp_avg_dtype": "block32_e3m0", **MASTER}),
    "sgd": (FusedSGD, {"momentum": 0.9, "nesterov": True, "momentum_buffer_dtype": "block32_e3m0"}),
}
HYPER = {"lr": 2e-3, "weight_decay": 0.1}


def made(kind, params=None, **more):
    optimizer, options = KINDS[kind]
    params = parameters(SHAPES) if params is None else params
    return optimizer(params, **{**HYPER, **options, **more})


# --- which moments are in blocks


@pytest.mark.parametrize(
    ("shape", "is_kept"),
    [
        ((64, 64), True),
        ((128, 32), True),
        ((128, 48), False),  # whole blocks, but not in a row
        ((1, 4128), True),
        ((4, 4, 256), True),
        ((65536,), True),
        ((65568 - 31,), False),
        ((65535,), False),
        ((63, 64), False),
        ((), False),
        ((0, 5024), False),
    ],
    ids=str,
)
def test_rows_of_whole_blocks_have_4_bits(shape, is_kept):
    param = torch.nn.Parameter(values(shape, 0, BF16))
    optimizer = FusedAdam([param], **BITS4)
    train(optimizer, 1)
    own = optimizer.state[param]
    for name in ("exp_avg", "exp_avg_sq"):
        assert (f"{name}_scale" in own) == is_kept
        if not is_kept:
            assert (own[name].dtype, own[name].shape) == (FP32, param.shape)
            continue
        assert own[name].dtype == own[f"{name}_scale"].dtype == torch.uint8
        assert own[name].shape == (*shape[:-1], shape[-1] // 2)
        rows = [shape[0]] if len(shape) > 1 else []
        count = param.numel() // 32
        assert own[f"{name}_scale"].shape == (*rows, count // (rows or [1])[0])
        value = optimizer.get_unscaled_state(param, name)
        assert (value.dtype, value.shape) == (FP32, param.shape)


def test_a_parameter_has_a_byte_and_a_sixteenth_of_moments():
    """Half a byte for each, and two scales for 32 elements."""
    param = torch.nn.Parameter(values((256, 512), 0, BF16))
    optimizer = FusedAdam([param], **BITS4, **STOCHASTIC)
    train(optimizer, 1)
    own = [tensor for tensor in optimizer.state[param].values() if tensor is not None]
    assert sum(tensor.nbytes for tensor in own) / param.numel() == 1 + 2 / 32


# --- steps


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_parameters_that_are_not_contiguous(backend):
    """Blocks follow the elements row by row, wherever they lie; the codes lie densely."""
    whole = parameters(SHAPES[:1])
    turned = [torch.nn.Parameter(param.detach().t().contiguous().t()) for param in whole]
    assert not turned[0].is_contiguous()
    expected = made("adam", whole, backend="reference")
    found = made("adam", turned, backend=backend)
    train(expected, 2)
    train(found, 2)
    for own, other in zip(params_of(found), params_of(expected), strict=True):
        assert_same_bits(own, other)
        for name, tensor in expected.state[other].items():
            if tensor is not None:
                assert_same_bits(found.state[own][name], tensor, name)


def test_codes_that_are_not_contiguous():
    """Columns of a larger tensor: the step works on copies."""
    expected, found = made("adam", backend="reference"), made("adam", backend="triton")
    train(expected, 3)
    train(found, 1)
    for param in params_of(found)[:2]:
        own = found.state[param]["exp_avg"]
        wide = torch.full((*own.shape[:-1], 2 * own.shape[-1]), 77, dtype=torch.uint8)
        wide[..., ::2] = own
        found.state[param]["exp_avg"] = wide[..., ::2]
    train(found, 2, first=1)
    for param in params_of(found)[:2]:
        own = found.state[param]["exp_avg"]
        base = own.as_strided((2 * own.numel(),), (1,))
        assert bool((base[1::2] == 77).all())
        found.state[param]["exp_avg"] = own.contiguous()
    assert_same_run(found, expected)


def parts_of(whole, cuts, **more):
    parts = []
    for first, end in pairwise(cuts):
        parts.append(torch.nn.Parameter(whole.detach().reshape(-1)[first:end].clone()))
        parts[-1].megaopt_first_element = first
    for part in (whole, *parts):
        part.megaopt_whole_shape = tuple(whole.shape)
        part.megaopt_number = 4
    return parts


def test_flat_parts_of_a_parameter_are_the_whole():
    """As distributed optimizers have them: they know where they lie, from blocks' beginnings on."""
    whole = torch.nn.Parameter(values((40, 128), 0, BF16))
    cuts = [0, 32, 32 * 37, 5120]
    parts = parts_of(whole, cuts)
    one, many = made("adam", [whole]), made("adam", parts)
    for step in range(3):
        whole.grad = values(whole.shape, 50 + step, BF16)
        for part, (first, end) in zip(parts, pairwise(cuts), strict=True):
            part.grad = whole.grad.view(-1)[first:end].clone()
        one.step()
        many.step()
    assert_same_bits(torch.cat([part.detach() for part in parts]), whole.detach().view(-1))
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        found = torch.cat([many.state[part][name] for part in parts])
        assert_same_bits(found, one.state[whole][name].view(-1), name)


def test_parts_that_start_within_a_block_step():
    """They have a scale of their own for the part of a block; the backends agree."""
    runs = []
    for own in ("triton", "reference"):
        whole = torch.nn.Parameter(values((40, 128), 0, BF16))
        runs.append(made("adam", parts_of(whole, [0, 38, 1000, 5120]), backend=own))
        train(runs[-1], 2)
    assert_same_run(*runs)
    scales = [runs[0].state[part]["exp_avg_scale"].numel() for part in params_of(runs[0])]
    assert scales == [2, 31, 129]


# --- what is kept


def test_values_that_are_read_are_the_oracles():
    optimizer = made("adam")
    train(optimizer, 2)
    for param in params_of(optimizer)[:2]:
        own = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            code, scale = own[name].view(-1).numpy(), own[f"{name}_scale"].numpy()
            expected = torch.from_numpy(block_oracle.decode(BITS4[f"{name}_dtype"], code, scale))
            assert_same_bits(optimizer.get_unscaled_state(param, name), expected.view(param.shape))


@pytest.mark.parametrize("options", [BITS4, NEAREST], ids=["stochastic", "nearest"])
def test_the_state_of_torch_is_loaded_and_given_back(options):
    theirs = torch.optim.AdamW(parameters(SHAPES, FP32), **HYPER)
    train(theirs, 2)
    ours = FusedAdam(parameters(SHAPES, FP32), **HYPER, **options)
    ours.load_state_dict(theirs.state_dict())
    other = FusedAdam(parameters(SHAPES, FP32), **HYPER, **options)
    for param, their, own in zip(*map(params_of, (ours, theirs, other)), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            other.set_scaled_state(own, name, theirs.state[their][name])
            assert_same_bits(ours.state[param][name], other.state[own][name])
    back = torch.optim.AdamW(parameters(SHAPES, FP32), **HYPER)
    back.load_state_dict(through_a_file(ours.to_torch_state_dict()))
    for their, param in zip(params_of(back), params_of(ours), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(back.state[their][name], ours.get_unscaled_state(param, name), name)


# --- refusals

REFUSED = {
    "exp_avg has a sign": (
        lambda p: FusedAdam(p, exp_avg_dtype="block32_e4m0"),
        r"exp_avg_dtype must be one of .*block32_e3m0.*has a sign, got 'block32_e4m0'",
    ),
    "exp_avg_sq is never negative": (
        lambda p: FusedAdam(p, exp_avg_sq_dtype="block32_e3m0"),
        r"exp_avg_sq_dtype must be one of .*block32_e4m0.*never negative, got 'block32_e3m0'",
    ),
    "contract torch": (
        lambda p: FusedAdam(p, contract="torch", **NEAREST),
        r"exp_avg_dtype='block32_e3m0_nearest'.* must not be given with contract='torch'",
    ),
    "8 bits beside": (
        lambda p: FusedAdam(p, exp_avg_dtype="block_e4m3", exp_avg_sq_dtype="block32_e4m0"),
        r"blocks of one size, got exp_avg_dtype='block_e4m3', exp_avg_sq_dtype='block32_e4m0'",
    ),
    "scaled masters": (
        lambda p: FusedAdam(p, master_weights=True, master_weight_dtype=torch.float16, **BITS4),
        r"must not be given beside master_weight_dtype=torch.float16",
    ),
    "amsgrad and draws": (
        lambda p: FusedAdam(p, amsgrad=True, **BITS4),
        r"exp_avg_sq_dtype must round to nearest with amsgrad=True, got 'block32_e4m0'",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(parameters(SHAPES))


@pytest.mark.parametrize(
    ("shape", "first"), [((100,), 7), ((101,), 64), ((5, 7), 0), ((), 64)], ids=str
)
def test_parts_that_share_a_byte_are_refused(shape, first):
    part = torch.nn.Parameter(values(shape, 0, BF16))
    part.megaopt_whole_shape, part.megaopt_first_element = (64, 128), first
    part.megaopt_number = 0
    message = (
        r"parameter 0 of group 0: exp_avg_dtype='block32_e3m0' keeps two elements in a byte: .*even"
        rf".*got one of shape .* from element {first} on"
    )
    with pytest.raises(ValueError, match=message):
        FusedAdam([part], **BITS4)
    FusedAdam([part], exp_avg_dtype="block_e4m3", exp_avg_sq_dtype="block_e5m3")
    part.megaopt_whole_shape = (64, 120)  # keeps fp32
    train(FusedAdam([part], **BITS4), 1)


def test_a_part_that_got_its_place_later_is_refused_before_anything_has_changed():
    """As Megatron's shards get theirs: by the step, by initialize_states, by a load."""
    part = torch.nn.Parameter(values((101,), 0, BF16))
    optimizer = FusedAdam([part], **BITS4)
    theirs = torch.optim.AdamW([torch.nn.Parameter(values((101,), 0, BF16))])
    train(theirs, 1)
    part.megaopt_whole_shape, part.megaopt_first_element = (64, 128), 64
    before = snapshot(optimizer)
    for act in (
        lambda: train(optimizer, 1),
        optimizer.initialize_states,
        lambda: optimizer.load_state_dict(theirs.state_dict()),
        lambda: optimizer.set_scaled_state(part, "exp_avg", torch.ones(101)),
    ):
        with pytest.raises(ValueError, match=r"block32_e3m0.* keeps \w+ elements in a byte"):
            act()
    part.grad = None
    assert_same(snapshot(optimizer), before)


def damage(state, how):
    if how == "a code for each element":
        state["exp_avg"] = state["exp_avg"].repeat(1, 2)
    elif how == "too few scales":
        state["exp_avg_scale"] = state["exp_avg_scale"][:-1]
    else:
        state["exp_avg_sq"] = state["exp_avg_sq"].view(torch.int8)


@pytest.mark.parametrize("how", ["a code for each element", "too few scales", "signed bytes"])
@pytest.mark.parametrize("where", ["loaded", "stepped"])
def test_a_state_that_does_not_fit_is_refused(how, where):
    optimizer = made("adam")
    train(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    damage(
        saved["state"][0] if where == "loaded" else optimizer.state[params_of(optimizer)[0]], how
    )
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="parameter 0 of group 0"):
        optimizer.load_state_dict(saved) if where == "loaded" else train(optimizer, 1, first=1)
    assert_same(snapshot(optimizer), before)
