"""The rungs of the third ladder: layers given to ranks whole, a batch in micro-batches, and their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from torch.profiler import record_function

from minifsdp.comm import Group, world
from minifsdp.course.ladder import activations, closed_form, pipeline
from minifsdp.course.ladder.closed_form import Setting
from minifsdp.course.ladder.model import GPT
from minifsdp.course.ladder.per_parameter import Shape
from minifsdp.course.ladder.pipeline import MICROS
from minifsdp.course.ladder.rungs import BUCKET_MB, LEARNING_RATE, Rung, Sizes, Trainer, plain
from minifsdp.course.ladder.tensor import StepBytes
from minifsdp.course.ladder.tensor_rungs import mesh_sizes
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp2 import fully_shard
from minifsdp.pipeline import PipelineStage, Schedule, split_gpt
from minifsdp.pipeline.actions import Action, Plan, stages_of
from minifsdp.pipeline.executor import Batch
from minifsdp.pipeline.gpt import cross_entropy
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.naive import naive
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import Timed

PlanOf = Callable[[int], Plan]
"""The plan for so many ranks."""

Wrap = Callable[[nn.Module], nn.Module]


def plan_of(order: Callable[..., Any], ranks: int, *more: int) -> Plan:
    """With `MICROS` micro-batches for each rank."""
    return [list(order(rank, ranks, MICROS * ranks, *more)) for rank in range(ranks)]


def _naive(ranks: int) -> Plan:
    return [list(naive(rank, ranks)) for rank in range(ranks)]


def count(plan: Plan) -> tuple[int, int]:
    """The stages and micro-batches of a plan."""
    last = [max(getattr(action, each) for actions in plan for action in actions) for each in ("stage", "micro")]
    return last[0] + 1, last[1] + 1


class InStages(nn.Module):
    """This rank's stages of a model, and a step of the pipeline.

    Attributes:
        done: the actions of the last step by this rank's clock, in seconds.
    """

    def __init__(self, model: GPT, plan: Plan, group: Group, wrap: Wrap) -> None:
        super().__init__()
        (stages, micros), where = count(plan), model.norm.weight.device
        mine = stages_of(plan[group.rank()])
        self.stages = nn.ModuleList(wrap(split_gpt(model, stages, stage)) for stage in mine)
        pairs = zip(self.stages, mine, strict=True)
        parts = [PipelineStage(module, stage, stages, where, group=group) for module, stage in pairs]
        self.schedule = Schedule(plan, parts, micros, cross_entropy)
        self._compute = self.schedule.executor.compute
        self.schedule.executor.compute = self._timed  # type: ignore[method-assign]
        self.done: list[Timed] = []

    def _timed(self, action: Action, arrived: Sequence[Tensor] | None, batch: Batch) -> Sequence[Tensor]:
        start = time.monotonic()
        result = self._compute(action, arrived, batch)
        self.done.append(Timed(action, start, time.monotonic()))
        return result

    def step(self, tokens: Tensor, targets: Tensor, tell: Callable[[str], Any]) -> Tensor:
        """Forward and backward; the phase "backward" begins with this rank's first one, and actions are told, too."""
        self.done.clear()
        first, last = (any(getattr(stage, end) for stage in self.schedule.stages) for end in ("is_first", "is_last"))
        losses: list[Tensor] = []
        with ExitStack() as phase:
            phase.enter_context(_phase("forward", tell))
            forwards = {action for action in self.schedule.executor.actions if action.kind == "F"}

            def before(action: Action) -> None:
                if action not in forwards and forwards:
                    forwards.clear()
                    phase.close()
                    phase.enter_context(_phase("backward", tell))
                tell(str(action))

            self.schedule.executor.observers[:] = [before]
            target = targets if last else None
            self.schedule.step(*([tokens] if first else []), target=target, losses=losses, return_outputs=False)
        return self.schedule.share_losses(losses).mean()


@contextmanager
def _phase(name: str, tell: Callable[[str], Any]) -> Iterator[None]:
    tell(name)
    with record_function(name):
        yield


def _in_stages(make: PlanOf, model: GPT, limit: int) -> Trainer:
    return _trainer(InStages(model, make(dist.get_world_size()), world(), lambda module: module))


def _with_replicas(wrapped: Callable[[Any], Wrap], model: GPT, limit: int) -> Trainer:
    """1F1B over the inner dimension of a mesh, data parallelism over the outer one."""
    kind, sizes = model.norm.weight.device.type, mesh_sizes(dist.get_world_size())
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "pp"))
    return _trainer(InStages(model, plan_of(one_f_one_b, sizes[1]), mesh["pp"].get_group(), wrapped(mesh["dp"])))


def _trainer(model: InStages) -> Trainer:
    return Trainer(model, AdamW(model.parameters(), LEARNING_RATE), both=model.step, done=model.done)


def _ddp(mesh: Any) -> Wrap:
    options: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB, "gradient_as_bucket_view": True}
    return lambda module: DistributedDataParallel(module, process_group=mesh.get_group(), **options)


def _fsdp2(mesh: Any) -> Wrap:
    def wrap(module: Any) -> Any:
        for block in module.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)

    return wrap


# The closed form


