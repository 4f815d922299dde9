"""What a CUDA graph may capture: the checks, and the tables that it keeps. No GPU is needed."""

import gc
import weakref

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from runs import (
    MASTER,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
    values,
)

from megaopt import FusedAdam
from megaopt.kernels.chunks import table
from megaopt.kernels.chunks.table import DeviceTable, is_capturing
from megaopt.kernels.rules import RULES
from megaopt.kernels.step import kernel
from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.prepare import TritonPreparation

pytestmark = pytest.mark.usefixtures("young_heap")

CPU = torch.device("cpu")
SHAPES = [(3, 4), (5,)]


@pytest.fixture
def launched(monkeypatch):
    """The tensors that each launch of the step's kernel is given, the table of addresses first."""
    found, run = [], kernel.step_kernel

    class Noted:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                found.append([each for each in arguments if isinstance(each, torch.Tensor)])
                run[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(kernel, "step_kernel", Noted())
    return found


@pytest.mark.parametrize("captured", [False, True])
def test_only_cuda_devices_are_asked(monkeypatch, captured):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    assert not is_capturing(CPU)
    assert is_capturing(torch.device("cuda", 0)) is captured


def made(**options):
    return FusedAdam(parameters(SHAPES), **{"capturable": True, "backend": "triton", **options})


def refused(own, message):
    """The step raises, and nothing has changed."""
    before, grads = snapshot(own), [param.grad for param in params_of(own)]
    with pytest.raises(RuntimeError, match=message):
        own.step()
    assert_same(snapshot(own), before)
    assert all(p.grad is grad for p, grad in zip(params_of(own), grads, strict=True))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_without_capturable_is_refused(capturing, steps):
    own = made(capturable=False, **MASTER)
    train(own, steps)
    give_gradients(params_of(own), steps)
    capturing()
    refused(own, r"graph is being captured, and capturable=False: .*pass capturable=True")


def test_the_refusal_comes_before_found_inf_is_waited_for(capturing):
    class Unreadable(torch.Tensor):
        def __bool__(self):
            raise AssertionError("waited for")

    own = made(capturable=False)
    give_gradients(params_of(own), 0)
    own.grad_scale, own.found_inf = torch.ones(()), torch.zeros(()).as_subclass(Unreadable)
    capturing()
    refused(own, "capturable=False")


def test_the_reference_cannot_be_captured(capturing):
    own = made(backend="reference")
    train(own, 1)
    capturing()
    refused(own, r"backend='reference' computes on the host: only backend='triton'")


def test_a_first_step_is_refused(capturing):
    own = made(**MASTER)
    give_gradients(params_of(own), 0)
    capturing()
    refused(own, r"not those of the last step .*no step yet.* take one step like this one before")
    assert len(own.state) == 0
    assert int(own.param_groups[0]["step"]) == 0


CHANGES = {
    "another dtype": lambda params: setattr(params[0], "decoupled_grad", torch.ones(3, 4)),
    "no gradient": lambda params: setattr(params[1], "decoupled_grad", None),
    "not contiguous": lambda params: setattr(params[0], "decoupled_grad", torch.ones(4, 3).t()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_unlike_the_last_one_is_refused(capturing, change):
    own, expected = (made(use_decoupled_grad=True, **MASTER) for _ in range(2))
    for each in (own, expected):
        for param in params_of(each):
            param.decoupled_grad = torch.ones_like(param)
        each.step()
        change(params_of(each))
    capturing()
    for _ in range(2):  # the first refusal must not make the second step look like the last
        refused(own, "are not those of the last step")
    capturing(False)
    own.step()
    expected.step()
    assert_same_run(own, expected)


def test_tensors_that_are_not_contiguous_are_refused(capturing):
    own = FusedAdam([torch.nn.Parameter(values((4, 3), 0).t())], capturable=True, backend="triton")
    params_of(own)[0].grad = values((4, 3), 1).t()
    own.step()
    capturing()
    refused(own, "is not contiguous: only contiguous ones are allowed in a capture")


def test_a_step_like_the_last_one_is_captured_wherever_its_gradients_lie(capturing):
    own, expected = made(**MASTER), made(**MASTER)
    train(own, 1)
    train(expected, 2)
    capturing()
    train(own, 1, first=1)
    assert_same_run(own, expected)


# --- tables


def test_a_captured_table_is_never_written_again(capturing):
    own = DeviceTable(CPU)
    first, second = np.arange(4), np.arange(4) + 10
    eager = own.update(first)
    capturing()
    captured = own.update(second)
    capturing(False)
    assert captured.data_ptr() != eager.data_ptr()
    later = own.update(first)
    assert later.data_ptr() != captured.data_ptr()
    assert_same_bits(captured, torch.from_numpy(second))
    assert_same_bits(later, torch.from_numpy(first))
    kept, gone = weakref.ref(captured), weakref.ref(eager)
    del captured, eager
    gc.collect()
    assert kept() is not None
    assert gone() is None


def test_the_source_of_a_captured_upload_stays(capturing, monkeypatch):
    """The graph copies from the pinned memory again at every replay."""
    sources = []

    def pinned_copy(array, device):
        source = torch.from_numpy(array.copy())
        sources.append(weakref.ref(source))
        return source

    monkeypatch.setattr(table, "pinned_copy", pinned_copy)
    own = DeviceTable(CPU)
    capturing()
    own.update(np.arange(3))
    capturing(False)
    own.update(np.arange(4))
    gc.collect()
    assert_same_bits(sources[0](), torch.arange(3))


def test_an_unchanged_table_that_is_captured_is_kept(capturing):
    own = DeviceTable(CPU)
    eager = own.update(np.arange(4))
    capturing()
    assert own.update(np.arange(4)) is eager
    capturing(False)
    own.update(np.arange(5))
    kept = weakref.ref(eager)
    del eager
    gc.collect()
    assert_same_bits(kept(), torch.arange(4))


def group_of(lr):
    hyper = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
    return {"lr": torch.tensor(lr), "step": torch.zeros(1, dtype=torch.int32), **hyper}


def test_what_a_captured_preparation_reads_and_writes_is_kept(capturing):
    """Groups that are added or loaded later bring new tensors; the graph has the old ones."""
    own = TritonPreparation(RULES["adamw", "torch"], CPU)
    first = group_of(1e-3)
    capturing()
    scalars, _ = own.make([first], 1, Request(), [])
    capturing(False)
    before = scalars.clone()
    own.make([group_of(2e-3), group_of(3e-3)], 2, Request(), [])
    assert_same_bits(scalars, before)
    tables = own.rule.tables(first, CPU)
    read = [weakref.ref(each) for each in (scalars, first["lr"], first["step"], *tables)]
    del scalars, first, tables
    gc.collect()
    assert all(each() is not None for each in read)


def test_an_eager_step_with_other_gradients_leaves_captured_tables_alone(capturing, launched):
    own = made(**MASTER)
    train(own, 1)
    capturing()
    give_gradients(params_of(own), 1)
    kept_alive = [param.grad for param in params_of(own)]
    own.step()
    captured = launched[-1][0]
    capturing(False)
    before = captured.clone()
    assert_same_bits(captured[0], torch.tensor([grad.data_ptr() for grad in kept_alive]))
    train(own, 2, first=2)
    assert launched[-1][0].data_ptr() != captured.data_ptr()
    assert_same_bits(captured, before)


def test_what_a_captured_launch_reads_outlives_steps_of_other_parameters(capturing, launched):
    """A step without one of the gradients has batches of its own; the graph has the old ones."""
    own = made(**MASTER)
    train(own, 1)
    capturing()
    train(own, 1, first=1)
    capturing(False)
    read = launched.pop()
    before, kept = read[0].clone(), [weakref.ref(each) for each in read]
    params_of(own)[1].grad = None
    own.step()
    launched.clear()
    del read
    gc.collect()
    for index, each in enumerate(kept):
        assert each() is not None, index
    assert_same_bits(kept[0](), before)
