"""ZeRO stage 2: the gradients are sharded too, so they are reduced during backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.comm import Group
from minifsdp.ddp.early_steps import early_step
from minifsdp.local_parts import local_gradient
from minifsdp.private import at_end_of_backward, in_backward
from minifsdp.zero.bucket import Bucket
from minifsdp.zero.partition import ShardedOptimizer


class BucketGradients:
    """The gradients of one bucket during a backward.

    Attributes:
        missing: parameters whose gradient this backward has not computed yet.
        waiting: parameters whose gradient is complete and still in `.grad`.
        buffer: [padded], created by `allocate` and dropped by `free`; `views` are its parts in the parameters' shapes.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.buffer: Tensor | None = None
        self.views: dict[Tensor, Tensor] = {}

    def prepare(self) -> None:
        """Begin a backward, which reaches no frozen parameter."""
        self.missing: set[Tensor] = {p for p in self.bucket.params if p.requires_grad}
        self.waiting: list[Tensor] = []

    def mark_ready(self, p: Tensor) -> None:
        if p not in self.missing:
            raise RuntimeError(
                f"a parameter {list(p.shape)} got two gradients in one backward, and the first may be reduced already: "
                "if it is under torch.utils.checkpoint, pass use_reentrant=False"
            )
        self.missing.remove(p)
        self.waiting.append(p)

    def allocate(self) -> None:
        if self.buffer is None:
            self.buffer = self.bucket.new_gradients("gradients")
            self.views.update(zip(self.bucket.params, self.bucket.split(self.buffer), strict=True))

    def collect(self) -> None:
        """Move the waiting gradients from `.grad` to the buffer."""
        if self.waiting:
            self.allocate()
        for p in self.waiting:
            gradient = local_gradient(p)
            if gradient is None:
                raise RuntimeError(
                    f"the gradient of a parameter {list(p.shape)} is gone before its bucket was full: does another "
                    "Zero2Optimizer have it too? Drop that one: del optimizer. Is its backward in two parts, in a "
                    "zero-bubble pipeline? Take Zero1Optimizer"
                )
            self.views[p].copy_(gradient)
            p.grad = None
        self.waiting.clear()

    def start_reduction(self) -> None:
        assert self.buffer is not None
        self.reduced, self.reduction = self.bucket.start_reduction(self.buffer)

    def finish_reduction(self) -> None:
        """Wait, free the buffer, and add this rank's shard of the mean [padded / N] to `shard.grad`."""
        self.reduction.wait()
        self.free()
        shard = self.bucket.shard
        if shard.grad is None:
            shard.grad = self.reduced
        else:
            shard.grad.add_(self.reduced)
            device.free(self.reduced)
        del self.reduced, self.reduction

    def free(self) -> None:
        if self.buffer is not None:
            device.free(self.buffer)
            self.buffer = None
            self.views.clear()


class Zero2Optimizer(ShardedOptimizer):
    """Shards the gradients as well (arXiv 1910.02054, section 5.2).

    A hook copies each gradient into its bucket's buffer as soon as it is complete, and clears `.grad`. A complete
    bucket is reduce-scattered while backward continues. The buckets are reduced strictly in order, so that every rank
    issues the same collectives. A bucket that lacks gradients of unused (not of frozen) parameters waits for the end of
    backward, and the missing gradients are replaced with zeros. After backward, only `shard.grad` [padded / N] remains,
    the mean over the ranks, to which further backward passes add until `zero_grad`. Accumulation therefore needs no
    more memory, but communicates each time.

    So each backward is a collective, and has to reach at least one of the parameters on every rank. If a rank's data
    may use none of this optimizer's parameters, use stage 1, which communicates only in `step`.

    As under stage 1, `step` updates all parameters for which any rank has had a gradient, which takes one all-reduce of
    4 bytes per parameter tensor.

    Gradient bytes: the buffer of bucket b is allocated with its first gradient, and only after the buffer of bucket b -
    2 has been freed. One reduction is in flight, and the next one waits for it and frees its buffer. So at most two
    buffers are alive, and the peak is the maximum over b of (shard gradients 0..b) + bucket b + bucket b + 1, including
    padding; on gloo, plus (N - 1) / N of bucket b, for the parts that are received and summed. A gradient that arrives
    too early for its bucket waits in `.grad`. To keep their number small, pass the parameters in the order of their
    use, and the group with the most parameters first. A backward that adds to the gradients of another begins with all
    shards, and frees each new shard once it is added.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Group | None = None,
        bucket_cap_mb: float = 25,
        **defaults: Any,
    ) -> None:
        super().__init__(params, optimizer_class, process_group, bucket_cap_mb, **defaults)
        self._gradients = [BucketGradients(bucket) for bucket in self.buckets]
        self._coming: list[BucketGradients] = []  # not yet reduced in this backward; only the first two have buffers
        self._reducing: BucketGradients | None = None
        self._in_backward = False
        self._used: set[Tensor] = set()  # got a gradient since they were dropped
        self._gradients_of = {p: gradients for gradients in self._gradients for p in gradients.bucket.params}
        # The hooks must not keep an optimizer alive that has been dropped, nor outlive it.
        own = weakref.proxy(self)
        handles = [p.register_post_accumulate_grad_hook(lambda p: own._on_gradient(p)) for p in self._gradients_of]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def parameters_with_gradients(self) -> Set[Tensor]:
        return self._used

    def reduce_bucket(self, bucket: Bucket) -> None:
        """Nothing is left to do: backward has reduced it."""

    def check_may_step(self) -> None:
        if in_backward():
            raise early_step(self, self)

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the shards' gradients (or zero them), and what a backward that raised has left behind."""
        super().zero_grad(set_to_none)
        self._finish_reduction()
        for gradients in self._coming:
            gradients.free()
        self._in_backward = self._is_reduced = False
        for bucket in self.buckets:
            if set_to_none:
                bucket.free_gradients()
            elif bucket.shard.grad is not None:
                bucket.shard.grad.zero_()
        if set_to_none:
            self._used.clear()

    @torch.no_grad()
    def _on_gradient(self, p: nn.Parameter) -> None:
        """The hook: `p.grad` is complete."""
        if not self._in_backward:
            self._begin_backward()
        self.check_dense(p)
        self._used.add(p)
        self._gradients_of[p].mark_ready(p)
        self._advance()

    def _begin_backward(self) -> None:
        self._in_backward, self._is_reduced = True, False
        self._coming = list(self._gradients)
        for gradients in self._coming:
            gradients.prepare()
        at_end_of_backward(self._end_backward)

    def _advance(self) -> None:
        """Collect what has arrived and reduce what is complete, in bucket order, as far as two buffers go."""
        while self._coming:
            head, *following = self._coming[:2]
            if any(gradients.waiting for gradients in following):  # a bucket early: then none may still be reducing
                head.allocate()
                self._finish_reduction()
            for gradients in (head, *following):
                gradients.collect()
            if head.missing:
                return
            head.allocate()  # which it is but where all of it is frozen
            self._reduce(self._coming.pop(0))

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Reduce what is left, zeros where no gradient came, and wait for everything."""
        while self._coming:
            head = self._coming.pop(0)
            head.allocate()
            head.collect()
            self._reduce(head)
        self._finish_reduction()
        self._in_backward = False

    def _reduce(self, gradients: BucketGradients) -> None:
        self._finish_reduction()
        gradients.start_reduction()
        self._reducing = gradients

    def _finish_reduction(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None
