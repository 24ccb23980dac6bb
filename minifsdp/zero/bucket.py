"""Parameters in one flat buffer, and this rank's shard of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Group, Handle, Label
from minifsdp.contents import Contents
from minifsdp.ddp.bucketed import assign_buckets
from minifsdp.layout import Layout
from minifsdp.local_parts import groups_of, local_of, ranks_of
from minifsdp.order import check_labelled_calls, next_on


class Bucket:
    """Parameters of one dtype in one flat buffer, divided into N shards of equal length (layout.py).

        flat [padded]              p0 | p1 | p2 | zeros
        shards [padded / N]      rank 0 |  rank 1  | rank 2     regardless of the parameters' borders

    The buffer is the parameters' memory: each `p.data` is a view of it, and so is this rank's shard. The model sees
    values that the optimizer writes to the shard at once; values written by the other ranks arrive with `start_gather`.

    Attributes:
        params: the parameters, in the order in which backward is expected to compute their gradients.
        flat: [padded], in their dtype; padded is the smallest multiple of N that holds them. Equal on all ranks.
        shard: [padded / N], this rank's part of `flat`; its `.grad` is the only part of the gradients that is kept.
        shards: the tensors that the optimizer updates: the shard, or each parameter's part of it if these have separate
            states.
        in_use: for each parameter, whether any rank had a gradient in the last reduction.
        label: the subject of its collectives.
    """

    def __init__(self, params: list[nn.Parameter], names: list[str], group: Group) -> None:
        check_labelled_calls()
        self.params, self.names, self.group = params, names, group
        self.label = Label(f"ZeRO's bucket {next_on(group)} ({len(params)} parameters)")
        self.layout = Layout.of(map(local_of, params), group.size())
        self.flat = torch.zeros(self.padded, dtype=params[0].dtype, device=params[0].device)
        for p, view in zip(map(local_of, params), self.split(self.flat), strict=True):
            p.data = view.copy_(p)
        comm.broadcast(self.flat, 0, group).wait()
        self.shard = nn.Parameter(self.layout.shard(self.flat, group.rank()))
        self.shards = [self.shard]
        self.in_use = [False] * len(params)

    @property
    def padded(self) -> int:
        """Number of elements of `flat`."""
        return self.layout.padded

    @property
    def contents(self) -> Contents:
        """The parameters as the optimizer's state dict sees them."""
        return Contents(self.names, self.layout, self.shard, self, self.group, self.flat.device)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat` [padded] in the parameters' shapes."""
        return self.layout.views(flat)

    def cut(self, shard: Tensor) -> list[Tensor]:
        """Views of `shard` [padded / N]: each parameter's part, 1-D, empty where it lies on other ranks altogether."""
        return self.layout.cut(shard, self.group.rank())

    @property
    def is_split(self) -> bool:
        """True if the optimizer has a state, and a step count, for each parameter."""
        return self.shards[0] is not self.shard

    def slices(self, shard: Tensor) -> list[Tensor]:
        """The part of each of `shards` of a tensor [padded / N]."""
        return self.cut(shard) if self.is_split else [shard]

    def split_shard(self, split: bool) -> None:
        """Let the optimizer update the parts of the shard, or the shard in one."""
        self.shards = [nn.Parameter(part) for part in self.cut(self.shard.detach())] if split else [self.shard]

    def check_memory(self) -> None:
        """Raise RuntimeError where a parameter is no longer a view of `flat`: the model would see no more updates."""
        for p in self.params:
            if local_of(p).untyped_storage() is not self.flat.untyped_storage():
                raise RuntimeError(
                    f"a parameter {list(p.shape)} has left its bucket's memory since the optimizer was made: "
                    "convert or move the module first (module.to(...)), then make the optimizer"
                )

    def new_gradients(self, role: device.Role) -> Tensor:
        """Zeros [padded]: what no gradient is copied over, an unused parameter or the padding, counts as zero."""
        return device.empty(self.padded, self.flat.dtype, role, self.flat.device).zero_()

    def start_reduction(self, gradients: Tensor) -> tuple[Tensor, Handle]:
        """Reduce `gradients` [padded] to a new buffer [padded / N]: this rank's shard of their mean over the ranks."""
        reduced = device.empty(self.shard.numel(), self.flat.dtype, "gradients", self.flat.device)
        return reduced, comm.reduce_scatter(reduced, gradients, self.group, comm.MEAN, self.label)

    def assign_gradients(self) -> None:
        """Let what the optimizer updates have its part of `shard.grad`, or None where no rank has a gradient."""
        if self.is_split and self.shard.grad is not None:
            for part, gradient, has_one in zip(self.shards, self.cut(self.shard.grad), self.in_use, strict=True):
                part.grad = gradient if has_one else None

    def free_gradients(self) -> None:
        """Give the shard's gradient up; the next reduction makes a new one."""
        if self.shard.grad is not None:
            device.free(self.shard.grad)
        for each in (self.shard, *self.shards):
            each.grad = None

    def start_gather(self) -> Handle:
        """Gather every rank's shard into `flat`, in place: each shard is already at its position on its own rank."""
        return comm.all_gather(self.flat, self.shard.data, self.group, self.label)


@torch.no_grad()
def make_buckets(
    params: Iterable[nn.Parameter], names: Mapping[Tensor, str], group: Group, cap_bytes: int
) -> list[Bucket]:
    """Divide the parameters that require a gradient among buckets of at most `cap_bytes`, in reverse order."""
    alike: dict[Any, list[nn.Parameter]] = {}  # by ranks: a bucket's shards are clipped by one norm
    for p in (each for each in params if each.requires_grad):
        alike.setdefault(ranks_of(groups_of(p)), []).append(p)
    return [
        Bucket(part, [names[p] for p in part], group)
        for trainable in alike.values()
        for part in assign_buckets(trainable, cap_bytes)
    ]
