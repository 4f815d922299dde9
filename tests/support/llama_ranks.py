"""A Llama of 0.43e9 parameters, sharded layer by layer as people do it."""

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW

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


def train(model, optimizer, steps):
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
    losses = train(model, optimizer, range(steps - behind))
    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    losses += train(model, optimizer, range(steps - behind, steps))
    del model, optimizer, weights, states
    model = model_of()
    optimizer = kind(groups_of(kind, model), **options)
    weights, states = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": states}
    checkpoint.load(saved, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    return losses, train(model, optimizer, range(steps - behind, steps))
