"""DeepSpeed-Ulysses: parts of the sequence become parts of the heads, and back (Jacobs et al., arXiv 2309.14509).

Before attention, rank j is sent all ranks' queries, keys and values of its heads; so it has the whole sequence of
some heads, and any attention of one process will do. Afterwards the outputs go back. Each is an all-to-all, so each
rank sends, of Q, K and V together and then of the output, (2 + 2 r) (Q / c) (c - 1) / c elements with r = h_kv / h, and
as many in backward. That falls with 1 / c, and what a ring sends does not: they are equal at c = 1 + 1 / r.

The number of heads need not be a multiple of c: some ranks get one more, and with more ranks than heads some get none.
A group of heads that share a key may be divided; its key then goes to several ranks, and its gradient is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.context_parallel.blocks import check
from minifsdp.context_parallel.cut import Cut


@dataclass(frozen=True)
class UlyssesAttention:
    """Attention of some heads to the whole sequence, between two all-to-alls.

    Attributes and call as `RingAttention`'s.
    """

    group: Group
    cut: Cut
    causal: bool = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check(q, k, v, self.group, self.cut)
        rank, h, h_kv = self.group.rank(), q.shape[1], k.shape[1]
        queries, keys = shares(h, h_kv, self.group.size())
        all_three = [
            [*of_q, *(h + head for head in of_k), *(h + h_kv + head for head in of_k)]
            for of_q, of_k in zip(queries, keys, strict=True)
        ]
        way = Way(self.group, self.cut, all_three)
        heads: Tensor = _Move.apply(torch.cat([q, k, v], 1), way, to_heads, to_sequence)  # type: ignore[no-untyped-call]
        out = self.attend(heads, [head // (h // h_kv) - keys[rank].start for head in queries[rank]])
        way = Way(self.group, self.cut, queries)
        back: Tensor = _Move.apply(out, way, to_sequence, to_heads)  # type: ignore[no-untyped-call]
        return back

    def attend(self, heads: Tensor, keys: Sequence[int]) -> Tensor:
        """Attention in the whole sequence, [b, queries, s, d].

        Args:
            heads: [b, queries + 2 * keys, s, d]: this rank's of Q, then of K, then of V.
            keys: by query, the one that it attends to.
        """
        if not keys:
            return heads.square()  # of none; recomputation (torch.utils.checkpoint) waits for what backward needs
        different = keys[-1] + 1
        q, k, v = heads.split([len(keys), different, different], 1)
        if different < len(keys):  # the groups at this rank's borders may have fewer queries than the others
            k, v = k[:, keys], v[:, keys]
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def shares(heads: int, keys: int, ranks: int) -> tuple[list[range], list[range]]:
    """By rank, the heads of Q that it is sent, and the heads of K and V that these attend to."""
    queries = [range(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]
    group = heads // keys
    return queries, [range(of.start // group, of[-1] // group + 1) if of else range(0) for of in queries]


class Way(NamedTuple):
    """The way from parts of the sequence to parts of the heads: of each rank, the numbers of its heads."""

    group: Group
    cut: Cut
    heads: Sequence[Sequence[int]]


Mover: TypeAlias = Callable[[Tensor, Way], Tensor]


def to_heads(part: Tensor, way: Way) -> Tensor:
    """All heads of this rank's tokens [b, H, s / c, d] -> its heads of all tokens [b, H_rank, s, d]."""
    b, _, tokens, d = part.shape
    shape = b, len(way.heads[way.group.rank()]), tokens, d
    arrived = exchange([part[:, list(heads)] for heads in way.heads], [shape] * len(way.heads), way.group)
    return way.cut.join(arrived, 2)


def to_sequence(mine: Tensor, way: Way) -> Tensor:
    """This rank's heads of all tokens [b, H_rank, s, d] -> all heads of its tokens; of several copies the sum."""
    b, _, s, d = mine.shape
    ranks = len(way.heads)
    shapes = [(b, len(heads), s // ranks, d) for heads in way.heads]
    arrived = exchange([way.cut.take(mine, rank, 2) for rank in range(ranks)], shapes, way.group)
    every = mine.new_zeros(b, 1 + max(head for heads in way.heads for head in heads), s // ranks, d)
    for heads, part in zip(way.heads, arrived, strict=True):
        every[:, list(heads)] += part
    return every


def exchange(leaving: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: Group) -> list[Tensor]:
    """An all-to-all of tensors: one for each rank, for one from each rank, of these shapes."""
    outgoing = torch.cat([part.flatten() for part in leaving])
    sizes = [prod(shape) for shape in shapes]
    buffer = outgoing.new_empty(sum(sizes))
    comm.all_to_all(buffer, outgoing, group, sizes, [part.numel() for part in leaving]).wait()
    return [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]


class _Move(Function):
    """One way, and in backward the other: `to_heads` and `to_sequence` are each other's transposes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way, there: Mover, back: Mover) -> Tensor:
        ctx.way, ctx.back = way, back
        return there(x, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.way), None, None, None
