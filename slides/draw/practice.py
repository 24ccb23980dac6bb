"""Figures and numbers of deck 5: precision, construction, checkpoints, hybrid sharding, and what to choose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from draw.canvas import INK, LINE, PALE, SOFT, Draw, canvas, in_units
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle
from torch import nn
from torch.optim import SGD, Optimizer

from minifsdp import comm
from minifsdp.course import data
from minifsdp.course.launch import launch
from minifsdp.course.ledger import Ledger
from minifsdp.course.measure import Settings
from minifsdp.course.model import GPT, Block
from minifsdp.course.plots.drawing import areas
from minifsdp.course.plots.style import LANE_COLOURS, REDUCTION_COLOUR, SERIES_COLOURS, TAG_COLOURS
from minifsdp.course.reference.lab09 import accumulate, step_together
from minifsdp.course.reference.lab10a import by_size, fill_from_meta
from minifsdp.course.reference.lab10b import commit, my_rows, units_for
from minifsdp.course.reference.lab11 import plan_groups, traffic
from minifsdp.course.rungs import sizes_of
from minifsdp.flat_param import FlatParameter, copy_values, find_parameters
from minifsdp.fsdp import FullyShardedDataParallel, SyncSchedule
from minifsdp.fsdp.policies import ModuleWrapPolicy
from minifsdp.fsdp.wrap import wrap_children

GB, MIB = 10**9, 2**20
LABS = Path(__file__).parents[2] / "labs"
RANKS = 8  # of the large model; the small ones that run are on 2
FP32, BF16 = TAG_COLOURS["parameters"], TAG_COLOURS["unsharded"]
GATHER = LANE_COLOURS["communication"]
PRECISIONS = {"fp32": (4, 4), "bf16,\nreduced in fp32": (2, 4), "bf16": (2, 2)}  # bytes computed in, reduced in
SMALL = Settings(ranks=RANKS, batch=RANKS, layers=5, width=105, context=16)
SHAPE: dict[str, int] = {"width": 96, "layers": 8, "context": 32}
MICRO_BATCHES, BAD = 3, 2  # the step in which one rank's gradient is infinite
ROWS = 257  # of the GPT's embedding


def numbers() -> dict[str, Any]:
    """What the deck's text says in numbers."""
    psi, root, _ = elements()
    shard, low = 4 * psi // RANKS, torch.ones(1, dtype=torch.bfloat16)
    for _ in range(500):
        low -= 0.001
    disk = Log()
    commit(disk, Path("run"), "step-200", {"rank-0.pt": b""}, 0, lambda: None)  # type: ignore[arg-type]
    units = [50_000 * 8448, *[12 * 8448**2] * 80]  # lab 11's model of 70 billion parameters
    return {
        "gb": in_units("GB", GB, 1),
        "mib": in_units("MiB", MIB, 2),
        "psi": psi,
        "ranks": RANKS,
        "lost": low.item(),
        "shard": shard,
        "root": 4 * root,
        "bus": (4 * (2 * psi - root) // RANKS, shard),
        "commit": disk.calls,
        "full": 4 * sum(units),
        "unit": 4 * max(units),
        "trained": tuned(),
        "recomputed": recomputed(),
    }


def told(lab: str, claim: str) -> list[str]:
    """The lines that a lab prints for a claim, from the notebook as it is given out."""
    (notebook,) = LABS.glob(f"lab{lab}_*.ipynb")
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if claim in cell["metadata"].get("tags", [])]
    return "".join(text for cell in cells for out in cell["outputs"] for text in out.get("text", [])).splitlines()


def recomputed() -> dict[str, tuple[int, ...]]:
    """By where the checkpoints lie: gathers, bytes that forward keeps, and bytes of model state at its peak."""
    rows = [(line[:19].strip(), line[19:].replace(",", "").split()) for line in told("10b", "C42")]
    return {name: tuple(int(each) for each in cells[:3]) for name, cells in rows if cells and cells[0].isdigit()}


@cache
def large() -> GPT:
    """A GPT of 6.9 billion parameters, without memory."""
    with torch.device("meta"):
        return GPT(vocabulary=50_000, width=4096, layers=32, context=2048)


