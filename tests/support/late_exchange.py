"""Messages among ranks that move as late as they may, as they do on a card's own stream."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

from megaopt.step.ranks.owners import Owners

POISON = 0xFF
"""The bytes of memory into which something is on its way: NaN in every float."""


class _Message:
    """A message that moves when it is waited for: until then nobody may touch its memory."""

    def __init__(self, send, into, out):
        self._send, self._into, self._out = send, into, out
        self._sent = out.clone()
        into.fill_(POISON)
        self.is_waited_for = False

    def wait(self):
        assert not self.is_waited_for, "a message was waited for twice"
        assert torch.equal(self._out, self._sent), "memory was written before it was sent"
        assert bool((self._into == POISON).all()), "memory was written into which a message comes"
        self._send()
        self.is_waited_for = True


class _Queued:
    """A message behind others: it moves when they have come, and somebody waits for it.

    As NCCL's, which may come where one that was called before still sends from.
    """

    def __init__(self, send, into, out, queue):
        self._send, self._into, self._out, self._queue = send, into, out, queue
        self._sent, self._is_poisoned = out.clone(), False
        self.is_waited_for = False
        self.poison()
        queue.append(self)

    def poison(self):
        """Once nothing is sent from where it comes."""
        if not self._is_poisoned and not any(each.reads(self._into) for each in self._queue):
            self._into.fill_(POISON)
            self._is_poisoned = True

    def reads(self, memory):
        ends = [(each.data_ptr(), each.data_ptr() + each.numel()) for each in (self._out, memory)]
        return max(begin for begin, _ in ends) < min(end for _, end in ends)

    def wait(self):
        assert not self.is_waited_for, "a message was waited for twice"
        while self in self._queue:
            self._queue.pop(0).move()
        self.is_waited_for = True

    def move(self):
        assert torch.equal(self._out, self._sent), "memory was written before it was sent"
        self.poison()
        assert bool((self._into == POISON).all()), "memory was written into which a message comes"
        self._send()
        for each in self._queue:
            each.poison()


def late(function, *arguments, in_order=False, **named):
    """What a function returns whose asynchronous messages move late; all were waited for.

    in_order: each after those that were called before it, and Owners go by that.
    """
    messages, queue = [], []

    def late_call(collective):
        def started(into, out, *lengths, group=None, async_op=False):
            send = partial(collective, into, out, *lengths, group=group)
            if not async_op:
                return send()
            message = _Queued(send, into, out, queue) if in_order else _Message(send, into, out)
            messages.append(message)
            return message

        return started

    with wrapped_messages(late_call), keeping_order() if in_order else nullcontext():
        found = function(*arguments, **named)
    assert messages, "no message was sent"
    assert all(message.is_waited_for for message in messages), "nobody waited for a message"
    return found


def wrapped_messages(wrap):
    """Within it the collectives that move matrices are what `wrap` makes of them."""
    names = ("all_to_all_single", "all_gather_into_tensor")
    return mock.patch.multiple(dist, **{name: wrap(getattr(dist, name)) for name in names})


def keeping_order():
    """Within it every exchange says that its messages are NCCL's, which keep their order."""
    always = property(lambda exchange: True, lambda exchange, value: None)
    return mock.patch.object(Owners, "is_nccl", always, create=True)
