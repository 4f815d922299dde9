"""DTensors on two cards, over NCCL: the bits of one process."""

import random
import shutil
import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp2_ranks import (
    assert_same_on_all,
    content_of,
    gradients,
    raised_by,
    snapshot,
    split_like,
    train,
)
from fsdp2_uses import USES, resumed_beside_one, stepped_beside_one
from galore_ranks import placed_galore, ranked
from late_exchange import wrapped_messages
from muon_ranks import by_launches, divided, in_small_buckets, made_at, placed
from ranks import Ranks
from runs import BF16, FP32, MASTER, REMAINDERS, assert_same, on_cpu
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW
from megaopt.kernels.muon import ranks as muon_ranks

# A Llama of 0.43e9 parameters, sharded layer by layer as people do it.

MASTERS = {"dtype": torch.float32}
OPTIMIZERS = {
    "adam": (FusedAdam, {**MASTERS, "weight_decay": 0.1}),
    "adam, 8 bits": (
        FusedAdam,
        {
            "weight_rounding": "stochastic",
            "exp_avg_dtype": "block_e4m3",
            "exp_avg_sq_dtype": "block_e5m3",
        },
    ),
    "lion": (FusedLion, {**MASTERS, "lr": 3e-5}),
    "sgd": (FusedSGD, {**MASTERS, "lr": 0.1, "momentum": 0.9}),
    "muon": (FusedMuon, MASTERS),
    "muon, fp16": (FusedMuon, {**MASTERS, "precision": "fp16", "method": "auto"}),
    "muon, normuon": (
        FusedMuon,
        {
            **MASTERS,
            "store_param_remainders": True,
            "precision": "fp16",
            "second_moment": "normuon",
        },
    ),
    "muon, 8 bits": (FusedMuon, {**MASTERS, "momentum_buffer_dtype": "block_int8"}),
    "galore": (GaLoreAdamW, MASTERS),
}
VOCABULARY, TOKENS, BATCH = 32000, 512, 2


