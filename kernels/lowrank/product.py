"""What a launch over products is compiled for, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaopt.kernels.formats import Format
from megaopt.kernels.lowrank.operands import element_of


@dataclass(frozen=True)
class Product:
    """The product of a matrix, gradients or directions, with a projection of rank `rank`."""

    form: Format
    """Of the matrix."""
    projection: Format
    precision: str
    """Of operands.PRECISIONS."""
    on_left: bool
    """The projection stands on the left (spec.LEFT)."""
    even: bool
    """Only whole tiles, rows of which begin at multiples of 16 bytes."""
    rank: int

    @property
    def element(self) -> Any:
        """The Triton type as which the matrix is loaded."""
        return element_of(self.form, self.precision)

    @property
    def projection_element(self) -> Any:
        """Likewise the projection."""
        return element_of(self.projection, self.precision)

    @property
    def left(self) -> Format:
        """Of the left factor of the product that projects back."""
        return self.projection if self.on_left else self.form

    @property
    def right(self) -> Format:
        """Likewise of the right one."""
        return self.form if self.on_left else self.projection
