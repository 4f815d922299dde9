"""GaLore's AdamW by its description (arXiv:2403.03507, algorithm 2), in numpy and fp64.

Nothing of megaopt is used here. A projection is given: two programs' singular vectors may differ in
sign, and the moments follow them.
"""


def side_of(proj_type, shape):
    """Which side of the gradient is multiplied: the smaller dimension's by default."""
    rows, columns = shape
    by_shape = {"std": rows >= columns, "reverse_std": rows < columns}
    return "right" if by_shape.get(proj_type, proj_type in ("right", "auto")) else "left"
