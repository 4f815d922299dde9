"""Hugging Face Trainer: bf16 weights, fp32 masters, a checkpoint to go on from.

python docs/how-to/hugging_face.py --folder out [--muon] [--resume out/checkpoint-3]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megaopt import FusedAdam, FusedMuon

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


def optimizer_for(model: LlamaForCausalLM, muon: bool) -> tuple[type, dict[str, Any]]:
    """Class and arguments for the Trainer, which makes groups with and without weight decay."""
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "dtype": torch.float32}
    if not muon:
        return FusedAdam, options
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight.use_muon = False  # AdamW steps these, and all that are no matrices
    return FusedMuon, {**options, "adjust_lr_fn": "match_rms_adamw"}


def build_trainer(folder: Path, muon: bool = False) -> Trainer:
    """A Trainer that makes a FusedAdam or a FusedMuon."""
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
    model = build_model()
    return Trainer(
        model,
        arguments,
        train_dataset=examples(),
        optimizer_cls_and_kwargs=optimizer_for(model, muon),
    )


def main(options: Sequence[str] | None = None) -> Trainer:
    """Trains with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", help="the checkpoint to go on from")
    parser.add_argument("--muon", action="store_true", help="Muon for matrices")
    arguments = parser.parse_args(options)
    trainer = build_trainer(arguments.folder, arguments.muon)
    trainer.train(resume_from_checkpoint=arguments.resume)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {entry['loss']:.6f}")
    return trainer


if __name__ == "__main__":
    main()
