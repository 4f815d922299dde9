"""A captured step, replayed, beside an eager run without capturable: the same bits."""

import pytest
import torch
from bits import assert_same_bits
from runs import FORMATS, MASTER, REMAINDERS, assert_same, params_of, snapshot, values

from megaopt import FusedAdam

pytestmark = pytest.mark.gpu

SHAPES = [(3, 4), (), (0,), (5,), (5000,), (2048,), (64, 128)]
DRAWING = {
    "stochastic": {
        "weight_rounding": "stochastic",
        "exp_avg_dtype": "bfloat16_stochastic",
        "exp_avg_sq_dtype": "bfloat16_stochastic",
    },
    **{
        name: {"master_weights": True, "master_weight_dtype": name}
        for name in ("remainder8_stochastic", "kahan_stochastic")
    },
    "blocks": {**MASTER, "exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"},
}
BANK = 8
CLIP_NORM = 20.0  # of gradients whose norm is 10 to 170


def made(options, capturable, **others):
    params = [
        torch.nn.Parameter(values(shape, index).to(torch.bfloat16).cuda())
        for index, shape in enumerate(SHAPES)
    ]
    groups = [{"params": params[:3], "lr": 0.01}, {"params": params[3:], "weight_decay": 0.1}]
    return FusedAdam(groups, capturable=capturable, **others, **options)


def gradients(step):
    """The same for both runs; every eighth step's again, twice as large in odd ones."""
    factor = 2.0 if step % 2 else 0.25
    return [
        (values(shape, 100 * (step % BANK) + index) * factor).to(torch.bfloat16)
        for index, shape in enumerate(SHAPES)
    ]


@pytest.fixture(scope="module")
def bank():
    return [[grad.cuda() for grad in gradients(step)] for step in range(BANK)]


def give(optimizer, grads):
    """Copied into tensors that stay where they are, as a graph needs them."""
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.copy_(grad)


def warm_up(step, count=2):
    """On a side stream, as torch asks for before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(count):
            step(index)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def assert_same_numbers(found, expected, what):
    """Weights, states, step counts; lr in fp32."""
    for part in ("weights", "states"):
        assert_same(snapshot(found)[part], snapshot(expected)[part], f"{what}, {part}")
    for ours, theirs in zip(found.param_groups, expected.param_groups, strict=True):
        assert int(ours["step"]) == theirs["step"], what
        assert_same_bits(ours["lr"].cpu(), torch.tensor(float(theirs["lr"])), f"{what}, lr")


def set_controls(optimizer, scale, overflow):
    """As a GradScaler does, in tensors that stay where they are."""
    if not hasattr(optimizer, "grad_scale"):
        optimizer.grad_scale = torch.ones((), device="cuda")
        optimizer.found_inf = torch.zeros((), device="cuda")
    optimizer.grad_scale.fill_(scale)
    optimizer.found_inf.fill_(float(overflow))


def feed(optimizer, bank, step):
    """Everything that a step reads and that changes from step to step."""
    give(optimizer, bank[step % BANK])
    set_controls(optimizer, 2.0 ** (step % 3), overflow=step % 50 == 37)
    for index, group in enumerate(optimizer.param_groups):
        lr = 0.01 / (1 + index + step % 17)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@pytest.mark.parametrize(
    "options", [*FORMATS.values(), *DRAWING.values()], ids=[*FORMATS, *DRAWING]
)
def test_a_thousand_replays_are_a_thousand_eager_steps(options, bank):
    found, expected = made(options, True), made(options, False)

    def eager(optimizer, step):
        feed(optimizer, bank, step)
        optimizer.step(clip_norm=CLIP_NORM)

    warm_up(lambda step: eager(found, step))
    for step in range(2):
        eager(expected, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.step(clip_norm=CLIP_NORM)
    assert_same_numbers(found, expected, "after the capture, which runs nothing")
    for step in range(2, 1002):
        feed(found, bank, step)
        graph.replay()
        eager(expected, step)
        if step % 200 == 37 or step == 1001:  # an overflow, and the last one
            assert_same_numbers(found, expected, f"step {step}")
    assert_same_bits(found.grad_norm, expected.grad_norm)
    assert 0 < expected.param_groups[0]["step"] == 1002 - 20


def test_memory_can_be_pinned_after_a_capture_on_the_stream_of_the_steps_before(bank):
    """The capture makes tables anew: the old ones' pinned memory is freed on that stream."""
    found, stream = made(MASTER, True), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(3):
            give(found, bank[step])
            found.step()
        for param in params_of(found):
            param.grad = param.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found.step()
    torch.cuda.synchronize()
    assert torch.ones(5).pin_memory().is_pinned()
    graph.replay()
    expected = made(MASTER, False)
    for step in (0, 1, 2, 2):
        give(expected, bank[step])
        expected.step()
    assert_same_numbers(found, expected, "after a replay")


