"""Equality of bits: the only equality that the tests know."""

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    return tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])


def assert_same_bits(found, expected, what=""):
    """Fails unless two tensors agree in dtype, shape and every bit, those of NaNs included."""
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} is not {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: {found.shape} is not {expected.shape}"
    found_bits, expected_bits = bits(found).cpu().flatten(), bits(expected).cpu().flatten()
    if torch.equal(found_bits, expected_bits):
        return
    different = (found_bits != expected_bits).nonzero().flatten()
    index = different[0].item()
    values = [t.detach().cpu().flatten()[index].item() for t in (found, expected)]
    mask = 2 ** (8 * found.element_size()) - 1
    patterns = [hex(b[index].item() & mask) for b in (found_bits, expected_bits)]
    raise AssertionError(
        f"{what}: {len(different)} of {found.numel()} differ, first at {index}: "
        f"{values[0]!r} ({patterns[0]}) is not {values[1]!r} ({patterns[1]})"
    )
