"""Contracts torch and eo: the bits of torch.optim.Muon, and of Emerging-Optimizers' as written."""

import random

import pytest
import torch
from bits import assert_same_bits
from muon_cases import SIMPLE, buffers, how_of

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import GRADS, MASTERS, MOMENTS, NONE, WEIGHTS
from megaopt.kernels.muon.orthogonal import coefficients_of
from megaopt.kernels.muon.plan import muon_plan
from megaopt.kernels.muon.rule import MUON_PEER
from megaopt.kernels.rules.matrix import Matrix
from megaopt.kernels.rules.muon import PEER_DIRECTION

BF16 = torch.bfloat16


def formats_of(how, dtype, master=NONE, weight=None):
    own = (GRADS[dtype], WEIGHTS[weight or dtype], master, (MOMENTS[dtype],), ("momentum_buffer",))
    return Formats(*own, matrix=Matrix(MUON_PEER, how))


def plan_of(formats, shapes, backend="reference"):
    sizes = [torch.Size(shape) for shape in shapes]
    return muon_plan(backend, formats, sizes, [0] * len(shapes), None, torch.device("cpu"))


def random_options(chance):
    """Numbers of torch.optim.Muon."""
    return {
        "lr": chance.choice((1e-3, 0.0213)),
        "weight_decay": chance.choice((0.0, 0.1)),
        "momentum": chance.choice((0.95, 0.9, 0.3)),
        "nesterov": chance.random() < 0.7,
    }


def random_shapes(chance):
    return [(chance.randint(1, 60), chance.randint(1, 60)) for _ in range(chance.randint(1, 4))]


def both(theirs, formats, params, options, dtype, steps=3):
    """Steps theirs and ours by the same gradients; returns our parameters and buffers."""
    own = [param.detach().clone() for param in params]
    kept = [torch.zeros_like(param) for param in own]
    plan, row = plan_of(formats, [p.shape for p in own], "triton"), PEER_DIRECTION.row(options)
    for _ in range(steps):
        grads = [torch.randn(param.shape).to(dtype) for param in params]
        theirs([grad.clone() for grad in grads])
        plan.look({"grad": grads, "weight": own, "momentum_buffer": kept})
        plan.step([row])
    return own, kept


