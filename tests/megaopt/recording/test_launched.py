"""Digests of an optimizer's own launch have the rows that passes have."""

import pytest
from interpreted import interpreted
from kinds import KINDS, made
from runs import give_gradients, params_of

from megaopt import Recorder
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


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_rows_are_the_same(kind, tmp_path):
    launched = made(kind, backend="triton")
    found = recording_of(launched, tmp_path / "a")
    passes = recording_of(made(kind, backend="reference"), tmp_path / "b")
    assert lanes_of(found) == lanes_of(passes)
    assert launched.stepper.quantities == ()


@interpreted
def test_the_launch_sums_up_what_it_can(tmp_path):
    found = recording_of(made("fp32_masters", backend="triton"), tmp_path / "a")
    names = ("grad", "weight", "master", "exp_avg", "exp_avg_sq")
    assert counted(found) == dict.fromkeys(names, False)
    every = recording_of(made("fp32_masters", backend="triton"), tmp_path / "b", every=2)
    assert counted(every).items() >= dict.fromkeys(names, True).items()
