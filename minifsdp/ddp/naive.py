"""Rung 1 of DDP: one all-reduce per parameter, after backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.ddp.early_steps import refuse_early_steps
from minifsdp.ddp.sync import start_from_rank_0, trainable_parameters


class NaiveDDP(nn.Module):
    """Data parallelism: every rank holds the whole model, sees its own part of the batch, and takes the mean gradient.

    Models that start equal and take equal steps stay equal. So the ranks begin with rank 0's parameters and buffers,
    and after each backward the training loop calls `sync_gradients`:

        ddp(x).loss.backward(); ddp.sync_gradients(); optimizer.step()

    Every parameter that requires a gradient when the model is wrapped takes part in every `sync_gradients`, with a
    gradient of zero if backward has computed none. If a rank left a parameter out, its next all-reduce would be matched
    with a different one on the other ranks. As a consequence, no `.grad` is None afterwards, and momentum or weight
    decay changes even a parameter that no rank has used.

    Bytes: gradients 4Ψ for Ψ fp32 parameters, reduced in place; no communication buffer outlives construction.

    Args:
        module: the model, equal in shapes and dtypes on all ranks; its parameters stay in their memory.
        process_group: the ranks to average over; all of them by default.

    Raises:
        RuntimeError: there is no process group; no parameter requires a gradient; or the models of the ranks differ.
            In the last case every rank raises the error, which names the parameter and the ranks.
        ValueError: an embedding has sparse gradients.
    """

    def __init__(self, module: nn.Module, process_group: comm.Group | None = None) -> None:
        super().__init__()
        refuse_sparse_gradients(module)
        self.module = module
        self.process_group = comm.world(process_group)
        self.trainable = list(trainable_parameters(module))
        start_from_rank_0(module, self.process_group)
        refuse_early_steps(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace every `.grad` by its mean over the ranks, one all-reduce after the other."""
        for grad in gradients(self.trainable):
            comm.all_reduce(grad, self.process_group, comm.MEAN).wait()

    def not_yet_averaged(self) -> list[nn.Parameter]:
        """The parameters with this rank's own gradients during backward: all."""
        return self.trainable


def gradients(params: list[nn.Parameter]) -> list[Tensor]:
    """The `.grad` of each parameter; where there is none, it becomes zero."""
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in params if p.grad is not None]


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise ValueError for an embedding whose gradient is sparse: ranks have other rows, and buckets are dense."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"{name or 'the module'} makes sparse gradients: use sparse=False, or DistributedDataParallel"
            )
