"""A small GPT of Megatron-Core, trained with its own optimizer or with ours; what it computes."""

import contextlib
import hashlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from unfused_torch import BETAS, EPS, UnfusedAdam, UnfusedAdamW

from megaopt.integration import megatron as ours


def is_newer_than_16():
    """By the code on the path, which need not be what is installed."""
    found = importlib.util.find_spec("megatron")
    if found is None:
        return False
    text = (
        Path(next(iter(found.submodule_search_locations)))
        / "core"
        / "optimizer"
        / "distrib_optimizer.py"
    ).read_text()
    return "def optimizer_state_keys" in text


VOCABULARY, LENGTH, BATCH = 64, 16, 2
HAS_KEYS = is_newer_than_16()
"""Whether Megatron's release has names for the moments of other optimizers than Adam."""
KEYS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """How to train."""

    plug: str | None = None
    """The mode of ours; None: Megatron's own optimizer."""
    dtype: torch.dtype = torch.bfloat16
    fp32_grads: bool = True
    overlap: bool = True
    """Of the reduction of gradients and of the gathering of weights."""
    gathers_late: bool = True
    buckets: int | None = 6000
    """Elements of a bucket."""
    experts: int | None = None
    tensor_parallel: int = 1
    lr: float | None = 1e-2
    """Of the config; each step sets the groups' own."""
    lr_apart: float = 1e-4
    """By how much the lr of a group is above that of the one before."""
    clip_grad: float = 1.0
    initial_scale: float = 2.0**16
    counts_zeros: bool = False
    adam_w_mode: bool = True
    as_context: bool = False
    rounds_clipped: bool = False
    """Megatron's own optimizer rounds clipped gradients to bf16, as it does to those that are bf16
    in its precision-aware mode (which needs TransformerEngine)."""
    options: dict = field(default_factory=dict)
    """Of ours."""
    hidden: int = 32
    inner: int = 64
    """Sizes of the layers."""
    heads: int = 2
    pads_buckets: bool = False
    """pad_buckets_for_high_nccl_busbw."""
    pipeline: int = 1
    virtual: int | None = None
    """Chunks of the model on each pipeline stage."""
    context: int = 1
    """Ranks of a context-parallel group; each has tokens of its own, attention stays local."""
    instances: int = 1
    """Of the distributed optimizer."""
    shared_experts: bool = False
    frozen: str | None = None
    """Parameters whose name has this in it are not trained."""
    trained: str | None = None
    """Only parameters whose name has this in it are trained."""
    decoupled_lr: float | None = None
    """Of embedding and output layer."""
    tied: bool = False
    """Embedding and output layer share their weight, over pipeline stages."""
    mtp: bool = False
    """A layer that predicts the token after the next one, whose parameters are tagged."""
    mxfp8: bool = False
    """Matrices stand for MXFP8 parameters, within megatron_mxfp8.stand_ins."""
    config: dict = field(default_factory=dict)
    """More of Megatron's OptimizerConfig, set when it is made."""
    shards: bool = True
    """DDP is told of the distributed optimizer."""
    lays_out: bool = False
    """The distributed optimizer's buffers keep each matrix on one rank, for the layer-wise one."""
    groups: int | None = None
    """Query groups of attention; None: one a head."""
    gated: bool = False
    """QKV weights have the rows of attention's output gate too."""


def megatron(name):
    return importlib.import_module(f"megatron.core.{name}")


def build_chunks(case):
    """Config, and DDP around each chunk of a GPT; the same weights whatever the number of ranks."""
    config_class = megatron("transformer").TransformerConfig
    experts = {}
    if case.experts:
        size = dist.get_world_size() if dist.get_world_size() <= case.experts else 1
        experts = {
            "num_moe_experts": case.experts,
            "expert_model_parallel_size": size,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "add_bias_linear": False,
        }
        if case.shared_experts:
            experts["moe_shared_expert_intermediate_size"] = case.inner
    more = {"mtp_num_layers": 1} if case.mtp else {}
    if case.gated:
        more["attention_output_gate"] = True
    config = config_class(
        num_layers=2 * (case.virtual or 1),
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        ffn_hidden_size=case.inner,
        bf16=case.dtype == torch.bfloat16,
        fp16=case.dtype == torch.float16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=case.tensor_parallel,
        attention_backend=megatron("transformer.enums").AttnBackend.unfused,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual,
        **experts,
        **more,
    )
    return config, [wrap(case, config, stage) for stage in range(case.virtual or 1)]


