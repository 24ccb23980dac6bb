"""The bytes of a rank of a recipe, composed in the order in which `build` divides the model: stages, parts, shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

from minifsdp.cost import activations, data_parallel, pipeline, tensor_parallel, zero2
from minifsdp.cost.activations import Cut
from minifsdp.cost.data_parallel import Bytes, Setting
from minifsdp.cost.faults import fault, indivisible, unpredicted
from minifsdp.cost.fsdp2 import Buffers, fsdp2
from minifsdp.cost.model import CUTS, Model, part, stages
from minifsdp.cost.pipeline import Did, Stage
from minifsdp.cost.sizes import Attention, Sizes

if TYPE_CHECKING:
    from minifsdp.divisions import DataParallel
    from minifsdp.recipe import Recipe

CAP = 2**19  # bytes of a bucket: half a MiB, as build.py has it


@dataclass(frozen=True)
class StepBytes(Bytes):
    """As `Bytes`, and what forward leaves for backward.

    Attributes:
        activations: bytes from the end of forward, with the loss, without the batch; of a pipeline, the most that are
            held before an action.
    """

    activations: int


@dataclass(frozen=True)
class Divided:
    """A rank's stages of a model, and its parts of them.

    Attributes:
        every: all stages.
        parts: of each of this rank's stages its part.
        cut: of layers by tensor parallelism; None: they are whole.
        sizes: what a micro-batch's activations depend on.
        over: the setting along an axis: its ranks, and this rank's place. "dp": those that average gradients; "shard":
            those of them that have different shards.
    """

    every: Sequence[Model]
    parts: Sequence[Model]
    cut: Cut | None
    sizes: Sizes
    over: Mapping[str, Setting]


def divide(model: Model, recipe: Recipe, rank: int, setting: Setting) -> Divided:
    """Stages, and parts of them; arguments and errors as for `cost`."""
    if found := fault(model, recipe) or unpredicted(model, recipe):
        raise ValueError(f"{recipe}: {found}")
    if recipe.divided and not 0 <= rank < recipe.mesh.ranks:
        raise ValueError(f"{recipe}: rank {rank} of {recipe.mesh.ranks} ranks: choose 0 to {recipe.mesh.ranks - 1}")
    if found := _too_long(model, recipe, setting.context):
        raise ValueError(f"{recipe}: {found}")
    mesh, tensor, replicas, micros = recipe.mesh, recipe.tensor, recipe.mesh.dp, recipe.micro_batches
    if setting.batch % (replicas * micros):
        raise ValueError(
            f"{recipe}: {setting.batch} rows are not {replicas} replicas' {micros} micro-batches each: choose a "
            f"multiple of {replicas * micros}"
        )
    every = stages(model, 1 + max(stage for did in recipe.actions for stage, _, _ in did))
    mine = [every[number] for number in sorted({stage for stage, _, _ in recipe.actions[mesh.place(rank, "pp")]})]
    cut = (
        None
        if tensor is None
        else Cut(mesh.tp, tensor.sequence, tensor.regather, adds_bias=mesh.place(rank, "tp") == 0)
    )
    parts = mine if cut is None else [part(stage, mesh.tp, mesh.place(rank, "tp")) for stage in mine]
    averaging = mesh.averaging(rank)
    place, shards = averaging.index(rank), len(averaging) // mesh.replicate
    over = {
        "dp": replace(setting, ranks=len(averaging), rank=place),
        "shard": replace(setting, ranks=shards, rank=place % shards),
        "tp": replace(setting, ranks=mesh.tp, rank=mesh.place(rank, "tp")),
    }
    rows, attention = setting.batch // replicas // micros, Attention()
    if recipe.context is not None:
        attention = Attention(mesh.cp, mesh.place(rank, "cp"), recipe.context.attention, recipe.context.zigzag)
    return Divided(every, parts, cut, _sizes(model, parts[-1], rows, setting, attention), over)


def _too_long(model: Model, recipe: Recipe, length: int) -> str:
    """Why there are no sequences of this length, with the cure; empty: there are."""
    context, _ = model.root["position.weight"]
    if not 0 <= length <= context:
        return f"sequences of {length} tokens in a model with context {context}: choose 1 to {context}, or 0 for all"
    return indivisible(recipe, length)


def cost(model: Model, recipe: Recipe, rank: int, setting: Setting) -> StepBytes:
    """The bytes of a rank.

    Args:
        model: whole.
        recipe: how it is trained.
        rank: as in the default process group.
        setting: its `ranks` and `rank` are taken from the recipe.

    Raises:
        ValueError: the model cannot be trained so; or there is no arithmetic for it (faults.py).
    """
    mine, place = divide(model, recipe, rank, setting), recipe.mesh.place(rank, "pp")
    held = _shards(mine, recipe, place)
    if recipe.tensor is not None and recipe.tensor.sequence:
        held = _with_sequence(held, mine, recipe)
    return StepBytes(**asdict(held), activations=_activations(mine, recipe, place))


def _sizes(model: Model, last: Model, rows: int, setting: Setting, attention: Attention) -> Sizes:
    """Of a micro-batch; `last` has this rank's part of the head, if the rank has one."""
    (vocabulary, width), (context, _) = model.root["embed.weight"], model.root["position.weight"]
    of_head = "head.weight" if "head.weight" in last.root else "embed.weight"  # tied: the embedding's
    vocabulary, _ = last.root.get(of_head, (vocabulary, width))
    tokens = (setting.context or context) // attention.ranks
    return Sizes(rows, tokens, width, model.heads, vocabulary, setting.itemsize, setting.runs_behind, attention)


