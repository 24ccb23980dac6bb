"""The rungs of the ladder: the construction of each on the model, and its closed form."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from minifsdp.course.ladder import closed_form
from minifsdp.course.ladder.closed_form import Bytes, Setting
from minifsdp.course.ladder.model import GPT, Block
from minifsdp.course.ladder.per_parameter import fsdp2 as fsdp2_bytes
from minifsdp.course.launch.world import World, choose_world
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP
from minifsdp.flat_param import find_parameters
from minifsdp.fsdp import (
    FullyShardedDataParallel,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    ShardingStrategy,
    SyncSchedule,
)
from minifsdp.fsdp2 import Held, Recorded, fully_shard, use_schedule
from minifsdp.gloo import reduces_by_all_to_all
from minifsdp.pipeline.simulate import Timed
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

LEARNING_RATE = 1e-3
BUCKET_MB = 0.5  # the course's model is small; torch's 25 would be a single bucket


@dataclass
class Trainer:
    """A model in training: one step is forward, `backward()`, `after_backward()`, `step()`, `zero_grad()`.

    Attributes:
        both: forward and backward where they are not one after the other: takes tokens, targets and `tell`, and
            returns the loss.
        done: a pipeline's actions of the last step, with their times on this rank.
    """

    model: nn.Module
    optimizer: Optimizer
    after_backward: Callable[[], Any] = lambda: None
    both: Callable[[Tensor, Tensor, Callable[[str], Any]], Tensor] | None = None
    done: Sequence[Timed] = ()


class Sizes(NamedTuple):
    """A model in plain numbers.

    Attributes:
        parameters: elements of each, in their order.
        shapes: of each, unit by unit, the root's first.
        head: how many of the root's, its last ones, are used after the blocks.
        heads: of attention; 0: unknown.
    """

    parameters: list[int]
    shapes: list[list[tuple[int, ...]]]
    head: int
    heads: int = 0

    @property
    def units(self) -> list[list[int]]:
        """Elements of each parameter, unit by unit."""
        return [[prod(shape) for shape in unit] for unit in self.shapes]


class Rung(NamedTuple):
    """One way to train on N ranks.

    Attributes:
        adds: the difference from the rung before, in words.
        build: wraps a fresh model; takes the model and the limiter's k.
        predict: its bytes from the model's sizes, the setting and k.
        varies: what `others` differ in, as a label; empty: nothing.
        own: its own value of that, from k.
        others: by value, the same rung built otherwise, for the explorer.
        replicas: into how many shares N ranks cut a batch. Neighbours with the same share are one group.
        fault: why a model of these sizes cannot be trained on N ranks, in words; empty: it can.
        bubble: of a pipeline on N ranks, by a formula; None: it is none.
    """

    adds: str
    build: Callable[[GPT, int], Trainer]
    predict: Callable[[Sizes, Setting, int], Bytes]
    varies: str = ""
    own: Callable[[int], str] = str
    others: Mapping[str, Callable[[GPT, int], Trainer]] = {}
    replicas: Callable[[int], int] = lambda ranks: ranks
    fault: Callable[[Sizes, int], str] = lambda sizes, ranks: ""
    bubble: Callable[[int], float] | None = None


def sizes_of(model: GPT) -> Sizes:
    """The numbers that the closed form takes; a model on the meta device will do."""
    root = list(find_parameters(model, skip=model.blocks))
    units = [root, *(list(block.parameters()) for block in model.blocks)]
    last = {*model.norm.parameters(), *model.head.parameters()} - {model.embed.weight}
    shapes = [[tuple(p.shape) for p in unit] for unit in units]
    return Sizes([p.numel() for p in model.parameters()], shapes, len(last), getattr(model.blocks[0], "heads", 0))


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


def _ddp_naive(model: GPT, limit: int) -> Trainer:
    ddp = NaiveDDP(model)
    return Trainer(ddp, AdamW(ddp.parameters(), LEARNING_RATE), ddp.sync_gradients)


def _ddp_bucketed(model: GPT, limit: int) -> Trainer:
    ddp = BucketedDDP(model, bucket_cap_mb=BUCKET_MB)
    return Trainer(ddp, AdamW(ddp.parameters(), LEARNING_RATE), ddp.sync_gradients)


def _ddp(model: GPT, limit: int) -> Trainer:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return Trainer(ddp, AdamW(ddp.parameters(), LEARNING_RATE))


def _zero1(model: GPT, limit: int) -> Trainer:
    return Trainer(model, Zero1Optimizer(model.parameters(), AdamW, bucket_cap_mb=BUCKET_MB, lr=LEARNING_RATE))


def _zero2(model: GPT, limit: int) -> Trainer:
    return Trainer(model, Zero2Optimizer(model.parameters(), AdamW, bucket_cap_mb=BUCKET_MB, lr=LEARNING_RATE))


def _fsdp(
    model: GPT, limit: int, schedule: Any = SyncSchedule, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
) -> Trainer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # one rank is a rung like the others
        fsdp = FullyShardedDataParallel(model, None, strategy, auto_wrap_policy={Block}, schedule=schedule)
    return Trainer(fsdp, AdamW(fsdp.parameters(), LEARNING_RATE))


def _fsdp_prefetch(model: GPT, limit: int, depth: int | None = None) -> Trainer:
    return _fsdp(model, limit, partial(PrefetchSchedule, depth=depth))


def _fsdp_limit(model: GPT, limit: int) -> Trainer:
    return _fsdp(model, limit, partial(RateLimitedSchedule, depth=None, limit=limit))


def _fsdp_limited(k: int, model: GPT, limit: int) -> Trainer:
    return _fsdp_limit(model, k)


def one_by_one(model: GPT, limit: int, schedule: Any = None, keeper: Any = Recorded, mesh: Any = None) -> Trainer:
    """FSDP2, over the ranks of a mesh; None: all."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    use_schedule(model, schedule or partial(RateLimitedSchedule, depth=None, limit=limit), keeper)
    return Trainer(model, AdamW(model.parameters(), LEARNING_RATE))


