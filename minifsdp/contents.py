"""Parameters in a flat buffer as state dicts see them: names, shapes; whole values, and this rank's parts of them.

    this rank's parts    [ ..w1 | b1 | w2.. ]       of the shard [P / N], or of its slices
        | gather: one all-gather          ^ parts_of: each rank copies its part, no communication
        v                                 |
    w1, b1, w2                                      whole, in the parameters' shapes, without padding

State dicts, optimizer states, descriptions and messages use this view of FSDP's units and of ZeRO's buckets. They need
not know how a unit is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.layout import Layout


class Owner(Protocol):
    """Provides the tensors that the optimizer updates: a shard, or slices of it."""

    shards: list[nn.Parameter]

    def slices(self, shard: Tensor) -> list[Tensor]:
        """The part of each of `shards` of a tensor [P / N]."""


class Contents:
    """The parameters in a buffer [P] that is divided among N ranks.

    Attributes:
        names: the parameters' names, for messages and state dicts.
        layout: the parameters' positions in the buffer.
        shard: this rank's part of them [P / N], as it is stored.
        ranks: number of shards, N.
        rank: the rank that holds this shard.

    Args:
        owner: the object to whose `shards` the parts belong.
        group: the ranks, if there is more than one shard.
        on: device of the gathered values.
    """

    def __init__(
        self,
        names: Sequence[str],
        layout: Layout,
        shard: nn.Parameter,
        owner: Owner,
        group: Group,
        on: torch.device,
    ) -> None:
        self.names, self.layout, self.shard = names, layout, shard
        self.ranks = layout.ranks
        self.rank = group.rank() if self.ranks > 1 else 0
        self._owner, self._group, self._device = owner, group, on

    @property
    def shapes(self) -> list[torch.Size]:
        return self.layout.shapes

    @property
    def padded(self) -> int:
        """Number of elements of all parameters and the padding, P."""
        return self.layout.padded

    def held(self) -> dict[nn.Parameter, list[int]]:
        """For each of the owner's shards the parameters in it, by index."""
        shards = self._owner.shards
        if len(shards) == len(self.shapes):
            return {p: [index] for index, p in enumerate(shards)}
        return {shards[0]: list(range(len(self.shapes)))}

    def gather(
        self, parts: Mapping[nn.Parameter, Tensor], dtype: torch.dtype, role: device.Role = "communication"
    ) -> tuple[Tensor, list[Tensor]]:
        """Whole tensors from the ranks' parts; to be called on every rank.

        Args:
            parts: this rank's values for the owner's shards; missing values count as zero.
            dtype: dtype of the parts, the same on all ranks.
            role: the role under which the buffer is counted.

        Returns:
            a buffer [P], for the caller to free, and a view of it for each parameter.
        """
        full = device.empty(self.padded, dtype, role, self._device)
        mine = self.layout.shard(full, self.rank).zero_()
        for p, part in zip(self._owner.shards, self._owner.slices(mine), strict=True):
            if p in parts:
                part.copy_(parts[p].detach())
        if self.ranks > 1:
            comm.all_gather(full, mine, self._group).wait()
        return full, self.layout.views(full)

    @torch.no_grad()
    def parts_of(self, wholes: Mapping[int, Tensor]) -> dict[nn.Parameter, Tensor]:
        """This rank's parts of whole tensors.

        Args:
            wholes: by the parameter's index; zero where there is nothing.

        Returns:
            a part for each of the owner's shards, on its device and in memory that nothing else uses.
        """
        dtype = reduce(torch.promote_types, (whole.dtype for whole in wholes.values()))
        shard = torch.zeros(self.shard.numel(), dtype=dtype, device=self.shard.device)
        for index, part in enumerate(self.layout.cut(shard, self.rank)):
            if index in wholes:
                part.copy_(self.part_of(index, wholes[index]))
        return dict(zip(self._owner.shards, self._owner.slices(shard), strict=True))

    def parts(self) -> dict[str, Tensor]:
        """This rank's part of each parameter, by name."""
        shards: list[Tensor] = [*self._owner.shards]
        if len(shards) == 1 and shards[0].numel() == self.shard.numel():
            shards = self.layout.cut(shards[0].detach(), self.rank)
        return dict(zip(self.names, shards, strict=True))

    def part_of(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part, 1-D, of a tensor of parameter `index`'s shape."""
        return self.layout.part(index, whole, self.rank)

    def store(self, full: Tensor) -> None:
        """Keep this rank's part of a buffer [P] of whole values."""
        self.shard.data.copy_(self.layout.shard(full, self.rank))

    def without_padding(self) -> tuple[Tensor, int]:
        """The shard as it lies, and how many elements all shards have, both without padding."""
        before = self.rank * self.shard.numel()
        return self.shard.detach()[: max(0, self.layout.numel - before)], self.layout.numel
