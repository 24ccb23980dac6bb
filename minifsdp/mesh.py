"""The ranks as a grid, with one axis for each way to divide a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from minifsdp.words import check, check_kinds

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "cp", "ep", "tp")
"""Outermost first, as ranks are placed by default: neighbours, which are likeliest to share a host, are on the last
axis, whose messages are the most frequent."""


@dataclass(frozen=True)
class Mesh:
    """The number of ranks on each axis.

    Attributes:
        pp: pipeline parallelism: the ranks have different layers.
        dp: data parallelism: different rows of the batch.
        cp: context parallelism: different parts of the sequences.
        ep: expert parallelism: different experts.
        tp: tensor parallelism: different parts of every layer.
        replicate: of the `dp` ranks so many have the same shards (hybrid sharding); a divisor of `dp`.
        axes: outermost first: rank numbers count along the last one. Those that are left out have one rank.

    Raises:
        ValueError: a size is below one, `replicate` does not divide `dp`, or `axes` lacks one.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    replicate: int = 1
    axes: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        check_kinds(self)
        for axis in AXES:
            if self.size(axis) < 1:
                raise ValueError(f"{axis}={self.size(axis)}: an axis has at least 1 rank")
        if self.replicate < 1 or self.dp % self.replicate:
            raise ValueError(f"replicate={self.replicate} of dp={self.dp} ranks: choose a divisor of {self.dp}")
        left_out = [axis for axis in AXES if axis not in self.axes]
        if len(set(self.axes)) < len(self.axes) or not set(self.axes) <= set(AXES):
            raise ValueError(f"axes={'/'.join(self.axes)}: choose from {', '.join(AXES)}, each once")
        if wide := [axis for axis in left_out if self.size(axis) > 1]:
            raise ValueError(f"axes={'/'.join(self.axes)}: {wide[0]} has {self.size(wide[0])} ranks: say where")

    def size(self, axis: str) -> int:
        """The number of ranks on an axis."""
        check("axis", axis, AXES)
        return getattr(self, axis)  # type: ignore[no-any-return]

    @property
    def ranks(self) -> int:
        """N, of all axes together."""
        return prod(self.size(axis) for axis in AXES)

    @property
    def divided(self) -> tuple[str, ...]:
        """The axes with more than one rank, outermost first."""
        return tuple(axis for axis in self.axes if self.size(axis) > 1)

    def place(self, rank: int, axis: str) -> int:
        """The position on an axis of a rank, numbered as in the default process group."""
        return rank // self._stride(axis) % self.size(axis)

    def peers(self, rank: int, axis: str) -> Sequence[int]:
        """The ranks that differ from this one on this axis only, and itself."""
        stride, size = self._stride(axis), self.size(axis)
        first = rank - self.place(rank, axis) * stride
        return range(first, first + size * stride, stride)

    def axis_of(self, ranks: Sequence[int], rank: int) -> str:
        """The axis along which these ranks lie, this one among them; "" if there is none.

        Of hybrid sharding "shard" for the ranks with different shards of one copy, "replicate" for those with the same.
        """
        copies = {"dp": self.peers(rank, "dp")}
        if self.replicate > 1:
            shards = self.dp // self.replicate
            place = self.place(rank, "dp")
            first = place - place % shards
            copies["shard"] = copies["dp"][first : first + shards]
            copies["replicate"] = copies["dp"][place % shards :: shards]
        peers = {axis: self.peers(rank, axis) for axis in self.divided} | copies
        return next((axis for axis, those in peers.items() if list(those) == list(ranks)), "")

    def _stride(self, axis: str) -> int:
        if axis not in self.axes:
            return self.ranks
        return prod(self.size(inner) for inner in self.axes[self.axes.index(axis) + 1 :])

    def device_meshes(self, device_type: str, also: Sequence[str] = ()) -> Mapping[str, DeviceMesh]:
        """This rank's mesh of one dimension along each axis with several ranks; to be called on every rank.

        Of hybrid sharding, that of "dp" has two: "replicate" and "shard". Equal arguments give the same meshes. And
        axes of the same ranks have the same process group, whatever the rest of their meshes: torch takes equal parts
        of two meshes for one (`DeviceMesh.__eq__`), and its caches of DTensors answer with the first one.

        Args:
            device_type: "cpu" or "cuda".
            also: axes that are wanted even if they have one rank; "replicate": both dimensions of "dp", likewise.

        Raises:
            ValueError: there is another number of ranks, or no such axis.
        """
        from minifsdp.comm import world

        for axis in also:
            check("also", axis, (*AXES, "replicate"))
        if self.ranks != world().size() and (self.divided or also):
            raise ValueError(f"{self} has {self.ranks} ranks, and there are {world().size()}: choose other sizes")
        made = _made.setdefault(world(), {})
        key = self, device_type, tuple(also)
        if key not in made:
            made[key] = self._new_device_meshes(device_type, also)
        return made[key]

    def _new_device_meshes(self, device_type: str, also: Sequence[str]) -> dict[str, DeviceMesh]:
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        from minifsdp.private import unwatched
        from minifsdp.process_groups import group_among

        dims = {axis: {axis: self.size(axis)} for axis in self.axes if axis in {*self.divided, *also}}
        if self.replicate > 1 or "replicate" in also:
            dims["dp"] = {"replicate": self.replicate, "shard": self.dp // self.replicate}
        if not dims:
            return {}
        sizes = {name: size for of_axis in dims.values() for name, size in of_axis.items()}
        with unwatched():  # tables of ranks are no part of a model
            ranks = torch.arange(self.ranks).view(*sizes.values())
            lines = [ranks.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(ranks.shape)]
            groups: Any = [group_among(each) for each in lines]
            every = DeviceMesh.from_group(
                groups if groups[1:] else groups[0], device_type, ranks, mesh_dim_names=(*sizes,)
            )
            return {axis: every[tuple(names)] for axis, names in dims.items()}


def all_ranks(device_type: str) -> DeviceMesh:
    """A mesh of all ranks in one dimension without a name, as torch's `fully_shard` makes it."""
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp.comm import world

    return init_device_mesh(device_type, (world().size(),))


_made: WeakKeyDictionary[Any, dict[Any, Mapping[str, DeviceMesh]]] = WeakKeyDictionary()
"""By default process group."""