@pytest.mark.parametrize("seed", range(30))
def test_the_contract_torch_is_torchs_muon(seed):
    """Of fp32 and bf16 parameters; without nesterov torch divides bf16 buffers by their norm."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    dtype, options = chance.choice((torch.float32, BF16)), random_options(chance)
    shapes = random_shapes(chance)
    steps, adjust = chance.randint(1, 6), chance.choice((None, "original", "match_rms_adamw"))
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    peer = torch.optim.Muon(params, **options, ns_steps=steps, adjust_lr_fn=adjust)

    def theirs(grads):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        peer.step()

    how = how_of(coefficients=SIMPLE[:1] * steps, adjust=adjust, contract="torch")
    own, kept = both(theirs, formats_of(how, dtype), params, options, dtype)
    for param, found, buffer in zip(params, own, kept, strict=True):
        assert_same_bits(found, param.detach())
        assert_same_bits(buffer, peer.state[param]["momentum_buffer"])


def eo_step(param, grad, buffer, options, coefficients, mode, extra):
    """Emerging-Optimizers 0.2.0, OrthogonalizedOptimizer.step and newton_schulz, as it is written.

    The library itself had the same bits in 40 random cases of this test.
    """
    if options["weight_decay"] != 0.0:
        param.add_(param, alpha=(-options["weight_decay"] * options["lr"]))
    buffer.lerp_(grad, 1 - options["momentum"])
    x = grad.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer
    transpose = x.size(-2) > x.size(-1)
    x = x.mT if transpose else x
    x = torch.nn.functional.normalize(x, p=2, dim=(-2, -1), eps=1e-7).to(BF16)
    for a, b, c in coefficients:
        gram = x @ x.mT
        poly = torch.addmm(gram, gram, gram, alpha=c, beta=b)
        x = torch.addmm(x, poly, x, alpha=1.0, beta=a)
    x = x.to(torch.float32)
    x = x.mT if transpose else x
    rows, columns = param.shape
    scale = {
        "shape_scaling": max(1, rows / columns) ** 0.5,
        "spectral": max(rows, columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
    }[mode]
    param.add_(x * scale * extra, alpha=-options["lr"])


MODES = {
    "original": ("shape_scaling", 1.0),
    "spectral": ("spectral", 1.0),
    "spectral_unclamped": ("unit_rms_norm", 1.0),
    "match_rms_adamw": ("spectral", 0.2),
}


@pytest.mark.parametrize("seed", range(12))
def test_the_contract_eo_is_the_written_one(seed):
    torch.manual_seed(seed)
    chance = random.Random(seed)
    options, shapes = random_options(chance), random_shapes(chance)
    adjust = chance.choice(list(MODES))
    coefficients = coefficients_of(
        chance.choice(("simple", "quintic", "polar_express")), chance.randint(1, 7)
    )
    params = [torch.randn(shape) for shape in shapes]
    buffers_of_theirs = [torch.zeros_like(param) for param in params]

    def theirs(grads):
        for own in zip(params, grads, buffers_of_theirs, strict=True):
            eo_step(*own, options, coefficients, *MODES[adjust])

    how = how_of(coefficients=coefficients, adjust=adjust, contract="eo")
    begun = [param.clone() for param in params]
    own, kept = both(theirs, formats_of(how, torch.float32), begun, options, torch.float32)
    for pair in (*zip(own, params, strict=True), *zip(kept, buffers_of_theirs, strict=True)):
        assert_same_bits(*pair)


@pytest.mark.parametrize("contract", ["torch", "eo"])
def test_masters_and_controls(contract):
    """fp32 masters of bf16 weights, of gradients unscaled and clipped first; one is left out."""
    how = how_of(contract=contract)
    formats = formats_of(how, torch.float32, MASTERS["float32"], weight=BF16)
    shapes = [(6, 9), (9, 4)]
    own = buffers(formats, shapes)
    before = [each.clone() for each in own["master"]]
    plain = formats_of(how, torch.float32)
    row = PEER_DIRECTION.row({"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1})
    alone = {
        "grad": [own["grad"][0] * 0.5 * 0.25],
        "weight": [own["master"][0].clone()],
        "momentum_buffer": [own["momentum_buffer"][0].clone()],
    }
    sizes = [torch.Size(shape) for shape in shapes]
    plan = muon_plan("reference", formats, sizes, [0, 1], None, torch.device("cpu"))
    plan.look(own)
    plan.step([row] * 2, torch.tensor([[2.0, 0.5, 0.25, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0]]))
    reference = plan_of(plain, shapes[:1])
    reference.look(alone)
    reference.step([row])
    assert_same_bits(own["master"][0], alone["weight"][0])
    assert_same_bits(own["weight"][0], alone["weight"][0].bfloat16())
    assert_same_bits(own["master"][1], before[1])
    assert plan.many_calls


def test_what_these_contracts_do_not_have():
    torchs, eo = (how_of(contract=contract) for contract in ("torch", "eo"))
    cases = {
        "must have fp32 masters or none, got scaled_float16": formats_of(
            torchs, torch.float32, MASTERS["scaled_float16"], BF16
        ),
        "must have momentum_buffer_dtype torch.float32": Formats(
            *(GRADS[BF16], WEIGHTS[BF16], MASTERS["float32"], (MOMENTS[BF16],)),
            ("momentum_buffer",),
            matrix=Matrix(MUON_PEER, torchs),
        ),
        "contract 'eo' must have fp32 parameters or masters": formats_of(eo, BF16),
    }
    for message, formats in cases.items():
        with pytest.raises(ValueError, match=message):
            plan_of(formats, [(4, 4)])
    plan = plan_of(formats_of(torchs, torch.float32), [(4, 4)])
    plan.look(buffers(formats_of(torchs, torch.float32), [(4, 4)]))
    with pytest.raises(ValueError, match="must have its numbers on the host"):
        plan.step(torch.ones(1, 4))
