"""Hugging Face Trainer with 24-bit masters and 8-bit moments: 5.02 bytes a parameter, not 14.

python examples/finetune_8bit.py [--model a-name-or-folder] [--steps 20]
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from megaopt import FusedAdam
from megaopt.lab.training.text import load_corpus

TOKENS = 32
OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "master_weights": True,
    "master_weight_dtype": "remainder8_stochastic",  # 1 byte beside each bf16 weight
    "exp_avg_dtype": "block_e4m3",  # 1.01 bytes
    "exp_avg_sq_dtype": "block_e5m3",
    "seed": 0,
}


def build_model(name: str | None) -> Any:
    """The named model in bf16; without a name a Llama of 0.1 million parameters, untrained."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config).bfloat16()


def main(arguments: Sequence[str] | None = None) -> Any:
    """Trains on the bytes of the text that comes with megaopt; the Trainer, or None."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="default: a tiny one; its own text is for you to put in")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    missing = [p for p in ("transformers", "accelerate") if importlib.util.find_spec(p) is None]
    if missing:
        print(f"skipped: needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        return None
    from transformers import Trainer, TrainingArguments

    rows = load_corpus().tokens[: 1024 * TOKENS].long().view(-1, TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=8, logging_steps=5,
            report_to="none", disable_tqdm=True, save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(
            build_model(options.model),
            settings,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            optimizer_cls_and_kwargs=(FusedAdam, OPTIONS),
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
