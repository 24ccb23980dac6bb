"""Rung 3 of DDP: buckets reduced while backward still runs (Li et al., VLDB 2020, arXiv 2006.15704, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from minifsdp import comm
from minifsdp.ddp.bucketed import InFlight, assign_buckets, finish_bucket, start_bucket
from minifsdp.ddp.naive import refuse_sparse_gradients
from minifsdp.ddp.sync import start_from_rank_0, trainable_parameters
from minifsdp.private import at_end_of_backward, in_backward
from minifsdp.tree import tensors_in


class LaunchQueue:
    """The order in which all ranks launch their buckets: each when it is full *and* all before it have been launched.

    A collective is matched with those of the other ranks by its turn. Each rank makes its gradients in an order of its
    own, as its graph may differ; buckets launched as they fill would meet other buckets there, or hang (figure 3a of
    the paper).

    Args:
        sizes: the number of parameters of each bucket.

    Attributes:
        missing: how many gradients each bucket waits for in this backward.
        launched: how many buckets have been launched in it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.restart()

    def restart(self) -> None:
        """No gradient is there: a new backward."""
        self.missing = list(self.sizes)
        self.launched = 0

    def launch_full(self, launch: Callable[[int], None]) -> None:
        """Call `launch` with the number of each bucket whose turn has come. One gradient may let several go."""
        while self.launched < len(self.missing) and self.missing[self.launched] == 0:
            launch(self.launched)
            self.launched += 1


class OverlappedDDP(nn.Module):
    """`BucketedDDP` with the two halves of a reduction moved apart: launched during backward, waited for at its end.

    The last layers' gradients are there first, so their bucket travels while the earlier layers still compute. When
    `backward` returns, every `.grad` is the mean over the ranks: the training loop is that of one process.

        forward       a hook on the outputs will say when backward begins
        backward      a hook on each parameter counts its gradient; full buckets are launched, in their order
        end of it     what has not come is reduced as it is; all reductions are waited for and copied back

    A parameter that this rank's backward does not reach calls no hook (figure 3b). It takes part at the end of
    backward, with zero or the `.grad` that it has from `no_sync`, and holds up its bucket and those behind it until
    then. So no rank waits for ever, and as in the rungs below no `.grad` is None afterwards. torch raises an error at
    the next forward instead; with `find_unused_parameters=True` it walks through the graph, takes such a parameter for
    ready when backward begins, and leaves the `.grad` of one that no rank has used as it was (unused.py).

    Bytes: gradients 4Ψ for Ψ fp32 parameters, and as much for the buffers of all buckets, for none is waited for before
    the end of backward. The drop-in needs no second copy (buckets.py).

    Args:
        module: the model, as for `NaiveDDP`. All ranks run a backward from its outputs equally often.
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
        self.syncs = True
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; the backward from its outputs is reduced, unless this is inside `no_sync`."""
        if self.reducing and not in_backward():
            self.forget_failed_backward()
        outputs = self.module(*inputs, **kwargs)
        for tensor in tensors_in(outputs):
            if self.syncs and tensor.grad_fn is not None:
                tensor.register_hook(self.on_backward)
        return outputs

    def on_backward(self, _: Tensor) -> None:
        """The hook of every output: backward begins, unless another output has said so."""
        if not self.reducing:
            self.reducing, self.awaited = True, set(self.bucket_of)
            self.queue.restart()
            at_end_of_backward(self.finish)

    def on_gradient(self, param: nn.Parameter) -> None:
        """The hook of every parameter: its gradient has been accumulated in `.grad`.

        Raises:
            RuntimeError: a second time in one backward, as in a reentrant checkpoint: its bucket may have left.
        """
        if not self.reducing:
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
        """One that raised has left gradients that are not all there: let its reductions end, and drop them."""
        while self.in_flight:
            self.in_flight.pop(0).reduction.wait()  # and not before that may its buffer go
        self.reducing = False

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
