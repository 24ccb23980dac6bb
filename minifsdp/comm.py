"""The collectives on tensors; only this file and gloo.py call torch.distributed.

Every function starts a collective and returns a `Handle`; a buffer that it writes holds the result after
`Handle.wait()`, not before. On gloo `wait` blocks the host; on NCCL it makes the current stream wait, and the host
runs on.

Functions are looked up in `torch.distributed` at each call, so that a tool that counts calls by patching these
functions sees all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from minifsdp import device, gloo, private
from minifsdp.calls import Call as Call
from minifsdp.calls import Label as Label

Group = dist.ProcessGroup
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


class _GroupInfo:
    """Cached properties of a process group, and the number of calls that this rank has issued on it."""

    __slots__ = ("_connections", "backends", "calls", "name", "ranks")

    def __init__(self, group: Group) -> None:
        self.name, self.ranks, self.calls = private.name_of(group), group.size(), 0
        self._connections: gloo.Connections | None = None
        gloo.wanted()  # to refuse what it cannot be at the first collective, of whatever kind
        self.backends: dict[str, str] = {}  # what carries messages, by the kind of device that tensors are on

    def connections(self, group: Group, backend: str) -> gloo.Connections:
        """The groups that messages of ours take. On gloo the first call makes one and waits for all ranks of this one:
        to be called as a part of a collective, so that who checks their order has seen before that all ranks come.
        """
        if backend != "gloo":
            return gloo.Connections(group, group)
        if self._connections is None:
            self._connections = gloo.Connections.of(group)
        return self._connections

    @staticmethod
    def of(op: str, tensor: Tensor, group: Group) -> tuple[_GroupInfo, str]:
        """Of a group, and the name of what carries its messages where the tensor is; an error if nothing does."""
        info = _groups.get(group) or _groups.setdefault(group, _GroupInfo(group))
        kind = "cpu" if tensor.is_cpu else tensor.device.type  # to ask for a device costs more than it seems
        try:
            if kind not in info.backends:
                info.backends[kind] = private.backend_of(group, tensor.device)
            return info, info.backends[kind]
        except RuntimeError:
            served = sorted(private.device_types_of(group))
            text = f"{op} of a tensor on {tensor.device}: move it, its process group serves {served}"
            raise ValueError(text) from None


_groups: WeakKeyDictionary[Group, _GroupInfo] = WeakKeyDictionary()


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
    info, _ = _GroupInfo.of("all_reduce", tensor, group)
    reduction = partial(dist.all_reduce, tensor, op=op, group=group, async_op=True)
    return _start(info, "all_reduce", "all_reduce", tensor, reduction, label)


def all_gather(output: Tensor, shard: Tensor, group: Group, label: Label | None = None) -> Handle:
    """`output` [N * numel] <- every rank's `shard` [numel], in rank order. `shard` may be its own part of `output`."""
    info, backend = _GroupInfo.of("all_gather", output, group)
    if gloo.gathers_by_broadcasts(backend):
        broadcasts = partial(gloo.gather_by_broadcasts, output, shard, partial(info.connections, group, backend))
        return _start(info, "all_gather", "broadcast", output, broadcasts, label)
    gather = partial(getattr(dist, _ALL_GATHER), output, shard, group, True)
    return _start(info, "all_gather", _ALL_GATHER, output, gather, label)


def reduce_scatter(output: Tensor, full: Tensor, group: Group, op: Any = SUM, label: Label | None = None) -> Handle:
    """`output` [numel] <- this rank's part of the reduction of `full` [N * numel]; may be that part of `full`."""
    info, backend = _GroupInfo.of("reduce_scatter", full, group)
    if not gloo.reduces_by_all_to_all(backend, info.ranks) or op not in (SUM, MEAN):
        reduction = partial(getattr(dist, _REDUCE_SCATTER), output, full, op, group, True)
        return _start(info, "reduce_scatter", _REDUCE_SCATTER, full, reduction, label)
    parts = gloo.parts_of(full, output, info.ranks)
    received = device.empty(full.numel() - output.numel(), full.dtype, "communication", full.device)
    received = received.view(info.ranks - 1, *output.shape)
    exchange = partial(gloo.exchange, received, parts, partial(info.connections, group, backend), info.calls)
    handle = _start(info, "reduce_scatter", "isend", full, exchange, label)
    handle.then = partial(gloo.sum_parts, output, received, parts[group.rank()], group.rank(), op == MEAN)
    return handle


def all_to_all(output: Tensor, tensor: Tensor, group: Group) -> Handle:
    """Part r of `output` [N * numel] <- this rank's part of rank r's `tensor` [N * numel]."""
    return _issue("all_to_all", "all_to_all_single", tensor, group, output, tensor, async_op=True)


def broadcast(tensor: Tensor, source: int, group: Group) -> Handle:
    """`tensor` on every rank <- `tensor` of rank `source` of the group."""
    return _issue("broadcast", "broadcast", tensor, group, tensor, group_src=source, async_op=True)


def reduce(tensor: Tensor, target: int, group: Group, op: Any = SUM) -> Handle:
    """`tensor` on rank `target` of the group <- the reduction; on the other ranks its content is then undefined."""
    return _issue("reduce", "reduce", tensor, group, tensor, group_dst=target, op=op, async_op=True)


def send(tensor: Tensor, target: int, group: Group) -> Handle:
    """Send `tensor` to rank `target` of the group, which must `recv` it. `tensor` must not change before `wait`."""
    return _issue("send", "isend", tensor, group, tensor, group_dst=target)


def recv(tensor: Tensor, source: int, group: Group) -> Handle:
    """`tensor` <- what rank `source` of the group sends."""
    return _issue("recv", "irecv", tensor, group, tensor, group_src=source)


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
    info, _ = _GroupInfo.of(op, payload, group)
    return _start(info, op, function, payload, partial(getattr(dist, function), *args, group=group, **kwargs))


def _start(
    info: _GroupInfo,
    op: str,
    function: str,
    payload: Tensor,
    collective: Callable[[], Any],
    label: Label | None = None,
) -> Handle:
    order, info.calls = info.calls, info.calls + 1
    if link is None and not observers and not _logs:
        return Handle(None, collective())  # saves the description, which costs as much as the message
    call = Call(op, function, info.name, order, payload.nbytes, info.ranks, payload.dtype, label)
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
