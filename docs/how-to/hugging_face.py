"""Hugging Face Trainer: bf16 weights, fp32 masters, a checkpoint to go on from.

python docs/how-to/hugging_face.py --folder out [--resume out/checkpoint-3]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megaopt import FusedAdam

STEPS, WARMUP, BATCH, TOKENS = 6, 3, 4, 16


def build_model() -> LlamaForCausalLM:
    """A tiny Llama in bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config).bfloat16()


def examples() -> list[dict[str, torch.Tensor]]:
    """STEPS batches of BATCH examples."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (STEPS * BATCH, TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def build_trainer(folder: Path) -> Trainer:
    """A Trainer that makes a FusedAdam for its groups with and without weight decay."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=WARMUP,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "dtype": torch.float32}
    return Trainer(
        build_model(),
        arguments,
        train_dataset=examples(),
        optimizer_cls_and_kwargs=(FusedAdam, options),
    )


def main(options: Sequence[str] | None = None) -> Trainer:
    """Trains with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", help="the checkpoint to go on from")
    arguments = parser.parse_args(options)
    trainer = build_trainer(arguments.folder)
    trainer.train(resume_from_checkpoint=arguments.resume)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {entry['loss']:.6f}")
    return trainer


if __name__ == "__main__":
    main()
