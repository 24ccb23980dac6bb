"""From a recipe to a model in training: `build` has the order in which the axes divide it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from minifsdp.comm import world
from minifsdp.context_parallel import Cut, GatheredAttention, RingAttention, SequencePart, UlyssesAttention
from minifsdp.cost.faults import fault
from minifsdp.cost.model import Model, Unit
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP
from minifsdp.divisions import DataParallel
from minifsdp.flat_param import find_parameters
from minifsdp.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    ShardingStrategy,
    SyncSchedule,
)
from minifsdp.fsdp2 import Held, MixedPrecisionPolicy, Recorded, fully_shard, use_schedule
from minifsdp.gpt import GPT, Block, GPTStage, blocks_of
from minifsdp.losses import Loss, cross_entropy, token_mean
from minifsdp.pipeline import PipelineStage, Schedule, split_gpt
from minifsdp.pipeline.actions import stages_of
from minifsdp.pipeline.schedules.orders import count_stages
from minifsdp.pipeline.turns import InTurns
from minifsdp.recipe import Recipe
from minifsdp.same_model import check_same, divided_before, without_values
from minifsdp.tensor_parallel import loss_parallel, parallelize_gpt, sum_gradients
from minifsdp.tensor_parallel.parameters import local_part
from minifsdp.trainer import Trainer
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

LEARNING_RATE = 1e-3
BUCKET_MB = 0.5  # the course's model is small; torch's 25 would be a single bucket

Part: TypeAlias = GPT | GPTStage
Meshes: TypeAlias = Mapping[str, DeviceMesh]
"""By axis; of hybrid sharding, that of "dp" has two dimensions."""


def build(model: GPT, recipe: Recipe, lr: float = LEARNING_RATE) -> Trainer:
    """Divide a model as a recipe says: sequences, layers, then what is in each, then who keeps what. On every rank.

    Args:
        model: whole, the same on every rank, on the rank's device.
        recipe: for as many ranks as there are.
        lr: AdamW's learning rate.

    Raises:
        TypeError: it is another model, or no recipe.
        ValueError: the recipe is for another number of ranks; ranks give different ones, or different models; or the
            model cannot be divided so (cost/faults.py), or is already.
    """
    check_same(model, recipe)
    if found := divided_before(model):
        raise ValueError(found)
    if not isinstance(model, GPT):
        raise TypeError(f"a recipe divides minifsdp.gpt.GPT, not {type(model).__name__}: use the wrappers themselves")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{recipe!r} is of type {type(recipe).__name__}: give a Recipe, such as Recipe.parse('dp=2')")
    if found := fault(sizes_of(model), recipe) or without_values(model):
        raise ValueError(f"{recipe}: {found}")
    meshes = _meshes_of(recipe, model.norm.weight.device.type)
    if recipe.mesh.cp > 1:  # else attention is one process's
        attend_together(model, recipe, meshes)
    parts = [model] if recipe.pipeline is None else split(model, recipe, meshes)
    if recipe.tensor is not None:
        for part in parts:
            parallelize_gpt(part, meshes["tp"], recipe.tensor.sequence, recipe.tensor.regather)
    modules = [part if recipe.data is None else shard_data(part, recipe.data, meshes["dp"]) for part in parts]
    optimizer = optimizer_of(modules, recipe.data, meshes, lr)
    ends = ends_of(modules, recipe)
    loss_of = partial(token_mean, group=recipe.mesh.averaging_group(), micro_batches=recipe.micro_batches)
    if recipe.pipeline is None:
        return Trainer(modules[0], optimizer, ends, None, model.part, loss_of)
    passes = InTurns(schedule_of(modules, recipe, meshes), *ends)
    return Trainer(nn.ModuleList(modules), optimizer, (), passes, model.part, loss_of)


def sizes_of(model: GPT) -> Model:
    """The numbers of a model; one on the meta device will do."""
    names = {p: name for name, p in model.named_parameters()}
    root = {names[p]: tuple(p.shape) for p in find_parameters(model, skip=model.blocks)}
    blocks: list[Unit] = [{name: tuple(p.shape) for name, p in block.named_parameters()} for block in model.blocks]
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    return Model(root, blocks, getattr(model.blocks[0], "heads", 0), frozen=frozen)


def _meshes_of(recipe: Recipe, device_type: str) -> Meshes:
    """This rank's mesh along each axis.

    Raises:
        ValueError: the recipe is for another number of ranks.
    """
    if not recipe.divided:
        return {}
    if (ranks := world().size()) != recipe.mesh.ranks:
        raise ValueError(f"the recipe {recipe} is for {recipe.mesh.ranks} ranks, and there are {ranks}")
    return recipe.mesh.device_meshes(device_type, recipe.divided)


def attend_together(model: GPT, recipe: Recipe, meshes: Meshes) -> None:
    """Give each rank a part of every sequence, and blocks an attention to the tokens of all."""
    assert recipe.context is not None
    kinds: dict[str, Any] = {"ring": RingAttention, "gathered": GatheredAttention, "ulysses": UlyssesAttention}
    group = meshes["cp"].get_group()
    model.part = SequencePart(Cut(group.size(), recipe.context.zigzag), group.rank())
    for block in blocks_of(model):
        block.attention = kinds[recipe.context.attention](group, model.part.cut)


def split(model: GPT, recipe: Recipe, meshes: Meshes) -> list[Part]:
    """This rank's stages."""
    stages = count_stages(recipe.actions)
    return [split_gpt(model, stages, stage) for stage in stages_of(recipe.actions[meshes["pp"].get_local_rank()])]


