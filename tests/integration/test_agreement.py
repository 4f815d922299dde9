"""Ranks that hold parts of the same parameters all step, or all raise: none waits for ever."""

import re

import agreement_ranks as attacks
import pytest
from agreement_ranks import KINDS
from runs import assert_same

CLIP = {"clip_norm": 1.0}
MODES = {
    "clip_norm": ({}, CLIP),
    "skip": ({"nonfinite": "skip"}, {}),
    "error": ({"nonfinite": "error"}, {}),
    "capturable": ({"capturable": True}, CLIP),
}
SKIP = {"nonfinite": "skip"}
OTHERS = (
    r"ValueError: ranks that hold parts of the same parameters must step the same, got .* on "
    r"ranks? .*{last}\b.* \(this is rank {rank}\)"
)
OWN = {
    "gradient_of_float64": r"ValueError: parameter \d of group 0: the gradient's dtype must",
    "bad_lr": r"ValueError: group 0: lr must be a",
}
"""What the rank says that had an error anyway."""

modes = pytest.mark.parametrize(("options", "step"), MODES.values(), ids=MODES)
worlds = pytest.mark.parametrize("world", [2, 3])


def assert_refused(found, name=None):
    """On all ranks, and no weight or step count has changed; state that was there neither."""
    for rank, (message, before, after) in enumerate(found):
        odd = rank == len(found) - 1
        expected = OWN.get(name, OTHERS) if odd else OTHERS
        assert re.match(expected.format(rank=rank, last=len(found) - 1), message), (
            f"rank {rank}: {message!r}"
        )
        assert_same(after[::2], before[::2], f"rank {rank}")
        assert_same(after[1][: len(before[1])], before[1], f"rank {rank}")


@pytest.mark.parametrize("name", KINDS["DTensors"].built)
@worlds
@pytest.mark.sample(2)
def test_optimizers_that_are_not_alike(on_ranks, world, name):
    assert_refused(on_ranks(world, attacks.built, "DTensors", name, {}, CLIP))


@pytest.mark.parametrize("name", KINDS["fp8"].built)
@worlds
def test_optimizers_of_fp8_weights_that_are_not_alike(on_ranks, world, name):
    assert_refused(on_ranks(world, attacks.built, "fp8", name, {}, {}))


def test_a_rank_that_is_the_mean_of_the_others_raises_too(on_ranks):
    assert_refused(on_ranks(3, attacks.each_another))


@modes
def test_another_order_is_refused_wherever_there_is_a_norm(on_ranks, options, step):
    assert_refused(on_ranks(2, attacks.built, "DTensors", "other_order", options, step))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KINDS["DTensors"].between)
@modes
def test_one_rank_changes_between_steps(on_ranks, options, step, name):
    assert_refused(on_ranks(3, attacks.between, "DTensors", name, options, step), name)


@pytest.mark.parametrize("name", KINDS["fp8"].between)
@pytest.mark.parametrize("options", [{}, SKIP, {"capturable": True}], ids=str)
def test_one_rank_changes_fp8_weights_between_steps(on_ranks, options, name):
    assert_refused(on_ranks(3, attacks.between, "fp8", name, options, {}), name)


@pytest.mark.parametrize("name", KINDS["both"].between)
def test_ranks_meet_once_for_dtensors_and_once_for_fp8_weights(on_ranks, name):
    assert_refused(on_ranks(2, attacks.between, "both", name, SKIP, {}), name)


def test_kernels_are_asked_too(on_ranks):
    for name in ("no_gradient", "gradient_of_float64"):
        found = on_ranks(2, attacks.between, "DTensors", name, {"backend": "triton"}, CLIP)
        assert_refused(found, name)


@pytest.mark.parametrize("innermost_first", [False, True])
def test_ranks_of_an_outer_group_hear_of_an_inner_one(on_ranks, innermost_first):
    assert_refused(on_ranks(3, attacks.inner_group, innermost_first))


