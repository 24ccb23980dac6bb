"""The growth of a step with ranks and units: time, bytes and messages, measured and by law.

The model is always the same: `blocks` blocks, cut into units of equally many neighbours. For DDP a unit is a bucket of
that size. The data grow with the ranks, so every rank computes as much as one alone (weak scaling).

A rank's traffic in a step, by law, for N ranks, Ψ bytes of parameters and U units besides the root:

                      messages           bytes on the wire by a ring
    DDP               buckets            2 (N - 1) / N Ψ                an all-reduce is a reduce-scatter and a gather
    SHARD_GRAD_OP     2 (U + 1)          2 (N - 1) / N Ψ                one gather, one reduce-scatter
    FULL_SHARD        3 (U + 1) - 1      (N - 1) / N (3 Ψ - root)       two gathers; the root stays gathered

FSDP's Ψ and root include padding. One rank shards nothing: it reduces a unit, or a bucket, at a time, with itself.
The law of a rank's memory is in data_parallel.py. Time depends on the machine and has no law here: a line is fitted.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from minifsdp.batch import Batch
from minifsdp.cost import data_parallel
from minifsdp.cost.data_parallel import Bytes
from minifsdp.cost.model import Model
from minifsdp.course.bench.contest import Contest
from minifsdp.course.bench.contestants import CONTESTANTS
from minifsdp.course.ladder.measure import measure_memory
from minifsdp.course.ladder.rungs import Trainer, closed_form_setting, sizes_of
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.launch.world import Backend, choose_world
from minifsdp.instruments.watch.step import take_step

BACKEND: Backend = "gloo"
WAYS = ("ddp", "fsdp-grad-op", "fsdp")
WARM_UP = 1  # steps: the first creates the optimizer's state


class Group(nn.Sequential):
    """A unit: neighbouring blocks."""


@dataclass(frozen=True)
class ScalingSettings:
    """The settings of one run.

    Attributes:
        ranks: world sizes, each run with `some_units`.
        units: numbers of units, each run on `few_ranks`; divisors of the largest, which is the number of blocks.
        width, context, batch: the model's sizes, and sequences per rank.
        steps: timed steps of each case.
    """

    ranks: tuple[int, ...] = (1, 2, 4, 8)
    units: tuple[int, ...] = (4, 8, 16, 32, 64)
    width: int = 64
    context: int = 16
    batch: int = 1
    steps: int = 5

    @property
    def blocks(self) -> int:
        return max(self.units)

    @property
    def some_units(self) -> int:
        return sorted(self.units)[len(self.units) // 2]

    @property
    def few_ranks(self) -> int:
        """The smallest world size above 1, where ranks have something to send; 1 if there is none."""
        return min((ranks for ranks in self.ranks if ranks > 1), default=1)

    def check(self) -> None:
        """Refuse settings that cannot be measured.

        Raises:
            ValueError: no steps; units that do not divide the blocks or too few for a line; too many ranks for gloo.
        """
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: time one or more")
        if len({*self.units}) < 2:
            raise ValueError("--units: give two numbers or more: a line is fitted through them")
        for units in self.units:
            if self.blocks % units:
                raise ValueError(f"--units: {self.blocks} blocks do not make {units} equal units: leave {units} out")
        choose_world(max(self.ranks), backend=BACKEND, here=max(self.ranks))

    def cases(self) -> Iterator[tuple[int, list[int]]]:
        """Each number of ranks, with the numbers of units to run on it."""
        for ranks in sorted({*self.ranks}):
            yield ranks, sorted({*self.units}) if ranks == self.few_ranks else [self.some_units]

    def model(self, units: int) -> GPT:
        """The model in `units` units, with the same parameters on every rank."""
        torch.manual_seed(0)
        model = GPT(width=self.width, layers=self.blocks, context=self.context)
        each = self.blocks // units
        model.blocks = nn.ModuleList(Group(*model.blocks[at : at + each]) for at in range(0, self.blocks, each))
        return model

    def rows(self) -> Batch:
        """This rank's data."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(256, (self.batch, self.context + 1), generator=generator).to(rank_device())
        return tokens[:, :-1], tokens[:, 1:]


def wrap(model: GPT, way: str) -> Trainer:
    """Wrap the model in one of the `WAYS`, with default arguments except for DDP's buckets, and add an optimizer."""
    if way != "ddp":
        return CONTESTANTS[f"our-{way}"].build(model)
    cap = bucket_cap(sizes_of(model)) / 2**20
    return CONTESTANTS["our-ddp-view"].build(model, bucket_cap_mb=cap)


def bucket_cap(sizes: Model) -> int:
    """Bytes at which a bucket is closed: those of a unit."""
    return 4 * sum(sizes.units[1])


