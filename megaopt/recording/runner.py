"""Records a process that knows nothing of it, by torch's global hooks."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megaopt.recording.preload import VARIABLE
from megaopt.recording.recorder import Recorder, inner_optimizers, running


class Runner:
    """Finds models and optimizers as they run, and gives them to a recorder.

    A model is an outermost module with parameters whose forward ran with gradients. A step that
    another optimizer's step calls is a part of that one.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen_ids: set[int] = set()
        """The ids of modules whose forwards have been seen, and of those within them."""
        self._optimizers: set[int] = set()
        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before)

    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or id(module) in self._seen_ids:
            return
        if not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return
        self._seen_ids.update(map(id, module.modules()))
        self._recorder.add_model(module)
        # torch has gathered this call's hooks already
        call = sys._getframe(1).f_locals
        self._recorder.batch((call["args"], call["kwargs"]))

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if len(list(running())) <= 1 and id(optimizer) not in self._optimizers:
            self._optimizers.add(id(optimizer))
            for inner in inner_optimizers(optimizer):
                self._recorder.add_optimizer(inner)  # whose own hooks run after the global ones


def start() -> None:
    """Records this process as its environment says."""
    options = json.loads(os.environ[VARIABLE])
    options["keep"] = [range(*bounds) for bounds in options["keep"]]
    Runner(Recorder([], [], **options))
