"""An AdamW, and an SGD, that each make one fault on purpose, and recordings of optimizers."""

import torch

from megaopt.recording.audit import audit
from megaopt.recording.files import Recording
from megaopt.recording.recorder import Recorder

SHAPES = ((40, 70), (70,), (3,))


class Model(torch.nn.Module):
    def __init__(self, shapes=SHAPES, dtype=torch.float32, seed=0):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=made) * 0.1 for shape in shapes]
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(v.to(dtype)) for v in values)


def audited(
    folder, model, optimizer, steps=4, scale=1.0, between=None, grads=None, every=1, stepped=None
):
    """Records steps with random gradients and audits them.

    between(step) is called before each, stepped() in the place of the optimizer's step;
    grads(step, param, grad) makes the gradients, of random ones.
    """
    made = torch.Generator().manual_seed(1)
    with Recorder(model, optimizer, folder, every=every):
        for step in range(1, steps + 1):
            for param in model.parameters():
                grad = torch.randn(param.shape, generator=made) * scale
                param.grad = grad.to(param.dtype) if grads is None else grads(step, param, grad)
            if between:
                between(step)
            (stepped or optimizer.step)()
    return audit(Recording(folder))


class AdamW(torch.optim.Optimizer):
    """AdamW with fp32 masters beside 16-bit weights, right but for one fault from step `since`."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-3, decay=0.1, fault="", since=2):
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
        super().__init__(params, {**own, "decoupled_weight_decay": True})
        self.fault, self.since, self.steps, self.following = fault, since, 0, None

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                fault = self.fault if self.steps >= self.since else ""
                if fault != "skipped" or param.dim() > 1:
                    self.update(param, group, fault)

    def update(self, param, group, fault):
        state = self.state[param]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param, dtype=torch.float32))
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            if param.dtype != torch.float32:
                state["master_param"] = param.float()
        state["step"] += 1
        weight = state.get("master_param", param)
        before, count, grad = weight.clone(), state["step"], param.grad.float()
        lr, (beta1, beta2), eps, decay = (group[n] for n in ("lr", "betas", "eps", "weight_decay"))
        if fault == "lr of group":
            lr = self.param_groups[-1]["lr"]
        if fault == "lr of the next step":
            lr = self.following
        if fault == "betas swapped":
            beta1, beta2 = beta2, beta1
        if fault.startswith("step count"):
            count += int(fault[-2:].replace(" ", "")) if fault[-1].isdigit() else 0
        if fault == "clipped twice":
            grad = grad * 0.37
        if fault == "sign of the gradient":
            grad = -grad
        if fault == "L2 decay for decoupled":
            grad = grad + decay * weight
        old = [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        if fault != "exp_avg_sq not updated":
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first, second = old if "moments" in fault else (state["exp_avg"], state["exp_avg_sq"])
        over1, over2 = 1 - beta1**count, 1 - beta2**count
        if fault == "no bias correction":
            over1 = over2 = 1
        below = (second / over2).sqrt() + eps
        if fault == "eps inside the root":
            below = (second / over2 + eps).sqrt()
        if fault == "eps beside the uncorrected root":
            below = (second.sqrt() + eps) / over2**0.5
        if fault not in ("no weight decay", "L2 decay for decoupled"):
            weight.mul_(1 - lr * decay)
        if fault == "weight decay twice":
            weight.mul_(1 - lr * decay)
        step = first / over1 / below * lr
        weight.add_(step if fault == "sign of the update" else -step)
        if weight is not param:
            param.copy_(before if fault == "stale master" else weight)
        if fault == "the weight is not its master's cast":
            param.add_(0.5)


class SGD(torch.optim.SGD):
    """torch's, whose groups say another thing than it does."""

    def __init__(self, params, claims, **options):
        super().__init__(params, **options)
        self.claims, self.done = claims, {name: self.defaults[name] for name in claims}
        self.say(claims)

    def say(self, options):
        for group in self.param_groups:
            group.update(options)

    def step(self):
        self.say(self.done)
        super().step()
        self.say(self.claims)
