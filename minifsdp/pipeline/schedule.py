"""A plan for the ranks of a pipeline, carried out: each rank cuts its batch, runs its list, and hears of failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.kinds import check_flags, refused
from minifsdp.pipeline.actions import Action, Plan, check_complete, stages_of
from minifsdp.pipeline.boundary import Boundary, boundary_of
from minifsdp.pipeline.channels import Channels
from minifsdp.pipeline.data_parallel import check_wrapped, drop_unreduced
from minifsdp.pipeline.executor import Batch, Executor
from minifsdp.pipeline.failures import Failures, let_go
from minifsdp.pipeline.messages import check_order
from minifsdp.pipeline.micro_batches import check_specs, merge_chunks, split_args_kwargs_into_chunks
from minifsdp.pipeline.simulate import simulate
from minifsdp.pipeline.stage import PipelineStage
from minifsdp.pipeline.tied import TiedWeight

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
        ValueError: the plan is incomplete, not for these stages, or another than other ranks have; its messages would
            not arrive in order.
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
        if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
            raise refused("loss_fn", loss_fn, "a function of an output and a target, such as nn.MSELoss()")
        check_flags(scale_grads=scale_grads)
        check_specs(args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self.stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        first = self.stages[0]
        self.plan, self.n_microbatches, self.group = plan, n_microbatches, first.group
        check_complete(plan, first.num_stages, n_microbatches)
        if len(plan) != first.group_size:
            raise ValueError(f"a plan for {len(plan)} ranks on {first.group_size}: give each rank a list of actions")
        check_order(plan)
        _check_same(plan, self.group)
        self.simulation = simulate(plan, SLOTS)
        for stage in self.stages:
            check_wrapped(stage.submod)
        mine = plan[self.group.rank()]
        if [stage.stage_index for stage in self.stages] != stages_of(mine):
            given = [stage.stage_index for stage in self.stages]
            raise ValueError(
                f"rank {self.group.rank()} has stages {stages_of(mine)} in this plan, and was given {given}"
            )
        self.specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        self.channels = Channels(plan, self.group, first.device, _said(self.stages))
        self.failures = Failures(self.group)
        weight = 1 / n_microbatches if scale_grads else 1.0
        self.executor = Executor(mine, {s.stage_index: s for s in self.stages}, self.channels, loss_fn, weight)

    @property
    def pipeline_order(self) -> dict[int, list[Action | None]]:
        return dict(enumerate(self.simulation.slots()))

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a batch; gradients are added to `.grad` of the parameters.

        Without a `loss_fn` there is no backward. A failed step leaves gradients of some micro-batches in `.grad`.

        Args:
            args: the batch, on the rank of the first stage.
            target: for the loss, on the rank of the last stage.
            losses: filled there with the losses of the micro-batches, in order.
            return_outputs: keep the outputs of all micro-batches until the end of the step.
            loss_kwargs: for `loss_fn`, the same for all micro-batches.
            kwargs: cut like `args`; for the stages of the rank that gives them.

        Returns:
            the outputs of all micro-batches, on the rank of the last stage.

        Raises:
            PipelineError: another rank has failed; in an earlier step, if this rank's part of that was over by then.
            ValueError: an argument cannot be cut, a stage passes another shape than before, or the loss has no target.
            RuntimeError: called under `torch.no_grad()`.
        """
        trains = self.executor.loss_fn is not None
        batch = partial(Batch, loss_kwargs=loss_kwargs or {}, trains=trains, keeps_outputs=return_outputs)
        return self._run(batch, args, kwargs, target, losses)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `step`, forward only."""
        batch = partial(Batch, loss_kwargs=loss_kwargs or {}, trains=False, keeps_outputs=return_outputs)
        return self._run(batch, args, kwargs, target, losses)

    def tie(self, copies: Mapping[int, nn.Parameter], stages: Sequence[int]) -> None:
        """Treat parameters of several stages as one weight, such as an embedding and the head; on all ranks.

        They take the first one's values, and each step ends with their gradients added.

        Args:
            copies: the parameters of this rank's stages, by stage; after `fully_shard` or DDP, if there is one.
            stages: all that have one, in order.

        Raises:
            ValueError: `copies` are not those of this rank's stages, or the stages are not in order.
        """
        if list(stages) != sorted(set(stages)):
            raise ValueError(f"stages={list(stages)}: give them in order, each once")
        mine = [stage.stage_index for stage in self.stages if stage.stage_index in stages]
        if sorted(copies) != mine:
            raise ValueError(
                f"this rank has stages {mine} of {list(stages)}, and copies for {sorted(copies)}: give one each"
            )
        homes = [self.channels.homes[stage] for stage in stages]
        if mine:
            self.executor.tied.append(TiedWeight([copies[stage] for stage in mine], homes, self.group))

    def share_losses(self, losses: Sequence[Tensor]) -> Tensor:
        """The losses of a step on every rank, [n_microbatches] in float64; one broadcast, by all ranks.

        Args:
            losses: filled by `step` on the rank of the last stage.
        """
        shared = torch.zeros(self.n_microbatches, dtype=torch.float64, device=self.stages[0].device)
        for place, loss in zip(shared, losses, strict=False):
            place.copy_(loss)
        comm.broadcast(shared, self.channels.homes[self.channels.last], self.group).wait()
        return shared

    def _run(
        self, batch_of: Callable[..., Batch], args: Any, kwargs: Any, target: Any, losses: list[Tensor] | None
    ) -> Any:
        self.failures.check()
        self.executor.at = self.executor.actions[0]
        try:
            micros, (args_spec, kwargs_spec, merge_spec) = self.n_microbatches, self.specs
            specs = args_spec if args else None, kwargs_spec if kwargs else None  # all ranks may be given the same
            cut, named = split_args_kwargs_into_chunks(args, kwargs, micros, *specs)
            targets = [] if target is None else split_args_kwargs_into_chunks((target,), {}, micros)[0]
            batch = batch_of(cut, named, [each for (each,) in targets])
            self._check(batch)
            self.executor.run(batch)
            output = merge_chunks(_in_order(batch.outputs), merge_spec) if batch.outputs else None
        except BaseException as error:  # also when the user interrupts this rank
            known = self.failures.shared(error, str(self.executor.at))
            let_go(error)
            self._hang_up()
            drop_unreduced(self.stages)
            if known is error:
                raise
            raise known from None
        if losses is not None:
            losses[:] = _in_order(batch.losses)
        return output

    def _check(self, batch: Batch) -> None:
        if batch.trains and not torch.is_grad_enabled():
            raise RuntimeError("step() computes gradients, which torch.no_grad() forbids: call eval()")
        if batch.trains and not batch.targets and any(stage.is_last for stage in self.stages):
            raise ValueError("step() has no target on the rank of the last stage, where loss_fn needs it: give one")

    def close(self) -> None:
        """Close the channels, ten file descriptors or more on each rank; on all ranks, after the last step."""
        self.failures.failed = self.failures.failed or "close() has been called"
        self._hang_up()

    def _hang_up(self) -> None:
        self.channels.close()
        for weight in self.executor.tied:
            weight.close()
        for stage in self.stages:
            stage.forget()


def _check_same(plan: Plan, group: Group) -> None:
    """
    Raises:
        ValueError: another rank has another plan; on all ranks.
    """
    plans = comm.gather_objects(str(plan), group)
    different = [rank for rank, each in enumerate(plans) if each != plans[0]]
    if different:
        raise ValueError(
            f"ranks {different} have another plan than rank 0: make the same schedule on all ranks, with as many "
            "micro-batches"
        )


def _said(stages: Sequence[PipelineStage]) -> dict[int, Boundary]:
    """The boundaries that stages were given examples of, by the stage below."""
    above = {s.stage_index - 1: boundary_of(s.input_args) for s in stages if s.input_args is not None}
    return above | {s.stage_index: boundary_of(s.output_args) for s in stages if s.output_args is not None}


def _in_order(by_micro: Mapping[int, Any]) -> list[Any]:
    return [by_micro[micro] for micro in sorted(by_micro)]
