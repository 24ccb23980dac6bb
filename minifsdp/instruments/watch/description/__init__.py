"""Describe a sharded model: a table of its units or layers, the predicted bytes of a step, and warnings.

Three common disappointments with FSDP come from the units: one unit that holds everything, frozen parameters flattened
with trained ones, and padding. All are known before the first step.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.cost.data_parallel import ADAM, OptimizerState
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp2 import FSDPModule
from minifsdp.instruments.watch.description.flat import describe_flat
from minifsdp.instruments.watch.description.per_parameter import describe_per_parameter
from minifsdp.instruments.watch.description.report import Description, Prediction, UnitRow
from minifsdp.instruments.watch.description.tensor_parallel import describe_layers
from minifsdp.wrapper_names import clean_name

__all__ = ["Description", "Prediction", "UnitRow", "describe"]


def describe(model: nn.Module, optimizer: OptimizerState = ADAM) -> Description:
    """Describe the units of a sharded model, and the memory of a training step.

    Args:
        model: wrapped in FullyShardedDataParallel, or sharded by `fully_shard`; it need not have run. Of
            tensor-parallel layers, inside or alone: this rank's parts, without the buffers of their own collectives.
        optimizer: bytes of state per element (of a float32 parameter) and per parameter.

    Raises:
        ValueError: `model` is not sharded, or only modules inside it are.
    """
    if isinstance(model, FullyShardedDataParallel):
        return describe_flat(model, optimizer)
    if isinstance(model, FSDPModule):
        return describe_per_parameter(model, optimizer)
    modules: Any = model.named_modules() if isinstance(model, nn.Module) else []
    inside = [clean_name(name) for name, m in modules if isinstance(m, (FullyShardedDataParallel, FSDPModule))]
    name = type(model).__name__
    if inside:
        raise ValueError(f"{name} is not sharded itself: describe its {inside[0]}, or shard the whole model as well")
    if isinstance(model, nn.Module) and any(isinstance(p, DTensor) for p in model.parameters()):
        return describe_layers(model, optimizer)
    raise ValueError(f"{name} is not sharded: wrap it in FullyShardedDataParallel, or apply fully_shard, first")
