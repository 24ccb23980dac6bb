"""The ranks over which a model is sharded, and those over which it is replicated."""

from __future__ import annotations

from typing import Any, NamedTuple

from minifsdp import comm, process_groups
from minifsdp.comm import Group
from minifsdp.fsdp.torch_api.options import ShardingStrategy
from minifsdp.kinds import check_mesh


class Groups(NamedTuple):
    """The process groups of a rank.

    Attributes:
        shard: the ranks that hold one model together; of a hybrid strategy, usually those of one host.
        replicate: the ranks that hold the same shard; only of a hybrid strategy.
        mesh: the device mesh that they come from, if any.
    """

    shard: Group
    replicate: Group | None = None
    mesh: Any = None

    @property
    def outermost_first(self) -> list[Group]:
        return [group for group in (self.replicate, self.shard) if group is not None]


def find_groups(strategy: ShardingStrategy, process_group: Any, device_mesh: Any, has_policy: bool) -> Groups:
    """The groups of a strategy: a process group, a pair of them, or a device mesh; by default all ranks.

    A hybrid strategy without any of these shards inside each host and replicates across hosts.

    Raises:
        ValueError: with torch's texts: what was given does not fit the strategy.
    """
    if isinstance(process_group, Groups):  # an outer instance's, handed down by its policy
        if device_mesh is None:
            return _inherited(strategy, process_group)
        process_group = None  # the policy has given this unit a mesh of its own
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    if device_mesh is not None:
        check_mesh("device_mesh", device_mesh)
        dims = 2 if strategy.is_hybrid else 1
        if device_mesh.ndim != dims:
            raise ValueError(
                f"Expected device_mesh to have ndim={dims} but got {device_mesh.ndim}: a hybrid strategy takes two "
                f"dimensions, any other one, such as device_mesh[name]; this is {strategy}"
            )
        found = (process_groups.mesh_group(device_mesh, dim) for dim in reversed(range(dims)))
        return Groups(*found)._replace(mesh=device_mesh)
    if not strategy.is_hybrid:
        if isinstance(process_group, tuple):
            raise ValueError(f"process_group is a tuple, as for hybrid strategies, but the strategy is {strategy}")
        return Groups(comm.world(process_group))
    match process_group:
        case (Group(), Group()):
            return Groups(*process_group)
        case None if has_policy:
            return Groups(*process_groups.host_groups())
        case None:
            raise _no_groups(strategy)
    raise ValueError(
        "Expected process_group to be passed in as either None or "
        f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(process_group)}"
    )


def _inherited(strategy: ShardingStrategy, groups: Groups) -> Groups:
    """For a unit inside, which may have a strategy of its own."""
    if strategy.is_hybrid and groups.replicate is None:
        raise _no_groups(strategy)
    if strategy is ShardingStrategy.NO_SHARD and groups.replicate is not None and groups.shard.size() > 1:
        raise ValueError(
            f"a unit with {strategy} in a hybrid model is replicated over all its ranks: let the policy give it a "
            "process_group of these"
        )
    return groups


def _no_groups(strategy: ShardingStrategy) -> ValueError:
    return ValueError(
        f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
    )
