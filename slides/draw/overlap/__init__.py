"""Figures and numbers of deck 4: overlap, prefetch, rate limit, and the allocator."""

from __future__ import annotations

from typing import Any

from draw.canvas import GIB, MIB, Draw, in_units
from draw.measured import ladders_gpt, rungs
from draw.measured import recorded as record
from draw.overlap.allocator import before_retry, draw_blocks, draw_lives, driver_call, short
from draw.overlap.held import draw_one_block
from draw.overlap.ladder import RANKS, draw_rungs
from draw.overlap.limits import draw_limiter, draw_limits, limited
from draw.overlap.pools import draw_pools
from draw.overlap.prefetch import draw_issue, draw_unbounded, prefetch_gain
from draw.overlap.queues import QUEUEING, draw_queue, draw_waits, forward_pieces
from draw.overlap.recorded import draw_recorded, draw_tested, rungs_recorded, tested
from draw.overlap.rules import draw_rules
from draw.overlap.runs import DEEP, GPT, big, laptop, race
from draw.overlap.stall import draw_retry, steps
from draw.overlap.timelines import draw_backward, draw_frame, draw_held_up, draw_laptop, draw_race, draw_step, forwards
from minifsdp.answers.lab06 import finish_times

from minifsdp.course.ladder.measure import Settings
from minifsdp.instruments.machine.program import STEP
from minifsdp.instruments.plots.drawing import step_of
from minifsdp.instruments.plots.palette import BLOCK_COLOURS


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
    ladder, (enough, retried) = rungs(RANKS), steps()
    forward = {name: step_of(spans) for name, spans in forwards().items()}
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
        "own_streams": big(GPT, "no prefetch"),
        "gather_first": big(GPT, "overlap"),
        "prefetched": big(GPT, "BACKWARD_PRE"),
        "limited": big(GPT, "k = 2"),
        "hazard": race(0.25e9).hazards[0].text,
        "laptop": {name: laptop(name).seconds for name in ("overlap", "both ways")},
        "gain": {shape.batch: prefetch_gain(shape) for shape in (GPT, DEEP)},
        "forward": forward,
        "held_up": 1 - forward["held up, both ways"] / forward["held up"],
        "slower": short().seconds / ahead.seconds - 1,
        "issues": ahead.memory[-1].at - {mark.name: mark.host for mark in ahead.marks}[STEP],
        "ledger": {name: rungs()[name]["bytes"]["unsharded_peak"] for name in ("fsdp-prefetch", "fsdp-limit")},
        "deep": {k: big(DEEP, k) for k in ("k = 1", "k = 2", "k = 3", "BACKWARD_PRE")},
        "states": states,
        "limiter": limited(),
        "stall": {"without": enough.seconds, "with": retried.seconds},
        "driver_call": driver_call(),
        "four": {name: rung["bytes"]["peak"] for name, rung in ladder.items()},
        "ladder": Settings(ranks=RANKS),
        "sent": {name: rung["sent"] for name, rung in ladder.items()},
        "gpu": GPT.device.name,
        "gpt": ladders_gpt(),
        "h100": record()["ladder"]["results"],
        "recorded": rungs_recorded(),
        "tested": tested(),
    }


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
    "overlap-rules": draw_rules,
    "overlap-pools": draw_pools,
    "overlap-lives": lambda: draw_lives("BACKWARD_PRE"),
    "overlap-blocks": draw_blocks,
    "overlap-retry": draw_retry,
    "overlap-limited": lambda: draw_lives("k = 2"),
    "overlap-frame": draw_frame,
    "overlap-limiter": draw_limiter,
    "overlap-limits": draw_limits,
    "overlap-rungs": draw_rungs,
    "overlap-recorded": draw_recorded,
    "overlap-tested": draw_tested,
    "overlap-one-block": draw_one_block,
}
