"""Messages between the stages of a pipeline.

A channel is a process group of its own for one kind of message in one direction: activations towards higher ranks,
gradients towards lower ones, and where stages go round, two more. On each channel messages have the order of the plan,
on both of its ends, and no rank waits for a send that may not have been received. So no rank waits for one that waits
for it: gloo and NCCL send in order on each connection, and a send that waited would hold up the next action.

A sent tensor must stay until it has been received. No receipt is sent for it: a message that comes back from the same
rank, and that was made after this one was needed there, is one. So the memory of a sent activation is free when its
gradient arrives, at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group, Handle
from minifsdp.pipeline.actions import Action, Plan, homes_of
from minifsdp.pipeline.boundary import HEADER, Boundary, boundary_of, from_header, in_words, to_header
from minifsdp.process_groups import destroy, twin_of

Direction = tuple[str, bool]  # "F" or "B", and whether it goes to a higher rank


class Message(NamedTuple):
    """A message between neighbouring stages: activations ("F") up, or gradients ("B") down."""

    kind: str
    micro: int
    source: int
    target: int


def sent_after(action: Action, last: int) -> Message | None:
    """The message with an action's result, if another stage needs it."""
    stage, kind, micro = action
    if kind == "F" and stage < last:
        return Message("F", micro, stage, stage + 1)
    if kind in "BI" and stage > 0:
        return Message("B", micro, stage, stage - 1)
    return None


def received_before(action: Action, last: int) -> Message | None:
    """The message that an action needs."""
    stage, kind, micro = action
    if kind == "F" and stage > 0:
        return Message("F", micro, stage - 1, stage)
    if kind in "BI" and stage < last:
        return Message("B", micro, stage + 1, stage)
    return None


def check_order(plan: Plan) -> None:
    """
    Raises:
        ValueError: on a channel the sender's order is not the receiver's; names the first message that differs.
    """
    homes = homes_of(plan)
    last = max(homes)
    sent: dict[tuple[str, int, int], list[Message]] = {}
    received: dict[tuple[str, int, int], list[Message]] = {}
    for actions in plan:
        for action in actions:
            for found, message in ((sent, sent_after(action, last)), (received, received_before(action, last))):
                if message is not None:
                    ends = homes[message.source], homes[message.target]
                    found.setdefault((message.kind, *ends), []).append(message)
    for (kind, source, target), messages in sent.items():
        for ours, theirs in zip(messages, received.get((kind, source, target), []), strict=True):
            if ours != theirs and source != target:
                raise ValueError(
                    f"rank {source} sends {kind}{ours.micro} of stage {ours.source} where rank {target} expects "
                    f"{kind}{theirs.micro} of stage {theirs.source}: a channel keeps its order"
                )


class Sent(NamedTuple):
    """A tensor on its way."""

    message: Message
    handle: Handle
    tensor: Tensor


