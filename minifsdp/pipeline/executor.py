"""Runs one rank's list of actions: receive what an action needs, compute, send what others need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.channels import Channels, received_before, sent_after
from minifsdp.pipeline.data_parallel import reduced_once
from minifsdp.pipeline.stage import PipelineStage
from minifsdp.tree import map_tensors

Observer = Callable[[Action], Any]


class Executor:
    """One rank's stages, and its list of actions.

    Args:
        actions: this rank's.
        stages: this rank's, by number.
        channels: to other ranks.
        loss_fn: of an output of the last stage and its target; None: forward only.
        weight: of each micro-batch's loss in what is differentiated.

    Attributes:
        observers: each is called with every action before it begins.
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
        self.observers: list[Observer] = []
        self.at = actions[0]
        for stage in {action.stage for action in actions if action.kind == "W"}:
            stages[stage].split_backward()

    def run(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]], targets: Sequence[Any], trains: bool
    ) -> tuple[list[Any], list[Tensor]]:
        """One step.

        Args:
            args: of each micro-batch, for the first stage.
            kwargs: of each micro-batch, for all of this rank's stages.
            targets: of each micro-batch, for the loss.
            trains: if not, only forwards run, without autograd.

        Returns:
            outputs of the last stage, and losses, of each micro-batch; empty where that stage is on another rank.
        """
        self.args, self.kwargs, self.targets, self.trains = args, kwargs, targets, trains
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        with torch.set_grad_enabled(trains), reduced_once(self.stages.values()) if trains else nullcontext():
            for action in self.actions:
                if trains or action.kind == "F":
                    self.at = action
                    for observe in self.observers:
                        observe(action)
                    self._do(action)
        self.channels.finish()
        return [self.outputs[micro] for micro in sorted(self.outputs)], [self.losses[i] for i in sorted(self.losses)]

    def _forward(self, action: Action) -> None:
        stage, micro = self.stages[action.stage], action.micro
        message = received_before(action, self.channels.last)
        inputs: tuple[Any, ...] = self.args[micro] if message is None else self._received(message)
        output = stage.forward(micro, inputs, self.kwargs[micro])
        passed = sent_after(action, self.channels.last)
        if passed is not None:
            outputs = _as_tensors(output, stage)
            self.channels.send(passed, outputs, self.trains)
        else:
            outputs = self._last(micro, output)
        if self.trains:
            stage.keep(micro, () if message is None else inputs, outputs)

    def _received(self, message: Any) -> tuple[Tensor, ...]:
        tensors = self.channels.receive(message, self.trains)
        boundary = self.channels.boundaries[message.source, self.trains]
        return tuple(t.detach().requires_grad_(each.needs_grad) for t, each in zip(tensors, boundary, strict=True))

    def _last(self, micro: int, output: Any) -> tuple[Tensor, ...]:
        """The loss, if there is one; what backward begins with."""
        self.outputs[micro] = _detached(output)
        if self.loss_fn is None or not self.targets:
            return ()
        loss = self.loss_fn(output, self.targets[micro])
        self.losses[micro] = loss.detach()
        return (loss * self.weight,)

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        message = received_before(action, self.channels.last)
        backward = stage.backward if action.kind == "B" else stage.backward_input
        found = backward(action.micro, self._gradients(action, message))
        passed = sent_after(action, self.channels.last)
        if passed is not None:
            self.channels.send(passed, found)

    def _gradients(self, action: Action, message: Any) -> Sequence[Tensor | None]:
        """Of each output of a stage, or of the loss."""
        if message is None:
            return [None] * len(self.stages[action.stage].alive[action.micro].outputs)
        arrived = iter(self.channels.receive(message))
        boundary = self.channels.boundaries[action.stage, True]
        return [next(arrived) if each.needs_grad else None for each in boundary]

    def _do(self, action: Action) -> None:
        match action.kind:
            case "F":
                self._forward(action)
            case "W":
                self.stages[action.stage].backward_weight(action.micro)
            case _:
                self._backward(action)


def _as_tensors(output: Any, stage: PipelineStage) -> tuple[Tensor, ...]:
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(each, Tensor) for each in outputs):
        raise TypeError(
            f"stage {stage.stage_index} returns a {type(output).__name__}: pass a tensor, or a tuple of them"
        )
    return tuple(outputs)


def _detached(output: Any) -> Any:
    return map_tensors(Tensor.detach, output)
