"""Figures and numbers of deck 4: overlap, prefetch, rate limit, and the allocator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from draw.canvas import INK, LINE, SOFT, Draw, canvas, in_units
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch.optim import AdamW

from minifsdp.course.closed_form import Setting, fsdp
from minifsdp.course.data import Batch
from minifsdp.course.machine import A100, CachingAllocator, Program, Run, record_on_paper, replay
from minifsdp.course.machine.program import STEP, Allocate, Free, Issue, Kernel, Mark
from minifsdp.course.machine.shapes import SHAPES, ReductionFirst, Shape, seconds, with_limiter, without_limiter
from minifsdp.course.measure import Settings
from minifsdp.course.model import Block
from minifsdp.course.plots.drawing import lane_patches, lanes, step_of
from minifsdp.course.plots.style import BLOCK_COLOURS, LANE_COLOURS, REDUCTION_COLOUR, SERIES_COLOURS
from minifsdp.course.reference.lab06 import finish_times
from minifsdp.course.rungs import Trainee, sizes_of
from minifsdp.course.timeline import Span
from minifsdp.device import current_stream
from minifsdp.fsdp import (
    FullyShardedDataParallel,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    SyncSchedule,
)
from minifsdp.fsdp.prefetch import POST
from minifsdp.fsdp.unit import Unit

GIB, MIB = 2**30, 2**20
MEASURED = json.loads((Path(__file__).parent.parent / "measured.json").read_text())
COLOURS = {
    "all-gather": LANE_COLOURS["communication"],
    "compute": LANE_COLOURS["compute"],
    "reduce-scatter": REDUCTION_COLOUR,
    "host": LANE_COLOURS["host"],
}
STATES = {"in use": "in use", "waiting": "freed, waiting for an event", "free": "free, for this stream alone"}
QUEUEING = 0.4e-3  # seconds of the host for a piece, in `draw_queue`

GPT, T5 = SHAPES["GPT-175B-like"], SHAPES["T5-11B-like"]
DEEP = replace(GPT, recorded=6, batch=2)  # as in lab 08
PLENTY, SHORT = replace(GPT.device, capacity=2**50), replace(GPT.device, name="A100 with 40 GiB", capacity=40 * GIB)
LINKED = replace(A100, name="A100, link 100 GB/s", launch=4e-6, segment=(0.0, 0.0))
SLOW = replace(
    A100,
    flops={4: 20e9},
    memory_bandwidth=10e9,
    latency=2e-3,
    bandwidth=50e6,
    efficiency=1.0,
    launch=0.0,
    issue=0.0,
    segment=(0.0, 0.0),
)
TIMED = Settings(batch=24, layers=3, context=48)  # as in lab 07, for `SLOW`
WIDE = Settings(batch=4, layers=3, width=1024, context=512)  # for `LINKED`


class LateWait(OverlapSchedule):
    """Block 2 of forward computes first and waits then."""

    def pre_forward(self, unit: Any) -> None:
        self.issue_forward(unit)
        if unit is self.units[3]:  # the root is the first
            self.handle, unit._gathering = unit._gathering, SimpleNamespace(wait=lambda: None)
        unit.wait_gather()

    def post_forward(self, unit: Any, backward_follows: bool) -> None:
        if unit is self.units[3]:
            self.handle.wait()
        super().post_forward(unit, backward_follows)


class HeldUp(PrefetchSchedule):
    """A host that needs a value of the device in every unit's forward."""

    def post_forward(self, unit: Unit, backward_follows: bool) -> None:
        current_stream(self.device).record_event().synchronize()
        super().post_forward(unit, backward_follows)


SCHEDULES: dict[str, Any] = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "late wait": LateWait,
    "no prefetch": ReductionFirst,
    "BACKWARD_POST": partial(PrefetchSchedule, forward=False, backward=POST),
    "BACKWARD_PRE": without_limiter(),
    "both ways": PrefetchSchedule,
    "held up": partial(HeldUp, forward=False),
    "held up, both ways": HeldUp,
    "all ahead": partial(PrefetchSchedule, depth=None),
    "all, limited": partial(RateLimitedSchedule, depth=None),
    **{f"k = {k}": with_limiter(k) for k in (1, 2, 3)},
}


