"""Whatever shape, layout, place and company a tensor has, its elements get the same bits."""

import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, refused, train_all
from runs import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    MASTER,
    REMAINDERS,
    SCALED,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    snapshot,
    train,
    values,
)

from megaopt import FusedAdam

UNSCALED = {n: o for n, o in FORMATS.items() if not SCALED & {*o.values()}}
HYPER = {"lr": 0.01, "weight_decay": 0.1}


both_looks = pytest.mark.usefixtures("looks")


def run_flat(numel, options, steps=3, dtype=BF16):
    """The plain run to compare with: one contiguous tensor on the reference backend."""
    param = torch.nn.Parameter(values((numel,), 0, dtype))
    optimizer = FusedAdam([param], backend="reference", **HYPER, **options)
    for step in range(steps):
        param.grad = values((numel,), step + 1, dtype)
        optimizer.step()
    return param.detach(), optimizer.state[param]


# --- chunks, tensors, groups


@both_backends
@pytest.mark.parametrize("options", UNSCALED.values(), ids=UNSCALED)
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([1, 31], id="one_and_the_rest"),
        pytest.param([7, 0, 12, 13], id="odd_pieces_and_an_empty_one"),
    ],
)
def test_one_tensor_is_the_same_as_its_pieces(backend, options, cuts):
    """The pieces are views of one buffer: they start unaligned and must not write beyond."""
    expected, expected_state = run_flat(sum(cuts), options)
    buffer = values((sum(cuts),), 0, BF16)
    params = [torch.nn.Parameter(piece) for piece in buffer.split(cuts)]
    optimizer = FusedAdam(params, backend=backend, **HYPER, **options)
    for step in range(3):
        grads = values((sum(cuts),), step + 1, BF16).split(cuts)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    assert_same_bits(buffer, expected, "weights")
    for name, whole in expected_state.items():
        pieces = [optimizer.state[param][name] for param in params]
        if whole is None:
            assert pieces == [None] * len(cuts)
        else:
            assert_same_bits(torch.cat(pieces), whole, name)


@both_backends
def test_weights_and_gradients_of_all_dtypes_in_one_optimizer(backend):
    dtypes = [FP32, BF16, FP16]
    pairs = [(weight, grad) for weight in dtypes for grad in dtypes]
    params = [torch.nn.Parameter(values((5,), 1, weight)) for weight, _ in pairs]
    optimizer = FusedAdam(params, backend=backend, use_decoupled_grad=True, **HYPER, **MASTER)
    for step in range(2):
        for param, (_, dtype) in zip(params, pairs, strict=True):
            param.decoupled_grad = values((5,), step + 2, BF16).to(dtype)
        optimizer.step()
    # a bf16 number is the same in fp32, and these also in fp16: the gradient's dtype moves no bit
    assert torch.equal(values((5,), 2, BF16).to(FP16).float(), values((5,), 2, BF16).float())
    for first in (0, 3, 6):
        for other in (first + 1, first + 2):
            assert_same_bits(params[other].detach(), params[first].detach(), str(pairs[other]))
            assert_same(optimizer.state[params[other]], optimizer.state[params[first]])


# --- who takes part


@both_backends
def test_none_gradients_leave_a_parameter_as_it_is(backend):
    """A parameter without gradient at some steps: the others step on, its own state waits."""
    params, same = parameters([(3,), (4,)]), parameters([(3,), (4,)])
    optimizer = FusedAdam(params, backend=backend, makes_states="stepped", **MASTER)
    expected = FusedAdam(same, backend="reference", **MASTER)
    for step in range(4):
        for own in (params, same):
            give_gradients(own, step)
        if step in (0, 2):
            params[1].grad = None
            before = params[1].detach().clone(), dict(optimizer.state.get(params[1], {}))
            before_state = {name: t.clone() for name, t in before[1].items()}
        optimizer.step()
        if step in (0, 2):
            assert_same_bits(params[1].detach(), before[0])
            assert_same(dict(optimizer.state.get(params[1], {})), before_state)
        expected.step()
        assert_same_bits(params[0].detach(), same[0].detach(), f"step {step}")
    assert not torch.equal(params[1], same[1])


