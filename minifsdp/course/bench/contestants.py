"""The contestants of the step benchmark: ways to train the course's GPT on all ranks, torch's and ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import AdamW

from minifsdp.course.ladder import measure
from minifsdp.course.ladder.rungs import LEARNING_RATE, RUNGS, Trainer, plain
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from minifsdp.fsdp2 import fully_shard
from minifsdp.gpt import GPT
from minifsdp.mesh import Mesh

LIMIT = measure.Settings().limit  # of the rung fsdp-limit

Family = Literal["plain", "torch", "minifsdp", "rung"]


class Contestant(NamedTuple):
    """One way to train.

    Attributes:
        family: its origin. "plain" does not communicate: each of several ranks trains alone, on its own rows.
        what: a one-line description.
        build: wraps a fresh model, which is already on its final device. Its `blocks`, a GPT's or others, are units.
    """

    family: Family
    what: str
    build: Callable[..., Trainer]


def _trained(model: nn.Module) -> Trainer:
    """Add the optimizer that all contestants use, over the parameters as the wrapper leaves them."""
    return Trainer(model, AdamW(model.parameters(), LEARNING_RATE))


def _units(model: Any) -> set[type[nn.Module]]:
    return {type(block) for block in model.blocks}


def _torch_ddp(model: nn.Module, **options: Any) -> Trainer:
    return _trained(TorchDDP(model, **options))


def _torch_fsdp1(model: nn.Module, strategy: TorchStrategy) -> Trainer:
    where = next(model.parameters()).device
    with _one_rank_is_said():
        return _trained(
            TorchFSDP(model, None, strategy, auto_wrap_policy=ModuleWrapPolicy(_units(model)), device_id=where)
        )


def _fsdp2(model: Any, fully_shard: Callable[..., Any]) -> Trainer:
    # torch's defaults to the machine's accelerator, if it has one, even for a model on CPU.
    mesh = _mesh_of(model, Mesh(dp=dist.get_world_size()))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained(model)


def _ddp(model: nn.Module, **options: Any) -> Trainer:
    return _trained(DistributedDataParallel(model, **options))


def _fsdp(model: nn.Module, strategy: ShardingStrategy, **options: Any) -> Trainer:
    with _one_rank_is_said():
        return _trained(FullyShardedDataParallel(model, None, strategy, auto_wrap_policy=_units(model), **options))


def _fsdp_hybrid(model: GPT) -> Trainer:
    ranks = dist.get_world_size()
    pairs = _mesh_of(model, Mesh(dp=ranks, replicate=1 if ranks % 2 else ranks // 2), "replicate")
    return _fsdp(model, ShardingStrategy.HYBRID_SHARD, device_mesh=pairs)


def _mesh_of(model: nn.Module, mesh: Mesh, *also: str) -> DeviceMesh:
    return mesh.device_meshes(next(model.parameters()).device.type, ("dp", *also))["dp"]


def _rung(model: GPT, name: str) -> Trainer:
    return RUNGS[name].build(model, LIMIT)


@contextmanager
def _one_rank_is_said() -> Iterator[None]:
    """Silence the warning of FSDP, torch's and ours, that one rank shards nothing: the number of ranks says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`", UserWarning)
        yield


CONTESTANTS: Mapping[str, Contestant] = {
    "plain": Contestant("plain", "no communication", plain),
    "torch-ddp": Contestant("torch", "DistributedDataParallel", _torch_ddp),
    "torch-ddp-view": Contestant(
        "torch", "the same, gradient_as_bucket_view=True", partial(_torch_ddp, gradient_as_bucket_view=True)
    ),
    "torch-fsdp1": Contestant(
        "torch", "FullyShardedDataParallel", partial(_torch_fsdp1, strategy=TorchStrategy.FULL_SHARD)
    ),
    "torch-fsdp1-grad-op": Contestant(
        "torch", "the same, SHARD_GRAD_OP", partial(_torch_fsdp1, strategy=TorchStrategy.SHARD_GRAD_OP)
    ),
    "torch-fsdp2": Contestant(
        "torch", "fully_shard, a block at a time", partial(_fsdp2, fully_shard=torch_fully_shard)
    ),
    "our-ddp": Contestant("minifsdp", "DistributedDataParallel", _ddp),
    "our-ddp-view": Contestant(
        "minifsdp", "the same, gradient_as_bucket_view=True", partial(_ddp, gradient_as_bucket_view=True)
    ),
    "our-fsdp": Contestant(
        "minifsdp", "FullyShardedDataParallel", partial(_fsdp, strategy=ShardingStrategy.FULL_SHARD)
    ),
    "our-fsdp-grad-op": Contestant(
        "minifsdp", "the same, SHARD_GRAD_OP", partial(_fsdp, strategy=ShardingStrategy.SHARD_GRAD_OP)
    ),
    "our-fsdp-no-shard": Contestant(
        "minifsdp", "the same, NO_SHARD", partial(_fsdp, strategy=ShardingStrategy.NO_SHARD)
    ),
    "our-fsdp2": Contestant("minifsdp", "fully_shard, a block at a time", partial(_fsdp2, fully_shard=fully_shard)),
    "our-fsdp-hybrid": Contestant("minifsdp", "the same, HYBRID_SHARD in pairs of ranks", _fsdp_hybrid),
    **{name: Contestant("rung", rung.adds, partial(_rung, name=name)) for name, rung in RUNGS.items()},
}
"""All contestants by name, with default arguments unless stated. Rungs use the ladder's small buckets."""

BASELINES = ("plain", "torch-ddp-view", "torch-fsdp1", "torch-fsdp1-grad-op", "torch-fsdp2")
"""The contestants to whose seconds the others' are compared, if they take part."""
