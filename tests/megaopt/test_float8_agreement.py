"""Ranks that share fp8 weights all step, or all raise: none waits for the amaxes for ever."""

import re

import float8_agreement_ranks as attacks
import pytest
from runs import assert_same

MODES = {
    "plain": {},
    "skip": {"nonfinite": "skip"},
    "capturable": {"capturable": True},
}
OTHERS = r"ValueError: ranks that hold parts of the same parameters must step the same .* rank {}, "
OWN = {
    "gradient_of_float64": r"ValueError: parameter 0 of group 0: a gradient of dtype",
    "bad_lr": r"ValueError: group 0: lr must be a",
}
"""What the rank says that had an error anyway."""

modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def assert_refused(found, name=None):
    """On all ranks, and no weight or step count has changed; state that was there neither."""
    for rank, (message, before, after) in enumerate(found):
        odd = rank == len(found) - 1
        expected = OWN.get(name, OTHERS) if odd else OTHERS
        assert re.match(expected.format(rank), message), f"rank {rank}: {message!r}"
        assert_same(after[::2], before[::2], f"rank {rank}")
        assert_same(after[1][: len(before[1])], before[1], f"rank {rank}")


@pytest.mark.parametrize("name", attacks.BUILT)
@pytest.mark.parametrize("world", [2, 3])
def test_optimizers_that_are_not_alike(on_ranks, world, name):
    assert_refused(on_ranks(world, attacks.built, name, {}, {}))


@pytest.mark.parametrize("name", attacks.BETWEEN)
@modes
def test_one_rank_changes_between_steps(on_ranks, options, name):
    assert_refused(on_ranks(3, attacks.between, name, options, {}), name)


@pytest.mark.parametrize("innermost_first", [False, True])
def test_ranks_of_an_outer_group_hear_of_an_inner_one(on_ranks, innermost_first):
    assert_refused(on_ranks(3, attacks.inner_group, innermost_first))


@pytest.mark.parametrize("looks", [False, True], ids=["alike", "one_looks_at_its_state"])
def test_a_first_step_with_lr_0(on_ranks, looks):
    for message, _, after in on_ranks(3, attacks.warm_up, looks):
        assert message == ""
        assert after[2] == [1]


# --- as on a GPU: who has not changed does not wait


@pytest.mark.parametrize("name", attacks.BETWEEN)
@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
def test_the_others_leave_the_step_out_and_raise_in_the_next(on_ranks, name, capturable):
    *others, odd = on_ranks(3, attacks.heard_later, name, {"capturable": capturable}, {})
    assert re.match(OWN.get(name, OTHERS).format(2), odd[0][0])
    assert_same(odd[0][2][::2], odd[0][1][::2])
    for rank, ((message, before, after), (later, _, last)) in enumerate(others):
        assert message == ""
        assert_same(after[:2], before[:2])
        assert re.match(OTHERS.format(rank), later), later
        assert_same(last, before)  # the step count too
