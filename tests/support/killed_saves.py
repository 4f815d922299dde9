"""Kills processes (SIGKILL) while they save, again and again, and looks at what they leave behind.

    python killed_saves.py FOLDER TRIES

Prints how many of the killed left a temporary file. Fails unless the checkpoint was whole after
each kill.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from megaopt.saving import checkpoint

ELEMENTS = 1 << 18


def payload(number):
    return {"number": number, "weight": torch.full((ELEMENTS,), float(number))}


def save_for_ever(path, ready):
    number = 0
    while True:
        number += 1
        checkpoint.save(path, payload(number))
        if number == 1:
            os.write(ready, b"x")


def kill_one(path, delay):
    """Lets a process save for some time, then kills it."""
    reading, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(path, ready)
        finally:
            os._exit(1)
    os.close(ready)
    assert os.read(reading, 1), "the process failed before it was killed"
    os.close(reading)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL, f"the process failed: status {status}"


def main(folder, tries):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    generator = random.Random(0)
    for _ in range(tries):
        kill_one(folder / "a.pt", generator.uniform(0, 0.05))
        left = checkpoint.load(folder / "a.pt")
        assert torch.equal(left["weight"], payload(left["number"])["weight"])
    found = len({*os.listdir(folder)} - {"a.pt"})
    print(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
