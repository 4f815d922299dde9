"""Cards that are late by chance, and memory that moves from step to step."""

import random
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist
from late_exchange import wrapped_messages

CYCLES = 2_000_000
"""For as long as so many a stream is kept busy at most: some millisecond."""
NUMBERS = 2**22
"""As many a block of memory has at most."""


def disturbed(seed, function, *arguments, **named):
    """What a function returns while streams are late and memory moves, on each rank otherwise."""
    chance = random.Random(1000 * seed + dist.get_rank())
    with late_messages(chance), moving_memory(chance):
        return function(*arguments, **named)


@contextmanager
def late_messages(chance):
    """Within it the stream is busy before each message and behind it, and memory is poisoned."""

    def late(collective):
        def called(*arguments, **options):
            torch.cuda._sleep(chance.randrange(CYCLES))
            message = collective(*arguments, **options)
            poison(chance)
            torch.cuda._sleep(chance.randrange(CYCLES))
            return message

        return called

    with wrapped_messages(late):
        yield


@contextmanager
def moving_memory(chance):
    """Within it a thread takes memory on a stream of its own, writes it and gives it back."""
    ended, device = threading.Event(), torch.cuda.current_device()

    def run():
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            while not ended.wait(0.01):
                poison(chance)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def poison(chance):
    """Fills some blocks of memory with NaN, and gives them back."""
    for _ in range(3):
        torch.full((chance.randrange(1, NUMBERS),), torch.nan, device="cuda")
