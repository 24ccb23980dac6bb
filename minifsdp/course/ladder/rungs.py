"""The rungs of all ladders: each is a recipe, for a number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.optim import AdamW

from minifsdp.build import BUCKET_MB as BUCKET_MB
from minifsdp.build import LEARNING_RATE as LEARNING_RATE
from minifsdp.build import build
from minifsdp.build import sizes_of as sizes_of
from minifsdp.cost.bubble import bubble
from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.faults import fault, unpredicted
from minifsdp.cost.model import Model
from minifsdp.cost.peak import peak
from minifsdp.cost.total import StepBytes, cost
from minifsdp.cost.traffic import sent, totals
from minifsdp.divisions import DataParallel, PipelineParallel, TensorParallel
from minifsdp.gloo import reduces_by_all_to_all
from minifsdp.gpt import GPT
from minifsdp.instruments.launch.world import World, choose_world
from minifsdp.mesh import Mesh
from minifsdp.recipe import Recipe
from minifsdp.trainer import Trainer as Trainer

Make = Callable[[int, int], Recipe]
"""A recipe for N ranks, with k for the limiter.

Raises:
    ValueError: there is none for so many ranks.
"""


@dataclass(frozen=True)
class Rung:
    """One way to train on N ranks.

    Attributes:
        adds: the difference from the rung before, in words.
        recipe: how.
        varies: what `others` differ in, as a label; empty: nothing.
        own: its own value of that, from k.
        others: by value, the same rung built otherwise, for the explorer.
    """

    adds: str
    recipe: Make
    varies: str = ""
    own: Callable[[int], str] = str
    others: Mapping[str, Make] = field(default_factory=dict)

    def build(self, model: GPT, limit: int) -> Trainer:
        """Divide a fresh model among all ranks."""
        return build(model, self.recipe(dist.get_world_size(), limit))

    def predict(self, model: Model, setting: Setting, limit: int) -> StepBytes:
        """The bytes of `setting.rank`."""
        return cost(model, self.recipe(setting.ranks, limit), setting.rank, setting)

    def peak(self, model: Model, setting: Setting, limit: int) -> int:
        """An upper bound of all bytes that `setting.rank` has at once, on a CPU."""
        return peak(model, self.recipe(setting.ranks, limit), setting.rank, setting)

    def sent(self, model: Model, setting: Setting, limit: int) -> dict[str, dict[str, dict[str, int]]]:
        """The calls of `setting.rank` in a step, by axis and operation."""
        return totals(sent(model, self.recipe(setting.ranks, limit), setting.rank, setting))

    def fault(self, model: Model, ranks: int) -> str:
        """Why such a model cannot be trained on N ranks; empty: it can."""
        try:
            recipe = self.recipe(ranks, 1)
            return fault(model, recipe) or unpredicted(model, recipe)
        except ValueError as error:
            return str(error)

    def bubble(self, ranks: int) -> float:
        """The idle share of a pipeline on N ranks, by its formula; 0 if it is none."""
        return bubble(self.recipe(ranks, 1))


def closed_form_setting(ranks: int, world: World | None = None) -> Setting:
    """The closed form's setting for this number of ranks.

    Args:
        ranks: N.
        world: theirs; None: as `launch` would start them here.

    Raises:
        ValueError: see `choose_world`.
    """
    world = world or choose_world(ranks)
    by_all_to_all = reduces_by_all_to_all(world.backend, ranks)
    return Setting(ranks, by_all_to_all=by_all_to_all, runs_behind=bool(world.gpus))


def plain(model: GPT) -> Trainer:
    """One process, no communication: the baseline of all rungs."""
    return Trainer(model, AdamW(model.parameters(), LEARNING_RATE))


def outer(ranks: int, axes: str) -> int:
    """The outer axis of a mesh of two: the smallest divisor of N above 1.

    Raises:
        ValueError: the other one would have one rank.
    """
    size = next((n for n in range(2, ranks + 1) if ranks % n == 0), 1)
    if size == ranks:
        raise ValueError(f"{ranks} ranks are no mesh of {axes} with both above 1: choose 4 or 6")
    return size


def _data(kind: str, schedule: str = "", reshard: bool = True, hold: bool = False) -> Make:
    """Data parallelism over all ranks."""

    def recipe(ranks: int, limit: int) -> Recipe:
        data = DataParallel(kind, schedule, reshard=reshard, hold=hold)
        return Recipe(Mesh(dp=ranks), replace(data, limit=limit) if data.when == "limit" else data)

    return recipe


def _prefetched(depth: int) -> Make:
    return lambda ranks, limit: Recipe(Mesh(dp=ranks), DataParallel("fsdp", "prefetch", depth=depth))


def _limited(k: int) -> Make:
    return lambda ranks, limit: Recipe(Mesh(dp=ranks), DataParallel("fsdp", "limit", k))


def _tensor(sequence: bool = False, regather: bool = False) -> Make:
    """Tensor parallelism over all ranks."""
    return lambda ranks, limit: Recipe(Mesh(tp=ranks), None, TensorParallel(sequence, regather))


def _pipeline(order: str, stages: int = 1) -> Make:
    """A pipeline over all ranks."""
    return lambda ranks, limit: Recipe(Mesh(pp=ranks), None, None, PipelineParallel(order, stages))


def _replicated_pipeline(kind: str) -> Make:
    """1F1B, in replicas."""

    def recipe(ranks: int, limit: int) -> Recipe:
        mesh = Mesh(dp=(dp := outer(ranks, "dp x pp")), pp=ranks // dp, axes=("dp", "pp"))
        return Recipe(mesh, DataParallel(kind), None, PipelineParallel("1f1b"))

    return recipe


RUNGS: dict[str, Rung] = {
    "ddp-naive": Rung("an all-reduce per parameter, after backward", _data("ddp", "parameters")),
    "ddp-bucketed": Rung("fewer, larger all-reduces", _data("ddp", "buckets")),
    "ddp": Rung("reduction during backward", _data("ddp")),
    "zero1": Rung("optimizer state sharded", _data("zero1")),
    "zero2": Rung("gradients sharded", _data("zero2")),
    "fsdp-grad-op": Rung("parameters sharded between steps", _data("fsdp", "sync", reshard=False)),
    "fsdp": Rung("parameters sharded between uses", _data("fsdp", "sync")),
    "fsdp-overlap": Rung("communication beside compute", _data("fsdp", "overlap")),
    "fsdp-prefetch": Rung(
        "gathers and reductions without bound",
        _data("fsdp", "prefetch"),
        varies="depth",
        own=lambda limit: "all",
        others={str(depth): _prefetched(depth) for depth in (1, 2)},
    ),
    "fsdp-limit": Rung(
        "at most k units gathered",
        _data("fsdp", "limit"),
        varies="k",
        others={str(k): _limited(k) for k in (1, 2, 3)},
    ),
    "fsdp2": Rung("parameters sharded one by one, in place", _data("fsdp2")),
    "fsdp2-hold": Rung("buffers held by reference, no limiter", _data("fsdp2", "prefetch", hold=True)),
}

TENSOR_RUNGS: dict[str, Rung] = {
    "ddp": replace(RUNGS["ddp"], adds="rows divided, layers whole"),
    "tp": Rung("layers cut over ranks, rows whole", _tensor()),
    "tp-sp": Rung("norms cut along the sequence", _tensor(sequence=True)),
    "tp-sp-regather": Rung("inputs kept as parts, gathered again", _tensor(sequence=True, regather=True)),
    "tp-fsdp2": Rung(
        "FSDP2 outside, tp-sp inside",
        lambda ranks, limit: Recipe(
            Mesh(dp=(dp := outer(ranks, "dp x tp")), tp=ranks // dp),
            DataParallel("fsdp2", limit=limit),
            TensorParallel(sequence=True),
        ),
    ),
}


def _three_axes(ranks: int, data: DataParallel) -> Recipe:
    """Layers over two ranks, each layer over two, rows over what is left.

    Raises:
        ValueError: the number of ranks is no multiple of 8.
    """
    if ranks % 8:
        raise ValueError(f"{ranks} ranks are no mesh of three axes with all above 1: choose 8")
    return Recipe(Mesh(pp=2, dp=ranks // 4, tp=2), data, TensorParallel(sequence=True), PipelineParallel())


PIPELINE_RUNGS: dict[str, Rung] = {
    "alone": Rung("the whole model on every rank, no messages", lambda ranks, limit: Recipe()),
    "naive": Rung("layers placed on ranks, one computes at a time", _pipeline("naive")),
    "gpipe": Rung("micro-batches", _pipeline("gpipe")),
    "1f1b": Rung("backward as soon as it can", _pipeline("1f1b")),
    "interleaved": Rung("two stages on each rank", _pipeline("interleaved", 2)),
    "zb-h1": Rung("weight gradients fill idle time", _pipeline("zb-h1")),
    "1f1b-ddp": Rung("DDP outside, reduced once", _replicated_pipeline("ddp")),
    "1f1b-fsdp2": Rung("FSDP2 outside, gathered and reduced once", _replicated_pipeline("fsdp2")),
}

THREE_AXES_RUNGS: dict[str, Rung] = {
    "ddp": replace(RUNGS["ddp"], adds="rows divided, layers whole"),
    "3d": Rung("1F1B, ZeRO-1, tp-sp", lambda ranks, limit: _three_axes(ranks, DataParallel("zero1"))),
    "3d-fsdp2": Rung("FSDP2 instead of ZeRO-1", lambda ranks, limit: _three_axes(ranks, DataParallel("fsdp2"))),
}

_EVERY = {
    **THREE_AXES_RUNGS,
    **PIPELINE_RUNGS,
    **TENSOR_RUNGS,
    **RUNGS,
    "gpipe": replace(PIPELINE_RUNGS["gpipe"], adds="layers placed on ranks, micro-batches"),  # no `naive` before it
}
_CHOSEN = (
    *("ddp-naive", "ddp", "zero1", "zero2", "fsdp", "fsdp-overlap", "fsdp-prefetch", "fsdp-limit", "fsdp2"),
    *("tp", "tp-sp", "tp-sp-regather"),
    *("gpipe", "1f1b"),
    *("tp-fsdp2", "1f1b-fsdp2"),
    *("3d", "3d-fsdp2"),
)
ALL_RUNGS: dict[str, Rung] = {name: _EVERY[name] for name in _CHOSEN}
"""From one axis to three, on 8 ranks."""
