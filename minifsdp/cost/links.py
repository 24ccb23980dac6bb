"""The seconds of a step's messages if hosts have links of two speeds; arithmetic, nothing is sent.

A message takes its link's latency, and the bytes that a rank sends divided by the link's bandwidth. The link is the one
inside a host, or the one across hosts if the group has ranks on several: a ring waits for its slowest hop. A message to
one rank, such as that of the next stage, has the link to that rank. If a host has ranks in several groups along an
axis, that many messages leave it at once and share the bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from minifsdp.cost import pipeline
from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.model import Model
from minifsdp.cost.pipeline import Did
from minifsdp.cost.traffic import Message, sent_by_part

if TYPE_CHECKING:
    from minifsdp.recipe import Recipe


class Link(NamedTuple):
    """Seconds that every message takes, and bytes per second."""

    latency: float
    bandwidth: float


class Hosts(NamedTuple):
    """Hosts of `per_host` ranks each, by their numbers.

    Attributes:
        inside: between the ranks of a host.
        across: from one host to another, all of its network cards together.
    """

    inside: Link
    across: Link
    per_host: int

    def rings(self, group: Sequence[int], rank: int) -> int:
        """The groups along an axis that leave the rank's host at once, if its own does; 0: it stays inside."""
        ranks_on = Counter(each // self.per_host for each in group)
        return 0 if len(ranks_on) == 1 else self.per_host // ranks_on[rank // self.per_host]

    def rings_to(self, group: Sequence[int], rank: int, peer: int) -> int:
        """The same of a message to one rank of the group."""
        return self.rings(group, rank) if self.rings([rank, peer], rank) else 0

    def seconds(self, sent: float, rings: int) -> float:
        """Of a message for which a rank sends so many bytes."""
        link = self.across if rings else self.inside
        return link.latency + sent * max(rings, 1) / link.bandwidth


class Messages(NamedTuple):
    """Messages of one kind.

    Attributes:
        part: of the recipe: "tensor", "pipeline", "context", "data".
        kind: axis, operation and payload.
        times: how many.
        across: hosts; otherwise inside one.
        sent: bytes that the rank sends for each, by a ring.
        seconds: of each.
    """

    part: str
    kind: Message
    times: int
    across: bool
    sent: float
    seconds: float


class Talk(NamedTuple):
    """A rank's messages along an axis in a step, on one of the links; `seconds`: of all, one after another."""

    axis: str
    across: bool
    messages: int
    sent: float
    seconds: float


def talk(model: Model, recipe: Recipe, rank: int, setting: Setting, hosts: Hosts) -> list[Talk]:
    """A rank's messages in a step by axis and link, in the order of the axes.

    Args:
        model, recipe, rank, setting: as for `cost`.
        hosts: and their links.
    """
    total: dict[tuple[str, bool], Talk] = {}
    for _, kind, count, across, sent, seconds in messages(model, recipe, rank, setting, hosts):
        so_far = total.get((kind.axis, across), Talk(kind.axis, across, 0, 0.0, 0.0))
        counts = so_far.messages + count, so_far.sent + count * sent, so_far.seconds + count * seconds
        total[kind.axis, across] = Talk(kind.axis, across, *counts)
    order = [*recipe.mesh.lines(rank)]
    return sorted(total.values(), key=lambda found: (order.index(found.axis), found.across))


def messages(model: Model, recipe: Recipe, rank: int, setting: Setting, hosts: Hosts) -> Iterator[Messages]:
    """A rank's messages in a step by kind and link; one that is only received is its sender's."""
    lines = recipe.mesh.lines(rank)
    for part, calls in sent_by_part(model, recipe, rank, setting).items():
        for kind, count in (+calls).items():
            size = wire(kind, len(lines[kind.axis]))
            links = {hosts.rings(lines[kind.axis], rank): count}
            if kind.op == "send":
                receivers = _next_stages(recipe, rank) if part == "pipeline" else _right_neighbour(recipe, rank, count)
                links = Counter()
                for peer, times in receivers.items():
                    links[hosts.rings_to(lines[kind.axis], rank, peer)] += times
            for rings, times in links.items():
                yield Messages(part, kind, times, rings > 0, size, hosts.seconds(size, rings))


def wire(kind: Message, ranks: int) -> float:
    """Bytes that each of so many ranks sends for a message, by a ring.

    The log has the same formula (minifsdp/calls.py), but a prediction shares no code with what it predicts.
    """
    share = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    return shares.get(kind.op, 1.0) * kind.payload


def receiver(recipe: Recipe, place: int, action: Did) -> int | None:
    """The place in the pipeline to which a rank sends an action's result; None: it sends none."""
    stage, kind, _ = action
    if kind == "W":
        return None
    needs = pipeline.homes_of(recipe.actions).get(stage + 1 if kind == "F" else stage - 1)
    return None if needs == place else needs


def _next_stages(recipe: Recipe, rank: int) -> Counter[int]:
    """The ranks to which a rank sends results in a pipeline, and how often."""
    place = recipe.mesh.place(rank, "pp")
    peers = [receiver(recipe, place, action) for action in recipe.actions[place]]
    return Counter(recipe.mesh.peers(rank, "pp")[peer] for peer in peers if peer is not None)


def _right_neighbour(recipe: Recipe, rank: int, count: int) -> Counter[int]:
    """The rank to which one passes keys and values on in a ring."""
    group = recipe.mesh.peers(rank, "cp")
    return Counter({group[(recipe.mesh.place(rank, "cp") + 1) % len(group)]: count})
