"""ZeRO stage 1: the optimizer state is sharded."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from minifsdp import device
from minifsdp.local_parts import local_gradient
from minifsdp.zero.bucket import Bucket
from minifsdp.zero.partition import ShardedOptimizer


def reduce_gradients(bucket: Bucket) -> None:
    """The gradients' mean over the ranks into `bucket.shard.grad` [padded / N], by way of a staging buffer [padded]."""
    staging = bucket.new_gradients("communication")
    for p, view in zip(bucket.params, bucket.split(staging), strict=True):
        gradient = local_gradient(p)
        if gradient is not None:
            view.copy_(gradient)
    bucket.shard.grad, reduction = bucket.start_reduction(staging)
    reduction.wait()
    device.free(staging)


class Zero1Optimizer(ShardedOptimizer):
    """Shards the optimizer state over the ranks; everything happens in `step` (arXiv 1910.02054, section 5.1).

    Backward leaves ordinary, whole gradients of this rank's batch in `.grad`, and adds to them when it is called again,
    so accumulation costs no communication. `step` averages the gradients over the ranks.

    A `.grad` of None counts as zero if another rank has a gradient. If no rank has one, the parameter and its state
    stay unchanged, and a bucket that consists only of such parameters is neither reduced nor gathered. The ranks find
    this out in one all-reduce of 4 bytes per parameter tensor, in an int32 "communication" buffer that is freed before
    the first bucket is staged. The host waits for it only on a rank that lacks a gradient.

    Gradient bytes: `.grad` takes 4Ψ, which `step` does not change. During `step`, at most one bucket is staged, so
    bucket b raises the peak to 4Ψ + (shard gradients 0..b) + bucket b, including padding; on gloo, plus (N - 1) / N of
    bucket b, for the parts that are received and summed.
    """

    def parameters_with_gradients(self) -> Set[Tensor]:
        for p in self._params:
            self.check_dense(p)
        return {p for p in self._params if p.grad is not None}

    def reduce_bucket(self, bucket: Bucket) -> None:
        reduce_gradients(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients (or zero them), and what clipping has reduced of them."""
        super().zero_grad(set_to_none)
        self.free_gradients()

    def free_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.free_gradients()
        self._is_reduced = False
