"""Uneven numbers of batches: a rank without batches takes part with zeros (torch/distributed/algorithms/join.py).

At each forward, a running rank announces that it is running, and in which collectives the others will have to take
part. A rank that has finished receives this message, takes part, and waits for the next message until no rank is
running. `model` is always a DistributedDataParallel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.ddp.buckets import Bucket, Reduction
from minifsdp.ddp.reducer import Reducer, to_sum
from minifsdp.ddp.sync import broadcast_from, named_tensors


class JoinConfig(NamedTuple):
    """Settings of a join context; torch's `Join` sets a tuple of its own with these names."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class RunningRanks:
    """The number of ranks that still have batches, counted at each forward without a wait of the host."""

    def __init__(self, group: comm.Group, device: torch.device) -> None:
        self.group = group
        self.number = torch.full((1,), float(group.size()), device=device)
        self.counting: Reduction = comm.Done()

    def count(self, me: bool) -> Tensor:
        """Take part in a count; the number [1] is there when `counting` has been waited for."""
        self.number = torch.full_like(self.number, float(me))
        self.counting = comm.all_reduce(self.number, self.group)
        return self.number

    def are_there(self) -> bool:
        """Take part in a count as one that has finished: is any rank running? The host waits."""
        number = self.count(False)
        self.counting.wait()
        return number.item() > 0


class MeanOfRunning:
    """A bucket on its way to the mean over the ranks that are running: N / their number times the mean over all."""

    def __init__(self, running: RunningRanks, bucket: Bucket, index: int, is_last: bool) -> None:
        self.running, self.bucket = running, bucket
        self.mean = to_sum(running.group, bucket, index, is_last)

    def wait(self) -> None:
        self.mean.wait()
        self.running.counting.wait()
        self.bucket.scale(self.running.group.size() / self.running.number)


class JoinHook:
    """The work of a finished rank, with the interface of torch's `JoinHook`."""

    def __init__(self, model: Any, divide_by_initial_world_size: bool) -> None:
        self.model = model
        self.reduce = model.reducer.reduce
        model.has_joined = True
        model.running_ranks = RunningRanks(model.process_group, model.device)
        if model.reducer.weight is not None and not divide_by_initial_world_size:
            model.reducer.reduce = partial(MeanOfRunning, model.running_ranks)

    def main_hook(self) -> None:
        """Take part in the collectives of a forward and its backward on the ranks that are running."""
        model = self.model
        model.reducer.before_forward()
        source, syncs_buffers, reduces = agree(model, -1, False, False).tolist()
        if syncs_buffers:
            named = named_tensors(model.module, True, model.parameters_to_ignore)
            broadcast_from(source, [named[name] for name in named if name.startswith("buffer ")], model.process_group)
        model.require_forward_param_sync = bool(reduces)
        if reduces:
            take_part_with_zeros(model.reducer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have finished: take the values of the last, of several the one with the highest rank."""
        model = self.model
        source = int(agree(model, model.process_group.rank() if is_last_joiner else -1))
        for tensor in named_tensors(model.module, model.forward_sync_buffers, model.parameters_to_ignore).values():
            broadcast_from(source, [tensor], model.process_group)
        self.restore()

    def restore(self) -> None:
        """Forwards after this are those of a model that does not join."""
        self.model._join_config = JoinConfig()
        self.model.reducer.reduce, self.model.reducer.joins = self.reduce, False


@contextmanager
def joining(model: Any, divide_by_initial_world_size: bool, config: JoinConfig) -> Iterator[None]:
    """Train inside the `with` on as many batches as this rank has, then take part in what the others still have."""
    hook = model.join_hook(divide_by_initial_world_size=divide_by_initial_world_size)
    model._join_config = config
    try:
        yield
        if config.enable:
            follow_running_ranks(model, hook)
    finally:
        hook.restore()


def announce_forward(model: Any, syncs_buffers: bool, reduces: bool) -> int:
    """Let ranks that have finished know what to take part in; returns the rank whose buffers all take."""
    config, group, running = model._join_config, model.process_group, model.running_ranks
    model.reducer.joins = True
    if reduces and model.reducer.expecting:
        raise RuntimeError(
            "inside join() a forward whose backward is to be reduced must be followed by that backward before the "
            "next forward: ranks that have finished take part in one after the other. Use no_sync() or no_grad() "
            "for the forwards that are not."
        )
    if config.is_first_joinable:
        running.count(True)
        if config.throw_on_early_termination:
            finished = torch.zeros(1, device=model.device)
            comm.all_reduce(finished, group).wait()
            if finished.item():
                raise RuntimeError(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
                    f"Without a batch: {finished.item():.0f} of {group.size()}."
                )
    source, *_ = agree(model, group.rank(), syncs_buffers, reduces)
    return int(source) if syncs_buffers else 0  # read only where it matters: reading it makes the host wait


def follow_running_ranks(model: Any, hook: JoinHook) -> None:
    """This rank has no batch left: take part in each forward of the others, until all have finished."""
    rank, forwards = model.process_group.rank(), 0
    while model.running_ranks.are_there():
        if model._join_config.throw_on_early_termination:
            comm.all_reduce(torch.ones(1, device=model.device), model.process_group).wait()
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


def agree(model: Any, *mine: int) -> Tensor:
    """The maximum over the ranks of each of these numbers."""
    # By fills and not by a copy from the host, for which it would wait.
    numbers = torch.cat([torch.full((1,), int(number), device=model.device) for number in mine])
    comm.all_reduce(numbers, model.process_group, comm.MAX).wait()
    return numbers


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