class Piece(NamedTuple):
    """A piece of work that a host queues, as lab 06 has it."""

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    host_waits: bool = False


class Watched(CachingAllocator):
    """Notes of each block when the host asked for it, when it freed it, and when its readers had passed."""

    queues: Any

    def __init__(self, capacity: int, queues: Any) -> None:
        super().__init__(capacity, queues)
        self.lives: list[list[float]] = []
        self._number: dict[Any, int] = {}

    def malloc(self, nbytes: int, stream: int) -> Any:
        block = super().malloc(nbytes, stream)
        self._number[block] = len(self.lives)
        self.lives.append([self.queues.host])
        return block

    def free(self, block: Any) -> None:
        before, freed = len(self.queues.recorded), self.queues.host
        super().free(block)
        self.lives[self._number.pop(block)] += [freed, max([freed, *(e.at for e in self.queues.recorded[before:])])]


def numbers() -> dict[str, Any]:
    """What the deck's text says in numbers."""
    rungs = {rung["name"]: rung for rung in MEASURED["rungs"]}
    ddp, limited = rungs["ddp"], rungs["fsdp-limit"]
    waiting, _, prefetched = forwards().values()
    ahead = big(DEEP, "BACKWARD_PRE")
    states = dict.fromkeys(BLOCK_COLOURS, 0)
    for block in (block for segment in before_retry() for block in segment.blocks):
        states[block.state] += block.size
    return {
        "ms": in_units("ms", 1e-3, 0),
        "s": lambda value: f"{value:.2f} s",
        "gib": in_units("GiB", GIB, 0),
        "mib": in_units("MiB", MIB, 1),
        "percent": lambda part: f"{100 * part:.0f}\u00a0%",
        "queued": QUEUEING * len(forward_pieces()),
        "ran": finish_times(forward_pieces(), QUEUEING)[-1],
        "one_stream": big(GPT, "sync").seconds,
        "own_streams": big(GPT, "BACKWARD_PRE"),
        "hazard": race(0.25e9).hazards[0].text,
        "laptop": {name: laptop(name).seconds for name in ("overlap", "both ways")},
        "gain": {shape.batch: prefetch_gain(shape) for shape in (GPT, DEEP)},
        "held_up": 1 - step_of(prefetched) / step_of(waiting),
        "slower": short().seconds / ahead.seconds - 1,
        "issues": ahead.memory[-1].at - {mark.name: mark.host for mark in ahead.marks}[STEP],
        "ledger": {name: rungs[name]["bytes"]["unsharded_peak"] for name in ("fsdp-prefetch", "fsdp-limit")},
        "deep": {k: big(DEEP, k) for k in ("k = 1", "k = 2", "k = 3", "BACKWARD_PRE")},
        "states": states,
        "limiter": {name.removesuffix("-like"): limiter(SHAPES[name]) for name in SHAPES if name != GPT.name},
        "memory": 1 - limited["bytes"]["peak"] / ddp["bytes"]["peak"],
        "time": limited["milliseconds"] / ddp["milliseconds"] - 1,
        "cores": MEASURED["cores"],
        "cpu": MEASURED["cpu"],
        "gpu": GPT.device.name,
    }


