"""A weight beside a remainder that no encoding puts there: somebody else wrote the weight."""

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam
from megaopt.kernels.formats import MASTERS


def every_weight():
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16)


def remainders(form):
    if form.dtype == torch.int8:
        return range(-128, 128)
    return [-32768, -32767, -256, -1, 0, 1, 255, 32766, 32767]


DRAWN = pytest.param("remainder8_stochastic", marks=pytest.mark.slow)  # is read as remainder8 is


@pytest.mark.parametrize("name", ["remainder16", "remainder8", DRAWN])
def test_a_pair_is_no_nan_where_its_weight_is_none(name):
    """All weights beside all remainders of 8 bits, and beside the edges of 16 bits, by the twin.

    Pairs that an encoding makes come back; of the others a zero is a zero, an infinity infinite.
    """
    form, weight = MASTERS[name], every_weight()
    number = weight.view(torch.bfloat16).float()
    unlike = 0
    for rest in remainders(form):
        code = torch.full(weight.shape, rest, dtype=form.dtype)
        found = form.decode_reference(weight.view(torch.bfloat16), code)
        assert torch.equal(found.isnan(), number.isnan())
        again, own = form.encode_by_hand(found)
        kept = (again.view(torch.int16) == weight) & (own == code)
        alone = ~kept & ~number.isnan()
        assert_same_bits(found[alone], number[alone])
        assert (number[alone].isinf() | (number[alone] == 0)).all()
        unlike += int(alone.sum())
    # two zeros beside what is below 0, two infinities beside what is above
    below = sum(rest < 0 for rest in remainders(form))
    above = sum(rest > 0 for rest in remainders(form))
    assert unlike == 2 * below + 2 * above


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_external_write", ["refresh", "ignore"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", ["remainder16", "remainder8", "remainder8_stochastic"])
def test_weights_that_are_set_to_zero_go_on_from_zero(name, backend, on_external_write, device):
    """Through p.data, of which torch counts no write: as pruning does."""
    if backend == "reference":
        device = torch.device("cpu")
    value = torch.linspace(-2, 2, 4096).bfloat16().to(device)
    weight = torch.nn.Parameter(value)
    optimizer = FusedAdam(
        [weight], lr=1e-3, master_weights=True, master_weight_dtype=name, backend=backend,
        on_external_write=on_external_write,
    )  # fmt: skip
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (optimizer.state[weight]["master_param"] < 0).any()
    weight.data.zero_()
    master = optimizer.get_unscaled_state(weight, "master_param")
    # what is above 0 beside a zero is read as it was: less than bf16's smallest number
    assert (master.abs() < 2.0**-133).all()
    optimizer.step()
    assert weight.isfinite().all()
    assert (weight.float() < 0).all()