def cost(messages: int, wire: int, held: Bytes) -> dict[str, int]:
    """The cost of a step on one rank, measured or predicted by law.

    Args:
        messages: collectives of a step.
        wire: bytes that the rank sends for them in a ring.
        held: bytes between `step()` and `zero_grad()`, and peaks.
    """
    return {"messages": messages, "wire": wire, **asdict(held)}


def law(sizes: Model, way: str, ranks: int) -> dict[str, int]:
    """Predict the cost of a step from the model's sizes."""
    setting, blocks = closed_form_setting(ranks, choose_world(ranks, backend=BACKEND)), len(sizes.units) - 1
    psi, share = 4 * sum(sizes.parameters), (ranks - 1) / ranks
    if way == "ddp":
        messages = len(data_parallel.buckets(sizes.parameters, bucket_cap(sizes)))
        return cost(messages, round(2 * share * psi), data_parallel.ddp(sizes.parameters, setting))
    if ranks == 1:
        return cost(blocks + 1, 0, data_parallel.fsdp(sizes.units, setting))
    root, *padded = (setting.padded(sum(unit)) for unit in sizes.units)
    full = way == "fsdp"
    schedule: Any = {"reductions": 0 if full else 1, "forward_depth": 1, "backward": "host"}
    held = data_parallel.fsdp(sizes.units, setting, reshard_after_forward=full, **schedule)
    if full:
        return cost(3 * blocks + 2, round(share * (3 * sum(padded) + 2 * root)), held)
    return cost(2 * (blocks + 1), round(share * 2 * (sum(padded) + root)), held)


def measure(settings: ScalingSettings, ranks: int, units: Sequence[int]) -> list[dict[str, Any]]:
    """Run all ways on `ranks` ranks, with each of these numbers of units.

    Returns:
        For each way and number of units: "way", "ranks", "units"; "seconds", the median of the slowest rank's steps,
        with "quartiles"; "found", by rank, and "law", as of `cost`; "peak", the ledger's on the rank that holds
        most, activations included.
    """
    answers = launch(_on_rank, ranks, settings, list(units), timeout=300, backend=BACKEND)
    rows = []
    for place, (way, number) in enumerate((way, number) for number in units for way in WAYS):
        of_ranks = [answer[place] for answer in answers]
        slowest = np.max([each["seconds"] for each in of_ranks], axis=0)
        low, middle, high = (float(each) for each in np.quantile(slowest, (0.25, 0.5, 0.75)))
        rows.append(
            {
                "way": way,
                "ranks": ranks,
                "units": number,
                "seconds": middle,
                "quartiles": [low, high],
                "found": [each["found"] for each in of_ranks],
                "law": law(sizes_of(settings.model(number)), way, ranks),
                "peak": max(each["peak"] for each in of_ranks),
            }
        )
    return rows


def against_law(row: Mapping[str, Any]) -> list[str]:
    """A line for each difference between a row of `measure` and the law."""
    lines = []
    for rank, found in enumerate(row["found"]):
        for name, wanted in row["law"].items():
            if found[name] != wanted:
                case = f"{row['way']}, {row['ranks']} ranks, {row['units']} units, rank {rank}"
                lines.append(f"{case}: {name} {found[name]:,}, the law says {wanted:,}")
    return lines


def fit(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Fit the seconds of a step without messages, and of each message, to the rows (least squares)."""
    slope, start = np.polyfit([row["law"]["messages"] for row in rows], [row["seconds"] for row in rows], 1)
    return float(start), float(slope)


def _on_rank(settings: ScalingSettings, units: Sequence[int]) -> list[dict[str, Any]]:
    """This rank's part of `measure`: a step of each case in turn, timed; then its memory."""
    where, rows = rank_device(), settings.rows()
    cases = [(number, way) for number in units for way in WAYS]
    steps = {case: partial(_step, wrap(settings.model(case[0]).to(where), case[1]), rows, where) for case in cases}
    times = Contest(steps, "wall", settings.steps, WARM_UP).run(where)
    del steps
    gc.collect()
    return [{"seconds": times[number, way].seconds, **_count(settings, number, way, rows)} for number, way in cases]


def _step(trainer: Trainer, rows: Batch, where: torch.device, _: int) -> None:
    take_step(trainer, rows, where)


def _count(settings: ScalingSettings, number: int, way: str, rows: Batch) -> dict[str, Any]:
    where = rank_device()
    measured = measure_memory(lambda: wrap(settings.model(number).to(where), way), rows, where)
    held = dict(measured["bytes"])
    peak = held.pop("peak")
    held.pop("activations", None)  # no part of this closed form
    operations = measured["collectives"].values()
    messages, wire = (sum(each[what] for each in operations) for what in ("calls", "wire"))
    return {"found": cost(messages, wire, Bytes(**held)), "peak": peak}