@cache
def program(name: str, settings: Settings) -> Program:
    """What rank 0 asks of its device in two steps of the course's model."""

    def build(group: Any) -> Trainee:
        model = FullyShardedDataParallel(settings.model(), group, auto_wrap_policy={Block}, schedule=SCHEDULES[name])
        return Trainee(model, AdamW(model.parameters(), foreach=False))

    def batch() -> Batch:
        tokens = torch.zeros(settings.batch // settings.ranks, settings.context, dtype=torch.int64)
        return tokens, tokens

    return record_on_paper(build, batch, settings.ranks)


@cache
def big(shape: Shape, name: str) -> Run:
    """Three steps of one of the paper's models on a device with memory enough."""
    return replay(shape.record(SCHEDULES[name], 3), PLENTY)


@cache
def short() -> Run:
    """The same without a limit, on a device with too little."""
    return replay(DEEP.record(SCHEDULES["BACKWARD_PRE"], 3), SHORT)


def before_retry() -> list[Any]:
    return short().snapshots["first retry"]


def laptop(name: str, runs_ahead: bool = False) -> Run:
    return replay(program(name, TIMED), replace(SLOW, runs_ahead=runs_ahead))


def race(bandwidth: float) -> Run:
    return replay(program("late wait", TIMED), replace(SLOW, latency=0.2e-3, bandwidth=bandwidth))


def last_step(run: Run, waits: bool = False) -> list[Span]:
    """With the names of its two long phases; the host's waits only if wanted."""
    begin, middle = run.done - run.seconds, {mark.name: mark.done for mark in run.marks}["backward"]
    phases = [Span("phase", "forward", 0, middle - begin), Span("phase", "backward", middle - begin, run.done - middle)]
    return phases + [span for span in run.last_step() if waits or span.lane != "wait"]


def forward_of(run: Run) -> list[Span]:
    """The last forward, until the device has done all of it."""
    done = {mark.name: mark.done for mark in run.marks}
    return cut(run.spans, done["forward"], done["backward"])


def cut(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """What lies between two moments, in seconds, without the host's waits; the first moment becomes 0."""
    parts = [(span, max(span.start, begin), min(span.end, end)) for span in spans if span.lane != "wait"]
    return [Span(span.lane, span.name, first - begin, last - first) for span, first, last in parts if first < last]


@cache
def forwards() -> dict[str, list[Span]]:
    """By host, the forward of three equal blocks."""
    names = {
        "held up in every unit": "held up",
        "runs ahead": "BACKWARD_PRE",
        "held up, with forward prefetch": "held up, both ways",
    }
    return {label: forward_of(replay(program(name, WIDE), LINKED)) for label, name in names.items()}


def layer_seconds(run: Run) -> tuple[float, float]:
    """From one block to the next, in forward and in backward: blocks 2 and 3 are like all others."""
    spans = run.last_step()
    begins = [min(s.start for s in spans if (s.lane, s.name) == ("compute", f"blocks.{n}")) for n in (2, 3)]
    reduced = [min(s.start for s in spans if s.name == f"reduce_scatter blocks.{n}") for n in (2, 3)]
    return begins[1] - begins[0], reduced[0] - reduced[1]


def prefetch_gain(shape: Shape) -> float:
    """What backward prefetch adds to the steps per second of all blocks."""
    runs = [big(shape, name) for name in ("no prefetch", "BACKWARD_PRE")]
    without, ahead = (run.seconds + (shape.layers - shape.recorded) * sum(layer_seconds(run)) for run in runs)
    return without / ahead - 1


@cache
def whole(name: str) -> tuple[list[int], dict[str, int]]:
    """Bytes of gathered parameters after each kernel of the last step, in the host's order; and where phases begin."""
    recorded, held, after, begins = program(name, Settings()), 0, list[int](), dict[str, int]()
    for each in recorded.instructions:
        match each:
            case Mark(mark):
                after = [] if mark == STEP else after
                begins[mark] = len(after)
            case Allocate(buffer) | Free(buffer) if recorded.buffers[buffer].tag == "unsharded":
                held += recorded.buffers[buffer].nbytes * (1 if isinstance(each, Allocate) else -1)
            case Kernel():
                after.append(held)
    return after, begins


def limiter(shape: Shape) -> dict[str, float]:
    """A step without the limiter and with it, how often memory ran out without, and the factor between the two."""
    runs = [shape.replay(SCHEDULES[name]) for name in ("BACKWARD_PRE", "k = 2")]
    without, limited = map(seconds, runs)
    return {"without": without, "with": limited, "retries": runs[0].retries, "factor": without / limited}


def lives(name: str) -> list[tuple[str, list[float]]]:
    """Of each block that the last step gathers: its number, and seconds at which it was asked for, freed, and free."""
    recorded, made = DEEP.record(SCHEDULES[name], 3), list[Watched]()

    def watched(capacity: int, queues: Any) -> Watched:
        made.append(Watched(capacity, queues))
        return made[0]

    run = replay(recorded, PLENTY, watched)
    begin = run.done - run.seconds
    buffers = [recorded.buffers[each.buffer] for each in recorded.instructions if isinstance(each, Allocate)]
    gathered = [
        (buffer.unit.rpartition(".")[2], [at - begin for at in times])
        for buffer, times in zip(buffers, made[0].lives, strict=True)
        if buffer.tag == "unsharded" and buffer.unit != "root"
    ]
    return [(unit, times) for unit, times in gathered if times[0] >= 0]


def issued(name: str) -> list[tuple[str, str]]:
    """What the host issues for each block in backward, in order."""
    recorded = program(name, TIMED).instructions
    found: list[tuple[str, str]] = []
    for each in recorded[max(at for at, mark in enumerate(recorded) if mark == Mark("backward")) :]:
        match each:
            case Issue(call, unit):
                found.append((call.op.replace("_", "-"), unit))
            case Kernel(_, unit) if ("compute", unit) not in found:
                found.append(("compute", unit))
    return [(what, unit.rpartition(".")[2]) for what, unit in found if unit.startswith("blocks")]


def forward_pieces() -> list[Any]:
    """Gather (2 ms) and compute (3 ms) of four units."""
    pieces: list[Any] = []
    for unit in "0123":
        pieces.append(Piece(unit, "all-gather", 2e-3))
        pieces.append(Piece(unit, "compute", 3e-3, (len(pieces) - 1,)))
    return pieces


def box(axes: Axes, left: float, middle: float, width: float, kind: str, text: str) -> None:
    look: Any = {"facecolor": COLOURS[kind], "edgecolor": "white", "linewidth": 1.5}
    axes.add_patch(Rectangle((left, middle - 0.32), width, 0.64, **look))
    ink = INK if kind == "all-gather" else "white"
    axes.text(left + width / 2, middle, text, ha="center", va="center_baseline", color=ink)


def bare(axes: Axes, names: Mapping[str, float], right: float, low: float, high: float) -> None:
    """No frame; the lanes' names on the left."""
    axes.set_yticks(list(names.values()), names)
    axes.set_xlim(0, right)
    axes.set_ylim(low, high)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xticks([])


def timeline(rows: Mapping[str, Sequence[Span]], height: float, model: str) -> Figure:
    """Lanes on one axis of time, a row for each run, units by their numbers."""
    figure = canvas(height)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(map(step_of, rows.values()))
    for panel, (name, spans) in zip(panels, rows.items(), strict=True):
        lanes(panel, spans, longest, labelled=True)
        for text in panel.texts:
            text.set_fontsize(12)
        panel.set_title(name)
        panel.tick_params(axis="y", labelcolor=INK)
    panels[-1].set_xlabel(f"ms; a model, not measured: {model}")
    patches = lane_patches(span for spans in rows.values() for span in spans)
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))
    return figure


