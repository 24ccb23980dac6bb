"""`use_orig_params=True`: the optimizer sees the original parameters, each as the slice of the shard that is its own.

    shard of rank r   [ ..w1 | b1 | w2.. ]      w1, b1, w2 keep their names and their Parameter objects;
                        1-D slices, of no elements where another rank has them

So parameters of one unit may be frozen one by one, and be in optimizer groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.flat_param import Place
from minifsdp.fsdp.accumulated import AccumulatedUnit
from minifsdp.fsdp.recast import RecastUnit
from minifsdp.fsdp.strided import StridedFlatParameter
from minifsdp.fsdp.unit import SHARDED

ALIGNMENT = 16  # bytes; vectorised kernels want it of the slices


class AlignedFlatParameter(StridedFlatParameter):
    """A flat parameter in which every parameter begins at a multiple of 16 bytes, when it is gathered.

    `sizes` alternates between parameters and the gaps behind them, the last of which is the padding; `numel` counts
    the gaps.

    Args:
        gathered_in: the dtype of gathered parameters; default: the parameters' own.
    """

    uniform_requires_grad = False

    def __init__(self, *args: Any, gathered_in: torch.dtype | None = None, **kwargs: Any) -> None:
        self._gathered_in = gathered_in
        super().__init__(*args, **kwargs)

    def _lay_out(self, originals: list[nn.Parameter]) -> None:
        super()._lay_out(originals)
        numels = [p.numel() for p in originals]
        step = max(1, ALIGNMENT // (self._gathered_in or originals[0].dtype).itemsize)
        gaps = [*(-numel % step for numel in numels[:-1]), 0]
        self.numel = sum(numels) + sum(gaps)
        self.padding = gaps[-1] = -self.numel % self.ranks
        self.sizes = [size for pair in zip(numels, gaps, strict=True) for size in pair]

    def unflatten(self, buffer: Tensor) -> list[Tensor]:
        return [self.shaped(index, part) for index, part in enumerate(torch.split(buffer, self.sizes)[::2])]

    def clear_padding(self, buffer: Tensor) -> None:
        for gap in torch.split(buffer, self.sizes)[1::2]:
            gap.zero_()

    def shard_bounds(self, index: int, rank: int) -> tuple[int, int]:
        return super().shard_bounds(2 * index, rank)


class OrigParamsUnit(AccumulatedUnit, RecastUnit):
    """A unit whose `shards` are the original parameters.

    While it is sharded they are slices of the shard and attributes of their modules as ever; in forward and backward
    the leaves hide them.
    """

    flat: AlignedFlatParameter
    _is_lent = False

    def _adopt(self, leaves: list[nn.Parameter], places: list[list[Place]]) -> None:
        self.shards = [users[0].module._parameters[users[0].attribute] for users in places]  # type: ignore[misc]
        super()._adopt(leaves, places)
        self._register(self.shards)
        self.conceal()

    def _hide(self) -> None:
        for attributes, _, absent in self._users:
            for attribute in absent:
                attributes.pop(attribute, None)

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return [self.flat.shard_bounds(index, self.flat.rank) for index in range(len(self.shards))]

    def _slices(self, shard: Tensor) -> list[Tensor]:
        """What each parameter has of a tensor [P / N] of the shard's layout; in its own shape if that is all."""
        slices = [shard[low:high] for low, high in self._bounds]
        if self.flat.ranks == 1:
            return [self.flat.shaped(index, part) for index, part in enumerate(slices)]
        return slices

    @contextmanager
    def whole(self) -> Iterator[Tensor]:
        self.write_back()
        with super().whole() as full:
            yield full

    def expose(self, full: Tensor) -> None:
        for p, view in zip(self.shards, self.flat.unflatten(full), strict=True):
            p.data = view

    def conceal(self) -> None:
        for p, part in zip(self.shards, self._slices(self.flat.shard.data), strict=True):
            p.data = part

    def follow(self) -> None:
        self.write_back()
        self._train([p.requires_grad for p in self.shards])

    def write_back(self) -> None:
        """Take over parameters whose `.data` a user has replaced, or that are other objects than they were.

        Raises:
            RuntimeError: one has a shape that is neither the parameter's nor its slice's.
        """
        dtypes = {users[0].module._parameters[users[0].attribute].dtype for users in self.places}  # type: ignore[union-attr]
        if len(dtypes) == 1:  # else not by `Module.to` or its like
            self.flat.shard.data = self.flat.shard.data.to(dtypes.pop())
        self.adapt()
        for index, (users, part) in enumerate(zip(self.places, self._slices(self.flat.shard.data), strict=True)):
            p = users[0].module._parameters[users[0].attribute]
            assert p is not None
            if p is self.shards[index] and p.data_ptr() == part.data_ptr() and p.shape == part.shape:
                continue
            if p.shape == part.shape:
                values = p.data
            elif p.shape == self.flat.shapes[index]:
                values = self.flat.part_of(index, p.data)
            else:
                raise RuntimeError(
                    f"Cannot writeback when the parameter shape changes\nExpects {part.shape} but got {p.shape}: "
                    f"{users[0].name} has {tuple(self.flat.shapes[index])} as a whole and {tuple(part.shape)} on this "
                    "rank. To change whole values, use FullyShardedDataParallel.summon_full_params."
                )
            part.copy_(values)
            p.data, self.shards[index] = part, p
            for place in users:
                place.module._parameters[place.attribute] = p

    def lend(self) -> None:
        self._is_lent = True
        self._register(self.leaves)

    def take_back(self) -> None:
        if self._is_lent:
            self._is_lent = False
            self._register(self.shards)

    def _register(self, parameters: list[nn.Parameter]) -> None:
        for users, p in zip(self.places, parameters, strict=True):
            for place in users:
                place.module._parameters[place.attribute] = p

    def check_unchanged(self) -> None:
        if self.state is SHARDED:  # backward gathers again, and sees the values that forward has seen
            return
        for users, p, part in zip(self.places, self.shards, self._slices(self.flat.shard.data), strict=True):
            now = users[0].module._parameters[users[0].attribute]
            if now is not p or now.data_ptr() != part.data_ptr():
                raise AssertionError(
                    "FSDP does not support changing the parameters between forward and backward where they stay whole "
                    f"in between: {users[0].name} of {self.title} has new values. Set them after backward."
                )

    def _accumulated(self) -> list[Tensor | None]:
        return [None if index in self._missing else self._views[index] for index in range(len(self.shards))]

    def _drop(self, p: nn.Parameter) -> None:
        self._missing.add(next(index for index, shard in enumerate(self.shards) if shard is p))
        if len(self._missing) == len(self.shards):
            super()._drop(p)

    def _deliver(self, gradient: Tensor) -> None:
        kept = False
        for p, part in zip(self.shards, self._slices(gradient), strict=True):
            if not (p.requires_grad and p.numel()):
                continue
            if p.grad is None:
                p.grad, kept = part, True
            else:
                p.grad.add_(part)
        if not kept:
            device.free(gradient)