def shard_data(part: Part, data: DataParallel, mesh: DeviceMesh) -> nn.Module:
    """A part of the model over ranks that have different rows of the batch."""
    if data.kind == "fsdp2":
        return _fsdp2(part, data, mesh)
    if data.kind == "fsdp":
        return _fsdp(part, data, mesh)
    if data.kind == "ddp":
        kinds: dict[str, Any] = {
            "overlap": partial(DistributedDataParallel, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True),
            "buckets": partial(BucketedDDP, bucket_cap_mb=BUCKET_MB),
            "parameters": NaiveDDP,
        }
        wrapped: nn.Module = kinds[data.when](part, process_group=mesh.get_group())
        return wrapped
    return part  # ZeRO's stages 1 and 2 are in the optimizer


def _fsdp(part: Part, data: DataParallel, mesh: DeviceMesh) -> nn.Module:
    schedules: dict[str, Any] = {
        "sync": SyncSchedule,
        "overlap": OverlapSchedule,
        "prefetch": partial(PrefetchSchedule, depth=data.depth),
        "limit": partial(RateLimitedSchedule, depth=None, limit=data.limit),
    }
    full, grad_op = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    if mesh.ndim > 1:
        full, grad_op = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # one rank is a rung like the others
        return FullyShardedDataParallel(
            part,
            sharding_strategy=full if data.reshard else grad_op,
            auto_wrap_policy={Block},
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if data.precision == "bf16" else None,
            device_mesh=mesh,
            schedule=schedules[data.when],
        )


def _fsdp2(part: Part, data: DataParallel, mesh: DeviceMesh) -> nn.Module:
    """A unit for each block and one for the rest; over a pipeline's micro-batches parameters stay gathered."""
    in_turns = isinstance(part, GPTStage)
    reshard = None if data.reshard and not in_turns else False  # None: all but the root
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if data.precision == "bf16" else MixedPrecisionPolicy()
    for module in (*blocks_of(part), part):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    if not in_turns:
        limited = partial(RateLimitedSchedule, depth=None, limit=data.limit)
        schedule = limited if data.when == "limit" else PrefetchSchedule
        use_schedule(part, schedule, Held if data.hold else Recorded)
    return part


def optimizer_of(
    modules: Sequence[nn.Module], data: DataParallel | None, meshes: Meshes, lr: float = LEARNING_RATE
) -> Optimizer:
    """AdamW over what this rank has; under ZeRO its state, or that and the gradients, are sharded."""
    parameters = [p for module in modules for p in module.parameters()]
    if data is None or not data.kind.startswith("zero"):
        return AdamW(parameters, lr)
    kind = Zero1Optimizer if data.kind == "zero1" else Zero2Optimizer
    return kind(parameters, AdamW, meshes["dp"].get_group(), BUCKET_MB, lr=lr)


def ends_of(modules: Sequence[nn.Module], recipe: Recipe) -> list[Callable[[], Any]]:
    """The end of backward: sums over tensor-parallel ranks, then means over data-parallel ones."""
    ends: list[Callable[[], Any]] = []
    if recipe.tensor is not None and not (recipe.data and recipe.data.shards_parameters):  # which sum their own
        ends.append(partial(sum_gradients, [p for module in modules for p in module.parameters()]))
    return ends + [module.sync_gradients for module in modules if isinstance(module, NaiveDDP | BucketedDDP)]


def schedule_of(modules: Sequence[nn.Module], recipe: Recipe, meshes: Meshes) -> Schedule:
    """The turns of this rank's stages."""
    actions, pp = recipe.actions, meshes["pp"]
    stages, where = count_stages(actions), next(modules[0].parameters()).device
    places = zip(modules, stages_of(actions[pp.get_local_rank()]), strict=True)
    mine = [PipelineStage(module, stage, stages, where, group=pp.get_group()) for module, stage in places]
    return Schedule(actions, mine, recipe.micro_batches, loss_of_parts if recipe.tensor else loss_of_whole)


def loss_of_whole(logits: Tensor, targets: Tensor, loss: Loss = cross_entropy) -> Tensor:
    """The loss of the last stage's logits [b, s, V]."""
    return loss(logits, targets)


def loss_of_parts(logits: Tensor, targets: Tensor, loss: Loss = cross_entropy) -> Tensor:
    """The same, of a sharded DTensor."""
    with loss_parallel():
        return local_part(loss(logits, targets))
