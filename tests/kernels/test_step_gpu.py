"""What only a GPU can show: one launch, no scratch, tensors past 2**31 elements."""

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam

pytestmark = pytest.mark.gpu


def parameters(counts, dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for count in counts:
        values = torch.randn(count, generator=generator, device=device)
        params.append(torch.nn.Parameter(values.to(dtype)))
        params[-1].grad = torch.randn(count, generator=generator, device=device).to(dtype)
    return params


def kernels_of(step):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        step()
        torch.cuda.synchronize()
    events = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in events if not name.startswith(("Memcpy", "Optimizer"))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": torch.float32}, ["step_kernel"]),
        ({"master_weights": True, "store_param_remainders": True}, ["step_kernel"]),
        ({"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}, ["step_kernel"]),
        ({"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.uint8}, ["step_kernel"]),
    ],
    ids=["fp32 masters", "remainders", "bf16 moments", "fp16 and fp8 moments"],
)
def test_a_step_is_one_launch(options, expected, device):
    params = parameters([7, 5000, 1024] * 100, torch.bfloat16, device)
    groups = [{"params": params[i::3], "lr": 0.1 * i} for i in range(3)]
    optimizer = FusedAdam(groups, **options)
    optimizer.step()
    assert kernels_of(optimizer.step) == expected


def test_a_step_takes_no_scratch_memory(device):
    """Beyond the row of scalars, which the allocator rounds up to 512 bytes."""
    params = parameters([2**22] * 4, torch.bfloat16, device)
    optimizer = FusedAdam(params, dtype=torch.float32)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 512


def test_more_than_2_to_the_31_elements(device):
    """The ends and the middle, where 32-bit offsets would wrap, against the reference on copies."""
    count = 2**31 + 2**20 + 3
    places = [slice(0, 9), slice(2**31 - 9, 2**31 + 9), slice(count - 9, count)]
    options = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    param = torch.nn.Parameter(torch.full((count,), 0.5, dtype=torch.bfloat16, device=device))
    param.grad = torch.full_like(param, 0.25)
    pieces = []
    for index, place in enumerate(places):
        values = torch.randn(place.stop - place.start, device=device).bfloat16()
        param.grad[place] = values
        pieces.append(torch.nn.Parameter(param.detach()[place].clone()))
        pieces[index].grad = values
    optimizer = FusedAdam([param], **options)
    reference = FusedAdam(pieces, backend="reference", **options)
    for _ in range(2):
        optimizer.step()
        reference.step()
    for piece, place in zip(pieces, places, strict=True):
        assert_same_bits(param[place], piece, f"weight {place}")
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(
                optimizer.state[param][name][place], reference.state[piece][name], name
            )
