"""FusedMuon's launches on a GPU become one of a CUDA graph; the bits stay those of launches."""

import copy
import gc

import pytest
import torch
from replays import fill, graph_launches
from runs import BF16, MASTER, assert_same, parameters, snapshot

from megaopt import FusedMuon, Recorder
from megaopt.recording.files import Recording

pytestmark = pytest.mark.gpu

SHAPES = [(96, 40), (64, 200), (200, 64), (2, 24, 72)]
KINDS = {
    "bf16": {},
    "fp16 by shape": {"precision": "fp16"},
    "normuon": {"second_moment": "normuon", "momentum_buffer_dtype": "block_e4m3"},
}
STEPS = 7


def made(**options):
    params = [each.cuda() for each in parameters(SHAPES, BF16)]
    params = [torch.nn.Parameter(each) for each in params]
    for param in params:
        param.grad = torch.empty_like(param)
    return FusedMuon(params, lr=0.02, **MASTER, **options)


@pytest.mark.parametrize("name", KINDS)
def test_steps_have_the_bits_of_those_whose_gradients_move(name):
    """These make every launch; the learning rate changes, and a step is skipped."""
    optimizers = [made(capturable=True, **KINDS[name]) for _ in range(2)]
    for step in range(STEPS):
        for optimizer, moved in zip(optimizers, (False, True), strict=True):
            fill(optimizer, step, moved)
            optimizer.param_groups[0]["lr"].fill_(0.02 / (step + 1))
            optimizer.found_inf = torch.full((1,), float(step == 4), device="cuda")
            optimizer.step()
        assert_same(*map(snapshot, optimizers))


def test_the_third_step_on_is_a_graphs_launch():
    optimizer = made(precision="fp16")
    found = []
    for step in range(5):
        fill(optimizer, step)
        found.append(graph_launches(optimizer.step))
    graphs, kernels = zip(*found, strict=True)
    assert graphs[0] == 0
    assert graphs[3:] == (1, 1)  # memory that the first step took may lie elsewhere in the second
    assert kernels[0] > 20 > kernels[4]


def test_memory_that_moves_again_and_again_is_followed():
    optimizer, other = made(), made()
    for step in range(60):
        fill(optimizer, step, moved=step % 3 == 0)
        fill(other, step, moved=True)
        optimizer.step(), other.step()
    assert_same(snapshot(optimizer), snapshot(other))


def test_a_step_that_the_user_captures_comes_between():
    optimizer, other = made(capturable=True), made(capturable=True)
    graph, number = torch.cuda.CUDAGraph(), 0

    def both(step):
        nonlocal number
        fill(optimizer, number), fill(other, number, moved=True)
        number += 1
        step(), other.step()

    for _ in range(3):
        both(optimizer.step)
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in [graph.replay, optimizer.step, optimizer.step, optimizer.step] * 2:
        both(step)
        assert_same(snapshot(optimizer), snapshot(other))


def test_other_graphs_that_are_garbage_do_not_end_a_capture():
    optimizer, other = made(), made()
    gc.collect()
    thresholds = gc.get_threshold()
    try:
        for step in range(6):
            fill(optimizer, step), fill(other, step, moved=True)
            other.step()
            garbage = [torch.cuda.CUDAGraph(), torch.ones(1, device="cuda")]
            with torch.cuda.graph(garbage[0]):
                garbage[1].mul_(2)
            garbage.append(garbage)
            del garbage
            gc.set_threshold(1)
            optimizer.step()
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
    assert_same(snapshot(optimizer), snapshot(other))


def test_another_stream_follows():
    optimizer, other = made(), made()
    for step in range(8):
        stream = torch.cuda.Stream() if step in (4, 5, 6) else torch.cuda.default_stream()
        fill(optimizer, step), fill(other, step, moved=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            optimizer.step()
        torch.cuda.synchronize()
        other.step()
        assert_same(snapshot(optimizer), snapshot(other))


def test_an_optimizer_is_copied():
    optimizer = made()
    for step in range(4):
        fill(optimizer, step)
        optimizer.step()
    other = copy.deepcopy(optimizer)
    for step in range(4, 8):
        fill(optimizer, step), fill(other, step)
        optimizer.step(), other.step()
        assert_same(snapshot(optimizer), snapshot(other))


def test_recorded_steps_are_those_of_launches(tmp_path):
    found = []
    for moved in (False, True):
        optimizer = made()
        folder = tmp_path / str(moved)
        with Recorder([], optimizer, folder):
            for step in range(6):
                fill(optimizer, step, moved)
                optimizer.step()
        found.append(Recording(folder))
    assert found[0].steps == found[1].steps == [1, 2, 3, 4, 5, 6]
    for step in found[0].steps:
        one, other = (left_by(each, step) for each in found)
        assert one == other
        assert len(one) == 3 * len(SHAPES) + len(SHAPES)


def left_by(recording, step):
    """Digests of gradients, weights, masters and momenta."""
    own = recording.digests(step).items()
    return {key: digest for key, digest in own if not key[1].startswith("old")}