def elements() -> tuple[int, int, int]:
    """Of the large model, of its root and of a block."""
    units = [sum(unit) for unit in sizes_of(large()).units]
    return sum(units), units[0], units[1]


class Log:
    """Counts what a disk is asked for."""

    calls = 0

    def __getattr__(self, verb: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.calls += 1

        return call


# On ranks: bytes, counts and exact values only


@cache
def verdicts() -> dict[str, list[list[tuple[float, float]]]]:
    """By who decides and by rank, what `scaled` returns."""
    ways = {"each rank decides alone": alone, "found_inf is all-reduced": step_together}
    ranks = launch(lambda: [scaled(decide) for decide in ways.values()], 2, backend="gloo")
    return {name: [rank[place] for rank in ranks] for place, name in enumerate(ways)}


@cache
def accumulations() -> dict[str, list[tuple[str, int]]]:
    """By way, what `accumulated` returns on rank 0 of 8."""
    ways = {"with communication": True, "without: no_sync()": False}
    (found,) = launch(lambda: {name: accumulated(each) for name, each in ways.items()}, RANKS, backend="fake")
    return found


class Sum(nn.Module):
    """Every element's gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def alone(optimizer: Optimizer, scale: float, group: comm.Group) -> float:
    """What a scaler does that looks at its own rank only."""
    (shard,) = optimizer.param_groups[0]["params"]
    shard.grad /= scale
    if not shard.grad.isfinite().all():
        return scale / 2
    optimizer.step()
    return scale


def scaled(decide: Callable[[Optimizer, float, comm.Group], float]) -> list[tuple[float, float]]:
    """By step: the scale, and how far this rank's half of the model has moved."""
    model = FullyShardedDataParallel(Sum())
    (shard,) = model.parameters()
    optimizer, scale, found = SGD([shard], 1.0), 1024.0, []
    for number in range(5):
        (scale * model()).backward()
        if number == BAD and dist.get_rank() == 1:
            shard.grad.fill_(torch.inf)
        before, used = shard.detach().clone(), scale
        scale = decide(optimizer, scale, comm.world())
        found.append((used, (before - shard.detach()).item()))
        optimizer.zero_grad()
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
        comm.watchers.append(watch)
        accumulate(model, batches, communicate)
        comm.watchers.remove(watch)
        return [*seen, ("", ledger.live()["gradients"])]


# In this process


@cache
def constructions() -> dict[str, tuple[Any, int, int]]:
    """By how rank 0 of 8 builds and shards a model, block by block: the ledger's curve and peak, the model's bytes."""
    found = {}
    for name, where in (("built eagerly", "cpu"), ("built on meta", "meta")):
        with Ledger() as ledger:
            with torch.device(where):
                model = GPT(**SHAPE)
            ledger.watch(model)
            whole = sum(4 * p.numel() for p in model.parameters())
            shards = [shard(module, ledger) for module in (*model.blocks, model)]
            curve = ledger.curve()
            del shards
        tags = curve["tags"]
        tags["parameters"] = [sum(pair) for pair in zip(tags["parameters"], tags["activations"], strict=True)]
        tags["activations"] = [0] * len(tags["activations"])  # a shard that is being cut has no tag yet
        found[name] = curve, ledger.peak.total, whole
    return found


def shard(module: nn.Module, ledger: Ledger) -> nn.Parameter:
    """Flatten what is left in a module, and keep rank 0's part of it."""
    params = find_parameters(module)
    on_meta = next(iter(params)).is_meta
    fill = (lambda views, originals: fill_from_meta(views, params)) if on_meta else copy_values
    flat = FlatParameter(params, 0, RANKS, fill, torch.device("cpu"))
    ledger.tag(flat.shard, "parameters")
    for places in params.values():
        for place in places:
            place.module._parameters[place.attribute] = None
    return flat.shard


class Unit(nn.Module):
    """Stands for a unit where there is nobody to shard with."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def cut(policy: Any) -> tuple[list[tuple[str, int]], int]:
    """Lab 10a's GPT: each parameter's unit and elements, in order, and the bytes unsharded at the peak of 2 ranks."""
    with torch.device("meta"):
        model = GPT(width=63, layers=6, context=16)
    model.blocks = nn.ModuleList(nn.Sequential(*model.blocks[first : first + 2]) for first in (0, 2, 4))
    wrap_children(model, policy, Unit)
    units = [f"{name}." for name, module in model.named_modules() if isinstance(module, Unit)]
    around = {unit: [outer for outer in units if unit.startswith(outer)] for unit in units}
    owned = [
        (max((unit for unit in units if name.startswith(unit)), key=len, default=""), p.numel())
        for name, p in model.named_parameters()
    ]
    sizes = {unit: sum(numel for owner, numel in owned if owner == unit) for unit in ("", *units)}
    padded = {unit: 4 * (size + size % 2) for unit, size in sizes.items()}
    largest = max((sum(padded[outer] for outer in outers) for outers in around.values()), default=0)
    return owned, padded[""] + largest


POLICIES: dict[str, Any] = {
    "one unit": partial(by_size, least=10**8),
    "pairs of blocks": ModuleWrapPolicy({nn.Sequential}),
    "blocks": ModuleWrapPolicy({Block}),
    "by size": partial(by_size, least=16_000),
    "every Linear": ModuleWrapPolicy({nn.Linear}),
}


class Adapted(nn.Module):
    """A frozen linear layer, and an adapter of rank 16 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Linear(base.in_features, 16, bias=False), nn.Linear(16, base.out_features, bias=False)
        )


