"""A unit's parameters as those above it see them: names, shapes and sizes; whole values, and this rank's parts of them.

    this rank's parts    [ ..w1 | b1 | w2.. ]       of the shard [P / N], or of its slices
        | gather: one all-gather          ^ parts_of: each rank copies its part, no communication
        v                                 |
    w1, b1, w2                                      whole, in the parameters' shapes, without padding

State dicts, optimizer states, descriptions and messages ask here. They need not know that a unit is one flat parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.view import FlatView


class Contents:
    """The parameters in a flat parameter.

    Args:
        flat: the flat parameter.
        view: whose `shards` the parts belong to.
        group: the ranks that the flat parameter is sharded over, if it is.
        on: device of what is gathered.
    """

    def __init__(self, flat: FlatParameter, view: FlatView, group: Group, on: torch.device) -> None:
        self._flat, self._view, self._group, self._device = flat, view, group, on

    @property
    def names(self) -> list[str]:
        """The parameters' names inside the wrapped module; of a tied one the first."""
        return self._flat.names

    @property
    def shapes(self) -> list[torch.Size]:
        return self._flat.shapes

    @property
    def padded(self) -> int:
        """Number of elements of all parameters and the padding, P."""
        return self._flat.numel + self._flat.padding

    @property
    def shard(self) -> nn.Parameter:
        """This rank's part of them [P / N], as it is kept."""
        return self._flat.shard

    @property
    def ranks(self) -> int:
        """Number of shards, N."""
        return self._flat.ranks

    def held(self) -> dict[nn.Parameter, list[int]]:
        """For each of the view's shards the parameters in it, by index."""
        shards = self._view.shards
        if len(shards) == len(self.shapes):
            return {p: [index] for index, p in enumerate(shards)}
        return {shards[0]: list(range(len(self.shapes)))}

    def gather(
        self, parts: Mapping[nn.Parameter, Tensor], dtype: torch.dtype, role: device.Role = "communication"
    ) -> tuple[Tensor, list[Tensor]]:
        """Whole tensors from the ranks' parts; to be called on every rank.

        Args:
            parts: what this rank has for the view's shards; zero where there is nothing.
            dtype: of the parts, the same on all ranks.
            role: what the buffer counts as.

        Returns:
            a buffer [P], for the caller to free, and a view of it for each parameter.
        """
        full = device.empty(self.padded, dtype, role, self._device)
        mine = self._flat.mine(full).zero_()
        for p, part in zip(self._view.shards, self._view.slices(mine), strict=True):
            if p in parts:
                part.copy_(parts[p].detach())
        if self.ranks > 1:
            comm.all_gather(full, mine, self._group).wait()
        return full, self._flat.unflatten(full)

    @torch.no_grad()
    def parts_of(self, wholes: Mapping[int, Tensor]) -> dict[nn.Parameter, Tensor]:
        """This rank's parts of whole tensors.

        Args:
            wholes: by the parameter's index; zero where there is nothing.

        Returns:
            a part for each of the view's shards, on its device and in memory that nothing else uses.
        """
        dtype = reduce(torch.promote_types, (whole.dtype for whole in wholes.values()))
        shard = torch.zeros(self.shard.numel(), dtype=dtype, device=self.shard.device)
        for index, whole in wholes.items():
            low, high = self._flat.shard_bounds(index, self._flat.rank)
            shard[low:high].copy_(self.part_of(index, whole))
        return dict(zip(self._view.shards, self._view.slices(shard), strict=True))

    def part_of(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part, 1-D, of a tensor of parameter `index`'s shape."""
        return self._flat.part_of(index, whole)

    def store(self, full: Tensor) -> None:
        """Keep this rank's part of a buffer [P] of whole values."""
        self.shard.data.copy_(self._flat.mine(full))

    def without_padding(self) -> tuple[Tensor, int]:
        """The shard as it lies, and how many elements all shards have, both without padding."""
        before = self._flat.rank * self.shard.numel()
        return self.shard.detach()[: max(0, self._flat.numel - before)], self._flat.numel

    def buffers(self) -> dict[str, Tensor]:
        """The parameters' buffers: the unsharded one, used if gathered in the shard's dtype, and the shard."""
        return {"parameters": self._flat.full, "shard": self.shard}
