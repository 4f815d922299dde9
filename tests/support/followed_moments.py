"""Moments of an optimizer beside exact ones, over many steps with the same gradients.

What tests/megaopt/state/test_block_fidelity.py asks of moments in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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

    def __init__(
        self,
        scenarios: tuple[str, ...],
        sizes: Sequence[float],
        rows: int,
        steps: int,
        device: str = "cpu",
    ) -> None:
        self.scenarios, self.middle = scenarios, steps // 2
        self.shape = (len(scenarios), len(sizes), rows * COLUMNS)
        self._generator = torch.Generator(device).manual_seed(14)
        size = torch.tensor(sizes, device=device)[:, None]
        magnitude = torch.exp(self._draw()) * size
        self._noise, self._mean = magnitude.clone(), torch.zeros_like(magnitude)
        self._after, self._peak = torch.ones_like(magnitude), torch.ones_like(magnitude)
        for place, scenario in enumerate(scenarios):
            if scenario == "1,000x smaller":
                uniform = torch.rand(self.shape[1:], generator=self._generator, device=device)
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

    def _draw(self) -> torch.Tensor:
        device = self._generator.device
        return torch.randn(self.shape, generator=self._generator, device=device)

    def at(self, step: int) -> torch.Tensor:
        """Of one step, counted from 0: fp32 of shape (scenarios, sizes, rows * 128)."""
        grad = self._noise * self._draw() + self._mean
        if step < self.middle:
            return grad
        return grad * (self._peak if step == self.middle else self._after)


class Follower:
    """An optimizer of one parameter, beside the exact averages: what they differ in."""

    def __init__(
        self, make: Callable[..., Any], read: Callable[..., Any], shape: Any, **own: Any
    ) -> None:
        device = own.pop("device", "cpu")
        self.param = torch.nn.Parameter(torch.zeros(shape, device=device).view(-1, COLUMNS))
        self.optimizer = make([self.param], lr=1.0, weight_decay=0.0, **own)
        self._read, self._shape = read, shape
        self.errors = self.squares = torch.zeros(shape, device=device, dtype=torch.float64)

    def step(self, grad: torch.Tensor) -> None:
        """One step from weights that are 0: the new ones are what the update was, times -1."""
        self.param.grad = grad.view_as(self.param)
        self.param.data.zero_()
        self.optimizer.step()

    def add(self, update: torch.Tensor) -> None:
        """Adds what the last update differs by from this exact one, and its square."""
        found = -self.param.detach().double().view(self._shape)
        self.errors = self.errors + (found - update) ** 2
        self.squares = self.squares + found**2

    def moment(self, name: str) -> torch.Tensor:
        """fp64, of the gradients' shape."""
        return self._read(self.optimizer, self.param, name).double().view(self._shape)


def follow(
    gradients: Gradients, betas: tuple[float, float], followers: dict[str, Follower], steps: int
) -> dict[str, dict[str, torch.Tensor]]:
    """By name, of the gradients' shape: moments divided by the exact ones, and the updates' errors.

    "exp_avg_sq, 2.5" is read 2.5 time constants of beta2 behind the middle, or at the end. "errors"
    and "squares" are sums over the last WINDOW steps, "exact" that of the exact updates' squares.
    """
    early = min(steps, gradients.middle + round(2.5 / (1 - betas[1])))
    first = next(iter(followers.values()))
    exact = {name: torch.zeros_like(first.errors) for name in ("exp_avg", "exp_avg_sq", "squares")}
    eps = first.optimizer.param_groups[0]["eps"]
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in followers}
    for step in range(1, steps + 1):
        grad = gradients.at(step - 1)
        exact["exp_avg"].lerp_(grad.double(), 1 - betas[0])
        exact["exp_avg_sq"].lerp_(grad.double() ** 2, 1 - betas[1])
        root = (exact["exp_avg_sq"] / (1 - betas[1] ** step)).sqrt()
        update = exact["exp_avg"] / (1 - betas[0] ** step) / (root + eps)
        for name, follower in followers.items():
            follower.step(grad)
            if step > steps - WINDOW:
                follower.add(update)
            if step == early:
                late = follower.moment("exp_avg_sq") / exact["exp_avg_sq"]
                found[name]["exp_avg_sq, 2.5"] = late
        if step > steps - WINDOW:
            exact["squares"] += update**2
    for name, follower in followers.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[name][moment] = follower.moment(moment) / exact[moment]
        found[name] |= {"errors": follower.errors, "squares": follower.squares}
        found[name]["exact"] = exact["squares"]
    return found


def reading(name: str, found: dict[str, torch.Tensor], scenarios: tuple[str, ...]) -> torch.Tensor:
    """exp_avg_sq divided by the exact one, (sizes, coordinates), as one of READINGS says."""
    ratio = found["exp_avg_sq, 2.5" if "2.5" in name else "exp_avg_sq"]
    ratio = ratio[scenarios.index(name.split(":")[0].split(", 2.5")[0])]
    if name == "1,000x smaller":
        return ratio[:, SMALLER]
    return ratio[:, int("gone" in name) :: 2] if name.startswith("half") else ratio


def spread(ratio: torch.Tensor) -> list[float]:
    """5%, the median and 95% of the coordinates."""
    quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=ratio.dtype, device=ratio.device)
    return [float(f"{each:.5g}") for each in torch.quantile(ratio.flatten(), quantiles).tolist()]
