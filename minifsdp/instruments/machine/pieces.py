"""A tensor-parallel product and its collective: one after the other, or in pieces that overlap.

With sequence parallelism over t ranks, a column-parallel layer gathers its input and multiplies it; a row-parallel one
multiplies, and reduce-scatters the partial sums. Either takes the sum of both times, unless they are cut into t pieces
of the sequence:

    one after the other   link     gather                 in pieces   link     g1 g2 g3
                          compute         product                     compute  p0 p1 p2 p3

The rank's own piece needs no message, so its product hides the first one. Each product then hides the next message, or
the message the product. A reduce-scatter is the mirror image: the rank's own piece comes last (torch's async tensor
parallelism: torch/distributed/_symmetric_memory, `_fused_all_gather_matmul` and `_fused_matmul_reduce_scatter`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minifsdp.instruments.machine.hardware import GB, H100, Hardware
from minifsdp.instruments.machine.program import COMPUTE, Kernel
from minifsdp.instruments.watch.timeline import Span

NVLINK = replace(H100, name="H100, NVLink", bandwidth=450 * GB, latency=10e-6)  # 900 GB/s in both directions
NETWORK = replace(H100, name="H100, 400 Gb/s each", bandwidth=50 * GB, latency=20e-6)


@dataclass(frozen=True)
class Product:
    """A linear layer, [tokens, features_in] to [tokens, features_out] of the whole model, on `ranks` ranks.

    Attributes:
        tokens: sequence length times micro-batch.
        features_in, features_out: of the whole layer; one of the two is sharded.
        travels: features per token of the tensor that is gathered or reduced.
        ranks: tensor-parallel ranks, t.
        itemsize: bytes per element.
    """

    tokens: int
    features_in: int
    features_out: int
    travels: int
    ranks: int
    itemsize: int = 2

    def compute(self, hardware: Hardware, pieces: int = 1) -> float:
        """Seconds of the product of one of so many pieces of the tokens."""
        rows, weight = self.tokens / pieces, self.features_in * self.features_out / self.ranks
        sharded = (self.features_in + self.features_out - self.travels) / self.ranks
        nbytes = self.itemsize * (weight + rows * (self.travels + sharded))
        return hardware.kernel(Kernel("mm", "", COMPUTE, (), (), 2 * rows * weight, int(nbytes), self.itemsize, 0.0))

    def message(self, hardware: Hardware, pieces: int = 1) -> float:
        """Seconds of one of so many messages that together bring the other ranks' parts, (t - 1) / t of the tensor."""
        if self.ranks == 1:
            return 0.0
        wire = self.itemsize * self.tokens * self.travels * (self.ranks - 1) / self.ranks
        return hardware.latency + wire / pieces / hardware.bandwidth

    def one_after_the_other(self, hardware: Hardware) -> float:
        """Seconds of the collective and the product if one waits for the other."""
        return self.message(hardware) + self.compute(hardware)

    def in_pieces(self, hardware: Hardware) -> float:
        """Seconds where each of t - 1 messages is under way during a product."""
        if self.ranks == 1:
            return self.compute(hardware)
        others = self.ranks - 1
        compute, message = self.compute(hardware, self.ranks), self.message(hardware, others)
        return compute + others * max(compute, message)

    def spans(self, name: str, hardware: Hardware, *, pieces: bool, reduces: bool) -> list[Span]:
        """Begin and length of products and messages; the message comes last if the layer reduces."""
        parts, others = (self.ranks, self.ranks - 1) if pieces else (1, 1)
        compute, message = self.compute(hardware, parts), self.message(hardware, others)
        turn = max(compute, message)  # of a product and a message at the same time
        if not pieces:
            products, messages = ([0.0], [compute]) if reduces else ([message], [0.0])
        elif reduces:
            messages = [compute + n * turn for n in range(others)]
            products = [0.0, *messages]
        else:
            messages = [n * turn for n in range(others)]
            products = [*messages, others * turn]
        op = "reduce_scatter" if reduces else "all_gather"
        spans = [Span("communication", f"{op} {name}", at, message) for at in messages]
        return [*spans, *(Span("compute", name, at, compute) for at in products)]


def products_of_block(width: int, tokens: int, ranks: int) -> dict[str, Product]:
    """The four products of a transformer block's forward: qkv and up gather their input, out and down reduce."""
    return {
        name: Product(tokens, into * width, out * width, width, ranks)
        for name, into, out in (("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1))
    }


def spans_of_block(width: int, tokens: int, ranks: int, hardware: Hardware, *, pieces: bool) -> list[Span]:
    """A timeline of a transformer block's forward on one rank."""
    spans: list[Span] = []
    for name, product in products_of_block(width, tokens, ranks).items():
        begin = max((span.end for span in spans), default=0.0)
        found = product.spans(name, hardware, pieces=pieces, reduces=name in ("out", "down"))
        spans += [span._replace(start=begin + span.start) for span in found]
    return spans
