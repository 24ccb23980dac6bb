"""What several exercises of lab 02 share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.course.workshop.late import link_of
from minifsdp.instruments.launch import rank_device

SECONDS = 8.0
THROUGH_COMM = "one collective through `comm`, which keeps this log; it does not see torch.distributed called directly"


def draw(seed: int, rank: int, *shape: int) -> Tensor:
    """The same numbers wherever it is called."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def parameter(value: Tensor, grad: Tensor | None) -> nn.Parameter:
    param = nn.Parameter(value.to(rank_device()))
    param.grad = None if grad is None else grad.to(rank_device())
    return param


def told(calls: list[comm.Call]) -> list[str]:
    return [f"{call.op} of {call.payload} bytes" for call in calls]


@contextmanager
def phases() -> Iterator[list[str]]:
    """ "issue" and "wait" of every collective inside the `with`, in order."""
    seen: list[str] = []

    @contextmanager
    def watch(call: comm.Call, phase: str) -> Iterator[None]:
        seen.append(phase)
        yield

    comm.observers.append(watch)
    try:
        yield seen
    finally:
        comm.observers.remove(watch)


class Travelling:
    """An all-reduce that has taken its tensor's content along and puts the result there when it is waited for."""

    def __init__(self, tensor: Tensor, start: Callable[[Tensor], Any]) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.unwritten = int(tensor.isnan().sum())
        self.changed = False  # by others, between issue and wait
        self.result = tensor.detach().clone()
        self.work = start(self.result)

    def wait(self) -> None:
        self.work.wait()
        self.changed = self.tensor._version != self.version
        with torch.no_grad():
            self.tensor.copy_(self.result)


@contextmanager
def travelling() -> Iterator[list[Travelling]]:
    """All all-reduces inside the `with`, as late as they may be: what a racy answer does is the same each time."""
    real, seen = dist.all_reduce, []

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Travelling:
        seen.append(Travelling(tensor, lambda copy: real(copy, *args, **kwargs)))
        return seen[-1]

    dist.all_reduce = all_reduce
    try:
        with link_of(None):
            yield seen
    finally:
        dist.all_reduce = real


def group_of_one() -> comm.Group:
    """This rank alone. Every rank calls this."""
    alone: list[comm.Group] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]


def bucket_of_rank(seed: int, rank: int, size: int) -> list[Tensor | None]:
    """The gradients of a bucket's three parameters; rank 0 has none for the second."""
    grads = [draw(seed, rank, size, 3), draw(seed + 1, rank, 2 * size), draw(seed + 2, rank, 2, 2)]
    return [grads[0], None if rank == 0 else grads[1], grads[2]]


def make_bucket(seed: int, rank: int, size: int) -> list[nn.Parameter]:
    grads = bucket_of_rank(seed, rank, size)
    shapes = [(size, 3), (2 * size,), (2, 2)]
    return [parameter(draw(seed + 9, rank, *shape), grad) for shape, grad in zip(shapes, grads, strict=True)]
