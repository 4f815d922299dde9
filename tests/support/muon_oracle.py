"""An independent oracle of Muon's iteration: docs/numbers.md's "Muon" in numpy.

Products are tensor_core_model's, of Python's integers; each other operation is oracle's, fp64
rounded to fp32 once. Nothing of megaopt is used.
"""

import ml_dtypes
import numpy as np
import tensor_core_model
import torch
from norm_oracle import oracle_counts, oracle_norm
from oracle import F32, add, divide, multiply, root

DTYPES = {"bf16": ("bfloat16", ml_dtypes.bfloat16), "fp16": ("float16", np.float16)}


class Numbers:
    """Products and roundings of a precision."""

    def __init__(self, precision):
        self.kind, self.dtype = DTYPES[precision]

    def rounded(self, value):
        with np.errstate(all="ignore"):
            own = np.ascontiguousarray(value.astype(self.dtype))
        own.view(np.uint16)[np.isnan(value)] = 0x7FFF
        return own

    def product(self, left, right):
        own = [np.ascontiguousarray(each).view(np.uint16) for each in (left, right)]
        begun = np.zeros((len(left), right.shape[1]), np.uint32)
        return tensor_core_model.product(*own, begun, self.kind).view(F32)

    def made(self, left, right, alpha=1.0, added=None, beta=1.0, diagonal=None, scale=None):
        value = multiply(self.product(left, right), F32(alpha))
        if added is not None:
            value = add(value, multiply(added.astype(F32), F32(beta)))
        if diagonal is not None:
            value = np.where(np.eye(len(value)) == 1, add(value, F32(diagonal)), value)
        return self.rounded(value if scale is None else multiply(value, scale))

    def symmetric(self, left, right, **others):
        """What is below the diagonal, above it too."""
        own = self.made(left, right, **others)
        return np.where(np.tri(len(own)) == 1, own, own.T)


def norm_of(values, eps):
    own = F32(oracle_norm(oracle_counts(torch.from_numpy(values.astype(F32).flatten()))))
    return max(own, F32(eps))


def begun(u, precision, eps):
    """What the iteration begins with, and its norm."""
    if precision == "bf16":
        x = u.astype(ml_dtypes.bfloat16)
        return x, norm_of(x, eps)
    norm = norm_of(u, eps)
    power = F32(2.0 ** (14 - np.floor(np.log2(np.float64(norm)))))
    return multiply(u, power).astype(np.float16), multiply(norm, power)


def orthogonal(u, form, precision, coefficients, eps, ratio, restarts):
    """O of u, fp32 [m, n]."""
    numbers = Numbers(precision)
    x, norm = begun(u, precision, eps)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    inverse = divide(F32(1), norm)
    first, last = inverse, F32(ratio)
    make = gram if form == "gram" else standard
    made = make(numbers, x, coefficients, multiply(inverse, inverse), first, last, restarts)
    return made.T if tall else made


def standard(numbers, x, coefficients, square, first, last, restarts):
    for step, (a, b, c) in enumerate(coefficients):
        is_first, is_last = step == 0, step == len(coefficients) - 1
        A = numbers.made(x, x.T, scale=square if is_first else None)
        scale = factor(first, last, is_first, is_last)
        if c:
            B = numbers.made(A, A, c, A, b)
            x = numbers.made(B, x, added=x, beta=a, scale=scale)
        else:
            x = numbers.made(A, x, b, x, a, scale=scale)
    return x


def factor(first, last, is_first, is_last):
    if is_first and is_last:
        return multiply(first, last)
    return first if is_first else last if is_last else None


def gram(numbers, x, coefficients, square, first, last, restarts):
    is_begun, count, R, Q = False, len(coefficients), None, None
    for step, (a, b, c) in enumerate(coefficients):
        is_new = step == 0 or step in restarts
        if is_new and step:
            x = numbers.made(Q, x, scale=None if is_begun else first)
            is_begun = True
        if is_new:
            R = numbers.made(x, x.T, scale=None if step else square)
        W = numbers.symmetric(R, R, alpha=c, added=R, beta=b, diagonal=a)
        Q = W if is_new else numbers.symmetric(Q, W)
        if step + 1 < count and step + 1 not in restarts:
            R = numbers.symmetric(W, numbers.symmetric(R, W))
    return numbers.made(Q, x, scale=factor(first, last, not is_begun, True))


def lane_sum(values):
    """The sums of the last dimension, by 256 lanes."""
    padded = np.zeros((*values.shape[:-1], -(-values.shape[-1] // 256) * 256), F32)
    padded[..., : values.shape[-1]] = values
    lanes = np.zeros((*values.shape[:-1], 256), F32)
    for block in np.split(padded, max(padded.shape[-1] // 256, 1), axis=-1):
        lanes = add(lanes, block)
    while lanes.shape[-1] > 1:
        lanes = add(lanes[..., 0::2], lanes[..., 1::2])
    return lanes[..., 0]


def normuon(update, v, beta2, ratio):
    """The update of second moments, of the update's dtype, and the new v."""
    wide = update.astype(F32)
    s = lane_sum(multiply(wide, wide))
    t = divide(s, F32(update.shape[1]))
    v = add(multiply(v, F32(beta2)), multiply(t, F32(1.0 - beta2)))
    r = add(root(v), F32(1e-8))
    w, y = root(lane_sum(s)), root(lane_sum(divide(s, multiply(r, r))))
    z = multiply(divide(w, max(y, F32(1e-8))), F32(ratio))
    return multiply(wide, divide(z, r)[:, None]).astype(update.dtype), v
