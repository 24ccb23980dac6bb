"""Tensor parallelism for the course's GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from minifsdp.gpt import GPT, GPTStage, blocks_of
from minifsdp.tensor_parallel.columns import ColwiseParallel
from minifsdp.tensor_parallel.layer import LayerStyle, Run
from minifsdp.tensor_parallel.layouts import Layout
from minifsdp.tensor_parallel.loss import loss_parallel
from minifsdp.tensor_parallel.parallelize import divide, parallelize_module
from minifsdp.tensor_parallel.parameters import Ranks, local_part
from minifsdp.tensor_parallel.prepare import PrepareModuleInput
from minifsdp.tensor_parallel.rows import RowwiseParallel
from minifsdp.tensor_parallel.sequence import Replicated, SequenceParallel

Model = TypeVar("Model", bound=GPT | GPTStage)


def parallelize_gpt(model: Model, mesh: DeviceMesh, sequence: bool = False, regather: bool = False) -> Model:
    """Parallelize the course's GPT, or one stage of it, in place; every rank calls it with the same batch.

    The stages of a pipeline pass on what lies between layers: with sequence parallelism each rank its part of the
    sequence. The last one's logits are a DTensor, for a `cross_entropy` inside `loss_parallel`.

    For each block and micro-batch, two all-reduces in forward and two in backward send b s h elements each. With
    sequence parallelism, each all-reduce is replaced with an all-gather and a reduce-scatter.

    Args:
        model: whole, on every rank.
        mesh: the tensor-parallel ranks, a mesh of one dimension. Their number divides the number of heads.
        sequence: shard the activations between the parallel layers along the sequence.
        regather: with `sequence`, keep only this rank's part of the inputs of column-parallel layers for backward, and
            gather them again there.

    Raises:
        TypeError: the model is another one.
        ValueError: `regather` without `sequence`; the number of heads is not divisible by the number of ranks; or, in
            forward with `sequence`, the number of tokens is not.
    """
    if regather and not sequence:
        raise ValueError("regather=True without sequence=True: inputs are whole on every rank, and nothing is gathered")
    if not isinstance(model, GPT | GPTStage):
        raise TypeError(f"a {type(model).__name__} instead of the course's GPT: use parallelize_module with a plan")
    for block in blocks_of(model):
        divide(block, mesh, "heads")
    stream: Layout = Shard(1) if sequence else Replicate()
    norm = SequenceParallel(use_local_output=True) if sequence else Replicated()
    columns: dict[str, Any] = {"input_layouts": stream, "regather": regather}
    if sequence and hasattr(model, "position"):
        cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True)
        parallelize_module(model.position, mesh, cut)
    plan = {
        "": _WholeModel(sequence) if isinstance(model, GPT) else _Stage(sequence and model.is_first),
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "position": SequenceParallel(sequence_dim=0, use_local_output=True) if sequence else Replicated(),
        "blocks.*.norm1": norm,
        "blocks.*.qkv": ColwiseParallel(parts=3, **columns),
        "blocks.*.out": RowwiseParallel(output_layouts=stream),
        "blocks.*.norm2": norm,
        "blocks.*.up": ColwiseParallel(**columns),
        "blocks.*.down": RowwiseParallel(output_layouts=stream),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    here = {name: style for name, style in plan.items() if hasattr(model, name.partition(".")[0]) or not name}
    parallelize_module(model, mesh, here)
    return model


@dataclass
class _Stage(LayerStyle):
    """The first stage takes tokens [batch, context], which the ranks must be able to share."""

    takes_whole_sequences: bool

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        return {}

    def run(self, module: nn.Module, x: Tensor, ranks: Ranks) -> Run:
        if self.takes_whole_sequences and x.shape[1] % ranks.group.size():
            raise ValueError(f"sequences of {x.shape[1]} tokens cannot be cut for {ranks.group.size()} ranks: pad them")
        return (yield x, {})


class _WholeModel(_Stage):
    """Tokens [batch, context] -> the loss, computed from sharded logits."""

    def run(self, module: nn.Module, x: Tensor, ranks: Ranks) -> Run:
        with loss_parallel():
            loss = yield from super().run(module, x, ranks)
        return local_part(loss)