def model_of(layers=12, width=1536):
    """A new one with the same weights on all ranks, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        attn_implementation="eager",  # whose backward pass has the same bits in each run
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def groups_of(kind, model):
    """Matrices of layers to Muon or GaLore, all else to AdamW."""
    if kind not in (FusedMuon, GaLoreAdamW):
        return model.parameters()
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    if kind is FusedMuon:
        return [{"params": hidden}, {"params": others, "use_muon": False}]
    return [{"params": hidden, "rank": 64, "update_proj_gap": 50}, {"params": others}]


def losses_of(model, optimizer, steps):
    """The losses of steps, as whole numbers of their bits."""
    losses = []
    for step in steps:
        chance = torch.Generator().manual_seed(2 * step + dist.get_rank())
        # tokens that follow each other by a rule, for there to be something to learn
        first = torch.randint(VOCABULARY // 4, (BATCH, 1), generator=chance)
        tokens = ((first + 7 * torch.arange(TOKENS)) % (VOCABULARY // 4)).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step(clip_norm=1.0)
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu().tolist()


def trained_and_resumed(name, steps, folder, behind=20):
    """The losses of steps, and those of the last ones by a new model that loads what was saved."""
    kind, options = OPTIMIZERS[name]
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = model_of()
    optimizer = kind(groups_of(kind, model), **options)
    losses = losses_of(model, optimizer, range(steps - behind))
    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    losses += losses_of(model, optimizer, range(steps - behind, steps))
    del model, optimizer, weights, states
    model = model_of()
    optimizer = kind(groups_of(kind, model), **options)
    weights, states = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": states}
    checkpoint.load(saved, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    return losses, losses_of(model, optimizer, range(steps - behind, steps))


# Cards that are late by chance, and memory that moves from step to step.

CYCLES = 2_000_000
"""For as long as so many a stream is kept busy at most: some millisecond."""
NUMBERS = 2**22
"""As many a block of memory has at most."""


def disturbed(seed, function, *arguments, **named):
    """What a function returns while streams are late and memory moves, on each rank otherwise."""
    chance = random.Random(1000 * seed + dist.get_rank())
    with late_messages(chance), moving_memory(chance):
        return function(*arguments, **named)


@contextmanager
def late_messages(chance):
    """Within it the stream is busy before each message and behind it, and memory is poisoned."""

    def late(collective):
        def called(*arguments, **options):
            torch.cuda._sleep(chance.randrange(CYCLES))
            message = collective(*arguments, **options)
            poison(chance)
            torch.cuda._sleep(chance.randrange(CYCLES))
            return message

        return called

    with wrapped_messages(late):
        yield


@contextmanager
def moving_memory(chance):
    """Within it a thread takes memory on a stream of its own, writes it and gives it back."""
    ended, device = threading.Event(), torch.cuda.current_device()

    def run():
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            while not ended.wait(0.01):
                poison(chance)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def poison(chance):
    """Fills some blocks of memory with NaN, and gives them back."""
    for _ in range(3):
        torch.full((chance.randrange(1, NUMBERS),), torch.nan, device="cuda")


# What ranks with a card each do: captured steps, runs that go on elsewhere, ranks that fail.

MIDDLE = {
    "direct": (muon_ranks.MuonBucket, "direct"),
    "make": (muon_ranks.MuonBucket, "make"),
    "finish": (muon_ranks.MuonBucket, "finish"),
}
"""Where a rank fails while others wait for what it sends."""


def fill(model, step, shapes):
    """Gradients of a step, in memory that stays where it is, as a graph needs them."""
    params = list(model.parameters())
    for param, grad in zip(params, gradients(step, shapes, params[0].dtype), strict=True):
        part = grad.to(param.device)
        if isinstance(param, DTensor):
            part = split_like(param, part).to_local()
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        whole = param.grad.to_local() if isinstance(param, DTensor) else param.grad
        whole.copy_(part)


def captured_beside_eager(options, shapes, replays, device="cuda", **named):
    """What an optimizer has after steps that a graph repeats, and another after eager ones.

    The learning rate changes between them, and one of the steps is left out.
    """
    pair = [
        made_at({**options, "capturable": True}, shapes=shapes, device=device, **named)
        for _ in range(2)
    ]
    optimizers = [optimizer for _, optimizer in pair]
    for each in optimizers:
        each.found_inf = torch.zeros(1, device=device)

    def begin(step):
        for own, each in pair:
            fill(own, step, shapes)
            for group in each.param_groups:
                group["lr"].fill_(0.02 / (step + 1))
            each.found_inf.fill_(float(step == 5))

    for step in range(3):
        begin(step)
        for each in optimizers:
            each.step(clip_norm=1.0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizers[0].step(clip_norm=1.0)
    for step in range(3, 3 + replays):
        begin(step)
        graph.replay()
        optimizers[1].step(clip_norm=1.0)
    found = [on_cpu(snapshot(each)) for each in optimizers]
    graph.reset()  # before its ranks' group ends
    return found


def gone_on(options, folder, first, steps, shapes, number=0, device="cuda", **named):
    """What an optimizer has after steps that go on from a checkpoint, and are saved again.

    first: the steps before, of which there is a checkpoint if there are any. number: of the
    checkpoint that is loaded; the next one is saved.
    """
    model, optimizer = made_at(options, shapes=shapes, device=device, **named)
    alone = {"no_dist": not dist.is_initialized()}
    if first:
        content = content_of(model, optimizer, None)
        checkpoint.load(content, checkpoint_id=f"{folder}/{number}", **alone)
        set_model_state_dict(model, content["model"])
        set_optimizer_state_dict(model, optimizer, content["optimizer"])
    train(model, optimizer, steps, first=first, clip_norm=1.0)
    content = content_of(model, optimizer, None)
    checkpoint.save(content, checkpoint_id=f"{folder}/{number + 1}", **alone)
    return on_cpu(snapshot(optimizer))


def said_of(kind, options, shapes, device="cuda", **named):
    """The errors of a step in which the last rank fails, and of two more."""
    model, optimizer = made_at(options, shapes=shapes, device=device, **named)
    train(model, optimizer, 2, clip_norm=1.0)
    errors, is_last = [], dist.get_rank() == dist.get_world_size() - 1
    failing = mock.patch.object(*MIDDLE[kind], side_effect=RuntimeError("no memory"))
    for step in range(2, 5):
        fill(model, step, shapes)
        with failing if is_last and step == 2 else nullcontext():
            errors.append(raised_by(lambda: optimizer.step(clip_norm=1.0)))
    return errors


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
SHAPES = (
    (768, 3072), (1000, 77), (7, 5), (2304, 768), (33,), (1, 40), (513, 1024), (8, 96, 64),
    (300, 300),
)  # fmt: skip
"""Wide, uneven, tiny, a vector, a row, experts, a square."""
CASES = {
    "adam": (placed, {"optimizer": FusedAdam, "weights": BF16, **MASTER}),
    "adam, remainders": (placed, {"optimizer": FusedAdam, "weights": BF16, **REMAINDERS}),
    "adam, drawn": (
        placed,
        {
            "optimizer": FusedAdam, "weights": BF16, "weight_rounding": "stochastic", "seed": 7,
            "exp_avg_dtype": "bfloat16_stochastic",
        },
    ),
    "adam, blocks": (
        placed,
        {
            "optimizer": FusedAdam, "weights": BF16, **MASTER, "exp_avg_dtype": "block_e4m3",
            "exp_avg_sq_dtype": "block_e5m3", "seed": 5,
        },
    ),
    "lion": (placed, {"optimizer": FusedLion, "weights": BF16, **MASTER}),
    "sgd": (placed, {"optimizer": FusedSGD, "weights": BF16, **MASTER, "momentum": 0.9, "lr": 0.1}),
    "muon": (placed, {"weights": BF16, **MASTER}),
    "muon, block_int8": (
        placed, {"weights": BF16, **MASTER, "momentum_buffer_dtype": "block_int8"},
    ),
    "muon, fp16, auto": (
        placed, {"weights": BF16, **MASTER, "precision": "fp16", "method": "auto"},
    ),
    "muon, fp16, normuon, remainders": (
        placed,
        {"weights": BF16, **REMAINDERS, "precision": "fp16", "second_moment": "normuon"},
    ),
    "muon, drawn": (placed, {"weights": BF16, "weight_rounding": "stochastic", "seed": 7}),
    "galore": (
        placed_galore, {"weights": BF16, **MASTER, "proj_type": "left", "precision": "bf16"},
    ),
    "galore, rows": (placed_galore, {"weights": BF16, **MASTER, "precision": "bf16"}),
    "galore, rows, tf32": (placed_galore, {"weights": BF16, **MASTER, "precision": "tf32"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def on_two_cards(tmp_path_factory):
    """Calls a function on two ranks with a card each; what it returned on each."""
    pools = []

    def run(function, *arguments, **named):
        if not pools or pools[-1].failed:
            folder = tmp_path_factory.mktemp("ranks")
            pools.append(Ranks(2, folder, backend="cpu:gloo,cuda:nccl"))
        return pools[-1](function, *arguments, **named)

    yield run
    for pool in pools:
        pool.close(kill=True)  # nobody needs NCCL to end its groups one after another


EVEN = (
    (256, 640), (640, 256), (77, 130), (33,), (1, 40), (5, 96, 64), (300, 300), (192, 512),
    (300, 300),
)  # fmt: skip
"""Shapes of which none is half of the work, nor half of that of momenta that are no whole blocks:
such a matrix two ranks would make together by torch's operations."""
DRAWN = {"weight_rounding": "stochastic", "seed": 7, "momentum_buffer_dtype": "bfloat16_stochastic"}
NORMUON = {"second_moment": "normuon"}
FP16, GRAM = {"precision": "fp16"}, {"method": "gram"}
REMAINDER8, KAHAN = (
    {"master_weights": True, "master_weight_dtype": name} for name in ("remainder8", "kahan")
)
BLOCKS = {"momentum_buffer_dtype": "block_int8", "seed": 5}
LAUNCHED = {
    "fp32": {"weights": FP32},
    "fp32, fp16, gram": {"weights": FP32, **FP16, **GRAM},
    "masters": {"weights": BF16, **MASTER, "method": "standard"},
    "masters, fp16, gram": {"weights": BF16, **MASTER, **FP16, **GRAM},
    "masters, fp16, normuon": {"weights": BF16, **MASTER, **FP16, "method": "standard", **NORMUON},
    "remainders, normuon": {"weights": BF16, **REMAINDERS, **NORMUON},
    "remainders, fp16, blocks": {"weights": BF16, **REMAINDERS, **FP16, **BLOCKS},
    "24 bits, fp16, gram": {"weights": BF16, **REMAINDER8, **FP16, **GRAM},
    "kahan, normuon, blocks": {"weights": BF16, **KAHAN, **NORMUON, **BLOCKS},
    "drawn": {"weights": BF16, **DRAWN},
    "drawn, fp16, gram, normuon": {"weights": BF16, **DRAWN, **FP16, **GRAM, **NORMUON},
}
"""FusedMuon's formats, precisions and forms."""