def _stage_shapes(sizes: Sizes, stages: int) -> list[list[list[Shape]]]:
    """By stage, the shapes of its units: the root's first, which may be empty, then its blocks'."""
    root, *blocks = sizes.shapes
    found, used = [], 0
    for stage in pipeline.stages_of(len(blocks), stages):
        ends = [*(root[:2] if stage.is_first else []), *(root[2:] if stage.is_last else [])]
        found.append([ends, *blocks[used : used + stage.blocks]])
        used += stage.blocks
    return found


def _activations(sizes: Sizes, setting: Setting, plan: Plan, replicas: int, rank: int) -> int:
    stages, micros = count(plan)
    model = activations.Sizes.of(sizes.shapes[0], sizes.heads, setting.batch // replicas // micros, setting)
    return pipeline.held(plan, rank, pipeline.stages_of(len(sizes.shapes) - 1, stages), model)


def _predict(make: PlanOf, sizes: Sizes, setting: Setting, limit: int, replicas: int = 1) -> StepBytes:
    ranks = setting.ranks // replicas
    plan, rank = make(ranks), setting.rank % ranks
    units = [_stage_shapes(sizes, count(plan)[0])[stage] for stage in stages_of(plan[rank])]
    numels = [prod(shape) for stage in units for unit in stage for shape in unit]
    held = closed_form.ddp(numels, setting)
    return StepBytes(**asdict(held), activations=_activations(sizes, setting, plan, replicas, rank))


def _predict_ddp(sizes: Sizes, setting: Setting, limit: int) -> StepBytes:
    return _predict(partial(plan_of, one_f_one_b), sizes, setting, limit, mesh_sizes(setting.ranks)[0])


def _predict_fsdp2(sizes: Sizes, setting: Setting, limit: int) -> StepBytes:
    dp, ranks = mesh_sizes(setting.ranks)
    plan, rank = plan_of(one_f_one_b, ranks), setting.rank % ranks
    inner = replace(setting, ranks=dp, rank=setting.rank // ranks)
    held = pipeline.fsdp2(_stage_shapes(sizes, ranks)[rank], inner)
    return StepBytes(**asdict(held), activations=_activations(sizes, setting, plan, dp, rank))


def _predict_alone(sizes: Sizes, setting: Setting, limit: int) -> StepBytes:
    model = activations.Sizes.of(sizes.shapes[0], sizes.heads, setting.batch, setting)
    kept = activations.kept(len(sizes.shapes) - 1, model, None)
    return StepBytes(**asdict(closed_form.ddp(sizes.parameters, setting)), activations=kept)


# Plans that cannot be


def _stages_fault(sizes: Sizes, ranks: int, per_rank: int = 1) -> str:
    layers = len(sizes.shapes) - 1
    if layers < ranks * per_rank:
        return f"{layers} blocks make no {ranks * per_rank} stages: choose --layers {ranks * per_rank} or more"
    return ""


def _mesh_fault(sizes: Sizes, ranks: int) -> str:
    dp, pp = mesh_sizes(ranks)
    if dp < 2 or pp < 2:
        return f"{ranks} ranks are no mesh of dp x pp with both above 1: choose 4 or 6"
    return _stages_fault(sizes, pp)


def _whole(ranks: int) -> int:
    """All ranks see the same rows."""
    return 1


def _rung(adds: str, make: PlanOf, bubble: Callable[[int], float], per_rank: int = 1) -> Rung:
    return Rung(
        adds,
        partial(_in_stages, make),
        partial(_predict, make),
        replicas=_whole,
        fault=partial(_stages_fault, per_rank=per_rank),
        bubble=bubble,
    )


def _with_dp(adds: str, wrapped: Callable[[Any], Wrap], predict: Any) -> Rung:
    return Rung(
        adds,
        partial(_with_replicas, wrapped),
        predict,
        replicas=lambda ranks: mesh_sizes(ranks)[0],
        fault=_mesh_fault,
        bubble=lambda ranks: pipeline.bubble(mesh_sizes(ranks)[1], MICROS * mesh_sizes(ranks)[1]),
    )


PIPELINE_RUNGS: dict[str, Rung] = {
    "alone": Rung(
        "the whole model on every rank, no messages", lambda model, limit: plain(model), _predict_alone, replicas=_whole
    ),
    "naive": _rung("layers placed on ranks, one computes at a time", _naive, lambda p: pipeline.bubble(p, 1)),
    "gpipe": _rung("micro-batches", partial(plan_of, gpipe), lambda p: pipeline.bubble(p, MICROS * p)),
    "1f1b": _rung(
        "backward as soon as it can", partial(plan_of, one_f_one_b), lambda p: pipeline.bubble(p, MICROS * p)
    ),
    "interleaved": _rung(
        "two stages on each rank",
        lambda ranks: plan_of(interleaved, ranks, 2),
        lambda p: pipeline.bubble(p, MICROS * p, 2),
        per_rank=2,
    ),
    "zb-h1": _rung(
        "weight gradients fill idle time", partial(plan_of, zero_bubble), lambda p: pipeline.zero_bubble(p, MICROS * p)
    ),
    "1f1b-ddp": _with_dp("DDP outside, reduced once", _ddp, _predict_ddp),
    "1f1b-fsdp2": _with_dp("FSDP2 outside, gathered and reduced once", _fsdp2, _predict_fsdp2),
}
