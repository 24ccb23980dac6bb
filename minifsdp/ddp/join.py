"""Uneven numbers of batches: a rank that has none left takes part with zeros (torch/distributed/algorithms/join.py).

A rank that is running says so at each forward, and what the others will have to take part in; a rank that has finished
listens, does that, and listens again, until none is running.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.ddp.buckets import Bucket, Reduction
from minifsdp.ddp.reducer import Reducer, to_sum
from minifsdp.ddp.sync import broadcast_from, named_tensors


class JoinConfig(NamedTuple):
    """What a join context has told a model; torch's `Join` leaves a tuple of its own with these names."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class RunningRanks:
    """How many ranks still have batches: counted anew at each forward, without the host waiting for the number."""

    def __init__(self, group: comm.Group, device: torch.device) -> None:
        self.group = group
        self.number = torch.full((1,), float(group.size()), device=device)
        self.counting: Reduction = comm.Done()

    def count(self, me: bool) -> Tensor:
        """Take part in a count; the number [1] is there when `counting` has been waited for."""
        self.number = torch.full_like(self.number, float(me))
        self.counting = comm.all_reduce(self.number, self.group)
        return self.number


class MeanOfRunning:
    """A bucket on its way to the mean over the ranks that are running: N / their number times the mean over all."""

    def __init__(self, running: RunningRanks, bucket: Bucket, index: int, is_last: bool) -> None:
        self.running, self.bucket = running, bucket
        self.mean = to_sum(running.group, bucket, index, is_last)

    def wait(self) -> None:
        self.mean.wait()
        self.running.counting.wait()
        self.bucket.scale(self.running.group.size() / self.running.number)


class JoinableModule(nn.Module):
    """A data-parallel model whose ranks may run out of batches one after the other.

    Torch's `Join` accepts it beside others, such as a `ZeroRedundancyOptimizer`: it has what `Joinable` asks for.
    """

    module: nn.Module
    process_group: comm.Group
    reducer: Reducer
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    device: torch.device

    _join_config: Any = JoinConfig()
    has_joined = False
    _running: RunningRanks

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train inside the `with` on as many batches as this rank has, one backward after each forward.

        When all ranks have left, every rank has the values of one that has seen the most batches. Its optimizer has
        taken no step meanwhile: the states of optimizers differ from then on.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks, so that all batches weigh
                the same; or else by the number of those that are running. A communication hook divides for itself.
            enable: False if the numbers are known to be even: nothing is communicated for it.
            throw_on_early_termination: end training on all ranks as soon as one has no batch left.

        Raises:
            RuntimeError: with `throw_on_early_termination`, where a rank has no batch left, on all ranks; or a forward
                comes before the backward of the one before it.
        """
        hook = self.join_hook(divide_by_initial_world_size=divide_by_initial_world_size)
        self._join_config = JoinConfig(enable, throw_on_early_termination, is_first_joinable=True)
        try:
            yield
            if enable:
                self._follow_running_ranks(hook)
        finally:
            hook.restore()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `Join` runs on a rank that has finished; `divide_by_initial_world_size` as in `join`."""
        return JoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which ranks count who is running."""
        return self.device

    @property
    def join_process_group(self) -> comm.Group:
        """The ranks that join."""
        return self.process_group

    def _follow_running_ranks(self, hook: JoinHook) -> None:
        rank, forwards = self.process_group.rank(), 0
        while self._any_running():
            if self._join_config.throw_on_early_termination:
                comm.all_reduce(torch.ones(1, device=self.device), self.process_group).wait()
                raise RuntimeError(f"Rank {rank} exhausted all inputs.")
            hook.main_hook()
            forwards += 1
            if forwards == 1000:
                warnings.warn(
                    f"Detected uneven input skew of greater than {forwards}. This means that rank {rank} has at least "
                    f"{forwards} fewer inputs than other currently-active ranks.",
                    stacklevel=2,
                )
        hook.post_hook(is_last_joiner=forwards == 0)

    def _any_running(self) -> bool:
        number = self._running.count(False)
        self._running.counting.wait()
        return number.item() > 0

    def _announce_forward(self, syncs_buffers: bool, reduces: bool) -> int:
        """Tell ranks that have finished what to take part in; returns the rank whose buffers all take."""
        if reduces and self.reducer.expecting:
            raise RuntimeError(
                "inside join() a forward whose backward is to be reduced must be followed by that backward before the "
                "next forward: ranks that have finished take part in one after the other. Use no_sync() or no_grad() "
                "for the forwards that are not."
            )
        if self._join_config.is_first_joinable:
            self._running.count(True)
            if self._join_config.throw_on_early_termination:
                finished = torch.zeros(1, device=self.device)
                comm.all_reduce(finished, self.process_group).wait()
                if finished.item():
                    raise RuntimeError(
                        "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
                        f"Without a batch: {finished.item():.0f} of {self.process_group.size()}."
                    )
        source, *_ = self._agree(self.process_group.rank(), syncs_buffers, reduces)
        return int(source) if syncs_buffers else 0  # read only where it matters: reading it makes the host wait

    def _agree(self, *mine: int) -> Tensor:
        """The maximum over the ranks of each of these numbers."""
        # By fills and not by a copy from the host, for which it would wait.
        numbers = torch.cat([torch.full((1,), int(number), device=self.device) for number in mine])
        comm.all_reduce(numbers, self.process_group, comm.MAX).wait()
        return numbers


class JoinHook:
    """What a rank that has finished does, with the interface of torch's `JoinHook`."""

    def __init__(self, model: JoinableModule, divide_by_initial_world_size: bool) -> None:
        self.model = model
        self.reduce = model.reducer.reduce
        model.has_joined = True
        model._running = RunningRanks(model.process_group, model.device)
        if model.reducer.weight is not None and not divide_by_initial_world_size:
            model.reducer.reduce = partial(MeanOfRunning, model._running)

    def main_hook(self) -> None:
        """Take part in the collectives of a forward and its backward on the ranks that are running."""
        model = self.model
        model.reducer.before_forward()
        source, syncs_buffers, reduces = model._agree(-1, False, False).tolist()
        if syncs_buffers:
            named = named_tensors(model.module, True, model.parameters_to_ignore)
            broadcast_from(source, [named[name] for name in named if name.startswith("buffer ")], model.process_group)
        model.require_forward_param_sync = bool(reduces)
        if reduces:
            take_part_with_zeros(model.reducer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have finished: take the values of the last, of several the one with the highest rank."""
        model = self.model
        source = int(model._agree(model.process_group.rank() if is_last_joiner else -1))
        for tensor in named_tensors(model.module, model.forward_sync_buffers, model.parameters_to_ignore).values():
            broadcast_from(source, [tensor], model.process_group)
        self.restore()

    def restore(self) -> None:
        """Forwards after this are those of a model that does not join."""
        self.model._join_config = JoinConfig()
        self.model.reducer.reduce = self.reduce


@torch.no_grad()
def take_part_with_zeros(reducer: Reducer) -> None:
    """Match the reductions of a backward on other ranks; this rank's gradients stay as they are."""
    reducer.used.clear()
    stand_ins = [bucket.of_zeros() for bucket in reducer.buckets]
    for index, bucket in enumerate(stand_ins):
        reducer.launch(bucket, index)
    reducer.unused_on_all_ranks()
    for bucket in stand_ins:
        bucket.reduction.wait()
        bucket.release()
