"""Layers with whole parameters, applied to a part of the sequence or to all of it (arXiv 2205.05198, section 4.2.2).

Norms and dropout treat each token separately. On whole activations, all ranks do the same work and keep the same
tensors. On a part of the sequence, each rank does 1/N of the work and keeps 1/N of the activations, and its gradients
of the parameters are partial sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from minifsdp import comm, device
from minifsdp.comm import Label
from minifsdp.kinds import check_flags
from minifsdp.tensor_parallel.dropout import drops, own_random_numbers
from minifsdp.tensor_parallel.layer import LayerStyle, Run, arrived, left, local_parameters
from minifsdp.tensor_parallel.layouts import Layout, from_front
from minifsdp.tensor_parallel.parameters import Ranks, local_part, placed

_MIXING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm),
)
_SUMMANDS = Label("gradients of sequence-parallel layers")


@dataclass(kw_only=True)
class SequenceParallel(LayerStyle):
    """A module that treats each token separately, applied to this rank's part of the sequence.

    Gradients of its parameters are `Partial`: backward does not run a collective to sum them.

    Attributes:
        sequence_dim: the sharded dimension; a plain input is this rank's part.
        use_local_output: return this rank's part as a plain tensor, instead of a DTensor.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def __post_init__(self) -> None:
        check_flags(use_local_output=self.use_local_output)
        if not isinstance(self.sequence_dim, int) or isinstance(self.sequence_dim, bool):
            raise TypeError(f"sequence_dim = {self.sequence_dim!r}: give the number of a dimension")

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        if isinstance(module, _MIXING):
            raise ValueError(_mixes(module))
        return _replicated(module)

    def run(self, module: nn.Module, x: Tensor, ranks: Ranks) -> Run:
        normed = len(module.__dict__.get("normalized_shape", ()))
        if normed and from_front(Shard(self.sequence_dim), x.ndim).dim >= x.ndim - normed:
            raise ValueError(_mixes(module))
        part = arrived(x, Shard(self.sequence_dim), Shard(self.sequence_dim), ranks)
        with own_random_numbers(ranks.group, x.device) if drops(module) else nullcontext():
            y = yield part, {"_parameters": local_parameters(module, Partial())}
        layout, shape = from_front(Shard(self.sequence_dim), y.ndim), list(y.shape)
        shape[layout.dim] = x.shape[layout.dim] if isinstance(x, DTensor) else ranks.group.size() * y.shape[layout.dim]
        return left(y, layout, layout, ranks, self.use_local_output, torch.Size(shape))


@dataclass(kw_only=True)
class Replicated(LayerStyle):
    """A module that computes the same on every rank. Its parameters become DTensors, like all others of the model.

    Clipping and optimizers reject a mixture of DTensors and plain parameters. The inputs have to be equal on all ranks:
    a norm of this rank's heads, [batch, sequence, heads / N, ..], is `SequenceParallel(sequence_dim=2)`. If gradients
    differ between ranks, an optimizer's first step raises a ValueError (see replicas).

    Attributes:
        use_local_output: return a plain tensor, instead of a DTensor.
    """

    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        return _replicated(module)

    def run(self, module: nn.Module, x: Tensor, ranks: Ranks) -> Run:
        y = yield arrived(x, Replicate(), Replicate(), ranks), {"_parameters": local_parameters(module)}
        return y if self.use_local_output else left(y, Replicate(), Replicate(), ranks, False)


def _mixes(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} computes statistics of several tokens, and a rank has only some of them: apply it to "
        "whole activations, or give it torch's SequenceParallel, which gathers them"
    )


def _replicated(module: nn.Module) -> dict[str, Layout]:
    return {name: Replicate() for name, _ in module.named_parameters()}


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients that `SequenceParallel` has left as partial sums, in one all-reduce; call it after backward.

    Without this call, every operator of an optimizer sums each of them separately (megatron/core/distributed/
    finalize_model_grads.py also sums them in one message).

    Args:
        parameters: of one dtype, on a mesh of one dimension. Parameters with other gradients are left unchanged.
    """
    summands = [p for p in parameters if isinstance(p.grad, DTensor) and p.grad.placements == (Partial(),)]
    if not summands:
        return
    parts = [local_part(p.grad).flatten() for p in summands]  # type: ignore[arg-type]
    flat = device.empty(sum(part.numel() for part in parts), parts[0].dtype, "gradients", parts[0].device)
    torch.cat(parts, out=flat)
    ranks = Ranks.of(summands[0].device_mesh)  # type: ignore[attr-defined]
    comm.all_reduce(flat, ranks.group, label=_SUMMANDS).wait()
    for p, total in zip(summands, flat.split([part.numel() for part in parts]), strict=True):
        p.grad = placed(total.view(p.shape), Replicate(), Replicate(), ranks, p.shape)
