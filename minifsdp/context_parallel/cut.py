"""The sequence, cut among c ranks: which tokens each of them has.

    contiguous      rank 0: chunk 0       1        2        3         of c = 4 chunks
    zig-zag         rank 0: chunks 0, 7   1, 6     2, 5     3, 4      of 2 c = 8

A token attends to itself and to those before it, so the chunks have unequal work: in units of a chunk's square, half
for its own triangle and one for each chunk before it. Of contiguous chunks, rank i does (2 i + 1) / c² of all work, and
the last one (2 c - 1) / c times the mean. Zig-zag gives every rank an early and a late chunk, and to all the same work
(Brandon et al. 2023, "Striped Attention", has the imbalance; Llama 3, arXiv 2407.21783, section 3.3.2, the 2 c chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A way to cut sequences.

    Attributes:
        ranks: c.
        zigzag: each rank has two chunks, the i-th from the start and the i-th from the end; otherwise one.

    Raises:
        ValueError: there is no rank.
    """

    ranks: int = 1
    zigzag: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}: a sequence is cut among at least 1")

    @property
    def chunks(self) -> int:
        """Of all ranks together."""
        return 2 * self.ranks if self.zigzag else self.ranks

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's chunks, in the order in which it has them."""
        return (rank, self.chunks - 1 - rank) if self.zigzag else (rank,)

    def fault(self, length: int) -> str:
        """Why sequences of so many tokens cannot be cut; "" if they can."""
        if length % self.chunks == 0:
            return ""
        return f"sequences of {length} tokens cannot be cut into {self.chunks} equal chunks: pad them to a multiple"

    def take(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's part along a dimension: a view if it is one chunk, `whole` itself for a single rank.

        Raises:
            ValueError: the tokens cannot be cut equally.
        """
        if fault := self.fault(whole.shape[dim]):
            raise ValueError(fault)
        if self.ranks == 1:
            return whole
        chunks = whole.chunk(self.chunks, dim)
        mine = [chunks[number] for number in self.of_rank(rank)]
        return mine[0] if len(mine) == 1 else torch.cat(mine, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole, in the sequence's order, from the parts of all ranks: the way back from `take`."""
        if self.ranks == 1:
            return parts[0]
        numbers = [number for rank in range(self.ranks) for number in self.of_rank(rank)]
        per_rank = self.chunks // self.ranks
        chunks = dict(zip(numbers, (chunk for part in parts for chunk in part.chunk(per_rank, dim)), strict=True))
        return torch.cat([chunks[number] for number in sorted(chunks)], dim)

    def work(self, rank: int, causal: bool = True) -> float:
        """A rank's share of all pairs of tokens that attend to each other, as a part of 1, for long sequences."""
        if not causal:
            return 1 / self.ranks
        return sum(2 * number + 1 for number in self.of_rank(rank)) / self.chunks**2


@dataclass(frozen=True)
class SequencePart:
    """The tokens of one rank.

    Attributes:
        cut: who has which.
        rank: whose part it is.
    """

    cut: Cut = Cut()
    rank: int = 0

    def take(self, whole: Tensor) -> Tensor:
        """Its tokens of sequences [b, s]: [b, s / c], contiguous; errors as of `Cut.take`."""
        return self.cut.take(whole, self.rank, 1).contiguous()

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where its `length` tokens stand in their sequence, int64 [length]."""
        mine = self.cut.of_rank(self.rank)
        size = length // len(mine)
        chunks = [torch.arange(number * size, (number + 1) * size, device=device) for number in mine]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
