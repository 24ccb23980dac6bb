"""Buffers for the reduction of gradients: allocated in each backward, or used permanently as the gradients' memory."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.layout import Layout
from minifsdp.local_parts import like, local_gradient, local_of


class Reduction(Protocol):
    """A bucket that is being reduced: after `wait` its buffer holds the result."""

    def wait(self) -> None: ...


class Bucket:
    """Gradients that are reduced together in one flat buffer; each has a view of it in its parameter's shape.

    Attributes:
        params: the parameters, in the order in which backward is expected to reach them.
        layout: the positions of their gradients in the buffer, in the parameters' strides.
        index: its place in the order in which buckets are launched.
    """

    role: ClassVar[device.Role]
    flat: Tensor  # [sum of the parameters' numel]
    reduction: Reduction
    index: int

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.layout = Layout.of(map(local_of, params), keeps_strides=True)
        self.views: dict[nn.Parameter, Tensor] = {}

    def allocate(self) -> None:
        self.flat = device.empty(self.layout.numel, self.params[0].dtype, self.role, self.params[0].device)
        self.views = dict(zip(self.params, self.layout.views(self.flat), strict=True))

    def hold(self, param: nn.Parameter) -> None:
        """Autograd has just accumulated in this parameter's `.grad`, which stays there until there is more."""

    def fill(self, param: nn.Parameter, is_used: bool, weight: float | None, incoming: Tensor | None) -> None:
        """Let the parameter's gradient enter the buffer, as zero if there is none.

        Args:
            is_used: it got a gradient since the last reduction: what it has will not be wanted as it is.
            weight: what it is multiplied by on its way, which takes no pass over memory of its own.
            incoming: what autograd has just accumulated in it, if it has.
        """
        grad, view = local_gradient(param), self.views[param]
        if grad is None:
            view.zero_()
        elif weight is not None:
            torch.mul(grad.detach(), weight, out=view)
        elif grad is not view:
            view.copy_(grad.detach())

    def deliver(self, param: nn.Parameter) -> None:
        """Let the parameter's `.grad` be the mean that the buffer now holds: its view, where nothing else is said."""
        param.grad = like(self.views[param], param)

    def start_sum(self, group: comm.Group) -> Reduction:
        """Start to reduce what is in the buffer to its sum over the ranks."""
        return comm.all_reduce(self.flat, group)

    def store(self, result: Tensor) -> None:
        """Copy the result of a communication hook to the buffer."""
        self.flat.copy_(result.view(-1))

    def scale(self, factor: Tensor) -> None:
        """Multiply what has been reduced by a number [1]."""
        self.flat.mul_(factor)

    def gradients_of(self, buffer: Tensor) -> list[Tensor]:
        """Views of a `buffer` that is like this bucket's, in the parameters' shapes."""
        return self.layout.views(buffer)

    def of_zeros(self) -> Bucket:
        """A bucket with which a rank that has no gradients takes part."""
        bucket = StagingBucket(self.params)
        bucket.allocate()
        bucket.flat.zero_()
        return bucket

    def release(self) -> None:
        """All means have been delivered: get ready for the next backward."""
        del self.reduction  # it holds the buffer


class StagingBucket(Bucket):
    """A buffer that is allocated for the first gradient of a backward, and becomes the memory of the gradients.

    A gradient computed by this backward moves into the buffer when it arrives: it stays the same Tensor object, its old
    memory is freed, and nothing is copied back. A gradient that existed before, and that other tensors may view, stays
    in its memory and receives a copy of the mean.
    """

    role = "communication"
    kept = False  # as memory of gradients

    def fill(self, param: nn.Parameter, is_used: bool, weight: float | None, incoming: Tensor | None) -> None:
        if not self.views:
            self.allocate()
        super().fill(param, is_used, weight, incoming)
        grad, view = local_gradient(param), self.views[param]
        if grad is not None and is_new(grad, incoming) and grad.stride() == view.stride():
            grad.data, self.kept = view, True

    def deliver(self, param: nn.Parameter) -> None:
        grad, mean = local_gradient(param), self.views[param]
        if grad is None:
            param.grad, self.kept = like(mean, param), True
        elif grad.data_ptr() != mean.data_ptr():
            grad.copy_(mean)

    def release(self) -> None:
        super().release()
        if self.kept:
            device.retag(self.flat, "gradients")
        else:
            device.free(self.flat)
        del self.flat
        self.views.clear()
        self.kept = False


class GradientBucket(Bucket):
    """The gradients themselves: every `.grad` is a view of the buffer, which lives as long as the model."""

    role = "gradients"

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params)
        self.allocate()

    def fill(self, param: nn.Parameter, is_used: bool, weight: float | None, incoming: Tensor | None) -> None:
        super().fill(param, is_used, weight, incoming)
        if is_used:
            param.grad = like(self.views[param], param)

    def hold(self, param: nn.Parameter) -> None:
        # Where `.grad` was None, autograd has put a tensor of its own there; where it was the view, it has added to it.
        grad, view = local_gradient(param), self.views[param]
        if grad is not None and grad is not view:
            view.copy_(grad.detach())
            param.grad = like(view, param)


def is_new(grad: Tensor, incoming: Tensor | None) -> bool:
    """True if `.grad` was None until autograd put `incoming` there: no tensor of an earlier backward views it."""
    return incoming is not None and local_of(incoming).data_ptr() == grad.data_ptr()
