"""Runs one rank's list of actions: receive the input of an action, compute, send the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.channels import Channels
from minifsdp.pipeline.data_parallel import reduced_once, replicas_in
from minifsdp.pipeline.stage import Alive, PipelineStage
from minifsdp.pipeline.tied import TiedWeight, added
from minifsdp.tree import map_tensors


@dataclass
class Batch:
    """A step's data on one rank, by micro-batch.

    Attributes:
        args: for the first stage.
        kwargs: for all of this rank's stages.
        targets: for the loss; empty: there is none.
        loss_kwargs: for the loss, the same for all micro-batches.
        trains: if not, only forwards run, without autograd.
        keeps_outputs: fill `outputs`.
        outputs, losses: filled by the rank of the last stage.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] = ()
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = True
    keeps_outputs: bool = True
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)


class Executor:
    """One rank's stages, and its list of actions.

    Args:
        actions: this rank's.
        stages: this rank's, by number.
        channels: to other ranks.
        loss_fn: of an output of the last stage and its target; None: forward only.
        weight: of each micro-batch's loss: the gradient that its backward begins with.

    Attributes:
        observers: each is called with every action before it begins.
        around: each gives, for every action, a context in which it computes: when its input has arrived.
        tied: weights with copies in several stages.
        at: the action under way.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        stages: Mapping[int, PipelineStage],
        channels: Channels,
        loss_fn: Callable[..., Tensor] | None,
        weight: float,
    ) -> None:
        self.actions, self.stages, self.channels = actions, stages, channels
        self.loss_fn, self.weight = loss_fn, weight
        self.observers: list[Callable[[Action], Any]] = []
        self.around: list[Callable[[Action], AbstractContextManager[Any]]] = []
        self.tied: list[TiedWeight] = []
        self.at = actions[0]
        for stage in {action.stage for action in actions if action.kind == "W"}:
            stages[stage].split_backward()

    def run(self, batch: Batch) -> None:
        """One step."""
        with self._around(batch):
            for action in self.actions:
                if batch.trains or action.kind == "F":
                    self._do(action, batch)
        self.channels.finish()

    def _around(self, batch: Batch) -> ExitStack:
        """The contexts of a step: no gradients, or gradients that are added and reduced when it ends."""
        with ExitStack() as around:
            if not batch.trains:
                around.enter_context(torch.no_grad())
                return around.pop_all()
            if self.tied:
                around.enter_context(added(self.tied))
            if replicas := replicas_in(self.stages.values()):
                around.enter_context(reduced_once(replicas))
            return around.pop_all()

    def _do(self, action: Action, batch: Batch) -> None:
        self.at = action
        for observe in self.observers:
            observe(action)
        before, after = self.channels.arrivals.get(action), self.channels.departures.get(action)
        arrived = None if before is None else self.channels.receive(before, batch.trains)
        with ExitStack() as around:
            for each in self.around:
                around.enter_context(each(action))
            result = self._compute(action, arrived, batch)
        if after is not None:
            self.channels.send(after, result, batch.trains)

    def _compute(self, action: Action, arrived: Sequence[Tensor] | None, batch: Batch) -> Sequence[Tensor]:
        """Outputs of a forward, gradients of inputs of a backward."""
        number, kind, micro = action
        stage = self.stages[number]
        if kind == "F":
            return self._forward(stage, micro, arrived, batch)
        if kind == "W":
            stage.backward_weight(micro)
            return ()
        backward = stage.backward if kind == "B" else stage.backward_input
        return backward(micro, self._gradients(stage, micro, arrived))

    def _forward(
        self, stage: PipelineStage, micro: int, arrived: Sequence[Tensor] | None, batch: Batch
    ) -> Sequence[Tensor]:
        inputs = () if arrived is None else tuple(arrived)
        output = stage.forward(batch.args[micro] if arrived is None else inputs, batch.kwargs[micro])
        outputs = self._end(micro, output, batch) if stage.is_last else _as_tensors(output, stage)
        if batch.trains:
            stage.alive[micro] = Alive(inputs, outputs)
        return outputs

    def _end(self, micro: int, output: Any, batch: Batch) -> tuple[Tensor, ...]:
        """The loss, if there is one, where backward begins."""
        if batch.keeps_outputs:
            batch.outputs[micro] = map_tensors(Tensor.detach, output)
        if self.loss_fn is None or not batch.targets:
            return ()
        loss = self.loss_fn(output, batch.targets[micro], **batch.loss_kwargs)
        if loss.numel() != 1:
            raise ValueError(f"loss_fn returns {list(loss.shape)} numbers for micro-batch {micro}: return one")
        batch.losses[micro] = loss.detach()
        return (loss,)

    def _gradients(self, stage: PipelineStage, micro: int, arrived: Sequence[Tensor] | None) -> Sequence[Tensor | None]:
        """Of each output of a stage, or of the loss; None where none is needed."""
        outputs = stage.alive[micro].outputs
        if arrived is None:
            return [torch.full_like(loss, self.weight) for loss in outputs]
        left = iter(arrived)
        return [next(left) if output.requires_grad else None for output in outputs]


def _as_tensors(output: Any, stage: PipelineStage) -> tuple[Tensor, ...]:
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(each, Tensor) for each in outputs):
        raise TypeError(
            f"stage {stage.stage_index} returns a {type(output).__name__}: pass a tensor, or a tuple of them"
        )
    return tuple(outputs)
