"""Steps on devices that are models: which program runs on which device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from draw.overlap.schedules import SCHEDULES
from torch.optim import AdamW

from minifsdp.batch import Batch
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.gpt import Block
from minifsdp.instruments.machine import A100, Program, Run, record_on_paper, replay
from minifsdp.instruments.machine.shapes import SHAPES, Shape

GPT = SHAPES["GPT-175B-like"]
DEEP = replace(GPT, recorded=6, batch=2)  # as in lab 08
PLENTY = replace(GPT.device, capacity=2**50)
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


@cache
def program(name: str, settings: Settings) -> Program:
    """What rank 0 asks of its device in two steps of the course's model."""

    def build(group: Any) -> Trainer:
        model = FullyShardedDataParallel(settings.model(), group, auto_wrap_policy={Block}, schedule=SCHEDULES[name])
        return Trainer(model, AdamW(model.parameters(), foreach=False))

    def batch() -> Batch:
        tokens = torch.zeros(settings.batch // settings.ranks, settings.context, dtype=torch.int64)
        return tokens, tokens

    return record_on_paper(build, batch, settings.ranks)


@cache
def big(shape: Shape, name: str) -> Run:
    """Three steps of one of the paper's models on a device with memory enough."""
    return replay(shape.record(SCHEDULES[name], 3), PLENTY)


def laptop(name: str) -> Run:
    return replay(program(name, TIMED), replace(SLOW, runs_ahead=False))


def race(bandwidth: float) -> Run:
    return replay(program("late wait", TIMED), replace(SLOW, latency=0.2e-3, bandwidth=bandwidth))


def layer_seconds(run: Run) -> tuple[float, float]:
    """From one block to the next, in forward and in backward: blocks 2 and 3 are like all others."""
    spans = run.last_step()
    begins = [min(s.start for s in spans if (s.lane, s.name) == ("compute", f"blocks.{n}")) for n in (2, 3)]
    reduced = [min(s.start for s in spans if s.name == f"reduce_scatter blocks.{n}") for n in (2, 3)]
    return begins[1] - begins[0], reduced[0] - reduced[1]
