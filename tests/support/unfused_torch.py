"""The regression's plain Adam under the names that torch has for its own."""

from types import SimpleNamespace

import torch

from megaopt.commands.regression.unfused import adam_update, scalars_of

BETAS, EPS = (0.9, 0.95), 1e-8


class UnfusedAdamW(torch.optim.AdamW):
    """The regression's plain Adam in the place of torch's, in the arithmetic of contract ieee."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.config = SimpleNamespace(
            bias_correction=True, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, adam_w_mode=True
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["step"] += 1
                hypers = int(state["step"]), group["lr"], group["weight_decay"]
                scalars = scalars_of(self.config, *hypers)
                adam_update(param, param.grad, state["exp_avg"], state["exp_avg_sq"], scalars)


class UnfusedAdam(UnfusedAdamW):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.config.adam_w_mode = False