@pytest.mark.parametrize("placements", ["rows", "by turns"])
@pytest.mark.parametrize("name", CASES)
def test_two_cards_have_the_bits_of_one(on_two_cards, name, placements):
    """Where streams are late by chance, and memory lies elsewhere in each step."""
    made, options = CASES[name]
    step = {"clip_norm": 1.0, "shapes": SHAPES, "device": "cuda"}
    split = {"placements": placements, "sizes": (2,)}
    found = on_two_cards(disturbed, 0, made, options, 12, **split, **step)
    assert_same_on_all(found, made(options, 12, **step))


@pytest.mark.parametrize("room", [2**18, 2**26])
@pytest.mark.parametrize("name", LAUNCHED)
def test_launches_on_two_cards_have_the_bits_of_one(on_two_cards, name, room):
    """Buckets of a matrix or two take turns with the memory; or there is one of all."""
    step = {"clip_norm": 1.0, "shapes": EVEN, "device": "cuda"}
    split = {"placements": "rows" if room == 2**18 else "by turns", "sizes": (2,)}
    called = (in_small_buckets, room, LAUNCHED[name], 8)
    found = on_two_cards(disturbed, 1, *called, made=by_launches, **split, **step)
    assert_same_on_all(found, placed(LAUNCHED[name], 8, **step))