def draw_queue() -> Figure:
    """The host queues eight pieces at once; each begins when its stream has come to it."""
    figure = canvas(4.3)
    axes = figure.subplots()
    pieces, heights = forward_pieces(), {"host": 2.6, "all-gather": 1.3, "compute": 0.0}
    ends = finish_times(pieces, QUEUEING)
    for number, (piece, end) in enumerate(zip(pieces, ends, strict=True)):
        queued, start, middle = 1e3 * QUEUEING * (number + 1), 1e3 * (end - piece.seconds), heights[piece.stream]
        axes.plot([queued, start + 0.06], [2.28, middle + 0.34], color=COLOURS[piece.stream], linewidth=1.2, zorder=0)
        box(axes, queued - 1e3 * QUEUEING, heights["host"], 1e3 * QUEUEING, "host", "")
        box(axes, start, middle, 1e3 * piece.seconds, piece.stream, piece.name)
    axes.text(queued + 0.15, heights["host"], f"all is queued after {queued:.1f} ms", va="center", color=SOFT)
    axes.text(1e3 * ends[-1], -0.5, f"over after {1e3 * ends[-1]:.1f} ms", ha="right", va="top", color=SOFT)
    bare(axes, {"host": 2.6, "stream of\ngathers": 1.3, "compute\nstream": 0.0}, 1e3 * ends[-1], -0.85, 3.0)
    return figure


def draw_step() -> Figure:
    """A step of four blocks, without overlap and with it."""
    runs = {"all on one stream": big(GPT, "sync"), "communication on streams of its own": big(GPT, "BACKWARD_PRE")}
    rows = {f"{name}: {1e3 * run.seconds:.0f} ms": last_step(run) for name, run in runs.items()}
    return timeline(rows, 4.9, GPT.device.name)


