"""One stage of a model: forward and backward of one micro-batch at a time, and what is kept in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.kinds import check_count, check_kind
from minifsdp.pipeline.weights import Later, may_split, split_linears, splitting
from minifsdp.private import run_backward


class Alive(NamedTuple):
    """A micro-batch between its forward and its backward.

    Attributes:
        inputs: what has come from the stage before; leaves, whose `.grad` goes back there.
        outputs: what the next stage, or the loss, is computed from.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class PipelineStage:
    """A part of a model on this rank (torch/distributed/pipelining/stage.py).

    Args:
        submodule: the module; between stages pass tensors, or tuples of them.
        stage_index: its place, from 0.
        num_stages: of the whole pipeline, on all ranks.
        device: where it computes.
        input_args, output_args: examples of one micro-batch's inputs and outputs, on any device ("meta" will do).
            None: the first step finds out.
        group: the ranks of the pipeline; None: all.
        dw_builder: called once in each backward in two parts; returns a function that computes the gradients of the
            weights. None: those of every `nn.Linear` wait.

    Raises:
        ValueError: there is no such stage.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        group: Group | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        check_kind("submodule", submodule, nn.Module, "a module")
        check_count("stage_index", stage_index, 0)
        check_count("num_stages", num_stages)
        if not 0 <= stage_index < num_stages:
            raise ValueError(f"stage {stage_index} of {num_stages}: stages count from 0 to {num_stages - 1}")
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.device, self.group, self.dw_builder = torch.device(device), comm.world(group), dw_builder
        self.group_rank, self.group_size = self.group.rank(), self.group.size()
        self.input_args, self.output_args = _tensors(input_args), _tensors(output_args)
        self.alive: dict[int, Alive] = {}
        self._later: dict[int, list[Later]] = {}
        self._splits = False

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def split_backward(self) -> None:
        """Prepare for backwards in two parts."""
        if not self._splits and self.dw_builder is None:
            split_linears(self.submod)
        self._splits = True

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The submodule's output for a micro-batch."""
        if not self._splits:
            return self.submod(*args, **kwargs)
        with may_split():
            return self.submod(*args, **kwargs)

    def backward(self, micro: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The whole backward of a micro-batch.

        Args:
            gradients: of its outputs, where they need one.

        Returns:
            the gradients of its inputs, where they need one.
        """
        if not self._splits and self.dw_builder is None:
            return self._gradients_of_inputs(micro, gradients)
        found = self.backward_input(micro, gradients)
        self.backward_weight(micro)
        return found

    def backward_input(self, micro: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The part of a backward that the stage before waits for; as `backward`."""
        with splitting() as later:
            found = self._gradients_of_inputs(micro, gradients)
        self._later[micro] = [self.dw_builder()] if self.dw_builder is not None else later
        return found

    def backward_weight(self, micro: int) -> None:
        """The rest of it: gradients of weights."""
        for compute in self._later.pop(micro):
            compute()

    def _gradients_of_inputs(self, micro: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        inputs, outputs = self.alive.pop(micro)
        reached = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if reached:
            run_backward(*zip(*reached, strict=True))
        return [x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs if x.requires_grad]

    def forget(self) -> None:
        """Drop everything that is kept of a step that has failed."""
        self.alive.clear()
        self._later.clear()


def _tensors(args: Any) -> tuple[Tensor, ...] | None:
    return (args,) if isinstance(args, Tensor) else args