_CAP = int(BUCKET_MB * 2**20)


def _predict_ddp(sizes: Sizes, setting: Setting, limit: int) -> Bytes:
    return closed_form.ddp(sizes.parameters, setting)


def _predict_ddp_bucketed(sizes: Sizes, setting: Setting, limit: int) -> Bytes:
    return closed_form.ddp(sizes.parameters, setting, staging=max(closed_form.buckets(sizes.parameters, _CAP)))


def _predict_zero1(sizes: Sizes, setting: Setting, limit: int) -> Bytes:
    return closed_form.zero1(sizes.parameters, _CAP, setting)


def _predict_zero2(sizes: Sizes, setting: Setting, limit: int) -> Bytes:
    return closed_form.zero2(sizes.parameters, _CAP, setting)


def _predict_fsdp(sizes: Sizes, setting: Setting, limit: int, **schedule: Any) -> Bytes:
    return closed_form.fsdp(sizes.units, setting, **schedule)


def _predict_fsdp_limit(sizes: Sizes, setting: Setting, limit: int) -> Bytes:
    return closed_form.fsdp(sizes.units, setting, reductions=1, limit=limit, **_UNBOUNDED)


def _predict_fsdp2(sizes: Sizes, setting: Setting, limit: int) -> Bytes:
    return fsdp2_bytes(sizes.shapes, sizes.head, setting, ahead=limit - 1, limited=True, holds=False)


def _predict_fsdp2_hold(sizes: Sizes, setting: Setting, limit: int) -> Bytes:
    return fsdp2_bytes(sizes.shapes, sizes.head, setting, ahead=1, limited=False, holds=setting.runs_behind)


_UNBOUNDED: dict[str, Any] = {"forward_depth": None, "backward": "pre", "backward_depth": None}

RUNGS: dict[str, Rung] = {
    "ddp-naive": Rung("an all-reduce per parameter, after backward", _ddp_naive, _predict_ddp),
    "ddp-bucketed": Rung("fewer, larger all-reduces", _ddp_bucketed, _predict_ddp_bucketed),
    "ddp": Rung("reduction during backward", _ddp, _predict_ddp),
    "zero1": Rung("optimizer state sharded", _zero1, _predict_zero1),
    "zero2": Rung("gradients sharded", _zero2, _predict_zero2),
    "fsdp-grad-op": Rung(
        "parameters sharded between steps",
        partial(_fsdp, strategy=ShardingStrategy.SHARD_GRAD_OP),
        partial(_predict_fsdp, reshard_after_forward=False),
    ),
    "fsdp": Rung("parameters sharded between uses", _fsdp, _predict_fsdp),
    "fsdp-overlap": Rung(
        "communication beside compute", partial(_fsdp, schedule=OverlapSchedule), partial(_predict_fsdp, reductions=1)
    ),
    "fsdp-prefetch": Rung(
        "gathers and reductions without bound",
        _fsdp_prefetch,
        partial(_predict_fsdp, reductions=None, **_UNBOUNDED),
        varies="depth",
        own=lambda limit: "all",
        others={str(depth): partial(_fsdp_prefetch, depth=depth) for depth in (1, 2)},
    ),
    "fsdp-limit": Rung(
        "at most k units gathered",
        _fsdp_limit,
        _predict_fsdp_limit,
        varies="k",
        others={str(k): partial(_fsdp_limited, k) for k in (1, 2, 3)},
    ),
    "fsdp2": Rung("parameters sharded one by one, in place", one_by_one, _predict_fsdp2),
    "fsdp2-hold": Rung(
        "buffers held by reference, no limiter",
        partial(one_by_one, schedule=PrefetchSchedule, keeper=Held),
        _predict_fsdp2_hold,
    ),
}
