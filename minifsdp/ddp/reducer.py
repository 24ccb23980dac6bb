"""The reduction of gradients during backward (torch/csrc/distributed/c10d/reducer.cpp)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minifsdp import comm
from minifsdp.autograd_hooks import BackwardEnd
from minifsdp.ddp.bucketed import assign_buckets
from minifsdp.ddp.buckets import Bucket, GradientBucket, Reduction, StagingBucket
from minifsdp.ddp.early_steps import check_unwritten, versions_of_hooked
from minifsdp.ddp.graph import leaves_behind, nodes_of
from minifsdp.ddp.messages import ready_twice, unfinished
from minifsdp.ddp.overlapped import LaunchQueue
from minifsdp.local_parts import local_of
from minifsdp.order import announce, next_on
from minifsdp.private import accumulates_in, in_backward

Reduce = Callable[[Bucket, int, bool], Reduction]
"""Starts the reduction of a full bucket; of its place in the order of launches, and whether it is the last."""


def to_sum(group: comm.Group, bucket: Bucket, index: int, is_last: bool) -> Reduction:
    """Reduce to the sum over the ranks, in place; it is the mean if the gradients were already divided."""
    return bucket.start_sum(group)


class Reducer:
    """Fills buckets while backward computes gradients, and starts their all-reduces, so that both run concurrently.

    The order of launches is that of the lesson's `LaunchQueue` (overlapped.py). This class adds the features of torch's
    class: a gradient is multiplied by 1 / N when it enters the bucket, whose memory becomes that of the gradient
    (buckets.py); and an error names any parameter that the first backward of a forward has not reached, and the cure.

        forward       hooks on the outputs, unless it is inside `no_sync`
        on_output     a backward from them begins; `autograd.grad` is none, because it accumulates nothing
        on_gradient   a gradient enters its bucket; full buckets are launched
        end           of that backward, not of a checkpoint's inside it: waits for all reductions

    A further backward of the same forward adds this rank's own gradients to means. All of it is reduced again, which
    leaves the means as they are, so a parameter that this backward does not reach takes part with what it has.

    Args:
        names: the parameters to reduce, with their names for messages.
        cap_bytes: size at which a bucket is closed, or one size for each bucket, the last of which applies to all
            others.
        group: the ranks to average over.
        gradient_as_bucket_view: whether the buckets are the gradients or copies of them.
        alone: parameters that are a bucket of their own, with its kind, as those whose gradients are sparse.

    Attributes:
        params: all parameters, whether or not a static graph uses them.
        queue: determines when a bucket is launched.
        reduce: the function that reduces a bucket.
        title: distinguishes this reducer from others of the group in messages.
        weight: the factor for gradients entering a bucket, 1 / N, so that their sum is the mean; None: no factor.
    """

    blame = "your module has parameters that were not used in producing loss."
    cure = "Pass find_unused_parameters=True to DistributedDataParallel, or let every output of forward enter the loss."

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        cap_bytes: int | Sequence[int],
        group: comm.Group,
        gradient_as_bucket_view: bool,
        alone: Mapping[nn.Parameter, type[Bucket]] = MappingProxyType({}),
    ) -> None:
        self.names = names
        self.params = list(names)
        self.group = group
        self.reduce: Reduce = partial(to_sum, group)
        self.weight: float | None = 1 / group.size()
        self.title = f"model {next_on(group)} of the group"
        self.kind = GradientBucket if gradient_as_bucket_view else StagingBucket
        self.cap_bytes = cap_bytes
        self.alone = alone
        self.build_buckets(names)
        self.first_sizes = self.sizes()
        self.forwards = 0  # whose backward is to be reduced
        self.unused_bytes = 0  # of parameters that the last backward left out on this rank
        self.expecting = False  # a backward that must be reduced is due, or under way
        self.backward_end, self.begun = BackwardEnd(), False  # of that backward
        self.repeats = False  # it is not the first since the forward
        self.joins = False  # ranks that have finished take part in one backward for each forward (torch_api/join.py)
        self.unannounced = False  # by a hook of the last forward's outputs, a backward may come
        self.ready: set[nn.Parameter] = set()  # entered their bucket in this backward
        self.used: set[nn.Parameter] = set()  # got a gradient since the last reduction
        self._register_hooks()

    def build_buckets(self, params: Iterable[nn.Parameter]) -> None:
        place = {p: number for number, p in enumerate(reversed(list(params)))}
        dense = assign_buckets([p for p in reversed(place) if p not in self.alone], self.cap_bytes)
        self.buckets: list[Bucket] = [self.kind(each) for each in dense]
        self.buckets += [kind([p]) for p, kind in self.alone.items() if p in place]
        self.buckets.sort(key=lambda bucket: place[bucket.params[0]])
        for index, bucket in enumerate(self.buckets):
            bucket.index = index
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.queue = LaunchQueue([len(bucket.params) for bucket in self.buckets])

    def sizes(self) -> list[int]:
        """Bytes of the buckets' parameters, in the order of the launches."""
        return [sum(local_of(p).nbytes for p in bucket.params) for bucket in self.buckets]

    def leave_to(self, reduce: Reduce) -> None:
        """Let a communication hook reduce the buckets, which then hold this rank's gradients without a factor."""
        self.reduce, self.weight = reduce, None

    def _register_hooks(self) -> None:
        # As in torch these are hooks of the nodes that accumulate, which run after those of the parameters: a hook that
        # a user gives a parameter, whenever that is, has the gradient of this rank, and the bucket what it makes of it.
        self.nodes = [get_gradient_edge(p).node for p in self.names]  # autograd forgets a node that nobody holds
        # The hooks must not keep a reducer alive whose model has been wrapped again, nor outlive it.
        reducer = weakref.proxy(self)
        handles: list[Any] = [
            node.register_hook(lambda _, incoming, p=p: reducer.on_gradient(p, *incoming))
            for node, p in zip(self.nodes, self.names, strict=True)
        ]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def prepare(self, outputs: Any) -> None:
        """Reduce each backward from these `outputs` of a forward."""
        self.expecting, self.repeats = True, False
        self.forwards += 1
        nodes = nodes_of(outputs)
        self.unannounced = not nodes
        for node in nodes:
            node.register_prehook(partial(self.on_output, next(leaves_behind([node]), None)))

    def on_output(self, leaf: Any, *_: Any) -> None:
        """The hook of each output: it gets its gradient, and so may the leaf behind it with this node."""
        if torch.is_grad_enabled():
            self.unannounced = True  # a backward through these gradients need not come by the outputs
        if not self.backward_end.is_due:
            self.backward_end.schedule(self.end)
        if not self.begun and leaf is not None and accumulates_in(leaf):
            self.begin()

    def begin(self) -> None:
        """A backward that is to be reduced begins."""
        if not self.backward_end.is_due:
            self.backward_end.schedule(self.end)
        self.repeats = not self.expecting
        if self.repeats and self.joins:
            raise RuntimeError(
                "inside join() a forward has one backward, in which ranks that have finished take part: add up the "
                "losses, or run all of them but the last inside no_sync()"
            )
        self.begun = self.expecting = True
        self.versions = versions_of_hooked(self.names)

    def on_gradient(self, param: nn.Parameter, incoming: Tensor | None) -> None:
        """The hook of each parameter: autograd has accumulated `incoming` in its `.grad`, and its hooks have run."""
        if not self.begun and (self.expecting or self.backward_end.is_due):
            self.begin()  # which no output has announced, or in which it had other leaves than this
        if (self.expecting and param in self.ready) or (self.unannounced and not self.expecting):
            raise ready_twice(self.names[param])
        if param.grad is not None:  # a function may give none, and a hook take it
            self.used.add(param)
        if self.expecting and self.is_complete(param):
            self.mark_ready(param, incoming)
        else:
            self.bucket_of[param].hold(param)

    def is_complete(self, param: nn.Parameter) -> bool:
        """True if backward will add nothing more to this gradient, to which it has just added."""
        return True

    def mark_ready(self, param: nn.Parameter, incoming: Tensor | None = None) -> None:
        self.ready.add(param)
        bucket, missing = self.bucket_of[param], self.queue.missing
        bucket.fill(param, param in self.used, self.weight, incoming)
        missing[bucket.index] -= 1
        if not missing[bucket.index]:
            self.queue.launch_full(lambda index: self.launch(self.buckets[index], index))

    def mark_all_ready_but(self, others: Collection[nn.Parameter]) -> None:
        """No gradient will come for any but these."""
        for p in self.names:
            if p not in others and p not in self.ready:
                self.mark_ready(p)

    def end(self) -> None:
        """The end of a backward that has come by the outputs of forward, or by parameters."""
        if self.begun and self.expecting:
            if self.repeats:
                self.mark_all_ready_but(())
            if len(self.ready) == len(self.names):
                self.finish()
                check_unwritten(self.versions, self.names)
        self.begun = False

    def reduce_accumulated(self) -> None:
        """Reduce all gradients as they are, without a backward; on all ranks."""
        self.prepare(())
        for p in reversed(self.names):
            self.mark_ready(p)
        self.finish()
        self.unannounced = False

    def launch(self, bucket: Bucket, index: int) -> None:
        """Start to reduce a bucket, or one that stands in for it (join.py)."""
        first, last = self.names[bucket.params[0]], self.names[bucket.params[-1]]
        # Here and not at the collective: that of a communication hook is not ours.
        again = " again, in a further backward from one forward" if self.repeats else ""  # others may be in the next
        announce("all-reduce", f"bucket {index} ({first} to {last}){again}", bucket.flat, self.group, self.title)
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
        self.expecting = False
        self.queue.restart()
        self.unused_bytes = sum(local_of(p).nbytes for p in self.params if p not in self.used)
        self.ready.clear()
        self.used.clear()

    def unused_on_all_ranks(self) -> set[nn.Parameter]:
        """The parameters whose `.grad` stays as it was."""
        return set()

    def before_forward(self) -> None:
        """Make sure that no reduction is left over from the last backward.

        Raises:
            RuntimeError: it has not reached all parameters; the error names them, and the cure.
        """
        if in_backward():  # a checkpoint around the model
            return
        self.begun = self.unannounced = False
        if self.ready:
            missing = [name for p, name in self.names.items() if p not in self.ready]
            raise unfinished(self.blame, self.cure, self.group.rank(), missing)
