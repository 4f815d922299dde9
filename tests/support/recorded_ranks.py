"""What ranks record in the tests of layouts: fixed gradients, the same whatever the layout."""

from megaopt.recording.files import Recording

BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}


def rows(out):
    """A recording's digests of all steps, by step; what no rank has is 0, replicas agree."""
    recording = Recording(out)
    found = {step: recording.digests(step) for step in recording.steps}
    for step in found.values():
        for key, summed in step.items():
            assert summed.missing == 0, key
            assert summed.replicas == (), key
    return {step: {k: s.digest for k, s in rows.items()} for step, rows in found.items()}


def kept(out, step):
    """The bits of all tensors of a step that ranks kept, whole."""
    recording = Recording(out)
    named = [*recording.values, *((n, f"old {q}") for n, q in recording.values if q != "grad")]
    found = {key: recording.kept(step, key) for key in named if not key[1].startswith("old old")}
    assert all(held.all() for _, held in filter(None, found.values()))
    return {key: each[0].tolist() for key, each in found.items() if each is not None}
