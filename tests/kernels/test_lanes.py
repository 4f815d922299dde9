"""Contract torch's L2 decay: contracted for three of a thread's four elements, as torch deals."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from step_cases import GROUP, buffers, copied, reference_step, triton_step
from torch_oracle import F32, fma, one_element

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.formats import GRADS, MOMENTS, NONE, WEIGHTS
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.lanes import first_lane_reference, vectorized

ADAM = RULES["adam", "torch"]
FP32, BF16 = torch.float32, torch.bfloat16
CHUNK, THREADS = 65_536, 512
NUMELS = [1, 3, 4, 511, 512, 513, 2047, 2048, 65_535, 65_536, 65_537, 65_540, 131_072, 140_001]


def formats_of(dtype):
    return Formats(GRADS[dtype], WEIGHTS[dtype], NONE, (MOMENTS[dtype],) * 2, ADAM.moments)


@functools.cache
def lanes_of_torchs_loops(numel, is_aligned):
    """Which of a thread's four each element is, by the loops over chunks, rounds and threads."""
    lanes = np.full(numel, -1)
    for first in range(0, numel, CHUNK):
        n = min(numel - first, CHUNK)
        if (numel - first) % 4 == 0 and is_aligned:  # of all that is left, not of the chunk
            for start in range(0, n, THREADS * 4):
                for thread in range(THREADS):
                    own = start + thread * 4
                    if own < n:
                        lanes[first + own : first + own + 4] = range(4)
        else:
            for start in range(0, n, THREADS * 4):
                for lane in range(4):
                    begin = start + lane * THREADS
                    lanes[first + begin : first + min(begin + THREADS, n)] = lane
    assert (lanes >= 0).all()
    return torch.from_numpy(lanes)


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("numel", NUMELS)
def test_first_lanes_are_those_of_torchs_loops(numel, is_aligned):
    fits = vectorized(np.array([numel]), [(np.array([1 << 20 if is_aligned else 4]), 4)])
    found = first_lane_reference(numel, bool(fits[0]), torch.device("cpu"))
    assert_same_bits(found, lanes_of_torchs_loops(numel, is_aligned) == 0)


@pytest.mark.parametrize(
    ("numel", "offsets", "expected"),
    [
        (8, (0, 0), True),
        (8, (16, 8), True),
        (8, (8, 0), False),
        (8, (0, 4), False),
        (8, (4, 2), False),
        (7, (0, 0), False),
    ],
)
def test_four_neighbours_need_every_tensor_aligned_to_four_of_its_elements(
    numel, offsets, expected
):
    columns = [(np.array([4096 + o]), s) for o, s in zip(offsets, (4, 2), strict=True)]
    assert vectorized(np.array([numel]), columns).tolist() == [expected]


@helper
def lane_update(param, moments, grad, scalars, is_rounded):
    lane = tl.where(is_rounded, 1.0, 0.0) + tl.zeros_like(param)
    return param, (lane, moments[1])


def lane_update_reference(param, moments, grad, scalars, is_rounded):
    return param, (is_rounded.float(), moments[1])


LANES = replace(ADAM, update=lane_update, update_reference=lane_update_reference)