@cache
def tuned() -> dict[str, tuple[int, int]]:
    """By what is trained and how it is wrapped: bytes of gradients of a rank after backward, and units."""
    with torch.device("meta"):
        adapted, last = (GPT(vocabulary=50_000, width=4096, layers=32, context=2048) for _ in range(2))
        adapted.requires_grad_(False)
        for block in adapted.blocks:
            block.qkv, block.down = Adapted(block.qkv), Adapted(block.down)
    last.requires_grad_(False)
    last.blocks[-1].requires_grad_(True)
    ways = {
        "everything": (large(), set(large().blocks)),
        "adapters, in their blocks' units": (adapted, set(adapted.blocks)),
        "adapters, in units of their own": (adapted, units_for(adapted, Block)),
        "the last block": (last, set(last.blocks)),
    }
    found = {}
    for name, (model, units) in ways.items():
        held = [find_parameters(unit, skip=units.intersection(unit.modules()) - {unit}) for unit in (model, *units)]
        trained = [sum(p.numel() for p in params) for params in held if any(p.requires_grad for p in params)]
        found[name] = 4 * sum(trained) // RANKS, len(held)
    return found


# Figures


def box(axes: Axes, x: float, y: float, size: tuple[float, float], colour: str, text: str = "", **style: Any) -> None:
    """A box with a word in its middle; `style` is the word's."""
    width, height = size
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.5))
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": 14}
    axes.text(x + width / 2, y + height / 2, text, **(look | style))


def bare(height: float, right: float, top: float, left: float = 0.0, bottom: float = 0.0) -> tuple[Figure, Axes]:
    """A canvas for a drawing without axes."""
    figure = canvas(height)
    axes = figure.subplots()
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.axis("off")
    return figure, axes


