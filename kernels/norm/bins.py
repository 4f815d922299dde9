"""The norm: sums of rounded squares in bins of whole numbers, so that no order shows.

The unit of bin j is u_j = 2**(WIDTH * j). The square x of an fp32 number is exact in fp64 (48 bits,
from 2**-298 to below 2**256). A block is some elements that are added up together. Its top bin is

    J = floor((floor(log2(largest x)) + 1) / WIDTH), that is u_J / 2 < largest x < u_{J+1} / 2.

Each x of the block is rounded to q * u_J, and the rest r = x - q * u_J to q' * u_{J-1}; what then
remains is dropped. No x is half a unit, nor is it ever a tie: x is an odd number times an even
power of 2, and as WIDTH is even, half a unit is an odd power. r is exact in fp64: a multiple of
x's last place, no larger than x. The whole numbers q and q' are summed into bins J and J - 1.

The result uses bins I and I - 1 alone, where I is the highest bin whose total is not 0. These two
totals do not depend on how the elements were cut into blocks:

- Bin J gets from a block with the top J only q >= 0, and at least one q >= 1, as the largest x is
  more than half of u_J; a bin above J gets nothing from it. So the highest J of all blocks is the
  highest bin whose total is not 0, and it is that of the largest x of all elements.
- A block with J = I adds each x's q and q' of I. One with J = I - 1: all its x are below half of
  u_I and round to 0 there, so that r is x, and q' of I is the block's own q. One with J < I - 1:
  all its x are below half of u_{I-1}, and q and q' of I are both 0. So every element adds the
  same to bins I and I - 1 whatever its block is, and whole numbers may be added in any order.

Lower bins do depend on the blocks, and are not used.

With X the exact sum of N squares, N < 2**40, total = (S_I * 2**WIDTH + S_{I-1}) * u_{I-1} in fp64
is off by at most (N + 1) * 2**-50 * X:

- what is dropped of an x is at most u_{I-1} / 2 = 2**-51 * u_I < 2**-50 * largest x;
- of the roundings in fp64, in units of 2**-53: S_I * u_I is at most 2 * X, as r is no larger than
  x, and takes two; S_{I-1} * u_{I-1} is at most X and takes two; their sum takes one. 4 + 2 + 1,
  and with the products of errors less than 8.

So the norm is off by (N + 1) * 2**-51 of itself to first order, and by the rounding of the root, to
fp64 and then to fp32. The worst case is one number beside N that are 2**25 times smaller.

A total is kept in two limbs of int64, sum = high * 2**LIMB + low, each block adding a low from 0 to
2**LIMB - 1: no overflow below 2**40 elements in fewer than 2**37 blocks. Tables add up: that of
several shards is the sum of theirs, as integers.
"""

from __future__ import annotations

import torch

WIDTH = 50
"""Bits from bin to bin; even, so that there are no ties. An element's q is at most 2**49: that of a
block of 8,192 fits int64."""
LOWEST = -7
"""The bin of row 0. Squares are multiples of 2**-298, so that nothing is left below bin -6."""
BINS = 13
"""Up to bin 5: u_6 / 2 is 2**299."""
NONFINITE = BINS
"""The row of two counters, of blocks with infinities and no NaN, and of blocks with a NaN."""
ROWS = 16
"""A power of two, for the kernel; the rows after the counters stay 0."""
BANKS = 16
"""Tables side by side, for the kernel's programs to spread their additions over."""
LIMB = 26
MOST = 8192
"""Elements of a block at most."""


def new_bins(device: torch.device) -> torch.Tensor:
    """A table of zeros on the device, int64 [BANKS, ROWS, 2]: in each bank for each row low, high.

    Whoever adds to it again after a result resets it with `zero_`.
    """
    return torch.zeros((BANKS, ROWS, 2), dtype=torch.int64, device=device)
