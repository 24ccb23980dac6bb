"""Schedules as torch.distributed.pipelining calls them: each makes a plan, and runs its own rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from minifsdp.pipeline.actions import Action, Plan, check_complete, read_csv, stages_of
from minifsdp.pipeline.boundary import boundary_of
from minifsdp.pipeline.channels import Channels, check_order
from minifsdp.pipeline.executor import Executor
from minifsdp.pipeline.failures import Failures
from minifsdp.pipeline.micro_batches import merge_chunks, split_args_kwargs_into_chunks
from minifsdp.pipeline.schedules.dualpipe_v import dualpipe_v
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.looped_bfs import looped_bfs
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zbv import zbv
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import simulate
from minifsdp.pipeline.stage import PipelineStage

Stages: TypeAlias = Sequence[PipelineStage]
Loss: TypeAlias = Callable[..., Tensor] | None

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # time units, for the idle slots of `pipeline_order`


class Schedule:
    """A plan for the ranks of a pipeline, and this rank's stages, which carry out its part.

    Args:
        plan: the actions of every rank.
        stages: this rank's, or the only one.
        n_microbatches: into how many a batch is cut.
        loss_fn: of an output of the last stage and the target; None: forward only.
        scale_grads: gradients are those of the mean of the micro-batches' losses, not of their sum.
        args_chunk_spec, kwargs_chunk_spec: how to cut the arguments (`split_args_kwargs_into_chunks`).
        output_merge_spec: how to join the outputs (`merge_chunks`).

    Attributes:
        pipeline_order: of each rank its actions by time unit, None where it is idle.

    Raises:
        ValueError: the plan is incomplete, or not for these stages; its messages would not arrive in order.
        RuntimeError: it is a deadlock.
    """

    def __init__(
        self,
        plan: Plan,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        scale_grads: bool = True,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
    ) -> None:
        self.stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        first = self.stages[0]
        self.plan, self.n_microbatches, self.group = plan, n_microbatches, first.group
        check_complete(plan, first.num_stages, n_microbatches)
        check_order(plan)
        self.simulation = simulate(plan, SLOTS)
        mine = plan[self.group.rank()]
        if [stage.stage_index for stage in self.stages] != stages_of(mine):
            given = [stage.stage_index for stage in self.stages]
            raise ValueError(
                f"rank {self.group.rank()} has stages {stages_of(mine)} in this plan, and was given {given}"
            )
        self.specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        said = {s.stage_index: boundary_of(s.output_args) for s in self.stages if s.output_args is not None}
        self.channels = Channels(plan, self.group, first.device, said)
        self.failures = Failures(self.group)
        weight = 1 / n_microbatches if scale_grads else 1.0
        self.executor = Executor(mine, {s.stage_index: s for s in self.stages}, self.channels, loss_fn, weight)

    @property
    def pipeline_order(self) -> dict[int, list[Action | None]]:
        return dict(enumerate(self.simulation.slots()))

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward and backward of a batch; gradients are added to `.grad` of the parameters.

        Args:
            args: the batch, on the rank of the first stage.
            target: for the loss, on the rank of the last stage.
            losses: filled there with the losses of the micro-batches, in order.
            kwargs: cut like `args`; for the stages of the rank that gives them.

        Returns:
            the outputs of all micro-batches, on the rank of the last stage.

        Raises:
            PipelineError: another rank has failed.
            ValueError: what is given cannot be cut, or what a stage passes on has changed its shape.
        """
        return self._run(args, kwargs, target, losses, torch.is_grad_enabled())

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """As `step`, forward only."""
        return self._run(args, kwargs, target, losses, False)

    def _run(self, args: Any, kwargs: Any, target: Any, losses: list[Tensor] | None, trains: bool) -> Any:
        with self.failures.shared(self._hang_up, lambda: str(self.executor.at)):
            micros, (args_spec, kwargs_spec, merge_spec) = self.n_microbatches, self.specs
            cut, named = split_args_kwargs_into_chunks(args, kwargs, micros, args_spec, kwargs_spec)
            targets = (
                () if target is None else [each for (each,) in split_args_kwargs_into_chunks((target,), {}, micros)[0]]
            )
            outputs, found = self.executor.run(cut, named, targets, trains)
        if losses is not None:
            losses[:] = found
        return merge_chunks(outputs, merge_spec) if outputs else None

    def _hang_up(self) -> None:
        self.channels.close()
        for stage in self.stages:
            stage.forget()


def _plan_of(order: Callable[..., Any], stages: Sequence[PipelineStage], micros: int, *more: int) -> Plan:
    ranks = stages[0].group_size
    wrong = next((s for s in stages if s.num_stages != ranks * len(stages)), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong.num_stages} stages on {ranks} ranks with {len(stages)} here: each rank has as many, "
            f"{ranks * len(stages)} in all"
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
    """Several stages on each rank, all micro-batches through one before the next (schedules/looped_bfs.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(
            _plan_of(looped_bfs, stages, n_microbatches, len(stages)), stages, n_microbatches, loss_fn, **options
        )


class ScheduleInterleaved1F1B(Schedule):
    """1F1B with several stages on each rank (schedules/interleaved.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(
            _plan_of(interleaved, stages, n_microbatches, len(stages)), stages, n_microbatches, loss_fn, **options
        )


class ScheduleInterleavedZeroBubble(Schedule):
    """Weight gradients fill idle time; with one stage on each rank this is ZB-H1 (schedules/zero_bubble.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(
            _plan_of(zero_bubble, stages, n_microbatches, len(stages)), stages, n_microbatches, loss_fn, **options
        )


class ScheduleZBVZeroBubble(Schedule):
    """Two stages on each rank, placed in a V (schedules/zbv.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(_plan_of(zbv, stages, n_microbatches), stages, n_microbatches, loss_fn, **options)


class ScheduleDualPipeV(Schedule):
    """As ZBV, with forwards and backwards in turn (schedules/dualpipe_v.py)."""

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss = None, **options: Any) -> None:
        super().__init__(_plan_of(dualpipe_v, stages, n_microbatches), stages, n_microbatches, loss_fn, **options)


def from_csv(
    path: Path, stages: PipelineStage | Sequence[PipelineStage], n_microbatches: int, **options: Any
) -> Schedule:
    """A schedule from a file in torch's format."""
    return Schedule(read_csv(path), stages, n_microbatches, **options)
