"""An upper bound of all bytes that a rank has at once, on a CPU: a walk over a step in the order of the program.

    at rest       parameters and the optimizer's state: always there (total.py)
    activations   kept so far, and a layer's temporaries (walk.py)
    shards        unsharded parameters, gathers under way, gradients so far and the reductions of them: `Shards`
    optimizer     the temporaries of AdamW, one tensor after another, next to the gradients

It is an upper bound, since what a layer's temporaries are at most is added to what else is there at most meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING

from minifsdp.cost import data_parallel, pipeline, walk
from minifsdp.cost.data_parallel import Gradient, Setting
from minifsdp.cost.fsdp2 import Buffers, gradient_moments, kept_by_rank
from minifsdp.cost.model import Model
from minifsdp.cost.pipeline import Stage
from minifsdp.cost.total import CAP, Divided, StepBytes, bucketed, cost, divide
from minifsdp.cost.walk import Moment

if TYPE_CHECKING:
    from minifsdp.recipe import DataParallel, Recipe


@dataclass(frozen=True)
class Shards:
    """Bytes that data parallelism has next to what is there at rest.

    Attributes:
        forward: while a unit computes.
        backward: at a moment of it.
    """

    forward: Callable[[int], int]
    backward: Callable[[Moment], int]


def peak(model: Model, recipe: Recipe, rank: int, setting: Setting) -> int:
    """An upper bound of a rank's bytes; arguments and errors as for `cost`."""
    mine, held = divide(model, recipe, rank, setting), cost(model, recipe, rank, setting)
    passes = _in_turns if recipe.pipeline is not None else _one_after_the_other
    loss = mine.sizes.itemsize * (recipe.micro_batches + 1)
    after = optimizer_step(tensors(mine, recipe)) + loss + _gradients_of_the_step(held, recipe)
    ends = loss + held.gradients_peak if keeps_gradients(recipe) else 0
    return held.parameters + held.optimizer + max(*passes(mine, recipe, held, rank), after, ends)


def keeps_gradients(recipe: Recipe) -> bool:
    """Gradients stay as backward makes them until its end, where they are reduced."""
    return recipe.data is None or recipe.data.kind in ("ddp", "zero1")


def _one_after_the_other(mine: Divided, recipe: Recipe, held: StepBytes, rank: int) -> Iterator[int]:
    """Bytes at the moments of forward and backward."""
    (part,) = mine.parts
    shards = shards_of(mine, recipe, held)
    for moment in walk.forward(part, mine.sizes, mine.cut, 0):
        yield moment.activations + shards.forward(moment.unit)
    for moment in walk.backward(part, mine.sizes, mine.cut, held.activations):
        yield moment.activations + shards.backward(moment)


def _in_turns(mine: Divided, recipe: Recipe, held: StepBytes, rank: int) -> Iterator[int]:
    """Bytes at the moments of a pipeline's actions. Later micro-batches add to gradients that are there."""
    place, itemsize = recipe.mesh.place(rank, "pp"), mine.sizes.itemsize
    stages = [Stage(len(stage.blocks), stage.is_first, stage.is_last) for stage in mine.every]
    parts = dict(zip(sorted({number for number, _, _ in recipe.actions[place]}), mine.parts, strict=True))
    there = {} if (always := gradients_throughout(recipe, held)) is None else {"always": always}
    every = held.unsharded_peak
    if recipe.data is not None and recipe.data.kind == "fsdp2":  # and stand-ins for gradients to come
        every += itemsize * pipeline.parameters_of([part.shapes for part in mine.parts])
    for did, before in pipeline.held_before(recipe.actions, place, stages, mine.sizes, mine.cut):
        if did is None:
            yield before + every + held.gradients_peak
            continue
        number, kind, _ = did
        stage, gradients = parts[number], every + sum(there.values())
        if kind == "F":
            yield from (m.activations + gradients for m in walk.forward(stage, mine.sizes, mine.cut, before))
            continue
        adds = number in there or always is not None
        if kind == "W":
            largest = itemsize * max(stage.parameters)  # it is copied on its way to `.grad`
            yield before + gradients + largest + (largest if adds else itemsize * sum(stage.parameters))
        else:
            for m in walk.backward(stage, mine.sizes, mine.cut, before, kind == "I"):
                yield m.activations + gradients + (m.fresh if adds else m.made)
        if not adds and kind != "I":
            there[number] = itemsize * sum(stage.parameters)


def gradients_throughout(recipe: Recipe, held: StepBytes) -> int | None:
    """Bytes of gradients that a pipeline has at all times; None: they come with the first micro-batch."""
    if recipe.data is None or recipe.data.kind in ("zero1", "fsdp2"):
        return None
    return held.gradients if recipe.data.kind == "ddp" else held.gradients_peak


# The optimizer