class Channels:
    """This rank's ends of all channels.

    Args:
        plan: every rank's actions.
        group: the ranks of the pipeline.
        device: where tensors are received.
        said: boundaries that are known beforehand, by the stage below.
    """

    def __init__(self, plan: Plan, group: Group, device: torch.device, said: Mapping[int, Boundary]) -> None:
        self.homes, self.rank, self.device = homes_of(plan), group.rank(), device
        self.last = max(self.homes)
        self.groups = {direction: twin_of(group) for direction in sorted(self._directions())}
        self.boundaries: dict[tuple[int, bool], Boundary] = {}  # by the stage below, and whether gradients come back
        self.said = said
        self._here: dict[Message, Sequence[Tensor]] = {}  # between two stages of this rank
        self._sends: list[Sent] = []
        self._made: dict[Message, int] = {}  # position in the sender's list of the action that makes it
        self._needed: dict[Message, int] = {}  # and in the receiver's of the one that needs it
        for actions in plan:
            for position, action in enumerate(actions):
                for positions, message in (
                    (self._made, sent_after(action, self.last)),
                    (self._needed, received_before(action, self.last)),
                ):
                    if message is not None:
                        positions[message] = position

    def _directions(self) -> set[Direction]:
        pairs = [(self.homes[stage], self.homes[stage + 1]) for stage in range(self.last)]
        forwards = {("F", low < high) for low, high in pairs if low != high}
        return forwards | {("B", low > high) for low, high in pairs if low != high}

    def send(self, message: Message, tensors: Sequence[Tensor], trains: bool = True) -> None:
        """Pass tensors on; they must not change before the step is over.

        Raises:
            ValueError: they differ from what was agreed on. Nothing has been sent then.
        """
        new = message.kind == "F" and self._agree(message.source, boundary_of(tensors), trains)
        if self.homes[message.target] == self.rank:
            self._here[message] = tensors
            return
        if new:
            self._start(message, to_header(self.boundaries[message.source, trains]).to(self.device))
        for tensor in tensors:
            if tensor.numel():
                self._start(message, tensor.detach().contiguous())

    def _start(self, message: Message, tensor: Tensor) -> None:
        handle = comm.send(tensor, self.homes[message.target], self._way(message))
        self._sends.append(Sent(message, handle, tensor))

    def receive(self, message: Message, trains: bool = True) -> Sequence[Tensor]:
        """The tensors that another stage passes on, in new memory.

        Raises:
            ValueError: they differ from the example that a stage was given.
        """
        source = self.homes[message.source]
        if source == self.rank:
            return self._here.pop(message)
        below = min(message.source, message.target)
        if (below, trains) not in self.boundaries:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            comm.recv(header, source, self._way(message)).wait()
            self._agree(below, from_header(header), trains)
        wanted = [each for each in self.boundaries[below, trains] if message.kind == "F" or each.needs_grad]
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in wanted]
        for handle in [comm.recv(tensor, source, self._way(message)) for tensor in tensors if tensor.numel()]:
            handle.wait()
        self._forget_received_before(message)
        return tensors

    def _way(self, message: Message) -> Group:
        """The channel of a message. No frame of an error may keep one: it closes with its last reference."""
        return self.groups[message.kind, self.homes[message.source] < self.homes[message.target]]

    def _forget_received_before(self, message: Message) -> None:
        """Drop what the sender of a message had received when it made it."""
        source, made = self.homes[message.source], self._made[message]
        left = []
        for sent in self._sends:
            if self.homes[sent.message.target] == source and self._needed[sent.message] <= made:
                sent.handle.wait()  # has arrived
            else:
                left.append(sent)
        self._sends = left

    def _agree(self, stage: int, found: Boundary, trains: bool) -> bool:
        """Compare with what a stage has passed before; True if this is the first time."""
        agreed = self.boundaries.get((stage, trains))
        if agreed is None:
            self._check_said(stage, found)
            self.boundaries[stage, trains] = found
        elif agreed != found:
            raise ValueError(
                f"stage {stage} passes {in_words(found)} where it has passed {in_words(agreed)} before: micro-batches "
                "have to be of one shape; cut the batch into equal parts"
            )
        return agreed is None

    def _check_said(self, stage: int, found: Boundary) -> None:
        said = self.said.get(stage)
        if said is not None and [each[:2] for each in said] != [each[:2] for each in found]:
            raise ValueError(
                f"stage {stage} passes {in_words(found)}, where output_args or the next stage's input_args are "
                f"{in_words(said)}: correct them"
            )

    def finish(self) -> None:
        """The step is over: wait until everything that was sent has left."""
        for sent in self._sends:
            sent.handle.wait()
        self._sends.clear()

    def close(self) -> None:
        """Hang up: what other ranks wait for on these channels fails."""
        self._sends.clear()
        self._here.clear()
        for group in self.groups.values():
            destroy(group)
        self.groups.clear()
