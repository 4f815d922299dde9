"""A rank's Megatron-Core GPT: its meeting with the others, its steps, and what they take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaopt.lab.regression.megatron import state
from megaopt.lab.regression.megatron.config import MegatronRun, MegatronVariant, StockVariant
from megaopt.lab.regression.megatron.cpu import pretend_cuda
from megaopt.lab.regression.megatron.model import (
    ForwardStep,
    build_gpt,
    megatron,
    transformer_config,
)
from megaopt.lab.regression.megatron.optimizer import build_optimizer, leaves
from megaopt.lab.regression.parts import Part
from megaopt.recording.files import hexadecimal

if TYPE_CHECKING:
    from megaopt.lab.regression.processes import RankTask

SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""The settings under which a run repeats itself on GPUs; those of the environment go first."""
# the format whose loads are exact in the supported releases, with several buckets too
METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def settings() -> dict[str, str]:
    """SETTINGS, but for what the environment says otherwise."""
    return {key: os.environ.get(key, value) for key, value in SETTINGS.items()}


def build(task: RankTask) -> MegatronTraining:
    """The training of a rank's process, which meets the others."""
    run, variant = task.run, task.job.variant
    assert isinstance(run, MegatronRun)
    assert isinstance(variant, MegatronVariant)
    os.environ.update(settings())
    ranks = str(task.job.ranks)
    os.environ.update(RANK=str(task.rank), LOCAL_RANK=str(task.rank), WORLD_SIZE=ranks)
    # a warning and no refusal: Megatron calls operations that are marked without need
    torch.use_deterministic_algorithms(True, warn_only=True)
    # else every torch.empty would be filled, within the time taken
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    device = torch.device("cuda", task.rank) if task.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        pretend_cuda()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        task.meeting,
        timedelta(seconds=run.patience),
        world_size=task.job.ranks,
        rank=task.rank,
    )
    megatron("parallel_state").initialize_model_parallel(
        tensor_model_parallel_size=run.megatron.tensor_parallel,
        pipeline_model_parallel_size=run.megatron.pipeline_parallel,
        expert_model_parallel_size=run.megatron.expert_parallel,
    )
    torch.manual_seed(run.seed)
    if device.type == "cuda":
        megatron("tensor_parallel").model_parallel_cuda_manual_seed(run.seed)
    return MegatronTraining(run, variant, device)


