"""A way through a stage, layer by layer: bytes of activations at the moments with the most of them; no tensors.

Between two moments of a step, activations fall while gradients grow, so the sum of the two peaks is more than the peak
of their sum. Here is what is there at the same time: what forward has kept and backward has not used yet, the gradients
made so far, and the temporaries of one layer. Of a block, backward's are, next to the gradient of its output (s is the
residual stream [b, s, h] on this rank, c = b s h / t, t tensor-parallel ranks):

    down         4 c, the gradient of its input; and those of its parameters
    gelu         8 c, the gradients of its output and of its input
    up           4 c and b s h; and those of its parameters
    norm2, sum   2 s
    out          c; and those of its parameters
    attention    4 c, the gradients of its output, of q, k and v
    fused        6 c: q's, k's and v's are put into one tensor
    qkv          3 c and b s h; and those of its parameters
    norm1, sum   2 s

A collective between layers has buffers of its own (`Copies`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from minifsdp.cost import context_parallel
from minifsdp.cost.activations import Cut, Sizes, kept_after_blocks, kept_before_blocks, kept_by_block
from minifsdp.cost.model import BEFORE_BLOCKS, Model, Unit

_USED = {  # what a layer's backward is the last to read
    "down": ("input of down",),
    "gelu": ("input of gelu",),
    "up": ("input of up",),
    "norm2": ("input of norm2", "statistics of norm2"),
    "out": (),
    "attention": (
        *("input of out", "q, k, v", "logsumexp", "softmax", "random state"),
        *("keys and values of all", "masks", "output of attention"),
    ),
    "fused": (),
    "qkv": ("input of qkv",),
    "norm1": ("input of norm1", "statistics of norm1"),
}
"""In the order of backward. Attention reads its own output, which is the input of out."""

_OF_WEIGHTS = ("input of down", "input of up", "input of out", "input of qkv")


@dataclass(frozen=True)
class Moment:
    """A moment of forward or backward.

    Attributes:
        unit: what computes: 0 is what comes before the blocks, which are numbered from 1; then what comes after them.
        activations: bytes kept, and temporaries.
        made: bytes of the gradients that this backward of the stage has made.
        fresh: of these, those of the layer that computes.
        is_over: the unit's backward is.
    """

    unit: int
    activations: int
    made: int = 0
    fresh: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class Copies:
    """Temporaries of the collectives between layers.

    Attributes:
        whole: bytes of [b, s, h].
        stream: this rank's part of it: all, or one along the sequence.
        cut: of the layers.
    """

    whole: int
    stream: int
    cut: Cut

    @classmethod
    def of(cls, sizes: Sizes, cut: Cut) -> Copies:
        whole = sizes.itemsize * sizes.batch * sizes.context * sizes.width
        return cls(whole, whole // cut.ranks if cut.sequence else whole, cut)

    @property
    def gathering(self) -> int:
        """A part, contiguous; the parts of all, one after another; and these along the sequence."""
        return self.stream + 2 * self.whole if self.cut.sequence else 0

    @property
    def summing(self) -> int:
        """Summands; these one rank's part after another; the sum, and a copy of it; what was received for it."""
        if self.cut.sequence:
            return 2 * self.whole + max(2 * self.stream, self.whole)
        return 2 * self.whole if self.cut.ranks > 1 else self.whole


def bytes_of(unit: Unit, itemsize: int, *names: str) -> int:
    """Of a unit's parameters that begin so."""
    return itemsize * sum(prod(shape) for name, shape in unit.items() if name.startswith(names))


def forward(stage: Model, sizes: Sizes, cut: Cut | None, kept: int) -> Iterator[Moment]:
    """The moments of a stage's forward.

    Args:
        stage: this rank's part of it.
        sizes, cut: as for activations.kept_by_block.
        kept: bytes of activations before.
    """
    copies = Copies.of(sizes, cut or Cut())
    if stage.is_first:
        kept += sum(kept_before_blocks(sizes, cut).values())
        yield Moment(0, kept + copies.stream + copies.summing)
    for number in range(1, len(stage.blocks) + 1):
        if sizes.attention.ranks > 1:
            yield Moment(number, kept + before_attention(sizes, cut or Cut()) + copies.stream)
        kept += sum(kept_by_block(sizes, cut or Cut()).values())
        yield Moment(number, kept + copies.stream + copies.summing)
    if stage.is_last:
        after = sum(kept_after_blocks(sizes, cut).values())
        small = 0 if cut is None else 8 * sizes.itemsize * sizes.batch * sizes.context  # a few numbers for each token
        logits = _logits(sizes)  # and, where each rank has some of them, their exponentials
        yield Moment(len(stage.blocks) + 1, kept + after + logits + (logits if cut is not None else 0) + small)


