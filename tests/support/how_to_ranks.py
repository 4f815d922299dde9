"""Scripts of docs/how-to, within ranks that are there already."""

import runpy

import torch


def train(script, *arguments):
    """What the script's `train` returns."""
    return runpy.run_path(script)["train"](*arguments, torch.device("cpu"))
