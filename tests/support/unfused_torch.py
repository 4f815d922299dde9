"""The regression's plain Adam under the names that torch has for its own."""

import torch

from megaopt.lab.regression.unfused import adam_update

BETAS, EPS = (0.9, 0.95), 1e-8


class UnfusedAdamW(torch.optim.AdamW):
    """The regression's plain Adam in the place of torch's, in the arithmetic of contract ieee."""

    adam_w_mode = True

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
                hypers = {"lr": group["lr"], "weight_decay": group["weight_decay"], "betas": BETAS}
                hypers |= {"step": int(state["step"]), "eps": EPS, "bias_correction": True}
                hypers["adam_w_mode"] = self.adam_w_mode
                adam_update(param, param.grad, state["exp_avg"], state["exp_avg_sq"], hypers)


class UnfusedAdam(UnfusedAdamW):
    adam_w_mode = False
