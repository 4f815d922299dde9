"""Ranks that hold shards of the same DTensors all step, or all raise: none waits for ever."""

import re

import agreement_ranks as attacks
import pytest
from runs import assert_same

CLIP = {"clip_norm": 1.0}
MODES = {
    "clip_norm": ({}, CLIP),
    "skip": ({"nonfinite": "skip"}, {}),
    "error": ({"nonfinite": "error"}, {}),
    "capturable": ({"capturable": True}, CLIP),
}
WORLDS = [2, 3]
OTHERS = r"ValueError: ranks that hold parts of the same parameters must step the same .* rank {}, "
OWN = {
    "gradient_of_float64": r"ValueError: parameter 1 of group 0: a gradient of dtype",
    "bad_lr": r"ValueError: group 0: lr must be a",
}
"""What the rank says that had an error anyway."""

modes = pytest.mark.parametrize(("options", "step"), MODES.values(), ids=MODES)
worlds = pytest.mark.parametrize("world", WORLDS)


def assert_refused(found, name=None):
    """On all ranks, and no weight or step count has changed; state that was there neither."""
    for rank, (message, before, after) in enumerate(found):
        odd = rank == len(found) - 1
        expected = OWN.get(name, OTHERS) if odd else OTHERS
        assert re.match(expected.format(rank), message), f"rank {rank}: {message!r}"
        assert_same(after[::2], before[::2], f"rank {rank}")
        assert_same(after[1][: len(before[1])], before[1], f"rank {rank}")


@pytest.mark.parametrize("name", attacks.BUILT)
@worlds
def test_optimizers_that_are_not_alike(on_ranks, world, name):
    assert_refused(on_ranks(world, attacks.built, name, {}, CLIP))


def test_a_rank_that_is_the_mean_of_the_others_raises_too(on_ranks):
    assert_refused(on_ranks(3, attacks.each_another))


@modes
def test_another_order_is_refused_wherever_there_is_a_norm(on_ranks, options, step):
    assert_refused(on_ranks(2, attacks.built, "other_order", options, step))


@pytest.mark.parametrize("name", attacks.BETWEEN)
@modes
def test_one_rank_changes_between_steps(on_ranks, options, step, name):
    assert_refused(on_ranks(3, attacks.between, name, options, step), name)


def test_kernels_are_asked_too(on_ranks):
    for name in ("no_gradient", "gradient_of_float64"):
        assert_refused(on_ranks(2, attacks.between, name, {"backend": "triton"}, CLIP), name)


def test_another_clip_norm(on_ranks):
    assert_refused(on_ranks(2, attacks.another_clip_norm))


@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
@worlds
def test_an_overflow_that_one_rank_alone_knows_of_skips_on_all(on_ranks, world, capturable):
    found = on_ranks(world, attacks.overflow_on_one, {"capturable": capturable}, CLIP)
    for message, before, after in found:
        assert message == ""
        assert_same(after, before)


@pytest.mark.parametrize("name", ["other_order", "no_gradient", "remainders"])
def test_modules_of_fsdp2(on_ranks, name):
    assert_refused(on_ranks(2, attacks.modules, name, CLIP))


@pytest.mark.parametrize("name", ["all_first", "no_sum_of_all"])
def test_ranks_that_do_not_all_meet_in_the_first_sum(on_ranks, name):
    assert_refused(on_ranks(4, attacks.two_meshes, name))


# --- as on a GPU: who has not changed does not wait


@pytest.mark.parametrize("by", ["step", "state_dict"])
@pytest.mark.parametrize("name", attacks.BETWEEN)
def test_the_others_leave_the_step_out_and_raise_in_the_next(on_ranks, name, by):
    *others, odd = on_ranks(3, attacks.heard_later, name, {}, CLIP, by)
    assert re.match(OWN.get(name, OTHERS).format(2), odd[0][0])
    assert_same(odd[0][2][::2], odd[0][1][::2])
    for rank, ((message, before, after), (later, _, last)) in enumerate(others):
        assert message == ""
        assert_same(after[:2], before[:2])
        assert re.match(OTHERS.format(rank), later), later
        assert_same(last, before)  # the step count too


def test_the_device_counts_no_step_that_is_left_out(on_ranks):
    *others, _ = on_ranks(2, attacks.heard_later, "no_gradient", {"capturable": True}, CLIP, "step")
    for (message, before, after), (later, *_) in others:
        assert message == ""
        assert_same(after, before)
        assert re.match(OTHERS.format(0), later)


@modes
def test_steps_of_ranks_that_agree_are_the_same_without_waiting(on_ranks, options, step):
    expected = on_ranks(1, attacks.as_on_a_gpu, options, step)[0]
    for found in on_ranks(3, attacks.as_on_a_gpu, options, step):
        assert_same(found, expected)


# --- the first step, with lr=0


@pytest.mark.parametrize("zeros", [False, True], ids=["gradients", "zeros"])
@pytest.mark.parametrize("name", attacks.WARM)
def test_a_first_step_with_lr_0_is_counted_on_all_ranks_or_on_none(on_ranks, name, zeros):
    # a state that one rank has, or a gradient that it lacks, is no question for states
    counted = not (zeros and name == "looked_at")
    for found in on_ranks(3, attacks.warm_up, name, zeros):
        assert [message for message, _, _ in found] == ["", ""]
        assert [after[2] for _, _, after in found] == [[counted], [counted + 1]]


def test_torch_asks_for_the_states_at_which_one_rank_has_looked(on_ranks):
    for message, before, after, names in on_ranks(2, attacks.checkpointed):
        assert message == ""
        assert_same(after[::2], before[::2])
        assert names == [["exp_avg", "exp_avg_sq"]] * 5