def draw_waits() -> Figure:
    """Three streams over a step of two units, and the four kinds of places at which one waits for another."""
    figure = canvas(3.2)
    axes = figure.subplots()
    pieces: list[Any] = [
        Piece("step", "compute", 1.5),
        Piece("0", "all-gather", 1.5, (0,)),
        Piece("forward 0", "compute", 2.0, (1,)),
        Piece("1", "all-gather", 1.5),
        Piece("forward 1", "compute", 2.0, (3,)),
        Piece("1", "all-gather", 1.5),
        Piece("backward 1", "compute", 3.0, (5,)),
        Piece("0", "all-gather", 1.5),
        Piece("1", "reduce-scatter", 1.5, (6,)),
        Piece("backward 0", "compute", 3.0, (7,)),
        Piece("0", "reduce-scatter", 1.5, (9,)),
        Piece("step", "compute", 1.5, (10,)),
    ]
    kinds = [("compute", "all-gather"), ("all-gather", "compute"), ("compute", "reduce-scatter")]
    heights, ends = {"all-gather": 2.0, "compute": 1.0, "reduce-scatter": 0.0}, finish_times(pieces, 0.0)
    for piece, end in zip(pieces, ends, strict=True):
        begin, mine = end - piece.seconds, heights[piece.stream]
        box(axes, begin, mine, piece.seconds, piece.stream, piece.name)
        for earlier in piece.after:
            giver, over = pieces[earlier].stream, ends[earlier]
            edge = 0.32 if mine < heights[giver] else -0.32
            arrow: Any = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.4}
            axes.annotate("", (begin + 0.1, mine + edge), (over - 0.1, heights[giver] - edge), arrowprops=arrow)
            pair = (giver, piece.stream)
            number = str(kinds.index(pair) + 1 if pair in kinds else 4)
            at = (over + begin) / 2 + 0.32, (heights[giver] + mine) / 2 + 0.04
            axes.text(*at, number, ha="center", va="center", color=SERIES_COLOURS[0], fontweight="bold")
    bare(axes, {"gathers": 2.0, "compute": 1.0, "reductions": 0.0}, ends[-1], -0.4, 2.4)
    return figure


def draw_race() -> Figure:
    """The same program without one wait on two links: it reads too early on one of them, and is wrong on both."""
    rows = {"a fast link": forward_of(race(0.25e9)), "a slow link": forward_of(race(20e6))}
    figure = timeline(rows, 4.0, "a GPU of 20 GFLOP/s")
    spans, panel = rows["a slow link"], figure.axes[1]
    arrives = next(span.end for span in spans if span.name == "all_gather blocks.2")
    reads = [span for span in spans if (span.lane, span.name) == ("compute", "blocks.2")]
    begin, end = 1e3 * reads[0].start, 1e3 * min(reads[-1].end, arrives)
    panel.broken_barh([(begin, end - begin)], (0.6, 0.8), facecolor=LANE_COLOURS["wait"], zorder=4)
    panel.text((begin + end) / 2, 0.97, "2: too early", ha="center", va="center", fontsize=12, zorder=5)
    return figure


def draw_laptop() -> Figure:
    """One program on a host that runs ahead, on one that computes, and what prefetch makes of the second."""
    runs = {
        "overlap, if the host ran ahead": laptop("overlap", runs_ahead=True),
        "overlap, the host computes": laptop("overlap"),
        "overlap and prefetch, the host computes": laptop("both ways"),
    }
    rows = {f"{name}: {1e3 * run.seconds:.0f} ms": last_step(run) for name, run in runs.items()}
    return timeline(rows, 4.6, "a laptop of 20 GFLOP/s on a link of 2 ms and 50 MB/s")


