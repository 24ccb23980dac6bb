"""Sizes that the bytes of activations depend on: a rank's batch, the model, and who has the other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minifsdp.cost.data_parallel import Setting


@dataclass(frozen=True)
class Attention:
    """Ranks that attend together.

    Attributes:
        ranks: c; with 1, each rank by itself.
        place: the rank's among them.
        kind: "ring", "gathered" or "ulysses".
        zigzag: a rank has two chunks, otherwise one.
    """

    ranks: int = 1
    place: int = 0
    kind: str = "ring"
    zigzag: bool = False

    @property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of a rank's, as Cut.of_rank has them."""
        return (self.place, 2 * self.ranks - 1 - self.place) if self.zigzag else (self.place,)

    def share(self, heads: int) -> int:
        """Under Ulysses, the number of a rank's heads, of so many."""
        return (self.place + 1) * heads // self.ranks - self.place * heads // self.ranks


@dataclass(frozen=True)
class Sizes:
    """A rank's batch and the model.

    Attributes:
        batch, context: sequences that the rank sees, and their tokens.
        width, heads: of the model; the ranks divide the heads.
        vocabulary: tokens of the head that the rank has.
        itemsize: bytes per element.
        on_gpu: attention runs on a GPU.
        attention: of ranks that have other tokens of the sequences.
    """

    batch: int
    context: int
    width: int
    heads: int
    vocabulary: int
    itemsize: int = 4
    on_gpu: bool = False
    attention: Attention = field(default_factory=Attention)

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], heads: int, batch: int, setting: Setting) -> Sizes:
        """Of a model whose root's first parameters, the embeddings of tokens and positions, have these shapes."""
        (vocabulary, width), (context, _) = shapes[:2]
        return cls(batch, context, width, heads, vocabulary, setting.itemsize, setting.runs_behind)
