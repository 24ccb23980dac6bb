"""ZeRO stage 1: the optimizer state is sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minifsdp import device
from minifsdp.zero.partition import Bucket, ShardedOptimizer


def reduce_gradients(bucket: Bucket) -> None:
    """The gradients' mean over the ranks into `bucket.shard.grad` [padded / N], by way of a staging buffer [padded]."""
    staging = bucket.new_gradients("communication")
    for p, view in zip(bucket.params, bucket.split(staging), strict=True):
        if p.grad is not None:
            view.copy_(p.grad)
    bucket.shard.grad, reduction = bucket.start_reduction(staging)
    reduction.wait()
    device.free(staging)


def free_gradients(bucket: Bucket) -> None:
    """Give the shard's gradient up; the next step reduces a new one."""
    assert bucket.shard.grad is not None
    device.free(bucket.shard.grad)
    bucket.shard.grad = None


class Zero1Optimizer(ShardedOptimizer):
    """Shards the optimizer state over the ranks; everything happens in `step` (arXiv 1910.02054, section 5.1).

    Backward leaves ordinary, whole gradients of this rank's batch in `.grad`, and adds to them when it is called again:
    accumulation costs no communication. `step` averages them over the ranks; None counts as zero.

    Gradient bytes: 4Ψ for `.grad`, which `step` does not touch. During `step` at most one bucket is staged, so bucket b
    brings the peak to 4Ψ + (shard gradients 0..b) + bucket b, padding included; on gloo + (N - 1) / N of it, which is
    received and summed.
    """

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        for bucket in self.buckets:
            if bucket.shard.grad is None:  # else clip_grad_norm_ has been here
                reduce_gradients(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients (or zero them), and what clipping has reduced of them."""
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            if bucket.shard.grad is not None:
                free_gradients(bucket)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce-scatter the gradients, update this rank's shards, all-gather the parameters. Collective.

        Args:
            closure: clears the gradients, computes the loss, calls backward and returns the loss; called once.

        Returns:
            The closure's loss.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.reduce_gradients()
        self.update_shards()
        for bucket in self.buckets:
            free_gradients(bucket)
        self.gather_parameters()
        return loss
