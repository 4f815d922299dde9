"""config.optimizer_cuda_graph: Megatron's captured step, with a stand-in for the capture."""

import megatron_capture as captures
import pytest
from how_to import needs
from megatron_gpt import Case

pytestmark = needs("megatron")
MODES = ("main_shards", "precision_aware")
GRAPH = {"optimizer_cuda_graph": True}


def case_of(mode, **more):
    """Megatron 0.16.1, whose config has no such field, passes nothing on."""
    return Case(plug=mode, config=GRAPH, options={"capturable": True}, **more)


@pytest.mark.parametrize("settings", [{}, {"fp32_grads": False, "overlap": False}], ids=["", "16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_repeated_step_has_the_eager_ones_bits(pools, once, mode, settings):
    settings = {"clip_grad": 0.2, **settings}
    expected = once(2, captures.train, Case(**settings))
    assert pools(2)(captures.train, case_of(mode, **settings)) == expected
    assert len({step[0] for step in expected[0]["steps"]}) == 4


def test_checkpoints_have_numbers_of_the_host(pools, tmp_path):
    case = case_of("main_shards", experts=2)
    eager = Case(plug="main_shards", experts=2)
    for group, *found in pools(2)(captures.save_and_load, case, eager, tmp_path / "a"):
        assert (type(group["step"]), type(group["lr"])) == (int, float)
        assert found[1] == found[2] != found[0]


REFUSED = [
    ({"log_num_zeros_in_grad": True}, "config.log_num_zeros_in_grad must be False"),
    ({"loss_scale": 2.0}, "config.loss_scale must be None"),
    ({"grad_norm_skip_threshold": 3.0}, "config.grad_norm_skip_threshold must be inf"),
    ({"norm": 0}, "config.optimizer_cuda_graph must be False without TransformerEngine"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_the_host_has_to_read_is_refused(pools, changes, message):
    case = Case(plug="main_shards", config={**GRAPH, **changes})
    for error in pools(2)(captures.error_of, case, changes):
        assert error.startswith(message)
