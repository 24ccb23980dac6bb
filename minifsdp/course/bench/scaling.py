"""The growth of a step with the ranks and with the units: time, bytes and messages, measured and by law.

The model is always the same: `blocks` blocks, cut into units of equally many neighbours. To DDP a unit is a bucket of
that size. More ranks bring more data, so that every rank computes as much as one alone (weak scaling).

What a rank moves in a step, by law, for N ranks, Ψ bytes of parameters and U units besides the root:

                      messages           bytes on the wire by a ring
    DDP               buckets            2 (N - 1) / N Ψ                an all-reduce is a reduce-scatter and a gather
    SHARD_GRAD_OP     2 (U + 1)          2 (N - 1) / N Ψ                one gather, one reduce-scatter
    FULL_SHARD        3 (U + 1) - 1      (N - 1) / N (3 Ψ - root)       two gathers; the root stays whole for backward

Ψ and the root are padded in FSDP's. One rank shards nothing: it reduces a unit, or a bucket, at a time, with itself.
What it holds, by law, is in closed_form.py. The time has no law here, for it is the machine's: a line is fitted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from minifsdp.course.ladder import closed_form
from minifsdp.course.ladder.closed_form import Bytes
from minifsdp.course.ladder.data import Batch
from minifsdp.course.ladder.measure import align, measure_memory, take_step
from minifsdp.course.ladder.model import GPT
from minifsdp.course.ladder.rungs import LEARNING_RATE, Sizes, Trainer, closed_form_setting, sizes_of
from minifsdp.course.launch import launch, rank_device
from minifsdp.course.launch.world import Backend, choose_world
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel, ShardingStrategy

BACKEND: Backend = "gloo"
WAYS = ("ddp", "fsdp-grad-op", "fsdp")
WARM_UP = 1  # steps: the first makes the optimizer's state


class Group(nn.Sequential):
    """Neighbouring blocks: a unit."""


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        ranks: over which the model is spread in turn, in `some_units`.
        units: into which it is cut in turn, on `few_ranks`; divisors of the most, which is the number of blocks.
        width, context, batch: of the model, and the sequences of each rank.
        steps: of each that are timed.
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
        """The fewest between which there is something to be sent."""
        return min((ranks for ranks in self.ranks if ranks > 1), default=1)

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: no steps; units that blocks do not make, or too few for a line; more ranks than gloo serves.
        """
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: time one or more")
        if len({*self.units}) < 2:
            raise ValueError("--units: give two numbers or more, for a line is fitted through them")
        for units in self.units:
            if self.blocks % units:
                raise ValueError(f"--units: {self.blocks} blocks do not make {units} equal units: leave {units} out")
        choose_world(max(self.ranks), backend=BACKEND, here=max(self.ranks))

    def cases(self) -> Iterator[tuple[int, list[int]]]:
        """Numbers of ranks, and of units to be tried on so many."""
        for ranks in sorted({*self.ranks}):
            yield ranks, sorted({*self.units}) if ranks == self.few_ranks else [self.some_units]

    def model(self, units: int) -> GPT:
        """The same parameters on every rank, in so many units."""
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


class Found(NamedTuple):
    """The cost of a case, measured on one rank or given by law.

    Attributes:
        messages: collectives of a step.
        wire: bytes that the rank sends for them by a ring.
        held: between `step()` and `zero_grad()`, and at most.
    """

    messages: int
    wire: int
    held: Bytes


def wrap(model: GPT, way: str) -> Trainer:
    """The model in training in one of the `WAYS`, with default arguments but for DDP's buckets."""
    wrapped: nn.Module
    if way == "ddp":
        cap = bucket_cap(sizes_of(model)) / 2**20
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    else:
        strategy = ShardingStrategy.FULL_SHARD if way == "fsdp" else ShardingStrategy.SHARD_GRAD_OP
        if dist.get_world_size() == 1:
            strategy = ShardingStrategy.NO_SHARD
        wrapped = FullyShardedDataParallel(model, None, strategy, auto_wrap_policy={Group})
    return Trainer(wrapped, AdamW(wrapped.parameters(), LEARNING_RATE))


def bucket_cap(sizes: Sizes) -> int:
    """Bytes of a unit, at which a bucket is closed."""
    return 4 * sum(sizes.units[1])


def law(sizes: Sizes, way: str, ranks: int) -> Found:
    """The cost of a step by law, from the model's sizes."""
    setting, blocks = closed_form_setting(ranks, BACKEND), len(sizes.units) - 1
    psi, share = 4 * sum(sizes.parameters), (ranks - 1) / ranks
    if way == "ddp":
        messages = len(closed_form.buckets(sizes.parameters, bucket_cap(sizes)))
        return Found(messages, round(2 * share * psi), closed_form.ddp(sizes.parameters, setting))
    if ranks == 1:
        return Found(blocks + 1, 0, closed_form.fsdp(sizes.units, setting))
    root, *padded = (setting.padded(sum(unit)) for unit in sizes.units)
    full = way == "fsdp"
    schedule: Any = {"reductions": 0 if full else 1, "forward_depth": 1, "backward": "host"}
    held = closed_form.fsdp(sizes.units, setting, reshard_after_forward=full, **schedule)
    if full:
        return Found(3 * blocks + 2, round(share * (3 * sum(padded) + 2 * root)), held)
    return Found(2 * (blocks + 1), round(share * 2 * (sum(padded) + root)), held)


def measure(settings: Settings, ranks: int, units: Sequence[int]) -> list[dict[str, Any]]:
    """Run all ways on so many ranks.

    Returns:
        For each way and number of units: "way", "ranks", "units"; "seconds", the median of the slowest rank's steps,
        with "quartiles"; "found", by rank, and "law", as dicts of `Found`; "peak", the ledger's, of the rank that holds
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
                "law": _plain(law(sizes_of(settings.model(number)), way, ranks)),
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
    """Seconds of a step without messages, and of each message, that fit the rows best (least squares)."""
    slope, start = np.polyfit([row["law"]["messages"] for row in rows], [row["seconds"] for row in rows], 1)
    return float(start), float(slope)


def _plain(found: Found) -> dict[str, int]:
    return {"messages": found.messages, "wire": found.wire, **asdict(found.held)}


def _on_rank(settings: Settings, units: Sequence[int]) -> list[dict[str, Any]]:
    """This rank's part of `measure`: a step of each case in turn, timed; then its memory."""
    torch.set_num_threads(1)
    where, rows = rank_device(), settings.rows()
    cases = [(number, way) for number in units for way in WAYS]
    trainers = [wrap(settings.model(number).to(where), way) for number, way in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for step in range(WARM_UP + settings.steps):
        for trainer, times in zip(trainers, seconds, strict=True):
            align(where)
            start = time.perf_counter()
            take_step(trainer, rows, where)
            if step >= WARM_UP:
                times.append(time.perf_counter() - start)
    del trainer, trainers
    gc.collect()
    counts = [_count(settings, number, way, rows) for number, way in cases]
    return [{"seconds": times, **count} for times, count in zip(seconds, counts, strict=True)]


def _count(settings: Settings, number: int, way: str, rows: Batch) -> dict[str, Any]:
    where = rank_device()
    measured = measure_memory(lambda: wrap(settings.model(number).to(where), way), rows, where)
    held = dict(measured["bytes"])
    peak = held.pop("peak")
    operations = measured["collectives"].values()
    messages, wire = (sum(each[what] for each in operations) for what in ("calls", "wire"))
    return {"found": _plain(Found(messages, wire, Bytes(**held))), "peak": peak}
