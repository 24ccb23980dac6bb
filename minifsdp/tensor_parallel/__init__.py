"""Tensor parallelism: one layer on several ranks, with the names of torch.distributed.tensor.parallel.

Reading order: layouts, parameters, layer, columns, rows, sequence, dropout, loss; then the interface, prepare,
replicas and parallelize; last gpt, which applies all of it to a model.
"""

from minifsdp.tensor_parallel.columns import ColwiseParallel as ColwiseParallel
from minifsdp.tensor_parallel.gpt import parallelize_gpt as parallelize_gpt
from minifsdp.tensor_parallel.layer import LayerStyle as LayerStyle
from minifsdp.tensor_parallel.loss import cross_entropy as cross_entropy
from minifsdp.tensor_parallel.loss import loss_parallel as loss_parallel
from minifsdp.tensor_parallel.parallelize import divide as divide
from minifsdp.tensor_parallel.parallelize import parallelize_module as parallelize_module
from minifsdp.tensor_parallel.prepare import PrepareModuleInput as PrepareModuleInput
from minifsdp.tensor_parallel.prepare import PrepareModuleInputOutput as PrepareModuleInputOutput
from minifsdp.tensor_parallel.prepare import PrepareModuleOutput as PrepareModuleOutput
from minifsdp.tensor_parallel.rows import RowwiseParallel as RowwiseParallel
from minifsdp.tensor_parallel.sequence import Replicated as Replicated
from minifsdp.tensor_parallel.sequence import SequenceParallel as SequenceParallel
from minifsdp.tensor_parallel.sequence import sum_gradients as sum_gradients
