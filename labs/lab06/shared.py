"""What several exercises of lab 06 share.

Streams on CPU are names, so an answer's commands are written down and run on the simulated GPU, whose host runs ahead.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import torch

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError

CPU = torch.device("cpu")
THE_CALLERS = "the list belongs to the caller, who may need it again: iterate over it, and change nothing"
WHOLE = "`device.synchronize` lets the host stand still until the whole device has done all that is queued"


@contextmanager
def current_stream_kept():
    """An answer leaves every stream that it enters."""
    before = list(device._streams)
    try:
        yield
        after = list(device._streams)
    finally:
        device._streams[:] = before
    if after != before:
        raise AnswerError(
            "the current stream afterwards: expected that of before, got another\n"
            "likely slip: a stream that is entered has to be left again: `with device.on_stream(stream):` does both"
        )


class Asked(NamedTuple):
    """What is asked of the device, and how often the host asks whether an event has happened."""

    commands: list[device.Command]
    queries: list[device.CpuEvent]


@contextmanager
def asked_meanwhile():
    asked, query = Asked([], []), device.CpuEvent.query
    device.CpuEvent.query = lambda event: not asked.queries.append(event)
    device.command_observers.append(asked.commands.append)
    try:
        yield asked
    finally:
        device.command_observers.remove(asked.commands.append)
        device.CpuEvent.query = query


POLLS = "the host polls the event and stands still meanwhile: only the stream has to wait"


class Paper:
    """Rank `rank` of `ranks` that are not there."""

    group_name = "paper"
    _device_types = (CPU,)

    def __init__(self, rank, ranks):
        self._rank, self._ranks = rank, ranks

    def rank(self):
        return self._rank

    def size(self):
        return self._ranks

    def _get_backend(self, where):
        return SimpleNamespace(name=lambda: "paper")


class LastMoment:
    """A link on which nothing arrives before somebody waits for it; until then there is NaN."""

    def __init__(self, fill):
        self.fill, self.waited = fill, 0

    def submit(self, call, collective):
        if call.op != "all_gather":
            raise AnswerError(
                f"the collective: expected all_gather, got {call.op}\n"
                "likely slip: every rank's shard goes to all ranks as it is: that is an all-gather"
            )
        output, shard, *_ = collective.args
        room, needed = output.untyped_storage().nbytes(), output.numel() * output.element_size()
        if room < needed:
            slip = "`flat.full` has no memory yet: `device.allocate` first"
            if room:
                slip = "an element need not have 4 bytes: `device.allocate` asks the buffer for its bytes"
            raise AnswerError(
                f"memory behind the all-gather's output: expected {needed} bytes for the unit, got {room or 'none'}\n"
                f"likely slip: {slip}"
            )
        if shard.dtype != output.dtype:
            raise AnswerError(
                f"dtype of the all-gather's input: expected {output.dtype} like the output, got {shard.dtype}\n"
                "likely slip: a collective does not cast, and shard and unit have one dtype: send `flat.shard.data`"
            )
        if shard.requires_grad:
            raise AnswerError(
                "the all-gather's input: expected plain data, got a parameter\n"
                "likely slip: autograd has no part in it, and on real ranks it raises: `flat.shard.data`"
            )
        output.fill_(torch.nan)

        def wait():
            self.waited += 1
            self.fill(call, output, shard)

        return SimpleNamespace(wait=wait)


def number_of(recorder, stream):
    """A stream's number in the program."""
    return recorder._books._number_of(stream, recorder._books._streams)
