"""The calls of a rank of a recipe in a step, axis by axis, and their payload in bytes (minifsdp/calls.py).

A payload is the whole tensor's: all shards of a gather, the input of a reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from minifsdp.cost import context_parallel, data_parallel, pipeline
from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.fsdp2 import Buffers
from minifsdp.cost.model import Model
from minifsdp.cost.tensor_parallel import summed, sums_one_by_one
from minifsdp.cost.total import Divided, bucketed, buckets_of_ddp, divide

if TYPE_CHECKING:
    from minifsdp.divisions import DataParallel
    from minifsdp.recipe import Recipe

_INT, _DOUBLE = 4, 8  # bytes


class Message(NamedTuple):
    """Calls of one kind.

    Attributes:
        axis: of the mesh; of ranks that average gradients "dp", "cp" or "dp_cp", whichever have several (mesh.py), and
            of hybrid sharding "shard" and "replicate".
        op: such as "all_gather".
        payload: bytes of each.
    """

    axis: str
    op: str
    payload: int


def sent(model: Model, recipe: Recipe, rank: int, setting: Setting) -> Counter[Message]:
    """A rank's calls in a step, by kind; groups of one rank send nothing.

    Args:
        model, recipe, rank, setting: as for `cost`.
    """
    return Counter(sum(sent_by_part(model, recipe, rank, setting).values(), Counter[Message]()))


def sent_by_part(model: Model, recipe: Recipe, rank: int, setting: Setting) -> dict[str, Counter[Message]]:
    """The same for each part of the recipe that sends something: "tensor", "pipeline", "context", "data"."""
    mine = divide(model, recipe, rank, setting)
    calls: dict[str, Counter[Message]] = {}
    if recipe.mesh.tp > 1:
        calls["tensor"] = _tensor(mine, recipe, setting)
    if recipe.mesh.pp > 1:
        calls["pipeline"] = _pipeline(mine, recipe, recipe.mesh.place(rank, "pp"))
    if recipe.mesh.cp > 1:
        calls["context"] = _context(mine, recipe)
    if recipe.data is not None and recipe.mesh.with_different_tokens > 1:
        calls["data"] = _data(mine, recipe, recipe.data)
    return calls


def totals(calls: Mapping[Message, int]) -> dict[str, dict[str, dict[str, int]]]:
    """By axis and operation the number of calls, and their payload in bytes."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (axis, op, payload), count in sorted(calls.items()):
        if count:
            total = found.setdefault(axis, {}).setdefault(op, {"calls": 0, "payload": 0})
            total["calls"] += count
            total["payload"] += count * payload
    return found


def _tensor(mine: Divided, recipe: Recipe, setting: Setting) -> Counter[Message]:
    """Sums: of each block two in forward and two in backward, one for the embedding, one for the head."""
    assert recipe.tensor is not None
    calls: Counter[Message] = Counter()
    sequence, micros = recipe.tensor.sequence, recipe.micro_batches
    blocks = sum(len(part.blocks) for part in mine.parts)
    sums = 4 * blocks + sum(part.is_first + part.is_last for part in mine.parts)
    tokens = setting.itemsize * mine.sizes.batch * mine.sizes.context
    stream = tokens * mine.sizes.width
    if not sequence:
        calls[Message("tp", "all_reduce", stream)] += micros * sums
    else:
        calls[Message("tp", "all_gather", stream)] += micros * (sums + 2 * blocks * recipe.tensor.regather)
        calls[Message("tp", "reduce_scatter", stream)] += micros * sums
    if any(part.is_last for part in mine.parts):  # the largest logit; the sum of exponentials, and the target's
        calls[Message("tp", "all_reduce", tokens)] += micros
        calls[Message("tp", "all_reduce", 2 * tokens)] += micros
    if sequence:
        partial = [setting.itemsize * numel for part in mine.parts for numel in summed(part)]
        times = sums_one_by_one(recipe)
        calls.update({Message("tp", "all_reduce", size): times * partial.count(size) for size in {*partial}})
        calls[Message("tp", "all_reduce", sum(partial))] += not times
    return calls


def _pipeline(mine: Divided, recipe: Recipe, place: int) -> Counter[Message]:
    """Activations up, gradients down, and the losses to all."""
    homes = pipeline.homes_of(recipe.actions)
    messages = pipeline.messages(recipe.actions[place], homes, place)
    activations = Message("pp", "send", pipeline.stream(mine.sizes, mine.cut))
    return Counter({activations: messages, Message("pp", "broadcast", _DOUBLE * recipe.micro_batches): 1})


def _context(mine: Divided, recipe: Recipe) -> Counter[Message]:
    """Of each block's attention: keys and values to the other ranks and their gradients back, or heads and back."""
    times = recipe.micro_batches * sum(len(part.blocks) for part in mine.parts)
    calls: Counter[Message] = Counter()
    for op, payload in context_parallel.payloads(mine.sizes, recipe.mesh.tp):
        calls[Message("cp", op, payload)] += times
    return calls


def _data(mine: Divided, recipe: Recipe, data: DataParallel) -> Counter[Message]:
    """Of each bucket or unit what pipeline.data_parallel says."""
    setting, micros, axis = mine.over["dp"], recipe.micro_batches, recipe.mesh.of_gradients
    numels = [numel for part in mine.parts for numel in part.parameters]
    if data.kind == "ddp":
        sizes = numels if data.when == "parameters" else buckets_of_ddp(mine.parts, setting)
        return Counter(Message(axis, "all_reduce", setting.itemsize * numel) for numel in sizes)
    calls: Counter[Message] = Counter()
    if data.kind.startswith("zero"):
        calls[Message(axis, "all_reduce", _INT * len(numels))] += 1  # which of them have a gradient
    for size, is_root in _buffers(mine, recipe, data):
        name = "fsdp-grad-op" if data.kind == "fsdp" and not data.reshard else data.kind
        repeats = pipeline.data_parallel(name, micros, is_root)
        if data.kind == "zero2":  # each of the rank's stages has a backward of its own, which reduces all buckets
            repeats = repeats._replace(reductions=len(mine.parts) * micros)
        if data.kind == "fsdp2" and recipe.pipeline is None and data.reshard and not is_root:
            repeats = repeats._replace(gathers=2)
        axis, copies = recipe.mesh.of_shards
        calls[Message(axis, "all_gather", size)] += repeats.gathers
        calls[Message(axis, "reduce_scatter", size)] += repeats.reductions
        if recipe.mesh.replicate > 1:
            share = size // mine.over["shard"].ranks
            calls[Message(copies, "all_reduce", share)] += repeats.reductions
    return calls


def _buffers(mine: Divided, recipe: Recipe, data: DataParallel) -> Iterator[tuple[int, bool]]:
    """Bytes of each padded buffer, and whether it is that of a root."""
    if data.kind.startswith("zero"):
        sizes = data_parallel.padded_buckets(*bucketed(mine.parts, recipe, mine.over["dp"]))
        yield from ((size, False) for size in sizes)
        return
    setting = mine.over["shard"]
    for part in mine.parts:
        for number, shapes in enumerate(part.shapes):
            flat = setting.padded(sum(part.units[number]))
            if shapes:
                yield flat if data.kind == "fsdp" else Buffers.of(shapes, setting).whole, number == 0
