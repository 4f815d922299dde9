"""8-bit moments in blocks over many steps, beside averages in fp64 of the same gradients.

Every scenario has blocks of 32 sizes from 1e-12 to 1e4, and spreads that are log-normal within a
block.
"""

import pytest
import torch

from megaopt import FusedAdam

# Moments of an optimizer beside exact ones, over many steps with the same gradients.

COLUMNS = 128
MOMENT_SCENARIOS = ("stationary", "drop", "spike", "half", "1,000x smaller")
"""In the middle all gradients become ten times smaller, every fourth is 100 times larger in one
step, every second is 0 from there on; in the last one they lie within three decades in a block."""
HALVED = ("halved", "halved, noise 0.3")
"""Constant gradients, with noise of 0.3 of them or without, that halve in the middle."""
SMALLER = slice(1, None, 4)
"""In the last scenario, the coordinates at 1e-3 of their block's largest."""
WINDOW = 200
"""So many last steps are those whose updates are compared."""


class Gradients:
    """A scenario's part of the parameter is (sizes, rows * 128): grad = (mean + noise) * factor.

    The factor is 1, in the step in the middle `peak`, and `after` from there on. The spread of the
    noise is log-normal over the coordinates (sigma 1), times a size.
    """

    def __init__(self, scenarios, sizes, rows, steps):
        self.middle = steps // 2
        self.shape = (len(scenarios), len(sizes), rows * COLUMNS)
        self._generator = torch.Generator().manual_seed(14)
        size = torch.tensor(sizes)[:, None]
        magnitude = torch.exp(self._draw()) * size
        self._noise, self._mean = magnitude.clone(), torch.zeros_like(magnitude)
        self._after, self._peak = torch.ones_like(magnitude), torch.ones_like(magnitude)
        for place, scenario in enumerate(scenarios):
            if scenario == "1,000x smaller":
                uniform = torch.rand(self.shape[1:], generator=self._generator)
                self._noise[place] = 10.0 ** (-3 * uniform) * size
                self._noise[place, :, ::32] = size
                self._noise[place, :, SMALLER] = 1e-3 * size
            if scenario in HALVED:
                sign = torch.where(self._draw()[place] < 0, -1.0, 1.0)
                self._mean[place] = magnitude[place] * sign
                self._noise[place] *= 0.3 if "noise" in scenario else 0.0
            self._after[place] *= {"drop": 0.1, **dict.fromkeys(HALVED, 0.5)}.get(scenario, 1.0)
            if scenario == "half":
                self._after[place, :, 1::2] = 0.0
            if scenario == "spike":
                self._peak[place, :, ::4] = 100.0

    def _draw(self):
        return torch.randn(self.shape, generator=self._generator)

    def at(self, step):
        """Of one step, counted from 0: fp32 of shape (scenarios, sizes, rows * 128)."""
        grad = self._noise * self._draw() + self._mean
        if step < self.middle:
            return grad
        return grad * (self._peak if step == self.middle else self._after)


def reading(name, found, scenarios):
    """exp_avg_sq divided by the exact one, (sizes, coordinates), as its name says."""
    ratio = found["exp_avg_sq, 2.5" if "2.5" in name else "exp_avg_sq"]
    ratio = ratio[scenarios.index(name.split(":")[0].split(", 2.5")[0])]
    if name == "1,000x smaller":
        return ratio[:, SMALLER]
    return ratio[:, int("gone" in name) :: 2] if name.startswith("half") else ratio


def spread(ratio):
    """5%, the median and 95% of the coordinates."""
    quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=ratio.dtype, device=ratio.device)
    return [float(f"{each:.5g}") for each in torch.quantile(ratio.flatten(), quantiles).tolist()]


SIZES = torch.logspace(-12, 4, 32).tolist()
STOCHASTIC = ("block_e4m3", "block_e5m3")
NEAREST = ("block_e4m3_nearest", "block_e5m3_nearest")

STEADY = (0.02, 0.8, 1.25)
"""How far the median root may be from 1; between what 90% of the coordinates' roots lie."""
MOVING = (0.10, 0.55, 1.5)
"""The same 2.5 time constants behind a drop, where exp_avg_sq still falls."""
MEAN = 0.02
"""How far the mean of exp_avg_sq / fp64's may be from 1, everywhere."""


