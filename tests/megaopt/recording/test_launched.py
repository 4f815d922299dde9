"""Digests of an optimizer's own launch have the rows that passes have."""

import itertools

import pytest
import torch
from interpreted import interpreted
from kinds import KINDS, made
from runs import give_gradients, parameters, params_of

from megaopt import Recorder
from megaopt.recording.compare import compare
from megaopt.recording.files import Recording


def recording_of(optimizer, out, count=3, **options):
    with Recorder([], optimizer, out, **options):
        for step in range(count):
            give_gradients(params_of(optimizer), step)
            optimizer.step()
    return Recording(out)


def lanes_of(recording):
    return {
        step: {key: (each.digest.low, each.digest.high) for key, each in found.items()}
        for step, found in ((step, recording.digests(step)) for step in recording.steps)
    }


def counted(recording, step=2):
    found = recording.digests(step).items()
    return {quantity: each.digest.nonfinite is not None for (_, quantity), each in found}


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_rows_are_the_same(kind, tmp_path):
    launched = made(kind, backend="triton")
    found = recording_of(launched, tmp_path / "a")
    passes = recording_of(made(kind, backend="reference"), tmp_path / "b")
    assert lanes_of(found) == lanes_of(passes)
    assert launched.stepper.quantities == ()


NAMES = ("grad", "weight", "master", "exp_avg", "exp_avg_sq")


@interpreted
def test_the_launch_sums_up_what_it_can(tmp_path):
    launched, every = (made("fp32_masters", backend="triton") for _ in range(2))
    assert counted(recording_of(launched, tmp_path / "a")) == dict.fromkeys(NAMES, False)
    found = counted(recording_of(every, tmp_path / "b", every=2))
    assert {name: found[name] for name in NAMES} == dict.fromkeys(NAMES, True)


@interpreted
def test_what_others_ask_for_stays(tmp_path):
    optimizer = made("fp32_masters", backend="triton")
    optimizer.record_digests(["weight"])
    assert all(counted(recording_of(optimizer, tmp_path / "a")).values())
    assert [each.quantities for each in optimizer.digests] == [("weight",)]


@interpreted
def test_runs_are_compared_without_counts(tmp_path):
    launched = recording_of(made("fp32_masters", backend="triton"), tmp_path / "a")
    passes = recording_of(made("fp32_masters", backend="reference"), tmp_path / "b")
    other = recording_of(made("fp32_masters", backend="reference", lr=0.02), tmp_path / "c")
    for a, b in itertools.permutations((launched, passes)):
        assert compare(a, b).verdict == "same"
    for a, b in itertools.permutations((launched, other)):
        assert compare(a, b).verdict != "same"


@interpreted
@pytest.mark.parametrize("first", [0, 1024])
def test_a_part_of_which_the_recording_knows_no_place_has_a_pass(first, tmp_path):
    """The recording takes it for a whole one, which begins at 0."""
    found = []
    for backend in ("triton", "reference"):
        params = parameters([(600,)])
        params[0].megaopt_first_element, params[0].megaopt_whole_shape = first, (1624,)
        optimizer = made("fp32_masters", params, backend=backend)
        found.append(recording_of(optimizer, tmp_path / backend))
    assert lanes_of(found[0]) == lanes_of(found[1])
    assert counted(found[0])["weight"] == (first != 0)


@interpreted
def test_gradients_that_a_step_writes(tmp_path):
    found = []
    for backend in ("triton", "reference"):
        optimizer = made("fp32_masters", backend=backend, write_unscaled_grads=True)
        optimizer.grad_scale = torch.full((), 1024.0)
        found.append(recording_of(optimizer, tmp_path / backend))
    assert lanes_of(found[0]) == lanes_of(found[1])
    assert counted(found[0])["grad"]
    assert not counted(found[0])["weight"]


@interpreted
def test_gradients_come_and_go(tmp_path):
    """What a step leaves out has a pass."""
    found = []
    for backend in ("triton", "reference"):
        optimizer = made("fp32_masters", backend=backend)
        with Recorder([], optimizer, tmp_path / backend):
            for step in range(4):
                give_gradients(params_of(optimizer), step)
                if step % 2:
                    params_of(optimizer)[0].grad = None
                optimizer.step()
        found.append(Recording(tmp_path / backend))
    assert lanes_of(found[0]) == lanes_of(found[1])
