"""GaLoreAdamW with capturable=True: refresh() before a step makes it the plain one, to the bit."""

import pytest
import torch
from bits import assert_same_bits
from handling import assert_same_numbers, copy_weights, refused
from interpreted import interpreted, marks_of
from runs import (
    BF16,
    FP32,
    assert_same,
    copied,
    give_gradients,
    params_of,
    snapshot,
    through_a_file,
    values,
)

from megaopt import GaLoreAdamW
from megaopt.kernels.galore import kernel

SHAPES = [(24, 10), (6, 30), (9,)]
GAP = 3
RANKED = {"rank": 3, "update_proj_gap": GAP, "scale": 0.25}
RANKED |= {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}
KINDS = {
    "fp32": {"backend": "reference"},
    "masters": {"backend": "reference", "weights": BF16, "dtype": FP32, "stagger": False},
    "hybrid": {"backend": "triton", "weights": BF16, "dtype": FP32, "kernel": "hybrid"},
    "grouped": {"backend": "triton", "weights": BF16, "kernel": "grouped", "precision": "bf16"},
    "fused": {
        "backend": "triton", "weights": BF16, "kernel": "fused", "precision": "bf16",
        "exp_avg_dtype": "bfloat16_stochastic", "dtype": FP32,
    },
    "compiled": {"backend": "triton", "weights": BF16, "kernel": "compiled", "dtype": FP32},
    "torch": {
        "backend": "triton", "weights": BF16, "kernel": "torch", "weight_rounding": "stochastic",
        "exp_avg_dtype": "bfloat16_stochastic", "seed": 7,
    },
    "svd": {"backend": "reference", "refresh": "svd", "proj_type": "left"},
}  # fmt: skip
every_kind = pytest.mark.parametrize(
    "options",
    [
        pytest.param(own, id=kind, marks=marks_of(own) + [pytest.mark.slow] * (kind == "compiled"))
        for kind, own in KINDS.items()
    ],
)


def made(options, capturable=True, device="cpu", shapes=SHAPES):
    options = dict(options)
    dtype = options.pop("weights", FP32)
    params = [torch.nn.Parameter(values(s, i, dtype).to(device)) for i, s in enumerate(shapes)]
    groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:], "rank": 2}]
    return GaLoreAdamW(groups, capturable=capturable, **{**RANKED, **options})


def scaled(optimizer, step):
    """As a GradScaler does; the gradients are so many times too large."""
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.found_inf = torch.tensor(0.0)
    for param in params_of(optimizer):
        param.grad = param.grad * 4.0
    optimizer.step(**step)


@every_kind
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_refresh_and_a_step_are_a_plain_step(options):
    """Under a loss scale and a norm too."""
    found, expected = made(options), made(options, capturable=False)
    for step in range(GAP + 2):
        for optimizer in (found, expected):
            give_gradients(params_of(optimizer), step)
        steps = None if step % 2 else step
        found.refresh(steps)
        if step < GAP:
            found.step()
            expected.step()
        else:
            scaled(found, {"clip_norm": 1.0})
            scaled(expected, {"clip_norm": 1.0})
        assert_same_numbers(found, expected)


def test_a_step_makes_missing_projections_alone():
    optimizer = made(KINDS["fp32"])
    give_gradients(params_of(optimizer), 0)
    optimizer.step()
    first = [copied(optimizer.state[p]["projection"]) for p in params_of(optimizer)[:2]]
    assert all(each.any() for each in first)
    for step in range(1, 2 * GAP):
        give_gradients(params_of(optimizer), step)
        optimizer.step()
    now = [optimizer.state[p]["projection"] for p in params_of(optimizer)[:2]]
    assert_same(now, first)
    optimizer.refresh()  # before the step of number 6: the turn of number 0 alone
    assert not torch.equal(now[0], first[0])
    assert_same_bits(now[1], first[1])
    optimizer.refresh(steps=1)
    assert not torch.equal(now[1], first[1])
    assert [int(group["step"]) for group in optimizer.param_groups] == [2 * GAP] * 2


SKIPPED = {  # what the second matrix's gradient has, under which nonfinite, and found_inf
    "nonfinite": (torch.inf, "skip", None),
    "overflow": (torch.nan, "propagate", 1.0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("refreshes", [True, False], ids=["refresh", "step"])
@pytest.mark.parametrize("kind", ["fp32", pytest.param("hybrid", marks=interpreted)])
@pytest.mark.parametrize(("value", "nonfinite", "found_inf"), SKIPPED.values(), ids=SKIPPED)
def test_a_step_that_is_left_out_makes_no_projection(kind, value, nonfinite, found_inf, refreshes):
    """The next one with gradients that are finite makes it, as if the other had not been."""
    options = {**KINDS[kind], "nonfinite": nonfinite}
    found, expected = made(options), made(options, capturable=False)
    for optimizer in (found, expected):
        optimizer.initialize_states()
    before = snapshot(found)
    give_gradients(params_of(found), 0)
    matrices = params_of(found)[:2]
    for param in matrices if refreshes else matrices[1:]:
        param.grad[2, 3] = value
    if refreshes:  # goes by each gradient alone
        found.refresh(0)
    if found_inf is not None:
        found.grad_scale, found.found_inf = torch.tensor(4.0), torch.tensor(found_inf)
    found.step()
    assert_same(snapshot(found), before)
    if found_inf is not None:
        del found.grad_scale, found.found_inf
    for step in range(2):
        for optimizer in (found, expected):
            give_gradients(params_of(optimizer), step)
        if step:
            found.refresh()
        found.step()
        expected.step()
        assert_same_numbers(found, expected)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)], ids=str)