@both_backends
def test_a_step_without_any_gradient_changes_nothing_but_the_count(backend):
    optimizer = FusedAdam(parameters(), backend=backend, makes_states="stepped", **MASTER)
    before = snapshot(optimizer)
    with pytest.warns(UserWarning, match="none of the 4 parameters has a gradient"):
        optimizer.step()
    after = snapshot(optimizer)
    assert after["groups"][0].pop("step") == 1
    assert before["groups"][0].pop("step") == 0
    assert_same(after, before)


# --- layouts

SPREAD = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every_second": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "inside_a_larger_one": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@both_backends
@pytest.mark.parametrize("which", ["weight", "grad", "master", "states", "all"])
@pytest.mark.parametrize("spread", SPREAD.values(), ids=SPREAD)
@pytest.mark.sample(3)
@pytest.mark.thirds
def test_layouts_move_no_bit(backend, which, spread):
    """Non-contiguous and unaligned weights, gradients, masters and moments."""
    plain = torch.nn.Parameter(values((3, 4), 0, BF16))
    code = values((3, 4), 0, BF16)
    param = torch.nn.Parameter(spread(code) if which in ("weight", "all") else code)
    master = values((3, 4), 0, BF16).float()
    master = spread(master) if which in ("master", "all") else master
    found = FusedAdam([param], master_weights=[master], backend=backend, **HYPER)
    expected = FusedAdam([plain], backend="reference", **HYPER, **MASTER)
    for step in range(3):
        plain.grad = values((3, 4), step + 1, BF16)
        param.grad = spread(plain.grad) if which in ("grad", "all") else plain.grad.clone()
        found.step()
        expected.step()
        if which in ("states", "all"):
            state = found.state[param]
            state["exp_avg"], state["exp_avg_sq"] = (
                spread(state[name]) for name in ("exp_avg", "exp_avg_sq")
            )
    assert_same_run(found, expected)
    assert found.state[param]["master_param"] is master
    assert (param.stride() != plain.stride()) == (
        which in ("weight", "all") and spread is not SPREAD["unaligned"]
    )


@both_backends
@pytest.mark.parametrize(
    "options", [REMAINDERS, FORMATS["fp16_master_bf16_fp16"]], ids=["remainders", "scaled"]
)
def test_a_transposed_weight_beside_other_formats(backend, options):
    found = FusedAdam(
        [torch.nn.Parameter(values((3, 4), 0, BF16).t().contiguous().t())],
        backend=backend,
        **options,
    )
    expected = FusedAdam([torch.nn.Parameter(values((3, 4), 0, BF16))], **options)
    train_all((found, expected), 3)
    assert_same_run(found, expected)


@both_backends
def test_a_broadcast_gradient_as_of_a_sum(backend):
    params = [torch.nn.Parameter(values((3, 4), 0)) for _ in range(2)]
    optimizers = [
        FusedAdam([p], backend=b) for p, b in zip(params, (backend, "reference"), strict=True)
    ]
    params[0].sum().backward()
    params[0].grad = torch.ones(()).expand(3, 4)
    params[1].grad = torch.ones(3, 4)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_run(*optimizers)


# --- what moves between steps


def move_grads(optimizer, param):
    param.grad = torch.cat([param.grad.new_zeros(3), param.grad.flatten()])[3:].view(param.shape)


def move_weight(optimizer, param):
    param.data = param.data.clone()


def transpose_weight_in_place(optimizer, param):
    """The same address and other strides, the same numbers at each index."""
    same = param.data.clone()
    param.data = param.data.t()
    param.data.copy_(same)


def transpose_grad_in_place(optimizer, param):
    same = param.grad.clone()
    param.grad = param.grad.t()
    param.grad.copy_(same)


def move_state(optimizer, param):
    state = optimizer.state[param]
    state.update({name: None if t is None else t.clone() for name, t in state.items()})


def new_state_dict(optimizer, param):
    state = optimizer.state[param]
    optimizer.state[param] = {name: t.clone() for name, t in state.items() if t is not None}


def transpose_state_in_place(optimizer, param):
    state = optimizer.state[param]
    same = state["exp_avg"].clone()
    state["exp_avg"] = state["exp_avg"].t()
    state["exp_avg"].copy_(same)


def offload_and_reload(optimizer, param):
    """Megatron's offload: the storage goes and comes back elsewhere."""
    kept = param.data.clone()
    param.data = torch.empty(0, dtype=param.dtype)
    param.data = kept


MOVES = [
    move_grads, move_weight, transpose_weight_in_place, transpose_grad_in_place, move_state,
    new_state_dict, transpose_state_in_place, offload_and_reload,
]  # fmt: skip


