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

from minifsdp import comm, device
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
        check(q, k, v, self.cut)
        every: Tensor = _Gather.apply(torch.stack([k, v]), self.group)  # [c, 2, b, h_kv, s / c, d]
        keys, values = self.cut.join(every.unbind(), -2).unbind()
        mine = self.cut.of_rank(self.group.rank())
        queries = zip(mine, q.chunk(len(mine), -2), strict=True)
        return torch.cat([self.attend(number, chunk, keys, values) for number, chunk in queries], -2)

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
    """Every rank's part, [c, *part], in rank order; backward: the sum over the ranks of this rank's part's gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        every = device.empty(group.size() * part.numel(), part.dtype, "communication", part.device)
        comm.all_gather(every, part.flatten(), group).wait()
        return every.view(group.size(), *part.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        part = device.empty(grad[0].numel(), grad.dtype, "communication", grad.device)
        comm.reduce_scatter(part, grad.flatten(), ctx.group).wait()
        return part.view(grad.shape[1:]), None
