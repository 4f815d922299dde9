"""Messages among ranks that move as late as they may, as they do on a card's own stream."""

from unittest import mock

import torch
import torch.distributed as dist

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


def late(function, *arguments, **named):
    """What a function returns whose asynchronous messages move late; all were waited for."""
    messages, all_to_all = [], dist.all_to_all_single

    def started(into, out, coming, leaving, group=None, async_op=False):
        if not async_op:
            return all_to_all(into, out, coming, leaving, group=group)
        send = lambda: all_to_all(into, out, coming, leaving, group=group)  # noqa: E731
        messages.append(_Message(send, into, out))
        return messages[-1]

    with mock.patch.object(dist, "all_to_all_single", started):
        found = function(*arguments, **named)
    assert messages, "no message was sent"
    assert all(message.is_waited_for for message in messages), "nobody waited for a message"
    return found