def build_model(case):
    """As build_chunks, of a model in one chunk."""
    config, (chunk,) = build_chunks(case)
    return config, chunk


def wrap(case, config, virtual_stage):
    torch.manual_seed(1234)
    states = megatron("parallel_state")
    specs = megatron("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec(num_experts=case.experts, normalization="LayerNorm")
    stage = states.get_pipeline_model_parallel_rank()
    last_virtual = (case.virtual or 1) - 1
    more = {} if case.virtual is None else {"vp_stage": virtual_stage}
    if case.mtp:
        more["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(config, spec, False)
    model = (
        megatron("models.gpt.gpt_model")
        .GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            # Megatron's rope cuts sequences where there are context-parallel groups
            position_embedding_type="rope" if case.context == 1 else "learned_absolute",
            pre_process=stage == 0 and virtual_stage == 0,
            post_process=stage == case.pipeline - 1 and virtual_stage == last_virtual,
            share_embeddings_and_output_weights=case.tied,
            **more,
        )
        .to(case.dtype)
    )
    for name, param in model.named_parameters():
        if case.mtp and ".mtp." in f".{name}":
            param.grad_norm_group = "mtp"
        if case.mxfp8 and param.ndim > 1:
            param.is_stand_in = True
        is_left_out = case.trained is not None and case.trained not in name
        if is_left_out or (case.frozen is not None and case.frozen in name):
            param.requires_grad_(False)
    distributed = megatron("distributed")
    settings = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=case.shards,
        grad_reduce_in_fp32=case.fp32_grads,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap and case.gathers_late,
        bucket_size=case.buckets,
        pad_buckets_for_high_nccl_busbw=case.pads_buckets,
        num_distributed_optimizer_instances=case.instances,
        reuse_grad_buf_for_mxfp8_param_ag=case.mxfp8,
        fp8_param_gather=case.mxfp8,
    )
    more = {"full_param_layout": whole_layout(model, settings)} if case.lays_out else {}
    return distributed.DistributedDataParallel(config, settings, model, **more)


def whole_layout(model, settings):
    """As Megatron's training makes it for the layer-wise optimizer, after release 0.16."""
    own = megatron("optimizer.layer_wise_optimizer")
    own.tag_params_for_buffer_routing([model])
    make = own.LayerWiseDistributedOptimizer.compute_full_param_layout
    ranks = megatron("parallel_state").get_data_parallel_world_size(with_context_parallel=True)
    params = [param for param in model.parameters() if param.requires_grad]
    return make(params, settings.bucket_size, ranks, settings)


def optimizer_config(case):
    config = megatron("optimizer").OptimizerConfig(
        optimizer="adam",
        lr=case.lr,
        weight_decay=0.1,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        bf16=case.dtype == torch.bfloat16,
        fp16=case.dtype == torch.float16,
        params_dtype=case.dtype,
        use_distributed_optimizer=True,
        clip_grad=case.clip_grad,
        initial_loss_scale=case.initial_scale,
        loss_scale_window=3,
        hysteresis=1,
        log_num_zeros_in_grad=case.counts_zeros,
        decoupled_weight_decay=case.adam_w_mode,
        decoupled_lr=case.decoupled_lr,
    )
    if case.mxfp8:
        overlap = case.overlap and case.gathers_late
        more = {"reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": overlap}
        vars(config).update(fp8_recipe="mxfp8", **more)
    vars(config).update(case.config)
    return config


def build_optimizer(case, chunk, config=None):
    config = config or optimizer_config(case)
    chunks = chunk if isinstance(chunk, list) else [chunk]
    factory = megatron("optimizer")
    if case.plug is None:
        kept = torch.optim.AdamW, torch.optim.Adam
        torch.optim.AdamW, torch.optim.Adam = UnfusedAdamW, UnfusedAdam
        try:
            return factory.get_megatron_optimizer(config, chunks)
        finally:
            torch.optim.AdamW, torch.optim.Adam = kept
    options = {"mode": case.plug, **case.options}
    if case.as_context:
        with ours.plugged_in(**options):
            return factory.get_megatron_optimizer(config, chunks)
    return ours.get_megatron_optimizer(config, chunks, **options)


