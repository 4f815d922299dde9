"""MXFP8 codes and scales that a step writes, against TransformerEngine's own casts on the card."""

import pytest
import torch
from bits import assert_same_bits
from how_to import needs

from megaopt import FusedAdam
from megaopt.integration.transformer_engine import FusedAdam as DropIn

pytestmark = [pytest.mark.gpu, needs("transformer_engine")]

SHAPES = ((64, 256), (160, 416), (32, 32))
CODES = ("_rowwise_data", "_columnwise_data")
SCALES = ("_rowwise_scale_inv", "_columnwise_scale_inv")


def values_of(shape, special=()):
    """fp32: ordinary, small and large rows, zeros, and blocks whose largest is 448 * 2**k or more.

    Not below 448 * 2**-126, nor infinite: there TransformerEngine multiplies by other numbers than
    the inverse of the scale that it stores (1 for 2**-127, 0 for 2**127).
    """
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rows = values.view(shape[0] // 32, 32, shape[1])
    for band, power in zip(rows, (0, -100, 100, -20, 20), strict=False):
        band *= 2.0**power
    values[0, :32], values[:32, 1] = 0.0, -0.0
    values[1, :2], values[2, :2] = torch.tensor([448.0, -3.0]), torch.tensor([450.0, 3.0])
    values[3, 0] = 448.0 * (1 + 2.0**-23)
    values[4, : len(special)] = torch.tensor(special)
    return values


def stepped(make, values):
    """A weight of TransformerEngine's that a step with lr=0 has cast from masters of these values.

    make: of FusedAdam the codes are those of values rounded to bf16, of the drop-in of fp32 ones.
    """
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    quantizer = te.MXFP8Quantizer(tex.DType.kFloat8E4M3)
    weight = torch.nn.Parameter(
        quantizer.make_empty(values.shape, dtype=torch.bfloat16, device="cuda")
    )
    for name in (*CODES, *SCALES):
        getattr(weight, name).zero_()
    cast(make, weight, values)
    return weight


def cast(make, weight, values):
    more = {"dtype": torch.float32} if make is FusedAdam else {"master_weights": True}
    optimizer = make([weight], lr=0.0, weight_decay=0.0, **more)
    optimizer.set_scaled_state(weight, "master_param", values)
    weight.grad = torch.ones_like(values).bfloat16()
    optimizer.step()
    assert_same_bits(optimizer.state[weight]["master_param"].view(values.shape), values)


def seen(tensor, shape):
    """Codes, and scales without their padding."""
    rows, columns = shape
    along = ((rows, columns // 32), (rows // 32, columns))
    scales = [getattr(tensor, name)[:r, :c] for name, (r, c) in zip(SCALES, along, strict=True)]
    return [getattr(tensor, name).view(shape) for name in CODES] + scales


def assert_same(weight, theirs, shape):
    for name, own, other in zip((*CODES, *SCALES), seen(weight, shape), theirs, strict=True):
        assert_same_bits(own, other.contiguous(), name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [FusedAdam, DropIn], ids=["bf16", "fp32"])
def test_codes_and_scales_are_those_of_its_quantizer(make, shape):
    """Where that does nothing, without an error, TransformerEngine says so beforehand."""
    te = pytest.importorskip(
        "transformer_engine.pytorch", reason="needs TransformerEngine", exc_type=ImportError
    )
    import transformer_engine_torch as tex

    runs, reason = te.is_mxfp8_available(return_reason=True)
    if not runs:
        pytest.skip(reason)
    values = values_of(shape).cuda()
    given = values.bfloat16() if make is FusedAdam else values
    made = te.MXFP8Quantizer(tex.DType.kFloat8E4M3)(given)
    assert_same(stepped(make, values), seen(made, shape), shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_are_those_of_its_kernels_for_shards(shape):
    """Amaxes, scales and casts of quantize_master_weights, which no card is refused."""
    pytest.importorskip(
        "transformer_engine.pytorch", reason="needs TransformerEngine", exc_type=ImportError
    )
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier

    values = values_of(shape, special=(float("nan"),)).cuda()
    weight = stepped(FusedAdam, values)
    flat, (rows, columns) = values.bfloat16().view(-1), shape
    amaxes = [torch.zeros_like(getattr(weight, name), dtype=torch.bfloat16) for name in SCALES]
    tex.mxfp8_scaling_compute_partial_amax(flat, *amaxes, rows, columns, 0)
    scales = [torch.zeros_like(amax, dtype=torch.uint8) for amax in amaxes]
    multi_tensor_applier(tex.multi_tensor_compute_scale_inv_e8m0, None, [amaxes, scales])
    codes = [torch.zeros_like(flat, dtype=torch.uint8) for _ in CODES]
    tex.mxfp8_scaling_partial_cast(flat, *codes, *scales, rows, columns, 0)
    along = [scales[0][:rows, : columns // 32], scales[1][: rows // 32, :columns]]
    assert_same(weight, [*(code.view(shape) for code in codes), *along], shape)