DIFFER = "ValueError: ranks that hold parts of the same parameters must step the same, got "
SAID = {
    "clip_norm": (None, 0, {"clip_norm": 2.0}, "clip_norm: 1.0 on ranks 0 to 1, 2.0 on rank 2"),
    "lr": (
        attacks.edited, {"lr": 0.5}, {}, "lr of group 0: 0.01 on ranks 0 to 1, 0.5 on rank 2"
    ),
    "lr, on two": (
        attacks.edited, {"lr": 0.5}, {"odd": (0, 2)},
        "lr of group 0: 0.5 on ranks 0, 2, 0.01 on rank 1",
    ),
    "betas": (
        attacks.edited, {"betas": (0.9, 0.95)}, {},
        "betas of group 0: (0.9, 0.999) on ranks 0 to 1, (0.9, 0.95) on rank 2",
    ),
    "step": (attacks.edited, {"step": 7}, {}, "step of group 0: 1 on ranks 0 to 1, 7 on rank 2"),
    "gradient": (
        attacks.without_gradient, 1, {},
        "gradient of parameter 'bias': one, formats ('float32', 'float32', 'float32', None, None) "
        "on ranks 0 to 1, none on rank 2",
    ),
    "order": (
        attacks.turned, None, {},
        "the parameter at place 0: parameter 'embedding' on ranks 0 to 1, ",
    ),
    "an error": (
        attacks.edited, {"lr": "x"}, {},
        "ValueError: group 0: lr must be a finite number >= 0 in fp32, got 'x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_differs_is_said_with_ranks_and_values(on_ranks, name):
    edit, value, more, told = SAID[name]
    for rank, (error, after, before) in enumerate(
        on_ranks(3, attacks.said_of, edit, value, **more)
    ):
        if name == "an error" and rank == 2:
            assert error.startswith(told)
        else:
            assert told in error
            assert error.startswith(DIFFER)
            assert error.endswith(f"(this is rank {rank})")
            assert len(error) < 400
        assert_same(after, before)


def test_a_rank_with_other_numbers_is_heard_of_without_waiting(on_ranks):
    """In the next step."""
    given = attacks.edited, {"lr": 0.5}
    for rank, (error, after, before) in enumerate(
        on_ranks(3, attacks.said_of, *given, waits=False)
    ):
        assert "lr of group 0: 0.01 on ranks 0 to 1, 0.5 on rank 2" in error
        assert f"(this is rank {rank})" in error
        assert_same(after, before)


def test_ranks_that_wait_for_long_say_for_whom(on_ranks):
    found = on_ranks(3, attacks.waits_told, 1, 2.0)
    for rank, other in ((0, 2), (2, 0)):
        ((level, told),) = found[rank]
        assert level == "WARNING"
        assert re.match(rf"rank {rank} has waited \d+ s for ranks .* in step 2, which hold", told)
        assert f"rank {other} waiting too; not there yet: rank 1" in told
    assert found[1] == []


def test_ranks_that_wait_for_one_that_raised_say_its_error(on_ranks):
    """In the middle of a step, where the others of a GPU hear nothing of it."""
    found = on_ranks(3, attacks.waits_told, 1, 2.0, raises=True)
    for rank in (0, 2):
        ((_, told),) = found[rank]
        assert told.endswith(
            "not there yet: rank 1; rank 1 raised RuntimeError: no memory in step 2"
        )


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


def assert_heard_later(found, name, options):
    """The others left the step out, and raise in what comes next."""
    *others, odd = found
    assert re.match(OWN.get(name, OTHERS).format(rank=len(others), last=len(others)), odd[0][0])
    assert_same(odd[0][2][::2], odd[0][1][::2])
    counted = 0 if options.get("capturable") else 1  # the host's count, until it hears
    for rank, ((message, before, after), (later, _, last)) in enumerate(others):
        assert message == ""
        assert_same(after[:2], before[:2])
        assert [n - counted for n in after[2]] == before[2]
        assert re.match(OTHERS.format(rank=rank, last=len(others)), later), later
        assert_same(last, before)


@pytest.mark.parametrize("by", ["step", "state_dict"])
@pytest.mark.parametrize("name", KINDS["DTensors"].between)
def test_the_others_leave_the_step_out_and_raise_in_the_next(on_ranks, name, by):
    found = on_ranks(3, attacks.heard_later, "DTensors", name, {}, CLIP, by)
    assert_heard_later(found, name, {})


@pytest.mark.parametrize("name", KINDS["fp8"].between)
@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["host", "capturable"])
def test_the_others_leave_the_step_of_fp8_weights_out(on_ranks, options, name):
    found = on_ranks(3, attacks.heard_later, "fp8", name, options, {}, "step")
    assert_heard_later(found, name, options)


def test_the_device_counts_no_step_that_is_left_out(on_ranks):
    options = {"capturable": True}
    found = on_ranks(2, attacks.heard_later, "DTensors", "no_gradient", options, CLIP, "step")
    assert_heard_later(found, "no_gradient", options)


@pytest.mark.parametrize("name", ["no_gradient", "of_a_shard", "bad_lr"])
def test_the_others_leave_the_step_of_dtensors_and_fp8_weights_out(on_ranks, name):
    options = {**SKIP, "capturable": True}
    found = on_ranks(2, attacks.heard_later, "both", name, options, {}, "step")
    assert_heard_later(found, name, options)


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


@pytest.mark.parametrize("looks", [False, True], ids=["alike", "one_looks_at_its_state"])
def test_a_first_step_of_fp8_weights_with_lr_0_is_a_step(on_ranks, looks):
    for message, _, after in on_ranks(3, attacks.warm_up_fp8, looks):
        assert message == ""
        assert after[2] == [1]
