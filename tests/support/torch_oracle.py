"""Contract torch's arithmetic by fractions: multiply-adds rounded once, torch's order.

The order is that of adam_math in torch's ATen/native/cuda/fused_adam_utils.cuh.
"""

from fractions import Fraction

import numpy as np

F32 = np.float32
OVERFLOW = Fraction(2**128 - 2**103)
"""From here on, half a last place above the largest fp32, numbers round to infinity."""


def nearest(value):
    """The fp32 nearest to a fraction, ties to even: the nearer of two neighbours of a guess."""
    if abs(value) >= OVERFLOW:
        return F32(np.inf if value > 0 else -np.inf)
    guess = F32(float(value))
    around = [np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf))]
    finite = [x for x in around if np.isfinite(x)]
    even = {x: int(x.view(np.uint32)) & 1 for x in finite}
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - value), even[x]))


def fma(a, b, c):
    if np.isfinite([a, b, c]).all():
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if exact:
            return nearest(exact)
    return F32(np.float64(a) * np.float64(b) + np.float64(c))  # exact: a zero, infinity or NaN


def averaged(average, beta, value):
    return fma(beta, average, fma(-beta, value, value))


def one_element(param, exp_avg, exp_avg_sq, grad, group):
    p, m, v, g = (F32(each.item()) for each in (param, exp_avg, exp_avg_sq, grad))
    beta1, beta2 = map(F32, group["betas"])
    lr, decay, eps = F32(group["lr"]), F32(group["weight_decay"]), F32(group["eps"])
    with np.errstate(all="ignore"):
        if decay:
            p = fma(-(lr * decay), p, p)
        m = averaged(m, beta1, g)
        v = averaged(v, beta2, g * g)
        return p - (lr * m) / (np.sqrt(v) + eps), m, v
