"""States in host memory: where they are made, what reads and writes them, what is refused."""

import copy
import gc
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_pinning import FakePinning
from handling import both_backends, copy_weights, refused, train_all
from kinds import BLOCKS, KINDS
from kinds import made as kind_of
from runs import (
    BF16,
    FORMATS,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    parameters,
    through_a_file,
    train,
    values,
)

from megaopt import (
    FusedAdam,
    FusedMuon,
    GaLoreAdamW,
    get_fp32_model_state_dict,
    release_gradients,
    set_fp32_model_state_dict,
)
from megaopt.kernels.host_memory import CUDA, HostMemoryError, free_bytes, held_bytes, pinned_by
from megaopt.state.masters import pinned

pytestmark = pytest.mark.usefixtures("young_heap")

ALL, MOMENTS, MASTERS = "cpu", {"moments": "cpu"}, {"masters": torch.device("cpu")}
SHAPES = [(64, 64), (), (0,), (5,)]


@pytest.fixture
def pinning():
    """On its card, which the CPU is here, states may be in host memory."""
    gc.collect()
    fake, before = FakePinning(), held_bytes()
    with pinned_by(fake):
        yield fake
    gc.collect()
    assert held_bytes() - before == fake.held


def is_apart(name, asked):
    placed = {"moments": asked, "masters": asked} if asked == "cpu" else asked or {}
    part = "masters" if name == "master_param" else "moments"
    return part in placed and not name.endswith("_scale") and name != "variance_neuron"


def assert_placed(optimizer, pinning, asked):
    found = {}
    for state in optimizer.state.values():
        for name, tensor in state.items():
            if tensor is not None and tensor.numel() and name != "step":  # the host's number
                found[name] = pinning.is_pinned(tensor)
                assert found[name] == is_apart(name, asked), name
    return found


def made(kind=FusedAdam, asked=ALL, shapes=SHAPES, **options):
    return kind(parameters(shapes), lr=0.01, state_device=asked, **options)


# --- bits and places


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("reference", marks=pytest.mark.sample(3)),
        pytest.param("triton", marks=pytest.mark.sample(7)),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_the_bits_are_those_beside_the_weights(pinning, name, backend):
    """Of fp8 weights too."""
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is off beside a GPU")
    asked = [ALL, MOMENTS, MASTERS][len(name) % 3] if backend == "triton" else ALL
    plain, apart = (kind_of(name, state_device=own, backend=backend) for own in (None, asked))
    train_all((plain, apart), 2 if backend == "triton" else 3)
    assert_same_run(apart, plain)
    assert len(pinning.sizes) == (1 if any(assert_placed(apart, pinning, asked).values()) else 0)


def test_all_states_are_one_allocation_of_what_they_take(pinning):
    optimizer = made(shapes=[(1024, 1024), *SHAPES], **MASTER)
    optimizer.initialize_states()
    assert pinning.sizes == [3 * (1024 * 1024 * 4 + 64 * 64 * 4 + 256 + 256)]
    own = [t for state in optimizer.state.values() for t in state.values() if t is not None]
    for tensor in (*own, through_a_file({"own": own[-1]})["own"]):  # in files too
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_groups_say_where_their_states_are(pinning):
    first, second, third = parameters([(3,), (4,), (5,)])
    groups = [
        {"params": [first]},
        {"params": [second], "state_device": None},
        {"params": [third], "state_device": MOMENTS},
    ]
    optimizer = FusedAdam(groups, lr=0.01, state_device="cpu", **MASTER)
    late = {"params": parameters([(6,)]), "state_device": {"masters": "cpu"}}
    optimizer.add_param_group(late)
    assert late is optimizer.param_groups[3]
    train(optimizer, 2)
    assert all("state_device" not in group for group in optimizer.param_groups)
    for group, asked in zip(optimizer.param_groups, [ALL, {}, MOMENTS, MASTERS], strict=True):
        for name, tensor in optimizer.state[group["params"][0]].items():
            assert pinning.is_pinned(tensor) == is_apart(name, asked)
    own = [{"params": [param]} for param in parameters([(3,), (4,), (5,)])]
    plain = FusedAdam(own, lr=0.01, **MASTER)
    plain.add_param_group({"params": parameters([(6,)])})
    train(plain, 2)
    assert_same_run(optimizer, plain)


def test_weights_on_a_cpu_have_their_states_there_anyway():
    before = held_bytes()
    optimizer, plain = made(**MASTER), made(asked=None, **MASTER)
    train_all((optimizer, plain), 2)
    assert_same_run(optimizer, plain)
    assert held_bytes() == before


# --- copies, saves and loads

SOME = {name: FORMATS[name] for name in ("remainders", "fp16_masters", "fp8_moments")}
SOME["blocks"] = {**REMAINDERS, **BLOCKS}


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("before", "after"), [(ALL, None), (None, ALL), (ALL, MOMENTS)])
def test_a_run_goes_on_from_a_file_wherever_states_are(pinning, name, before, after):
    options = SOME[name]
    straight, first = made(asked=None, **options), made(asked=before, **options)
    train(straight, 4)
    train(first, 2)
    saved = first.state_dict()
    assert pinning.waits == (before is not None)
    resumed = made(asked=after, **options)
    copy_weights(first, resumed)
    pinning.sizes.clear()
    resumed.load_state_dict(through_a_file(saved))
    assert len(pinning.sizes) == (after is not None)
    assert_placed(resumed, pinning, after)
    train(resumed, 2, first=2)
    assert_same_run(resumed, straight)
    assert_same(resumed.state_dict(), straight.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("name", ["fp32_masters", "fp8_moments"])
def test_copies_have_pinned_states_of_their_own(pinning, name, copied):
    optimizer = made(**FORMATS[name])
    train(optimizer, 1)
    other = copied(optimizer)
    assert_placed(other, pinning, ALL)
    train_all((optimizer, other), 2, first=1)
    assert_same_run(other, optimizer)
    assert_placed(other, pinning, ALL)


def from_a_file(optimizer):
    other = made(FusedMuon, second_moment="normuon")
    copy_weights(optimizer, other)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, from_a_file])
def test_what_a_rule_of_matrices_keeps_stays_on_the_card(pinning, copied):
    """Momentum does not: NorMuon's second moment is a number a row."""
    optimizer = made(FusedMuon, second_moment="normuon")
    train(optimizer, 1)
    other = copied(optimizer)
    for each in (optimizer, other):
        found = assert_placed(each, pinning, ALL)
        assert (found["momentum_buffer"], found["variance_neuron"]) == (True, False)
    train_all((optimizer, other), 2, first=1)
    assert_same_run(other, optimizer)


@pytest.mark.parametrize("name", SOME)
def test_values_are_read_and_set(pinning, name):
    optimizers = [made(asked=asked, **SOME[name]) for asked in (None, ALL)]
    found = []
    for optimizer in optimizers:
        first, *_ = params = optimizer.param_groups[0]["params"]
        train(optimizer, 1)
        for state in ("exp_avg", "exp_avg_sq", "master_param"):
            value = optimizer.get_unscaled_state(first, state)
            assert value.dtype == FP32
            optimizer.set_scaled_state(first, state, value * 0.5)
        optimizer.set_scaled_state(params[1], "exp_avg", torch.tensor(3.0))
        params[3].detach().fill_(2.0)  # which the master takes over
        optimizer.refresh_masters()
        found.append(copy.deepcopy(optimizer))
        train(optimizer, 1)
    assert_same_run(*found)
    assert_same_run(*optimizers)
    assert_placed(optimizers[1], pinning, ALL)
    assert pinning.waits >= 7


def test_values_are_set_before_there_is_a_state(pinning):
    optimizer = made(**MASTER)
    (first, *_) = optimizer.param_groups[0]["params"]
    optimizer.set_scaled_state(first, "exp_avg", values((64, 64), 3))
    assert pinning.is_pinned(optimizer.state[first]["exp_avg"])


@pytest.mark.parametrize("name", ["fp32_masters", "remainders"])
def test_models_in_fp32_go_to_and_from_host_memory(pinning, name):
    model, other = (torch.nn.Linear(4, 3).bfloat16() for _ in range(2))
    optimizer, loaded = (
        FusedAdam(m.parameters(), state_device="cpu", **FORMATS[name]) for m in (model, other)
    )
    train(optimizer, 2)
    saved = get_fp32_model_state_dict(model, optimizer)
    set_fp32_model_state_dict(other, loaded, saved)
    assert_same(dict(get_fp32_model_state_dict(other, loaded)), dict(saved))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_placed(loaded, pinning, ALL)


def test_masters_of_the_caller_are_pinned_ones(pinning):
    def masters(params):
        return [param.detach().float() for param in params]

    params, others = parameters(), parameters()
    with pytest.raises(ValueError, match=r"must be in pinned memory with state_device='cpu'"):
        FusedAdam(params, state_device="cpu", master_weights=masters(params))
    own = [pinned(master, "cpu") for master in masters(params)]
    optimizer = FusedAdam(params, lr=0.01, state_device="cpu", master_weights=own)
    plain = FusedAdam(others, lr=0.01, master_weights=masters(others))
    train_all((optimizer, plain), 2)
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(optimizer.state[p]["master_param"] is m for p, m in zip(params, own, strict=True))
    assert_same_run(optimizer, plain)
    FusedAdam(params, state_device={"moments": "cpu"}, master_weights=masters(params))


