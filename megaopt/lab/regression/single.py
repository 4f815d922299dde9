"""`megaopt train`: trains one variant alone, in this process."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from megaopt.lab import exits
from megaopt.lab.config import FusedVariant, MatrixVariant, read_config
from megaopt.lab.configs import Config, find_config
from megaopt.lab.console import make_console, step_progress
from megaopt.lab.regression.gpt import GptTraining
from megaopt.lab.regression.parts import open_recording, rows_of
from megaopt.lab.source import about_file, try_to_write
from megaopt.lab.toml_tables import MOST, require
from megaopt.lab.training.machine import choose_device, deterministic, require_room


def train(
    config: Config,
    /,
    *,
    variant: str | None = None,
    steps: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    result: Path | None = None,
) -> int:
    """Train one variant of a config; regress alone takes those of Megatron (megatron_...).

    Args:
        config: TOML file of the run, or the name of one that comes with megaopt; --help has them.
        variant: Name of the variant; the config's first fused variant by default.
        steps: Last step, counted from the run's beginning; the config's by default.
        save: Write a checkpoint to this file at the end.
        resume: Continue from this checkpoint of the same variant.
        result: Record the steps trained here in this folder, which must not be there yet: losses as
            float.hex writes them, and the digest of every weight, master and moment after each step
            (docs/recording.md).

    Returns:
        0.

    Raises:
        ConfigError: the config, variant, steps, save or result is wrong, or the checkpoint is of
            another run.
        CheckpointError: the checkpoint cannot be read.
        OSError: a file cannot be written.
    """
    path = find_config(config)
    run = read_config(path)
    # the named variant, or else the first that an optimizer of this package trains
    own_kinds = (FusedVariant, MatrixVariant)
    candidates = [member.name for member in run.runs if isinstance(member, own_kinds)]
    names = ", ".join(member.name for member in run.runs)
    require(bool(variant or candidates), "variant", variant, f"one of {names}, as none is fused")
    chosen = run.find_variant(variant or candidates[0])
    alone = getattr(chosen, "ranks", None) is None
    allowed = "one without ranks, which train in `megaopt regress` only"
    require(alone, "variant", chosen.name, allowed)
    last = run.steps if steps is None else steps
    require(1 <= last <= MOST, "steps", last, "a whole number from 1 to 2**31-1")
    if save is not None:
        require(not save.is_dir(), "save", str(save), "a file, not a folder")
        require(save.parent.is_dir(), "save", str(save), "a file in a folder that exists")
        try_to_write(save.parent)
    if result is not None:
        require(not result.exists(), "result", str(result), "a folder that is not there yet")
        require(result.parent.is_dir(), "result", str(result), "in a folder that exists")
        try_to_write(result.parent)
    with deterministic(run.cpu_threads):
        device = choose_device(run)
        require_room(run, chosen, device)
        training = GptTraining(run, chosen, device)
        if resume is not None:
            training.load(resume, check=True)
        done = training.steps_done
        require(last > done, "steps", last, f"more than the {done} steps of the checkpoint")
        console, name, loss, writer = make_console(), chosen.name, 0.0, None
        try:
            with ExitStack() as stack:
                progress = stack.enter_context(step_progress(console))
                task = progress.add_task(name, total=last, completed=done)
                if result is not None:
                    writer = open_recording(result, 0, 1, training.about())
                    stack.enter_context(closing(writer))
                for step in range(done + 1, last + 1):
                    scalars = training.step(step)
                    if writer is not None:
                        rows = rows_of(training.parts(), writer, training.device)
                        writer.step(step, 0, scalars, rows)
                    loss = float.fromhex(scalars["losses"][0])
                    progress.update(task, completed=step, description=f"{name}, loss {loss:.4f}")
            console.print(f"{name}: loss {loss:.9g} at step {last}", highlight=False)
        except OSError as error:
            raise about_file(error, result or path) from error
    if save is not None:
        training.save(save)
    return exits.DONE
