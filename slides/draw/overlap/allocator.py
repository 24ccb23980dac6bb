"""The allocator's blocks: how long each is held, and what happens when memory runs out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from draw.canvas import GIB, canvas
from draw.overlap.drawing import bare
from draw.overlap.runs import DEEP, GPT, PLENTY, big
from draw.overlap.schedules import SCHEDULES
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minifsdp.instruments.machine import CachingAllocator, Run, replay
from minifsdp.instruments.machine.program import Allocate
from minifsdp.instruments.machine.shapes import SHAPES, Shape, seconds
from minifsdp.instruments.plots.palette import BLOCK_COLOURS, INK, SOFT, TAG_COLOURS, as_text

T5 = SHAPES["T5-11B-like"]
SHORT = replace(GPT.device, name="A100 with 40 GiB", capacity=40 * GIB)
STATES = {"in use": "in use", "waiting": "freed, waiting for events", "free": "free, for this stream only"}
STILL_READ: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": TAG_COLOURS["unsharded"],
    "hatch": "///",
    "linewidth": 1.4,
}


class Watched(CachingAllocator):
    """Notes of each block its address, when the host asked for it, when it freed it, and when readers had passed."""

    queues: Any

    def __init__(self, capacity: int, queues: Any) -> None:
        super().__init__(capacity, queues)
        self.lives: list[list[float]] = []
        self.places: list[int] = []
        self._number: dict[Any, int] = {}

    def malloc(self, nbytes: int, stream: int) -> Any:
        block = super().malloc(nbytes, stream)
        self._number[block] = len(self.lives)
        self.lives.append([self.queues.host])
        self.places.append(block.start)
        return block

    def free(self, block: Any) -> None:
        before, freed = len(self.queues.recorded), self.queues.host
        super().free(block)
        self.lives[self._number.pop(block)] += [freed, max([freed, *(e.at for e in self.queues.recorded[before:])])]


@cache
def short() -> Run:
    """Three steps of `DEEP` without a limit, on a device with too little memory."""
    return replay(DEEP.record(SCHEDULES["BACKWARD_PRE"], 3), SHORT)


def before_retry() -> list[Any]:
    return short().snapshots["first retry"]


def driver_call() -> tuple[float, float]:
    """Seconds that a call of the driver is assumed to take, and seconds for each GiB: the same on all devices."""
    (segment,) = {shape.device.segment for shape in SHAPES.values()}
    return segment


@cache
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


def draw_lives(name: str) -> Figure:
    """Of each gathered block the time in which the host holds it, and in which it is freed and not free."""
    figure = canvas(4.8)
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1))
    found = lives(name)
    longest = 1e3 * big(DEEP, name).seconds
    for row, (_, (asked, freed, free)) in enumerate(found):
        axes.barh(-row, 1e3 * (free - freed), 0.7, 1e3 * freed, **STILL_READ)
        axes.barh(-row, max(1e3 * (freed - asked), 0.004 * longest), 0.7, 1e3 * asked, color=TAG_COLOURS["unsharded"])
    axes.set_yticks([-row for row in range(len(found))], [f"unit {unit}" for unit, _ in found])
    axes.set_ylabel("backward      forward", color=INK)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, longest)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    says = f"ms, modelled: {DEEP.recorded} units, the blocks of a {GPT.name} model on a simulated A100"
    figure.supxlabel(says, color=SOFT, fontsize=18)
    _draw_peaks(beside, big(DEEP, name))
    last = 1e3 * max(freed for _, (_, freed, _) in found)
    handles = [Patch(color=TAG_COLOURS["unsharded"]), Patch(**STILL_READ)]
    words = [f"held by the host, until {last:,.0f} ms", "freed, but not yet read"]
    axes.legend(handles, words, loc="upper right", borderaxespad=0, handlelength=1.4)
    return figure


def _draw_peaks(axes: Axes, run: Run) -> None:
    """Peak allocated and peak reserved memory of the program, on one scale."""
    looks: dict[str, Any] = {
        "allocated": {"color": BLOCK_COLOURS["in use"]},
        "reserved": {"facecolor": BLOCK_COLOURS["free"], "edgecolor": INK},
    }
    for place, (kind, look) in enumerate(looks.items()):
        size = run.peak(kind) / GIB
        axes.barh(-place, size, 0.3, linewidth=1.4, **look)
        axes.text(0, 0.22 - place, f"{size:.0f} GiB {kind}", va="bottom")
    axes.set(xlim=(0, 1.02 * big(DEEP, "BACKWARD_PRE").peak("reserved") / GIB), ylim=(-2.2, 0.9))
    axes.axis("off")


def draw_blocks() -> Figure:
    """What lies where, stream by stream, just before memory had run out."""
    figure = canvas(4.4)
    axes = figure.subplots()
    heights = {
        "compute\nstream": 1.7,
        "gather\nstream": 0.0,
    }  # streams 0 and 1; that of the reductions has next to nothing
    for stream, height in enumerate(heights.values()):
        left, held = 0.0, dict.fromkeys(BLOCK_COLOURS, 0.0)
        for segment in (each for each in before_retry() if each.stream == stream):
            begin = left
            for block in segment.blocks:
                size = block.size / GIB
                axes.add_patch(Rectangle((left, height - 0.4), size, 0.8, facecolor=BLOCK_COLOURS[block.state]))
                left, held[block.state] = left + size, held[block.state] + size
            if left - begin > 0.5:  # the frames of small segments would be one black area
                frame: Any = {"fill": False, "edgecolor": INK, "linewidth": 1.4}
                axes.add_patch(Rectangle((begin, height - 0.4), left - begin, 0.8, **frame))
        at = 0.0
        for state, size in ((state, size) for state, size in held.items() if size > 0.1):
            colour = SOFT if state == "free" else as_text(BLOCK_COLOURS[state])
            text = f"{size:.1f} GiB {STATES[state]}"
            axes.text(at, height - 0.5, text, va="top", color=colour, fontweight="bold")
            at += 0.43 * len(text) + 0.8
    bare(axes, heights, 30.5, -1.0, 2.15)
    axes.text(12.5, 1.7, "framed: a large segment each;\nunframed: small segments", color=SOFT, va="center")
    axes.spines["bottom"].set_visible(True)
    axes.set_xticks(range(0, 31, 5))
    axes.set_xlabel(f"GiB, modelled: {DEEP.recorded} layers of a {GPT.name} model on a simulated {SHORT.name}")
    return figure