def draw_dtypes() -> Figure:
    """By precision, what is held and what is sent on the way from a shard to its update; arrows are messages."""
    figure, axes = bare(4.3, 7, 4.0, left=-1.15)
    psi, root, block = elements()
    share = (RANKS - 1) / RANKS
    names = ("shards", "gathers", "a block,\nwhole", "its\ngradient", "reductions", "gradient\nshards", "Adam's\nstate")
    for row, (precision, (p, r)) in enumerate(PRECISIONS.items()):
        sent = share * p * (2 * psi - root), share * r * psi
        held = 4 * psi / RANKS, p * block, r * block, 4 * psi / RANKS, 8 * psi / RANKS
        cells = [(held[0], 4), (sent[0], p), (held[1], p), (held[2], r), (sent[1], r), (held[3], 4), (held[4], 4)]
        bottom = 2.05 - 0.98 * row
        axes.text(-0.12, bottom + 0.4, precision, ha="right", va="center")
        for place, (size, item) in enumerate(cells):
            colour, ink = (FP32, "white") if item == 4 else (BF16, INK)
            if names[place] in ("gathers", "reductions"):
                edge = [(0.06, 0), (0.78, 0), (0.98, 0.4), (0.78, 0.8), (0.06, 0.8)]
                axes.add_patch(Polygon([(place + x, bottom + y) for x, y in edge], facecolor=colour))
            else:
                box(axes, place + 0.03, bottom, (0.94, 0.8), colour)
            word = f"{size / GB:.{1 if size > GB else 2}f}"
            axes.text(place + 0.49, bottom + 0.4, word, ha="center", va="center", color=ink, fontsize=17)
    for place, name in enumerate(names):
        axes.text(place + 0.49, 3.02, name, ha="center", va="baseline", fontsize=14)
    words = f"GB on one rank, {psi / 1e9:.1f} billion parameters on {RANKS}; arrows are sent in a step"
    axes.text(0.03, 3.95, words, va="top", color=SOFT)
    axes.text(6.43, 3.95, "fp32", va="top", ha="right", color=FP32, fontweight="bold")
    axes.text(6.97, 3.95, "bf16", va="top", ha="right", color=BF16, fontweight="bold")
    return figure


def draw_ranges() -> Figure:
    """From the smallest to the largest number of each dtype, and what a gradient is that is too small for fp16."""
    figure = canvas(4.3)
    axes = figure.subplots()
    gradient, scale = 2e-8, 2.0**16
    colours = {"fp32": FP32, "bf16": TAG_COLOURS["optimizer"], "fp16": TAG_COLOURS["gradients"]}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for height, (name, dtype) in enumerate(reversed(dtypes.items())):
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        axes.barh(height, info.max - info.smallest_normal, 0.5, info.smallest_normal, color=colours[name])
        axes.barh(height, info.smallest_normal - least, 0.5, least, color=colours[name], alpha=0.35)
        bits = round(-torch.tensor(info.eps).log2().item())
        largest = f"{info.max:,.0f}" if info.max < 1e6 else f"{info.max:.1e}"
        text = f"{bits} bits of mantissa, {least:.0e} to {largest}"
        axes.text(least, height + 0.29, text, va="bottom", ha="left", color=colours[name])
    axes.plot([gradient] * 2, [-0.42, 0.25], color=INK, linewidth=2)
    axes.text(gradient / 3, -0.36, f"a gradient of {gradient:.0e}: 0 in fp16", ha="right", va="center")
    axes.annotate(
        "", (gradient * scale, -0.36), (gradient, -0.36), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 2}
    )
    axes.text(gradient * scale * 3, -0.36, f"times {scale:,.0f}: inside", ha="left", va="center")
    axes.set_xscale("log")
    axes.set_xlim(1e-46, 1e40)
    axes.set_ylim(-0.6, 2.75)
    axes.set_yticks(range(3), reversed(dtypes))
    axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=18)
    axes.set_xticks([1e-40, 1e-30, 1e-20, 1e-10, 1, 1e10, 1e20, 1e30])
    axes.minorticks_off()
    axes.spines["left"].set_visible(False)
    return figure


def draw_scaler() -> Figure:
    """Steps of two ranks, one of which sees an infinity: each decides alone, or all decide together."""
    figure, axes = bare(4.6, 12.0, 4.5, left=-1.2, bottom=-0.35)
    for panel, (title, ranks) in enumerate(verdicts().items()):
        left = 6.3 * panel
        axes.text(left, 4.5, title, va="top", fontweight="bold")
        for rank, found in enumerate(ranks):
            bottom = 2.1 - 2.0 * rank
            if not panel:
                axes.text(-0.15, bottom + 0.65, f"rank {rank}", ha="right", va="center", fontsize=17)
                axes.text(-0.15, bottom + 1.38, "scale", ha="right", color=SOFT, fontsize=14)
            for step, (scale, moved) in enumerate(found):
                colour = {0: PALE, 1: TAG_COLOURS["optimizer"]}.get(moved, TAG_COLOURS["gradients"])
                style: dict[str, Any] = {"fontsize": 20, "color": "white" if moved else SOFT}
                box(axes, left + 1.12 * step, bottom, (1.08, 1.3), colour, f"{moved:g}" if moved else "skip", **style)
                seen = "inf " if step == BAD and rank == 1 else ""
                look: Any = {"ha": "center", "fontsize": 14, "color": TAG_COLOURS["gradients"] if seen else SOFT}
                axes.text(left + 1.12 * step + 0.54, bottom + 1.38, f"{seen}{scale:.0f}", **look)
        for step in range(5):
            axes.text(
                left + 1.12 * step + 0.54, 0.0, f"step {step + 1}", va="top", ha="center", color=SOFT, fontsize=13
            )
    return figure