def before_attention(sizes: Sizes, cut: Cut) -> int:
    """Bytes that a block has kept by the end of its attention, and the temporaries of that."""
    kept = kept_by_block(sizes, cut)
    behind = itertools.dropwhile(lambda name: name != "input of norm2", kept)
    return sum(kept.values()) - sum(kept[name] for name in behind) + context_parallel.in_forward(sizes, cut.ranks)


def _logits(sizes: Sizes) -> int:
    return sizes.itemsize * sizes.batch * sizes.context * sizes.vocabulary


def backward(stage: Model, sizes: Sizes, cut: Cut | None, kept: int, splits: bool = False) -> Iterator[Moment]:
    """The moments of a stage's backward.

    Args:
        stage, sizes, cut: as for `forward`.
        kept: bytes of activations before, with those of the stage.
        splits: only the gradients of activations are made, and what those of linear layers need is kept.
    """
    copies, made, itemsize, blocks = Copies.of(sizes, cut or Cut()), 0, sizes.itemsize, len(stage.blocks)
    if stage.is_last:
        after, logits = kept_after_blocks(sizes, cut), _logits(sizes)
        small = 4 * itemsize * (1 if cut is None else sizes.batch * sizes.context)  # numbers for each token, or for all
        yield Moment(blocks + 1, kept + 2 * logits + small)  # the gradients of the loss's inputs, and of the logits
        kept -= after["probabilities"]
        if "head.weight" not in stage.root:  # tied: the head's part waits for the embedding's, and is added to it
            kept += bytes_of(stage.root, itemsize, "embed")
        made = fresh = 0 if splits else bytes_of(stage.root, itemsize, "head")
        yield Moment(blocks + 1, kept + logits + copies.whole, made, fresh)
        kept += logits if splits else -after["input of head"]
        yield Moment(blocks + 1, kept + copies.summing, made)
        made += bytes_of(stage.root, itemsize, "norm")
        yield Moment(blocks + 1, kept + 2 * copies.stream, made)
        kept -= after["input of norm"] + after["statistics of norm"]
    for number in reversed(range(1, blocks + 1)):
        for moment in _block(stage.blocks[number - 1], number, sizes, cut or Cut(), kept, made, splits):
            yield moment
        kept, made = moment.activations - copies.stream, moment.made
    if stage.is_first:
        fresh = bytes_of(stage.root, itemsize, *BEFORE_BLOCKS)
        yield Moment(0, kept + copies.stream + max(copies.gathering, copies.whole), made)
        yield Moment(0, kept + copies.stream + copies.whole, made + fresh, fresh)
        yield Moment(0, kept, made + fresh, is_over=True)


def _block(block: Unit, number: int, sizes: Sizes, cut: Cut, kept: int, made: int, splits: bool) -> Iterator[Moment]:
    """Backward of a block; the last moment is that of its end."""
    copies, by_name = Copies.of(sizes, cut), kept_by_block(sizes, cut)
    whole, part, stream = copies.whole, copies.whole // cut.ranks, copies.stream
    spread = whole if cut.sequence else 0  # the gradient of a layer's output, gathered
    again = whole if cut.regather else 0  # the layer's input, gathered
    temporaries = {
        "down": spread + 4 * part,
        "gelu": 8 * part,
        "up": 4 * part + whole + again,
        "norm2": 2 * stream,
        "out": spread + part,
        "attention": 4 * part if sizes.attention.ranks == 1 else part + context_parallel.in_backward(sizes, cut.ranks),
        "fused": 6 * part,
        "qkv": 3 * part + whole + again,
        "norm1": 2 * stream,
    }
    outputs = {"down": whole, "up": 4 * part, "out": whole, "qkv": 3 * part}  # of linear layers
    for layer, used in _USED.items():
        of_weights = layer in outputs
        fresh = 0 if splits and of_weights else bytes_of(block, sizes.itemsize, layer)
        if layer in ("down", "out"):
            yield Moment(number, kept + stream + copies.gathering, made)
        if layer in ("up", "qkv") and again:
            yield Moment(number, kept + stream + outputs[layer] + copies.gathering, made)
        made += fresh
        yield Moment(number, kept + stream + temporaries[layer], made, fresh)
        kept -= sum(by_name.get(name, 0) for name in used if not (splits and name in _OF_WEIGHTS))
        kept += outputs[layer] if splits and of_weights else 0
        if layer in ("up", "qkv") and (cut.ranks > 1 or cut.sequence):
            yield Moment(number, kept + stream + copies.summing, made)
    yield Moment(number, kept + stream, made, is_over=True)
