"""Process groups other than the default one, of a mesh or of a host, and properties of any group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.private import base_store_of, name_of, new_group_named

_parts: WeakKeyDictionary[Group, dict[tuple[int, ...], count[int]]] = WeakKeyDictionary()
"""By group and ranks in it, the numbers that are left for the names of new ones."""


def wants_order_checked() -> bool:
    """True if torch's debug level is DETAIL: by the variable TORCH_DISTRIBUTED_DEBUG, or by `set_debug_level`."""
    level: Any = dist.get_debug_level()  # type: ignore[attr-defined]
    return "DETAIL" in (level.name, os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper())


def store_of(group: Group, prefix: str) -> Any:
    """The key-value store of the group's ranks, for keys under `prefix`; waiting on it does not block other users."""
    return dist.PrefixStore(prefix, base_store_of(group).clone())  # type: ignore[attr-defined]  # a connection of its own


def has_store(group: Group) -> bool:
    """True if ranks share a store that can be waited on.

    The other ranks of torch's backend "fake" do not exist, nor do those of a group that torch does not know.
    """
    try:
        return bool(base_store_of(group).clone()) and str(dist.get_backend(group)) != "fake"
    except (KeyError, RuntimeError):
        return False


def global_ranks(group: Group) -> list[int]:
    """The group's ranks, numbered as in the default process group."""
    return dist.get_process_group_ranks(group)


def mesh_group(mesh: Any, dim: int) -> Group:
    """This rank's process group along dimension `dim` of a `DeviceMesh`."""
    return mesh.get_group(mesh_dim=dim)  # type: ignore[no-any-return]


def part_of_mesh(mesh: Any, size: int) -> Group:
    """A new group: this rank's among parts of so many ranks of the last dimension of a `DeviceMesh`.

    To be called on every rank of the mesh.
    """
    rows = mesh.mesh.view(-1, size).tolist()
    return _new_group(rows)


def duplicate_group(group: Group) -> Group:
    """A new group of the same ranks, with a separate communicator; to be called on each of them."""
    return part_of(group, range(group.size()))


def part_of(group: Group, ranks: Sequence[int]) -> Group:
    """A new group of some ranks of another; to be called on each of them.

    Its name is never used again. The ranks may be in different numbers of other groups, and a group with the name of
    one that has been closed would find the addresses of that one's connections.
    """
    number = next(_parts.setdefault(group, {}).setdefault(tuple(ranks), count(1)))
    everyone = global_ranks(group)
    name = f"{name_of(group)}/{'-'.join(map(str, ranks))} {number}"
    return new_group_named(name, [everyone[rank] for rank in ranks], _options())  # type: ignore[no-any-return]


def group_among(lines: Sequence[Sequence[int]]) -> Group:
    """This rank's of the groups into which all ranks are divided; the same one for equal arguments.

    To be called on every rank.
    """
    world = comm.world()
    if len(lines) == 1:
        return world
    made = _divided.setdefault(world, {})
    key = tuple(sorted(map(tuple, lines)))
    if key not in made:
        made[key] = _new_group([*map(list, lines)])
    return made[key]


_divided: WeakKeyDictionary[Group, dict[tuple[tuple[int, ...], ...], Group]] = WeakKeyDictionary()
"""By default group."""


def destroy(group: Group) -> None:
    """Close a group that was created here; collectives for which other ranks are still waiting fail."""
    dist.destroy_process_group(group)


def host_groups() -> tuple[Group, Group]:
    """New groups: the ranks on this rank's host, and the ranks with the same local rank on all hosts.

    To be called on every rank. Each host has `LOCAL_WORLD_SIZE` ranks, as set by torchrun; if unset, there is one host.

    Raises:
        ValueError: the number of ranks is not divisible by that size.
    """
    ranks = dist.get_world_size()
    size = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks % size:
        raise ValueError(f"{ranks} ranks do not make hosts of LOCAL_WORLD_SIZE={size}: pass process groups")
    inside = _new_group([list(range(low, low + size)) for low in range(0, ranks, size)])
    return inside, _new_group([list(range(place, ranks, size)) for place in range(size)])


def _new_group(of_all: list[list[int]]) -> Group:
    """This rank's of new groups."""
    return dist.new_subgroups_by_enumeration(of_all, pg_options=_options())[0]  # type: ignore[no-any-return]


def _options() -> Any:
    """On NCCL, where kernels of both compete, those of a group go before computation."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if dist.get_backend() == "nccl" else None
