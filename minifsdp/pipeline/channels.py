"""The ends of a pipeline's channels on one rank: tensors leave, and arrive in new memory.

A channel is a process group of its own for one kind of message in one direction: activations towards higher ranks,
gradients towards lower ones, and where stages go round, two more. On each channel messages have the order of the plan,
on both of its ends, and no rank waits for a send that may not have been received. So no rank waits for one that waits
for it: gloo and NCCL send in order on each connection, and a send that waited would hold up the next action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group, Handle
from minifsdp.pipeline.actions import Plan, homes_of
from minifsdp.pipeline.boundary import HEADER, Boundary, agrees, boundary_of, from_header, in_words, to_header
from minifsdp.pipeline.messages import Message, Route, channels_of, routes_of
from minifsdp.private import version_of
from minifsdp.process_groups import destroy, duplicate_group


class Sent(NamedTuple):
    """Tensors on their way, and the counts of in-place changes that they had when they left."""

    handles: Sequence[Handle]
    tensors: Sequence[Tensor]
    versions: Sequence[int]


class Channels:
    """This rank's ends of all channels.

    Args:
        plan: every rank's actions.
        group: the ranks of the pipeline.
        device: where tensors are received.
        said: boundaries that are known beforehand, by the stage below.

    Attributes:
        arrivals: the message that an action of this rank needs, by the action.
        departures: the message that an action makes.
    """

    def __init__(self, plan: Plan, group: Group, device: torch.device, said: Mapping[int, Boundary]) -> None:
        self.homes, self.device, self.said = homes_of(plan), device, said
        self.last = max(self.homes)
        self.arrivals, self.departures = routes_of(plan, group.rank())
        self.groups = {channel: duplicate_group(group) for channel in channels_of(plan)}
        # A rank that fails at once must not hang up while others are still connecting.
        comm.all_reduce(torch.zeros(1, device=device), group).wait()
        self.boundaries: dict[tuple[int, bool], Boundary] = {}  # by the stage below, and whether gradients come back
        self._sent: dict[Message, Sent] = {}  # not known to have been received; without handles: by this rank

    def send(self, route: Route, tensors: Sequence[Tensor], trains: bool = True) -> None:
        """Pass tensors on; they must not change before the step is over.

        Raises:
            ValueError: they differ from what was agreed on. Nothing has been sent then.
        """
        new = route.message.kind == "F" and self._is_new(route.message.source, tensors, trains)
        if route.peer is None:
            self._sent[route.message] = Sent((), tensors, _versions(tensors))
            return
        leaving = [_as_sent(tensor) for tensor in tensors if tensor.numel()]
        if new:
            leaving.insert(0, to_header(self.boundaries[route.below, trains]).to(self.device))
        handles = [comm.send(tensor, route.peer, self.groups[route.channel]) for tensor in leaving]
        self._sent[route.message] = Sent(handles, leaving, _versions(leaving))

    def receive(self, route: Route, trains: bool = True) -> Sequence[Tensor]:
        """The tensors that another stage passes on, for this one alone; in new memory if it is on another rank.

        Raises:
            ValueError: they differ from the example that a stage was given.
        """
        if route.peer is None:
            sent = self._sent.pop(route.message)
            _check_unchanged(route.message, sent)
            return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent.tensors]
        boundary = self.boundaries.get((route.below, trains))
        if boundary is None:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            comm.recv(header, route.peer, self.groups[route.channel]).wait()
            self._agree(route.below, boundary := from_header(header), trains)
        are_inputs = route.message.kind == "F"
        wanted = boundary if are_inputs else [each for each in boundary if each.needs_grad]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in wanted]
        handles = [comm.recv(t, route.peer, self.groups[route.channel]) for t in tensors if t.numel()]
        for handle in handles:
            handle.wait()
        self._finish(route.acknowledged)
        if are_inputs:
            for tensor, (_, _, needs_grad) in zip(tensors, boundary, strict=True):
                tensor.requires_grad_(needs_grad)
        return tensors

    def _is_new(self, stage: int, tensors: Sequence[Tensor], trains: bool) -> bool:
        """Compare with what a stage has passed before; True if this is the first time."""
        agreed = self.boundaries.get((stage, trains))
        if agreed is None or not agrees(agreed, tensors):
            self._agree(stage, boundary_of(tensors), trains)
        return agreed is None

    def _agree(self, stage: int, found: Boundary, trains: bool) -> None:
        """Let this be what a stage passes from now on, unless it differs from what it has passed, or has to."""
        agreed = self.boundaries.setdefault((stage, trains), found)
        if in_words(agreed) != in_words(found):
            raise ValueError(
                f"stage {stage} passes {in_words(found)} where it has passed {in_words(agreed)} before: a stage passes "
                "the same shapes and dtypes in all steps; cut the batch into equal parts, or make another schedule"
            )
        if agreed != found:
            raise ValueError(
                f"stage {stage} passes the same tensors as before, but not the same ones need gradients: make another "
                "schedule after freezing parameters"
            )
        said = self.said.get(stage, found)
        if [each[:2] for each in said] != [each[:2] for each in found]:
            raise ValueError(
                f"stage {stage} passes {in_words(found)}, where output_args or the next stage's input_args are "
                f"{in_words(said)}: correct them"
            )

    def finish(self) -> None:
        """The step is over: wait until everything that was sent has left."""
        self._finish(list(self._sent))

    def _finish(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if sent := self._sent.pop(message, None):  # an evaluation sends no gradients
                for handle in sent.handles:
                    handle.wait()
                _check_unchanged(message, sent)

    def close(self) -> None:
        """Hang up: what other ranks wait for on these channels fails."""
        self._sent.clear()
        for group in self.groups.values():
            destroy(group)
        self.groups.clear()


def _as_sent(tensor: Tensor) -> Tensor:
    """The elements in one block, as a backend sends them; a conjugate is a view that no backend takes."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]


def _check_unchanged(message: Message, sent: Sent) -> None:
    """
    Raises:
        RuntimeError: a tensor was changed in place, and the next stage may have received either value.
    """
    if _versions(sent.tensors) != sent.versions:
        raise RuntimeError(
            f"stage {message.source} has changed a tensor in place after it passed it on for micro-batch "
            f"{message.micro}: pass on a clone"
        )
