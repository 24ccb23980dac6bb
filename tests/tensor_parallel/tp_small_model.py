"""A small language model with dropout for tensor-parallel ranks, its plan, and training next to one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import cloudpickle
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grad_norm_

from minifsdp.checkpoint.parts import cut
from minifsdp.tensor_parallel import (
    ColwiseParallel,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LENGTH = 12  # for 2, 3 and 4 ranks
VOCABULARY = 13  # for none


class Block(nn.Module):
    def __init__(self, width: int, drop: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), drop
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Small(nn.Module):
    def __init__(self, vocabulary: int, tied: bool, p: float) -> None:
        super().__init__()
        width = 8
        self.drop = nn.Dropout(p)
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, self.drop) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


def small(vocabulary: int = VOCABULARY, tied: bool = True, p: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return Small(vocabulary, tied, p).to(dtype)


def parallel(mesh: Any, sequence: bool, model: Any = None, **options: Any) -> Any:
    stream = Shard(1) if sequence else Replicate()
    norm = SequenceParallel(use_local_output=True) if sequence else Replicated()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "blocks.*.norm": norm,
        "blocks.*.up": ColwiseParallel(input_layouts=stream),
        "blocks.*.down": RowwiseParallel(output_layouts=stream),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=stream, use_local_output=False),
        "drop": norm,
    }
    return parallelize_module(small(**options) if model is None else model, mesh, plan)


def loss_of(model: Any, step: int, row: int = 0) -> Any:
    numbers = torch.Generator().manual_seed(100 * step + row)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=numbers)
    with loss_parallel():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def parts(t: Any, expected: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of a tensor and of the expected one, without communication; both whole if it is a summand."""
    t, expected = t.detach(), expected.detach()
    if not isinstance(t, DTensor) or any(place.is_partial() for place in t.placements):
        return whole(t), expected
    return t.to_local(), cut(t, expected).to_local()


def assert_alike(model: nn.Module, alone: nn.Module, of: Callable[[Any], Any] = lambda p: p, by: float = 1e-10) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        mine, other = parts(of(p), of(q))
        torch.testing.assert_close(mine, other, rtol=0, atol=by, msg=lambda text, n=name: f"{n}: {text}")


Optimizer = Callable[[Any], Any]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Of one operator: each costs a DTensor dearly when it is the first of its shape."""
    return torch.optim.SGD(params, 0.1)


LIMIT = 0.1  # of norms that are clipped


@cache
def trained_by_one_process(rows: int, optimizer: Optimizer, clips: bool) -> tuple[list[Tensor], list[Tensor], Any]:
    """Losses [rows] and norms of two steps, the second from the state of the first, and the model."""
    alone, losses, norms = small(), [], []
    mine = optimizer(alone.parameters())
    for step in range(2):
        losses.append(torch.stack([loss_of(alone, step, each) for each in range(rows)]))
        losses[-1].mean().backward()
        if clips:
            norms.append(clip_grad_norm_(alone.parameters(), LIMIT))
        mine.step()
        mine.zero_grad()
    return [each.detach() for each in losses], norms, alone


def assert_trains_as_one_process(
    model: Any,
    rows: int = 1,
    row: int = 0,
    optimizer: Optimizer = sgd,
    reference: Optimizer | None = None,
    clip: Callable[[Any, float], Any] | None = None,
) -> None:
    """Losses, norms and parameters to 1e-9 in two steps; one process has all rows' mean loss.

    Args:
        reference: the optimizer of one process, if it is another.
        clip: clips the gradients of the optimizer's parameters, and returns their norm.
    """
    losses, norms, alone = trained_by_one_process(rows, reference or optimizer, clip is not None)
    mine = optimizer(model.parameters())
    for step, expected in enumerate(losses):
        loss = loss_of(model, step, row)
        assert abs(loss.item() - expected[row].item()) < 1e-9, step
        loss.backward()
        if clip is not None:
            assert norms[step] > LIMIT
            assert abs(whole(clip(mine, LIMIT)) - norms[step]) < 1e-9, step
        mine.step()
        mine.zero_grad()
    assert_alike(model, alone, by=1e-9)


def clipped_by_torch(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    return clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], limit)