def _shards(mine: Divided, recipe: Recipe, place: int) -> Bytes:
    """Parameters, gradients and optimizer state of this rank's parts, over the data-parallel ranks."""
    data, parts, setting, over = recipe.data, mine.parts, mine.over["dp"], mine.over["shard"]
    numels = [numel for part in parts for numel in part.parameters]
    if data is None or data.kind == "ddp":
        copies = data is not None and data.when == "buckets"
        return data_parallel.ddp(numels, setting, max(buckets_of_ddp(parts, setting)) if copies else 0)
    if data.kind == "zero1":
        return data_parallel.zero1(*bucketed(parts, recipe, setting))
    if data.kind == "zero2":
        return replace(data_parallel.zero2(*bucketed(parts, recipe, setting)), gradients_peak=_zero2_peak(mine, recipe))
    if data.kind == "fsdp":
        return _fsdp(parts, data, over, recipe.actions[place])
    if recipe.pipeline is not None:
        return pipeline.fsdp2([part.shapes for part in parts], over)
    return _fsdp2(parts[0], data, over)


def buckets_of_ddp(parts: Sequence[Model], setting: Setting) -> list[int]:
    """Elements of each bucket; every stage has its own."""
    return [numel for part in parts for numel in data_parallel.buckets(part.parameters, CAP, setting.itemsize)]


def bucketed(parts: Sequence[Model], recipe: Recipe, setting: Setting) -> tuple[list[int], int, Setting, list[int]]:
    """Arguments of data_parallel.padded_buckets: parameters that tensor parallelism cuts have buckets apart."""
    numels = [numel for part in parts for numel in part.parameters]
    alike, apart = ([*compress(numels, each)] for each in _alike(parts, recipe))
    return alike, CAP, setting, apart


def _alike(parts: Sequence[Model], recipe: Recipe) -> tuple[list[bool], list[bool]]:
    """Of each parameter whether tensor parallelism cuts it, or not, as it does the first; and the opposite."""
    is_cut = [name in CUTS and recipe.tensor is not None for part in parts for name, _ in part.named]
    return [each == is_cut[0] for each in is_cut], [each != is_cut[0] for each in is_cut]


def zero2_levels(mine: Divided, recipe: Recipe, adds: bool) -> list[list[zero2.Level]]:
    """Bytes of gradients in a backward of each of this rank's stages; `adds`: to those of an earlier one."""
    setting, parts = mine.over["dp"], mine.parts
    alike, cap, _, apart = bucketed(parts, recipe, setting)
    first = data_parallel.bucket_numbers(alike, cap, setting.itemsize)
    second = [1 + max(first) + number for number in data_parallel.bucket_numbers(apart, cap, setting.itemsize)]
    left = {True: iter(first), False: iter(second)}
    numbers = [next(left[is_alike]) for is_alike in _alike(parts, recipe)[0]]
    sizes, members, of_each = data_parallel.padded_buckets(alike, cap, setting, apart), Counter(numbers), iter(numbers)
    arriving = [zero2.arrivals(part, setting.itemsize, [*islice(of_each, len(part.named))]) for part in parts]
    return [[*zero2.levels(each, sizes, members, setting, adds)] for each in arriving]


def _zero2_peak(mine: Divided, recipe: Recipe) -> int:
    """The most bytes of gradients, also beside what sequence parallelism receives."""
    adds = recipe.micro_batches > 1 or len(mine.parts) > 1
    levels = [level for stage in zero2_levels(mine, recipe, adds) for level in stage]
    peak = max(level.most for level in levels)
    if recipe.tensor is None or not recipe.tensor.sequence:
        return peak
    there = max(level.left for level in levels if level.name in tensor_parallel.BEFORE_REDUCTIONS)
    return max(peak, there + tensor_parallel.received(pipeline.stream(mine.sizes), mine.over["tp"]))


