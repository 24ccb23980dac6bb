"""A column-parallel layer: each rank computes a part of the output features.

x W^T + b with W [out, in]: rank r holds rows W_r [out / N, in] and b_r [out / N], and computes x W_r^T + b_r, which are
columns of the result. It needs all of x, and its gradient of x is a partial sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from minifsdp import draws
from minifsdp.kinds import check_flags
from minifsdp.tensor_parallel.layer import LayerStyle, Run, arrived, check_plain, left, local_parameters
from minifsdp.tensor_parallel.layouts import Layout, check_layouts, from_front, relaid
from minifsdp.tensor_parallel.parameters import Ranks, local_part
from minifsdp.tensor_parallel.stacked import watched


@dataclass(kw_only=True)
class ColwiseParallel(LayerStyle):
    """An `nn.Linear` or `nn.Embedding` of which each rank computes a part of the output features.

    Attributes:
        input_layouts: layout of a plain input; default: `Replicate()`. If it is sharded, all parts are equal.
        output_layouts: layout of the output; default: `Shard(-1)`.
        use_local_output: return this rank's part as a plain tensor, instead of a DTensor.
        parts: matrices that are stacked in the weight, each of which is sharded: 3 for a fused q, k, v. The weight
            [out, in] becomes a DTensor [parts, out / parts, in] with `Shard(1)`, the bias one of [parts, ..];
            minifsdp.checkpoint translates between these shapes in whole state dicts.
        regather: keep only this rank's part of a sharded input for backward, and gather the input again there.
    """

    input_layouts: Layout = None
    output_layouts: Layout = None
    use_local_output: bool = True
    parts: int | None = None
    regather: bool = False

    def __post_init__(self) -> None:
        self.input_layouts = Replicate() if self.input_layouts is None else self.input_layouts
        self.output_layouts = Shard(-1) if self.output_layouts is None else self.output_layouts
        check_layouts(input_layouts=self.input_layouts, output_layouts=self.output_layouts)
        check_flags(use_local_output=self.use_local_output)
        if self.parts is not None and (not isinstance(self.parts, int) or self.parts < 1):
            raise ValueError(f"parts = {self.parts!r}: give the number of matrices in the weight, 1 or more")

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        stacked = self.parts not in (None, 1)
        if isinstance(module, nn.Linear):
            check_plain(module, nn.Linear)
            return {name: Shard(1) if stacked else Shard(0) for name, _ in module.named_parameters()}
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"ColwiseParallel is for nn.Linear and nn.Embedding, not {type(module).__name__}")
        check_plain(module, nn.Embedding)
        if module.max_norm is not None or module.sparse:
            raise ValueError("ColwiseParallel cannot cut an nn.Embedding with max_norm or sparse gradients: unset them")
        if stacked:
            raise ValueError(f"ColwiseParallel(parts={self.parts}) of an nn.Embedding: parts are those of an nn.Linear")
        return {"weight": Shard(1)}

    def prepare(self, module: nn.Module) -> None:
        if self.parts not in (None, 1):
            as_parts(cast(nn.Linear, module), self.parts)

    def run(self, module: Any, x: Tensor, ranks: Ranks) -> Run:
        x = _kept(x) if self.regather and isinstance(x, Tensor) else x
        whole = arrived(x, self.input_layouts, Replicate(), ranks, gradient=Partial())
        parameters = local_parameters(module)
        if self.parts not in (None, 1):
            parameters = {name: None if p is None else p.flatten(0, 1) for name, p in parameters.items()}
        with _gathered_again(whole, x, self.input_layouts, ranks) if self.regather else nullcontext():
            y = yield whole, {"_parameters": parameters}
        features = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
        shape = torch.Size((*y.shape[:-1], features))
        y = left(y, Shard(-1), self.output_layouts, ranks, self.use_local_output, shape)
        is_part = self.parts is None and self.use_local_output and self.output_layouts in (Shard(-1), Shard(y.ndim - 1))
        return watched(y, module, ranks.label) if is_part else y


def as_parts(module: nn.Linear, parts: int) -> None:
    """Reshape the weight to [parts, out / parts, in] and the bias to [parts, out / parts], without moving elements.

    Raises:
        ValueError: the number of rows is not divisible by `parts`.
    """
    if module.out_features % parts:
        raise ValueError(f"a weight of {module.out_features} rows is not one of {parts} equal parts")
    for name, p in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(p.detach().unflatten(0, (parts, -1)), p.requires_grad))
    module.register_load_state_dict_pre_hook(_refuse_plain)
    draws.stacked.add(module)


def _refuse_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in module.named_parameters(prefix.removesuffix(".")):
        found = state_dict.get(name)
        if isinstance(found, Tensor) and found.ndim < p.ndim:
            raise ValueError(
                f"{name} is {list(found.shape)} in the checkpoint and {list(p.shape)} here: load it by "
                "minifsdp.checkpoint.set_model_state_dict with full_state_dict=True"
            )


@contextmanager
def _gathered_again(whole: Tensor, x: Tensor, layout: Layout, ranks: Ranks) -> Iterator[None]:
    """Let autograd save `x`, which is `_kept`, instead of `whole`, which backward then gathers again.

    As in Megatron-LM (megatron/core/tensor_parallel/layers.py): one more all-gather, and no rank keeps the whole input.
    """
    memory, keeper = whole.untyped_storage().data_ptr(), cast(Any, x.grad_fn)
    alone = cast(Any, x if keeper is None else None)  # not part of a graph: nothing else keeps it
    layout = ranks.layout_of(x) if isinstance(x, DTensor) else from_front(layout, x.ndim)
    size = x.shape[layout.dim] if isinstance(x, DTensor) and layout.is_shard() else None

    def pack(saved: Tensor) -> Any:
        return saved.shape if memory and saved.untyped_storage().data_ptr() == memory else saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        (kept,) = (alone,) if keeper is None else keeper.saved_tensors
        part = local_part(kept.detach())
        return relaid(part, layout, Replicate(), ranks.group, size, ranks.label).view(packed)

    with saved_tensors_hooks(pack, unpack):
        yield


def _kept(part: Tensor) -> Tensor:
    """The same tensor, saved for backward here, so that saved-tensor hooks see it and a checkpoint can drop it."""
    kept: Tensor = _Kept.apply(part)  # type: ignore[no-untyped-call]
    return kept


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ctx.save_for_backward(part)
        return part.detach()  # of an empty DTensor there is no view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient
