"""Over which ranks a model is sharded, and over which it is replicated."""

from __future__ import annotations

from typing import Any, NamedTuple

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.fsdp.options import ShardingStrategy


class Groups(NamedTuple):
    """The process groups of a rank.

    Attributes:
        shard: the ranks that hold one model together; of a hybrid strategy, usually those of one host.
        replicate: the ranks that hold the same shard; only of a hybrid strategy.
    """

    shard: Group
    replicate: Group | None = None


def find_groups(strategy: ShardingStrategy, process_group: Any, device_mesh: Any, has_policy: bool) -> Groups:
    """The groups of a strategy: a process group, a pair of them, or a device mesh; by default all ranks.

    A hybrid strategy without any of these shards inside each host and replicates across hosts.

    Raises:
        ValueError: with torch's texts: what was given does not fit the strategy.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    if not strategy.is_hybrid:
        if isinstance(process_group, tuple):
            raise ValueError(f"process_group is a tuple, as for hybrid strategies, but the strategy is {strategy}")
        return Groups(comm.mesh_group(device_mesh, 0) if device_mesh is not None else comm.world(process_group))
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}")
        return Groups(comm.mesh_group(device_mesh, 1), comm.mesh_group(device_mesh, 0))
    if process_group is not None:
        if not (isinstance(process_group, tuple) and len(process_group) == 2):
            raise ValueError(
                "Expected process_group to be passed in as either None or "
                f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(process_group)}"
            )
        return Groups(*process_group)
    if not has_policy:
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    return Groups(*comm.host_groups())
