"""A check for each promise that moments suffice for: two ways to the same bits, compared.

Each returns what differs first, or None. Nothing here is a test of one machine against a record:
both ways are gone here.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter

from megaopt import FusedAdam
from megaopt.commands.config import OptimizerConfig
from megaopt.commands.promises.trial import (
    REFERENCE,
    SHAPES,
    Place,
    Tensors,
    differ,
    numbers,
    places,
    train,
)
from megaopt.commands.regression.fake_quantize import FakeQuantizedLinear, FakeQuantizer
from megaopt.commands.regression.unfused import adam_update, round_nearest_away, scalars_of
from megaopt.float8 import RECIPES, Float8Weight
from megaopt.kernels.formats import FLOAT8_E4M3, WEIGHTS
from megaopt.kernels.formats.remainder16 import REMAINDER16
from megaopt.kernels.rules import RULES

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
MASTER = {"dtype": FP32}
REMAINDERS = {"dtype": FP32, "store_param_remainders": True}
PLAIN: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "bf16": (BF16, {}),
    "bf16, fp32 masters": (BF16, MASTER),
    "fp16, fp32 masters": (FP16, MASTER),
    "bf16, remainders, bf16 moments": (
        BF16,
        {**REMAINDERS, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    ),
    "Adam": (BF16, {**MASTER, "adam_w_mode": False, "bias_correction": False}),
}
SCALED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp16 masters": (BF16, {"master_weights": True, "master_weight_dtype": FP16}),
    "fp16 moments": (BF16, {**MASTER, "exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16}),
    "fp8 moments": (BF16, {**MASTER, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8}),
}
MATRICES = ((48, 80), (130, 33))
CLIP_NORM = 1.0


def scalars() -> str | None:
    """The row of a group, and exact fractions that are rounded where the contract rounds."""
    for step in (1, 2, 3, 1000, 2**20 + 1):
        for beta in (0.9, 0.999, 0.95):
            group = {"lr": 1e-3, "betas": (beta, beta), "eps": 1e-8, "weight_decay": 0.1}
            row = RULES["adamw", "ieee"].scalars({**group, "step": step, "bias_correction": True})
            power = 1.0
            for bit in f"{step:b}":
                power = float(Fraction(power) ** 2)
                power = float(Fraction(power) * Fraction(beta)) if bit == "1" else power
            rest = float(1 - Fraction(power))
            expected = float(numpy.float32(float(1 / Fraction(rest))))
            if row[4] != expected:
                return f"step {step}, beta {beta}: {row[4].hex()}, and not {expected.hex()}"
    return None


def update() -> str | None:
    """FusedAdam everywhere, and Adam in plain torch operations."""
    for adam_w_mode in (True, False):
        options = {"adam_w_mode": adam_w_mode, "lr": 0.01, "weight_decay": 0.1}
        expected = _unfused(adam_w_mode)
        for place in places():
            found = train(place, options, dtype=FP32)
            if what := differ(found, expected):
                return f"{place}: {what}"
    return None


def _unfused(adam_w_mode: bool) -> Tensors:
    """What `train` gives of fp32 weights, without megaopt's kernels or their twins."""
    config = OptimizerConfig(learning_rate=0.01, adam_w_mode=adam_w_mode)
    found: Tensors = {}
    for number, shape in enumerate(SHAPES):
        weight = numbers(shape, number)
        exp_avg, exp_avg_sq = torch.zeros(shape), torch.zeros(shape)
        for step in (1, 2, 3):
            grad = numbers(shape, 1000 * step + number)
            row = scalars_of(config, step, 0.01, 0.1)
            adam_update(weight, grad, exp_avg, exp_avg_sq, row)
            where = f"of weight {number} after step {step}"
            tensors = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            found |= {f"{name} {where}": tensor.clone() for name, tensor in tensors.items()}
    return found


def step() -> str | None:
    """Every backend, weights whole and cut into unaligned views, and the reference."""
    for name, (dtype, options) in PLAIN.items():
        expected = train(REFERENCE, options, dtype=dtype)
        for place in places():
            for cut in (False, True):
                found = train(place, options, dtype=dtype, cut=cut)
                if what := differ(found, expected):
                    return f"{name}, {place}{', cut' if cut else ''}: {what}"
    return None


def scaled_step() -> str | None:
    """Every backend and the reference, in formats with a scale; also tensors of many chunks."""
    return _on_every_place(SCALED, ((7,), (65, 301)))


def _on_every_place(formats: Any, shapes: Any, **more: Any) -> str | None:
    for name, (dtype, options) in formats.items():
        expected = train(REFERENCE, options, dtype=dtype, shapes=shapes, **more)
        for place in places()[1:]:
            found = train(place, options, dtype=dtype, shapes=shapes, **more)
            if what := differ(found, expected):
                return f"{name}, {place}: {what}"
    return None


