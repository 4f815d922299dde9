"""The order of blame: who is to blame for what differs first between two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from megaopt.recording.files import LANES, Key, Summed
from megaopt.recording.pair import Pair, bits_of, floats, is_old, shown

BEGIN = ("start", "outside write", "between")
"""Kinds of blame that precede a step."""
NOT_NUMBERS = ("foreach", "fused", "capturable", "differentiable", "backend", "single")
"""Options that choose how a step is computed, not its numbers."""


class Blame(NamedTuple):
    """The blame for the first difference."""

    step: int
    kind: str
    """"start", "outside write", "data", "random state", "forward", "backward", "reduction",
    "gradient", "optimizer", "length"; "between" where it lies between recorded steps."""
    where: str
    """The tensor or the module, first in the order in which they are computed; or "loss"."""
    quantity: str
    text: str
    """A sentence."""
    tensors: tuple[Key, ...] = ()
    """All tensors of the step that differ in what is to blame, in that order."""
    unrecorded: tuple[str, ...] = ()
    """Quantities that could be to blame instead, and are not in both recordings, in words."""


def first_blame(pair: Pair) -> Blame | None:
    """Returns the blame for the first step that differs; None where none does."""
    for step in pair.steps:
        if pair.is_alike(step):
            continue
        blame = next(filter(None, (check(pair, step) for check in CHECKS)), None)
        if blame is not None:
            # old weights without a digest may have samples
            if blame.kind not in BEGIN:
                blame = _begin(pair, step, by_samples=True) or blame
            return blame._replace(unrecorded=_unrecorded(pair, blame))

    # no step differs: one run may have ended before the other
    last = [side.run.steps[-1] for side in pair.both]
    every = max(side.run.run.get("every") or 1 for side in pair.both)
    if abs(last[0] - last[1]) < every:
        return None
    text = f"A ends after step {last[0]}, B after step {last[1]}; until then both are equal"
    return Blame(min(last), "length", "", "", text)


def _unrecorded(pair: Pair, blame: Blame) -> tuple[str, ...]:
    """Returns what precedes a blame in the order of blame, and is not in both recordings."""
    step, names = blame.step, list[str]()
    if step - 1 not in pair.steps and step != pair.steps[0]:
        names.append(f"steps {max(s for s in pair.steps if s < step) + 1} to {step - 1}")
    elif blame.kind == "between":
        names.append(f"what step {step - 1} left")
    # a step with equal inputs needs no more
    inputs = pair.records("grad", step) and _knows_before(pair, step)
    if blame.kind in BEGIN or (blame.kind == "optimizer" and inputs):
        return tuple(names)
    for quantity, name, is_recorded in PRECEDING:
        if quantity == blame.quantity:
            break
        if not is_recorded(pair, step):
            names.append(name)
    return tuple(names)


def _and_options(pair: Pair, step: int) -> str:
    return "".join(f"; {difference}" for difference in pair.options(step))


# ---- the order of blame: each check looks at one step


def _begin(pair: Pair, step: int, by_samples: bool = False) -> Blame | None:
    """Checks weights and state before the step, by digests or by samples.

    It compares what differs with what the step before left.
    """
    before: list[Mapping[Key, Any]]
    before = [side.old_samples(step) if by_samples else side.before(step) for side in pair.both]
    keys = pair.ordered(pair.differing(*before))
    if not keys:
        return None
    left: list[Mapping[Key, Any]] = [side.after(step - 1) for side in pair.both]
    if by_samples:
        samples = (side.samples(step - 1).items() for side in pair.both)
        left = [{key: (held, bits.tobytes()) for key, (held, bits) in run} for run in samples]
    key, (name, quantity) = keys[0], keys[0]
    # runs in which the value is another than the step before left
    runs = (run for run in zip("AB", left, before, strict=True) if key in run[1])
    written = [run for run, old, now in runs if bits_of(old[key]) != bits_of(now[key])]
    # the first step has nothing before it; later ones tell a write from what no step showed
    if step == pair.steps[0]:
        kind, text = "start", f"the runs begin with another {quantity} of {name}"
    elif written:
        kind = "outside write"
        text = (
            f"{quantity} of {name} was written in {' and '.join(written)} after step {step - 1}, "
            "by something else than the optimizer"
        )
    else:
        kind, text = "between", f"seen first in the old {quantity} of {name}"
    return Blame(step, kind, name, quantity, text, tuple(keys))


def _data(pair: Pair, step: int) -> Blame | None:
    """Checks the batch; blames a generator instead that differs by then."""
    # the batch may differ because a generator parted earlier, with no other sign of it
    blame = _batch(pair, step)
    steps = (earlier_step for earlier_step in pair.steps if blame and earlier_step <= step)
    parted = next(filter(None, (_random_state(pair, earlier_step) for earlier_step in steps)), None)
    if parted is None:
        return blame
    too = "too: one may have made the other differ" if parted.step == step else f"at step {step}"
    return parted._replace(text=f"{parted.text}; the batch differs {too}")


def _batch(pair: Pair, step: int) -> Blame | None:
    if not pair.says("batch", step):
        return None
    # of each rank the digests of its calls, in order
    a, b = (side.scalars(step, "batch") for side in pair.both)
    # ranks cut the global batch differently: only the sum of all digests means the same. Ranks of
    # one model may see one batch: a sum of every rank's, and one of equal lists once
    if not pair.alike_layout:
        sums, sums_b = (
            {_sum_of(batches), _sum_of({tuple(batch or ()) for batch in batches})}
            for batches in (a, b)
        )
        text = "the batch of all ranks together differs"
        return None if sums & sums_b else Blame(step, "data", "batch", "batch", text)
    if a == b:
        return None
    rank = next(i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y)
    where = f" on rank {rank}" if len(a) > 1 else ""
    counts = [len(batches[rank] or ()) if len(batches) > rank else 0 for batches in (a, b)]
    calls = " ({} calls of the model, and {})".format(*counts) if len({*counts}) > 1 else ""
    return Blame(step, "data", "batch", "batch", f"the batch differs{where}{calls}")


def _sum_of(batches: Iterable[Sequence[str] | None]) -> tuple[int, int]:
    """Returns the digest of a whole global batch, whatever its parts."""
    # two lanes of 64 bits each, added without a carry between them, as digests of parts are
    digests = [int(digest, 16) for batch in batches for digest in batch or ()]
    low = sum(digest % LANES for digest in digests) % LANES
    return low, sum(digest // LANES for digest in digests) % LANES


def _random_state(pair: Pair, step: int) -> Blame | None:
    """Checks generators that are drawn from: one that nobody reads has no part in a run."""
    drawn = pair.drawn(step)
    for rank, name in pair.generators_apart(step):
        if name in drawn:
            where = f" on rank {rank}" if rank else ""
            text = f"the random state of {name} differs{where} before the forward pass"
            return Blame(step, "random state", name, "rng", text)
    return None


def _forward(pair: Pair, step: int) -> Blame | None:
    """Checks the model's outputs; blames a random state instead that explains them."""
    # modules that both recorded, in the order of the forward pass
    first_rows = _first_rows(pair, step, "forward", pair.modules(step))
    if first_rows:
        name, call, keys = first_rows
        order = pair.modules(step)
        ahead = [module for module in order if order[module] < order.get(name, 0)]
        before = f"; that of {ahead[-1]} before it is equal" if ahead else ""
        text = f"the output of {name} is the first that differs{call}{before}"
        blame = Blame(step, "forward", name, "forward", text, keys)
        return _random_state(pair, step) or blame

    # no output differs, or none was recorded: losses are the outputs left
    if not pair.says("losses", step):
        return None
    # as text, in which a NaN is equal to itself, and -0 is not 0
    a, b = (list(map(repr, floats(side.scalars(step, "losses")))) for side in pair.both)
    if not pair.alike_layout:
        a, b = sorted(set(a)), sorted(set(b))  # ranks that share a model have one loss
        if len(a) != len(b):  # of other parts of the batch
            return None
    unlike = next(((x, y) for x, y in zip_longest(a, b) if x != y), None)
    if unlike is None:
        return None
    seen = "after the last block" if pair.records("forward", step) else "seen first in the loss"
    text = f"{seen}: loss {unlike[0]}, and {unlike[1]}"
    return _random_state(pair, step) or Blame(step, "forward", "loss", "loss", text)


