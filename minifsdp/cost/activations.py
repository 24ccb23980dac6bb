"""Bytes that forward keeps for backward, from plain numbers: arithmetic, no tensors.

b sequences of s tokens, width h, a heads, t tensor-parallel ranks. Korthikanti et al. (arXiv 2205.05198, sections 4.1
and 4.2) count the bytes of a block in fp16, with dropout, where attention keeps its softmax. The course's block keeps,
in elements:

                           paper, bytes   here       t ranks    and sequence parallel   and gathered again
    input of norm1         2 sbh          bsh        bsh        bsh / t                 bsh / t
    input of qkv           2 sbh          bsh        bsh        bsh                     bsh / t
    q, k, v                6 sbh          3 bsh      3 bsh / t  3 bsh / t               3 bsh / t
    softmax                2 abs²
    dropout of softmax     3 abs²                                                       (a mask, and the output)
    logsumexp                             abs        abs / t    abs / t                 abs / t
    input of out           2 sbh          bsh        bsh / t    bsh / t                 bsh / t
    dropout after out        sbh                                                        (a mask of one byte)
    input of norm2         2 sbh          bsh        bsh        bsh / t                 bsh / t
    input of up            2 sbh          bsh        bsh        bsh                     bsh / t
    input of gelu          8 sbh          4 bsh      4 bsh / t  4 bsh / t               4 bsh / t
    input of down          8 sbh          4 bsh      4 bsh / t  4 bsh / t               4 bsh / t
    dropout after down       sbh                                                        (a mask of one byte)
    statistics of norms                   4 bs       4 bs       4 bs / t                4 bs / t
    ---------------------------------------------------------------------------------------------------------
    the paper's sum, sbh times            34 + 5as/h  10 + 24/t + 5as/(ht)              (34 + 5as/h) / t
    without its masks, flash attention    32          8 + 24/t                          32 / t
    here, bsh elements                    16          4 + 12/t              2 + 14/t    16 / t

Three differences. No dropout: its two masks of a byte per element, 2 sbh, are not there, so 34 becomes 32, which is 16
elements of two bytes. No softmax: scaled_dot_product_attention keeps one number per query and head instead of s, and
computes the softmax again in backward, so 5 abs² becomes abs (on a GPU: `kept_by_attention`). And the paper leaves out
what is small: the mean and the deviation that a norm keeps of each token.

The last column is the paper's sequence parallelism, which keeps only this rank's part of the inputs of qkv and up and
gathers them again in backward (section 4.2.2); without that a rank keeps both whole, the column before. A block that is
recomputed keeps its own input, and nothing else: 2 sbh in the paper, bsh elements here.
"""

from __future__ import annotations

from dataclasses import dataclass

from minifsdp.cost import context_parallel
from minifsdp.cost.sizes import Sizes as Sizes

_INDEX, _FLAG = 8, 1  # bytes of an int64 and of a bool
_QUERIES = 32  # a GPU's memory-efficient kernel pads the queries of a head to a multiple of this
_ALIGNMENT = 16  # bytes: of its heads


@dataclass(frozen=True)
class Cut:
    """A block over tensor-parallel ranks.

    Attributes:
        ranks: t.
        sequence: what lies between the cut layers is cut along the sequence, which the ranks divide.
        regather: then inputs of layers by columns are kept as parts.
        recomputed: forward runs again in backward (activation checkpointing).
        adds_bias: of layers cut by rows, as the first rank does.
    """

    ranks: int = 1
    sequence: bool = False
    regather: bool = False
    recomputed: bool = False
    adds_bias: bool = True


def kept_by_block(sizes: Sizes, cut: Cut) -> dict[str, int]:
    """Bytes by what keeps them."""
    token = sizes.itemsize * sizes.batch * sizes.context
    whole, t = token * sizes.width, cut.ranks
    between = t if cut.sequence else 1
    gathered = t if cut.sequence and cut.regather else 1
    if cut.recomputed:
        return {"input of the block": whole // between}
    alone = {"q, k, v": 3 * whole // t, **kept_by_attention(sizes, t), "input of out": whole // t}
    return {
        "input of norm1": whole // between,
        "statistics of norm1": 2 * token // between,
        "input of qkv": whole // gathered,
        **(alone if sizes.attention.ranks == 1 else context_parallel.kept(sizes, t)),
        "input of norm2": whole // between,
        "statistics of norm2": 2 * token // between,
        "input of up": whole // gathered,
        "input of gelu": 4 * whole // t,
        "input of down": 4 * whole // t,
    }


def kept_by_attention(sizes: Sizes, ranks: int) -> dict[str, int]:
    """Bytes that a rank's attention keeps besides q, k, v and its output.

    On a GPU, float32 goes to the memory-efficient kernel, which pads its queries and keeps the random state of a
    dropout. If the heads are no multiple of 16 bytes, no fused kernel takes them, and the softmax is kept as in the
    paper (torch: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and kAlignLSE in attention.cu).
    """
    rows = sizes.itemsize * sizes.batch * sizes.heads // ranks
    if not sizes.on_gpu:
        return {"logsumexp": rows * sizes.context}
    if sizes.itemsize * sizes.width // sizes.heads % _ALIGNMENT:
        return {"softmax": rows * sizes.context**2}
    return {"logsumexp": rows * -(-sizes.context // _QUERIES) * _QUERIES, "random state": 2 * _INDEX}


def kept_before_blocks(sizes: Sizes, cut: Cut | None) -> dict[str, int]:
    """Bytes by what keeps them."""
    kept = {"positions": _INDEX * sizes.context}
    if cut is not None:  # which tokens are this rank's
        kept["places in the embedding's part"] = sizes.batch * sizes.context * (_INDEX + _FLAG)
    return kept


def kept_after_blocks(sizes: Sizes, cut: Cut | None) -> dict[str, int]:
    """Bytes by what keeps them; plus the loss and what divides it."""
    tokens = sizes.batch * sizes.context
    token = sizes.itemsize * tokens
    between = cut.ranks if cut is not None and cut.sequence else 1
    kept = {
        "input of norm": token * sizes.width // between,
        "statistics of norm": 2 * token // between,
        "input of head": token * sizes.width,
        "probabilities": token * sizes.vocabulary,
        "loss": 2 * sizes.itemsize,
    }
    if cut is not None:
        kept["places in the head's part"] = tokens * (_INDEX + _FLAG)
        kept["weights of tokens"] = 2 * token
    return kept


def kept_around_blocks(sizes: Sizes, cut: Cut | None) -> tuple[int, int]:
    """Bytes kept before the first block, and after the last."""
    return sum(kept_before_blocks(sizes, cut).values()), sum(kept_after_blocks(sizes, cut).values())


def kept(layers: int, sizes: Sizes, cut: Cut | None) -> int:
    """Bytes that forward leaves for backward, with the loss; None: a model that is not cut."""
    return layers * sum(kept_by_block(sizes, cut or Cut()).values()) + sum(kept_around_blocks(sizes, cut))
