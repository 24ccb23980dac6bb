"""The ranks as a grid, with one axis for each way to divide a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from minifsdp.words import check, check_kinds

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from minifsdp.comm import Group

AXES = ("pp", "dp", "cp", "ep", "tp")
"""Outermost first, as ranks are placed by default: neighbours, which are likeliest to share a host, are on the last
axis, whose messages are the most frequent."""


@dataclass(frozen=True)
class Mesh:
    """The number of ranks on each axis.

    Attributes:
        pp: pipeline parallelism: the ranks have different layers.
        dp: data parallelism: different rows of the batch.
        cp: context parallelism: different parts of the sequences. Since these ranks have different tokens, too, they
            and those of `dp` together average gradients, and share what data parallelism divides.
        ep: expert parallelism: different experts.
        tp: tensor parallelism: different parts of every layer.
        replicate: of the ranks with different tokens so many have the same shards (hybrid sharding); a divisor of `dp`.
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
        if self.replicate > 1 < self.cp and self.axes.index("cp") < self.axes.index("dp"):
            raise ValueError(f"replicate={self.replicate} with cp outside dp: name dp before cp in axes")

    def size(self, axis: str) -> int:
        """The number of ranks on an axis."""
        check("axis", axis, AXES)
        return getattr(self, axis)  # type: ignore[no-any-return]

    @property
    def ranks(self) -> int:
        """N, of all axes together."""
        return prod(self.size(axis) for axis in AXES)

    @property
    def with_different_tokens(self) -> int:
        """The number of ranks that average gradients, of `dp` and `cp` together."""
        return self.dp * self.cp

    @property
    def of_gradients(self) -> str:
        """The name of these ranks' axis: "dp_cp", if it is two."""
        return "cp" if self.dp == 1 < self.cp else "dp" if self.cp == 1 else "dp_cp"

    @property
    def of_shards(self) -> tuple[str, str]:
        """The names of the ranks with different shards of one copy, and of those with the same of several copies."""
        if self.replicate == 1:
            return self.of_gradients, ""
        return ("shard", "replicate") if self.replicate < self.dp else ("cp", "dp")

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

    def averaging(self, rank: int) -> Sequence[int]:
        """The ranks whose gradients are averaged with this one's, in the order of their shards."""
        return sorted(other for peer in self.peers(rank, "dp") for other in self.peers(peer, "cp"))

    def averaging_group(self) -> Group | None:
        """These ranks' process group; None: there is one of them. To be called on every rank."""
        return self._group(self.averaging) if self.with_different_tokens > 1 else None

    def _group(self, of_rank: Callable[[int], Sequence[int]]) -> Group:
        """This rank's process group, if each rank's has these ranks."""
        from minifsdp.process_groups import group_among

        return group_among(sorted({tuple(of_rank(rank)) for rank in range(self.ranks)}))

    def lines(self, rank: int) -> dict[str, Sequence[int]]:
        """By axis with several ranks those that lie along it with this one, in its order.

        Also "dp_cp", the ranks that average gradients, where these are two axes; and of hybrid sharding "shard", the
        ranks with different shards of one copy, and "replicate", those with the same.
        """
        all_together = list(self.averaging(rank))
        found: dict[str, Sequence[int]] = {axis: self.peers(rank, axis) for axis in self.divided}
        if self.with_different_tokens > 1:
            found[self.of_gradients] = all_together
        if self.replicate > 1:
            shards = len(all_together) // self.replicate
            place = all_together.index(rank)
            first = place - place % shards
            found["shard"] = all_together[first : first + shards]
            found["replicate"] = all_together[place % shards :: shards]
        return found

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups into which an axis of `lines` divides all ranks."""
        return sorted({tuple(self.lines(rank)[axis]) for rank in range(self.ranks)})

    def axis_of(self, ranks: Sequence[int], rank: int) -> str:
        """The axis of `lines` along which these ranks lie, this one among them; "" if there is none."""
        return next((axis for axis, those in self.lines(rank).items() if list(those) == list(ranks)), "")

    def _stride(self, axis: str) -> int:
        if axis not in self.axes:
            return self.ranks
        return prod(self.size(inner) for inner in self.axes[self.axes.index(axis) + 1 :])

    def device_meshes(self, device_type: str, also: Sequence[str] = ()) -> Mapping[str, DeviceMesh]:
        """This rank's mesh of one dimension along each axis with several ranks; to be called on every rank.

        That of "dp" has the ranks of "cp" as well, and of hybrid sharding two dimensions: "replicate" and "shard".
        Equal arguments give the same meshes. And axes of the same ranks have the same process group, whatever the rest
        of their meshes: torch takes equal parts of two meshes for one (`DeviceMesh.__eq__`), and its caches of DTensors
        answer with the first one.

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
        from torch.distributed.device_mesh import DeviceMesh

        from minifsdp.private import unwatched
        from minifsdp.process_groups import group_among

        averaging = self.with_different_tokens
        dims = {axis: {axis: self.size(axis)} for axis in self.axes if axis in {*self.divided, *also} - {"cp"}}
        if self.replicate > 1 or "replicate" in also:
            dims["dp"] = {"replicate": self.replicate, "shard": averaging // self.replicate}
        elif "dp" in dims or averaging > 1 or "cp" in also:
            dims["dp"] = {"dp": averaging}
        if not dims:
            return {}
        sizes = {name: size for of_axis in dims.values() for name, size in of_axis.items()}
        with unwatched():  # tables of ranks are no part of a model
            ranks = self._grid([*dims]).reshape(*sizes.values())
            lines = [ranks.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(ranks.shape)]
            groups: Any = [group_among(each) for each in lines]
            every = DeviceMesh.from_group(
                groups if groups[1:] else groups[0], device_type, ranks, mesh_dim_names=(*sizes,)
            )
            meshes = {axis: every[tuple(names)] for axis, names in dims.items()}
            if self.cp > 1 or "cp" in also:
                meshes["cp"] = DeviceMesh.from_group(self._group(lambda rank: self.peers(rank, "cp")), device_type)
            return meshes

    def _grid(self, axes: Sequence[str]) -> Tensor:
        """Rank numbers along these axes; for "dp", along "dp" and "cp" in their order."""
        import torch

        averaging = [axis for axis in self.axes if axis in ("dp", "cp")]
        along = [inner for axis in axes for inner in (averaging if axis == "dp" else [axis])]
        order = [*along, *(axis for axis in self.axes if axis not in along)]
        grid = torch.arange(self.ranks).view([self.size(axis) for axis in self.axes])
        return grid.permute([self.axes.index(axis) for axis in order])


def on_hosts(ranks: Sequence[int], per_host: int) -> Counter[int]:
    """The number of these ranks on each host; hosts have `per_host` ranks each, by their numbers."""
    return Counter(rank // per_host for rank in ranks)


def leaves_host(groups: Iterable[Sequence[int]], per_host: int) -> bool:
    """True if one of these groups has ranks on several hosts."""
    return any(len(on_hosts(group, per_host)) > 1 for group in groups)


def all_ranks(device_type: str) -> DeviceMesh:
    """A mesh of all ranks in one dimension without a name, as torch's `fully_shard` makes it."""
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp.comm import world

    return init_device_mesh(device_type, (world().size(),))


_made: WeakKeyDictionary[Any, dict[Any, Mapping[str, DeviceMesh]]] = WeakKeyDictionary()
"""By default process group."""
