"""A rank's stages and their schedule, by the schedule's name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
from torch import nn

from minifsdp import comm, pipeline
from minifsdp.pipeline import PipelineStage
from minifsdp.pipeline.placement import in_a_v, looped

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEDULES: dict[str, tuple[str, int, Any]] = {  # its class, stages on each rank, and where they are
    "gpipe": ("ScheduleGPipe", 1, looped),
    "1f1b": ("Schedule1F1B", 1, looped),
    "zb-h1": ("ScheduleInterleavedZeroBubble", 1, looped),
    "looped bfs": ("ScheduleLoopedBFS", 2, looped),
    "interleaved": ("ScheduleInterleaved1F1B", 2, looped),
    "interleaved zb": ("ScheduleInterleavedZeroBubble", 2, looped),
    "zbv": ("ScheduleZBVZeroBubble", 2, in_a_v),
    "dualpipe v": ("ScheduleDualPipeV", 2, in_a_v),
}


class InStages:
    """This rank's stages of a model.

    Args:
        name: of `SCHEDULES`.
        micros: micro-batches.
        stage_of: makes a stage, given how many there are and its number.
        loss_fn: for the schedule, as are the options.
        group: the ranks of the pipeline; None: all.
    """

    def __init__(
        self,
        name: str,
        micros: int,
        stage_of: Callable[[int, int], nn.Module],
        loss_fn: Any,
        group: Any = None,
        **options: Any,
    ) -> None:
        kind, per_rank, place = SCHEDULES[name]
        group = comm.world(group)
        self.count = group.size() * per_rank
        self.mine = [stage for stage in range(self.count) if place(stage, group.size()) == group.rank()]
        self.modules = {stage: stage_of(self.count, stage) for stage in self.mine}
        stages = [PipelineStage(module, each, self.count, "cpu", group=group) for each, module in self.modules.items()]
        takes_list = "Interleaved" in kind or per_rank > 1
        self.schedule = getattr(pipeline, kind)(stages if takes_list else stages[0], micros, loss_fn, **options)
        self.is_first, self.is_last = 0 in self.mine, self.count - 1 in self.mine
