"""Messages between the stages of a pipeline, worked out from a plan before the first step.

A sent tensor has to stay in memory until it has been received. No acknowledgement is sent for it: any later message
from the same rank serves as one if that rank needed the tensor before it made the message. The memory of a sent
activation is therefore free when its gradient arrives, at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from minifsdp.pipeline.actions import Action, Plan, homes_of

Channel: TypeAlias = tuple[str, bool]
"""One kind of message, "F" or "B", in one direction: to a higher rank, or to a lower one."""


class Message(NamedTuple):
    """A message between neighbouring stages: activations ("F") up, or gradients ("B") down."""

    kind: str
    micro: int
    source: int
    target: int


class Route(NamedTuple):
    """A message as the rank at one end sees it.

    Attributes:
        message: the message.
        peer: the rank at the other end; None if both stages are on this rank.
        channel: the channel that it takes.
        below: the lower of its two stages, which names the boundary that it crosses.
        acknowledged: earlier messages of this rank that have been received if this one arrives.
    """

    message: Message
    peer: int | None
    channel: Channel
    below: int
    acknowledged: tuple[Message, ...] = ()


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


def channels_of(plan: Plan) -> list[Channel]:
    """All channels that the messages of a plan take, in the same order on every rank."""
    homes = homes_of(plan)
    pairs = [(homes[stage], homes[stage + 1]) for stage in range(max(homes))]
    forwards = {("F", low < high) for low, high in pairs if low != high}
    return sorted(forwards | {("B", low > high) for low, high in pairs if low != high})


def routes_of(plan: Plan, rank: int) -> tuple[dict[Action, Route], dict[Action, Route]]:
    """The routes of a rank's messages: by the action that needs one, and by the action that makes one."""
    homes = homes_of(plan)
    last = max(homes)
    made, needed = _positions(plan, last)
    arrivals, departures = {}, {}
    waiting: list[Message] = []  # sent to other ranks and not acknowledged
    for action in plan[rank]:
        if message := received_before(action, last):
            route = _route(message, homes, homes[message.source])
            early = [m for m in waiting if homes[m.target] == homes[message.source] and needed[m] <= made[message]]
            waiting = [m for m in waiting if m not in early]
            arrivals[action] = route._replace(acknowledged=tuple(early))
        if message := sent_after(action, last):
            departures[action] = _route(message, homes, homes[message.target])
            if homes[message.target] != rank:
                waiting.append(message)
    return arrivals, departures


def _route(message: Message, homes: Mapping[int, int], peer: int) -> Route:
    source, target = homes[message.source], homes[message.target]
    channel = message.kind, source < target
    return Route(message, None if source == target else peer, channel, min(message.source, message.target))


def _positions(plan: Plan, last: int) -> tuple[dict[Message, int], dict[Message, int]]:
    """Of each message the position in its sender's list of the action that makes it, and in its receiver's list of the
    action that needs it.
    """
    made, needed = {}, {}
    for actions in plan:
        for position, action in enumerate(actions):
            if message := sent_after(action, last):
                made[message] = position
            if message := received_before(action, last):
                needed[message] = position
    return made, needed
