"""A layer by columns: each rank makes a part of the features.

x W^T + b with W [out, in]: rank r has rows W_r [out / N, in] and b_r [out / N], and makes x W_r^T + b_r: columns of the
result. It needs all of x, and its gradient of x is a summand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from minifsdp.tensor_parallel.layer import LayerStyle, Run, arrived, left, local_parameters
from minifsdp.tensor_parallel.layouts import Layout, from_front, relaid
from minifsdp.tensor_parallel.parameters import Ranks


@dataclass(kw_only=True)
class ColwiseParallel(LayerStyle):
    """An `nn.Linear` or `nn.Embedding` of which each rank makes a part of the features.

    Attributes:
        input_layouts: of an input that is a plain tensor; default: `Replicate()`.
        output_layouts: default: `Shard(-1)`.
        use_local_output: return this rank's part; False: a DTensor.
        parts: matrices that lie one below the other in the weight, each of which is cut: 3 for a fused q, k, v. The
            weight [out, in] becomes a DTensor [parts, out / parts, in] with `Shard(1)`, the bias one of [parts, ..].
        regather: keep for backward only the part of the input that came, and gather it there once more.
    """

    input_layouts: Layout = None
    output_layouts: Layout = None
    use_local_output: bool = True
    parts: int | None = None
    regather: bool = False

    def __post_init__(self) -> None:
        self.input_layouts = self.input_layouts or Replicate()
        self.output_layouts = self.output_layouts or Shard(-1)

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        if isinstance(module, nn.Linear):
            return {name: Shard(0) if self.parts in (None, 1) else Shard(1) for name, _ in module.named_parameters()}
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"ColwiseParallel is for nn.Linear and nn.Embedding, not {type(module).__name__}")
        if module.max_norm is not None or module.sparse:
            raise ValueError("ColwiseParallel cannot cut an nn.Embedding with max_norm or sparse gradients: unset them")
        return {"weight": Shard(1)}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.parts is not None and self.parts > 1:
            as_parts(cast(nn.Linear, module), self.parts)
        return super()._apply(module, device_mesh)

    def run(self, module: Any, x: Tensor, ranks: Ranks) -> Run:
        x = _kept(x) if self.regather else x
        whole = arrived(x, self.input_layouts, Replicate(), ranks, gradient=Partial())
        parameters = local_parameters(module)
        if self.parts not in (None, 1):
            parameters = {name: None if p is None else p.flatten(0, 1) for name, p in parameters.items()}
        with _gathered_again(whole, x, self.input_layouts, ranks) if self.regather else nullcontext():
            y = yield whole, {"_parameters": parameters}
        features = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
        shape = torch.Size((*y.shape[:-1], features))
        return left(y, Shard(-1), self.output_layouts, ranks, self.use_local_output, shape)


def as_parts(module: nn.Linear, parts: int) -> None:
    """Let the weight be [parts, out / parts, in] and the bias [parts, out / parts], as they are in memory."""
    if module.out_features % parts:
        raise ValueError(f"a weight of {module.out_features} rows is not one of {parts} equal parts")
    for name, p in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(p.detach().unflatten(0, (parts, -1)), p.requires_grad))


@contextmanager
def _gathered_again(whole: Tensor, part: Tensor, layout: Layout, ranks: Ranks) -> Iterator[None]:
    """Autograd saves `part`, which is `_kept`, instead of `whole`, and gathers `whole` again when backward asks for it.

    Megatron-LM does so (megatron/core/tensor_parallel/layers.py): one all-gather more, and no rank keeps the whole.
    """
    memory, keeper = whole.untyped_storage().data_ptr(), cast(Any, part.grad_fn)
    alone = cast(Any, part if keeper is None else None)  # not part of a graph: nothing else keeps it

    def pack(saved: Tensor) -> Any:
        return saved.shape if saved.untyped_storage().data_ptr() == memory else saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        (kept,) = (alone,) if keeper is None else keeper.saved_tensors
        return relaid(kept, from_front(layout, kept.ndim), Replicate(), ranks.group, label=ranks.label).view(packed)

    with saved_tensors_hooks(pack, unpack):
        yield


def _kept(part: Tensor) -> Tensor:
    """The same tensor, saved for backward here, where hooks around the layer see it: a checkpoint drops it."""
    kept: Tensor = _Kept.apply(part)  # type: ignore[no-untyped-call]
    return kept


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ctx.save_for_backward(part)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient
