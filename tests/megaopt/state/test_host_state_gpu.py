"""States in host memory that a card reads and writes, beside states on the card: the same bits."""

import copy
import gc
import warnings

import pytest
import torch
from fsdp2_blocks import SHAPES as ROWS
from fsdp2_ranks import Bare, give, gradients
from handling import both_backends
from runs import BF16, FORMATS, FP16, MASTER, REMAINDERS, assert_same, copied, values
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from megaopt import FusedAdam, FusedLion, FusedSGD, release_gradients
from megaopt.float8 import to_float8
from megaopt.kernels.float8 import Float8Recipe
from megaopt.kernels.host_memory import HostMemory, HostMemoryError, held_bytes
from megaopt.state.masters import pinned

pytestmark = pytest.mark.gpu

SHAPES = [(96, 128), (), (0,), (5,), (257, 129), (300_001,), (64, 1024)]
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
BLOCKS4 = {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"}
BF16_MOMENTS = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
REMAINDER8 = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}
KINDS = {
    **{f"ieee {name}": (FusedAdam, options) for name, options in FORMATS.items()},
    **{
        f"te {name}": (FusedAdam, {"contract": "te", **options})
        for name, options in FORMATS.items()
    },
    "te blocks": (FusedAdam, {"contract": "te", **REMAINDERS, **BLOCKS}),
    "torch": (FusedAdam, {"contract": "torch", "master_weights": False, **BF16_MOMENTS}),
    "torch masters": (FusedAdam, {"contract": "torch", **MASTER}),
    "blocks": (FusedAdam, {**REMAINDERS, **BLOCKS}),
    "blocks 4": (FusedAdam, {**MASTER, **BLOCKS4}),
    "remainder8": (FusedAdam, {**REMAINDER8, **BLOCKS}),
    "kahan": (FusedAdam, {"master_weights": True, "master_weight_dtype": "kahan", **BF16_MOMENTS}),
    "lion": (FusedLion, {**MASTER, "exp_avg_dtype": "block_e4m3"}),
    "lion fp32": (FusedLion, REMAINDERS),
    "sgd": (FusedSGD, {**MASTER, "momentum": 0.9}),
    "sgd fp8": (FusedSGD, {**REMAINDERS, "momentum": 0.9, "momentum_buffer_dtype": FP16}),
}
FEW = ["te fp32_masters", "te remainders", "ieee fp8_moments", "ieee fp16_masters", "blocks"]
PLACES = [
    ("cpu", ("moments", "masters")), ({"moments": "cpu"}, ("moments",)),
    ({"masters": "cpu"}, ("masters",)),
]  # fmt: skip


def parameters(dtype=BF16, shapes=SHAPES):
    own = [values(shape, i).to(dtype).cuda() for i, shape in enumerate(shapes)]
    return [torch.nn.Parameter(each) for each in own]


def grads(step, params):
    return [values(p.shape, 1000 * (step + 1) + i).to(p.dtype).cuda() for i, p in enumerate(params)]


def train(optimizer, steps, first=0, **step):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in range(first, first + steps):
        for param, grad in zip(params, grads(number, params), strict=True):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(grad)
        optimizer.step(**step)


def everything(optimizer):
    torch.cuda.synchronize()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [
        {name: value if value is None else value.cpu() for name, value in state.items()}
        for state in (optimizer.state[param] for param in params)
    ]
    weights = [param.detach().cpu() for param in params]
    return copied({"weights": weights, "states": states})


def assert_on_the_host(optimizer, parts=("moments", "masters")):
    for state in optimizer.state.values():
        for name, tensor in state.items():
            if tensor is not None and tensor.numel() and name != "step":  # a number of the host's
                part = "masters" if name.startswith("master_param") else "moments"
                is_apart = part in parts and not name.endswith("_scale")
                assert tensor.device.type == ("cpu" if is_apart else "cuda"), name
                assert tensor.is_pinned() == is_apart, name


@pytest.fixture(autouse=True)
def freed():
    gc.collect()
    before = held_bytes()
    yield
    gc.collect()
    assert held_bytes() == before


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KINDS)
def test_the_bits_are_those_of_states_on_the_card(name):
    """All of them, or a part alone."""
    kind, options = KINDS[name]
    asked, parts = PLACES[len(name) % 3]
    plain = kind(parameters(), lr=0.01, weight_decay=0.1, **options)
    apart = kind(parameters(), lr=0.01, weight_decay=0.1, state_device=asked, **options)
    for optimizer in (plain, apart):
        train(optimizer, 4)
    assert_same(everything(apart), everything(plain))
    assert_on_the_host(apart, parts)


def test_groups_apart_and_not_clip_together():
    found = []
    for devices in ((None, None), ("cpu", None), (None, {"moments": "cpu"})):
        params = parameters()
        groups = [
            {"params": own, "state_device": device}
            for own, device in zip((params[:4], params[4:]), devices, strict=True)
        ]
        optimizer = FusedAdam(groups, lr=0.01, **MASTER)
        train(optimizer, 3, clip_norm=0.5)
        found.append(everything(optimizer))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@both_backends
def test_weights_that_are_not_contiguous(backend):
    found = []
    for device in (None, "cpu"):
        params = [torch.nn.Parameter(values((64, 48), 0).to(BF16).cuda().t())]
        options = {"state_device": device, "backend": backend, **REMAINDERS, **BF16_MOMENTS}
        optimizer = FusedAdam(params, lr=0.01, **options)
        train(optimizer, 3)
        found.append(everything(optimizer))
    assert_same(*found)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block_128x128"])
def test_fp8_weights_with_states_in_host_memory(recipe):
    found = []
    for device in (None, "cpu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 384), torch.nn.Linear(384, 128))
        model = to_float8(model.bfloat16().cuda(), Float8Recipe(recipe))
        optimizer = FusedAdam(model.parameters(), lr=0.01, state_device=device, **MASTER)
        for step in range(3):
            for index, param in enumerate(model.parameters()):
                param.grad = values(param.shape, 100 * step + index).to(param.dtype).cuda()
            optimizer.step()
        torch.cuda.synchronize()
        states = [
            {n: t.cpu() for n, t in s.items() if t is not None} for s in optimizer.state.values()
        ]
        weights = [p.data8.cpu() if hasattr(p, "data8") else p.cpu() for p in model.parameters()]
        found.append(copied({"states": states, "weights": [w.detach() for w in weights]}))
    assert_same(*found)


# --- graphs and streams


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*FEW, "lion", "sgd"])
def test_a_graph_replays_steps_with_states_in_host_memory(name):
    kind, options = KINDS[name]
    rounds_apart = options.get("contract") == "te"  # as TransformerEngine's capturable kernels
    plain = kind(parameters(), lr=0.01, capturable=rounds_apart, **options)
    apart = kind(parameters(), lr=0.01, state_device="cpu", capturable=True, **options)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        train(apart, 2)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apart.step()
    params = apart.param_groups[0]["params"]
    for step in range(2, 40):
        for param, grad in zip(params, grads(step, params), strict=True):
            param.grad.copy_(grad)
        graph.replay()
    train(plain, 40)
    assert_same(everything(apart), everything(plain))
    saved = apart.state_dict()["state"].values()  # which waits for the replays
    moment = apart.rule.moments[0]
    expected = [state[moment] for state in everything(plain)["states"]]
    assert_same([state[moment].cpu() for state in saved], expected)


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).bfloat16().cuda()


@pytest.mark.parametrize("options", [MASTER, {**REMAINDERS, **BLOCKS}], ids=["fp32", "blocks"])
def test_released_gradients_are_stepped_beside_the_backward_pass(options):
    found = []
    for device, is_released in ((None, False), ("cpu", True), ("cpu", False)):
        model = layers()
        optimizer = FusedAdam(model.parameters(), lr=0.01, state_device=device, **options)
        if is_released:
            release_gradients(model, optimizer)
        seen = []
        for step in range(4):
            loss = model(values((256, 1024), step).bfloat16().cuda()).float().square().mean()
            loss.backward()
            if is_released:  # the weights are there already
                seen.append([param.detach().clone() for param in model.parameters()])
            optimizer.step()
            if not is_released:
                seen.append([param.detach().clone() for param in model.parameters()])
            optimizer.zero_grad()
            seen.append(loss.detach())
        torch.cuda.synchronize()
        found.append(
            [
                everything(optimizer),
                [[w.cpu() for w in s] if isinstance(s, list) else s.cpu() for s in seen],
            ]
        )
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


# --- saves, loads, copies


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("before", "after"), [("cpu", None), (None, "cpu"), ("cpu", "cpu")])
def test_a_run_goes_on_wherever_states_are(name, before, after):
    kind, options = KINDS[name]
    straight = kind(parameters(), lr=0.01, **options)
    train(straight, 4)
    first = kind(parameters(), lr=0.01, state_device=before, **options)
    train(first, 2)
    params = [torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]]
    resumed = kind(params, lr=0.5, state_device=after, **options)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    train(resumed, 2, first=2)
    assert_same(everything(resumed), everything(straight))


def test_loads_take_no_memory_on_the_card():
    optimizer = FusedAdam(parameters(shapes=[(2048, 2048)]), state_device="cpu", **MASTER)
    train(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.load_state_dict(saved)
    optimizer.state_dict()
    assert torch.cuda.max_memory_allocated() - before < 2**20
    assert_on_the_host(optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FEW)
def test_values_are_read_set_and_taken_over(name):
    kind, options = KINDS[name]
    found = []
    for device in (None, "cpu"):
        optimizer = kind(parameters(), lr=0.01, state_device=device, **options)
        train(optimizer, 1)
        (param, *others) = optimizer.param_groups[0]["params"]
        read = []
        for state in ("exp_avg", "exp_avg_sq", "master_param"):
            value = optimizer.get_unscaled_state(param, state)
            read.append(value.cpu().clone())
            optimizer.set_scaled_state(param, state, value * 0.5)
            optimizer.set_scaled_state(param, state, value.cpu() * 0.5)
        others[3].detach().fill_(0.5)
        with warnings.catch_warnings(action="ignore"):  # not every format can tell
            train(optimizer, 2, first=1)
        optimizer.refresh_masters()
        found.append([read, everything(optimizer)])
    assert_same(*found)


def test_masters_of_the_caller():
    found = []
    for device in (None, "cpu"):
        params = parameters()
        masters = [param.detach().float() for param in params]
        if device:
            masters = [pinned(master, "cuda") for master in masters]
        optimizer = FusedAdam(params, lr=0.01, state_device=device, master_weights=masters)
        train(optimizer, 3)
        found.append(everything(optimizer))
    assert_same(*found)


def test_too_much_is_refused_with_its_bytes():
    with pytest.raises(
        HostMemoryError, match=r"must find 1,152,921,504,606,846,976 bytes .* got none: cu"
    ):
        HostMemory(torch.device("cuda")).empty((2**60,), torch.uint8)
    torch.zeros(1, device="cuda").add_(1).cpu()  # the card is as it was


# --- FSDP2


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("options", [MASTER, {**REMAINDERS, **BLOCKS}], ids=["fp32", "blocks"])
def test_shards_have_their_states_in_host_memory(gpu_mesh, options, flat):
    given, found = StateDictOptions(flatten_optimizer_state_dict=flat), []
    for device in (None, "cpu"):
        made, saved = [], None
        for first in (0, 2):
            model = fully_shard(Bare(ROWS, BF16).cuda(), mesh=gpu_mesh)
            optimizer = FusedAdam(model.parameters(), lr=0.01, state_device=device, **options)
            if saved is not None:
                with torch.no_grad():
                    for param, other in zip(model.parameters(), made[0], strict=True):
                        param.copy_(other)
                set_optimizer_state_dict(model, optimizer, saved, options=given)
            for step in range(first, first + 2):
                own = [grad.cuda() for grad in gradients(step, ROWS, BF16)]
                give(model.parameters(), own)
                optimizer.step(clip_norm=1.0)
            made = [[param.detach().clone() for param in model.parameters()]]
            saved = get_optimizer_state_dict(model, optimizer, options=given)
        states = optimizer.state.values()
        kept = [
            {n: t._local_tensor.cpu() for n, t in own.items() if t is not None} for own in states
        ]
        torch.cuda.synchronize()
        found.append(
            copied([kept, [w._local_tensor.cpu() for w in made[0]], optimizer.grad_norm.cpu()])
        )
        devices = {own["exp_avg"].device.type for own in states}
        assert devices == {"cpu" if device else "cuda"}
    assert_same(*found)
