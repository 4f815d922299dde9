"""Contract torch's arithmetic by fractions: multiply-adds rounded once, torch's order."""

from fractions import Fraction

import numpy as np

F32 = np.float32


def nearest(value):
    """The fp32 nearest to a fraction, ties to even: the nearer of two neighbours of a guess."""
    guess = F32(float(value))
    around = [np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf))]
    finite = [x for x in around if np.isfinite(x)]
    even = {x: int(x.view(np.uint32)) & 1 for x in finite}
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - value), even[x]))


def fma(a, b, c):
    return nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def one_element(param, exp_avg, exp_avg_sq, grad, group):
    p, m, v, g = (F32(each.item()) for each in (param, exp_avg, exp_avg_sq, grad))
    beta1, beta2 = map(F32, group["betas"])
    lr, decay, eps = F32(group["lr"]), F32(group["weight_decay"]), F32(group["eps"])
    if decay:
        p = fma(-(lr * decay), p, p)
    m = fma(beta1, m, (F32(1) - beta1) * g)
    v = fma(beta2, v, (F32(1) - beta2) * (g * g))
    return p - (lr * m) / (np.sqrt(v) + eps), m, v
