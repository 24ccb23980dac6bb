"""The collectives on tensors; only this file and gloo.py call torch.distributed.

Every function starts a collective and returns a `Handle`; a buffer that it writes holds the result after
`Handle.wait()`, not before. On gloo `wait` blocks the host; on NCCL it makes the current stream wait, and the host
runs on.

Functions are looked up in `torch.distributed` at each call, so that a tool that counts calls by patching these
functions sees all of them. Messages between two ranks are an exception: `isend` and `irecv` add only checks, so `send`
and `recv` call the process group, unless somebody watches or `MINIFSDP_COLLECTIVES` is `native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import device, gloo
from minifsdp.calls import Call as Call
from minifsdp.calls import Label as Label
from minifsdp.group_info import GroupInfo

Group = gloo.Group
SUM, MEAN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Link(Protocol):
    """A substitute for the backend that carries collectives, for instance a slower one."""

    def submit(self, call: Call, collective: Callable[[], Any]) -> Any:
        """Run `collective` now or later, in order of submission; returns an object with `wait()`."""


Observer = Callable[[Call, Literal["issue", "wait"]], AbstractContextManager[Any]]

link: Link | None = None
observers: list[Observer] = []  # each surrounds every issue and every wait, for those who count or time them
_logs: list[list[Call]] = []


class Handle:
    """A collective in progress; an unwatched one has no `call`."""

    __slots__ = ("_work", "call", "then")

    def __init__(self, call: Call | None, work: Any) -> None:
        self.call = call
        self._work = work
        self.then: Callable[[], None] | None = None  # what this rank does with what has arrived

    def wait(self) -> None:
        if self.call is None or not observers:
            self._work.wait()
        else:
            with _observed(self.call, "wait"):
                self._work.wait()
        if self.then is not None:
            then, self.then = self.then, None
            then()


class Done:
    """The handle of an operation that needs no collective."""

    def wait(self) -> None: ...


@contextmanager
def record() -> Iterator[list[Call]]:
    """Log the calls that are issued inside the `with`."""
    log: list[Call] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]


def all_reduce(tensor: Tensor, group: Group, op: Any = SUM, label: Label | None = None) -> Handle:
    """`tensor` [numel] <- its reduction over the ranks, in place, the same on all of them."""
    info, _ = GroupInfo.of("all_reduce", tensor, group)
    reduction = partial(dist.all_reduce, tensor, op=op, group=group, async_op=True)
    return _start(info, "all_reduce", "all_reduce", tensor, reduction, label)


def all_gather(output: Tensor, shard: Tensor, group: Group, label: Label | None = None) -> Handle:
    """`output` [N * numel] <- every rank's `shard` [numel], in rank order. `shard` may be its own part of `output`."""
    info, backend = GroupInfo.of("all_gather", output, group)
    if gloo.gathers_by_broadcasts(backend):
        broadcasts = partial(gloo.gather_by_broadcasts, output, shard, partial(info.connections, group, backend))
        return _start(info, "all_gather", "broadcast", output, broadcasts, label)
    gather = partial(getattr(dist, _ALL_GATHER), output, shard, group, True)
    return _start(info, "all_gather", _ALL_GATHER, output, gather, label)


def reduce_scatter(
    output: Tensor,
    full: Tensor,
    group: Group,
    op: Any = SUM,
    label: Label | None = None,
    role: device.Role | None = "communication",
) -> Handle:
    """`output` [numel] <- this rank's part of the reduction of `full` [N * numel]; may be that part of `full`.

    `role` is that of a buffer that a backend may need; None: it is counted with the activations.
    """
    info, backend = GroupInfo.of("reduce_scatter", full, group)
    if not gloo.reduces_by_all_to_all(backend, info.ranks) or op not in (SUM, MEAN):
        reduction = partial(getattr(dist, _REDUCE_SCATTER), output, full, op, group, True)
        return _start(info, "reduce_scatter", _REDUCE_SCATTER, full, reduction, label)
    parts = gloo.parts_of(full, output, info.ranks)
    received = device.empty(full.numel() - output.numel(), full.dtype, role, full.device)
    received = received.view(info.ranks - 1, *output.shape)
    exchange = partial(gloo.exchange, received, parts, partial(info.connections, group, backend), info.calls)
    handle = _start(info, "reduce_scatter", "isend", full, exchange, label)
    handle.then = partial(gloo.sum_parts, output, received, parts[group.rank()], group.rank(), op == MEAN)
    return handle


