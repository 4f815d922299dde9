"""GaLoreAdamW: what it does with matrices, formats, groups and gradients."""

import pytest
import torch
from bits import assert_same_bits
from handling import train_all
from interpreted import interpreted
from runs import BF16, FP32, assert_same, copied, give_gradients, params_of, snapshot, train, values

from megaopt import FusedAdam, GaLoreAdamW
from megaopt.kernels.galore.rule import LEFT, RIGHT, projected, projected_back
from megaopt.kernels.rules.galore import apply_reference, direction_reference, scalars

SHAPES = [(24, 10), (6, 30), (9,)]
RANKED = {"rank": 3, "update_proj_gap": 3, "scale": 0.25}
NUMBERS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
MASTERS = {
    "fp32": {"dtype": FP32},
    "remainder16": {"dtype": FP32, "store_param_remainders": True},
}
OTHER_MASTERS = {
    "none": {},
    "stochastic": {"weight_rounding": "stochastic"},
    **{
        name: {"master_weights": True, "master_weight_dtype": name}
        for name in ("remainder8", "remainder8_stochastic", "kahan", "kahan_stochastic")
    },
    "fp16": {"master_weights": True, "master_weight_dtype": torch.float16},
}
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
MOMENTS = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "bf16_stochastic": {
        "exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic",
    },
    "fp8": {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16},
    "blocks": {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3"},
}  # fmt: skip


def parameters(shapes=SHAPES, dtype=FP32):
    return [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(shapes)]


def galore(params, **options):
    return GaLoreAdamW(params, **{**NUMBERS, **RANKED, **options})


def side_of(proj_type, shape):
    is_tall = shape[0] >= shape[1]
    sides = {"std": is_tall, "reverse_std": not is_tall, "left": False}
    return RIGHT if sides.get(proj_type, True) else LEFT


def step_by_hand(param, state, grad, projection, side, group):
    """What docs/numbers.md lists, of fp32 tensors."""
    row = scalars(group)
    low = projected(grad, projection, side)
    moments = (state["exp_avg"], state["exp_avg_sq"])
    low, moments = direction_reference(None, moments, low, row)
    param, _ = apply_reference(param, (), projected_back(low, projection, side), row)
    return param, dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))


@pytest.mark.parametrize("refresh", ["subspace", "svd"])
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "right", "left", "auto"])
def test_a_step_is_its_operations_in_their_order(proj_type, refresh):
    """Over three refreshes; that they are GaLore's, tests/kernels/galore/test_rule.py."""
    optimizer = galore(parameters(SHAPES[:2]), proj_type=proj_type, refresh=refresh)
    params = params_of(optimizer)
    for step in range(7):
        weights, before = copied(params), snapshot(optimizer)["states"]
        train(optimizer, 1, first=step)
        group = optimizer.param_groups[0]
        for param, weight, state in zip(params, weights, before, strict=True):
            now, side = optimizer.state[param], side_of(proj_type, param.shape)
            zeros = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros_like(now["exp_avg"]))
            by_hand, moments = step_by_hand(
                weight, state or zeros, param.grad, now["projection"], side, group
            )
            assert_same_bits(param.detach(), by_hand)
            assert_same({name: now[name] for name in moments}, moments)


@pytest.mark.parametrize("rank", [5, 6, 7, 99])
def test_other_parameters_take_fused_adams_step(rank):
    """Of no rank, of another number of dimensions, or where the rank saves nothing: 5 * (8 + 6).

    6 is the matrix's smaller dimension; a larger rank is the full one, as in galore_torch.
    """
    shapes = [(24, 10), (9,), (8, 6), (3, 4, 5), ()]
    ours, theirs = parameters(shapes), parameters(shapes)
    groups = [{"params": ours[:1], "rank": None}, {"params": ours[1:]}]
    optimizer = galore(groups, rank=rank)
    plain = FusedAdam(theirs, **NUMBERS)
    train_all((optimizer, plain), 4)
    assert_same([p.detach() for p in ours], [p.detach() for p in theirs])
    assert_same([optimizer.state[p] for p in ours], [plain.state[p] for p in theirs])


@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
def test_exact_masters_take_the_step_of_fp32_weights(options):
    wide = galore(parameters(dtype=BF16), **options)
    with torch.no_grad():
        exact = galore([torch.nn.Parameter(p.float()) for p in params_of(wide)])
    for step in range(5):
        give_gradients(params_of(wide), step, BF16)
        for own, other in zip(params_of(exact), params_of(wide), strict=True):
            own.grad = other.grad.float()
        exact.step()
        wide.step()
        for own, other in zip(params_of(exact), params_of(wide), strict=True):
            master = wide.get_unscaled_state(other, "master_param")
            assert_same_bits(master, own.detach())
            if options == MASTERS["fp32"]:
                assert_same_bits(other.detach(), own.detach().bfloat16())