def _first_rows(
    pair: Pair, step: int, quantity: str, order: Mapping[str, int], backward: bool = False
) -> tuple[str, str, tuple[Key, ...]] | None:
    """Returns the module of the first call that differs, and all modules that differ, in order.

    Between them stand words for the call, where it is not the first of the step.
    """
    # by rank and name the digests of all calls in the step
    a, b = pair.rows(step, quantity)
    # of each module the first call in which any rank differs
    first: dict[str, int] = {}
    for rank, name in pair.differing(a, b):
        calls = zip_longest(a[rank, name], b[rank, name])
        call = next(i for i, (x, y) in enumerate(calls) if x != y)
        first[name] = min(call, first.get(name, call))
    # within one call: from the front in the forward pass, from the back in the backward pass
    sign = -1 if backward else 1
    names = sorted(first, key=lambda name: (first[name], sign * order.get(name, 0)))
    if not names:
        return None
    call = first[names[0]]
    words = f" (call {call + 1} of the step)" if call else ""
    return names[0], words, tuple((name, quantity) for name in names)


def _backward(pair: Pair, step: int) -> Blame | None:
    order = pair.modules(step)
    # the gradient of an output comes from the module behind it, which is to blame
    first_rows = _first_rows(pair, step, "backward", order, backward=True)
    if first_rows:
        name, call, keys = first_rows
        behind = [module for module in order if order[module] > order.get(name, 0)]
        where = behind[0] if behind else "loss"
        which = f"the backward of {where}" if behind else f"what follows {name}"
        text = f"{which}: the gradient of the output of {name} is the first that differs{call}"
        return Blame(step, "backward", where, "backward", text, keys)

    # outputs' gradients are equal: a parameter's own gradient on some rank, before reduction
    first_rows = _first_rows(pair, step, "local grad", pair.a.order, backward=True)
    if not first_rows:
        return None
    name, _, keys = first_rows
    text = f"the gradient of {name} differs before any reduction"
    return Blame(step, "backward", name, "local grad", text, keys)