def shifted(tensors, slot, elements):
    """The buffers with one slot's tensors beginning so many elements past an aligned address."""
    for index, tensor in enumerate(tensors[slot]):
        longer = torch.empty(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
        own = longer[elements : elements + tensor.numel()]
        tensors[slot][index] = own.copy_(tensor)
    return tensors


@pytest.mark.sample(3)
@pytest.mark.parametrize("slot", [None, "grad", "weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("geometry", [None, Geometry(2048, 4)], ids=["own", "small"])
def test_kernel_and_twin_find_the_lanes_of_torchs_loops(dtype, slot, geometry, device):
    formats = formats_of(dtype)
    numels = [4, 1024, 1025, 66_000]
    kernel = buffers(formats, numels, device)
    twin = copied(kernel)
    if slot is not None:
        kernel, twin = shifted(kernel, slot, 2), shifted(twin, slot, 2)
    triton_step(kernel, formats, LANES, GROUP, geometry)
    reference_step(twin, formats, LANES, GROUP)
    for index, numel in enumerate(numels):
        expected = (lanes_of_torchs_loops(numel, slot is None) == 0).to(dtype)
        assert_same_bits(kernel["exp_avg"][index].cpu(), expected, f"kernel, {numel}")
        assert_same_bits(twin["exp_avg"][index].cpu(), expected, f"twin, {numel}")


@pytest.mark.parametrize("scale", [None, 4.0], ids=["unscaled", "scaled"])
def test_with_maximize_the_decay_is_rounded_for_all_but_under_a_loss_scale(scale, device):
    formats = replace(formats_of(FP32), maximize=True)
    kernel = buffers(formats, [1024, 1025], device)
    twin = copied(kernel)
    controls = None
    if scale is not None:
        controls = torch.tensor([scale, 1 / scale, 1.0, 0.0, 1.0], device=device)
    triton_step(kernel, formats, LANES, GROUP, controls=controls)
    reference_step(twin, formats, LANES, GROUP, controls=controls)
    for found in (*kernel["exp_avg"], *twin["exp_avg"]):
        assert_same_bits(found, torch.full_like(found, scale is None))


def test_with_amsgrad_no_decay_is_rounded():
    """Against fractions: one rounding for product and sum, whatever the element's place."""
    rule = RULES["adam_amsgrad", "torch"]
    group = {**GROUP, "betas": (0.0, 0.999), "weight_decay": 0.1, "step": 1}
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(512, generator=generator) for _ in range(2))
    moments = tuple(torch.zeros(512) for _ in rule.moments)
    _, after = rule.update_reference(param, moments, grad, rule.scalars(group))
    pairs = zip(param.tolist(), grad.tolist(), strict=True)
    decayed = [fma(F32(p), F32(0.1), F32(g)) for p, g in pairs]
    assert_same_bits(after[0], torch.from_numpy(np.array(decayed, dtype=F32)))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("numel", [80, 2050])
def test_twin_contracts_three_of_four(weight_decay, numel):
    """Against fractions: the first of four rounds weight_decay * param, the others do not."""
    group = {**GROUP, "weight_decay": weight_decay, "bias_correction": False, "step": 1}
    generator = torch.Generator().manual_seed(0)
    param, exp_avg, grad = (torch.randn(numel, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(numel, generator=generator)
    lanes = lanes_of_torchs_loops(numel, numel % 4 == 0)
    row = ADAM.scalars(group)
    moments = (exp_avg, exp_avg_sq)
    after, moments = ADAM.update_reference(param, moments, grad, row, lanes == 0)
    found = (after, *moments)
    chosen = range(0, numel, max(1, numel // 80))
    decay = F32(weight_decay)
    expected, differ = [], 0
    for index in chosen:
        p, g = F32(param[index].item()), F32(grad[index].item())
        both = (g + p * decay, fma(p, decay, g)) if weight_decay else (g, g)
        differ += both[0] != both[1]
        values = (param[index], exp_avg[index], exp_avg_sq[index])
        one = torch.tensor(both[0] if lanes[index] == 0 else both[1])
        expected.append(one_element(*values, one, {**group, "weight_decay": 0.0}))
    assert bool(differ) is bool(weight_decay)
    for tensor, values in zip(found, zip(*expected, strict=True), strict=True):
        assert_same_bits(tensor[list(chosen)], torch.from_numpy(np.array(values, dtype=F32)))


def test_kernel_is_the_twin_where_products_are_exact(device):
    """Otherwise it cannot be on the interpreter, whose multiply-add rounds twice."""
    formats = formats_of(FP32)
    kernel = buffers(formats, [1024, 1025], device)
    for slot, tensors in kernel.items():
        for tensor in tensors:
            tensor.copy_((torch.arange(len(tensor)) % 7 - (0 if slot == "exp_avg_sq" else 3)) / 4)
    twin = copied(kernel)
    group = {**GROUP, "betas": (0.5, 0.5), "weight_decay": 0.25, "bias_correction": False}
    for found, step in ((kernel, triton_step), (twin, reference_step)):
        step(found, formats, ADAM, group)
    for slot in kernel:
        for one, other in zip(kernel[slot], twin[slot], strict=True):
            assert_same_bits(one.cpu(), other.cpu(), slot)
