"""exp_avg_sq beside fp64, over 100 steps in which the gradients of every other element stop."""

import torch

SHAPE, STEPS, STOP, BETAS = (64, 256), 100, 40, (0.9, 0.95)


def gradients():
    """Of magnitudes that differ by element; from step STOP on those of even columns are 0."""
    generator = torch.Generator().manual_seed(7)
    scale = torch.exp(torch.randn(SHAPE, generator=generator)) * 1e-3
    for step in range(STEPS):
        grad = torch.randn(SHAPE, generator=generator) * scale
        if step >= STOP:
            grad[:, ::2] = 0
        yield grad


def exp_avg_sq_errors(optimizer, param, values):
    """Steps through all; of the columns that stopped, against fp64.

    Returns |mean of exp_avg_sq / exact - 1| and the rms of (root / exact root - 1).
    """
    exact = torch.zeros(SHAPE, dtype=torch.float64)
    for grad in gradients():
        param.grad = grad
        optimizer.step()
        exact = BETAS[1] * exact + (1 - BETAS[1]) * grad.double() ** 2
    ratio = (values().double() / exact)[:, ::2]
    mean, rms = ratio.mean() - 1, (ratio.sqrt() - 1).square().mean().sqrt()
    return abs(float(mean)), float(rms)


def parameter():
    generator = torch.Generator().manual_seed(8)
    return torch.nn.Parameter(torch.randn(SHAPE, generator=generator))


def assert_no_further(ours, theirs, values):
    """Half of the gradients stop: to nearest a peer's exp_avg_sq stands still before it is small.

    ours, theirs: kinds of optimizers; values: of the peer's state of the parameter.
    """
    (own, optimizer), (param, peer) = (
        (each, kind([each], betas=BETAS))
        for kind, each in ((ours, parameter()), (theirs, parameter()))
    )
    read = lambda: optimizer.get_unscaled_state(own, "exp_avg_sq")  # noqa: E731
    found = exp_avg_sq_errors(optimizer, own, read)
    other = exp_avg_sq_errors(peer, param, lambda: values(peer.state[param]))
    assert all(one <= two for one, two in zip(found, other, strict=True)), (found, other)
    assert found[0] < 0.05