@pytest.mark.parametrize("options", [MASTER, FORMATS["fp16_master_bf16_fp16"]], ids=["32", "16"])
def test_a_plain_step_without_controls(options, bank):
    """Another kernel: nothing is unscaled, clipped or skipped in it."""
    found, expected = made(options, True), made(options, False)

    def eager(optimizer, step):
        give(optimizer, bank[step % BANK])
        optimizer.step()

    warm_up(lambda step: eager(found, step))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.step()
    for step in range(100):
        if step > 1:
            give(found, bank[step % BANK])
            graph.replay()
        eager(expected, step)
    assert_same_numbers(found, expected, "the end")


def test_nonfinite_gradients_skip_replays(bank):
    found, expected = made(REMAINDERS, True, nonfinite="skip"), made(REMAINDERS, False)
    give(found, bank[0])
    warm_up(lambda step: found.step())
    give(expected, bank[0])
    expected.step()
    expected.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.step()
    for step in range(20):
        give(found, bank[step % BANK])
        if step % 3 == 1:
            params_of(found)[4].grad[4999] = float("nan")
        graph.replay()
        if step % 3 != 1:
            give(expected, bank[step % BANK])
            expected.step()
    assert_same_numbers(found, expected, "the end")


def test_gradients_in_the_graphs_own_memory(bank):
    """A captured backward allocates them there: at other addresses than those of the warm-up."""
    found, expected = made(MASTER, True), made(MASTER, False)
    inputs = [torch.zeros_like(param) for param in params_of(found)]

    def backward_and_step(optimizer):
        # elementwise, so that the gradient is the input, whatever the order of a sum
        products = zip(params_of(optimizer), inputs, strict=True)
        sum((param * each).float().sum() for param, each in products).backward()
        optimizer.step(clip_norm=CLIP_NORM)

    def fill(step):
        for each, grad in zip(inputs, bank[step % BANK], strict=True):
            each.copy_(grad)

    def eager(optimizer, step):
        fill(step)
        optimizer.zero_grad()
        backward_and_step(optimizer)

    warm_up(lambda step: eager(found, step))
    found.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward_and_step(found)
    for step in range(100):
        eager(expected, step)
        if step > 1:
            fill(step)
            graph.replay()
    assert_same_numbers(found, expected, "the end")


def test_eager_steps_between_replays_do_not_disturb_the_graph(bank):
    found, expected = made(MASTER, True), made(MASTER, False)
    give(found, bank[0])
    warm_up(lambda step: found.step())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.step()
    static = [param.grad for param in params_of(found)]
    give(expected, bank[0])
    expected.step()
    expected.step()
    for step in range(20):
        for target, grad in zip(static, bank[step % BANK], strict=True):
            target.copy_(grad)
        graph.replay()
        give(expected, bank[step % BANK])
        expected.step()
        others = bank[(step + 3) % BANK]
        for param, grad in zip(params_of(found), others, strict=True):
            param.grad = grad.clone()
        found.step()
        give(expected, others)
        expected.step()
    assert_same_numbers(found, expected, "the end")