@pytest.mark.parametrize(
    "placements", ["copies of rows", "copies of columns", "columns and copies"]
)
@pytest.mark.parametrize("name", ["masters, fp16, normuon", "drawn"])
def test_two_cards_with_copies_have_the_bits_of_one(on_two_cards, name, placements):
    """Each has all of every matrix, of which one makes the update for both; or each has columns."""
    step = {"clip_norm": 1.0, "shapes": EVEN, "device": "cuda"}
    split = {"placements": placements, "sizes": (2, 1)}
    found = on_two_cards(disturbed, 2, placed, LAUNCHED[name], 8, **split, **step)
    assert_same_on_all(found, placed(LAUNCHED[name], 8, **step))


MADE_ONCE = {"update_proj_gap": 1000, "stagger": False, "weights": BF16, **MASTER}


@pytest.mark.parametrize("room", [2**16, 2**26])
@pytest.mark.parametrize("name", ["masters, fp16, normuon", "remainders, normuon", "drawn"])
def test_two_cards_that_have_all_divide_the_work(on_two_cards, name, room):
    """Plain parameters; many buckets of updates take turns with the memory, or there is one."""
    step = {"clip_norm": 1.0, "shapes": EVEN, "device": "cuda"}
    called = (in_small_buckets, room, LAUNCHED[name], 8)
    found = on_two_cards(disturbed, 4, *called, made=divided, **step)
    assert_same_on_all(found, divided(LAUNCHED[name], 8, **step))


GRAPHS = {
    "adam": {"optimizer": FusedAdam, "weights": BF16, **MASTER},
    "adam, remainders": {"optimizer": FusedAdam, "weights": BF16, **REMAINDERS},
    "muon": LAUNCHED["masters"],
    "muon, fp16, normuon": LAUNCHED["masters, fp16, normuon"],
    "muon, fp16, blocks": LAUNCHED["remainders, fp16, blocks"],
    "muon, drawn": LAUNCHED["drawn"],
    "galore": ranked({**MADE_ONCE, "proj_type": "left", "precision": "bf16"}),
    "galore, rows": ranked({**MADE_ONCE, "precision": "tf32"}),
}