MADE: list[dict] = []
"""The sizes for which this process's Megatron has process groups now."""


def make_groups(case):
    """Megatron's process groups, made anew only where sizes change: gloo's threads never end."""
    states = megatron("parallel_state")
    world = dist.get_world_size()
    sizes = {
        "tensor_model_parallel_size": case.tensor_parallel,
        "expert_model_parallel_size": world if case.experts and world <= case.experts else 1,
        "pipeline_model_parallel_size": case.pipeline,
        "virtual_pipeline_model_parallel_size": case.virtual,
        "context_parallel_size": case.context,
        "num_distributed_optimizer_instances": case.instances,
    }
    if [sizes] == MADE:
        return
    if states.model_parallel_is_initialized():
        states.destroy_model_parallel()
    states.initialize_model_parallel(**sizes)
    MADE[:] = [sizes]


@contextlib.contextmanager
def rounding_clipped():
    """Within it Megatron's clipping of fp32 copies rounds as that of bf16 gradients."""
    module = megatron("optimizer.optimizer")
    clip = module.clip_grad_by_total_norm_fp32

    def clip_and_round(params, *args, **kwargs):
        clip(params, *args, **kwargs)
        for param in params:
            param.grad.copy_(param.grad.bfloat16())

    module.clip_grad_by_total_norm_fp32 = clip_and_round
    try:
        yield
    finally:
        module.clip_grad_by_total_norm_fp32 = clip