def all_to_all(
    output: Tensor,
    tensor: Tensor,
    group: Group,
    arriving: list[int] | None = None,
    leaving: list[int] | None = None,
) -> Handle:
    """Part r of `output` <- this rank's part of rank r's `tensor`, both [N * numel].

    Where parts are not equal, `arriving` has the number of elements from each rank, and `leaving` that to each rank.
    """
    return _issue("all_to_all", "all_to_all_single", tensor, group, output, tensor, arriving, leaving, async_op=True)


def broadcast(tensor: Tensor, source: int, group: Group) -> Handle:
    """`tensor` on every rank <- `tensor` of rank `source` of the group."""
    return _issue("broadcast", "broadcast", tensor, group, tensor, group_src=source, async_op=True)


def reduce(tensor: Tensor, target: int, group: Group, op: Any = SUM) -> Handle:
    """`tensor` on rank `target` of the group <- the reduction; on the other ranks its content is then undefined."""
    return _issue("reduce", "reduce", tensor, group, tensor, group_dst=target, op=op, async_op=True)


def send(tensor: Tensor, target: int, group: Group) -> Handle:
    """Send `tensor` to rank `target` of the group, which must `recv` it. `tensor` must not change before `wait`."""
    return _message("send", "isend", tensor, target, group)


def recv(tensor: Tensor, source: int, group: Group) -> Handle:
    """`tensor` <- what rank `source` of the group sends."""
    return _message("recv", "irecv", tensor, source, group)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every rank's object, in rank order, on all ranks: small, picklable, not inside a step, since the host waits."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def has_world() -> bool:
    """True if there is a default process group."""
    return dist.is_initialized()


def world(group: Group | None = None) -> Group:
    """`group`, or the default process group.

    Raises:
        RuntimeError, TypeError: there is no default process group yet, or `group` is none.
    """
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group() first, or start ranks with launch()"
        )
    if not (group is None or hasattr(group, "rank")):
        raise TypeError(f"process_group={group!r}: give a torch.distributed.ProcessGroup")
    return group or dist.group.WORLD  # type: ignore[return-value]


def _issue(op: str, function: str, payload: Tensor, group: Group, /, *args: Any, **kwargs: Any) -> Handle:
    info, _ = GroupInfo.of(op, payload, group)
    return _start(info, op, function, payload, partial(getattr(dist, function), *args, group=group, **kwargs))


def _message(op: str, function: str, tensor: Tensor, peer: int, group: Group) -> Handle:
    info, _ = GroupInfo.of(op, tensor, group)
    if link is not None or observers or _logs or gloo.wanted() == "native":
        call = partial(getattr(dist, function), tensor, group=group)
        keyword = "group_dst" if op == "send" else "group_src"
        return _start(info, op, function, tensor, partial(call, **{keyword: peer}), peer=peer)
    info.calls += 1
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return Handle(None, getattr(group, op)([parts], peer, 0))


def _start(
    info: GroupInfo,
    op: str,
    function: str,
    payload: Tensor,
    collective: Callable[[], Any],
    label: Label | None = None,
    peer: int | None = None,
) -> Handle:
    order, info.calls = info.calls, info.calls + 1
    if link is None and not observers and not _logs:
        return Handle(None, collective())  # saves the description, which costs as much as the message
    call = Call(op, function, info.name, order, payload.nbytes, info.ranks, payload.dtype, label, peer)
    for log in _logs:
        log.append(call)
    if link is not None:
        collective = partial(link.submit, call, collective)
    if not observers:
        return Handle(call, collective())
    with _observed(call, "issue"):
        return Handle(call, collective())


def _observed(call: Call, phase: Literal["issue", "wait"]) -> AbstractContextManager[Any]:
    with ExitStack() as stack:
        for observe in observers:
            stack.enter_context(observe(call, phase))
        return stack.pop_all()