@pytest.mark.parametrize("placements", ["rows", "by turns"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_repeats_the_steps_of_two_cards(on_two_cards, name, placements):
    """Of launches and messages; another optimizer takes eager steps, to the same bits."""
    split = {"placements": placements, "sizes": (2,)}
    for replayed, eager in on_two_cards(captured_beside_eager, GRAPHS[name], EVEN, 5, **split):
        assert_same(replayed, eager)


RESUMED = {
    "adam, remainders": (GRAPHS["adam, remainders"], "rows"),
    "muon, fp16": (LAUNCHED["masters, fp16, normuon"], "by turns"),
    "muon, drawn": (LAUNCHED["drawn, fp16, gram, normuon"], "rows"),
    "muon, blocks": (LAUNCHED["kahan, normuon, blocks"], "rows"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("options", "placements"), RESUMED.values(), ids=RESUMED)
def test_a_run_goes_on_on_one_card_and_comes_back(on_two_cards, tmp_path, options, placements):
    """Three steps on two cards, on one without a mesh, and on two."""
    split = {"placements": placements, "sizes": (2,)}
    folder = str(tmp_path)
    on_two_cards(gone_on, options, folder, 0, 3, EVEN, **split)
    alone = gone_on(options, folder, 3, 3, EVEN, number=1)
    step = {"clip_norm": 1.0, "shapes": EVEN, "device": "cuda"}
    assert_same(alone, placed(options, 6, **step))
    found = on_two_cards(gone_on, options, folder, 6, 3, EVEN, number=2, **split)
    assert_same_on_all(found, placed(options, 9, **step))


@pytest.mark.parametrize("kind", MIDDLE)
def test_a_card_that_fails_within_a_step_has_both_raise(on_two_cards, kind):
    """It goes on with the exchange, so that nobody waits for it, and raises at its end.

    The other one's host does not wait to hear of it: its next step finds that the counts of steps
    differ, the device leaves that one out, and the step after it raises on both.
    """
    options = LAUNCHED["masters, fp16, normuon"]
    split = {"placements": "rows", "sizes": (2,)}
    first, last = on_two_cards(said_of, kind, options, EVEN, **split)
    assert [*first[:2], *last[:2]] == [None, None, "RuntimeError: no memory", None]
    differ = "ranks that hold parts of the same parameters must step the same"
    for error in (first[2], last[2]):
        assert f"{differ}, got step of group 0: 3 on rank 0, 2 on rank 1" in error


@pytest.mark.parametrize("kind", ["adam", "muon", "galore"])
@pytest.mark.parametrize("use", [name for name, use in USES.items() if use.ranks == 2])
def test_fsdp2_as_used(on_two_cards, use, kind):
    """By the gradients that it makes, steps have the bits of one process."""
    step = (stepped_beside_one, use, kind)
    for untouched in on_two_cards(disturbed, 0, *step, device="cuda"):
        assert not untouched


@pytest.mark.parametrize(("use", "kind"), [("experts", "muon"), ("mixed, bf16", "adam")])
def test_a_run_goes_on_from_a_checkpoint(on_two_cards, tmp_path, use, kind):
    """The run goes on while it is saved."""
    saves = (resumed_beside_one, use, kind, str(tmp_path / "saved"), True)
    for straight, resumed in on_two_cards(disturbed, 0, *saves, device="cuda"):
        assert_same(resumed, straight)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["masters", "drawn, fp16, gram, normuon"])
def test_a_thousand_steps_of_cards_that_are_late_have_the_bits_of_one(name, tmp_path):
    """Either one, by chance; many buckets take turns with the memory."""
    shapes = ((64, 96), (96, 64), (40, 130), (33,), (5, 32, 48), (64, 64))
    step = {"clip_norm": 1.0, "shapes": shapes, "device": "cuda"}
    called = (in_small_buckets, 2**13, LAUNCHED[name], 1000)
    ranks = Ranks(2, tmp_path, backend="cpu:gloo,cuda:nccl", patience=600)
    try:
        found = ranks(disturbed, 3, *called, placements="rows", sizes=(2,), **step)
    finally:
        ranks.close(kill=True)
    assert_same_on_all(found, placed(LAUNCHED[name], 1000, **step))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(5))
def test_a_llama_goes_on_as_if_it_had_not_stopped(start, tmp_path):
    """200 steps of each optimizer under FSDP2, saved 20 before the end; a start has new processes.

    It needs the cards alone: where they change between processes, each message waits for both.
    """
    ranks = Ranks(2, tmp_path, backend="cpu:gloo,cuda:nccl", patience=600)
    try:
        for name in OPTIMIZERS:
            found = ranks(disturbed, start, trained_and_resumed, name, 200, tmp_path / "saved")
            for straight, resumed in found:
                assert len(straight) == 200
                assert resumed == straight[-20:], name
                assert straight[-1] < straight[0], name
            shutil.rmtree(tmp_path / "saved")  # 5 GB
            print(f"start {start}, {name}: as if it had not stopped")
    finally:
        ranks.close(kill=True)
