"""Properties of a process group that a collective needs, looked up once."""

from __future__ import annotations

from weakref import ref

from torch import Tensor

from minifsdp import gloo, private
from minifsdp.gloo import Group


class GroupInfo:
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
    def of(op: str, tensor: Tensor, group: Group) -> tuple[GroupInfo, str]:
        """Of a group, and the name of what carries its messages where the tensor is; an error if nothing does."""
        info = _groups.get(ref(group)) or _groups.setdefault(ref(group, _groups.pop), GroupInfo(group))
        kind = "cpu" if tensor.is_cpu else tensor.device.type  # to ask for a device costs more than it seems
        try:
            if kind not in info.backends:
                info.backends[kind] = private.backend_of(group, tensor.device)
            return info, info.backends[kind]
        except RuntimeError:
            served = sorted(private.device_types_of(group))
            text = f"{op} of a tensor on {tensor.device}: move it, its process group serves {served}"
            raise ValueError(text) from None


_groups: dict[ref[Group], GroupInfo] = {}  # as a `WeakKeyDictionary`, whose own lookup is slower