def _gradient(pair: Pair, step: int) -> Blame | None:
    # gradients as the step takes them, the last layer's first
    keys = pair.ordered(pair.tensors(step, lambda quantity: quantity == "grad"), backward=True)
    # as norms come from all ranks, one of each value is enough where layouts differ
    norms = [side.scalars(step, "grad_norm") for side in pair.both]
    if not pair.alike_layout:
        norms = [list(dict.fromkeys(rank_norms)) for rank_norms in norms]
    same_norm = norms[0] == norms[1]
    # no gradient recorded, or all equal: the norm may still tell
    if not keys:
        if same_norm or not pair.says("grad_norm", step):
            return None
        text = f"seen first in the norm of the gradient: {_pairs_of(*norms)}"
        return Blame(step, "gradient", "grad_norm", "grad_norm", text)

    # replicas that differ within one run, or equal gradients before the reduction
    name = keys[0][0]
    a, b = (side.digests(step).get(keys[0]) for side in pair.both)
    # groups of ranks that should hold the same and do not
    held = [(letter, summed) for letter, summed in (("A", a), ("B", b)) if summed]
    apart = [f"{letter}'s ranks {_groups(s)}" for letter, s in held if s.replicas]
    # each rank's own gradients were equal, or `_backward` had blamed one
    recorded = pair.records("local grad", step) and pair.alike_layout
    norm_is_known = same_norm and pair.says("grad_norm", step)
    if apart or (recorded and pair.has_ranks and not norm_is_known):
        equal = "the ranks' own gradients are equal, " if recorded else ""
        unlike = f"; {' and '.join(apart)} hold different ones" if apart else ""
        text = f"{equal}the reduced gradient of {name} differs{unlike}"
        return Blame(step, "reduction", name, "grad", text, tuple(keys))

    # neither: something between backward and step, clipping or a hook, say
    lacking = " (one run has none)" if a is None or b is None else ""
    changed = "changed between the backward and the step" if recorded else "seen first in it"
    norm = "; the norm before clipping is equal, but small changes may not move it"
    if not norm_is_known:
        norm = "" if same_norm else f"; the norm before clipping: {_pairs_of(*norms)}"
    more = pair.farthest(step, keys) + _and_options(pair, step)
    text = f"the gradient of {name} differs{lacking}, {changed}{norm}{more}"
    return Blame(step, "gradient", name, "grad", text, tuple(keys))


