import pytest
import torch
from how_to import mean_of_two_ranks, needs, run_ranks, script
from runs import assert_same

pytestmark = needs("deepspeed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the straight run and the resumed one left behind."""
    straight, resumed = (tmp_path_factory.mktemp(name) for name in ("straight", "resumed"))
    resume = ["--folder", str(resumed), "--resume", str(straight / "step-3")]
    run_ranks("deepspeed_zero1", [["--folder", str(straight)], resume])
    assert not (resumed / "step-3").exists()
    return everything(straight), everything(resumed)


def everything(folder):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # DeepSpeed's own classes are in its files
    paths = sorted((folder / "step-6").glob("*.pt"))
    model, *ranks = (torch.load(p, weights_only=False) for p in sorted(paths, key=is_of_rank))
    return {
        "model": dict(model["module"]),
        "masters": dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), "step-6")),
        "states": [saved["optimizer_state_dict"]["base_optimizer_state"] for saved in ranks],
        "schedule": model["lr_scheduler"],
    }


def is_of_rank(path):
    return "optim_states" in path.name


def plain_loop():
    model, optimizer = mean_of_two_ranks(script("deepspeed_zero1"), masters=True)
    masters = {n: optimizer.state[p]["master_param"] for n, p in model.named_parameters()}
    return dict(model.state_dict()), masters


def test_zero1_has_the_bits_of_a_plain_loop(runs):
    straight, _ = runs
    assert len(straight["states"]) == 2
    weights, masters = plain_loop()
    assert_same(straight["model"], weights)
    assert_same(straight["masters"], masters)


def test_resumed_is_straight(runs):
    straight, resumed = runs
    assert_same(resumed, straight)