def norm() -> str | None:
    """The norm on every backend, of weights whole and cut into unaligned views."""
    return _clipped(lambda name: name.startswith("norm"))


def clipping() -> str | None:
    """Clipped steps on every backend, of weights whole and cut; and steps that are left out."""
    return _clipped(lambda name: not name.startswith("norm")) or _skipping()


def _clipped(compared: Callable[[str], bool]) -> str | None:
    def run(place: Place, cut: bool) -> Tensors:
        found = train(place, MASTER, clip_norm=CLIP_NORM, cut=cut)
        return {name: tensor for name, tensor in found.items() if compared(name)}

    expected = run(REFERENCE, False)
    for place in places():
        for cut in (False, True):
            if what := differ(run(place, cut), expected):
                return f"{place}{', cut' if cut else ''}: {what}"
    return None


def _skipping() -> str | None:
    """A step with an infinite gradient, which is to be left out, and no step."""
    for place in places():
        weight = Parameter(numbers((33,), 0).to(place.device))
        optimizer = FusedAdam([weight], lr=0.01, nonfinite="skip", backend=place.backend)
        runs: list[Tensors] = []
        for grad in (numbers((33,), 1), torch.full((33,), math.inf)):
            weight.grad = grad.to(place.device)
            optimizer.step()
            held = {"weight": weight.detach(), **optimizer.state[weight]}
            runs.append({n: t.cpu().clone() for n, t in held.items() if t is not None})
        if what := differ(runs[1], runs[0]):
            return f"{place}: a step that was to be left out changed {what}"
    return None


def capturable() -> str | None:
    """Scalars made on the device, and made on the host."""
    for name in ("fp32", "bf16, fp32 masters"):
        dtype, options = PLAIN[name]
        expected = train(REFERENCE, options, dtype=dtype)
        for place in places():
            found = train(place, {**options, "capturable": True}, dtype=dtype)
            if what := differ(found, expected):
                return f"{name}, {place}: {what}"
    return None


def graph() -> str | None:
    """A captured step, replayed, and as many eager ones."""
    runs: list[Tensors] = []
    for captured in (True, False):
        weight = Parameter(numbers((2049,), 0).to("cuda"))
        weight.grad = numbers((2049,), 1).to("cuda")
        optimizer = FusedAdam([weight], lr=0.01, capturable=True, backend="triton")
        optimizer.step()  # a capture needs one like it before
        replay = _captured(optimizer) if captured else optimizer.step
        for number in range(5):
            weight.grad.copy_(numbers((2049,), 2 + number))
            replay()
        torch.cuda.synchronize()
        held = {"weight": weight.detach(), **optimizer.state[weight]}
        runs.append({n: t.cpu() for n, t in held.items() if t is not None})
    return differ(*runs)


def _captured(optimizer: FusedAdam) -> Any:
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        optimizer.step()
    return cuda_graph.replay


def patterns() -> Tensor:
    """fp32 numbers: each upper half, with lower halves at the edges of rounding."""
    upper = torch.arange(-(2**15), 2**15).view(-1, 1) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001])
    return (upper | lower).to(torch.int32).view(-1).view(FP32)


def encoding() -> str | None:
    """bf16 and fp16 codes, and torch's casts."""
    values = patterns()
    for dtype in (BF16, FP16):
        found = {str(dtype): WEIGHTS[dtype].encode_reference(values)}
        if what := differ(found, {str(dtype): values.to(dtype)}):
            return what
    return None


def float8_encoding() -> str | None:
    """fp8 codes, and the nearest of all codes' values, found by search in fp64, which is exact."""
    values = patterns()
    values = values[values.isfinite()]
    found = FLOAT8_E4M3.encode_reference(values)
    return differ({"codes": found}, {"codes": _nearest(values, found.dtype)})


def _nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    codes = torch.arange(0x80, dtype=torch.uint8).view(dtype).double()
    table = codes[codes.isfinite()]
    magnitude = values.double().abs().clamp(max=float(table[-1]))
    above = torch.searchsorted(table, magnitude).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    left, right = magnitude - table[below], table[above] - magnitude
    # of two that are equally near, the even code
    up = (right < left) | ((right == left) & (above % 2 == 0))
    code = torch.where(up, above, below) | torch.where(values.signbit(), 0x80, 0)
    return code.to(torch.uint8).view(dtype)


def remainders() -> str | None:
    """Masters, split and joined again; and the weights, rounded with ties away from zero."""
    values = patterns()
    values = values[~values.isnan()]
    weight, code = REMAINDER16.encode_reference(values)
    found = {"master": REMAINDER16.decode_reference(weight, code), "weight": weight}
    # what is rounded up to infinity has its weight, and comes back
    finite = values.isfinite() & weight.isfinite()
    rounded = torch.where(finite, round_nearest_away(values), weight)
    return differ(found, {"master": values, "weight": rounded})


