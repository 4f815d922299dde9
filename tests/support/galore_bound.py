"""How far kernels of GaLore may differ in one step: docs/numbers.md states the bound."""

from megaopt.kernels.galore.rule import RIGHT


def bound_of_a_step(before, after, grad, side, coefficient, numbers):
    """How far apart the weights of two kernels may be after one step, [m, n] in fp64.

    A sum of k products is off by k * unit of the products' magnitudes in any order (Higham,
    Accuracy and Stability, 3.5), two of them by twice that. dR of the projected gradient moves the
    mean by rest1 * dR and the root of the square, a norm of R and what was there, by at most
    sqrt(rest2) * dR, so N = mean / (root + eps) by (rest1 + |N| * sqrt(rest2)) * dR / (root + eps);
    six more operations round N. Each of the update's four operations rounds a number of the
    weight's size.
    """
    unit = 2.0**-24
    basis, grad = after["projection"].double().abs(), grad.double().abs() * coefficient
    (beta1, beta2), eps = (0.9, 0.999), numbers["eps"]
    rest1, rest2 = 1 - beta1, 1 - beta2
    low = grad @ basis.mT if side == RIGHT else basis.mT @ grad
    terms = grad.shape[1] if side == RIGHT else grad.shape[0]
    mean, root = after["exp_avg"].double(), after["exp_avg_sq"].double().sqrt()
    found = mean.abs() / (root + eps)
    moved = (rest1 + found * rest2**0.5) * (2.01 * terms * unit * low) / (root + eps)
    # the mean's own sum may cancel: its roundings are of what is added up
    summed = beta1 * before["exp_avg"].double().abs() + rest1 * low
    moved = moved + 2.0**-22 * (found + summed / (root + eps))
    rank = basis.shape[0] if side == RIGHT else basis.shape[1]
    moved = moved + 2.01 * rank * unit * found
    step = after["step"]
    size = numbers["lr"] * numbers["scale"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    update = size * (moved @ basis if side == RIGHT else basis @ moved)
    whole = size * (found @ basis if side == RIGHT else basis @ found)
    return update + 8 * 2.0**-24 * (before["master"].double().abs() + whole)
