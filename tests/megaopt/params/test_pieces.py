"""Codes that are decoded and encoded in pieces are those of the whole."""

import pytest
import torch
from bits import assert_same_bits

from megaopt.kernels.formats import MASTERS, MOMENTS
from megaopt.kernels.step.reference import decoded, store_blocks
from megaopt.params import codes as pieces

FORMS = [name for name, form in MOMENTS.items() if form.block and not form.draws]
JOINED = [name for name, form in MASTERS.items() if form.joined]


@pytest.mark.parametrize("first", [0, 300])
@pytest.mark.parametrize("numel", [0, 2, 128, 1022, 5000])
@pytest.mark.parametrize("name", FORMS)
def test_pieces_have_the_bits_of_the_whole(monkeypatch, name, numel, first):
    """The first block may have begun before, the last one may go on."""
    monkeypatch.setattr(pieces, "PIECE", 512)
    form = MOMENTS[name]
    value = torch.randn(numel) * torch.logspace(-8, 8, numel)
    value = value.square() if form.unsigned else value
    blocks = -(-(numel + first % form.block) // form.block) if numel else 0
    codes, scales = [], []
    for store in (store_blocks, pieces.encode_blocks):
        codes.append(torch.zeros(form.stored_shape(value.shape), dtype=form.dtype))
        scales.append(torch.zeros(blocks, dtype=torch.uint8))
        if numel:
            store(codes[-1], scales[-1], value, form, first)
    assert_same_bits(*codes)
    assert_same_bits(*scales)
    found = pieces.decoded_blocks(form, codes[0], scales[0], value.shape, first)
    assert_same_bits(found, decoded(form, codes[0], scales[0], first))


@pytest.mark.parametrize("shape", [(0,), (512,), (3, 475)], ids=str)
@pytest.mark.parametrize("name", JOINED)
def test_pieces_of_joined_masters_have_the_bits_of_the_whole(monkeypatch, name, shape):
    monkeypatch.setattr(pieces, "PIECE", 512)
    form = MASTERS[name]
    value = torch.randn(shape) * torch.logspace(-4, 4, shape[-1])
    weight, code = form.encode_by_hand(value)
    own = torch.zeros_like(code)
    assert_same_bits(pieces.encode_joined(own, value, form, torch.zeros_like(weight)), weight)
    assert_same_bits(own, code)
    found = pieces.decoded_joined(form, weight, code)
    assert_same_bits(found, form.decode_reference(weight, code))
