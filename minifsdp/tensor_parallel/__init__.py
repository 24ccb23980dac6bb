"""Tensor parallelism: one layer on several ranks, with the names of torch.distributed.tensor.parallel.

Reading order: layouts, parameters, layer, columns, rows, sequence, dropout, loss; then the interface, prepare,
replicas and parallelize; last gpt, which applies all of it to a model. The styles in torch_api are imported on first
use.
"""

from typing import TYPE_CHECKING

from minifsdp.on_first_use import on_first_use
from minifsdp.tensor_parallel.columns import ColwiseParallel
from minifsdp.tensor_parallel.gpt import parallelize_gpt
from minifsdp.tensor_parallel.layer import LayerStyle
from minifsdp.tensor_parallel.loss import cross_entropy, loss_parallel
from minifsdp.tensor_parallel.parallelize import divide, parallelize_module
from minifsdp.tensor_parallel.prepare import PrepareModuleInput
from minifsdp.tensor_parallel.rows import RowwiseParallel
from minifsdp.tensor_parallel.sequence import Replicated, SequenceParallel, sum_gradients

if TYPE_CHECKING:
    from minifsdp.tensor_parallel.torch_api.prepare import PrepareModuleInputOutput, PrepareModuleOutput

__all__ = [
    "ColwiseParallel",
    "LayerStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "cross_entropy",
    "divide",
    "loss_parallel",
    "parallelize_gpt",
    "parallelize_module",
    "sum_gradients",
]

__getattr__ = on_first_use(__name__, __all__, ".torch_api.prepare")
