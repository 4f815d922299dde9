"""Values that nobody should give, and random ways to damage what is nested."""

import decimal
import fractions

import numpy as np
import torch


class Hostile:
    """Fails at whatever is asked of it."""

    def _fail(self, *_):
        raise RuntimeError("hostile")

    __repr__ = __str__ = __bool__ = __float__ = __int__ = __index__ = __len__ = _fail
    __eq__ = __ne__ = __contains__ = __deepcopy__ = __format__ = _fail
    __hash__ = object.__hash__


def recursive():
    value = []
    value.append(value)
    return value


NUMBERS = [
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, 2.5, -0.0, 1e-320, -1e-60, 1e39, 1e308),
    *(float("nan"), float("inf"), -float("inf"), 1j, complex("nan"), 2**24, 2**31 - 2, 2**31 - 1),
    *(2**31, 2**63, -(2**63), 10**400, -(10**400), 10**5000),
    *(np.float32(0.5), np.float64("nan"), np.float16(2), np.int64(3), np.uint8(1), np.bool_(True)),
    *(np.array(1.0), np.array([0.1, 0.2]), np.complex64(1), decimal.Decimal("0.1")),
    *(fractions.Fraction(1, 3), fractions.Fraction(10**400, 3)),
]
OTHERS = [
    *("x", "", "1e-3", "nan", b"x", "cpu", "ieee", "exp_avg", [], [1], [0.9, 0.99], ()),
    *((0.9,), (0.9, 0.99), (0.9, 0.99, 0.999), ["a", "b"], {}, {"a": 1}, {0: {}}, {1: [2]}),
    *(set(), {1, 2}),
    *(frozenset(), range(3), object(), object, len, torch.float32, torch.float16, torch.int8),
    *(torch.uint8, torch.complex64, torch.device("cpu"), torch.Size([2]), torch.nn.Linear(2, 2)),
    *(Hostile(), [Hostile()], {"a": Hostile()}, recursive()),
]  # fmt: skip
TENSORS = [
    lambda: torch.tensor(0.5),
    lambda: torch.tensor([3]),
    lambda: torch.tensor([2.0]),
    lambda: torch.tensor(-1.0),
    lambda: torch.tensor(float("nan")),
    lambda: torch.tensor(True),
    lambda: torch.tensor(1j),
    lambda: torch.tensor(0.5, requires_grad=True),
    lambda: torch.tensor(0.5, requires_grad=True) * 1,
    lambda: torch.tensor(0.5, device="meta"),
    lambda: torch.tensor(2.0**40, dtype=torch.float64),
    lambda: torch.zeros(0),
    lambda: torch.ones(2),
    lambda: torch.ones(2, 3),
    lambda: torch.ones(2, 3, dtype=torch.bfloat16),
    lambda: torch.ones(2, 3, device="meta"),
    lambda: torch.ones(2, 3).to_sparse(),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.ones(2, 3).to(torch.float8_e5m2),
    lambda: torch.ones(2, 3, dtype=torch.int16),
    lambda: torch.zeros((), dtype=torch.float4_e2m1fn_x2),
]


def junk(random):
    """One value, whatever it is."""
    kind = random.random()
    if kind < 0.4:
        return random.choice(NUMBERS)
    if kind < 0.7:
        return random.choice(TENSORS)()
    if kind < 0.72:
        return (each for each in [0.9, 0.99])
    return random.choice(OTHERS)
