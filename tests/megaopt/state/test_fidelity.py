"""Small changes over many steps: what follows them, and what stands still."""

import pytest
import torch

from megaopt import FusedAdam, FusedSGD

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LR = DECAY = 1e-3
"""Without gradients a weight loses 1e-6 of itself in a step."""


def start(count, dtype=BF16, seed=0):
    """Weights of many magnitudes, and all parts of a binade."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 4, (count,), generator=generator)
    values = torch.exp2(exponents + torch.rand(count, generator=generator))
    signs = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    return (values * signs).to(dtype)


def decayed(params, steps, lr=LR, **options):
    """The optimizer after steps whose gradients are 0, and the values it holds, fp64."""
    params = [torch.nn.Parameter(param.clone()) for param in params]
    rest = {"weight_decay": DECAY, "decoupled_weight_decay": True, "backend": "reference"}
    optimizer = FusedSGD(params, lr, **rest, **options)
    for param in params:
        param.grad = torch.zeros_like(param)
    for _ in range(steps):
        optimizer.step()
    return [value_of(optimizer, param) for param in params]


def value_of(optimizer, param):
    """The master's value where there is one, or the weight's; fp64."""
    value = param.detach()
    if optimizer.state[param]["master_param"] is not None:
        value = optimizer.get_unscaled_state(param, "master_param")
    return value.double()


def named(name):
    return {"master_weights": True, "master_weight_dtype": name}


FOLLOWS = {
    "fp32": (BF16, {"master_weights": True}),
    "remainder16": (BF16, {"master_weights": True, "store_param_remainders": True}),
    "remainder8_stochastic": (BF16, named("remainder8_stochastic")),
    "kahan_stochastic": (BF16, named("kahan_stochastic")),
    "kahan_stochastic beside fp16": (FP16, named("kahan_stochastic")),
}


def share_of_the_change(param, value, steps, rate=LR * DECAY):
    """How much of the decay that was asked for there is, in the mean over the elements."""
    exact = param.double()
    expected = 1 - (1 - rate) ** steps
    return float(((exact - value) / exact).mean() / expected)


@pytest.mark.parametrize(
    ("count", "steps"), [(4096, 1000), pytest.param(2048, 5000, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("dtype", "options"), FOLLOWS.values(), ids=FOLLOWS)
def test_masters_follow_a_decay_of_a_millionth(dtype, options, count, steps):
    """(1 - 1e-6)**t in the mean, within 1% of the change.

    24 bits: a last place is at most 2**-15 of a number, so that a step goes down one in about 45
    times; the standard error of the mean is 0.2% of the change.
    """
    param = start(count, dtype)
    (value,) = decayed([param], steps, **options)
    assert abs(share_of_the_change(param, value, steps) - 1) < 0.01


@pytest.mark.parametrize(
    ("count", "steps", "bound"),
    [(2**13, 400, 0.08), pytest.param(2**16, 2000, 0.01, marks=pytest.mark.exhaustive)],
)
def test_weights_alone_follow_it_too(count, steps, bound):
    """By 1e-5 a step: one in some 600 moves a bf16 weight, so that it takes more of them.

    The standard errors are 2.3% and 0.2% of the change.
    """
    params = [start(count, BF16), start(count, FP16)]
    found = decayed(params, steps, lr=10 * LR, weight_rounding="stochastic")
    for param, value in zip(params, found, strict=True):
        assert abs(share_of_the_change(param, value, steps, 10 * LR * DECAY) - 1) < bound


@pytest.mark.parametrize("steps", [50, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_weights_to_nearest_stand_still(steps):
    """Without a master, and with 24 bits: a millionth is below half their last places."""
    params = [start(2048, BF16), start(2048, FP16)]
    for param, value in zip(params, decayed(params, steps), strict=True):
        assert torch.equal(param.double(), value)
    (value,) = decayed(params[:1], steps, **named("remainder8"))
    assert torch.equal(params[0].double(), value)


def mantissas(value):
    """From 1 to 2."""
    return value.abs() / torch.exp2(value.abs().log2().floor())


def test_24_bits_to_nearest_move_too_far_or_not_at_all():
    """Half a last place is 2**-16 of a binade's first number: a change that is less is lost.

    By 1e-5 a step those move whose mantissa is above 2**-16 / 1e-5 = 1.526, a whole last place at
    a time, three times what was asked for at most; from there on they stand still.
    """
    param = start(4096)
    edge = 2.0**-16 / 1e-5
    exact = param.double()
    (value,) = decayed([param], 30, lr=1e-2, **named("remainder8"))
    mantissa = mantissas(exact)
    # below a power of two itself the last place is half as large
    above, below = mantissa > edge * 1.01, (mantissa > 1) & (mantissa < edge * 0.99)
    assert torch.equal(value[below], exact[below])
    last_place = torch.exp2(exact.abs().log2().floor()) * 2.0**-15
    moved = (exact.abs() - value.abs()) / last_place
    assert torch.equal(moved[above], torch.full_like(moved[above], 30))
    asked = exact.abs() * (1 - (1 - 1e-5) ** 30) / last_place
    assert bool((moved[above] > asked[above]).all())


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [pytest.param(BF16, 1500, marks=pytest.mark.slow),
     pytest.param(BF16, 5000, marks=pytest.mark.exhaustive),
     pytest.param(FP16, 5000, marks=pytest.mark.exhaustive)],
    ids=str,
)  # fmt: skip
def test_kahan_to_nearest_stands_still_once_the_compensation_is_large(dtype, steps):
    """A bf16 compensation c takes a change d as long as d is half its last place or more.

    That is as far as c < 2**8 d in a binade that ends there: after 128 to 512 steps the
    compensation takes no more, and what is missing grows: too little decay. Beside fp16 weights of
    at most 2**-12 of a weight it is thrown away sooner: there it goes on.
    """
    param = start(2048, dtype)
    early, late = (decayed([param], each, **named("kahan"))[0] for each in (600, steps))
    exact = param.double()
    gone = (exact - late) / exact / (LR * DECAY)
    if dtype == BF16:
        assert torch.equal(early, late)
        assert 128 < float(gone.min()) < float(gone.max()) < 520
    else:
        assert not torch.equal(early, late)
    assert share_of_the_change(param, late, steps) < (0.35 if dtype == BF16 else 1.1)


# --- moments

BETAS2 = (0.95, 0.99, 0.999, 0.9999)


def roots(dtype, steps, betas2, count=2048):
    """sqrt(exp_avg_sq / the same in fp64) by beta2, after a tenfold drop of gradients midway."""
    generator = torch.Generator().manual_seed(7)
    size = torch.exp(torch.randn(count, generator=generator)) * 1e-5
    params = [torch.nn.Parameter(torch.zeros(count)) for _ in betas2]
    groups = [
        {"params": [p], "betas": (0.9, b), "lr": 0.0} for p, b in zip(params, betas2, strict=True)
    ]
    optimizer = FusedAdam(groups, exp_avg_sq_dtype=dtype, backend="reference", seed=5)
    exact = [torch.zeros(count, dtype=torch.float64) for _ in betas2]
    for step in range(steps):
        drop = 0.1 if step >= steps // 2 else 1.0
        grad = torch.randn(count, generator=generator) * size * drop
        for param, average, beta2 in zip(params, exact, betas2, strict=True):
            param.grad = grad
            average.mul_(beta2).add_((1 - beta2) * grad.double() ** 2)
        optimizer.step()
    found = [optimizer.state[param]["exp_avg_sq"].double() for param in params]
    pairs = zip(betas2, found, exact, strict=True)
    return {beta2: (one / other).sqrt() for beta2, one, other in pairs}


def assert_near(ratio, beta2):
    low, median, high = torch.quantile(ratio, torch.tensor([0.05, 0.5, 0.95]).double()).tolist()
    assert abs(median - 1) < 0.01, f"beta2 {beta2}: median {median}"
    assert low > 0.9, f"beta2 {beta2}: {low}"
    assert high < 1.1, f"beta2 {beta2}: {high}"


def test_stochastic_exp_avg_sq_follows_for_some_time():
    for beta2, ratio in roots("bfloat16_stochastic", 300, (0.95, 0.99), 1024).items():
        assert_near(ratio, beta2)


@pytest.mark.exhaustive
def test_stochastic_exp_avg_sq_follows_over_5000_steps():
    for beta2, ratio in roots("bfloat16_stochastic", 5000, BETAS2).items():
        assert_near(ratio, beta2)


@pytest.mark.exhaustive
def test_exp_avg_sq_to_nearest_does_not():
    """What a step takes away is below half a last place: after the drop it stays too large."""
    found = roots(BF16, 5000, (0.95, 0.999))
    assert_near(found[0.95], 0.95)
    assert float(found[0.999].median()) > 1.2
    with pytest.raises(AssertionError, match="median"):
        assert_near(found[0.999], 0.999)