@pytest.mark.parametrize("options", OTHER_MASTERS.values(), ids=OTHER_MASTERS)
def test_every_master_follows_fp32_weights(options):
    """After a step of one element's size the values differ by the format's rounding alone.

    bf16 keeps 8 bits: a weight without a master is off by 2**-8 of it, rounded up or down. What
    lies beside a weight keeps 15 bits at least; scaled fp16 2**-11 of what is large in the tensor.
    """
    found = galore(parameters(dtype=BF16), **options)
    exact = galore([torch.nn.Parameter(p.detach().float()) for p in params_of(found)])
    give_gradients(params_of(found), 0, BF16)
    for own, other in zip(params_of(exact), params_of(found), strict=True):
        own.grad = other.grad.float()
    starts = [p.detach().clone() for p in params_of(exact)]
    exact.step()
    found.step()
    has_master = "master_weights" in options
    for own, other, start in zip(params_of(exact), params_of(found), starts, strict=True):
        value = found.get_unscaled_state(other, "master_param")
        bound = (2.0**-11 if has_master else 2.0**-7) * own.detach().abs().amax()
        assert (value - own.detach()).abs().max() <= bound
        assert not torch.equal(own.detach(), start)


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("proj_type", ["right", "left"])
def test_moments_are_those_of_fused_adam_on_the_projected_gradient(proj_type, name):
    """In every format, codes and scales; FusedAdam's moments do not depend on its weights."""
    shape = (192, 136) if proj_type == "right" else (136, 192)
    kinds = {"master_weights": False, "seed": 11, **MOMENTS[name]}
    optimizer = galore(parameters([shape]), rank=64, proj_type=proj_type, **kinds)
    (param,) = params_of(optimizer)
    low = torch.nn.Parameter(torch.zeros((192, 64) if proj_type == "right" else (64, 192)))
    plain = FusedAdam([low], **NUMBERS, **kinds)
    for step in range(4):
        train(optimizer, 1, first=step)
        state = optimizer.state[param]
        low.grad = projected(param.grad, state["projection"], proj_type)
        plain.step()
        own = {name: state[name] for name in plain.state[low]}
        assert_same(own, plain.state[low])
    assert ("exp_avg_scale" in own) == (name in ("fp8", "blocks"))


# --- what shows in no bit


def weights_after(params, steps=5, order=None, grads=None, **options):
    """Steps of parameters by their own gradients; options: of galore."""
    optimizer = galore(order or params, **options)
    for step in range(steps):
        give_gradients(params, step)
        for param in params:
            param.grad = param.grad if grads is None else grads(param.grad)
        optimizer.step()
    return [param.detach() for param in params]


def test_groups_and_order_show_in_no_bit():
    """Where parameters have the same numbers, which say when each is refreshed."""
    expected = weights_after(parameters())
    split = parameters()
    groups = [
        {"params": [split[2], split[1]], "param_numbers": [2, 1]},
        {"params": [split[0]], "param_numbers": [0]},
    ]
    assert_same(weights_after(split, order=groups), expected)
    alone = parameters()
    other = [{"params": [p], "param_numbers": [i]} for i, p in enumerate(alone)]
    assert_same(weights_after(alone, order=other), expected)


def transposed(grad):
    return grad.mT.contiguous().mT if grad.dim() == 2 else grad


def unaligned(grad):
    memory = torch.empty(grad.numel() + 3)
    return memory[3:].view(grad.shape).copy_(grad)


def spread(grad):
    return torch.stack([grad, grad * 7], -1)[..., 0]


@pytest.mark.parametrize("laid", [transposed, unaligned, spread], ids=lambda each: each.__name__)
def test_the_layout_of_gradients_shows_in_no_bit(laid):
    assert_same(weights_after(parameters(), grads=laid), weights_after(parameters()))


def test_the_layout_of_weights_shows_in_no_bit():
    moved = [torch.nn.Parameter(transposed(p.detach())) for p in parameters()]
    assert_same([w.contiguous() for w in weights_after(moved)], weights_after(parameters()))


@pytest.mark.parametrize("options", [{}, {**BLOCKS, "weight_rounding": "stochastic"}], ids=str)
def test_two_runs_are_one(options):
    expected, again = (weights_after(parameters(dtype=BF16), **options) for _ in range(2))
    assert_same(again, expected)


@interpreted
def test_kernels_of_other_parameters_change_no_bit():
    backends = ("triton", "reference")
    found, expected = (galore(parameters(), backend=b, kernel="torch") for b in backends)
    train_all((found, expected), 4)
    assert_same(snapshot(found), snapshot(expected))