def draw_accumulation() -> Figure:
    """Bytes of gradients at each message of three micro-batches, with communication and without."""
    figure = canvas(4.7)
    rows = figure.subplots(2, sharex=True, sharey=True)
    for row, (name, log) in zip(rows, accumulations().items(), strict=True):
        held = [size / MIB for _, size in log]
        row.fill_between(range(len(held)), held, step="post", color=TAG_COLOURS["gradients"], linewidth=0)
        for place, (op, _) in enumerate(log[:-1]):
            row.plot([place] * 2, [-1.25, -0.35], color=REDUCTION_COLOUR if "reduce" in op else GATHER, linewidth=5)
        ops = [op for op, _ in log]
        counts = f"{ops.count('all_gather')} gathers and {ops.count('reduce_scatter')} reductions"
        row.set_title(f"{name}: {counts}")
        second = len(log) // MICRO_BATCHES
        row.text(second + 0.5, 3.65, f"{held[second]:.2f} MiB between micro-batches", va="top")
        row.set_yticks([0, 1, 2, 3])
        row.set_ylabel("MiB")
        row.spines["bottom"].set_visible(False)
        row.tick_params(axis="x", length=0, labelbottom=False)
    rows[1].text(39.6, 0.6, "gradients held", color=TAG_COLOURS["gradients"], va="center", fontweight="bold")
    rows[1].text(39.6, -0.3, "gather", color=GATHER, va="center", fontweight="bold")
    rows[1].text(39.6, -1.1, "reduce-scatter", color=REDUCTION_COLOUR, va="center", fontweight="bold")
    rows[0].set_xlim(-0.7, 51.5)
    rows[0].set_ylim(-1.4, 3.8)
    return figure


def draw_construction() -> Figure:
    """Memory of rank 0 of 8 from nothing to the last shard."""
    figure = canvas(4.7)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (name, (curve, peak, whole)) in zip(panels, constructions().items(), strict=True):
        areas(panel, curve, MIB)
        panel.axhline(whole / MIB, color=INK, linestyle=(0, (4, 3)), linewidth=1.4)
        panel.set_title(f"{name}: {peak / whole:.2f} of the model")
        panel.spines["bottom"].set_visible(False)
        place: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "fontweight": "bold"}
        if name == "built eagerly":
            panel.text(0.5, 1.5, "all parameters", ha="center", color="white", **place)
        else:
            panel.text(0.02, whole / MIB + 0.06, "the whole model", va="bottom", transform=panel.get_yaxis_transform())
            panel.text(0.3, 0.95, "one unit", color=BF16, ha="center", **place)
            panel.text(0.98, 0.12, "shards", color="white", ha="right", **place)
    panels[0].set_ylabel("MiB")
    return figure


def draw_policies() -> Figure:
    """The parameters of one model in the units that each policy makes of it."""
    figure, axes = bare(4.7, 1.7, 5.6, left=-0.27)
    heads = ("units", "messages\na step", "whole at\nthe peak")
    for place, head in enumerate(heads):
        axes.text(1.15 + (0.0, 0.24, 0.54)[place], 5.0, head, ha="right", va="bottom", color=SOFT, fontsize=14)
    for number, (name, policy) in enumerate(POLICIES.items()):
        bottom = 4.2 - number
        params, peak = cut(policy)
        units, whole = list(dict(params)), sum(numel for _, numel in params)
        axes.text(-0.02, bottom + 0.3, name, ha="right", va="center")
        left = 0.0
        for unit, several in groupby(params, key=lambda each: each[0]):
            width = sum(numel for _, numel in several) / whole
            colour = (FP32, BF16, "#B9DFF5")[units.index(unit) % 3] if unit else SOFT
            axes.add_patch(Rectangle((left, bottom), width, 0.6, facecolor=colour, edgecolor="white", linewidth=0.8))
            left += width
        count = len({*units, ""})
        cells = (str(count), str(3 * count - 1), f"{peak / MIB:.2f} MiB")
        for place, cell in enumerate(cells):
            axes.text(1.15 + (0.0, 0.24, 0.54)[place], bottom + 0.3, cell, ha="right", va="center", fontsize=17)
    axes.text(0, 5.0, "the root", color=SOFT, va="bottom", fontweight="bold")
    axes.text(0.2, 5.0, "the other units", color=FP32, va="bottom", fontweight="bold")
    return figure


