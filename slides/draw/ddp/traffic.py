"""What each rank sends in a collective, counted as the course's code runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil, log2
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from draw.canvas import canvas
from draw.ddp.drawing import BAD, FOUR, GOOD, OTHER
from matplotlib.figure import Figure
from torch import Tensor

from minifsdp import comm, ring
from minifsdp.answers import lab01
from minifsdp.instruments.plots.palette import SOFT, as_text


def group_of(rank: int, ranks: int) -> Any:
    """What a program asks of its process group."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: ranks)


def sent_by(program: Callable[[Any], Any], ranks: int) -> list[list[Tensor]]:
    """What each rank of a program sends, message by message; its ranks are threads here, its messages go by queues."""
    boxes: defaultdict[tuple[int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]

    def send(tensor: Tensor, target: int, group: Any) -> Any:
        sent[group.rank()].append(tensor.clone())
        boxes[group.rank(), target].put(sent[group.rank()][-1])
        return comm.Done()

    def recv(tensor: Tensor, source: int, group: Any) -> Any:
        return SimpleNamespace(wait=lambda: tensor.copy_(boxes[source, group.rank()].get()))

    with patch.multiple(comm, send=send, recv=recv), ThreadPoolExecutor(ranks) as pool:
        list(pool.map(program, [group_of(rank, ranks) for rank in range(ranks)]))
    return sent


def ring_all_reduce(group: Any) -> None:
    ring.all_reduce(torch.zeros(840), group)


def ring_all_gather(group: Any) -> None:
    ring.all_gather(torch.zeros(840), torch.zeros(840 // group.size()), group)


def gather_then_broadcast(group: Any) -> None:
    whole = torch.zeros(840)
    shards = whole.view(group.size(), -1)
    if group.rank():
        comm.send(shards[0], 0, group).wait()
    else:
        for source in range(1, group.size()):
            comm.recv(shards[source], source, group).wait()
    lab01.broadcast(whole, 0, group)


def sent_bytes(way: Callable[[Any], None], ranks: int) -> list[float]:
    """By rank, what it sends, in sizes of the whole tensor."""
    return [sum(message.numel() for message in messages) / 840 for messages in sent_by(way, ranks)]


def draw_busiest() -> Figure:
    """Bytes that the busiest rank sends in an all-reduce, over the number of ranks, for three ways."""
    figure = canvas(3.9)
    axes = figure.subplots()
    counts = [2**power for power in range(1, 11)]
    axes.plot(counts, [n - 1 for n in counts], color=BAD)
    axes.text(7.4, 9.6, "gather all, add:\nN - 1", ha="right", color=as_text(BAD), va="center")
    axes.plot(counts, [ceil(log2(n)) for n in counts], color=OTHER)
    axes.text(160, 9.2, "binomial trees, reduce\nand broadcast: log₂ N", color=as_text(OTHER), va="center", ha="right")
    axes.plot(counts, [2 * (n - 1) / n for n in counts], color=GOOD, linewidth=5)
    axes.text(1024, 2.75, "ring: 2 (N - 1) / N, below 2", color=GOOD, va="center", ha="right", fontweight="bold")
    sent = [max(sent_bytes(ring_all_reduce, n)) for n in counts[:3]]
    axes.plot(counts[:3], sent, "o", color=GOOD, markersize=13, clip_on=False)
    axes.text(1024, 0.85, "dots: counted as minifsdp/ring.py runs", color=SOFT, ha="right", va="center")
    axes.set_xscale("log", base=2)
    shown = [2, 4, 8, 16, 64, 256, 1024]
    axes.set_xticks(shown, [f"{count:,}" for count in shown])
    axes.minorticks_off()
    axes.set_yticks(range(0, 11, 2))
    axes.set(xlim=(2, 1100), ylim=(0, 10.4), xlabel="ranks N")
    axes.set_ylabel("the busiest rank sends\n(multiples of the tensor)")
    return figure


def draw_gather() -> Figure:
    """What each of four ranks sends for an all-gather, by the ring and by a gather and a broadcast."""
    figure = canvas(4.6)
    ways = {"ring all-gather": (ring_all_gather, GOOD), "gather, then broadcast": (gather_then_broadcast, BAD)}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, (way, colour)) in zip(panels, ways.items(), strict=True):
        sent = sent_bytes(way, 4)
        axes.bar(FOUR, sent, 0.72, color=colour)
        for rank, size in enumerate(sent):
            axes.text(rank, size + 0.05, f"{size:g}", ha="center", fontweight="bold" if size == max(sent) else "normal")
        axes.set_xticks(FOUR, [f"rank {rank}" for rank in FOUR])
        axes.set_title(name, loc="center", color=as_text(colour))
        axes.tick_params(length=0)
        axes.set(ylim=(0, 2.3), yticks=[])
        axes.spines["left"].set_visible(False)
    panels[0].set_ylabel("each rank sends\n(multiples of the tensor)")
    return figure
