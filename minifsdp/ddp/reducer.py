"""Gradients that are reduced while backward still runs (torch/csrc/distributed/c10d/reducer.cpp)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.ddp.bucketed import assign_buckets, bucket_views, empty_bucket


class Reduction(Protocol):
    """A bucket that is being reduced: after `wait` its buffer holds the result."""

    def wait(self) -> None: ...


class Bucket:
    """Gradients that are reduced together, in one flat buffer of which each has a view in its parameter's shape.

    Attributes:
        params: the parameters, in the order in which backward is expected to reach them.
        missing: how many of their gradients have not entered the buffer in this backward.
    """

    role: ClassVar[device.Role]
    flat: Tensor  # [sum of the parameters' numel]
    reduction: Reduction

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.missing = len(params)
        self.views: dict[nn.Parameter, Tensor] = {}

    def allocate(self) -> None:
        self.flat = empty_bucket(self.params, self.role)
        self.views = dict(zip(self.params, bucket_views(self.flat, self.params), strict=True))

    def hold(self, param: nn.Parameter) -> None:
        """Autograd has just accumulated in this parameter's `.grad`; this backward may be a synchronised one or not."""

    def fill(self, param: nn.Parameter) -> None:
        """Let the parameter's gradient enter the buffer, as zero if there is none."""
        view = self.views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad is not view:
            view.copy_(param.grad)
        self.missing -= 1

    def deliver(self, param: nn.Parameter) -> None:
        """Let the parameter's `.grad` be the mean that the buffer now holds."""
        raise NotImplementedError

    def release(self) -> None:
        """All means have been delivered: get ready for the next backward."""
        self.missing = len(self.params)


class StagingBucket(Bucket):
    """A copy of the gradients, alive from the first of them in a backward until all means are there.

    Then its memory becomes that of the gradients which autograd has made in this backward, whose own is freed: the same
    Tensor objects, no copy back. One in memory that it shares with others, such as a user's flat buffer or the bucket
    of an earlier backward, stays there and gets a copy.
    """

    role = "communication"
    kept = False  # as memory of gradients

    def fill(self, param: nn.Parameter) -> None:
        if not self.views:
            self.allocate()
        super().fill(param)

    def deliver(self, param: nn.Parameter) -> None:
        grad, mean = param.grad, self.views[param]
        if grad is None:
            param.grad, self.kept = mean, True
        elif grad.untyped_storage().nbytes() == grad.nbytes and grad.stride() == mean.stride():
            grad.data, self.kept = mean, True
        else:
            grad.copy_(mean)

    def release(self) -> None:
        super().release()
        if self.kept:
            device.hand_over(self.flat, "gradients")
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

    def hold(self, param: nn.Parameter) -> None:
        # Where `.grad` was None, autograd has put a tensor of its own there; where it was the view, it has added to it.
        if param.grad is not None and param.grad is not self.views[param]:
            self.views[param].copy_(param.grad)
            param.grad = self.views[param]

    def deliver(self, param: nn.Parameter) -> None:
        param.grad = self.views[param]


Reduce = Callable[[Bucket, int, bool], Reduction]
"""Starts the reduction of a full bucket; of its place in the order of launches, and whether it is the last."""


def to_mean(group: comm.Group, bucket: Bucket, index: int, is_last: bool) -> Reduction:
    """Reduce to the mean over the ranks, in place."""
    return comm.all_reduce(bucket.flat, group, comm.MEAN)