def test_gradients_are_released_beside_states_in_host_memory(pinning):
    found = []
    for asked in (None, ALL):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)).bfloat16()
        optimizer = FusedAdam(model.parameters(), lr=0.01, state_device=asked, **REMAINDERS)
        release_gradients(model, optimizer)
        for step in range(3):
            model(values((3, 4), step, BF16)).float().square().mean().backward()
            optimizer.step()
        found.append(optimizer)
    assert_same_run(found[1], found[0])
    assert_placed(found[1], pinning, ALL)
    assert len(pinning.sizes) == 1  # the parameters have states one after another


# --- memory


def test_memory_is_freed_with_the_last_tensor(pinning):
    optimizer = made(**MASTER)
    train(optimizer, 1)
    kept = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
    expected = kept.clone()
    del optimizer
    gc.collect()
    assert pinning.held > 0
    assert_same(kept, expected)
    del kept
    gc.collect()
    assert pinning.held == 0


def test_memory_that_cannot_be_freed_now_is_freed_later(pinning):
    optimizer = made(**MASTER)
    train(optimizer, 1)
    pinning.can_free = False  # a CUDA graph is being captured
    del optimizer
    gc.collect()
    assert len(pinning.chunks) == 1
    pinning.can_free = True
    train(made(**MASTER), 1)
    gc.collect()
    assert pinning.held == 0


def test_what_is_free_is_the_least_of_what_system_and_container_say(tmp_path):
    assert free_bytes(tmp_path) is None
    groups = tmp_path / "sys/fs/cgroup"
    groups.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    assert free_bytes(tmp_path) == 8192
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.current").write_text("1000\n")
    assert free_bytes(tmp_path) == 8192
    (groups / "memory.max").write_text("5000\n")
    assert free_bytes(tmp_path) == 4000


# --- what is refused


def test_too_little_memory_changes_nothing(pinning):
    pinning.limit = 3 * (1024 * 1024 * 4) - 1
    optimizer = made(shapes=[(1024, 1024)], **MASTER)
    message = "must find 12,582,912 bytes .*out of memory.* are free.*{'moments': 'cpu'}"
    with refused(optimizer, message, HostMemoryError):
        train(optimizer, 1)
    pinning.limit += 1
    train(optimizer, 1)


def test_a_card_that_cannot_map_is_named():
    with (
        pinned_by(FakePinning(reason="the card cannot map host memory")),
        pytest.raises(RuntimeError, match=r"'cpu' does not work .* cannot map host memory; state"),
    ):
        made(**MASTER)
    assert "device type 'xpu'" in CUDA.why_not(torch.device("xpu"))


@pytest.mark.parametrize("value", ["cuda", "CPU", True, {"moment": "cpu"}, {"masters": 1}, 0])
def test_another_device_is_refused(value):
    with pytest.raises(ValueError, match=r"^state_device must be None, 'cpu', or a dict"):
        made(asked=value)
    with pytest.raises(ValueError, match=r"^group 0: state_device must be None, 'cpu', or a dict"):
        FusedAdam([{"params": parameters(), "state_device": value}])


def test_galores_states_stay_on_the_card():
    params = parameters([(8, 8)], FP32)
    with pytest.raises(TypeError, match="argument 'state_device'"):
        GaLoreAdamW(params, state_device="cpu")
    with pytest.raises(ValueError, match="group 0: state_device must be None"):
        GaLoreAdamW([{"params": params, "state_device": "cpu"}])


@both_backends
@pytest.mark.parametrize("replaced", ["tensor", "data"])
def test_a_tensor_that_was_put_elsewhere_is_refused(pinning, replaced, backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is off beside a GPU")
    optimizer = made(shapes=[(3, 4), (5,)], backend=backend, **MASTER)
    train(optimizer, 2)
    state = optimizer.state[optimizer.param_groups[0]["params"][1]]
    if replaced == "tensor":
        state["exp_avg"] = state["exp_avg"].clone()
    else:
        state["exp_avg"].data = state["exp_avg"].clone()
    with pytest.raises(ValueError, match=r"state 'exp_avg' must be in pinned memory"):
        train(optimizer, 1)


# --- a card that is another device


@pytest.mark.slow
def test_no_operation_mixes_host_and_card():
    """With tensors that have a device and no values, in a process of its own."""
    backends = importlib.import_module("torch.utils.backend_registration")
    if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch makes no device in Python")
    script = Path(__file__).parents[2] / "support" / "devices_apart.py"
    found = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stdout + found.stderr[-3000:]
