"""galore_torch's GaLoreAdamW8bit: its face, what it stands for, and its checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from runs import FP32, assert_same_run, train, values

from megaopt import GaLoreAdamW
from megaopt.integration.galore_torch import GaLoreAdamW8bit

OWN = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
OWN |= {"refresh": "svd", "stagger": False}
SHAPES = [(400, 200), (24, 10), (64, 64)]
RANKED = {"rank": 128, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}


def groups():
    """Projected to 51,200 elements; a rank above the smaller dimension; without a rank."""
    params = [torch.nn.Parameter(values(shape, i)) for i, shape in enumerate(SHAPES)]
    return [{"params": params[:2], **RANKED}, {"params": params[2:]}]


def test_the_bits_are_those_of_the_optimizer_that_it_stands_for():
    numbers = {"lr": 0.01, "weight_decay": 0.25, "seed": 3}
    found = GaLoreAdamW8bit(groups(), **numbers)
    expected = GaLoreAdamW(groups(), eps=1e-8, **numbers, **OWN)
    train(found, 4)
    train(expected, 4)
    assert_same_run(found, expected)
    large, small = found.param_groups[0]["params"]
    assert found.state[large]["exp_avg"].dtype == torch.uint8
    assert found.state[large]["exp_avg"].shape == (400, 128)
    assert found.state[small]["exp_avg"].dtype == FP32


REFUSED = [
    ({"amsgrad": True}, "amsgrad must be False, got True"),
    ({"optim_bits": 8}, "optim_bits must be 32, got 8"),
    ({"args": 1}, "args must be None, got 1"),
    ({"min_8bit_size": 5000}, "min_8bit_size must be at most 4096, got 5000"),
    ({"percentile_clipping": 5}, "percentile_clipping must be 100, got 5"),
    ({"block_wise": False}, "block_wise must be True, got False"),
    ({"is_paged": True}, "is_paged must be False, got True"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_has_no_meaning_here_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GaLoreAdamW8bit(groups(), **options)


def test_a_checkpoint_of_its_names_loads():
    """State1 and state2 of bitsandbytes, here of 32 bits, and galore_torch's projector."""
    moments = [values((24, 2), 5 + i) for i in range(2)]
    matrix = torch.linalg.qr(values((10, 2), 7))[0].T.contiguous()
    saved = {"step": 3, "state1": moments[0], "state2": moments[1].abs()}
    saved["projector"] = SimpleNamespace(ortho_matrix=matrix)
    group = {"params": [0], "lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    param = torch.nn.Parameter(values((24, 10), 0))
    optimizer = GaLoreAdamW8bit([{"params": [param], **RANKED, "rank": 2}])
    whole = {"state": {0: saved}, "param_groups": [{**group, **RANKED, "rank": 2}]}
    optimizer.load_state_dict(whole)
    state = optimizer.state[param]
    assert torch.equal(state["exp_avg"], moments[0])
    assert torch.equal(state["exp_avg_sq"], moments[1].abs())
    assert torch.equal(state["projection"], matrix)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["step"] == 3
