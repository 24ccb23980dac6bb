"""Attention to gathered keys and values, as in Llama 3 (arXiv 2407.21783, section 3.3.2).

Every rank gathers the keys and values of all, and attends to them with its own queries. Backward sums their gradients
where they belong, a reduce-scatter. In elements, with r = h_kv / h and the whole sequence's Q, each rank sends
2 r Q (c - 1) / c in forward and as much in backward: half of what a ring sends there, for which the gathered keys and
values stay in memory, 2 r Q of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.context_parallel.blocks import check
from minifsdp.context_parallel.cut import Cut


@dataclass(frozen=True)
class GatheredAttention:
    """Attention of this rank's queries to the keys of all ranks; attributes and call as `RingAttention`'s."""

    group: Group
    cut: Cut
    causal: bool = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check(q, k, v, self.group, self.cut)
        keys, values = _Gather.apply(torch.stack([k, v]), self.group, self.cut)  # type: ignore[no-untyped-call]
        mine = self.cut.of_rank(self.group.rank())
        queries = zip(mine, q.chunk(len(mine), -2), strict=True)
        outs = [self.attend(number, chunk, keys, values) for number, chunk in queries]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -2)

    def attend(self, number: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Chunk `number` of the queries, with the keys up to its end."""
        tokens = q.shape[-2]
        before = number * tokens
        mask = None
        if self.causal:
            keys, values = keys[..., : before + tokens, :], values[..., : before + tokens, :]
            mask = torch.ones(tokens, before + tokens, dtype=torch.bool, device=q.device).tril(before)
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=q.shape[1] != keys.shape[1])


class _Gather(Function):
    """Parts [..., s / c, d] of all ranks as [..., s, d]; backward: this rank's part of the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, cut: Cut) -> Tensor:
        ctx.group, ctx.cut = group, cut
        every = part.new_empty(group.size(), *part.shape)
        comm.all_gather(every.flatten(), part.flatten(), group).wait()
        return cut.join(every.unbind(), -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        every = torch.stack([ctx.cut.take(grad, rank, -2) for rank in range(ctx.group.size())])
        part = torch.empty_like(every[0])
        comm.reduce_scatter(part.flatten(), every.flatten(), ctx.group, role=None).wait()
        return part, None, None