class Trainer:
    """Model, optimizer, data."""

    def __init__(self, case):
        make_groups(case)
        self.case, self.done = case, 0
        self.config, self.chunks = build_chunks(case)
        self.chunk = self.chunks[0]
        self.optimizer = self.make_optimizer()
        self.config.finalize_model_grads_func = megatron("distributed").finalize_model_grads
        self.config.no_sync_func = self.all_of("no_sync")
        self.config.grad_scale_func = self.optimizer.scale_loss
        if self.chunk.ddp_config.overlap_param_gather:
            self.config.param_sync_func = self.all_of("start_param_sync")

    def make_optimizer(self):
        return build_optimizer(self.case, self.chunks)

    def all_of(self, name):
        found = [getattr(chunk, name) for chunk in self.chunks]
        return found if self.case.virtual else found[0]

    def batches(self):
        states = megatron("parallel_state")
        rank = states.get_data_parallel_rank(with_context_parallel=True)
        generator = torch.Generator().manual_seed(1000 * self.done + rank)
        while True:
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
            tokens[:, 1::2] = tokens[:, 0:-1:2]
            yield tokens

    def forward(self, batches, model):
        tokens = next(batches)
        positions = torch.arange(LENGTH).unsqueeze(0).expand(BATCH, LENGTH)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        labels = tokens[:, 1:].contiguous()
        output = model(tokens[:, :-1].contiguous(), positions, mask, labels=labels)

        def loss_of(losses):
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return output, loss_of

    def backward(self):
        """The mean loss of the ranks; leaves gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.stage()
        schedule = megatron("pipeline_parallel.schedules").get_forward_backward_func()
        data = [self.batches() for _ in self.chunks]
        found = schedule(
            forward_step_func=self.forward,
            data_iterator=data if self.case.virtual else data[0],
            model=self.chunks,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        # of the last stage alone
        losses = [each["loss"] for each in found] or [torch.zeros(())]
        loss = torch.stack(losses).mean().view(1)
        dist.all_reduce(loss)
        return loss.item()

    def step(self):
        """Loss, whether there was an update, norm, zeros; all by their bits."""
        for index, group in enumerate(self.optimizer.param_groups):
            lr = 1e-2 / (1 + self.done) + self.case.lr_apart * index
            lr += group["max_lr"] / 7 if self.case.decoupled_lr else 0
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # as Megatron's scheduler does it
            else:
                group["lr"] = lr
            group["weight_decay"] = 0.1 * group["wd_mult"]
        loss = self.backward()
        with rounding_clipped() if self.case.rounds_clipped else contextlib.nullcontext():
            updated, norm, zeros = self.optimizer.step()
        self.done += 1
        return loss.hex(), updated, norm if norm is None else float(norm).hex(), zeros

    def step_given(self, grads):
        """A step of these gradients, the same whatever the number of ranks."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for param, grad in zip(self.chunk.module.parameters(), grads, strict=True):
            param.main_grad.copy_(grad)
        return self.optimizer.step()

    def train(self, steps):
        return [self.step() for _ in range(steps)]

    @torch.no_grad()
    def stage(self):
        """As Megatron's loop: where gradients' memory is used to gather weights, they go there."""
        if self.case.mxfp8 and self.chunk.ddp_config.overlap_param_gather:
            for each in self.optimizer.chained_optimizers:
                each._copy_main_params_to_param_buffer()

    @torch.no_grad()
    def gather(self):
        """After it, all weights are those of the last step, late gathering or not."""
        if self.case.mxfp8 and self.chunk.ddp_config.overlap_param_gather:
            self.chunk.zero_grad_buffer()
            self.stage()
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.disable_forward_pre_hook(param_sync=True)
                chunk.enable_forward_pre_hook()

    def named_parameters(self):
        """Of all chunks; those after the first with their number."""
        for number, chunk in enumerate(self.chunks):
            for name, param in chunk.module.named_parameters():
                yield f"{number}.{name}" if number else name, param

    def weights(self):
        """A hash of each whole weight."""
        self.gather()
        return {name: hash_of(p.data) for name, p in self.named_parameters()}

    def states(self):
        """A hash of each whole fp32 weight and its moments, put together from all ranks."""
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.parts())
        found = {}
        for name, numel in sorted({part[:2] for each in parts for part in each}):
            own = [part[2:] for each in parts for part in each if part[:2] == (name, numel)]
            found[name] = {key: hash_of(whole(numel, own, key)) for key in KEYS}
        return found

    def parts(self):
        """Of each weight that this rank has a part of: name, size, where it starts, tensors."""
        found = []
        for each in self.optimizer.chained_optimizers:
            if each.is_stub_optimizer:
                continue
            for param in each.model_param_gbuf_map:
                tensors = each._get_main_param_and_optimizer_states(param)
                start = each._get_model_param_range_map(param)["param"].start
                kept = {key: tensors[key].detach().clone() for key in KEYS if key in tensors}
                found.append((self.name(param), param.numel(), start, kept))
        return found

    def name(self, param):
        name = next(n for n, own in self.named_parameters() if own is param)
        parallel = megatron("parallel_state")
        sizes = parallel.get_tensor_model_parallel_world_size(), self.case.pipeline
        is_shared = (*sizes, self.case.instances) == (1, 1, 1) and ".experts" not in name
        return name if is_shared else f"{name} of {dist.get_rank()}"

    # --- checkpoints

    def template(self, form, is_loading):
        model = self.chunk.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": form}
        state = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": state}

    def save(self, folder, form):
        self.gather()
        Path(folder).mkdir(exist_ok=True)
        dist.barrier()
        megatron("dist_checkpointing").save(self.template(form, False), str(folder))

    def load(self, folder, form, done):
        checkpoints = megatron("dist_checkpointing")
        loaded = checkpoints.load(self.template(form, True), str(folder))
        self.chunk.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.done = done


def random_gradients(step, params):
    """The same whatever the number of ranks."""
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + index)
        yield torch.randn(param.shape, generator=generator)


def whole(numel, parts, key):
    """A tensor of parts, whose places in it are known; NaN elsewhere."""
    if not any(key in tensors for _, tensors in parts):
        return torch.empty(0)  # Megatron's own before the first step
    tensor = torch.full((numel,), float("nan"))
    for start, tensors in parts:
        tensor[start : start + tensors[key].numel()] = tensors[key]
    return tensor


def hash_of(tensor):
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def seen(trainer):
    return {"weights": trainer.weights(), "states": trainer.states()}


def train(case, steps=3, kind=Trainer):
    """What a rank sees of a run."""
    trainer = kind(case)
    return {"steps": trainer.train(steps), **seen(trainer)}


def train_and_save(case, folder, form, steps=2, kind=Trainer):
    trainer = kind(case)
    trainer.train(steps)
    trainer.save(folder, form)
    return seen(trainer)


def load_and_train(case, folder, form, done=2, steps=2, kind=Trainer):
    """A fresh run that goes on from a checkpoint: what it has at first, and in the end."""
    trainer = kind(case)
    trainer.load(folder, form, done)
    loaded = seen(trainer)
    return {"loaded": loaded, "steps": trainer.train(steps), **seen(trainer)}