def float8_weights(names: tuple[str, ...]) -> str | None:
    """What fp8 weights are made of, and plain torch's cast of bf16 weights."""
    for recipe, own in RECIPES.items():
        for number, shape in enumerate(MATRICES):
            values = numbers(shape, number).to(BF16)
            weight = Float8Weight.from_values(values, recipe).tensors()
            made = {"codes": weight["data8"], "scale_inv": weight["scale_inv"]}
            # the first scale of delayed scaling is that of the values, as with current scaling
            plain = "current" if own.quantizer.keeps_scale else recipe
            expected = FakeQuantizer(values, plain).tensors(values)
            found = {name: made[name] for name in names}
            if what := differ(found, {name: expected[name] for name in names}):
                return f"{recipe}: {what}"
    return None


def float8_linear() -> str | None:
    """A linear layer with an fp8 weight, forward and backward, and one whose weight is cast."""
    for recipe in RECIPES:
        values = numbers((48, 80), 0).to(BF16)
        layer = torch.nn.Linear(80, 48, bias=False, dtype=BF16)
        layer.weight = Parameter(Float8Weight.from_values(values, recipe))
        cast = FakeQuantizedLinear(Parameter(values), recipe, False)
        runs: list[Tensors] = []
        for each in (layer, cast):
            x = numbers((5, 80), 1).to(BF16).requires_grad_()
            y = each(x)
            y.backward(numbers((5, 48), 2).to(BF16))
            assert x.grad is not None
            assert each.weight.grad is not None
            runs.append({"output": y.detach(), "input grad": x.grad, "grad": each.weight.grad})
        if what := differ(*runs):
            return f"{recipe}: {what}"
    return None


def float8_step() -> str | None:
    """fp8 weights stepped on every backend; and their codes, those of the new masters."""
    for recipe, own in RECIPES.items():
        expected = train(REFERENCE, MASTER, shapes=MATRICES, recipe=recipe)
        for place in places()[1:]:
            found = train(place, MASTER, shapes=MATRICES, recipe=recipe)
            if what := differ(found, expected):
                return f"{recipe}, {place}: {what}"
        if not own.quantizer.keeps_scale and (what := _codes_of_masters(expected, recipe)):
            return f"{recipe}: {what}"
    return None


def float8_step_alone() -> str | None:
    """fp8 weights without fp32 masters, drawn and with remainders, stepped on every backend."""
    drawn: dict[str, Any] = {"weight_rounding": "stochastic"}
    pairs = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}
    for recipe in RECIPES:
        for options in (drawn, pairs):
            expected = train(REFERENCE, options, shapes=MATRICES, recipe=recipe)
            for place in places()[1:]:
                found = train(place, options, shapes=MATRICES, recipe=recipe)
                if what := differ(found, expected):
                    return f"{recipe}, {place}: {what}"
    return None


def _codes_of_masters(trained: Tensors, recipe: str) -> str | None:
    for number, shape in enumerate(MATRICES):
        where = f"of weight {number} after step 3"
        values = trained[f"master_param {where}"].view(shape).to(BF16)
        cast = FakeQuantizer(values, recipe).tensors(values)
        found = {"codes": trained[f"data8 {where}"], "scale_inv": trained[f"scale_inv {where}"]}
        if what := differ(found, cast):
            return f"{what} ({where})"
    return None


def saving() -> str | None:
    """A run that was saved, loaded in another optimizer and continued, and one that was not."""
    for name, (dtype, options) in {**PLAIN, **SCALED}.items():
        straight, resumed = (dict(_halves(dtype, options, again)) for again in (False, True))
        if what := differ(resumed, straight):
            return f"{name}: {what}"
    return None


def _halves(dtype: torch.dtype, options: dict[str, Any], again: bool) -> Iterator[Any]:
    weight = Parameter(numbers((33, 31), 0).to(dtype))
    made = {"lr": 0.01, "weight_decay": 0.1, **options}
    optimizer = FusedAdam([weight], backend="reference", **made)
    for number in range(4):
        if again and number == 2:
            file = io.BytesIO()
            torch.save({"weight": weight.detach(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            kept = torch.load(file, weights_only=True)
            weight = Parameter(kept["weight"])
            optimizer = FusedAdam([weight], backend="reference", **made)
            optimizer.load_state_dict(kept["optimizer"])
        weight.grad = numbers((33, 31), 1 + number).to(dtype)
        optimizer.step()
    yield "weight", weight.detach()
    yield from ((n, t) for n, t in optimizer.state[weight].items() if t is not None)
