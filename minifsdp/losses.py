"""The loss of a step: a mean over tokens, wherever they are.

Ranks with different tokens average their gradients, and so do micro-batches. If each gives the mean of its own tokens,
the result is a mean of means: right only if all have as many of them. With padding, masked prompts, packed sequences or
the ends of documents they have not, and a token counts the more, the fewer there are beside it. One of N shares that
are averaged has to be, for T targets that count in all of them,

    N / T * the sum of its own tokens' losses

which is 0 for a share without tokens. No rank knows T in advance: the ranks sum their counts in an all-reduce of one
number before the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of logits [b, s, V] and targets [b, s], a scalar."""

IGNORED = -100
"""The target of a token without a loss, as torch's `cross_entropy` has it."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """In float32 or wider, over the targets that count.

    Args:
        logits: [b, s, V], perhaps a DTensor inside `loss_parallel`.
        targets: [b, s] int64.
        reduction: "mean", which is not a number if none counts, or "sum".
    """
    rows = logits.flatten(0, 1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


@dataclass(frozen=True)
class TokenMean:
    """A share of the mean over all tokens; the mean of all shares is that mean.

    Attributes:
        tokens: T, of all shares together, a scalar int64.
        shares: N, of ranks times micro-batches.
    """

    tokens: Tensor
    shares: int

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy(logits, targets, "sum")
        return total * (self.shares / self.tokens.double().clamp(min=1)).to(total.dtype)


def token_mean(targets: Tensor, group: Group | None = None, micro_batches: int = 1) -> TokenMean:
    """The loss of each micro-batch on each rank of a group. All ranks call this function, which all-reduces 8 bytes.

    Args:
        targets: this rank's, of all micro-batches.
        group: the ranks with different tokens; None: there is one.
        micro_batches: on each rank.
    """
    tokens = (targets != IGNORED).sum()
    ranks = 1 if group is None else group.size()
    if group is not None and ranks > 1:
        comm.all_reduce(tokens, group).wait()
    return TokenMean(tokens, ranks * micro_batches)
