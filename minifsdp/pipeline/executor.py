"""Runs one rank's list of actions: receive the input of an action, compute, send the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.channels import Channels
from minifsdp.pipeline.data_parallel import reduced_once
from minifsdp.pipeline.stage import PipelineStage
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
        around: entered for the computation of each action, when its input has arrived.
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
        self.around: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
        self.tied: list[TiedWeight] = []
        self.at = actions[0]
        for stage in {action.stage for action in actions if action.kind == "W"}:
            stages[stage].split_backward()

    def run(self, batch: Batch) -> None:
        """One step."""
        reduced = reduced_once(self.stages.values()) if batch.trains else nullcontext()
        with torch.set_grad_enabled(batch.trains), added(self.tied if batch.trains else ()), reduced:
            for action in self.actions:
                if batch.trains or action.kind == "F":
                    self._do(action, batch)
        self.channels.finish()

    def _do(self, action: Action, batch: Batch) -> None:
        self.at = action
        for observe in self.observers:
            observe(action)
        before, after = self.channels.arrivals.get(action), self.channels.departures.get(action)
        arrived = None if before is None else self.channels.receive(before, batch.trains)
        with self.around(action):
            result = self._compute(action, arrived, batch)
        if after is not None:
            self.channels.send(after, result, batch.trains)

    def _compute(self, action: Action, arrived: Sequence[Tensor] | None, batch: Batch) -> Sequence[Tensor]:
        """Outputs of a forward, gradients of inputs of a backward."""
        stage = self.stages[action.stage]
        match action.kind:
            case "F":
                return self._forward(action, arrived, batch)
            case "W":
                stage.backward_weight(action.micro)
                return ()
            case kind:
                backward = stage.backward if kind == "B" else stage.backward_input
                return backward(action.micro, self._gradients(action, arrived))

    def _forward(self, action: Action, arrived: Sequence[Tensor] | None, batch: Batch) -> Sequence[Tensor]:
        stage, micro = self.stages[action.stage], action.micro
        inputs = () if arrived is None else self._leaves(action, arrived, batch)
        output = stage.forward(micro, batch.args[micro] if arrived is None else inputs, batch.kwargs[micro])
        outputs = self._end(micro, output, batch) if stage.is_last else _as_tensors(output, stage)
        if batch.trains:
            stage.keep(micro, inputs, outputs)
        return outputs

    def _leaves(self, action: Action, arrived: Sequence[Tensor], batch: Batch) -> tuple[Tensor, ...]:
        """The tensors that have arrived, as leaves of a graph of their own."""
        boundary = self.channels.boundaries[action.stage - 1, batch.trains]
        return tuple(t.detach().requires_grad_(each.needs_grad) for t, each in zip(arrived, boundary, strict=True))

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

    def _gradients(self, action: Action, arrived: Sequence[Tensor] | None) -> Sequence[Tensor | None]:
        """Of each output of a stage, or of the loss; None where none is needed."""
        if arrived is None:
            outputs = self.stages[action.stage].alive[action.micro].outputs
            return [torch.full_like(loss, self.weight) for loss in outputs]
        left = iter(arrived)
        boundary = self.channels.boundaries[action.stage, True]
        return [next(left) if each.needs_grad else None for each in boundary]


def _as_tensors(output: Any, stage: PipelineStage) -> tuple[Tensor, ...]:
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(each, Tensor) for each in outputs):
        raise TypeError(
            f"stage {stage.stage_index} returns a {type(output).__name__}: pass a tensor, or a tuple of them"
        )
    return tuple(outputs)
