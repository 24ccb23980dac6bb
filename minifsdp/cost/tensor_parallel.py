"""Sequence parallelism's addition to the bytes of gradients: arithmetic, no tensors.

Norms and positions are whole on every rank, but each sees a part of the sequence: their gradients are sums of the
ranks' parts, made after backward, in a buffer. And a reduce-scatter of activations may receive the others' parts in a
buffer of its own, beside the gradients that are there by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.model import Model, Unit

if TYPE_CHECKING:
    from minifsdp.recipe import Recipe


BEFORE_REDUCTIONS = ("head.bias", "up.bias", "qkv.bias")
"""The gradients after which backward reduces that of the layer's input."""


def summed(part: Model) -> list[int]:
    """Elements of each gradient that is summed over the ranks: of norms and positions."""
    return [prod(shape) for name, shape in part.named if name.startswith(("norm", "position"))]


def sums_one_by_one(recipe: Recipe) -> int:
    """The times in a step that data parallelism needs each sum as it comes; 0: one call makes all, at the end."""
    if recipe.data is None or recipe.data.kind == "zero1":
        return 0
    return 1 if recipe.data.kind == "ddp" else recipe.micro_batches


def received(stream: int, setting: Setting) -> int:
    """Bytes that a reduce-scatter receives in a buffer of its own.

    Args:
        stream: bytes of the activations between two layers, whole.
        setting: `ranks` are the tensor-parallel ones.
    """
    return stream - stream // setting.ranks if setting.by_all_to_all else 0


def after_last_reduction(part: Model, setting: Setting) -> int:
    """Bytes of the gradients that backward makes after its last reduce-scatter, which is of the first qkv's input."""
    before_blocks = _elements(part.root, ("embed", "position"))
    return setting.itemsize * (before_blocks + _elements(part.blocks[0], ("norm1",)))


def before_blocks(part: Model, setting: Setting) -> int:
    """Bytes of the gradients that there are when the head's backward reduces its input's gradient: the head's own."""
    return setting.itemsize * _elements(part.root, ("head",))


def inside_block(part: Model, stream: int, setting: Setting) -> int:
    """Bytes that a block's last reduce-scatter receives, less the gradients that come after it: of norm1."""
    return received(stream, setting) - setting.itemsize * _elements(part.blocks[0], ("norm1",))


def _elements(unit: Unit, names: Iterable[str]) -> int:
    return sum(prod(shape) for name, shape in unit.items() if name.startswith(tuple(names)))
