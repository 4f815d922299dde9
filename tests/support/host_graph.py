"""A stand-in for torch.cuda.CUDAGraph on a CPU, for loops whose steps are operations of torch."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Noting(TorchDispatchMode):
    """Runs operations, and notes them with what they were given and what they gave."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, found))
        return found


class HostGraph:
    """Repeats the operations of a capture in the capture's memory.

    CUDA's capture runs nothing: `kept` gives the tensors that have their values again behind it.
    """

    kept = staticmethod(list)
    capturing = None
    """The graph that is being captured."""

    def capture_begin(self):
        self.before = [(tensor, tensor.detach().clone()) for tensor in self.kept()]
        HostGraph.capturing, self.mode = self, Noting()
        self.mode.__enter__()

    def capture_end(self):
        self.mode.__exit__(None, None, None)
        HostGraph.capturing = None
        for tensor, value in self.before:
            tensor.data.copy_(value)  # which torch counts as no write

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, found in self.mode.calls:
            again = function(*args, **kwargs)
            for was, now in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                    was.copy_(now)