class Reducer:
    """Fills buckets as backward makes gradients and starts their all-reduces, so that both run at the same time.

    A bucket is launched once it is full *and* all before it have been launched. So all ranks launch in the same order,
    in whatever order each of them makes its gradients: collectives that are called in different orders would mix up
    buckets, or never end.

    Args:
        names: the parameters to reduce, with their names for messages.
        cap_bytes: size at which a bucket is closed, or one for each, of which the last holds for the rest.
        group: the ranks to average over.
        gradient_as_bucket_view: whether the buckets are the gradients or copies of them.

    Attributes:
        reduce: how a bucket is reduced; a communication hook may take its place.
    """

    blame = "your module has parameters that were not used in producing loss."
    cure = "Pass find_unused_parameters=True to DistributedDataParallel, or let every output of forward enter the loss."

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        cap_bytes: int | Sequence[int],
        group: comm.Group,
        gradient_as_bucket_view: bool,
    ) -> None:
        self.names = names
        self.group = group
        self.reduce: Reduce = partial(to_mean, group)
        self.kind = GradientBucket if gradient_as_bucket_view else StagingBucket
        self.cap_bytes = cap_bytes
        self.build_buckets(names)
        self.launched = 0
        self.expecting = False  # a backward that must be reduced is due, or under way
        self.ready: set[nn.Parameter] = set()  # entered their bucket in this backward
        self.used: set[nn.Parameter] = set()  # got a gradient since the last reduction
        self._register_hooks()

    def build_buckets(self, params: Iterable[nn.Parameter]) -> None:
        self.buckets: list[Bucket] = [self.kind(each) for each in assign_buckets(params, self.cap_bytes)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}

    def _register_hooks(self) -> None:
        # The hooks must not keep a reducer alive whose model has been wrapped again, nor outlive it.
        reducer = weakref.proxy(self)
        handles = [p.register_post_accumulate_grad_hook(lambda p: reducer.on_gradient(p)) for p in self.names]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def prepare(self, outputs: Any) -> None:
        """Reduce the backward that follows a forward with these `outputs`."""
        self.expecting = True

    @torch.no_grad()
    def on_gradient(self, param: nn.Parameter) -> None:
        """The hook of each parameter: autograd has accumulated its gradient."""
        if self.expecting and param in self.ready:
            raise RuntimeError(
                f"Expected to mark a variable ready only once. Parameter {self.names[param]} got another gradient "
                "after its bucket had taken one: it was used outside forward or hidden in a reentrant checkpoint, or "
                "backward ran twice over the same forward. Use parameters inside forward only, and let it return all "
                "that the loss is made of."
            )
        self.bucket_of[param].hold(param)
        self.used.add(param)
        if self.expecting and self.is_complete(param):
            self.mark_ready(param)

    def is_complete(self, param: nn.Parameter) -> bool:
        """Whether backward will add nothing more to this gradient, to which it has just added."""
        return True

    @torch.no_grad()
    def mark_ready(self, param: nn.Parameter) -> None:
        self.ready.add(param)
        self.bucket_of[param].fill(param)
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self.launch(self.buckets[self.launched], self.launched)
            self.launched += 1
        if len(self.ready) == len(self.names):
            at_end_of_backward(self.finish)

    def launch(self, bucket: Bucket, index: int) -> None:
        bucket.reduction = self.reduce(bucket, index, index == len(self.buckets) - 1)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reductions, in the order in which they were launched, and deliver the means."""
        keep = self.unused_on_all_ranks()
        for bucket in self.buckets:
            bucket.reduction.wait()
            for p in bucket.params:
                if p not in keep:
                    bucket.deliver(p)
            bucket.release()
        self.expecting, self.launched = False, 0
        self.ready.clear()
        self.used.clear()

    def unused_on_all_ranks(self) -> set[nn.Parameter]:
        """The parameters whose `.grad` stays as it was."""
        return set()

    def before_forward(self) -> None:
        """Make sure that no reduction is left over from the last backward.

        Raises:
            RuntimeError: it has not reached all parameters; they are named, and so is the cure.
        """
        if self.ready:
            missing = ", ".join(name for p, name in self.names.items() if p not in self.ready)
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one. This error "
                f"indicates that {self.blame} {self.cure} "
                f"Parameters which did not receive grad for rank {self.group.rank()}: {missing}"
            )


def at_end_of_backward(callback: Any) -> None:
    """Call `callback` when the backward that runs now has made all its gradients, before it returns to its caller."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
