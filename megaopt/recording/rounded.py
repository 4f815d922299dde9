"""Numbers with a bound of the rounding that an optimizer's arithmetic may have given them.

A law is written once, in these. Each operation adds its own rounding to the errors that its
operands bring along (running error analysis: Higham, Accuracy and Stability of Numerical
Algorithms, 3.3), so that cancellation and small denominators widen a bound by themselves, and
nothing is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import numpy

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
Operand = Union["Rounded", float]

OWN = 2.0**-53
"""Each operation's rounding here, in fp64."""
APPROXIMATE = 2.0**-24
"""fp32's unit: operations on fp32 may be approximate, and narrower ones are made of those."""


class Precision(NamedTuple):
    """The change that one rounding to a format may make."""

    unit: float
    """Half of the last place, relative."""
    least: float
    """Absolute: half of the smallest number's last place, or the smallest normal number, as
    processors may make zeros of subnormal ones (TransformerEngine's do, with .ftz)."""
    largest: float
    approximate: float = APPROXIMATE


PRECISIONS = {
    "float64": Precision(2.0**-53, 2.0**-1022, float(numpy.finfo(numpy.float64).max), 2.0**-53),
    "float32": Precision(2.0**-24, 2.0**-126, float(numpy.finfo(numpy.float32).max)),
    "bfloat16": Precision(2.0**-8, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    "float16": Precision(2.0**-11, 2.0**-25, 65504.0),
}
"""Precisions by dtype, as torch names it."""

# Beside their rounding, in units of APPROXIMATE (an ulp is two): what NVIDIA documents for code
# that is compiled with fast math (CUDA C++ Programming Guide, mathematical functions), as
# TransformerEngine's, apex's and torch.compile's is, and what covers a CPU's libraries.
DIVISION = 3
"""2 ulp in all."""
ROOT = 1
"""1 ulp in all; torch's root on a CPU is off by one too."""
POWER = 8
"""4 ulp."""


@dataclass(frozen=True, eq=False)
class Rounded:
    """A tensor's sampled elements, or one number: the exact law's value, and how far off it may be.

    The error of what is not a number, or may have overflowed, is infinite: nothing can be said.
    It takes part in +, -, *, / with its like and with floats, which are exact.
    """

    value: Array
    """fp64."""
    error: Array
    """fp64, >= 0, of the same shape: the optimizer's own value lies within it of `value`."""
    precision: Precision

    def _made(self, value: Any, error: Any, more: float = 0.0) -> Rounded:
        """Returns an operation's result, rounded once.

        more: further rounding, in units of APPROXIMATE.
        """
        precision = self.precision
        relative = precision.unit + OWN + more * precision.approximate
        with numpy.errstate(all="ignore"):
            error = error + relative * (numpy.abs(value) + error) + precision.least
            is_finite = numpy.abs(value) + error <= precision.largest
        return Rounded(value, numpy.where(is_finite, error, numpy.inf), precision)

    def _other(self, operand: Operand) -> Rounded:
        return operand if isinstance(operand, Rounded) else exact(operand, self.precision)

    def __add__(self, operand: Operand) -> Rounded:
        """The sum."""
        operand = self._other(operand)
        with numpy.errstate(all="ignore"):
            return self._made(self.value + operand.value, self.error + operand.error)

    def __neg__(self) -> Rounded:
        """The number with the other sign: exact."""
        return Rounded(-self.value, self.error, self.precision)

    def __sub__(self, operand: Operand) -> Rounded:
        """The difference."""
        return self + -self._other(operand)

    def __mul__(self, operand: Operand) -> Rounded:
        """The product."""
        operand = self._other(operand)
        with numpy.errstate(all="ignore"):
            error = numpy.abs(self.value) * operand.error + self.error * numpy.abs(operand.value)
            error = error + self.error * operand.error
            return self._made(self.value * operand.value, error)

    def __truediv__(self, operand: Operand) -> Rounded:
        """The quotient; nothing is known of it where the denominator may be 0."""
        operand = self._other(operand)
        with numpy.errstate(all="ignore"):
            least = numpy.abs(operand.value) - operand.error
            value = self.value / operand.value
            error = (self.error + numpy.abs(value) * operand.error) / least
            return self._made(value, numpy.where(least > 0, error, numpy.inf), DIVISION)

    def root(self) -> Rounded:
        """The square root; of what may be a little below 0, from 0 on."""
        with numpy.errstate(all="ignore"):
            value = numpy.sqrt(self.value)
            low = value - numpy.sqrt(numpy.maximum(self.value - self.error, 0.0))
            high = numpy.sqrt(self.value + self.error) - value
            return self._made(value, numpy.maximum(low, high), ROOT)

    def power(self, exponent: float) -> Rounded:
        """The number, from 0 to 1, to a power >= 0."""
        with numpy.errstate(all="ignore"):
            value = self.value**exponent
            high = (self.value + self.error) ** exponent - value
            low = value - numpy.maximum(self.value - self.error, 0.0) ** exponent
            return self._made(value, numpy.maximum(low, high), POWER)

    def sign(self) -> Rounded:
        """Returns 1, -1 or 0; where the sign is open, within 2 of it: exact otherwise."""
        is_open = ~(numpy.abs(self.value) > self.error) & ((self.value != 0) | (self.error > 0))
        return Rounded(numpy.sign(self.value), numpy.where(is_open, 2.0, 0.0), self.precision)

    def maximum(self, operand: Rounded) -> Rounded:
        """The larger one: no rounding."""
        value = numpy.maximum(self.value, operand.value)
        return Rounded(value, numpy.maximum(self.error, operand.error), self.precision)

    def again(self, times: int) -> Rounded:
        """The same number after so many more roundings, which some implementation makes."""
        number = self
        for _ in range(times):
            number = number._made(number.value, number.error)
        return number

    def stored(self, precision: Precision, units: int = 1) -> Rounded:
        """The same number, rounded to a format; units: 2 of one that may round either way."""
        number = Rounded(self.value, self.error, precision)
        return number if precision.unit == self.precision.unit == units else number.again(units)


def exact(value: Any, precision: Precision) -> Rounded:
    """Numbers without an error, of which operations are rounded to this precision."""
    value = numpy.asarray(value, numpy.float64)
    return Rounded(value, numpy.zeros_like(value), precision)


def either(*ways: Rounded) -> Rounded:
    """One number that may have been computed in several ways: whatever any of them may give."""
    value = ways[0].value
    with numpy.errstate(all="ignore"):
        error = numpy.max([way.error + numpy.abs(way.value - value) for way in ways], axis=0)
    return Rounded(value, numpy.where(numpy.isnan(error), numpy.inf, error), ways[0].precision)
