"""The allocator's blocks: how long each is held, and what happens when memory runs out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from draw.canvas import GIB, canvas
from draw.overlap.drawing import bare
from draw.overlap.runs import DEEP, GPT, PLENTY, big
from draw.overlap.schedules import SCHEDULES
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minifsdp.course.machine import CachingAllocator, Run, replay
from minifsdp.course.machine.program import Allocate
from minifsdp.course.machine.shapes import SHAPES, Shape, seconds
from minifsdp.course.plots.palette import BLOCK_COLOURS, INK, SOFT

T5 = SHAPES["T5-11B-like"]
SHORT = replace(GPT.device, name="A100 with 40 GiB", capacity=40 * GIB)
STATES = {"in use": "in use", "waiting": "freed, waiting for an event", "free": "free, for this stream alone"}


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


@cache
def short() -> Run:
    """Three steps of `DEEP` without a limit, on a device with too little memory."""
    return replay(DEEP.record(SCHEDULES["BACKWARD_PRE"], 3), SHORT)


def before_retry() -> list[Any]:
    return short().snapshots["first retry"]


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