def draw_rows() -> Figure:
    """The rows of one tensor as two ranks save them, and as three ranks, or a plain process, load them."""
    figure, axes = bare(3.9, ROWS + 1, 3.75, left=-52)
    whole = torch.zeros(ROWS, 1)
    starts = {}
    for name, ranks, bottom in (("2 ranks save", 2, 2.6), ("3 ranks load", 3, 1.15), ("plain torch loads", 1, 0.0)):
        axes.text(-3, bottom + 0.35, name, ha="right", va="center")
        pieces = [my_rows(whole, rank, ranks) for rank in range(ranks)]
        starts[ranks] = [first for first, _ in pieces]
        for rank, (first, rows) in enumerate(pieces):
            colour = SERIES_COLOURS[rank] if ranks == 2 else SOFT
            word = f"rank {rank}: {len(rows)} rows" if ranks > 1 else f"{ROWS} rows"
            box(axes, first, bottom, (len(rows), 0.7), colour, word)
    edges = sorted({*starts[2], *starts[3], ROWS})
    for low, high in pairwise(edges):
        middle, colour = (low + high) / 2, SERIES_COLOURS[sum(first <= low for first in starts[2]) - 1]
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2.5}
        axes.annotate("", (middle, 1.9), (middle, 2.55), arrowprops=arrow)
        axes.text(middle + 3, 2.22, f"{low} to {high - 1}", va="center", color=colour, fontsize=13)
    return figure


def draw_frozen() -> Figure:
    """Bytes of gradients on a rank after backward, by what is trained and in which units."""
    figure = canvas(3.9)
    axes = figure.subplots()
    for place, (name, (size, _)) in enumerate(reversed(tuned().items())):
        axes.barh(place, size / GB, 0.6, color=TAG_COLOURS["gradients"])
        axes.text(size / GB + 0.03, place, f"{size / GB:.2f} GB", va="center", fontsize=17)
        axes.text(-0.04, place, name, ha="right", va="center")
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_xlim(-2.2, 4.0)
    return figure


def draw_hybrid() -> Figure:
    """Eight ranks on two hosts: rows are sharding groups, columns are replica groups."""
    figure, axes = bare(4.7, 6.6, 4.6, left=-0.7, bottom=0.25)
    factor = 4
    sharding, replicas = plan_groups(RANKS, factor)
    round_corners = "round,pad=0,rounding_size=0.12"
    for host, group in enumerate(sharding):
        bottom = 2.35 - 2.0 * host
        row = FancyBboxPatch((-0.02, bottom - 0.02), 4.24, 1.54, round_corners, facecolor=PALE, edgecolor=LINE)
        axes.add_patch(row)
        axes.text(-0.1, bottom + 0.75, f"host {host}", ha="right", va="center")
        for place, rank in enumerate(group):
            left = 0.12 + 1.04 * place
            axes.add_patch(Rectangle((left, bottom + 0.16), 0.9, 1.18, facecolor="white", edgecolor=LINE))
            axes.text(left + 0.45, bottom + 1.06, f"rank {rank}", ha="center", va="center")
            for part in range(factor):
                colour = SERIES_COLOURS[part] if part == place else PALE
                box(axes, left + 0.08 + 0.185 * part, bottom + 0.3, (0.185, 0.5), colour)
    for place, group in enumerate(replicas):
        middle = 0.57 + 1.04 * place
        axes.annotate(
            "",
            (middle, 2.3),
            (middle, 1.87),
            arrowprops={"arrowstyle": "<|-|>", "color": REDUCTION_COLOUR, "lw": 2.5, "shrinkA": 0, "shrinkB": 0},
        )
        axes.text(middle, 4.0, f"replicas\n{group}", ha="center", va="bottom", color=REDUCTION_COLOUR, fontsize=14)
    told_inside = "1  along a row: gathers,\nreduce-scatter of P:\nthe mean of 4 ranks, P / 4"
    told_across = "2  down a column:\nall-reduce of P / 4:\nthe mean of 8 ranks"
    axes.text(4.4, 3.1, told_inside, va="center", color=INK, fontsize=16)
    axes.text(4.4, 1.75, told_across, va="center", color=REDUCTION_COLOUR, fontsize=16)
    return figure


