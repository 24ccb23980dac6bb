"""Steps on links of two speeds with all orders of a mesh's axes, measured and predicted.

The same ranks train the same model by the same recipe; an order decides which axes stay inside a host. Links are
emulated, and so slow that a step mostly waits for them. The prediction (cost/step.py) has the messages and their
bytes by axis, and takes one number from the machine: the CPU time of a step, of the training threads of all ranks and
divided by the cores, since ranks that have waited for one message compute at the same time. Other threads carry the
messages, within the time that these take.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from minifsdp.build import build, sizes_of
from minifsdp.cost.links import Hosts, Link
from minifsdp.cost.step import step as predicted_step
from minifsdp.course.bench.contest import Contest, Step
from minifsdp.course.ladder.outline import outline
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import launch
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks, let_communication_go_first
from minifsdp.mesh import leaves_host
from minifsdp.recipe import Recipe
from minifsdp.trainer import Trainer

PLAIN = EmulatedLink(0.0, 1e18)
"""Messages on it take as long as the machine needs for them."""


INSIDE, ACROSS = Link(0.015, 20e6), Link(0.045, 3e6)


class Case(NamedTuple):
    """An order of axes on hosts of so many ranks."""

    per_host: int
    axes: str

    def recipe(self, words: str) -> Recipe:
        return Recipe.parse(f"{words},axes={self.axes}")


@dataclass(frozen=True)
class OrdersSettings:
    """One run.

    Attributes:
        words: the recipe without its order.
        hosts: ranks of a host.
        inside, across: links.
        batch: sequences of a step over all ranks.
        steps: timed steps of each order.
    """

    words: str = "pp=2,dp=2,tp=2,zero=1,sequence,micro=2"
    hosts: tuple[int, ...] = (4, 2)
    inside: Link = INSIDE
    across: Link = ACROSS
    batch: int = 8
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 24
    steps: int = 3

    @property
    def recipe(self) -> Recipe:
        return Recipe.parse(self.words)

    @property
    def cases(self) -> list[Case]:
        orders = ["/".join(axes) for axes in permutations(self.recipe.mesh.divided)]
        return [Case(per_host, axes) for per_host in self.hosts for axes in orders]

    def model(self) -> GPT:
        """The same parameters on every rank."""
        torch.manual_seed(0)
        return GPT(**self.shape)

    @property
    def shape(self) -> dict[str, Any]:
        """The sizes of the model, as `GPT` takes them."""
        return {"width": self.width, "layers": self.layers, "heads": self.heads, "context": self.context}

    def across_hosts(self, case: Case) -> list[str]:
        """The axes that leave a host."""
        mesh = case.recipe(self.words).mesh
        return [axis for axis in mesh.divided if leaves_host(mesh.groups(axis), case.per_host)]

    def predict(self, case: Case, compute: float) -> float:
        """Seconds of a step; `compute`: those in which a rank computes."""
        recipe = case.recipe(self.words)
        setting = replace(closed_form_setting(recipe.mesh.ranks), batch=self.batch, context=self.context)
        return predicted_step(
            sizes_of(outline(**self.shape)), recipe, setting, Hosts(self.inside, self.across, case.per_host), compute
        )


def measure(settings: OrdersSettings) -> dict[str, Any]:
    """Run all orders in turn on one set of ranks.

    Returns:
        "compute", the CPU time of a step, of all training threads and divided by the cores, in seconds; "rows", of each
        case "host", "axes", "across" (the axes that leave a host), "seconds" (the median of the slowest rank's steps),
        "quartiles" and "predicted".
    """
    of_ranks = launch(_on_rank, settings.recipe.mesh.ranks, settings, timeout=600, backend="gloo")
    compute = sum(median(rank[None]) for rank in of_ranks) / min(cores(), len(of_ranks))
    rows = []
    for case in settings.cases:
        slowest = np.max([rank[case] for rank in of_ranks], axis=0)
        low, middle, high = (float(each) for each in np.quantile(slowest, (0.25, 0.5, 0.75)))
        rows.append(
            {
                "host": case.per_host,
                "axes": case.axes,
                "across": settings.across_hosts(case),
                "seconds": middle,
                "quartiles": [low, high],
                "predicted": settings.predict(case, compute),
            }
        )
    return {"compute": compute, "rows": rows}


def _on_rank(settings: OrdersSettings) -> dict[Case | None, list[float]]:
    """Seconds of each step of each case; under None, CPU seconds of this thread in steps on the machine's own links."""
    let_communication_go_first()
    rows = torch.zeros(settings.batch // settings.recipe.mesh.dp, settings.context, dtype=torch.int64)
    trainers = {case.axes: _build(settings, case) for case in settings.cases}
    of_cpu: list[float] = []

    def plain(_: int) -> None:
        start = time.thread_time()
        _step(next(iter(trainers.values())), rows, PLAIN, 0)
        of_cpu.append(time.thread_time() - start)

    steps: dict[Case | None, Step] = {None: plain}
    for case in settings.cases:
        links = HostLinks(EmulatedLink(*settings.inside), EmulatedLink(*settings.across), case.per_host)
        steps[case] = partial(_step, trainers[case.axes], rows, links)
    times = Contest(steps, "wall", settings.steps, warm_up=1).run()
    return {case: of_case.seconds for case, of_case in times.items()} | {None: of_cpu[1:]}


def cores() -> int:
    """Of this machine, for its processes."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _build(settings: OrdersSettings, case: Case) -> Trainer:
    """All rows have as many tokens: ranks need not count them."""
    return replace(build(settings.model(), case.recipe(settings.words)), loss_of=None)


def _step(trainer: Trainer, rows: torch.Tensor, links: EmulatedLink | HostLinks, _: int) -> None:
    with links:
        trainer.step(rows, rows)


def misranked(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each pair of orders that the prediction ranks the wrong way round."""
    lines = []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: float(row["predicted"]))
        differ = one["host"] == other["host"] and set(fast["across"]) != set(slow["across"])
        if differ and fast["seconds"] >= slow["seconds"]:
            lines.append(f"hosts of {one['host']}: {fast['axes']} was no faster than {slow['axes']}")
    return lines


def missed(rows: Sequence[Mapping[str, Any]], limit: float) -> list[str]:
    """A line for each order whose time differs from the prediction by more than `limit`, as a share of it."""
    return [
        f"hosts of {row['host']}, {row['axes']}: {row['seconds']:.3f} s, predicted {row['predicted']:.3f}"
        for row in rows
        if abs(row["seconds"] / row["predicted"] - 1) > limit
    ]
