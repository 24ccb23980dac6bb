"""Data parallelism inside a stage: gradients add up over the micro-batches, and are reduced once, at the end.

A backward that reduced what it has made would send every gradient once for each micro-batch (ZeRO-2 and ZeRO-3 would
have to: they keep no whole gradients). So replicas stay silent during the step. The optimizer of ZeRO-1 reduces in its
own step, and needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minifsdp.fsdp2.accumulation import accumulating, drop_accumulated
from minifsdp.fsdp2.hooks import has_module_group, state_of
from minifsdp.pipeline import torch_ddp
from minifsdp.pipeline.stage import PipelineStage


def check_wrapped(module: nn.Module) -> None:
    """
    Raises:
        TypeError: a stage is wrapped by torch's DDP with an option for which it must reduce every micro-batch.
    """
    for child in module.modules():
        if isinstance(child, TorchDDP):
            torch_ddp.check_supported(child)


@contextmanager
def reduced_once(replicas: Sequence[Any]) -> Iterator[None]:
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
        elif has_module_group(module):
            state_of(module).reduce_accumulated()
        else:
            module.reduce_accumulated()


def drop_unreduced(stages: Iterable[PipelineStage]) -> None:
    """A step has failed: what its backwards have left in FSDP2's units must not be added to the next step's."""
    for module in replicas_in(stages):
        if has_module_group(module):
            drop_accumulated(module)


def replicas_in(stages: Iterable[PipelineStage]) -> list[Any]:
    """The outermost modules of stages that reduce gradients: FSDP2's, ours with DDP's `reduce_accumulated`, torch's."""
    return [module for stage in stages for module in _outermost(stage.submod)]


def _outermost(module: nn.Module) -> list[Any]:
    if has_module_group(module) or hasattr(type(module), "reduce_accumulated") or isinstance(module, TorchDDP):
        return [module]
    return [found for child in module.children() for found in _outermost(child)]


def _silent(module: Any) -> AbstractContextManager[None]:
    return accumulating(module) if has_module_group(module) else module.no_sync()
