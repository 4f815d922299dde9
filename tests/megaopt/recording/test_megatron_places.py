"""Places of Megatron's parameters, from what Megatron notes on them."""

import sys
import types

import pytest
import torch
from recorded import places

from megaopt.recording import megatron
from megaopt.recording.pieces import cut


@pytest.fixture
def ranks(monkeypatch):
    """Calling it makes this process a rank of Megatron's groups."""

    def be(rank, world, expert_rank=0, expert_world=1):
        state = types.ModuleType("megatron.core.parallel_state")
        state.get_tensor_model_parallel_rank = lambda: rank
        state.get_tensor_model_parallel_world_size = lambda: world
        state.get_expert_tensor_parallel_rank = lambda: 0
        state.get_expert_tensor_parallel_world_size = lambda: 1
        state.get_expert_model_parallel_rank = lambda: expert_rank
        state.get_expert_model_parallel_world_size = lambda: expert_world
        monkeypatch.setitem(sys.modules, state.__name__, state)

    return be


def parameter(tensor, dim, stride=1, **more):
    param = torch.nn.Parameter(tensor.float().contiguous())
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
    vars(param).update(more)
    return param


def test_rows_columns_and_gated_halves(ranks):
    whole = torch.arange(8 * 6).view(8, 6)
    gate, up = whole.chunk(2)
    for rank in range(2):
        ranks(rank, 2)
        for dim, stride, part in (
            (0, 1, whole.chunk(2)[rank]),
            (1, 1, whole.chunk(2, 1)[rank]),
            (0, 2, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])),
        ):
            shape, pieces = megatron.part_of(parameter(part, dim, stride), "weight", None)
            assert shape == (8, 6)
            assert places(pieces) == part.flatten().tolist()
            assert places(cut(pieces, 5, 20)) == part.flatten()[5:20].tolist()


def test_padding_of_the_vocabulary_is_left_out(ranks):
    name = "embedding.word_embeddings.weight"
    padded = torch.arange(8 * 3).view(8, 3)
    for rank, kept in ((0, 4), (1, 1)):
        ranks(rank, 2)
        part = padded.chunk(2)[rank]
        shape, pieces = megatron.part_of(parameter(part, 0), name, 5)
        assert shape == (5, 3)
        assert places(pieces) == part[:kept].flatten().tolist()


def test_experts_of_a_rank_lie_one_behind_another(ranks):
    whole = torch.arange(4 * 2 * 3)
    for rank in range(2):
        ranks(0, 1, rank, 2)
        part = whole.chunk(2)[rank]
        param = parameter(part.view(2, 6), 1, allreduce=False)
        shape, pieces = megatron.part_of(param, "decoder.layers.0.mlp.experts.weight1", None)
        assert shape == (2, 12)
        assert places(pieces) == part.tolist()


def test_numbers_of_layers_and_experts_are_global(ranks):
    ranks(0, 1)
    expert, layer, model = (torch.nn.Module() for _ in range(3))
    expert.local_experts = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(2)])
    layer.mlp, layer.layer_number = torch.nn.Module(), 7
    layer.mlp.experts, layer.mlp.local_expert_indices = expert, [4, 5]
    model.layers = torch.nn.ModuleList([layer])
    names = [megatron.global_name(model, name) for name, _ in model.named_parameters()]
    assert names[-1] == "layers.6.mlp.experts.local_experts.5.bias"
    assert names[0] == "layers.6.mlp.experts.local_experts.4.weight"
    assert megatron.global_name(torch.nn.Linear(1, 1), "weight") == "weight"
