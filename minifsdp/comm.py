"""The collectives on tensors: the one place that calls torch.distributed.

Every function starts a collective and returns a `Handle`; a buffer that it writes holds the result after
`Handle.wait()`, not before. On gloo `wait` blocks the host; on NCCL it makes the current stream wait, and the host
runs on.

Functions are looked up in `torch.distributed` when they are called, so that whoever counts calls by patching them
sees all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
SUM, MEAN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Call(NamedTuple):
    """One collective as this rank issued it.

    Attributes:
        op: the logical operation, such as `"all_gather"`.
        function: the name of the function in `torch.distributed`.
        group: the process group's name.
        order: how many calls this rank had issued on that group before; equal on all ranks of a correct program.
        payload: bytes of the full tensor: all shards of a gather, the input of a reduction.
        ranks: size of the group, N.
    """

    op: str
    function: str
    group: str
    order: int
    payload: int
    ranks: int

    @property
    def wire(self) -> float:
        """Bytes this rank sends by the ring algorithm (ring.py). Nominal: a backend may move more."""
        share = (self.ranks - 1) / self.ranks
        match self.op:
            case "all_reduce":
                return 2 * share * self.payload
            case "all_gather" | "reduce_scatter" | "all_to_all":
                return share * self.payload
            case "recv":
                return 0.0
        return float(self.payload) if self.ranks > 1 else 0.0


class Link(Protocol):
    """What may carry collectives in the backend's stead, for instance one that takes longer."""

    def submit(self, call: Call, collective: Callable[[], Any]) -> Any:
        """Run `collective` now or later, in order of submission; returns an object with `wait()`."""


Watcher = Callable[[Call, Literal["issue", "wait"]], AbstractContextManager[Any]]

link: Link | None = None
watchers: list[Watcher] = []  # each surrounds every issue and every wait, for those who count or time them
_logs: list[list[Call]] = []
_orders: Counter[str] = Counter()


class Handle:
    """A collective under way."""

    __slots__ = ("_work", "call")

    def __init__(self, call: Call, work: Any) -> None:
        self.call = call
        self._work = work

    def wait(self) -> None:
        with _watched(self.call, "wait"):
            self._work.wait()


class Done:
    """The handle of what needs no collective."""

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


def all_reduce(tensor: Tensor, group: Group, op: Any = SUM) -> Handle:
    """`tensor` [numel] <- its reduction over the ranks, in place, the same on all of them."""
    return _issue("all_reduce", "all_reduce", tensor, group, tensor, op=op, async_op=True)


def all_gather(output: Tensor, shard: Tensor, group: Group) -> Handle:
    """`output` [N * numel] <- every rank's `shard` [numel], in rank order. `shard` may be its own part of `output`."""
    return _issue("all_gather", _ALL_GATHER, output, group, output, shard, async_op=True)


def reduce_scatter(output: Tensor, full: Tensor, group: Group, op: Any = SUM) -> Handle:
    """`output` [numel] <- this rank's part of the reduction of `full` [N * numel]; may be that part of `full`."""
    return _issue("reduce_scatter", _REDUCE_SCATTER, full, group, output, full, op=op, async_op=True)


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
    """What each rank has, in rank order, on all of them: small, picklable, and not in a step, for the host waits."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def has_world() -> bool:
    """Whether there is a default process group."""
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


def wants_order_checked() -> bool:
    """Whether torch's debug level is DETAIL: by the variable TORCH_DISTRIBUTED_DEBUG, or by `set_debug_level`."""
    level: Any = dist.get_debug_level()  # type: ignore[attr-defined]
    return "DETAIL" in (level.name, os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper())


def store_of(group: Group, prefix: str) -> Any:
    """The key-value store of the group's ranks, for keys under `prefix`; to wait on it keeps nobody else from it."""
    store: Any = dist.distributed_c10d._world.pg_map[group][1]
    return dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]  # a connection of its own


def global_ranks(group: Group) -> list[int]:
    """The group's ranks as the default process group calls them."""
    return dist.get_process_group_ranks(group)


def mesh_group(mesh: Any, dim: int) -> Group:
    """This rank's process group along dimension `dim` of a `DeviceMesh`."""
    return mesh.get_group(mesh_dim=dim)  # type: ignore[no-any-return]


def host_groups() -> tuple[Group, Group]:
    """New groups: the ranks of this rank's host, and those of its place on all hosts.

    To be called on every rank. Hosts have `LOCAL_WORLD_SIZE` ranks each, as torchrun says; unset: there is one host.

    Raises:
        ValueError: the world does not divide into hosts of that size.
    """
    ranks = dist.get_world_size()
    size = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks % size:
        raise ValueError(f"{ranks} ranks do not make hosts of LOCAL_WORLD_SIZE={size}: pass process groups")
    inside = _new_group([list(range(low, low + size)) for low in range(0, ranks, size)])
    return inside, _new_group([list(range(place, ranks, size)) for place in range(size)])


def _new_group(of_all: list[list[int]]) -> Group:
    """This rank's of new groups. On NCCL, where kernels of both compete, those of the group go before computation."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if dist.get_backend() == "nccl" else None
    return dist.new_subgroups_by_enumeration(of_all, pg_options=options)[0]  # type: ignore[no-any-return]


def _issue(op: str, function: str, payload: Tensor, group: Group, /, *args: Any, **kwargs: Any) -> Handle:
    name, served = group.group_name, {device.type for device in group._device_types}
    if payload.device.type not in served:
        raise ValueError(f"{op} of a tensor on {payload.device}: move it, its process group serves {sorted(served)}")
    call = Call(op, function, name, _orders[name], payload.numel() * payload.element_size(), group.size())
    _orders[name] += 1
    for log in _logs:
        log.append(call)
    collective = partial(getattr(dist, function), *args, group=group, **kwargs)
    with _watched(call, "issue"):
        return Handle(call, collective() if link is None else link.submit(call, collective))


def _watched(call: Call, phase: Literal["issue", "wait"]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for watch in watchers:
        stack.enter_context(watch(call, phase))
    return stack