def follow(scenarios, betas, rows, steps, dtypes=STOCHASTIC):
    """FusedAdam's moments divided by exact ones in fp64, and the updates' errors.

    All of the gradients' shape. "exp_avg_sq, 2.5" is read 2.5 time constants of beta2 behind the
    middle, or at the end. "errors" and "squares" are sums over the last WINDOW steps, "exact" that
    of the exact updates' squares. eps is next to nothing.
    """
    gradients = Gradients(scenarios, SIZES, rows, steps)
    param = torch.nn.Parameter(torch.zeros(gradients.shape).view(-1, COLUMNS))
    names = {"exp_avg_dtype": dtypes[0], "exp_avg_sq_dtype": dtypes[1], "seed": 5}
    optimizer = FusedAdam(
        [param], lr=1.0, betas=betas, eps=1e-30, weight_decay=0.0, backend="reference", **names
    )

    def moment(name):
        return optimizer.get_unscaled_state(param, name).double().view(gradients.shape)

    early = min(steps, gradients.middle + round(2.5 / (1 - betas[1])))
    sums = ("exp_avg", "exp_avg_sq", "errors", "squares", "exact")
    total = {name: torch.zeros(gradients.shape, dtype=torch.float64) for name in sums}
    for step in range(1, steps + 1):
        grad = gradients.at(step - 1)
        total["exp_avg"].lerp_(grad.double(), 1 - betas[0])
        total["exp_avg_sq"].lerp_(grad.double() ** 2, 1 - betas[1])
        root = (total["exp_avg_sq"] / (1 - betas[1] ** step)).sqrt()
        update = total["exp_avg"] / (1 - betas[0] ** step) / (root + 1e-30)
        # from weights that are 0 the new ones are what the update was, times -1
        param.grad = grad.view_as(param)
        param.data.zero_()
        optimizer.step()
        if step > steps - WINDOW:
            found = -param.detach().double().view(gradients.shape)
            total["errors"] += (found - update) ** 2
            total["squares"] += found**2
            total["exact"] += update**2
        if step == early:
            late = moment("exp_avg_sq") / total["exp_avg_sq"]
    assert optimizer.state[param]["exp_avg_sq"].dtype == torch.uint8
    ratios = {name: moment(name) / total[name] for name in ("exp_avg", "exp_avg_sq")}
    return {**total, **ratios, "exp_avg_sq, 2.5": late}


def missed(found, scenarios, names):
    """The bars of exp_avg_sq that are missed, in words."""
    misses = []
    for name in names:
        ratio = reading(name, found, scenarios)
        bar, least, most = MOVING if "2.5" in name else STEADY
        low, median, high = spread(ratio.sqrt())
        mean = float(ratio.mean())
        if not abs(mean - 1) < MEAN:
            misses.append(f"{name}: mean {mean}")
        if not abs(median - 1) < bar:
            misses.append(f"{name}: median root {median}")
        if not (low > least and high < most):
            misses.append(f"{name}: roots from {low} to {high}")
    return misses


def errors(found, scenarios):
    """The relative error of the updates in the last 200 steps, by scenario."""
    error = (found["errors"].sum((1, 2)) / found["exact"].sum((1, 2))).sqrt()
    return dict(zip(scenarios, error.tolist(), strict=True))


CELLS = [pytest.param(0.95, 1, 400, id="0.95")] + [
    pytest.param(beta2, 2, 5000, id=f"{beta2}, 5,000 steps", marks=pytest.mark.exhaustive)
    for beta2 in (0.95, 0.99, 0.999, 0.9999)
]


@pytest.mark.parametrize(("beta2", "rows", "steps"), CELLS)
def test_moments_in_blocks_follow_fp64(beta2, rows, steps):
    """8,192 coordinates a scenario in the long ones, half as many in the short one.

    The update's bar is of gradients that do not change their size: while they fall tenfold its
    error is larger (27% at beta2 0.999 and 2.5 time constants), as exp_avg_sq scatters more.

    Of coordinates 1,000 times below their block's largest the bar is "each within 1.25x"; what is
    asked for is 90% of them. At beta2 0.999 and more one in 30 is beyond, 1.33 at most of 256: an
    error of exp_avg_sq, 10% of the root, stays for longer than the 200 steps that are compared.
    """
    scenarios = MOMENT_SCENARIOS
    found = follow(scenarios, (0.9, beta2), rows, steps)
    names = ["stationary", "spike", "drop, 2.5", "half: gone, 2.5", "half: the others"]
    names += ["1,000x smaller"]
    if (1 - beta2) * steps / 2 >= 10:
        names.append("drop")
    assert missed(found, scenarios, names) == []
    relative = errors(found, scenarios)
    relative.pop("drop")
    assert max(relative.values()) < 0.15, relative
    rms = (found["squares"] / found["exact"]).sqrt()[scenarios.index("1,000x smaller")]
    low, median, high = spread(rms[:, SMALLER])
    assert 1 / 1.25 < low < median < high < 1.25


@pytest.mark.slow
def test_exp_avg_sq_to_nearest_misses_the_bars():
    """With scales that are powers of two nothing moves the codes: they stand still."""
    scenarios = ("stationary", "drop")
    found = follow(scenarios, (0.9, 0.95), 1, 400, NEAREST)
    misses = missed(found, scenarios, ["stationary", "drop, 2.5"])
    assert [miss.rpartition(" ")[0] for miss in misses if "median" in miss] == [
        "stationary: median root",
        "drop, 2.5: median root",
    ]
    assert errors(found, scenarios)["stationary"] > 0.15


@pytest.mark.parametrize(
    ("beta1", "rows", "steps"),
    [pytest.param(0.9, 1, 200, id="0.9")]
    + [
        pytest.param(beta1, 2, 1500, id=f"{beta1}, 1,500 steps", marks=pytest.mark.exhaustive)
        for beta1 in (0.9, 0.95, 0.99)
    ],
)
def test_exp_avg_follows_a_gradient_that_halves(beta1, rows, steps):
    found = follow(HALVED, (beta1, 0.99), rows, steps)
    for name, ratio in zip(HALVED, found["exp_avg"], strict=True):
        assert abs(spread(ratio)[1] - 1) < 0.02, name


