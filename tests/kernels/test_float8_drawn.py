"""fp8 codes drawn, and 8 bits beside them: twin and kernel against tables of their numbers."""

import float8_drawn_oracle as oracle
import numpy as np
import pytest
import torch
from bits import assert_same_bits

from megaopt.kernels.formats import BESIDE, STOCHASTIC_FLOAT8
from megaopt.kernels.formats.float8_drawn import remainder_of
from megaopt.kernels.optional_triton import jit, tl

E4M3 = torch.float8_e4m3fn
BLOCK = 1 << 14


def hard_values():
    """All numbers of 16 bits, what lies beside them and between, and what is no number."""
    wide = oracle.numbers(15 - oracle.EXPONENT_BITS)[::37]
    wide = np.concatenate([wide, oracle.numbers(7 - oracle.EXPONENT_BITS)])
    middle = (wide[1:] + wide[:-1]) / 2
    own = np.concatenate([wide, middle]).astype(np.float32)
    beside = [np.nextafter(own, np.float32(side)) for side in (0, np.inf)]
    generator = np.random.default_rng(0)
    spread = generator.integers(0, 0x7F800000, 4000, dtype=np.int32).view(np.float32)
    near = (generator.standard_normal(4000) * 10).astype(np.float32)
    special = np.array([0, np.inf, np.nan, 2.0**-149, 2.0**-126, 3.4e38], np.float32)
    positive = np.concatenate([own, *beside, spread, near, special])
    return torch.from_numpy(np.concatenate([positive, -positive]))


@jit
def encode_kernel(
    value_ptr, bits_ptr, code_ptr, rest_ptr, again_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + offsets)
    if FORMAT.joined:
        if FORMAT.draws:
            code, rest = FORMAT.encode(value, tl.load(bits_ptr + offsets))
        else:
            code, rest = FORMAT.encode(value)
        tl.store(rest_ptr + offsets, rest)
        tl.store(again_ptr + offsets, FORMAT.decode(code, rest))
    else:
        code = FORMAT.encode(value, 1.0, tl.load(bits_ptr + offsets))
        tl.store(again_ptr + offsets, FORMAT.decode(code, 1.0))
    tl.store(code_ptr + offsets, code)


def by_kernel(form, value, bits, device):
    count = -len(value) % BLOCK
    value = torch.cat([value, torch.zeros(count)]).to(device)
    bits = torch.cat([bits, torch.zeros(count, dtype=torch.int32)]).to(device)
    code, rest = (torch.zeros(len(value), dtype=torch.int8, device=device) for _ in range(2))
    again = torch.zeros_like(value)
    with np.errstate(all="ignore"):
        grid = (len(value) // BLOCK,)
        encode_kernel[grid](value, bits, code, rest, again, form, BLOCK, enable_fp_fusion=False)
    size = len(value) - count
    return [tensor[:size].cpu() for tensor in (code, rest, again)]


def random_bits(count, how):
    if isinstance(how, int):
        return torch.full((count,), how, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 1 << 16, (count,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("how", [0, 1, 0x7FFF, 0x8000, 0xFFFF, "random"], ids=str)
def test_codes_are_drawn_as_the_oracle_draws_them(how, device):
    form, value = STOCHASTIC_FLOAT8[E4M3], hard_values()
    bits = random_bits(len(value), how)
    expected = torch.from_numpy(oracle.encode(value.numpy(), bits.numpy()))
    twin = form.encode_reference(value, None, bits)
    assert_same_bits(twin.view(torch.uint8), expected, "twin")
    code, _, again = by_kernel(form, value, bits, device)
    assert_same_bits(code.view(torch.uint8), expected, "kernel")
    assert_same_bits(again, form.decode_reference(twin), "decoded")


@pytest.mark.parametrize("how", [None, 0, 0xF, 0x10, 0x8000, 0xFFFF, "random"], ids=str)
def test_pairs_are_made_as_the_oracle_makes_them(how, device):
    name = "remainder8" if how is None else "remainder8_stochastic"
    form, value = BESIDE[E4M3][name], hard_values()
    bits = random_bits(len(value), 0 if how is None else how)
    own = None if how is None else bits.numpy()
    expected = [torch.from_numpy(each) for each in oracle.encode_pair(value.numpy(), own)]
    twin = form.encode_reference(value, *(() if how is None else (bits,)))
    code, rest, again = by_kernel(form, value, bits, device)
    for found, where in ((twin, "twin"), ((code, rest), "kernel")):
        assert_same_bits(found[0].view(torch.uint8), expected[0], f"codes of the {where}")
        assert_same_bits(found[1], expected[1], f"remainders of the {where}")
    assert_same_bits(again, form.decode_reference(*twin), "decoded")


def test_every_pair_is_read_as_its_number(device):
    """Pairs that no encoding makes too: a 0 beside a negative remainder is 0, and no NaN."""
    form = BESIDE[E4M3]["remainder8"]
    codes = torch.arange(256).repeat_interleave(256).to(torch.uint8)
    rest = torch.arange(-128, 128).repeat(256).to(torch.int8)
    found = form.decode_reference(codes.view(E4M3), rest)
    usable = (codes & 0x7F) <= oracle.LARGEST
    expected = oracle.decode_pair(codes.numpy(), rest.numpy().astype(np.int64))
    assert_same_bits(found[usable], torch.from_numpy(expected).float()[usable])
    plain = STOCHASTIC_FLOAT8[E4M3].decode_reference(codes.view(E4M3))
    assert_same_bits(found[~usable], plain[~usable])  # infinities and NaN
    wide = (codes & 0x7F).int() * 256 + rest
    kept = usable & (wide >= 0) & (wide <= oracle.LARGEST * 256)
    again = form.encode_reference(found[kept])
    assert_same_bits(again[0].view(torch.uint8), codes[kept])
    assert_same_bits(again[1], rest[kept])


def test_a_remainder_brings_a_code_as_near_as_it_can():
    """Beside a code that stays: the value where the pair reaches it, else the pair's last."""
    form = BESIDE[E4M3]["remainder8"]
    value = hard_values()
    code, rest = form.encode_reference(value)
    assert_same_bits(remainder_of(code, value), rest)
    number = value[~value.isnan()]
    far = torch.full(number.shape, 2.0).to(E4M3)
    found = remainder_of(far, number)
    expected = torch.where(number < 2.0, -128, 127).to(torch.int8)
    beyond = (number < 1.7) | (number > 2.4)  # half of a last place away, and more
    assert_same_bits(found[beyond], expected[beyond])


def test_the_mean_is_the_value():
    """Over all random bits, exactly: how often the code above comes, of 2**16."""
    form = STOCHASTIC_FLOAT8[E4M3]
    bits = torch.arange(1 << 16, dtype=torch.int32)
    table = torch.from_numpy(oracle.numbers(7 - oracle.EXPONENT_BITS)).float()
    for place in (1, 5, 8, 40, 77, 100):
        low, high = table[place].double(), table[place + 1].double()
        for share in (0, 1, 0x8000, 0xFFFF):
            value = (low + (high - low) * share / 2**16).float().expand(1 << 16).contiguous()
            up = form.encode_reference(value, None, bits).view(torch.uint8) == place + 1
            assert int(up.sum()) == share
