"""config.optimizer_cuda_graph: Megatron's captured step, with a stand-in for the capture."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from how_to import needs
from megatron_gpt import Case, Trainer, megatron, seen
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt.integration.megatron.adam import ShardAdam

# Megatron's captured optimizer step with a stand-in for the capture, which needs a GPU.

READS = ("_local_scalar_dense", "is_nonzero", "equal")


class Unread(TorchDispatchMode):
    """Raises where the host reads a number that the device computes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        if name in READS:
            raise RuntimeError(f"the host reads a tensor: {name}")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def unread():
    """Within it nothing is read but by the step of the backend that computes on the host."""
    inner = ShardAdam.step

    def step(self, *args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            return inner(self, *args, **kwargs)

    with mock.patch.object(ShardAdam, "step", step), Unread():
        yield


class Replayed:
    """In the place of Megatron's OptimizerCudaGraphWrapper: repeats the step of the second call.

    As a graph would, with the numbers that the host had then, and the tensors of now.
    """

    def __init__(self, optimizer):
        self.step, self.optimizer, self.calls, self.captured = optimizer.step, optimizer, 0, []

    def __call__(self):
        self.calls += 1
        if self.calls == 1:  # a step like it comes before the capture
            return self.step()
        groups = self.optimizer.param_groups
        self.captured = self.captured or [dict(group) for group in groups]
        now = [dict(group) for group in groups]
        try:
            for group, then in zip(groups, self.captured, strict=True):
                group.update(then)
            with unread():
                return self.step()
        finally:
            for group, own in zip(groups, now, strict=True):
                group.update(own)


def norm_of(grads, norm_type=2, grad_stats_parallel_group=None):
    """Megatron's norm, left on the device, as with TransformerEngine's kernels (not in 0.16)."""
    squares = [grad.float().square().sum() for grad in grads] or [torch.zeros(())]
    total = torch.stack(squares).sum().view(1)
    dist.all_reduce(total, group=grad_stats_parallel_group)
    return total.sqrt()


def clip(params, max_norm, total_norm, use_decoupled_grad=False):
    """Megatron's clipping by such a norm."""
    for param in params:
        param.grad.mul_((max_norm / (total_norm + 1.0e-6)).clamp(max=1.0))


@contextlib.contextmanager
def norm_on_device():
    """Within it Megatron leaves the norm on the device."""
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        base, own = megatron("optimizer.optimizer"), megatron("optimizer.clip_grads")
        stack.enter_context(patch(own, "multi_tensor_scale_tensor_impl", clip, create=True))
        stack.enter_context(patch(base, "get_grad_norm_fp32", norm_of))
        stack.enter_context(patch(base, "clip_grad_by_total_norm_fp32", clip))
        yield


def train(case, steps=4):
    """What a rank sees of a run, whose step is repeated where it is ours."""
    with norm_on_device():
        trainer = Trainer(case)
        if case.plug is not None:
            trainer.optimizer.step = Replayed(trainer.optimizer)
        return {"steps": trainer.train(steps), **seen(trainer)}


def save_and_load(case, eager, folder):
    """Loads of a captured step's checkpoint, captured and eager: what each has then."""
    with norm_on_device():
        trainer = Trainer(case)
        trainer.train(2)
        trainer.save(folder, "dp_reshardable")
        found = [trainer.optimizer.state_dict(), seen(trainer)]
        packed = found[0][0] if isinstance(found[0], list) else found[0]
        found[0] = packed["optimizer"]["param_groups"][0]
        for each in (case, eager):
            other = Trainer(each)
            other.load(folder, "dp_reshardable", 2)
            other.train(1)
            found.append(seen(other))
        return found


def error_of(case, changes):
    """The message with which a setting is refused."""
    with contextlib.nullcontext() if "norm" in changes else norm_on_device():
        try:
            Trainer(case)
        except ValueError as error:
            return str(error)
    return "no error"


pytestmark = needs("megatron")
MODES = ("main_shards", "precision_aware")
GRAPH = {"optimizer_cuda_graph": True}


def case_of(mode, **more):
    """Megatron 0.16.1, whose config has no such field, passes nothing on."""
    return Case(plug=mode, config=GRAPH, options={"capturable": True}, **more)


@pytest.mark.parametrize("settings", [{}, {"fp32_grads": False, "overlap": False}], ids=["", "16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_repeated_step_has_the_eager_ones_bits(pools, once, mode, settings):
    settings = {"clip_grad": 0.2, **settings}
    expected = once(2, train, Case(**settings))
    assert pools(2)(train, case_of(mode, **settings)) == expected
    assert len({step[0] for step in expected[0]["steps"]}) == 4


def test_checkpoints_have_numbers_of_the_host(pools, tmp_path):
    case = case_of("main_shards", experts=2)
    eager = Case(plug="main_shards", experts=2)
    for group, *found in pools(2)(save_and_load, case, eager, tmp_path / "a"):
        assert (type(group["step"]), type(group["lr"])) == (int, float)
        assert found[1] == found[2] != found[0]


REFUSED = [
    ({"log_num_zeros_in_grad": True}, "config.log_num_zeros_in_grad must be False"),
    ({"loss_scale": 2.0}, "config.loss_scale must be None"),
    ({"grad_norm_skip_threshold": 3.0}, "config.grad_norm_skip_threshold must be inf"),
    ({"norm": 0}, "config.optimizer_cuda_graph must be False without TransformerEngine"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_the_host_has_to_read_is_refused(pools, changes, message):
    case = Case(plug="main_shards", config={**GRAPH, **changes})
    for error in pools(2)(error_of, case, changes):
        assert error.startswith(message)