def draw_issue() -> Figure:
    """In which order the host issues gathers, gradients and reductions; and what that costs in memory."""
    figure = canvas(4.2)
    axes = figure.subplots()
    sizes = sizes_of(Settings().model()).units
    costs: dict[str, Any] = {"no prefetch": "none", "BACKWARD_POST": "post", "BACKWARD_PRE": "pre"}
    for line, (name, backward) in enumerate(costs.items()):
        for place, (what, unit) in enumerate(issued(name)):
            box(axes, place, -line, 1, what, unit)
            if (what, unit) == ("all-gather", "1"):
                frame: Any = {"fill": False, "edgecolor": INK, "linewidth": 3, "zorder": 3}
                axes.add_patch(Rectangle((place + 0.03, -line - 0.29), 0.94, 0.58, **frame))
        held = fsdp(sizes, Setting(2), reductions=1, backward=backward).unsharded_peak / MIB
        axes.text(9.3, -line, f"{held:.1f} MiB", va="center")
    axes.text(0, 0.62, "the host issues", color=SOFT, va="center")
    axes.text(9.3, 0.62, "gathered at most", color=SOFT, va="center")
    bare(axes, {"no prefetch": 0, "BACKWARD_POST": -1, "BACKWARD_PRE": -2}, 11.4, -2.5, 0.9)
    words = {"all-gather": "all-gather", "compute": "gradients", "reduce-scatter": "reduce-scatter"}
    handles = [Patch(color=COLOURS[what], label=label) for what, label in words.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def draw_backward() -> Figure:
    """Two blocks of backward, with the reduction first and with the gather first."""
    rows = {}
    for name in ("no prefetch", "BACKWARD_PRE"):
        run = big(GPT, name)
        spans, each = run.last_step(), layer_seconds(run)[1]
        begin = min(span.start for span in spans if "reduce_scatter blocks" in span.name)
        rows[f"{name}: {1e3 * each:.0f} ms a block"] = cut(spans, begin, begin + 2 * each)
    return timeline(rows, 3.6, GPT.device.name)


def draw_held_up() -> Figure:
    """A forward whose host is held up in every unit, beside one that runs ahead, and with forward prefetch."""
    rows = {f"{name}: {step_of(spans):.2f} ms": spans for name, spans in forwards().items()}
    return timeline(rows, 4.6, LINKED.name)


def draw_unbounded() -> Figure:
    """Gathered parameters over the kernels of a step: all of them at once, or as many as the limit lets."""
    figure = canvas(4.5)
    axes = figure.subplots()
    names = {  # with the place of the label, as a part of the step, and its colour
        "all ahead": ("as early as the order allows", 0.34, SERIES_COLOURS[1]),
        "all, limited": ("at most two blocks", 0.73, SERIES_COLOURS[0]),
        "sync": ("no prefetch", 0.84, SOFT),
    }
    for name, (label, place, colour) in names.items():
        sizes, begins = whole(name)
        axes.plot([size / MIB for size in sizes], drawstyle="steps-post", color=colour)
        most = max(sizes) / MIB
        axes.text(len(sizes) * place, most, f"{label}: {most:.1f} MiB", color=colour, va="center")
    for phase in ("forward", "backward", "optimizer"):
        axes.text(begins[phase], -0.02, phase, va="top", transform=axes.get_xaxis_transform())
    axes.set_xlim(0, 1.02 * len(sizes))
    axes.set_ylim(0, 9.6)
    axes.set_xticks([begins["backward"], begins["optimizer"]], ["", ""])
    axes.grid(axis="x")
    axes.set_ylabel("MiB of gathered parameters")
    return figure


def draw_lives(name: str) -> Figure:
    """Of each gathered block the time in which the host holds it, and in which it is freed and not free."""
    figure = canvas(4.6)
    axes = figure.subplots()
    found = lives(name)
    for row, (_, (asked, freed, free)) in enumerate(found):
        axes.barh(-row, 1e3 * (free - freed), 0.66, 1e3 * freed, color=BLOCK_COLOURS["waiting"])
        axes.barh(-row, max(1e3 * (freed - asked), 6), 0.66, 1e3 * asked, color=BLOCK_COLOURS["in use"])
    axes.set_yticks([-row for row in range(len(found))], [unit for unit, _ in found])
    for part, text in ((1, "forward"), (3, "backward")):
        middle = 0.5 - part * len(found) / 4
        axes.text(-0.045, middle, text, transform=axes.get_yaxis_transform(), ha="center", va="center", rotation=90)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, 1e3 * big(DEEP, name).seconds)
    axes.set_xlabel(f"ms of the step; a model, not measured: {GPT.device.name}")
    words = {"in use": "gathered, not freed by the host", "waiting": "freed by the host, still to be read"}
    axes.legend(handles=[Patch(color=BLOCK_COLOURS[state], label=label) for state, label in words.items()])
    return figure


