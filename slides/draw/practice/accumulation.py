"""Accumulation of gradients, with communication and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch.distributed as dist
from draw.canvas import MIB, canvas
from draw.practice.model import RANKS
from matplotlib.figure import Figure
from minifsdp.answers.lab09 import accumulate

from minifsdp import comm
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp import FullyShardedDataParallel, SyncSchedule
from minifsdp.gpt import Block
from minifsdp.instruments.launch import launch
from minifsdp.instruments.plots.palette import GATHER, REDUCE, TAG_COLOURS, as_text
from minifsdp.instruments.watch.ledger import Ledger

SMALL = Settings(ranks=RANKS, batch=RANKS, layers=5, width=105, context=16)
MICRO_BATCHES = 3


@cache
def accumulations() -> dict[str, list[tuple[str, int]]]:
    """By way, what `accumulated` returns on rank 0 of 8."""
    ways = {"without no_sync()": True, "with no_sync()": False}
    (found,) = launch(lambda: {name: accumulated(each) for name, each in ways.items()}, RANKS, backend="fake")
    return found


def accumulated(communicate: bool) -> list[tuple[str, int]]:
    """The collectives of some micro-batches, each with the bytes of gradients that are held when it is issued."""
    seen: list[tuple[str, int]] = []

    @contextmanager
    def watch(call: comm.Call, phase: str) -> Iterator[None]:
        if phase == "issue":
            seen.append((call.op, ledger.live()["gradients"]))
        yield

    batches = [data.shard(batch, dist.get_rank(), RANKS) for batch in list(SMALL.batches())[:MICRO_BATCHES]]
    with Ledger() as ledger:
        model = FullyShardedDataParallel(SMALL.model(), auto_wrap_policy={Block}, schedule=SyncSchedule)
        ledger.watch(model)
        comm.observers.append(watch)
        accumulate(model, batches, communicate)
        comm.observers.remove(watch)
        return [*seen, ("", ledger.live()["gradients"])]


def draw_accumulation() -> Figure:
    """Bytes of gradients at each collective of three micro-batches, with communication and without."""
    figure = canvas(4.8)
    rows = figure.subplots(2, sharex=True, sharey=True)
    for row, (name, log) in zip(rows, accumulations().items(), strict=True):
        held = [size / MIB for _, size in log]
        row.fill_between(range(len(held)), held, step="post", color=TAG_COLOURS["gradients"], linewidth=0)
        for place, (op, _) in enumerate(log[:-1]):
            row.plot(
                [place] * 2,
                [-1.25, -0.35],
                color=REDUCE if "reduce" in op else GATHER,
                linewidth=5,
            )
        ops = [op for op, _ in log]
        counts = f"{ops.count('all_gather')} all-gathers, {ops.count('reduce_scatter')} reduce-scatters"
        row.set_title(f"{name}: {counts}")
        second = len(log) // MICRO_BATCHES
        row.text(second + 0.5, 3.65, f"{held[second]:.2f} MiB between micro-batches", va="top")
        row.set_yticks([0, 1, 2, 3])
        row.set_ylabel("MiB")
        row.spines["bottom"].set_visible(False)
        row.tick_params(axis="x", length=0, labelbottom=False)
    rows[1].text(39.6, 0.9, "gradients", color=as_text(TAG_COLOURS["gradients"]), va="center", fontweight="bold")
    rows[1].text(39.6, -0.15, "all-gather", color=GATHER, va="center", fontweight="bold")
    rows[1].text(39.6, -1.1, "reduce-scatter", color=REDUCE, va="center", fontweight="bold")
    psi = sum(p.numel() for p in SMALL.model().parameters())
    rows[1].set_xlabel(f"collectives in order; rank 0 of {RANKS}, GPT of {psi / 1e6:.1f} M parameters, fp32")
    rows[0].set_xlim(-0.7, 51.5)
    rows[0].set_ylim(-1.4, 3.8)
    return figure
