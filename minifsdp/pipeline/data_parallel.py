"""Data parallelism inside a stage: gradients add up over the micro-batches, and are reduced once, at the end.

A backward that reduced what it has made would send every gradient once for each micro-batch (ZeRO-2 and ZeRO-3 would
have to: they keep no whole gradients). So replicas stay silent during the step. The optimizer of ZeRO-1 reduces in its
own step, and needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp2 import FSDPModule
from minifsdp.fsdp2.accumulation import accumulating, drop_accumulated
from minifsdp.pipeline import torch_ddp
from minifsdp.pipeline.stage import PipelineStage

Replica: TypeAlias = DistributedDataParallel | FSDPModule | TorchDDP


def check_wrapped(module: nn.Module) -> None:
    """
    Raises:
        TypeError: a stage is wrapped by torch's DDP with an option for which it must reduce every micro-batch.
    """
    for child in module.modules():
        if isinstance(child, TorchDDP):
            torch_ddp.check_supported(child)


@contextmanager
def reduced_once(replicas: Sequence[Replica]) -> Iterator[None]:
    """Backwards inside leave gradients unreduced; afterwards each module's are reduced, in this order.

    Where the user has switched the reduction off, they stay so, for the next steps to add to.
    """
    with ExitStack() as silent:
        for module in replicas:
            silent.enter_context(_silent(module))
        yield
    for module in replicas:
        if isinstance(module, TorchDDP):
            torch_ddp.reduce_accumulated(module)
        else:
            module.reduce_accumulated()


def drop_unreduced(stages: Iterable[PipelineStage]) -> None:
    """A step has failed: what its backwards have left in FSDP2's units must not be added to the next step's."""
    for module in replicas_in(stages):
        if isinstance(module, FSDPModule):
            drop_accumulated(module)


def replicas_in(stages: Iterable[PipelineStage]) -> list[Replica]:
    """The outermost modules of stages that reduce gradients."""
    return [module for stage in stages for module in _outermost(stage.submod)]


def _outermost(module: nn.Module) -> list[Replica]:
    if isinstance(module, (DistributedDataParallel, FSDPModule, TorchDDP)):
        return [module]
    return [found for child in module.children() for found in _outermost(child)]


def _silent(module: Replica) -> AbstractContextManager[None]:
    return accumulating(module) if isinstance(module, FSDPModule) else module.no_sync()