class MegatronTraining:
    """A rank's model, optimizer and text; the ranks have met."""

    def __init__(self, run: MegatronRun, variant: MegatronVariant, device: torch.device) -> None:
        self.run, self.variant, self.device = run, variant, device
        config, adam = transformer_config(run, device), run.optimizer
        self.chunk = build_gpt(run, variant, config, device)
        self.optimizer = build_optimizer(run, variant, self.chunk)
        # the wrapper's and the optimizer's part in a step of Megatron's schedule
        config.finalize_model_grads_func = megatron("distributed").finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = self.chunk.no_sync
        if self.chunk.ddp_config.overlap_param_gather:
            config.param_sync_func = self.chunk.start_param_sync
        # Megatron's own, whose warm-up counts from 0; its steps are set, not counted, so a resumed
        # run needs no state
        self.scheduler = megatron("optimizer_param_scheduler").OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=adam.learning_rate,
            min_lr=0.0,
            lr_warmup_steps=adam.warmup_steps,
            lr_decay_steps=max(run.steps, adam.warmup_steps + 1),
            lr_decay_style="constant",
            start_wd=adam.weight_decay,
            end_wd=adam.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self.forward_step = ForwardStep(run, device)

    def step(self, number: int) -> dict[str, Any]:
        """Trains a step; with seconds, of the whole and of the optimizer's part, and bytes."""
        memory_of(self.device)
        began = time.perf_counter()
        # gradients of all micro batches; the last pipeline stage alone has the losses
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_backward = megatron("pipeline_parallel.schedules").get_forward_backward_func()
        reports = forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=self.forward_step.data(number),
            model=[self.chunk],
            num_microbatches=self.forward_step.micro_batches,
            seq_length=self.run.model.context,
            micro_batch_size=self.run.megatron.micro_batch_size,
            forward_only=False,
        )
        losses = torch.stack([report["loss"] for report in reports]).tolist() if reports else []
        peak, before = memory_of(self.device)
        self.scheduler.num_steps = number
        self.scheduler.step(increment=0)
        # so that no rank waits for another within the time taken
        dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        _, norm, _ = self.optimizer.step()
        self._synchronize()
        stop = time.perf_counter()
        own_peak, after = memory_of(self.device)
        extra = {
            "peak_bytes": max(peak, own_peak),
            "optimizer_extra_bytes": own_peak - before,
            "allocated_bytes": after,
        }
        return {
            "losses": [hexadecimal(loss) for loss in losses],
            "grad_norm": hexadecimal(norm) if self.run.clips else None,
            "optimizer_seconds": stop - start,
            "seconds": stop - began,
            "state_bytes": state.state_bytes(self.optimizer),
            **(extra if self.device.type == "cuda" else {}),
        }

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def parts(self) -> Iterable[Part]:
        """The shards of this rank."""
        groups, config = megatron("parallel_state"), self.run.megatron
        rank, stage = groups.get_tensor_model_parallel_rank, groups.get_pipeline_model_parallel_rank
        suffix = f" (tensor-parallel rank {rank()})" if config.tensor_parallel > 1 else ""
        suffix += f" (pipeline stage {stage()})" if config.pipeline_parallel > 1 else ""
        of_experts = suffix
        if config.expert_parallel > 1:
            of_experts += f" (expert-parallel rank {groups.get_expert_model_parallel_rank()})"
        return state.parts(self.chunk, self.optimizer, suffix, of_experts)

    def about(self) -> dict[str, Any]:
        """Sizes, and whose Adam it is."""
        return {
            "parameters": sum(p.numel() for p in self.chunk.module.parameters()),
            "buckets": [
                [bucket.grad_data.numel() for bucket in buffer.buckets]
                for buffer in self.chunk.buffers
            ],
            "inner_optimizer": type(leaves(self.optimizer)[0].optimizer).__qualname__,
        }

    # --- checkpoints in Megatron's own format, which all ranks save and load together

    def save(self, path: Path) -> None:
        """Saves in a folder that need not exist."""
        gathers = self.chunk.ddp_config.overlap_param_gather
        if gathers:
            # the weights of the step just made have not been gathered yet
            self.chunk.disable_forward_pre_hook(param_sync=True)
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        megatron("dist_checkpointing").save(self._sharded_state(False), str(path))
        if gathers:
            self.chunk.enable_forward_pre_hook()

    def load(self, path: Path) -> None:
        """Continues what `save` saved, of any number of data-parallel ranks."""
        # TransformerEngine pickles delayed scaling's histories, and loads what is known to be one's
        # own
        os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
        loaded = megatron("dist_checkpointing").load(self._sharded_state(True), str(path))
        self.chunk.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        if isinstance(self.variant, StockVariant) and self.variant.cast_after_load:
            # Megatron's checkpoints hold fp8 weights as what they stand for. Under delayed scaling,
            # what it quantizes again at a load was seen not to be what a run that went on had
            # (docs/numbers.md): masters are cast to weights, as after a step
            for leaf in leaves(self.optimizer):
                leaf._copy_main_params_to_model_params()
            if not self.chunk.ddp_config.overlap_param_gather:  # else the next forward pass gathers
                self.chunk.start_param_sync()

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        model = self.chunk.module.sharded_state_dict()
        options = {"is_loading": is_loading, "metadata": METADATA}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, **options)}


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU: the peak since the last call, and what is there now; 0 on the CPU."""
    if device.type == "cpu":
        return 0, 0
    peak_and_now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak_and_now
