"""Messages between the stages of a pipeline.

A channel is a process group of its own for one kind of message in one direction: activations towards higher ranks,
gradients towards lower ones, and where stages go round, two more. On each channel messages have the order of the plan,
on both of its ends, and no send is waited for before the step is over. So no rank waits for one that waits for it:
gloo and NCCL send in order on each connection, and a send that waited for its receiver would hold up what comes after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group, Handle
from minifsdp.pipeline.actions import Action, Plan
from minifsdp.pipeline.boundary import HEADER, Boundary, boundary_of, from_header, in_words, to_header
from minifsdp.process_groups import destroy, twin_of

Direction = tuple[str, bool]  # "F" or "B", and whether it goes to a higher rank


class Message(NamedTuple):
    """What one stage passes to a neighbour: activations ("F") up, or gradients ("B") down the stages."""

    kind: str
    micro: int
    source: int
    target: int


def sent_after(action: Action, last: int) -> Message | None:
    """The message that an action's result is, if another stage needs it."""
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


def homes_of(plan: Plan) -> dict[int, int]:
    """The rank of each stage."""
    return {action.stage: rank for rank, actions in enumerate(plan) for action in actions}


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


class Channels:
    """This rank's ends of all channels.

    Args:
        plan: every rank's actions.
        group: the ranks of the pipeline.
        device: where tensors are received.
        said: by stage, what it is said to pass to the next one.
    """

    def __init__(self, plan: Plan, group: Group, device: torch.device, said: Mapping[int, Boundary]) -> None:
        self.homes, self.rank, self.device = homes_of(plan), group.rank(), device
        self.last = max(self.homes)
        self.groups = {direction: twin_of(group) for direction in sorted(self._directions())}
        self.boundaries: dict[tuple[int, bool], Boundary] = {}  # by the stage below, and whether gradients come back
        self.said = said
        self._here: dict[Message, Sequence[Tensor]] = {}  # between two stages of this rank
        self._sends: list[tuple[Handle, Tensor]] = []

    def _directions(self) -> set[Direction]:
        pairs = [(self.homes[stage], self.homes[stage + 1]) for stage in range(self.last)]
        forwards = {("F", low < high) for low, high in pairs if low != high}
        return forwards | {("B", low > high) for low, high in pairs if low != high}

    def send(self, message: Message, tensors: Sequence[Tensor], trains: bool = True) -> None:
        """Pass tensors on; they must not change before `finish`.

        Raises:
            ValueError: they are not what was agreed on. Nothing has been sent then.
        """
        target = self.homes[message.target]
        new = message.kind == "F" and self._agree(message.source, tensors, trains)
        if target == self.rank:
            self._here[message] = tensors
            return
        group = self.groups[message.kind, self.rank < target]
        if new:
            header = to_header(self.boundaries[message.source, trains]).to(self.device)
            self._sends.append((comm.send(header, target, group), header))
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            if tensor.numel():
                self._sends.append((comm.send(tensor, target, group), tensor))

    def receive(self, message: Message, trains: bool = True) -> Sequence[Tensor]:
        """What the other stage passes on, in new memory."""
        source = self.homes[message.source]
        if source == self.rank:
            return self._here.pop(message)
        group = self.groups[message.kind, source < self.rank]
        below = min(message.source, message.target)
        if (below, trains) not in self.boundaries:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            comm.recv(header, source, group).wait()
            self.boundaries[below, trains] = from_header(header)
        wanted = [each for each in self.boundaries[below, trains] if message.kind == "F" or each.needs_grad]
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in wanted]
        for handle in [comm.recv(tensor, source, group) for tensor in tensors if tensor.numel()]:
            handle.wait()
        return tensors

    def _agree(self, stage: int, tensors: Sequence[Tensor], trains: bool) -> bool:
        """True if nothing had been agreed on yet."""
        found = boundary_of(tensors)
        agreed = self.boundaries.get((stage, trains))
        if agreed is None:
            said = self.said.get(stage)
            if said is not None and [each[:2] for each in said] != [each[:2] for each in found]:
                raise ValueError(
                    f"stage {stage} passes {in_words(found)}, and its output_args are {in_words(said)}: correct one"
                )
            self.boundaries[stage, trains] = found
            return True
        if agreed != found:
            raise ValueError(
                f"stage {stage} passes {in_words(found)} where it has passed {in_words(agreed)} before: micro-batches "
                "have to be of one shape; cut the batch into equal parts"
            )
        return False

    def finish(self) -> None:
        """The step is over: wait until everything that was sent has left."""
        for handle, _ in self._sends:
            handle.wait()
        self._sends.clear()

    def close(self) -> None:
        """Hang up: what other ranks wait for on these channels fails."""
        self._sends.clear()
        self._here.clear()
        for group in self.groups.values():
            destroy(group)
        self.groups.clear()
