"""A small GPT of Megatron-Core on the distributed optimizer's shards, saved and resumed.

    torchrun --nproc-per-node 2 docs/how-to/megatron_core.py checkpoint

trains 6 steps, saving after 3; started again, with another number of ranks say, it goes on from
there. megatron.md explains it. Without a GPU it runs on the CPU.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS, SAVE_AT = 6, 3
VOCABULARY, LENGTH = 64, 16


def build() -> tuple[Any, Any]:
    """Megatron's DistributedDataParallel around a GPT in bf16, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from megaopt.integration.megatron import get_megatron_optimizer

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        # fused kernels of the forward, which need a GPU
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )
    model = model.bfloat16().cuda()
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(config, settings, model)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,  # as in DDP's settings
        clip_grad=1.0,
    )
    return ddp, get_megatron_optimizer(optimizer_config, [ddp])


def contents(ddp: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """The contents of a checkpoint: each rank writes, and reads, its own shards."""
    model = ddp.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": state}


def resume(ddp: Any, optimizer: Any, folder: Path) -> int:
    """Takes over the checkpoint, if there is one; the number of steps that were taken."""
    from megatron.core import dist_checkpointing

    if not any(folder.iterdir()):
        return 0
    loaded = dist_checkpointing.load(contents(ddp, optimizer, is_loading=True), str(folder))
    ddp.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    step: int = optimizer.param_groups[0]["step"]
    return step


def train(folder: Path) -> list[float]:
    """The losses of the steps that were left to take."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import finalize_model_grads

    ddp, optimizer = build()
    losses = []
    for step in range(resume(ddp, optimizer, folder), STEPS):
        tokens = (torch.arange(4 * LENGTH) * (step + 1) % VOCABULARY).view(4, LENGTH).cuda()
        positions = torch.arange(LENGTH).expand(4, LENGTH).cuda()
        causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1).cuda()
        ddp.zero_grad_buffer()
        loss = ddp(tokens, positions, causal, labels=(tokens + 1) % VOCABULARY).mean()
        loss.backward()
        finalize_model_grads([ddp])  # sums of gradients over the ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVE_AT:
            dist_checkpointing.save(contents(ddp, optimizer, is_loading=False), str(folder))
    return losses


def main() -> None:
    """A rank of torchrun."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from megaopt.lab.regression.megatron.cpu import pretend_cuda

        pretend_cuda()  # Megatron asks for CUDA: this puts on the CPU what it wants on the GPU
    dist.init_process_group("nccl" if on_gpu else "gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    if on_gpu:
        model_parallel_cuda_manual_seed(1)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    losses = train(folder)
    if dist.get_rank() == 0:
        print(*losses)
    dist.destroy_process_group()


if __name__ == "__main__":  # Megatron's save starts processes that import this file
    main()