@pytest.mark.slow
def test_exp_avg_to_nearest_stays_too_large():
    """By 41%: half a last place is more than what a step takes away."""
    found = follow(HALVED[:1], (0.9, 0.99), 1, 200, NEAREST)
    assert spread(found["exp_avg"])[1] > 1.3


@pytest.mark.parametrize("power", [-40, -17, 13])
def test_gradients_times_a_power_of_two_have_the_same_codes(power):
    """From 1e-12 to 1e4, as long as nothing is subnormal: only the scales move."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(32, 128)) for _ in range(2)]
    options = {"exp_avg_dtype": STOCHASTIC[0], "exp_avg_sq_dtype": STOCHASTIC[1], "seed": 3}
    ours = [FusedAdam([param], backend="reference", **options) for param in params]
    for _ in range(40):
        grad = torch.randn(32, 128, generator=generator)
        grad = grad.sign() * grad.abs().clamp(2.0**-10)
        for param, optimizer, factor in zip(params, ours, (1.0, 2.0**power), strict=True):
            param.grad = grad * factor
            optimizer.step()
    first, second = (optimizer.state[param] for param, optimizer in zip(params, ours, strict=True))
    for name, times in (("exp_avg", 1), ("exp_avg_sq", 2)):
        assert torch.equal(first[name], second[name])
        moved = second[f"{name}_scale"].int() - first[f"{name}_scale"].int()
        assert torch.equal(moved, torch.full_like(moved, times * power))


# --- 4 bits

FOUR = ("block32_e3m0", "block32_e4m0")
FOUR_NEAREST = ("block32_e3m0_nearest", "block32_e4m0_nearest")


@pytest.mark.parametrize(
    ("beta2", "steps"),
    [pytest.param(0.95, 250, id="0.95")]
    + [
        pytest.param(beta2, 3000, id=f"{beta2}, 3,000 steps", marks=pytest.mark.exhaustive)
        for beta2 in (0.99, 0.999)
    ],
)
def test_moments_of_4_bits_follow_fp64(beta2, steps):
    """The root's median within 10%, the update's rms within 0.8 to 1.3; torchao's 4 bits: 0.26.

    The floor of exp_avg_sq raises the smallest coordinates, and with them the mean, by a fifth.
    """
    found = follow(("stationary",), (0.9, beta2), 1, steps, FOUR)
    low, median, high = spread(found["exp_avg_sq"].sqrt())
    assert abs(median - 1) < 0.10
    assert low > 0.45
    assert high < 1.8
    assert 0.95 < float(found["exp_avg_sq"].mean()) < 1.3
    rms = (found["squares"] / found["exact"]).sqrt()
    assert 0.8 < spread(rms)[1] < 1.3


def test_exp_avg_sq_of_4_bits_to_nearest_misses_the_bars():
    """Gradients become ten times smaller; it stands still."""
    found = follow(("drop",), (0.9, 0.95), 1, 250, FOUR_NEAREST)
    assert spread(found["exp_avg_sq"].sqrt())[1] > 3


@pytest.mark.parametrize("beta1", [0.9, pytest.param(0.95, marks=pytest.mark.slow)])
def test_exp_avg_of_4_bits_follows_a_gradient_that_halves(beta1):
    """In the mean over the coordinates, of which the blocks' largest lose up to a quarter."""
    found = follow(HALVED, (beta1, 0.99), 1, 200, FOUR)
    for name, ratio in zip(HALVED, found["exp_avg"], strict=True):
        assert abs(float(ratio.mean()) - 1) < 0.10, name


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["all", "every second"]
)
@pytest.mark.parametrize("beta1", [0.9, pytest.param(0.95, marks=pytest.mark.slow)])
def test_exp_avg_of_4_bits_goes_where_gradients_stop(every, beta1):
    """Or updates would grow as exp_avg_sq falls: to nearest they do."""
    left = {}
    for name in FOUR[0], FOUR_NEAREST[0]:
        generator = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(32, 128))
        dtypes = {"exp_avg_dtype": name, "exp_avg_sq_dtype": FOUR[1]}
        optimizer = FusedAdam([param], betas=(beta1, 0.999), backend="reference", **dtypes)
        sizes = torch.exp(torch.randn(32, 128, generator=generator))
        for step in range(130 if beta1 == 0.9 else 230):
            param.grad = torch.randn(32, 128, generator=generator) * sizes
            if step >= 30:
                param.grad[:, ::every] = 0.0
            optimizer.step()
            if step == 29:
                before = optimizer.get_unscaled_state(param, "exp_avg")[:, ::every].clone()
        after = optimizer.get_unscaled_state(param, "exp_avg")[:, ::every]
        left[name] = float(after.norm() / before.norm())
    assert left[FOUR[0]] < 1e-3, left
    assert left[FOUR_NEAREST[0]] > 0.1, left
