"""An upper bound of all bytes that a rank has at once, on a CPU: a walk over a step in the order of the program.

    at rest       parameters and the optimizer's state: always there (total.py)
    activations   kept so far, and a layer's temporaries (walk.py)
    shards        unsharded parameters, gathers under way, gradients so far and the reductions of them (shards.py)
    optimizer     the temporaries of AdamW, one tensor after another, next to the gradients

It is an upper bound, because a layer's temporaries at most are added to all else that is there at most meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from minifsdp.cost import context_parallel, data_parallel, pipeline, walk
from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.fsdp2 import kept_by_rank
from minifsdp.cost.model import Model
from minifsdp.cost.pipeline import Stage
from minifsdp.cost.shards import has_buffers, keeps_gradients, shards_of
from minifsdp.cost.total import Divided, StepBytes, bucketed, cost, divide

if TYPE_CHECKING:
    from minifsdp.recipe import Recipe

_INDEX = 8  # bytes of a token
_LOSS = 8  # bytes of a pipeline's loss, which the last stage sends to all as a float64


def peak(model: Model, recipe: Recipe, rank: int, setting: Setting) -> int:
    """An upper bound of a rank's bytes; arguments and errors as for `cost`."""
    mine, held = divide(model, recipe, rank, setting), cost(model, recipe, rank, setting)
    losses = mine.sizes.itemsize * (recipe.micro_batches + 1)
    updating = losses + gradients_in_step(held, recipe) + optimizer_step(tensors(mine, recipe))
    working = max(updating, *passes(mine, recipe, held, recipe.mesh.place(rank, "pp")))
    return held.parameters + held.optimizer + taken(mine, recipe) + working + dropped_late(mine, recipe)


def taken(mine: Divided, recipe: Recipe) -> int:
    """Bytes of the part of the batch's tokens and targets that is cut out of whole sequences."""
    rows = mine.sizes.batch * recipe.micro_batches
    return 2 * _INDEX * rows * mine.sizes.context if recipe.mesh.cp > 1 else 0


def dropped_late(mine: Divided, recipe: Recipe) -> int:
    """Bytes of one message of activations: gloo's thread may drop its reference a moment after the wait has returned.

    Resizing frees the buffers of data parallelism, despite any remaining reference.
    """
    between = pipeline.stream(mine.sizes) if recipe.mesh.tp > 1 or recipe.mesh.pp > 1 else 0
    ring = recipe.context is not None and recipe.context.attention == "ring" and recipe.mesh.cp > 1
    return max(between, 2 * context_parallel.queries(mine.sizes, recipe.mesh.tp) if ring else 0)


def passes(mine: Divided, recipe: Recipe, held: StepBytes, place: int) -> Iterator[int]:
    """Bytes at the moments of forward and backward, of a pipeline action by action.

    Args:
        mine: what the rank has.
        recipe: how it is trained.
        held: its bytes by category.
        place: the rank's in the pipeline.
    """
    stages = [Stage(len(stage.blocks), stage.is_first, stage.is_last) for stage in mine.every]
    parts = dict(zip(sorted({number for number, _, _ in recipe.actions[place]}), mine.parts, strict=True))
    always = always_there(mine, recipe, held)
    left: dict[int, int] = dict.fromkeys(parts, 0) if has_buffers(recipe) else {}
    for did, before in pipeline.held_before(recipe.actions, place, stages, mine.sizes, mine.cut):
        if did is None:  # gradients that were kept are reduced
            yield before + _LOSS + (held.unsharded_peak + held.gradients_peak if keeps_gradients(recipe) else 0)
            continue
        number, kind, _ = did
        stage, there = parts[number], always + sum(left.values())
        shards = shards_of(stage, mine, recipe, adds=number in left)
        if kind == "F":
            for moment in walk.forward(stage, mine.sizes, mine.cut, before):
                yield moment.activations + there + shards.forward(moment.unit)
        elif kind == "W":
            yield before + there + of_weights(stage, mine.sizes.itemsize, adds=number in left)
        else:
            for moment in walk.backward(stage, mine.sizes, mine.cut, before, splits=kind == "I"):
                yield moment.activations + there + shards.backward(moment)
        if kind in "BW":
            left.setdefault(number, shards.left)


def of_weights(stage: Model, itemsize: int, adds: bool) -> int:
    """Bytes of the gradients that W makes: the largest is copied on its way to `.grad`."""
    largest = itemsize * max(stage.parameters)
    return 2 * largest if adds else largest + itemsize * sum(stage.parameters)


def always_there(mine: Divided, recipe: Recipe, held: StepBytes) -> int:
    """Bytes that are there in all passes."""
    if recipe.data is not None and recipe.data.kind == "fsdp2" and recipe.pipeline is not None:
        stand_ins = mine.sizes.itemsize * pipeline.parameters_of([part.shapes for part in mine.parts])
        return held.unsharded_peak + stand_ins
    return held.gradients if has_buffers(recipe) else 0


# The optimizer


def gradients_in_step(held: StepBytes, recipe: Recipe) -> int:
    """Bytes of gradients while the optimizer computes: ZeRO-1 has the shards of the means as well."""
    if recipe.data is not None and recipe.data.kind == "zero1":
        return held.gradients + held.parameters // recipe.mesh.with_different_tokens
    return held.gradients


def tensors(mine: Divided, recipe: Recipe) -> list[int]:
    """Bytes of each tensor that the optimizer updates, in its order."""
    itemsize, data = mine.sizes.itemsize, recipe.data
    if data is not None and data.kind.startswith("zero"):
        setting = mine.over["dp"]
        return [size // setting.ranks for size in data_parallel.padded_buckets(*bucketed(mine.parts, recipe, setting))]
    if data is not None and data.kind == "fsdp":
        setting = mine.over["shard"]
        return [setting.padded(sum(unit)) // setting.ranks for part in mine.parts for unit in part.units]
    shapes = [shape for part in mine.parts for _, shape in part.named]
    if data is not None and data.kind == "fsdp2":
        return [itemsize * kept_by_rank(shape, mine.over["shard"]) for shape in shapes]
    return [itemsize * prod(shape) for shape in shapes]


def optimizer_step(sizes: Sequence[int]) -> int:
    """Bytes of AdamW's temporaries: a square root, the denominator made of it, and the one of the tensor before."""
    return max(before + 2 * size for before, size in pairwise([0, *sizes]))