@both_looks
@both_backends
@pytest.mark.parametrize("move", MOVES, ids=[move.__name__ for move in MOVES])
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_tensors_that_move_between_steps(backend, move):
    moving = FusedAdam(parameters([(4, 4), (3,)]), backend=backend, **MASTER)
    still = FusedAdam(parameters([(4, 4), (3,)]), backend="reference", **MASTER)
    params = moving.param_groups[0]["params"]
    train_all((moving, still), 2)
    old = {
        id(params[0].data): params[0].data,
        **{id(t): t for t in moving.state[params[0]].values()},
    }
    for step in (2, 3):
        give_gradients(params, step)
        move(moving, params[0])
        moving.step()
        train(still, 1, first=step)
        assert_same_run(moving, still)
    assert old  # what was moved away stayed alive, so that no address came back by chance


@both_looks
@both_backends
def test_the_memory_that_a_tensor_left_is_not_written(backend):
    (param,) = parameters([(5,)])
    optimizer = FusedAdam([param], backend=backend, **MASTER)
    train(optimizer, 2)
    left = [param.data, *optimizer.state[param].values()]
    before = [tensor.clone() for tensor in left]
    param.data = param.data.clone()
    move_state(optimizer, param)
    train(optimizer, 1, first=2)
    assert_same(left, before)


@both_looks
@both_backends
@pytest.mark.parametrize("shape", [(2,), (9,), (2, 5)], ids=str)
def test_a_weight_that_changed_its_shape_is_refused(backend, shape):
    """Nothing may be written past the states of the old size."""
    (param,) = parameters([(5,)])
    optimizer = FusedAdam([param], backend=backend, **MASTER)
    train(optimizer, 2)
    param.data = values(shape, 3, BF16)
    param.grad = values(shape, 4, BF16)
    for _ in range(2):
        with refused(optimizer, r"parameter 0 of group 0: .*state 'master_param'|exp_avg"):
            optimizer.step()


@both_looks
@both_backends
def test_one_parameter_changes_the_dtype_of_its_gradient_and_another_does_not(backend):
    params, same = parameters([(5,), (3,)]), parameters([(5,), (3,)])
    found = FusedAdam(params, backend=backend, use_decoupled_grad=True, **MASTER)
    expected = FusedAdam(same, backend="reference", use_decoupled_grad=True, **MASTER)
    for step in range(4):
        for index, (param, twin) in enumerate(zip(params, same, strict=True)):
            exact = values(param.shape, 10 * step + index, BF16)
            param.decoupled_grad = exact.to(BF16 if (step + index) % 2 else FP32)
            twin.decoupled_grad = exact.float()
        found.step()
        expected.step()
    assert_same_run(found, expected)


@both_looks
@both_backends
def test_a_weight_and_all_its_states_change_their_size(backend):
    """All agree with one another still, only not with the tables that were made for them."""
    moving, still = parameters([(5,), (3,)]), parameters([(9,), (3,)])
    found = FusedAdam(moving, backend=backend, **MASTER)
    expected = FusedAdam(still, backend="reference", **MASTER)
    train(found, 2)
    train(expected, 1)
    moving[0].data = still[0].data.clone()
    moving[1].data = still[1].data.clone()
    for param, twin in zip(moving, still, strict=True):
        found.state[param].update({n: t.clone() for n, t in expected.state[twin].items()})
    found.param_groups[0]["step"] = 1
    train_all((found, expected), 2, first=1)
    assert_same_run(found, expected)


@both_looks
@both_backends
def test_a_master_set_to_none_is_made_from_the_weight(backend):
    (param,) = parameters([(5,)])
    optimizer = FusedAdam([param], backend=backend, lr=0.0, **MASTER)
    train(optimizer, 2)
    optimizer.state[param]["master_param"] = None
    train(optimizer, 1, first=2)
    assert_same_bits(optimizer.state[param]["master_param"], param.detach().float())


@both_looks
@both_backends
def test_a_gradient_that_is_no_tensor_is_refused(backend):
    (param,) = parameters([(5,)])
    optimizer = FusedAdam([param], backend=backend, use_decoupled_grad=True, **MASTER)
    param.decoupled_grad = 0.5
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter 0 of group 0: the gradient must .* 0.5"):
            optimizer.step()
