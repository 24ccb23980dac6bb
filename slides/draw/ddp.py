"""Figures and numbers of deck 2: collectives, and data parallelism made of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from math import ceil, log2
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from draw.canvas import INK, LINE, PALE, SOFT, Draw, canvas, in_units
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.optim import SGD, Adam

from minifsdp import comm, ring
from minifsdp.comm import Call
from minifsdp.course.data import Batch
from minifsdp.course.doctor.peak import NVLINK, PCIE
from minifsdp.course.intervals import union
from minifsdp.course.link import EmulatedLink
from minifsdp.course.machine import A100, Program, Run, record_on_paper, replay
from minifsdp.course.model import GPT
from minifsdp.course.plots.style import LANE_COLOURS, REDUCTION_COLOUR, SERIES_COLOURS, TAG_COLOURS
from minifsdp.course.reference import lab01
from minifsdp.course.rungs import Trainee
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP, naive
from minifsdp.ddp.bucketed import assign_buckets

MB, MIB, KIB = 10**6, 2**20, 2**10
GOOD, BAD, OTHER = SERIES_COLOURS[:3]
FOUR = range(4)  # ranks, and chunks

LINKS = {  # lab 01's, in seconds and bytes per second: 18 links of an H100, 16 lanes, 400 and 25 Gbit/s
    "NVLink 4": (3.4e-6, NVLINK[9, 0][0] * NVLINK[9, 0][1] * 1e9),
    "PCIe 5.0 x16": (5.7e-6, 16 * PCIE[5] * 1e9),
    "InfiniBand NDR": (14e-6, 400e9 / 8),
    "Ethernet 25G": (30e-6, 25e9 / 8),
}
SLOW = EmulatedLink(latency=2e-3, bandwidth=100e6)  # lab 01's
PIECES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (104_858, 78_643, 52_429, 26_214)  # elements of uneven shards, 1 MiB together

gpt2: Callable[[], GPT] = partial(GPT, vocabulary=50257, width=768, layers=12, heads=12, context=1024, tied=True)
GPUS = 16
PAPER = replace(A100, issue=A100.launch, segment=(0.0, 0.0))  # the table's issue is FSDP's bookkeeping
ON_PAPER = f"{PAPER.name} on paper, {GPUS} ranks: model, not measured"
CAPS = (0, 1, 2, 5, 10, 25, 50, 100, 200, 400, 1000)  # MiB
RECORD = Path(__file__).parents[2] / "benchmarks" / "records" / "cpu" / "step-2-ranks.json"
MICRO = 4
BATCHES = (5, 5, 4, 2)  # of each rank, where they are uneven


def numbers() -> dict[str, Any]:
    """What the deck's text says in numbers."""
    sizes, buckets = [p.nbytes for p in parameters().values()], bucket_sizes(25)
    small = [size for size in sizes if size < 64 * KIB]
    return {
        "mb": in_units("MB", MB, 0),
        "ms": in_units("ms", 1e-3, 1),
        "gradients": sum(sizes),
        "tensors": len(sizes),
        "fewer": len(sizes) - len(buckets),
        "small": len(small),
        "small_share": sum(small) / sum(sizes),
        "embedding": max(sizes),
        "buckets": buckets,
        "one_each": sum(map(all_reduce, sizes)),
        "in_buckets": sum(map(all_reduce, buckets)),
        "latency": PAPER.latency,
        "overlap": rung("ddp").overlap,
        "exposed": exposed,
        "longer": {ranks: (step_ratio(SGD, ranks), step_ratio(Adam, ranks)) for ranks in (2, 8, 64)},
        "counted": counted(2),
        "micro": MICRO,
        "batches": BATCHES,
        "running": [sum(step < batches for batches in BATCHES) for step in range(max(BATCHES))],
        "extra": extra_memory(),
        "sent": {"ring": sent_bytes(ring_all_gather, 4), "gather": sent_bytes(gather_then_broadcast, 4)},
        "half": {name: latency * bandwidth for name, (latency, bandwidth) in LINKS.items()},
    }


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


