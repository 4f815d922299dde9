from types import SimpleNamespace

import pytest

from megaopt.commands.regression.megatron.checkpoint import cast_masters


@pytest.mark.parametrize("overlaps", [False, True])
def test_cast_masters_are_gathered_where_no_forward_pass_does(overlaps):
    calls = []
    inner = [
        SimpleNamespace(_copy_main_params_to_model_params=lambda: calls.append("cast"))
        for _ in range(2)
    ]
    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_param_gather=overlaps),
        start_param_sync=lambda: calls.append("gather"),
    )
    cast_masters(chunk, SimpleNamespace(chained_optimizers=inner))
    assert calls == (["cast", "cast"] if overlaps else ["cast", "cast", "gather"])