def _gradients_of_the_step(held: StepBytes, recipe: Recipe) -> int:
    """Bytes of gradients while the optimizer computes: ZeRO-1 has the shards of the means as well."""
    if recipe.data is not None and recipe.data.kind == "zero1":
        return held.gradients + held.parameters // recipe.mesh.dp
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


# Data parallelism


def shards_of(mine: Divided, recipe: Recipe, held: StepBytes) -> Shards:
    """What the ranks of data parallelism divide, and what they gather and reduce of it."""
    data = recipe.data
    if data is None or data.kind == "zero1" or (data.kind == "ddp" and data.when != "overlap"):
        return Shards(lambda unit: 0, lambda moment: moment.made)
    if data.kind == "ddp":
        return Shards(lambda unit: held.gradients, lambda moment: held.gradients + moment.fresh)
    if data.kind == "zero2":
        return _zero2(mine, recipe)
    (part,) = mine.parts
    return (_flat if data.kind == "fsdp" else _fsdp2)(part, data, mine.over["shard"])


def _zero2(mine: Divided, recipe: Recipe) -> Shards:
    """ZeRO-2: a bucket is filled while the one before it is reduced, or the one after it is filled, too."""
    numels, cap, setting, apart = bucketed(mine.parts, recipe, mine.over["dp"])
    sizes = data_parallel.padded_buckets(numels, cap, setting, apart)
    each = [*data_parallel.buckets(numels, cap, setting.itemsize), *data_parallel.buckets(apart, cap, setting.itemsize)]
    complete = [*accumulate(setting.itemsize * numel for numel in each)]
    kept = [*accumulate((size // setting.ranks for size in sizes), initial=0)]
    reducing = [0, *(size + setting.reducing(size) for size in sizes)]
    filling = [*sizes, 0, 0]

    def backward(moment: Moment) -> int:
        place = sum(size <= moment.made for size in complete)  # of the bucket that is filled
        early = moment.made - (0, *complete)[place] if apart else 0  # in `.grad` until their bucket's turn
        before = kept[max(0, place - 1)] + reducing[place] + filling[place]
        return max(before, kept[place] + filling[place] + filling[place + 1]) + early + moment.fresh

    return Shards(lambda unit: 0, backward)


def _window(blocks: Sequence[int], first: int, last: int) -> int:
    """Bytes of the blocks from `first` to `last`, which are numbered from 1, as far as there are such."""
    return sum(blocks[max(0, first - 1) : max(0, last)])


def _flat(part: Model, data: DataParallel, setting: Setting) -> Shards:
    """FSDP: units around the one that computes are gathered, its gradient is unsharded, and others are reduced."""
    root, *blocks = sizes = [setting.padded(sum(unit)) for unit in part.units]
    every, is_sharded = len(blocks), setting.ranks > 1
    ahead = {"sync": 0, "overlap": 0, "prefetch": data.depth, "limit": data.limit - 1}[data.when]
    ahead = every if ahead is None else ahead
    reductions = {"sync": 0, "overlap": 1, "prefetch": None, "limit": 1}[data.when]
    gradients = [Gradient.of(size, setting) for size in sizes]
    levels = [*data_parallel.gradient_levels(gradients, reductions)][::-1]

    def unsharded(first: int, last: int) -> int:
        return (root + (_window(blocks, first, last) if data.reshard else sum(blocks))) * is_sharded

    def backward(moment: Moment) -> int:
        unit = moment.unit
        if unit > every:  # after the blocks
            return unsharded(unit - ahead, unit) + root + moment.fresh
        complete, begun = levels[unit]
        if moment.is_over:
            return unsharded(unit - ahead, unit - 1) + begun
        return unsharded(unit - ahead, unit) + complete + moment.fresh

    return Shards(lambda unit: unsharded(unit, unit + ahead), backward)


def _fsdp2(part: Model, data: DataParallel, setting: Setting) -> Shards:
    """FSDP2: a gather has a buffer that is copied out; gradients stay as they are made until they are packed."""
    root, *blocks = [Buffers.of(unit, setting) for unit in part.shapes]
    limited, holds = data.when == "limit", data.hold and setting.runs_behind
    ahead = data.limit - 1 if limited else 1
    early = setting.itemsize * sum(map(prod, part.shapes[0][len(part.shapes[0]) - part.head :]))
    levels: dict[tuple[str, int], int] = {}
    for when, unit, size in gradient_moments(root, blocks, early, ahead, limited, holds):
        levels[when, unit] = max(size, levels.get((when, unit), 0))
    every = len(blocks)

    def forward(unit: int) -> int:
        whole = blocks[unit - 1].whole if 0 < unit <= every else 0
        return root.whole + whole + levels.get(("forward", unit), 0)

    def backward(moment: Moment) -> int:
        unit = moment.unit
        if unit > every:
            return root.whole + early + sum(block.whole for block in blocks[every - 1 - ahead :])
        whole = blocks[unit - 1].whole if 0 < unit and not moment.is_over else 0
        return root.whole + whole + levels["end" if moment.is_over else "inside", unit]

    return Shards(forward, backward)
