"""Rung 3 of DDP: buckets reduced during backward (Li et al., VLDB 2020, arXiv 2006.15704, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.ddp.bucketed import InFlight, assign_buckets, finish_bucket, start_bucket
from minifsdp.ddp.early_steps import refuse_early_steps
from minifsdp.ddp.naive import refuse_sparse_gradients
from minifsdp.ddp.sync import start_from_rank_0, trainable_parameters
from minifsdp.private import at_end_of_backward, in_backward
from minifsdp.tree import tensors_in


class LaunchQueue:
    """The order in which all ranks launch their buckets: each when it is full *and* all before it have been launched.

    Collectives of different ranks are matched by their order. The order of gradients may differ between ranks, because
    their graphs may differ. If each rank launched its buckets as they fill, different buckets would be matched, or the
    ranks would hang (figure 3a of the paper).

    Args:
        sizes: the number of parameters of each bucket.

    Attributes:
        missing: the number of gradients for which each bucket is waiting in this backward.
        launched: the number of buckets launched in this backward.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.restart()

    def restart(self) -> None:
        """Begin a new backward, without any gradients."""
        self.missing = list(self.sizes)
        self.launched = 0

    def launch_full(self, launch: Callable[[int], None]) -> None:
        """Call `launch` with the number of each bucket whose turn has come. One gradient may release several."""
        while self.launched < len(self.missing) and self.missing[self.launched] == 0:
            launch(self.launched)
            self.launched += 1


class OverlappedDDP(nn.Module):
    """`BucketedDDP` whose reductions are launched during backward, and waited for at the end of backward.

    The gradients of the last layers are complete first, so their bucket is being sent while the earlier layers are
    still computing. When `backward` returns, every `.grad` is the mean over the ranks: the training loop is that of one
    process.

        forward       registers a hook on the outputs, which marks the beginning of backward
        backward      a hook on each parameter counts its gradient; full buckets are launched in order
        end           reduces the remaining buckets, waits for all reductions, and copies the means back

    If this rank's backward does not reach a parameter, the parameter's hook is not called (figure 3b). The parameter
    takes part at the end of backward, with zero or the `.grad` that it has from `no_sync`, and delays its bucket and
    all later ones until then. So no rank waits for ever and, as in the rungs below, no `.grad` is None afterwards.
    torch raises an error at the next forward instead. With `find_unused_parameters=True`, it walks through the graph,
    treats such a parameter as ready when backward begins, and leaves its `.grad` unchanged if no rank has used it
    (unused.py).

    Bytes: gradients take 4Ψ for Ψ fp32 parameters, and the buffers of all buckets take another 4Ψ, because none is
    waited for before the end of backward. The drop-in replacement needs no second copy (buckets.py).

    Args:
        module: the model, as for `NaiveDDP`. All ranks run the same number of backward passes from its outputs.
        process_group: the ranks to average over; all of them by default.
        bucket_cap_mb: size in MiB at which a bucket is closed, as for `BucketedDDP`.
    """

    def __init__(self, module: nn.Module, process_group: comm.Group | None = None, bucket_cap_mb: float = 25) -> None:
        super().__init__()
        refuse_sparse_gradients(module)
        self.module = module
        self.process_group = comm.world(process_group)
        self.buckets = assign_buckets(trainable_parameters(module), int(bucket_cap_mb * 2**20))
        start_from_rank_0(module, self.process_group)
        self.bucket_of = {p: number for number, params in enumerate(self.buckets) for p in params}
        self.queue = LaunchQueue([len(params) for params in self.buckets])
        self.in_flight: list[InFlight] = []
        self.awaited: set[nn.Parameter] = set()  # no gradient in this backward so far
        self.reducing = False  # a backward that is to be reduced is under way
        self.unannounced = False  # by a hook of the last forward's outputs, a backward may come
        self.syncs = True
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.on_gradient)
        refuse_early_steps(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; the backward from its outputs is reduced, unless this is inside `no_sync`."""
        if self.reducing and not in_backward():
            self.forget_failed_backward()
        outputs = self.module(*inputs, **kwargs)
        found = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        self.unannounced = self.syncs and torch.is_grad_enabled() and not found
        if self.syncs:
            for tensor in found:
                tensor.register_hook(self.on_backward)
        return outputs

    def on_backward(self, _: Tensor) -> None:
        """The hook of every output: backward begins, unless another output has said so."""
        if torch.is_grad_enabled():
            self.unannounced = True  # a backward through this gradient need not come by the outputs
        if not self.reducing:
            self.reducing, self.awaited = True, set(self.bucket_of)
            self.queue.restart()
            at_end_of_backward(self.finish)

    def on_gradient(self, param: nn.Parameter) -> None:
        """The hook of every parameter: its gradient has been accumulated in `.grad`.

        Raises:
            RuntimeError: it is called twice in one backward, as by a reentrant checkpoint: the bucket may have been
                sent; or in a backward from a forward whose outputs were not found.
        """
        if not self.reducing:
            if self.unannounced:
                raise RuntimeError(
                    f"parameter {list(param.shape)} got a gradient in a backward that came by no output: let forward "
                    "return its tensors in lists, tuples, dicts or dataclasses, and add gradients of gradients to a "
                    "loss of outputs"
                )
            return
        if param not in self.awaited:
            raise RuntimeError(
                f"parameter {list(param.shape)} got a second gradient in one backward, its bucket may have left: use "
                "checkpoint(..., use_reentrant=False), or DistributedDataParallel(static_graph=True)"
            )
        self.awaited.remove(param)
        self.queue.missing[self.bucket_of[param]] -= 1
        self.queue.launch_full(self.launch)

    def launch(self, number: int) -> None:
        self.in_flight.append(start_bucket(self.buckets[number], self.process_group))

    def finish(self) -> None:
        """The end of backward: no gradient will come any more."""
        for p in list(self.awaited):
            self.on_gradient(p)
        while self.in_flight:
            finish_bucket(self.in_flight.pop(0))
        self.reducing = False

    def forget_failed_backward(self) -> None:
        """Wait for the reductions of a backward that raised an error, and drop its incomplete gradients."""
        while self.in_flight:
            self.in_flight.pop(0).reduction.wait()  # and not before that may its buffer go
        self.reducing = False

    def not_yet_averaged(self) -> list[nn.Parameter]:
        """The parameters with this rank's own gradients during backward: all, unless it is a backward of the module."""
        return list(self.bucket_of) if self.reducing or not self.syncs else []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward of each forward inside the `with` accumulate this rank's own gradients (section 3.2.4).

        The next backward of a forward outside reduces all that has been accumulated.
        """
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before
