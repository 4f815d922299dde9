"""GaLore's AdamW by its description (arXiv:2403.03507, algorithm 2), in numpy and fp64.

Nothing of megaopt is used here. A projection is given: two programs' singular vectors may differ in
sign, and the moments follow them.
"""

import numpy as np


def side_of(proj_type, shape):
    """Which side of the gradient is multiplied: the smaller dimension's by default."""
    rows, columns = shape
    by_shape = {"std": rows >= columns, "reverse_std": rows < columns}
    return "right" if by_shape.get(proj_type, proj_type in ("right", "auto")) else "left"


class Oracle:
    """One matrix on its way: an Adam in the small space, whose steps are taken in the large one."""

    def __init__(self, weight, side, group):
        self.weight, self.side, self.group, self.count = weight.copy(), side, group, 0
        self.mean = self.square = 0.0

    def step(self, grad, basis):
        """basis: rows that are orthonormal for the right side, columns for the left one."""
        own, (fast, slow) = self.group, self.group["betas"]
        small = grad @ basis.T if self.side == "right" else basis.T @ grad
        self.count += 1
        self.mean = self.mean * fast + small * (1 - fast)
        self.square = self.square * slow + small**2 * (1 - slow)
        small = self.mean / (np.sqrt(self.square) + own["eps"])
        large = own["scale"] * (small @ basis if self.side == "right" else basis @ small)
        rate = own["lr"]
        if own["bias_correction"]:
            rate = rate * np.sqrt(1 - slow**self.count) / (1 - fast**self.count)
        self.weight = self.weight - rate * large
        self.weight = self.weight - own["lr"] * own["weight_decay"] * self.weight


def assert_basis(basis, grad, side, energy_of_best):
    """Fails unless it is orthonormal and captures so much of what any basis of its size can.

    basis: fp32, as Oracle.step takes it; energy_of_best: a share of the largest singular values'.
    """
    rows = np.float64(basis if side == "right" else basis.T)
    rank, width = rows.shape
    # LAPACK's users' guide: singular vectors are orthonormal to some epsilon times a dimension
    assert np.abs(rows @ rows.T - np.eye(rank)).max() <= width * 2.0**-23
    grad = np.float64(grad if side == "right" else grad.T)
    best = (np.linalg.svd(grad, compute_uv=False)[:rank] ** 2).sum()
    assert ((grad @ rows.T) ** 2).sum() >= energy_of_best * best
