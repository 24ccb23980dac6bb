"""Attention in blocks: a part of the queries with a part of the keys, and the sum of such blocks.

Softmax divides by a sum over all keys, which no block knows. But each knows its own sum, and the logarithm of it, lse,
is enough to weigh blocks against each other. With out_b and lse_b of block b,

    lse = log sum_b exp(lse_b)          out = sum_b exp(lse_b - lse) out_b

which can be formed one block at a time (online softmax: Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv
2205.14135). In backward, lse gives the probabilities of a block at once, exp(scores - lse), and

    dv = pᵀ do      ds = p (do vᵀ - sum over d of do out)      dq = ds k      dk = dsᵀ q

Queries have h heads and keys h_kv, a divisor of it: with grouped heads several queries share a key (arXiv 2305.13245).
A block's scores are whole in memory here, [b, h, s_q, s_k]; a real kernel works in tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifsdp.comm import Group
from minifsdp.context_parallel.cut import Cut


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores [b, h_kv, g, s_q, s_k] in float32 or wider, -inf where a query is before its key.

    Args:
        q: [b, h_kv, g, s_q, d], the g queries of each key's group.
        k: [b, h_kv, s_k, d].
        causal: the block is on the diagonal: its queries and keys are of the same tokens.
    """
    scores = (q @ k.unsqueeze(2).mT).to(wide(q.dtype)).mul_(q.shape[-1] ** -0.5)
    if causal:
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(after, float("-inf"))
    return scores


def block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys: out [b, h, s_q, d] and lse [b, h, s_q, 1], in float32 or wider.

    Args:
        q: [b, h, s_q, d].
        k, v: [b, h_kv, s_k, d].
        causal: see `scores_of`.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = scores_of(grouped, k, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = scores.sub_(lse).exp_()
    return (weights @ v.unsqueeze(2).to(weights.dtype)).flatten(1, 2), lse.flatten(1, 2)


def add_block(out: Tensor, lse: Tensor, new: tuple[Tensor, Tensor]) -> None:
    """Add a block to the sum of those before it, in place; the sum of none has out = 0 and lse = -inf."""
    new_out, new_lse = new
    total = torch.logaddexp(lse, new_lse)
    out.mul_((lse - total).exp_()).add_(new_out.mul_((new_lse - total).exp_()))
    lse.copy_(total)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's part of the gradients of q, k and v, in float32 or wider.

    Args:
        grad: of the whole output, for these queries, [b, h, s_q, d].
        q, k, v, causal: as for `block`.
        lse: of all blocks together, [b, h, s_q, 1].
        delta: grad times out, summed over d, [b, h, s_q, 1].
    """
    heads = k.shape[1], -1
    grouped, grad = q.unflatten(1, heads), grad.unflatten(1, heads).to(lse.dtype)
    p = scores_of(grouped, k, causal).sub_(lse.unflatten(1, heads)).exp_()
    dv = (p.mT @ grad).sum(2)
    of_p = (grad @ v.unsqueeze(2).mT.to(p.dtype)).sub_(delta.unflatten(1, heads))
    ds = p.mul_(of_p).mul_(q.shape[-1] ** -0.5)
    dq = (ds @ k.unsqueeze(2).to(ds.dtype)).flatten(1, 2)
    dk = (ds.mT @ grouped.to(ds.dtype)).sum(2)
    return dq, dk, dv


def check(q: Tensor, k: Tensor, v: Tensor, group: Group, cut: Cut) -> None:
    """
    Raises:
        ValueError: the cut is for other ranks, or no attention of a part of a sequence has such shapes.
        TypeError: the dtypes differ.
    """
    if cut.ranks != group.size():
        raise ValueError(f"sequences cut among {cut.ranks} ranks, and {group.size()} in the group: cut among these")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: convert them to one dtype")
    if k.shape != v.shape or q.ndim != 4 or k.ndim != 4 or (*q.shape[:1], *q.shape[2:]) != (*k.shape[:1], *k.shape[2:]):
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
        raise ValueError(f"q, k, v of shapes {shapes}: give [b, h, s, d] of the same tokens, and k as v")
    if not (q.numel() and k.numel()):
        raise ValueError(f"q, k of shapes {tuple(q.shape)}, {tuple(k.shape)}: give a token, a row and a head or more")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads of q and {k.shape[1]} of k: the first has to be a multiple of the second")
    if q.shape[2] % (chunks := cut.chunks // cut.ranks):
        raise ValueError(f"{q.shape[2]} tokens on a rank are not {chunks} equal chunks: pad the sequences")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or wider if the inputs are."""
    return torch.promote_types(dtype, torch.float32)
