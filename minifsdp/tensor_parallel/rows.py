"""A row-parallel layer: each rank computes a partial sum of all output features.

x W^T + b with W [out, in]: rank r holds columns W_r [out, in / N] and computes x_r W_r^T from its features of x. The
sum over the ranks is the result; the first rank adds b to its partial sum. A rank's part of a row-parallel embedding
holds V / N tokens of the vocabulary, and returns zeros for all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from minifsdp.kinds import check_flags
from minifsdp.tensor_parallel.layer import LayerStyle, Run, arrived, check_plain, left, local_parameters
from minifsdp.tensor_parallel.layouts import Layout, check_layouts, first_of
from minifsdp.tensor_parallel.parameters import Ranks


@dataclass(kw_only=True)
class RowwiseParallel(LayerStyle):
    """An `nn.Linear` or `nn.Embedding` of which each rank computes a partial sum of all output features.

    Attributes:
        input_layouts: layout of a plain input; default: `Shard(-1)`. In any other `Shard` layout, all parts are equal.
        output_layouts: layout of the output; default: `Replicate()`.
        use_local_output: return this rank's part as a plain tensor, instead of a DTensor.
    """

    input_layouts: Layout = None
    output_layouts: Layout = None
    use_local_output: bool = True

    def __post_init__(self) -> None:
        self.input_layouts = Shard(-1) if self.input_layouts is None else self.input_layouts
        self.output_layouts = Replicate() if self.output_layouts is None else self.output_layouts
        check_layouts(input_layouts=self.input_layouts, output_layouts=self.output_layouts)
        check_flags(use_local_output=self.use_local_output)

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        if isinstance(module, nn.Linear):
            check_plain(module, nn.Linear)
            return {name: Shard(1) if name == "weight" else Replicate() for name, _ in module.named_parameters()}
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"RowwiseParallel is for nn.Linear and nn.Embedding, not {type(module).__name__}")
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            options = "max_norm, sparse gradients or scale_grad_by_freq"
            raise ValueError(f"RowwiseParallel cannot cut an nn.Embedding with {options}: unset them")
        _check_looks_up(module)
        return {"weight": Shard(0)}

    def run(self, module: Any, x: Tensor, ranks: Ranks) -> Run:
        y = yield from (_multiplied if isinstance(module, nn.Linear) else _looked_up)(self, module, x, ranks)
        return left(y, Partial(), self.output_layouts, ranks, self.use_local_output)


class _Lookups(TorchFunctionMode):
    """Keeps the tokens of each lookup inside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.embedding:
            self.tokens.append(args[0])
        return function(*args, **(kwargs or {}))


def _check_looks_up(module: nn.Embedding) -> None:
    """
    Raises:
        ValueError: a subclass looks up other tokens than it is given, as OPT's positions do.
    """
    given = torch.zeros(1, dtype=torch.int64, device=module.weight.device)
    with torch.no_grad(), _Lookups() as lookups:
        module.forward(given)
    if [tokens is given for tokens in lookups.tokens] != [True]:
        raise ValueError(
            f"{type(module).__name__} does not look up the tokens that it is given: give it a style of "
            "torch.distributed.tensor.parallel, which follows each operator"
        )


def _multiplied(style: RowwiseParallel, module: Any, x: Tensor, ranks: Ranks) -> Run:
    part = arrived(x, style.input_layouts, Shard(-1), ranks)
    summand = (Replicate(), Partial(), ranks.group), (Replicate(), Replicate(), ranks.group)
    # The first rank adds the bias to its partial sum; the gradient of the bias is whole on all ranks.
    return (yield part, {"_parameters": local_parameters(module, moves={"bias": summand})})


def _looked_up(style: RowwiseParallel, module: Any, x: Tensor, ranks: Ranks) -> Run:
    tokens = arrived(x, style.input_layouts, Replicate(), ranks)
    if tokens.is_cpu and tokens.numel():  # elsewhere the host would wait for the answer
        low, high = (int(each) for each in tokens.aminmax())
        if low < 0 or high >= module.num_embeddings:
            raise IndexError(f"tokens from {low} to {high} in an nn.Embedding of {module.num_embeddings}: correct them")
    parameters = local_parameters(module)
    mine = parameters["weight"].shape[0]
    first = first_of(module.num_embeddings, ranks.group)
    index = tokens - first
    here = (index >= 0) & (index < mine)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if 0 <= padding - first < mine else None
    y = yield torch.where(here, index, 0), {"_parameters": parameters, "padding_idx": padding}
    return y.masked_fill(~here[..., None], 0)