Held = dict[tuple[int, int], set[int]]
"""By rank and chunk, whose contributions are in it."""


@cache
def ring_steps() -> list[Held]:
    """What each of four ranks sends in each step of an all-reduce: element c of rank r is 2 ** (r + 4 c)."""

    def program(group: Any) -> None:
        chunks = [2.0 ** (group.rank() + 4 * chunk) for chunk in FOUR]
        ring.all_reduce(torch.tensor(chunks, dtype=torch.float64), group)

    steps = []
    for messages in zip(*sent_by(program, 4), strict=True):
        held: Held = {}
        for rank, message in enumerate(messages):
            bits = [bit for bit in range(16) if int(message) >> bit & 1]
            held[rank, bits[0] // 4] = {bit % 4 for bit in bits}
        steps.append(held)
    return steps


@cache
def parameters() -> dict[str, nn.Parameter]:
    """By name, in order of registration; without memory."""
    with torch.device("meta"):
        return dict(gpt2().named_parameters())


@cache
def recorded(kind: str, cap: float | None = None) -> Program:
    """A step of rank 0 on one sequence. Nobody is there to compare models with, so that is left out."""

    def build(group: Any) -> Trainee:
        model = gpt2()
        if kind == "ddp":
            options: Any = {"init_sync": False, "gradient_as_bucket_view": True, "bucket_cap_mb": cap}
            ddp = DistributedDataParallel(model, process_group=group, **options)
            return Trainee(ddp, SGD(ddp.parameters(), foreach=True))
        with patch.object(naive, "start_from_rank_0"):
            rung = {"naive": NaiveDDP, "bucketed": BucketedDDP}[kind](model, group)
        return Trainee(rung, SGD(rung.parameters(), foreach=True), rung.sync_gradients)

    def batch() -> Batch:
        tokens = torch.zeros(1, 1024, dtype=torch.int64)
        return tokens, tokens

    return record_on_paper(build, batch, GPUS, steps=1)


@cache
def rung(kind: str) -> Run:
    return replay(recorded(kind), PAPER)


def backward_of(run: Run) -> float:
    """Seconds from the end of forward until the optimizer can begin."""
    done = {mark.name: mark.done for mark in run.marks}
    return done["optimizer"] - done["backward"]


@cache
def ready() -> list[float]:
    """When each gradient is there, the last parameter's first: with a bucket each, and a link that takes no time."""
    run = replay(recorded("ddp", 0), replace(PAPER, latency=0.0, bandwidth=1e30))
    return [span.start for span in run.spans if span.lane == "communication"]


def all_reduce(nbytes: int) -> float:  # seconds
    return PAPER.message(Call("all_reduce", "", "", 0, nbytes, GPUS))


def bucket_sizes(cap: int) -> list[int]:
    """Bytes of each bucket, with a first one of 1 MiB."""
    buckets = assign_buckets(parameters().values(), [MIB, cap * MIB])
    return [sum(p.nbytes for p in bucket) for bucket in buckets]


def exposed(cap: int) -> float:
    """Seconds from the last gradient to the end of the last bucket's reduction."""
    free, gradients = 0.0, 0
    for bucket in assign_buckets(parameters().values(), cap * MIB):
        gradients += len(bucket)
        free = max(free, ready()[gradients - 1]) + all_reduce(sum(p.nbytes for p in bucket))
    return free - ready()[-1]


def gathered_in(pieces: int) -> float:
    """Seconds for 4 MiB on two ranks in so many messages."""
    return pieces * SLOW.seconds(Call("all_gather", "", "", 0, 4 * MIB // pieces, 2))


def step_ratio(kind: type[Any], ranks: int) -> float:
    """How much longer the first step is with summed gradients than with their mean."""
    lengths = []
    for factor in (ranks, 1):
        weight = nn.Parameter(torch.zeros(16, dtype=torch.float64))
        weight.grad = factor * torch.linspace(-1, 1, 16, dtype=torch.float64)
        kind([weight], lr=1e-3).step()
        lengths.append(float(weight.detach().norm()))
    return lengths[0] / lengths[1]


def counted(ranks: int) -> list[float]:
    """How often each micro-batch counts if every backward is summed over the ranks, and divided by N at the end."""
    grad = torch.zeros(MICRO)
    for index in range(MICRO):
        grad[index] += 1
        grad *= ranks
    return (grad / ranks).tolist()


def extra_memory() -> dict[str, float]:
    """By contestant of the committed benchmark, its peak above one process's, in sizes of the gradients."""
    size = json.loads(RECORD.read_text())["sizes"][0]
    peaks = {row["name"]: row["bytes"][0] for row in size["rows"]}
    return {name: (peak - peaks["plain"]) / (4 * size["model"]["parameters"]) for name, peak in peaks.items()}


def _grid(axes: Axes, left: float, held: Held, faint: Held | None = None) -> None:
    """Ranks as columns, chunks as rows; a cell has a stripe for each rank whose contribution is in it."""
    for rank, chunk in ((rank, chunk) for rank in FOUR for chunk in FOUR):
        corner, strong = (left + rank + 0.05, -chunk - 0.95), (rank, chunk) in held
        axes.add_patch(Rectangle(corner, 0.9, 0.9, facecolor=PALE, edgecolor=LINE, linewidth=0.8))
        owners = sorted((held if strong else faint or {}).get((rank, chunk), ()))
        for place, owner in enumerate(owners):
            width, alpha = 0.9 / len(owners), 1.0 if strong else 0.22
            at = (corner[0] + place * width, corner[1])
            axes.add_patch(Rectangle(at, width, 0.9, facecolor=SERIES_COLOURS[owner], alpha=alpha))
    for rank in FOUR:
        axes.text(left + rank + 0.5, -4.12, str(rank), ha="center", va="top", fontsize=14, color=SOFT)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_primitives() -> Figure:
    """Each operation on four ranks, before and after."""
    figure = canvas(4.9)
    own: Held = {(r, c): {r} for r in FOUR for c in FOUR}
    total = {*FOUR}
    cases: dict[str, tuple[Held, Held]] = {
        "broadcast": ({(0, c): {0} for c in FOUR}, {(r, c): {0} for r in FOUR for c in FOUR}),
        "reduce": (own, {(0, c): total for c in FOUR}),
        "all-reduce": (own, dict.fromkeys(own, total)),
        "all-gather": ({(r, r): {r} for r in FOUR}, {(r, c): {c} for r in FOUR for c in FOUR}),
        "reduce-scatter": (own, {(r, r): total for r in FOUR}),
        "send, receive": ({(1, c): {1} for c in FOUR}, {(r, c): {1} for r in (1, 2) for c in FOUR}),
    }
    for axes, (name, (before, after)) in zip(figure.subplots(2, 3).flat, cases.items(), strict=True):
        _grid(axes, 0, before)
        _grid(axes, 5.6, after)
        axes.annotate("", (5.4, -2), (4.2, -2), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.6})
        axes.set_title(name, loc="center", fontsize=17)
        axes.set(xlim=(-0.4, 10), ylim=(-5, 0.2))
    figure.axes[0].text(-0.1, -4.12, "rank", ha="right", va="top", fontsize=14, color=SOFT)
    return figure


def draw_ring(half: str) -> Figure:
    """Which chunk goes where in each step of a half of the ring: partial sums first, then whole chunks."""
    own: Held = {(r, c): {r} for r in FOUR for c in FOUR} if half == "reduce-scatter" else {}
    steps = ring_steps()[:3] if own else ring_steps()[3:]
    afterwards = ring_steps()[3] if own else {(r, c): {*FOUR} for r in FOUR for c in FOUR}
    figure = canvas(3.7)
    panels = figure.subplots(1, 4)
    here: Held = {}
    for number, (axes, sent) in enumerate(zip(panels, steps, strict=False)):
        here = sent if own else here | sent
        _grid(axes, 0, here, own)
        style = {"arrowstyle": "-|>", "color": INK, "linewidth": 2.2, "mutation_scale": 17}
        for rank, chunk in sent:
            y, last = -chunk - 0.5, rank == FOUR[-1]
            axes.annotate("", (4.4 if last else rank + 1.5, y), (rank + 0.5, y), arrowprops=style)
            if last:  # and in again on the left
                axes.annotate("", (0.5, y), (-0.4, y), arrowprops=style)
        here = here | {((rank + 1) % 4, chunk): owners for (rank, chunk), owners in sent.items()}
        axes.set_title(f"step {number}", loc="center", fontsize=17)
    _grid(panels[-1], 0, afterwards, own)
    panels[-1].set_title("afterwards", loc="center", fontsize=17)
    panels[0].text(-0.1, -4.12, "rank", ha="right", va="top", fontsize=14, color=SOFT)
    for chunk in FOUR:
        panels[-1].text(4.15, -chunk - 0.5, f"chunk {chunk}", va="center", fontsize=14, color=SOFT)
    for axes in panels:
        axes.set(xlim=(-0.45, 4.45), ylim=(-4.8, 0.2))
    return figure


def draw_busiest() -> Figure:
    """Bytes that the busiest rank sends in an all-reduce, over the number of ranks, for three ways."""
    figure = canvas(4.3)
    axes = figure.subplots()
    counts = [2**power for power in range(1, 11)]
    axes.plot(counts, [n - 1 for n in counts], color=BAD)
    axes.text(12, 9.6, "gather all, add: N - 1", color=BAD, va="center")
    axes.plot(counts, [ceil(log2(n)) for n in counts], color=OTHER)
    axes.text(180, 8.3, "reduce, broadcast as trees: log₂ N", color=OTHER, va="center", ha="right")
    axes.plot(counts, [2 * (n - 1) / n for n in counts], color=GOOD)
    axes.text(1024, 1.35, "ring: 2 (N - 1) / N", color=GOOD, va="center", ha="right")
    axes.plot(
        counts[:3],
        [max(sent_bytes(ring_all_reduce, n)) for n in counts[:3]],
        "o",
        color=GOOD,
        markersize=9,
        clip_on=False,
    )
    axes.text(1024, 0.5, "dots: counted as minifsdp/ring.py runs", color=SOFT, ha="right", va="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_yticks(range(0, 11, 2))
    axes.set(xlim=(2, 1100), ylim=(0, 10.4), xlabel="ranks N")
    axes.set_ylabel("the busiest rank sends,\nin sizes of the tensor")
    return figure


def draw_gather() -> Figure:
    """What each of four ranks sends for an all-gather, by the ring and by a gather and a broadcast."""
    figure = canvas(4.3)
    axes = figure.subplots()
    ways = {"ring": (ring_all_gather, GOOD, -0.2), "gather, then broadcast": (gather_then_broadcast, BAD, 0.2)}
    for line, (name, (way, colour, offset)) in enumerate(ways.items()):
        sent = sent_bytes(way, 4)
        axes.bar([rank + offset for rank in FOUR], sent, 0.36, color=colour)
        for rank, size in enumerate(sent):
            axes.text(rank + offset, size + 0.04, f"{size:g}", ha="center", color=colour)
        axes.text(3.4, 2.1 - 0.25 * line, f"{name}: {sum(sent):g} together", ha="right", color=colour, fontsize=17)
    axes.set_xticks(FOUR, [f"rank {rank}" for rank in FOUR])
    axes.tick_params(axis="x", length=0)
    axes.set(ylim=(0, 2.3), ylabel="sends, in sizes of the whole")
    return figure


def draw_links() -> Figure:
    """Seconds of a message over its size, on four links; where half of it is latency."""
    figure = canvas(4.2)
    axes = figure.subplots()
    sizes = [10 ** (exponent / 10) for exponent in range(30, 91)]
    for (name, (latency, bandwidth)), colour in zip(LINKS.items(), SERIES_COLOURS, strict=False):
        axes.plot(sizes, [latency + size / bandwidth for size in sizes], color=colour)
        axes.plot(latency * bandwidth, 2 * latency, "o", color=colour, markersize=10, markeredgecolor="white")
        nudge = {"PCIe 5.0 x16": 0.6, "InfiniBand NDR": 1.5}.get(name, 1.0)
        axes.text(1.3e9, nudge * (latency + 1e9 / bandwidth), name, va="center", color=colour)
    axes.text(1.2e3, 0.4, "dots: n = α β, half of the time is latency", color=SOFT, va="center")
    axes.text(1.2e3, 0.12, "model, not measured", color=SOFT, va="center")
    axes.set(xscale="log", yscale="log", xlim=(1e3, 4e10))
    axes.set_xticks([1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9], ["1 kB", "10", "100", "1 MB", "10", "100", "1 GB"])
    axes.set_yticks([1e-5, 1e-3, 1e-1], ["10 µs", "1 ms", "100 ms"])
    axes.minorticks_off()
    axes.spines["bottom"].set_bounds(1e3, 1e9)
    return figure


def draw_messages() -> Figure:
    """The same bytes in more messages, and in uneven shards, by the model that lab 01 measures."""
    figure = canvas(4.2)
    left, right = figure.subplots(1, 2)
    times = [1e3 * gathered_in(pieces) for pieces in PIECES]
    left.plot(PIECES, times, "o-", color=GOOD)
    left.text(PIECES[0], times[0] + 7, f"{times[0]:.0f} ms", color=GOOD)
    left.text(PIECES[-1], times[-1] + 7, f"{times[-1]:.0f} ms", ha="right", color=GOOD)
    left.set_xscale("log", base=2)
    left.set_xticks(PIECES, PIECES)
    left.set(ylim=(0, 175), xlabel="messages", ylabel="ms")
    left.set_title("4 MiB, gathered on 2 ranks", fontweight="normal")
    cases = {
        "even": [("all_gather", 4 * sum(SHARES))],
        "uneven,\npadded": [("all_gather", 4 * 4 * max(SHARES))],
        "uneven,\nbroadcasts": [("broadcast", 4 * share) for share in SHARES],
    }
    for place, (name, calls) in enumerate(cases.items()):
        logged = [Call(op, "", "", 0, nbytes, 4) for op, nbytes in calls]
        took, wire = 1e3 * sum(map(SLOW.seconds, logged)), sum(call.wire for call in logged)
        right.barh(-place, took, 0.58, color=BAD if place else GOOD)
        says = f"{took:.1f} ms\n{len(calls)} message{'s' * (len(calls) > 1)}, {wire / MB:.2f} MB"
        right.text(0.4, -place, says, va="center", color="white", fontsize=13, linespacing=1.4)
        right.text(-0.5, -place, name, va="center", ha="right")
    right.set_title("1 MiB in shards, on 4 ranks", fontweight="normal")
    right.axis("off")
    return figure


def draw_gradients() -> Figure:
    """Four ranks with equal parameters and two rows each: their gradients, the mean, and the step that all take."""
    figure = canvas(4.8)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    before = torch.full((4,), 0.1)

    def gradient(rows: Tensor) -> Tensor:
        weight = nn.Parameter(before.clone())
        (rows @ weight - rows.sum(1)).square().mean().backward()
        assert weight.grad is not None
        return weight.grad

    own = [gradient(lab01.my_rows(batch, group_of(rank, 4))) for rank in FOUR]
    mean = torch.stack(own).mean(0)
    assert torch.allclose(mean, gradient(batch), atol=1e-6)
    lines = {
        "equal\nparameters": ("parameters", [before] * 4),
        "gradient of\nown rows": ("gradients", own),
        "all-reduce:\nthe mean": ("gradients", [mean] * 4),
        "parameters\nafter the step": ("parameters", [before - 0.2 * mean] * 4),
    }
    for row, (name, (tag, values)) in zip(figure.subplots(4, 4, sharey="row"), lines.items(), strict=True):
        for rank, (axes, value) in enumerate(zip(row, values, strict=True)):
            axes.bar(FOUR, value.tolist(), 0.7, color=TAG_COLOURS[tag])
            axes.axhline(0, color=LINE, linewidth=1)
            axes.axis("off")
            if row[0].get_subplotspec().is_first_row():
                axes.set_title(f"rank {rank}: rows {2 * rank}, {2 * rank + 1}", loc="center")
        row[0].text(-0.12, 0.5, name, ha="right", va="center", transform=row[0].transAxes, color=TAG_COLOURS[tag])
    return figure


def draw_buckets() -> Figure:
    """The gradients in the order of backward, one message each, and in buckets."""
    figure = canvas(3.5)
    axes = figure.subplots()
    colour, left = TAG_COLOURS["gradients"], 0.0
    for name, p in reversed(parameters().items()):
        width, edge = p.nbytes / MB, 0.8 if p.nbytes > MB else 0
        axes.add_patch(Rectangle((left, 1.5), width, 0.8, facecolor=colour, edgecolor="white", linewidth=edge))
        if name.endswith("norm1.weight"):  # the last of its block
            axes.text(left - 14, 2.36, name.split(".")[1], ha="center", va="bottom", fontsize=13, color=SOFT)
        left += width
    middle = left - width / 2
    axes.text(middle, 1.9, "embedding,\nwhich is the head", ha="center", va="center", color="white")
    axes.text(0, 2.75, f"{len(parameters())} gradients in the order of backward, and their blocks", color=colour)
    axes.set(xlim=(0, left), ylim=(-0.6, 3.2))
    left = 0.0
    for number, size in enumerate(bucket_sizes(25)):
        width = size / MB
        look: Any = {"ha": "center", "fontsize": 13}
        box = Rectangle((left, 0), width, 0.8, facecolor=REDUCTION_COLOUR, edgecolor="white", linewidth=2)
        axes.add_patch(box)
        axes.text(left + width / 2, 0.4, str(number), va="center", color="white", **look)
        axes.text(left + width / 2, -0.1, f"{width:.0f}", va="top", color=SOFT, **look)
        left += width
    axes.text(0, 0.95, f"{len(bucket_sizes(25))} buckets, and their MB", color=REDUCTION_COLOUR)
    axes.axis("off")
    return figure


def _bars(run: Run, lane: str, gap: float) -> list[tuple[float, float]]:
    """Start and duration in ms, from the beginning of backward to that of the optimizer; joined over such gaps."""
    done = {mark.name: 1e3 * mark.done for mark in run.marks}
    spans = [(1e3 * span.start, 1e3 * span.end + gap) for span in run.spans if span.lane == lane]
    late = union(span for span in spans if done["backward"] - 1e-6 <= span[0] < done["optimizer"] - 1e-6)
    return [(start - done["backward"], end - gap - start) for start, end in late]


def draw_timeline() -> Figure:
    """Backward above, reductions below, for the three rungs: after backward, in buckets, during it."""
    figure = canvas(4.6)
    axes = figure.subplots()
    longest = 1e3 * backward_of(rung("naive"))
    rungs = {"naive": "one each,\nafterwards", "bucketed": "buckets,\nafterwards", "ddp": "buckets,\nduring it"}
    for place, (kind, name) in enumerate(rungs.items()):
        y, end = -2.6 * place, 1e3 * backward_of(rung(kind))
        axes.broken_barh(_bars(rung(kind), "compute", 0.05), (y, 0.8), facecolors=LANE_COLOURS["compute"])
        sent, edge = _bars(rung(kind), "communication", -1e-6), 1.0 if place else 0.3
        axes.broken_barh(sent, (y - 0.95, 0.8), facecolors=REDUCTION_COLOUR, edgecolor="white", linewidth=edge)
        axes.text(-0.015 * longest, y - 0.1, name, ha="right", va="center")
        axes.text(end + 0.01 * longest, y - 0.1, f"{end:.1f} ms", va="center", fontsize=17)
    for start, _ in sent:
        axes.plot([start, start], [y, y + 0.8], color="white", linewidth=1.4)
    axes.text(0.72 * longest, y - 0.1, "white lines: a bucket is full", color=SOFT, va="center")
    axes.text(0, 0.95, "backward", color=LANE_COLOURS["compute"])
    axes.text(0.14 * longest, 0.95, "all-reduces", color=REDUCTION_COLOUR)
    axes.text(1.14 * longest, 0.95, ON_PAPER, color=SOFT, ha="right")
    axes.set(xlim=(-0.16 * longest, 1.14 * longest), ylim=(-6.4, 1.6))
    axes.axis("off")
    return figure


def draw_caps() -> Figure:
    """How long the last reductions outlast backward, over the size of a bucket."""
    figure = canvas(4.2)
    axes = figure.subplots()
    times = [1e3 * exposed(cap) for cap in CAPS]
    axes.plot(times, "o-", color=GOOD)
    torchs = CAPS.index(25)
    line = {"arrowstyle": "-", "color": SOFT}
    axes.annotate("torch's default", (torchs, times[torchs] + 0.2), (torchs, 5.6), ha="center", arrowprops=line)
    floor = 1e3 * all_reduce(max(p.nbytes for p in parameters().values()))
    axes.axhline(floor, color=SOFT, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.text(0, floor - 0.35, f"{floor:.1f} ms: the embedding alone, which comes last", va="top", color=SOFT)
    axes.text(len(CAPS) - 1, 0.4, ON_PAPER, color=SOFT, ha="right")
    axes.set_xticks(range(len(CAPS)), ["each\nalone", *map(str, CAPS[1:-1]), "all in\none"])
    axes.set(ylim=(0, 10.5), xlabel="a bucket is closed at ... MiB", ylabel="ms after the last gradient")
    return figure


def draw_turns() -> Figure:
    """The k-th call of one rank meets the k-th of the other: in order, in another order, and with one left out."""
    figure = canvas(4.1)
    colours = {"A": SERIES_COLOURS[0], "B": SERIES_COLOURS[4]}
    cases = {
        "same order": ("AB", "AB", "right"),
        "another order": ("AB", "BA", "equal sizes: wrong sums, no error\nother sizes: a hang or an abort"),
        "one left out": ("AB", "A ", "rank 0 waits for ever"),
    }
    for axes, (name, (*ranks, outcome)) in zip(figure.subplots(1, 3), cases.items(), strict=True):
        for rank, calls in enumerate(ranks):
            axes.text(2.2 * rank + 0.7, 0.15, f"rank {rank}", ha="center")
            for turn, call in enumerate(calls.strip()):
                axes.add_patch(Rectangle((2.2 * rank, -turn - 0.85), 1.4, 0.7, facecolor=colours[call]))
                axes.text(2.2 * rank + 0.7, -turn - 0.5, call, ha="center", va="center", color="white", fontsize=17)
        for turn, (mine, theirs) in enumerate(zip(*ranks, strict=True)):
            line, colour = ("-", INK) if mine == theirs else (":", BAD)
            axes.plot([1.45, 2.15], [-turn - 0.5] * 2, color=colour, linestyle=line)
        if " " in ranks[1]:
            axes.text(2.9, -1.5, "?", ha="center", va="center", color=BAD, fontsize=24)
        axes.text(1.8, -2.25, outcome, ha="center", va="top", color=INK if outcome == "right" else BAD, fontsize=14)
        axes.set_title(name, loc="center", fontsize=17)
        axes.set(xlim=(-0.6, 4.2), ylim=(-3.0, 0.7))
        axes.axis("off")
    return figure


FIGURES: dict[str, Draw] = {
    "ddp-primitives": draw_primitives,
    "ddp-reduce-scatter": lambda: draw_ring("reduce-scatter"),
    "ddp-all-gather": lambda: draw_ring("all-gather"),
    "ddp-busiest": draw_busiest,
    "ddp-gather": draw_gather,
    "ddp-links": draw_links,
    "ddp-messages": draw_messages,
    "ddp-gradients": draw_gradients,
    "ddp-buckets": draw_buckets,
    "ddp-timeline": draw_timeline,
    "ddp-caps": draw_caps,
    "ddp-turns": draw_turns,
}
