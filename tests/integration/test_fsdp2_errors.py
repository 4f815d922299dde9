"""What is refused of DTensors, by name, before anything has changed."""

import re

import fsdp2_refusals
import pytest

REFUSED = {
    "partial_gradient": r"parameter 0 of group 0.*gradient.*Shard\(dim=0\).*Partial\(sum\)",
    "replicated_gradient": r"parameter 0 of group 0.*gradient.*Shard\(dim=0\).*Replicate\(\)",
    "plain_gradient": r"parameter 0 of group 0.*gradient.*Shard\(dim=0\).*a plain tensor",
    "gradient_of_a_subclass": r"parameter 0 of group 0: the gradient: .*must be .*got TwoTensor",
    "state_of_a_subclass": r"parameter 0 of group 0: state 'exp_avg': .*must be .*got TwoTensor",
    "partial_gradient_of_a_replicated_parameter": r"Replicate\(\).*Partial\(sum\)",
    "dtensor_gradient_of_a_plain_parameter": r"a plain tensor .*, got a DTensor.*Replicate\(\)",
    "partial_parameter": r"parameter 0 of group 0: placements must .* got \(Partial\(sum\),\)",
    "parameter_of_a_subclass": r"parameter 0 of group 0: a DTensor must be .* got one of TwoTensor",
    "scaled_exp_avg": r"exp_avg_dtype must be .*bfloat16 for a DTensor, got torch.float16",
    "scaled_exp_avg_sq": r"exp_avg_sq_dtype must be .* for a DTensor, got torch.float8_e4m3fn",
    "scaled_masters": r"master_weight_dtype must be .*float32 for a DTensor, got torch.float16",
    "plain_masters": r"master_weights\[0\].*a plain tensor of shape \(5, 3\).*distribute_tensor",
    "plain_value": r"exp_avg must .*, got a plain tensor of shape \(5, 3\).*distribute_tensor",
    "value_of_another_shape": r"exp_avg must be .*\(5, 3\), got .*\(3, 5\)",
    "plain_state": r"parameter 0 of group 0: state 'exp_avg' must .* got a plain tensor",
    "loaded_whole": r"parameter 0 of group 0: 'exp_avg' in the state dict must .* a plain tensor",
    "loaded_replicated": r"parameter 0 of group 0: 'exp_avg' in the state dict.*Replicate\(\)",
}


@pytest.mark.parametrize(("case", "message"), REFUSED.items(), ids=REFUSED)
def test_refused(on_ranks, case, message):
    for found in on_ranks(2, getattr(fsdp2_refusals, case)):
        assert re.search(message, found), found


def test_flat_parameters_of_fsdp1_are_refused_where_gradients_are_measured(on_ranks):
    for clipped, plain in on_ranks(2, fsdp2_refusals.flat_parameters):
        assert re.search(r"parameter 0 .*FSDP1.*clip_coefficient", clipped)
        assert plain == "nothing was refused"
