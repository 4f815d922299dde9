"""What a refresh asks of whoever holds the other rows of a matrix; here nobody does."""

from __future__ import annotations

from typing import Protocol

import torch


class Parts(Protocol):
    """Rows of a matrix, and what is added up over all of them.

    Everything that goes on from what these return is the same for all parts.
    """

    def rows(self, own: int) -> int:
        """Of the whole matrix; own: of this part."""

    def largest(self, own: torch.Tensor) -> torch.Tensor:
        """Of all parts' magnitudes, fp32 or fp64 of shape (); NaN where one is."""

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over all parts, fp64, of one shape on all."""

    def alike(self, own: torch.Tensor) -> torch.Tensor:
        """The same bits for all copies of the matrix."""


class Whole:
    """All rows of a matrix."""

    def rows(self, own: int) -> int:
        """These."""
        return own

    def largest(self, own: torch.Tensor) -> torch.Tensor:
        """This one."""
        return own

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """This one."""
        return own

    def alike(self, own: torch.Tensor) -> torch.Tensor:
        """This one."""
        return own


WHOLE = Whole()
