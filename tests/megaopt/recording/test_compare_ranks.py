"""Blame among ranks and blocks, other layouts, and what differs by nature."""

from shutil import rmtree

import pytest
from written_runs import AT, CALLS, Run

from megaopt.recording.compare import compare
from megaopt.recording.files import Recording, hexadecimal

ALL = None
"""Any rank, name, quantity or call."""


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return Run().write(tmp_path_factory.mktemp("runs") / "a")


def after(step):
    """What follows of any fault: all is different in later steps."""
    return (step + 1, ALL, ALL, ALL, ALL)


LOSS = {"losses": [hexadecimal(9.0)]}
PLANTED = {
    "a block of one rank": (
        Run((AT, 1, "blocks.1", "forward", ALL), (AT, ALL, "head", "forward", ALL)),
        ("forward", "blocks.1", "blocks.1 is the first that differs; that of blocks.0 before it"),
    ),
    "the second call": (
        Run((AT, 0, "embed", "forward", 1), (AT, 0, "blocks.0", "forward", 1)),
        ("forward", "embed", "(call 2 of the step)"),
    ),
    "a later call of an earlier block": (
        Run((AT, 0, "embed", "forward", 1), (AT, 0, "head", "forward", 0)),
        ("forward", "head", "head is the first"),
    ),
    "the loss after the last block": (
        Run((AT, ALL, ALL, "backward", ALL)).saying(AT, 0, **LOSS),
        ("forward", "loss", "after the last block: loss 3.0, and 9.0"),
    ),
    "the backward of a block": (
        Run((AT, ALL, "embed", "backward", ALL)),
        ("backward", "blocks.0", "the gradient of the output of embed is the first"),
    ),
    "the backward of the loss": (
        Run((AT, ALL, ALL, "backward", ALL)),
        ("backward", "loss", "what follows head"),
    ),
    "a gradient within a block": (
        Run((AT, 1, "blocks.1.weight", "local grad", 0), (AT, ALL, ALL, "grad", 0)),
        ("backward", "blocks.1.weight", "before any reduction"),
    ),
    "the reduction": (
        Run((AT, ALL, "head.weight", "grad", 0), (AT, ALL, "embed.weight", "grad", 0)),
        ("reduction", "head.weight", "the ranks' own gradients are equal"),
    ),
    "a replica's gradient": (
        Run((AT, 1, "blocks.0.weight", "grad", 0)),
        ("reduction", "blocks.0.weight", "B's ranks 0 and 1 hold different ones"),
    ),
    "a replica's weight": (
        Run((AT, 1, "blocks.0.weight", "weight", 0), (AT + 1, 1, ALL, "old weight", 0)),
        ("optimizer", "blocks.0.weight", "different on ranks 0 and 1 of one run"),
    ),
    "the optimizer": (
        Run((AT, ALL, "blocks.1.weight", "exp_avg", 0), after(AT)),
        ("optimizer", "blocks.1.weight", "equal: gradient, old weight"),
    ),
    "lr on one rank": (
        Run((AT, 1, ALL, "weight", 0), after(AT)).saying(AT, 1, groups=[{"lr": hexadecimal(0.2)}]),
        ("optimizer", "embed.weight", "lr of group 0 on rank 1: 0.1, and 0.2"),
    ),
    "a write between steps": (
        Run((AT, ALL, "head.weight", "old weight", 0), (AT, ALL, ALL, "forward", ALL)),
        ("outside write", "head.weight", "was written in B after step 2"),
    ),
    "data of one rank": (
        Run((AT, 1, ALL, "forward", ALL)).saying(AT, 1, batch=[f"{5:032x}"] * CALLS),
        ("data", "batch", "on rank 1"),
    ),
    "random state of one rank": (
        Run((AT, 1, ALL, "forward", ALL)).saying(AT, 1, rng={"torch": f"{7:032x}"}),
        ("random state", "torch", "on rank 1 before the forward pass"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_fault_has_its_blame(name, right, tmp_path):
    fault, (kind, where, words) = PLANTED[name]
    found = compare(right, fault.write(tmp_path / "b"))
    assert (found.blame.step, found.blame.kind, found.blame.where) == (AT, kind, where), found.line
    assert words in found.line


def test_both_runs_are_blamed_alike(right, tmp_path):
    """Whichever is A."""
    fault, (kind, where, _) = PLANTED["the reduction"]
    found = compare(fault.write(tmp_path / "b"), right)
    assert (found.blame.kind, found.blame.where) == (kind, where)


def test_counts_that_one_side_or_one_replica_lacks_are_no_difference(right, tmp_path):
    counted = Run().counting(0, 3).write(tmp_path / "a")
    assert compare(counted, right).verdict == compare(right, counted).verdict == "same"
    assert all(each.replicas == () for each in counted.digests(AT).values())


def test_a_write_in_both_runs_is_no_difference(tmp_path):
    write = (AT, ALL, "head.weight", "old weight", 0)
    a, b = (Run(write).write(tmp_path / name) for name in "ab")
    assert compare(a, b).verdict == "same"


def test_a_write_of_the_run_that_counts_is_named(right, tmp_path):
    written = Run((AT, ALL, "head.weight", "old weight", 0)).write(tmp_path / "a")
    assert "was written in A after step 2" in compare(written, right).line


def unseeded(run, state):
    """A run with a generator that nobody seeded and nobody draws from."""
    for step in range(1, 5):
        for rank in range(2):
            run.saying(step, rank, rng={"torch": f"{step:032x}", "python": f"{state:032x}"})
    return run


def test_a_generator_that_nobody_draws_from_is_not_to_blame(tmp_path):
    """As Python's, where a script seeds torch's alone."""
    a, b = (unseeded(Run(), ord(name)).write(tmp_path / name) for name in "ab")
    found = compare(a, b)
    assert found.verdict == "same"
    assert found.notes == ["random states differ from step 1 on: python; no step draws from them"]
    other = unseeded(Run((AT, ALL, "embed", "forward", ALL), after(AT)), 7).write(tmp_path / "c")
    assert compare(a, other).blame.kind == "forward"


# ---- other layouts


def halves(step):
    """Batches of a run whose ranks have other parts of the same samples."""
    numbers = [100 * step + 10 * rank + call for rank in range(2) for call in range(CALLS)]
    return [f"{number:032x}" for number in numbers]


def alone(**numbers):
    """One rank that does what two did."""
    run = Run(world=1)
    for step in range(1, 5):
        said = {"batch": halves(step), "losses": [hexadecimal(step + r / 8) for r in range(2)]}
        run.saying(step, 0, **{**said, **(numbers if step == AT else {})})
    return run


def test_shards_add_up(tmp_path):
    a, b = (Run(shards=True, layout={"fsdp": 2}).write(tmp_path / name) for name in "ab")
    assert compare(a, b).verdict == "same"
    fault = (AT, 1, "blocks.0.weight", "exp_avg", 0)
    found = compare(a, Run(fault, shards=True, layout={"fsdp": 2}).write(tmp_path / "c"))
    assert (found.blame.kind, found.blame.where) == ("optimizer", "blocks.0.weight")


def test_another_number_of_ranks_can_be_the_same(right, tmp_path):
    found = compare(right, alone().write(tmp_path / "b"))
    assert found.verdict == "same"
    assert found.reasons == ["layout.ranks: 2, and 1"]


def test_the_global_batch_is_compared_over_ranks(right, tmp_path):
    other = [*halves(AT)[:-1], f"{1:032x}"]
    found = compare(right, alone(batch=other).write(tmp_path / "b"))
    assert (found.blame.kind, found.tier) == ("data", "bits")
    # one rank's batch beside another's says nothing
    assert not {"data", "loss"} & {each.quantity for each in found.growth}


def with_gradients(layout, *faults, **environment):
    return Run((AT, ALL, ALL, "grad", 0), *faults, layout=layout, **environment)


def test_ranks_that_share_a_model_have_one_batch(right, tmp_path):
    """Two ranks of tensor parallelism, which see the batches of both."""
    both = Run(layout={"tensor_model": 2})
    for step in range(1, 5):
        for rank in range(2):
            both.saying(step, rank, batch=halves(step), losses=[hexadecimal(step + 1 / 16)])
    found = compare(right, both.write(tmp_path / "b"))
    assert found.verdict == "same"


@pytest.mark.parametrize("how", ["layout", "card"])
def test_gradients_that_differ_by_nature_are_said_to(how, right, tmp_path):
    other = with_gradients({"tp": 2}) if how == "layout" else with_gradients({}, card="B200")
    found = compare(right, other.write(tmp_path / "b"))
    assert (found.tier, found.verdict) == ("close", "differ")
    assert found.line.startswith("differ, as may be by nature: step 3: ")
    reason = {"layout": "layout.tp: unset, and 2", "card": "card: H200, and B200"}[how]
    assert found.reasons == [reason]


def test_equal_gradients_hold_the_optimizer_to_bits_in_any_layout(right, tmp_path):
    other = Run((AT, ALL, "embed.weight", "weight", 0), layout={"tp": 2})
    found = compare(right, other.write(tmp_path / "b"))
    assert (found.blame.kind, found.tier) == ("optimizer", "bits")


# ---- repeats


def noisy(by):
    """A repeat whose gradients and weights lie so many units in the last place off."""
    return with_gradients({}).moved((AT, "grad", by), (AT, "weight", by))


@pytest.mark.parametrize(
    ("by", "verdict"), [(3, "as two repeats differ"), (5, "as two repeats differ"), (200, "differ")]
)
def test_repeats_say_how_far_a_run_lies_from_itself(by, verdict, right, tmp_path):
    repeats = [noisy(each).write(tmp_path / str(each)) for each in (4, -4)]
    found = compare(right, noisy(by).write(tmp_path / "b"), noise=repeats)
    assert (found.verdict, found.tier) == (verdict, "close")
    assert found.exceeds_noise == (verdict == "differ")
    words = "as two repeats differ: " if by < 200 else "differ more than repeats do: "
    assert found.line.startswith(words)


def test_what_parts_before_repeats_do_is_more(tmp_path, right):
    late = Run((AT + 1, ALL, ALL, "grad", 0)).moved((AT, "grad", 1000))
    found = compare(
        right, noisy(1).write(tmp_path / "b"), noise=[late.write(tmp_path / "c"), right]
    )
    assert (found.verdict, found.repeats_part) == ("differ", AT + 1)


def test_no_repeat_excuses_other_data(tmp_path, right):
    repeats = [noisy(each).write(tmp_path / str(each)) for each in (4, -4)]
    other = noisy(3).saying(AT, 0, batch=[f"{5:032x}"] * CALLS).write(tmp_path / "b")
    found = compare(right, other, noise=repeats)
    assert (found.verdict, found.blame.kind) == ("differ", "data")
    assert found.line.startswith("differ: step 3: the batch differs on rank 0")


def test_without_repeats_nothing_passes(right, tmp_path):
    assert compare(right, noisy(1).write(tmp_path / "b")).verdict == "differ"


def test_repeats_that_are_equal_excuse_nothing(right, tmp_path):
    repeats = [Run().write(tmp_path / name) for name in "cd"]
    found = compare(right, noisy(1).write(tmp_path / "b"), noise=repeats)
    assert (found.verdict, found.reasons) == ("differ", [])
    assert found.line.startswith("differ more than repeats do: ")


def test_a_missing_rank_is_no_difference(tmp_path):
    whole = Run(shards=True).write(tmp_path / "a")
    Run(shards=True).write(tmp_path / "b")
    rmtree(tmp_path / "b" / "rank-1")
    part = Recording(tmp_path / "b")
    assert compare(whole, part).missing == {"B lacks": ["rank 1"]}
    assert compare(part, Recording(tmp_path / "b")).verdict == "same"