def test_resumed_is_straight(before, after):
    options = KINDS["masters"]
    runs = [made(options, capturable) for capturable in (before, False)]
    for step in range(2 * GAP):
        for optimizer in runs:
            give_gradients(params_of(optimizer), step)
            if optimizer.options.capturable:
                optimizer.refresh()
            optimizer.step()
        if step == 1:
            resumed = made(options, after)
            copy_weights(runs[0], resumed)
            resumed.load_state_dict(through_a_file(runs[0].state_dict()))
            runs[0] = resumed
    assert_same_numbers(*runs)


def test_a_refresh_refuses_numbers_that_are_none_and_what_a_step_refuses():
    optimizer = made(KINDS["fp32"])
    give_gradients(params_of(optimizer), 0)
    optimizer.refresh()
    for steps in (-1, 1.0, True, "3"):
        with refused(optimizer, "steps must be None or a whole number >= 0, got"):
            optimizer.refresh(steps)
    optimizer.param_groups[1]["update_proj_gap"] = 0
    with refused(optimizer, "group 1: update_proj_gap must be"):
        optimizer.refresh()
    with pytest.raises(RuntimeError, match=r"refresh\(\) is for capturable=True, got .*False"):
        made(KINDS["fp32"], capturable=False).refresh()


# --- captured


def stepped(options, steps=1):
    optimizer = made(options)
    for step in range(steps):
        give_gradients(params_of(optimizer), step)
        optimizer.refresh()
        optimizer.step()
    return optimizer


def assert_refused(optimizer, call, message):
    with refused(optimizer, message, RuntimeError):
        call()


@interpreted
def test_what_a_graph_could_not_repeat_is_refused(capturing):
    hybrid, plain = stepped(KINDS["hybrid"]), stepped(KINDS["torch"])
    capturing()
    assert_refused(
        plain, plain.step, "of galore matrix by matrix .*'torch'.* read numbers on the host"
    )
    assert_refused(hybrid, hybrid.refresh, r"refresh\(\) must be called between replays")
    hybrid.step()
    del hybrid.state[params_of(hybrid)[0]]["projection"]
    reason = "the projection of parameter 0 of group 0 is not made yet: take one step"
    assert_refused(hybrid, hybrid.step, reason)


@interpreted
def test_a_capture_waits_for_gradients_that_make_projections(capturing):
    optimizer = made(KINDS["hybrid"])
    give_gradients(params_of(optimizer), 0)
    params_of(optimizer)[1].grad.zero_()
    optimizer.step()
    capturing()
    assert_refused(optimizer, optimizer.step, "parameter 0 of group 1 is .* finite and not 0")
    capturing(on=False)
    params_of(optimizer)[1].grad.fill_(1)
    optimizer.step()
    capturing()
    optimizer.step()


@interpreted
def test_what_a_graph_reads_stays_as_it_is(capturing, monkeypatch):
    """Tables that a captured launch was given, when eager steps and refreshes follow."""
    optimizer, read, run = stepped(KINDS["hybrid"]), [], kernel.back_project_kernel

    class Noted:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                read.extend(each for each in arguments if isinstance(each, torch.Tensor))
                run[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(kernel, "back_project_kernel", Noted())
    capturing()
    optimizer.step()
    capturing(on=False)
    tables = [each for each in read if each.dtype in (torch.int64, torch.int32)]
    before = copied(tables)
    basis = optimizer.state[params_of(optimizer)[0]]["projection"]
    for step in range(1, GAP + 2):
        give_gradients(params_of(optimizer), step)
        optimizer.refresh()
        optimizer.step()
    assert len(tables) == 4  # two launches: a side each
    assert_same(tables, before)
    assert optimizer.state[params_of(optimizer)[0]]["projection"] is basis


GRAPHED = {
    "masters": {"weights": BF16, "dtype": FP32, "kernel": "hybrid"},
    "drawn": {
        "weights": BF16, "kernel": "hybrid", "weight_rounding": "stochastic", "seed": 7,
        "exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3", "proj_type": "left",
    },
    "svd": {"kernel": "hybrid", "refresh": "svd"},
    "grouped": {"weights": BF16, "dtype": FP32, "kernel": "grouped", "precision": "tf32"},
}  # fmt: skip
LARGE = [(300, 170), (64, 500), (4097,), (90, 90)]


def feed(optimizer, step):
    """Gradients in tensors that stay where they are, another lr."""
    for index, param in enumerate(params_of(optimizer)):
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.copy_(values(param.shape, 1000 * (step % 8) + index).to(param.dtype))
    for index, group in enumerate(optimizer.param_groups):
        group["lr"].fill_(0.01 / (1 + index + step % 5))


@pytest.mark.sample(2)
@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [None, 20.0], ids=str)
@pytest.mark.parametrize("options", GRAPHED.values(), ids=GRAPHED)
def test_a_hundred_replays_with_refreshes_between_are_eager_steps(options, clip_norm):
    found, expected = (made(options, device="cuda", shapes=LARGE) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(2):
            feed(found, step)
            found.refresh()
            found.step(clip_norm=clip_norm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.step(clip_norm=clip_norm)
    for step in range(102):
        feed(expected, step)
        expected.refresh(steps=step)
        expected.step(clip_norm=clip_norm)
        if step > 1:
            feed(found, step)
            found.refresh(None if step % 2 else step)
            graph.replay()
        if step in (1, 2, 3, 50, 101):
            assert_same(snapshot(found), snapshot(expected), f"step {step}")
