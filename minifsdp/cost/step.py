"""The seconds of a step on links of two speeds (links.py), in virtual time; arithmetic, no tensors.

Nothing hides messages of tensor and context parallelism: a rank waits for each. Activations and gradients travel to
other stages while the rank goes on, and delay only the messages behind them on the same link, receives among them; the
stage that needs them waits. When all its backwards are over, a rank shares the losses, and then exchanges gradients and
parameters. ZeRO-1 does so; DDP, ZeRO-2 and FSDP begin earlier, and hide a part of these seconds under computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minifsdp.cost import pipeline
from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.links import Hosts, messages, receiver
from minifsdp.cost.model import Model
from minifsdp.cost.pipeline import Did

if TYPE_CHECKING:
    from minifsdp.recipe import Recipe

UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Computation of an action, relative to the others."""


def step(model: Model, recipe: Recipe, setting: Setting, hosts: Hosts, compute: float = 0.0) -> float:
    """Seconds of a step.

    Args:
        model, recipe, setting: as for `cost`.
        hosts: and their links.
        compute: seconds of a step in which a rank computes, the same on all.
    """
    pipelines = {tuple(recipe.mesh.peers(rank, "pp")) for rank in range(recipe.mesh.ranks)}
    return max(Pipeline(model, recipe, setting, hosts, ranks).length(compute) for ranks in pipelines)


@dataclass
class Rank:
    """A rank's clocks, in seconds from the beginning of the step.

    Attributes:
        number: in the default process group.
        during: of a forward or backward, the seconds of the messages that it waits for, by link: across hosts, or not.
        after: the same of what follows the last backward.
        sharing: the link and the seconds of the message with the losses; None: there is no pipeline.
        now: everything up to here is done.
        busy: until when each link is.
    """

    number: int
    during: Mapping[bool, float]
    after: Mapping[bool, float]
    sharing: tuple[bool, float] | None
    now: float = 0.0
    busy: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})

    def send(self, across: bool, seconds: float) -> float:
        """The moment at which a message has arrived; the rank goes on."""
        self.busy[across] = max(self.now, self.busy[across]) + seconds
        return self.busy[across]

    def wait_for(self, seconds: Mapping[bool, float]) -> None:
        """Messages one after another, each awaited."""
        for across, duration in seconds.items():
            if duration:
                self.now = self.send(across, duration)


class Pipeline:
    """A step of the ranks of one pipeline, or of a rank without one."""

    def __init__(self, model: Model, recipe: Recipe, setting: Setting, hosts: Hosts, numbers: Sequence[int]) -> None:
        self.recipe, self.hosts, self.plan = recipe, hosts, recipe.actions
        self.homes = pipeline.homes_of(self.plan)
        self.actions = {action for actions in self.plan for action in actions}
        self.arrived: dict[Did, float] = {}  # results, by the action that makes them
        self.passed = 0.0  # bytes of a result
        self.ranks = [self._rank(model, setting, number) for number in numbers]

    def _rank(self, model: Model, setting: Setting, number: int) -> Rank:
        during, after = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
        awaiting = sum(kind != "W" for _, kind, _ in self.plan[self.recipe.mesh.place(number, "pp")])
        sharing = None
        for each in messages(model, self.recipe, number, setting, self.hosts):
            if each.part == "data":
                after[each.across] += each.times * each.seconds
            elif each.part != "pipeline":
                during[each.across] += each.times * each.seconds / awaiting
            elif each.kind.op == "send":
                self.passed = each.sent
            else:
                sharing = each.across, each.seconds
        return Rank(number, during, after, sharing)

    def length(self, compute: float) -> float:
        """The end of the last rank's part."""
        units = [sum(UNITS[kind] for _, kind, _ in actions) for actions in self.plan]
        left = [[*actions] for actions in self.plan]
        while any(left):
            for place, actions in enumerate(left):
                while actions and ((source := self._source(actions[0])) is None or source in self.arrived):
                    self._do(place, actions.pop(0), source, compute / units[place])
        self._share_losses()
        for rank in self.ranks:
            rank.wait_for(rank.after)
        return max(rank.now for rank in self.ranks)

    def _source(self, action: Did) -> Did | None:
        """The action on another stage that makes this one's input; None: it needs none."""
        stage, kind, micro = action
        neighbour = stage - 1 if kind == "F" else stage + 1
        makers = {"F": "F", "W": ""}.get(kind, "BI")
        found = ((neighbour, maker, micro) for maker in makers)
        return next((each for each in found if each in self.actions), None)

    def _do(self, place: int, action: Did, source: Did | None, unit: float) -> None:
        rank = self.ranks[place]
        if source is not None:
            if (sender := self.homes[source[0]]) != place:  # a receive, too, has its turn on the link
                rank.now = max(rank.now, rank.busy[self._rings(rank, sender) > 0])
            rank.now = max(rank.now, self.arrived[source])
        rank.now += unit * UNITS[action[1]]
        if action[1] != "W":
            rank.wait_for(rank.during)
            self.arrived[action] = rank.now
        if (peer := receiver(self.recipe, place, action)) is not None:
            rings = self._rings(rank, peer)
            self.arrived[action] = rank.send(rings > 0, self.hosts.seconds(self.passed, rings))

    def _rings(self, rank: Rank, peer: int) -> int:
        group = self.recipe.mesh.peers(rank.number, "pp")
        return self.hosts.rings_to(group, rank.number, group[peer])

    def _share_losses(self) -> None:
        """A broadcast from the last stage, once all that a rank has sent has left."""
        for rank in self.ranks:
            rank.now = max(rank.now, *rank.busy.values())
            if rank.sharing is not None:
                rank.now = rank.send(*rank.sharing)
        last = self.ranks[self.homes[max(self.homes)]]
        for rank in self.ranks:
            rank.now = max(rank.now, last.now)
