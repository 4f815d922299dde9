"""One rank of three runs out of memory while it measures its gradients: all ranks raise."""

import fsdp2_planted
import pytest


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_fails_before_ranks_meet_makes_all_raise(on_ranks, ranks):
    """At each torch call that makes a tensor; then the step is repeated, with the same bits."""
    first, *others = on_ranks(ranks, fsdp2_planted.planted)
    assert len(first) > 5
    assert all(raised == "Planted: planted" for raised in first)
    for found in others:
        assert len(found) == len(first)
        assert all(raised.startswith("ValueError: ranks that hold parts") for raised in found)
