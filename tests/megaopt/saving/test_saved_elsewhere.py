"""State dicts on ways that others take: live ones, torch alone, safetensors, tied weights."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from handling import copy_weights, train_all
from kinds import KINDS, made, with_weights_of
from runs import MASTER, REMAINDERS, assert_same, assert_same_run, copied, params_of, train
from safetensors.torch import load, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam

each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.sample(4)
def test_a_load_between_two_live_optimizers(kind):
    """Nothing is copied between, and nothing is shared afterwards."""
    source, target = made(kind), made(kind)
    train(source, 2)
    train(target, 1, first=5)
    for other, param in zip(params_of(target), params_of(source), strict=True):
        other.data.copy_(param.data)
    target.load_state_dict(source.state_dict())
    straight = copy.deepcopy(source)
    train(target, 2, first=2)
    assert_same_run(source, straight)
    train(source, 2, first=2)
    assert_same_run(target, source)


ALONE = """
import sys, torch
for path in sys.argv[1:]:
    saved = torch.load(path, weights_only=True)
    torch.save(saved, path)
assert not any(name.split(".")[0] == "megaopt" for name in sys.modules)
"""


def test_torch_alone_reads_and_writes_them(tmp_path):
    """With weights_only, in a process that has not imported this package."""
    paths, optimizers = {}, {}
    for place, kind in enumerate([*KINDS][::5]):
        optimizers[kind] = made(kind)
        train(optimizers[kind], 1)
        optimizers[kind].state["wrapper"] = {"k": 5, "slow": [torch.ones(2)]}
        paths[kind] = str(tmp_path / f"{place}.pt")
        torch.save(optimizers[kind].state_dict(), paths[kind])
    subprocess.run([sys.executable, "-c", ALONE, *paths.values()], check=True, cwd=tmp_path)
    for kind, optimizer in optimizers.items():
        saved = torch.load(paths[kind], weights_only=True)
        assert_same(saved, copied(optimizer.state_dict()))
        other = with_weights_of(optimizer, kind)
        other.load_state_dict(saved)
        train_all((optimizer, other), 1, first=1)
        assert_same_run(other, optimizer)


@each_kind
@pytest.mark.sample(4)
def test_states_go_through_safetensors(kind):
    """Tensors by name, all with memory of their own; groups beside them, as JSON has them."""
    optimizer = made(kind)
    train(optimizer, 2)
    saved = optimizer.state_dict()
    tensors = {
        f"{key}.{name}": value
        for key, state in saved["state"].items()
        for name, value in state.items()
    }
    groups = [
        {name: int(value) if name == "step" else value for name, value in group.items()}
        for group in saved["param_groups"]
    ]
    found: dict = {key: {} for key in saved["state"]}
    for path, tensor in load(save(tensors)).items():
        key, name = path.split(".")
        found[int(key)][name] = tensor
    other = with_weights_of(optimizer, kind)
    other.load_state_dict({**saved, "state": found, "param_groups": groups})
    train_all((optimizer, other), 1, first=2)
    assert_same_run(other, optimizer)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("options", [MASTER, REMAINDERS], ids=["fp32", "remainders"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tied_weights_go_through_torchs_checkpoints(flat, options, tmp_path):
    given, runs = StateDictOptions(flatten_optimizer_state_dict=flat), []
    for seed in range(2):
        model = Tied().bfloat16()
        runs.append((model, FusedAdam(model.parameters(), **options)))
        train(runs[-1][1], 2, first=seed)
    (_, source), (_, target) = runs
    dcp.save(get_optimizer_state_dict(*runs[0], options=given), checkpoint_id=tmp_path)
    found = get_optimizer_state_dict(*runs[1], options=given)
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*runs[1], found, options=given)
    copy_weights(source, target)
    train_all((source, target), 2, first=4)
    assert_same_run(target, source)
