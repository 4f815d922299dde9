"""What is done with states in host memory where the card is another device than the host.

`python devices_apart.py`: with fake tensors, which know their device, have no values, and refuse an
operation on tensors of two devices. Prints what went wrong.
"""

import contextlib

import torch
from fake_pinning import FakePinning
from runs import BF16, FORMATS, REMAINDERS
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megaopt import FusedAdam
from megaopt.kernels.host_memory import HostMemory, pinned_by

SHAPE = (128, 64)
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
NAMES = ("remainders", "fp16_masters", "fp8_moments")
KINDS = {**{name: FORMATS[name] for name in NAMES}, "blocks": {**REMAINDERS, **BLOCKS}}
PLACES = ("cpu", {"moments": "cpu"}, {"masters": "cpu"}, None)


class CardPinning(FakePinning):
    """For a device that is no CPU."""

    def serves(self, device):
        return device.type == "card"

    def is_pinned(self, tensor):
        return tensor.device.type == "cpu"


class FakeMemory(HostMemory):
    """Without addresses, which fake tensors have not."""

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)


def misplaced(optimizer, param):
    view = optimizer._owned.view(param)
    return [
        name
        for name, value in optimizer.state[param].items()
        if value is not None and value.device.type != view.state_device(name).type
    ]


def walk(options, place):
    """Everything but a step; yields what is misplaced after each."""
    param = torch.nn.Parameter(torch.empty(SHAPE, dtype=BF16, device="card"))
    optimizer = FusedAdam([param], state_device=place, backend="reference", **options)
    optimizer.initialize_states()
    yield "initialize_states", misplaced(optimizer, param)
    with contextlib.suppress(DataDependentOutputException):  # a fake tensor has no values to ask
        optimizer.refresh_masters()
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        optimizer.get_unscaled_state(param, name)
        for device in ("card", "cpu"):
            optimizer.set_scaled_state(param, name, torch.empty(SHAPE, device=device))
            yield f"set {name} of {device}", misplaced(optimizer, param)
    saved = optimizer.state_dict()
    for device in ("card", "cpu"):
        own = {name: tensor.to(device) for name, tensor in saved["state"][0].items()}
        optimizer.load_state_dict({**saved, "state": {0: own}})
        yield f"load of {device}", misplaced(optimizer, param)
        torchs = {name: torch.empty(SHAPE, device=device) for name in ("exp_avg", "exp_avg_sq")}
        group = {"params": [0], "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
        state = {0: {"step": 3, **torchs}}
        optimizer.load_state_dict({"state": state, "param_groups": [group]})
        yield f"torch's of {device}", misplaced(optimizer, param)
    param.data = param.data.float()  # which takes its values from the master
    optimizer.initialize_states()


def main():
    _setup_privateuseone_for_python_backend("card")
    HostMemory.empty = FakeMemory.empty
    HostMemory.room = lambda self, size: contextlib.nullcontext()
    for name, options in KINDS.items():
        for place in PLACES:
            with pinned_by(CardPinning()), FakeTensorMode(), torch.no_grad():
                for what, wrong in walk(options, place):
                    if wrong:
                        print(f"{name}, {place}, {what}: {wrong}")
    print("done")


if __name__ == "__main__":
    main()
