"""Schedules under their names in torch.distributed.pipelining: each makes a plan from its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from minifsdp.kinds import check_count, refused
from minifsdp.pipeline.actions import Plan
from minifsdp.pipeline.schedule import Schedule
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.stage import PipelineStage
from minifsdp.pipeline.torch_api.dualpipe_v import dualpipe_v
from minifsdp.pipeline.torch_api.looped_bfs import looped_bfs
from minifsdp.pipeline.torch_api.zbv import zbv

Stages: TypeAlias = Sequence[PipelineStage]
Loss: TypeAlias = Callable[..., Tensor] | None


def _count(stages: Any) -> int:
    """
    Raises:
        TypeError: they are no list of stages.
    """
    if not (isinstance(stages, Sequence) and all(isinstance(stage, PipelineStage) for stage in stages)):
        raise refused("stages", stages, "PipelineStages: one to a schedule of one stage on each rank, or a list")
    return len(stages)


def _plan_of(order: Callable[..., Any], stages: Sequence[PipelineStage], micros: int, *more: int) -> Plan:
    check_count("n_microbatches", micros)
    number, ranks = _count(stages), stages[0].group_size
    wrong = next((s for s in stages if s.num_stages != ranks * number), None)
    if wrong is not None:
        raise ValueError(
            f"num_stages={wrong.num_stages}, and {ranks} ranks with {number} each, as here, have "
            f"{ranks * number}: give all ranks equally many stages"
        )
    return [list(order(rank, ranks, micros, *more)) for rank in range(ranks)]


class ScheduleGPipe(Schedule):
    """All forwards, then all backwards (schedules/gpipe.py)."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(_plan_of(gpipe, [stage], n_microbatches), stage, n_microbatches, loss_fn, **options)


class Schedule1F1B(Schedule):
    """One forward and one backward in turn (schedules/one_f_one_b.py)."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(_plan_of(one_f_one_b, [stage], n_microbatches), stage, n_microbatches, loss_fn, **options)


class ScheduleLoopedBFS(Schedule):
    """Several stages on each rank, all micro-batches through one before the next (looped_bfs.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(
            _plan_of(looped_bfs, stages, n_microbatches, _count(stages)), stages, n_microbatches, loss_fn, **options
        )


class ScheduleInterleaved1F1B(Schedule):
    """1F1B with several stages on each rank (schedules/interleaved.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(
            _plan_of(interleaved, stages, n_microbatches, _count(stages)),
            stages,
            n_microbatches,
            loss_fn,
            **options,
        )


class ScheduleInterleavedZeroBubble(Schedule):
    """Weight gradients fill idle time; with one stage on each rank this is ZB-H1 (schedules/zero_bubble.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(
            _plan_of(zero_bubble, stages, n_microbatches, _count(stages)),
            stages,
            n_microbatches,
            loss_fn,
            **options,
        )


class ScheduleZBVZeroBubble(Schedule):
    """Two stages on each rank, placed in a V (zbv.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(_plan_of(zbv, stages, n_microbatches), stages, n_microbatches, loss_fn, **options)


class ScheduleDualPipeV(Schedule):
    """As ZBV, with forwards and backwards in turn (dualpipe_v.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(_plan_of(dualpipe_v, stages, n_microbatches), stages, n_microbatches, loss_fn, **options)
