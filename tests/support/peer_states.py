"""What an optimizer keeps of a parameter, ours and a peer's under the same names."""

import torch
from bits import assert_same_bits

SCALED = (torch.float16, torch.uint8)


def states_of(optimizer, param):
    """Moments, master and scales, as stored; steps are counted in other places by each library."""
    found = {}
    # TransformerEngine's scales lie outside the state; that of a bf16 state is never read
    scales = getattr(optimizer, "_scales", {}).get(param, {})
    for name, value in optimizer.state.get(param, {}).items():
        if name == "step" or value is None:
            continue
        if hasattr(value, "_scale_inv"):
            # TransformerEngine's Float8Tensor, which calls itself fp32
            found[name], found[f"{name}_scale"] = value._data, value._scale_inv.reshape(1)
            continue
        found[name] = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        if name in scales and value.dtype in SCALED:
            found[f"{name}_scale"] = scales[name].reshape(1)
    return found


def assert_same_state(theirs, ours, peer, optimizer):
    """Fails unless weights and states are equal, and none is there on one side alone."""
    for index, (other, param) in enumerate(zip(theirs, ours, strict=True)):
        assert_same_bits(param, other, f"weight {index}")
        expected, found = states_of(peer, other), states_of(optimizer, param)
        names = f"weight {index} has the states {sorted(found)}, not {sorted(expected)}"
        assert found.keys() == expected.keys(), names
        assert {"exp_avg", "exp_avg_sq"} <= expected.keys(), names
        for name, value in expected.items():
            assert_same_bits(found[name], value, f"{name} {index}")