def draw_leaves() -> Figure:
    """What all ranks of a host send to other hosts in a step, by sharding factor."""
    figure = canvas(4.5)
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 6))
    units = [2 * sum(unit) for unit in sizes_of(large()).units]
    clusters = (("2 hosts of 2", 4, 2, (1, 2, 4)), ("8 hosts of 8", 64, 8, (1, 2, 4, 8, 16, 64)))
    for panel, (name, ranks, per_host, factors) in zip(panels, clusters, strict=True):
        for place, factor in enumerate(factors):
            sent = traffic(units, ranks, per_host, factor)
            gathers = (sent.sharding if factor > per_host else 0.0) / sum(units)
            rest = sent.leaves / sum(units) - gathers
            panel.bar(place, gathers, 0.62, color=GATHER)
            panel.bar(place, rest, 0.62, gathers, color=REDUCTION_COLOUR)
            panel.text(place, gathers + rest + 0.05, f"{gathers + rest:.2f}", ha="center", va="bottom", fontsize=17)
        panel.set_xticks(range(len(factors)), [f"F = {factor}" for factor in factors])
        panel.tick_params(axis="x", length=0)
        panel.set_title(name)
        panel.set_ylim(0, 4.4)
    panels[0].set_ylabel("models leave a host in a step")
    panels[1].text(-0.3, 3.6, "gathers and reduce-scatters", color=GATHER, fontweight="bold")
    panels[1].text(-0.3, 3.1, "all-reduce", color=REDUCTION_COLOUR, fontweight="bold")
    return figure


def draw_decisions() -> Figure:
    """What lab 11's cost model chooses, by model and cluster."""
    head, *lines = [line for line in told("11", "C44") if line.strip()]
    colours = {
        "data parallelism": TAG_COLOURS["optimizer"],
        "hybrid sharding": BF16,
        "full sharding": FP32,
        "more ranks": "#E69F00",
        "split layers": REDUCTION_COLOUR,
    }
    figure, axes = bare(5.0, 4.0, len(lines) + 0.75, left=-1.15)
    columns = [slice(30 + 25 * place, 55 + 25 * place) for place in range(4)]
    for place, column in enumerate(columns):
        axes.text(place + 0.5, len(lines) + 0.2, head[column].strip(), ha="center", color=SOFT, fontsize=13)
    for row, line in enumerate(lines):
        bottom = len(lines) - 1 - row
        axes.text(-0.04, bottom + 0.5, line[:30].strip().replace(", ", ",\n"), ha="right", va="center", fontsize=13)
        for place, column in enumerate(columns):
            choice, _, factor = line[column].strip().partition(", ")
            word = choice.replace(" sharding", "") + (f", {factor}" if factor not in ("", "F = 1") else "")
            ink = INK if choice in ("hybrid sharding", "more ranks") else "white"
            box(axes, place, bottom + 0.04, (0.985, 0.9), colours[choice], word, color=ink)
    return figure


FIGURES: dict[str, Draw] = {
    "practice-dtypes": draw_dtypes,
    "practice-ranges": draw_ranges,
    "practice-scaler": draw_scaler,
    "practice-accumulation": draw_accumulation,
    "practice-construction": draw_construction,
    "practice-policies": draw_policies,
    "practice-rows": draw_rows,
    "practice-frozen": draw_frozen,
    "practice-hybrid": draw_hybrid,
    "practice-leaves": draw_leaves,
    "practice-decisions": draw_decisions,
}
