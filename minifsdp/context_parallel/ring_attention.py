"""Ring attention: queries stay, keys and values go round (Liu et al., arXiv 2310.01889).

In step s, rank r computes with the keys and values of rank r - s, modulo c, and passes them on to its right neighbour
meanwhile. In backward they go round again. Their gradients are partial sums on every rank, and follow them as in a
reduce-scatter (ring.py): that of rank j's keys sets out on rank j + 1, takes up each rank's part, and ends on rank j.

Sent by each rank, in elements of K and V, which are h_kv / h = r times as large as Q: 2 r Q (c - 1) / c in forward, and
twice that in backward; Q is the whole sequence's. No rank ever holds more keys than its own and those that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from minifsdp.comm import Group
from minifsdp.context_parallel.blocks import add_block, block, block_backward, check, wide
from minifsdp.context_parallel.cut import Cut
from minifsdp.ring import pass_on


@dataclass(frozen=True)
class RingAttention:
    """Attention of this rank's queries to the keys of all ranks.

    Attributes:
        group: the c ranks that have a part of each sequence.
        cut: who has which part.
        causal: tokens attend to themselves and to those before them.
    """

    group: Group
    cut: Cut
    causal: bool = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of this rank's tokens, [b, h, s / c, d].

        Args:
            q: [b, h, s / c, d].
            k, v: [b, h_kv, s / c, d]; h_kv divides h.

        Raises:
            ValueError: it does not, the shapes do not fit, the tokens are not equal chunks or there are none, or the
                cut is for other ranks.
            TypeError: the dtypes differ.
        """
        check(q, k, v, self.group, self.cut)
        out: Tensor = _Ring.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def blocks(self, owner: int) -> Iterator[tuple[int, int, bool]]:
        """This rank's work with the keys of rank `owner`: the place of a query's chunk, of a key's, on the diagonal?"""
        for mine, query in enumerate(self.cut.of_rank(self.group.rank())):
            for theirs, key in enumerate(self.cut.of_rank(owner)):
                if key <= query or not self.causal:
                    yield mine, theirs, self.causal and key == query

    def chunks(self, part: Tensor) -> Sequence[Tensor]:
        """A rank's part [..., s / c, d] as the chunks that it has; views."""
        return part.chunk(self.cut.chunks // self.cut.ranks, -2)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention) -> Tensor:
        out = torch.zeros(*q.transpose(1, 2).shape, dtype=wide(q.dtype), device=q.device).transpose(1, 2)
        lse = out.new_full((*q.shape[:-1], 1), float("-inf"))
        queries = list(zip(*map(ring.chunks, (q, out, lse)), strict=True))
        for owner, kv in rounds(torch.stack([k, v]), ring.group):
            keys = ring.chunks(kv)
            for mine, theirs, causal in ring.blocks(owner):
                (chunk, its_out, its_lse), (k_chunk, v_chunk) = queries[mine], keys[theirs]
                add_block(its_out, its_lse, block(chunk, k_chunk, v_chunk, causal))
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ring: RingAttention = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(out)
        delta = (grad.to(out.dtype) * out).sum(-1, keepdim=True)
        queries = list(zip(*map(ring.chunks, (q, grad, lse, delta, dq)), strict=True))
        own, hop = None, None
        for owner, kv in rounds(torch.stack([k, v]), ring.group):
            partial = torch.zeros(kv.shape, dtype=out.dtype, device=kv.device)
            keys, sums = ring.chunks(kv), ring.chunks(partial)
            for mine, theirs, causal in ring.blocks(owner):
                (chunk, its_grad, its_lse, its_delta, its_dq), (k_chunk, v_chunk) = queries[mine], keys[theirs]
                of_q, *of_kv = block_backward(its_grad, chunk, k_chunk, v_chunk, its_lse, its_delta, causal)
                its_dq.add_(of_q)
                sums[theirs].add_(torch.stack(of_kv))
            if own is None:  # the sum of the others' parts ends here, after all hops
                own = partial
            else:
                hop = Hop(partial if hop is None else partial.add_(hop.wait()), ring.group)
        assert own is not None
        dk, dv = own if hop is None else own.add_(hop.wait())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def rounds(kv: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Every rank's keys and values with the rank's number, this one's first; the next ones arrive meanwhile."""
    rank, ranks = group.rank(), group.size()
    for step in range(ranks - 1):
        hop = Hop(kv, group)
        yield (rank - step) % ranks, kv
        kv = hop.wait()
    yield (rank + 1) % ranks, kv


class Hop:
    """A tensor on its way to the right neighbour, and that of the left one, of the same shape, on its way here."""

    def __init__(self, leaving: Tensor, group: Group) -> None:
        self.leaving, self.arriving = leaving, torch.empty_like(leaving)
        self.handles = pass_on(self.leaving, self.arriving, group)

    def wait(self) -> Tensor:
        """Return the tensor that has arrived, and release both."""
        for handle in self.handles:
            handle.wait()
        arrived = self.arriving
        del self.leaving, self.arriving, self.handles
        return arrived