KAHAN = {"master_weights": True, "master_weight_dtype": "kahan_stochastic"}


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="fp32", marks=pytest.mark.slow),
        pytest.param({"dtype": FP32, "proj_type": "left"}, id="masters"),
        pytest.param({"dtype": FP32, "precision": "tf32"}, id="tf32"),
        pytest.param({"weight_rounding": "stochastic", "seed": 3, **BLOCKS}, id="drawn"),
        pytest.param(KAHAN, id="kahan", marks=pytest.mark.slow),
    ],
)
def test_kernels_are_the_twin_where_products_are_exact(options):
    """Products in general: tests/kernels/galore/test_kernel.py."""
    assert_kernels_agree(("hybrid", "torch"), options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_what_torch_compiles_is_the_twin_on_a_cpu():
    """Which contracts no product and sum there."""
    assert_kernels_agree(("compiled", "torch"), {"dtype": FP32})


def assert_kernels_agree(kernels, options):
    """Of rank 1, through refreshes, transposed gradients, groups, a loss scale, clipping."""
    runs = []
    for kernel in kernels:
        params = parameters([(24, 10), (6, 30), (9,), (40, 130)], BF16 if options else FP32)
        groups = [{"params": params[:2], "scale": 2.0}, {"params": params[2:]}]
        optimizer = galore(groups, rank=1, kernel=kernel, **options)
        for step in range(4):
            give_gradients(params, step)
            params[3].grad = transposed(params[3].grad)
            scaled_step(optimizer, 4.0, clip_norm=10.0)
        runs.append(optimizer)
    assert_same(*map(snapshot, runs))


@interpreted
@pytest.mark.parametrize(("precision", "taken"), [("ieee", "hybrid"), ("bf16", "grouped")])
def test_auto_is_the_kernels_where_these_step_the_rest(precision, taken):
    # sums of 70 and 300 numbers, whose order shows in bits
    shapes, own = [(150, 300)], {"steps": 1, "rank": 70, "precision": precision}
    names = (("auto", "triton"), (taken, "triton"), ("auto", "reference"), ("torch", "triton"))
    weights = [
        weights_after(parameters(shapes), kernel=kernel, backend=backend, **own)
        for kernel, backend in names
    ]
    assert_same(weights[0], weights[1])
    assert_same(weights[2], weights[3])
    if precision == "bf16":  # every kernel has the same bits
        assert_same(weights[0], weights[2])
        return
    with pytest.raises(AssertionError, match="differ"):
        assert_same(weights[0], weights[2])


# --- when projections are made anew


def refreshed_in(optimizer, steps):
    """For each matrix the steps, counted from 0, in which its projection was made anew."""
    params = [param for param in params_of(optimizer) if param.dim() == 2]
    found = [[] for _ in params]
    for step in range(steps):
        before = [copied(optimizer.state[p].get("projection")) for p in params]
        train(optimizer, 1, first=step)
        for place, (param, old) in enumerate(zip(params, before, strict=True)):
            if old is None or not torch.equal(old, optimizer.state[param]["projection"]):
                found[place].append(step)
    return found


def test_all_are_refreshed_at_once_or_one_after_another():
    shapes = [(24, 10), (6, 30), (12, 12)]
    at_once = galore(parameters(shapes), stagger=False)
    assert refreshed_in(at_once, 7) == [[0, 3, 6]] * 3
    one_by_one = galore(parameters(shapes))
    assert refreshed_in(one_by_one, 7) == [[0, 3, 6], [0, 1, 4], [0, 2, 5]]
    numbered = galore([{"params": parameters(shapes[:1]), "param_numbers": [101]}])
    assert refreshed_in(numbered, 6) == [[0, 2, 5]]


def test_a_first_gradient_that_comes_late_makes_a_projection():
    optimizer = galore(parameters([(24, 10), (12, 12)]), update_proj_gap=100, stagger=False)
    first, second = params_of(optimizer)
    first.grad = values(first.shape, 0)
    optimizer.step()
    assert "projection" not in optimizer.state.get(second, {})
    for param in (first, second):
        param.grad = values(param.shape, 1)
    old = optimizer.state[first]["projection"].clone()
    optimizer.step()
    assert_same_bits(optimizer.state[first]["projection"], old)
    assert optimizer.state[second]["captured_energy"] > 0.3


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_gradients_that_say_nothing_leave_projections(value):
    optimizer = galore(parameters([(24, 10)]), stagger=False)
    (param,) = params_of(optimizer)
    train(optimizer, 3)
    state = optimizer.state[param]
    projection, energy = state["projection"].clone(), state["captured_energy"].clone()
    assert energy > 0
    param.grad = torch.full_like(param, value)
    optimizer.step()
    assert_same_bits(state["projection"], projection)
    assert_same_bits(state["captured_energy"], energy)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel", ["torch", pytest.param("hybrid", marks=interpreted)])
@pytest.mark.parametrize("refresh", ["subspace", "svd"])
@pytest.mark.parametrize("capturable", [False, True], ids=str)
def test_a_first_gradient_that_is_zero_makes_no_projection(capturable, refresh, kernel):
    """Zeros stay in its place until one says something: not until the parameter's turn."""
    own = {"update_proj_gap": 100, "refresh": refresh, "kernel": kernel, "capturable": capturable}
    optimizer = galore(parameters([(24, 10), (6, 30)]), **own)
    for step in range(3):
        give_gradients(params_of(optimizer), step)
        params_of(optimizer)[1].grad.mul_(step == 2)
        optimizer.step()
        state = optimizer.state[params_of(optimizer)[1]]
        assert bool(state["projection"].any()) == (step == 2)
        assert (state["captured_energy"] > 0.3) == (step == 2)


def test_captured_energy_is_that_of_the_last_refresh():
    optimizer = galore(parameters([(24, 10)]), stagger=False)
    (param,) = params_of(optimizer)
    train(optimizer, 4)
    energy, basis = (optimizer.state[param][n] for n in ("captured_energy", "projection"))
    low, grad = param.grad.double() @ basis.double().mT, param.grad.double()
    share = low.square().sum() / grad.square().sum()
    assert abs(energy - share) <= 24 * 2.0**-23  # sums of up to 24 products, each rounded
    kept = energy.clone()
    train(optimizer, 2, first=4)
    assert_same_bits(optimizer.state[param]["captured_energy"], kept)


# --- what gradients go through first


def scaled_step(optimizer, factor, found_inf=0.0, **options):
    """As a GradScaler steps: with gradients so many times too large."""
    for param in params_of(optimizer):
        param.grad = param.grad * factor
    optimizer.grad_scale = torch.tensor(factor)
    optimizer.found_inf = torch.tensor(found_inf)
    optimizer.step(**options)
    del optimizer.grad_scale, optimizer.found_inf


def test_a_loss_scale_shows_in_no_bit():
    plain, scaled = galore(parameters()), galore(parameters())
    for step in range(4):
        for optimizer in (plain, scaled):
            give_gradients(params_of(optimizer), step)
        plain.step()
        scaled_step(scaled, 2.0**16)
    assert_same(snapshot(scaled), snapshot(plain))


def test_an_overflow_leaves_everything_as_it_is():
    optimizer = galore(parameters())
    train(optimizer, 3)
    before = snapshot(optimizer)
    give_gradients(params_of(optimizer), 3)
    scaled_step(optimizer, 2.0, found_inf=1.0)
    assert_same(snapshot(optimizer), before)
    skipping = galore(parameters(), nonfinite="skip")
    train(skipping, 3)
    before = snapshot(skipping)
    params_of(skipping)[0].grad[2, 3] = torch.nan
    skipping.step()
    assert_same(snapshot(skipping), before)


def test_clipping_goes_by_the_whole_gradients():
    """Not by their projections; a clipped step is that of a coefficient."""
    found, by_hand, plain = galore(parameters()), galore(parameters()), FusedAdam(parameters())
    for optimizer in (found, by_hand, plain):
        give_gradients(params_of(optimizer), 0)
    plain.step(clip_norm=0.5)
    found.step(clip_norm=0.5)
    assert_same_bits(found.grad_norm, plain.grad_norm)
    coefficient = torch.tensor(0.5) / (plain.grad_norm + 1e-6)
    by_hand.step(clip_coefficient=coefficient)
    assert_same(snapshot(found), snapshot(by_hand))


def test_maximize_goes_the_other_way():
    up, down = galore(parameters(), maximize=True), galore(parameters())
    for step in range(3):
        for optimizer, sign in ((up, -1.0), (down, 1.0)):
            give_gradients(params_of(optimizer), step)
            for param in params_of(optimizer):
                param.grad = param.grad * sign
        up.step()
        down.step()
    found, expected = snapshot(up), snapshot(down)
    assert_same(found["weights"], expected["weights"])


def test_a_release_of_gradients_takes_the_same_steps():
    from megaopt import release_gradients

    released, straight = galore(parameters()), galore(parameters())
    release_gradients(params_of(released), released)
    for step in range(5):
        for optimizer in (released, straight):
            params = params_of(optimizer)
            loss = sum((p * values(p.shape, 10 * step + i)).sum() for i, p in enumerate(params))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_same(snapshot(released), snapshot(straight))