def draw_blocks() -> Figure:
    """What lies where, stream by stream, just before memory had run out."""
    figure = canvas(3.9)
    axes = figure.subplots()
    heights = {"compute": 1.2, "gathers": 0.0}  # streams 0 and 1; that of the reductions has next to nothing
    for stream, height in enumerate(heights.values()):
        left, held = 0.0, dict.fromkeys(BLOCK_COLOURS, 0.0)
        for segment in (each for each in before_retry() if each.stream == stream):
            begin = left
            for block in segment.blocks:
                size = block.size / GIB
                axes.add_patch(Rectangle((left, height - 0.3), size, 0.6, facecolor=BLOCK_COLOURS[block.state]))
                left, held[block.state] = left + size, held[block.state] + size
            frame: Any = {"fill": False, "edgecolor": INK, "linewidth": 1}
            axes.add_patch(Rectangle((begin, height - 0.3), left - begin, 0.6, **frame))
            left += 0.06
        says = ", ".join(f"{size:.1f} GiB {STATES[state]}" for state, size in held.items() if size > 0.1)
        axes.text(0, height - 0.36, says, va="top", color=SOFT)
    bare(axes, heights, 30.5, -0.75, 1.6)
    axes.spines["bottom"].set_visible(True)
    axes.set_xticks(range(0, 31, 5))
    axes.set_xlabel(f"GiB; a frame is a segment; a model, not measured: {SHORT.name}")
    handles = [Patch(color=BLOCK_COLOURS[state], label=label) for state, label in STATES.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)
    return figure


def draw_stall() -> Figure:
    """A step with memory enough, and the same program where a retry stops the device."""
    recorded = T5.record(SCHEDULES["BACKWARD_PRE"])
    runs = {"memory enough": replay(recorded, PLENTY), "memory short, one retry": replay(recorded, T5.hardware)}
    rows = {f"{name}: {1e3 * run.seconds:.0f} ms": last_step(run, waits=True) for name, run in runs.items()}
    return timeline(rows, 4.7, T5.device.name)


def draw_rungs() -> Figure:
    """Milliseconds of a step and peak memory of a rank, for every rung of the ladder."""
    figure = canvas(4.7)
    axes = figure.subplots()
    colours = {"ddp": SOFT, "zero": "#009E73", "fsdp": SERIES_COLOURS[0]}
    nudges = {  # points
        "fsdp": (0, 16, "center"),
        "fsdp-overlap": (-4, -16, "right"),
        "zero2": (8, -14, "left"),
        "fsdp-limit": (9, 11, "left"),
        "zero1": (0, -17, "center"),
        "fsdp-prefetch": (0, 16, "center"),
    }
    for rung in MEASURED["rungs"]:
        name, at = rung["name"], (rung["bytes"]["peak"] / MIB, rung["milliseconds"])
        colour = next(colour for begin, colour in colours.items() if name.startswith(begin))
        axes.plot(*at, "o", color=colour, markersize=9)
        right, up, side = nudges.get(name, (11, 0, "left"))
        axes.annotate(name, at, (right, up), textcoords="offset points", ha=side, va="center", color=colour)
    axes.grid(color=LINE)
    axes.set_xlabel("MiB of a rank at the peak of a step")
    axes.set_ylabel("ms of a step")
    axes.margins(y=0.14)
    axes.set_xlim(24, 48)
    return figure


FIGURES: dict[str, Draw] = {
    "overlap-queue": draw_queue,
    "overlap-step": draw_step,
    "overlap-waits": draw_waits,
    "overlap-race": draw_race,
    "overlap-laptop": draw_laptop,
    "overlap-issue": draw_issue,
    "overlap-backward": draw_backward,
    "overlap-held-up": draw_held_up,
    "overlap-unbounded": draw_unbounded,
    "overlap-lives": lambda: draw_lives("BACKWARD_PRE"),
    "overlap-blocks": draw_blocks,
    "overlap-stall": draw_stall,
    "overlap-limited": lambda: draw_lives("k = 2"),
    "overlap-rungs": draw_rungs,
}