def of_fsdp(data: DataParallel) -> dict[str, Any]:
    """The schedule as data_parallel.fsdp takes it."""
    ahead = {"forward_depth": data.depth, "backward": "pre", "backward_depth": data.depth}
    by_name: dict[str, dict[str, Any]] = {
        "sync": {},
        "overlap": {"reductions": 1},
        "prefetch": {"reductions": data.depth, **ahead},
        "limit": {"reductions": 1, "limit": data.limit, **ahead},
    }
    return by_name[data.when]


def _fsdp(parts: Sequence[Model], data: DataParallel, setting: Setting, actions: Sequence[Did]) -> Bytes:
    """Of a rank's stages, whose passes take turns: a backward adds to earlier ones, next to other stages' gradients."""
    stages = dict(zip(sorted({stage for stage, _, _ in actions}), parts, strict=True))

    def of(stage: Model, accumulates: bool) -> Bytes:
        how = {"reshard_after_forward": data.reshard, "accumulates": accumulates, **of_fsdp(data)}
        return data_parallel.fsdp(stage.units, setting, root_is_first=root_is_first(stage, data), **how)

    each = {number: of(stage, False) for number, stage in stages.items()}
    there: dict[int, int] = {}
    peak = 0
    for number in (stage for stage, kind, _ in actions if kind == "B"):
        others = sum(there.values()) - there.get(number, 0)
        peak = max(peak, others + of(stages[number], number in there).gradients_peak)
        there[number] = each[number].gradients
    return Bytes(
        parameters=sum(stage.parameters for stage in each.values()),
        gradients=sum(there.values()),
        optimizer=sum(stage.optimizer for stage in each.values()),
        unsharded_peak=max(
            each[number].unsharded_peak + gathered_beside(stage, parts, data, setting)
            for number, stage in stages.items()
        ),
        gradients_peak=peak,
    )


def root_is_first(stage: Model, data: DataParallel) -> bool:
    """The root's gradient is there with a block's: where it has a head, or the last block's reduction waits for it."""
    return stage.is_last or data.when == "overlap"


def gathered_beside(stage: Model, parts: Sequence[Model], data: DataParallel, setting: Setting) -> int:
    """Bytes of FSDP's units that stay gathered in the passes of one of a rank's stages: of others the roots, or all.

    The last stage's backward follows its forward at once, and frees its root.
    """
    others = [part for part in parts if part is not stage and not (part.is_last and data.reshard)]
    units = [unit for part in others for unit in (part.units[:1] if data.reshard else part.units)]
    return sum(setting.padded(sum(unit)) for unit in units) if setting.ranks > 1 else 0


def of_fsdp2(data: DataParallel, setting: Setting) -> dict[str, Any]:
    """The schedule as `fsdp2` takes it."""
    limited = data.when == "limit"
    holds = data.hold and setting.runs_behind
    ahead = data.limit - 1 if limited else 1
    return {"ahead": ahead, "limited": limited, "holds": holds, "reshard": data.reshard}


def _fsdp2(part: Model, data: DataParallel, setting: Setting, inside: int = 0) -> Bytes:
    return fsdp2(part.shapes, part.head, setting, inside=inside, **of_fsdp2(data, setting))


def _with_sequence(held: Bytes, mine: Divided, recipe: Recipe) -> Bytes:
    """Gradients beside what sequence parallelism sums and receives."""
    tp, data, parts = mine.over["tp"], recipe.data, mine.parts
    stream = pipeline.stream(mine.sizes)
    arriving = tensor_parallel.received(stream, tp)
    if data is not None and data.kind == "fsdp2":
        if recipe.pipeline is not None:
            return held
        (part,) = parts
        held = _fsdp2(part, data, mine.over["shard"], tensor_parallel.inside_block(part, stream, tp))
        last = Buffers.of(part.shapes[-1], mine.over["shard"]).whole
        begins = tensor_parallel.before_blocks(part, tp) + arriving + last
        return replace(held, gradients_peak=max(held.gradients_peak, begins))
    if data is not None and data.kind == "zero2":  # _zero2_peak
        return held
    all_there = recipe.micro_batches > 1 or (data is not None and data.kind == "ddp" and data.when == "overlap")
    after = 0 if all_there else tensor_parallel.after_last_reduction(parts[0], tp)
    summands = tp.itemsize * sum(sum(tensor_parallel.summed(part)) for part in parts)
    if tensor_parallel.sums_one_by_one(recipe):
        summands = 0
    peak = max(held.gradients_peak, held.gradients + summands, held.gradients - after + arriving)
    return replace(held, gradients_peak=peak)


def _activations(mine: Divided, recipe: Recipe, place: int) -> int:
    """Of a whole model between forward and backward, or of a pipeline's stages the most before an action."""
    if recipe.pipeline is None:
        return activations.kept(len(mine.every[0].blocks), mine.sizes, mine.cut)
    stages = [Stage(len(stage.blocks), stage.is_first, stage.is_last) for stage in mine.every]
    return pipeline.held(recipe.actions, place, stages, mine.sizes, mine.cut)