def _pairs_of(a: Any, b: Any) -> str:
    x, y = next((x, y) for x, y in zip_longest(a, b) if x != y)
    return f"{shown(x)}, and {shown(y)}"


def _groups(summed: Summed) -> str:
    return " and ".join(",".join(map(str, group)) for group in summed.replicas)


def _optimizer(pair: Pair, step: int) -> Blame | None:
    # weights, masters and moments after the step
    keys = pair.ordered(pair.tensors(step, lambda q: q != "grad" and not is_old(q)))
    options = pair.options(step)
    if not keys:
        # a number of the law that differs shows in no tensor where none is recorded
        unlike = [option for option in options if not option.name.startswith(NOT_NUMBERS)]
        if pair.records("weight", step) or not unlike:
            return None
        return Blame(step, "optimizer", str(unlike[0].name), "options", "; ".join(map(str, unlike)))

    # ranks of one run disagree about the same part: no law explains that
    name, quantity = keys[0]
    a, b = (side.digests(step).get(keys[0]) for side in pair.both)
    apart = [summed for summed in (a, b) if summed and summed.replicas]
    if apart:
        text = f"{quantity} of {name} is different on ranks {_groups(apart[0])} of one run"
    else:
        equal = _equal_inputs(pair, step, name)
        text = f"{quantity} of {name} differs; equal: {', '.join(equal) or 'not known'}"
    return Blame(step, "optimizer", name, quantity, text + _and_options(pair, step), tuple(keys))


def _equal_inputs(pair: Pair, step: int, name: str) -> list[str]:
    """Returns the inputs of a tensor's step that are known to be equal, in words.

    Quantities that nobody looked at before the step are told as the last one left them: `p.data`
    may have been written since, and samples alone show that.
    """
    # digests of the step, and numbers of elements that were sampled before it
    rows = [side.digests(step) for side in pair.both]
    a, b = (side.old_samples(step) for side in pair.both)
    common = [q for n, q in a if n == name and (n, q) in b]
    sampled = {q: (a[name, q][0] & b[name, q][0]).bit_count() for q in common}
    values = pair.a.values_at(step)
    # state and weight that both runs have before the step, of this tensor
    quantities = [q for n, q in pair.a.before(step) if n == name and (n, q) in pair.b.before(step)]
    # seen before the step itself: by a digest of the old value, or samples of every element
    looked_at = [
        q
        for q in quantities
        if all((name, f"old {q}") in digests for digests in rows)
        or (q in sampled and sampled[q] == math.prod(values[name, f"old {q}"].shape))
    ]
    # known only from the end of the step before
    left = [quantity for quantity in quantities if quantity not in looked_at]
    inputs = ["gradient"] if pair.records("grad", step) else []
    inputs += [f"old {quantity}" for quantity in looked_at]
    if left:
        parts = [f"{sampled[q]} sampled elements of {q}" for q in left if q in sampled]
        seen = f"looked at since: {', '.join(parts)}; " if parts else "not looked at since; "
        unseen = f"a write to .data {'elsewhere ' if parts else ''}is not seen"
        inputs.append(f"{' and '.join(left)} as step {step - 1} left them ({seen}{unseen})")
    return inputs


CHECKS = (_begin, _data, _forward, _backward, _gradient, _optimizer)
"""The order of blame."""


def _knows_before(pair: Pair, step: int) -> bool:
    return bool(pair.a.before(step).keys() & pair.b.before(step).keys())


PRECEDING: tuple[tuple[str, str, Callable[[Pair, int], bool]], ...] = (
    ("old", "weights before the step", _knows_before),
    ("batch", "the batch", lambda pair, step: pair.says("batch", step)),
    ("rng", "the random state", lambda pair, step: pair.says("rng", step)),
    ("forward", "outputs of blocks", lambda pair, step: pair.records("forward", step)),
    ("loss", "the loss", lambda pair, step: pair.says("losses", step)),
    ("backward", "gradients of blocks", lambda pair, step: pair.records("backward", step)),
    (
        *("local grad", "the ranks' own gradients"),
        lambda pair, step: not pair.has_ranks or pair.records("local grad", step),
    ),
    ("grad", "the gradient", lambda pair, step: pair.records("grad", step)),
)
"""The order of blame: quantity, words, and a function that says whether both have recorded it."""
