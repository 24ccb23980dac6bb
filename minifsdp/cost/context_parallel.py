"""Attention of ranks that have different parts of the sequence, in bytes; arithmetic, no tensors.

q is a rank's queries, [b, s / c, h / t] of a width h, and c the ranks; of each block a rank

                 keeps beside its input                          and has at most, for a moment of backward
    ring         q, k, v and the output: 4 q                     keys going round and coming in, gradients likewise
    gathered     the same, keys and values of all: 4 q + 2 c q   the gradients of these, and what is received for them
    ulysses      q, k, v and the output, of its heads            those of its heads, as they leave and arrive
                 of all tokens, and its tokens' output: 5 q

and for each query a logarithm; gathered also a mask (gathered_attention.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from minifsdp.cost.sizes import Sizes


def queries(sizes: Sizes, tp: int) -> int:
    """Bytes of a rank's, q."""
    return sizes.itemsize * sizes.batch * sizes.context * sizes.width // tp


def of_own_heads(sizes: Sizes, tp: int) -> int:
    """Bytes of the queries of its heads, of all tokens, under Ulysses."""
    heads = sizes.heads // tp
    return queries(sizes, tp) * sizes.attention.ranks * sizes.attention.share(heads) // heads


def payloads(sizes: Sizes, tp: int) -> list[tuple[str, int]]:
    """The messages of one attention, forward and backward: operation and bytes."""
    ranks, q = sizes.attention.ranks, queries(sizes, tp)
    if sizes.attention.kind == "ring":
        return [("send", 2 * q)] * (3 * (ranks - 1))
    if sizes.attention.kind == "gathered":
        return [("all_gather", 2 * q * ranks), ("reduce_scatter", 2 * q * ranks)]
    own = of_own_heads(sizes, tp)
    return [("all_to_all", payload) for payload in (3 * q, own, q, 3 * own)]


def kept(sizes: Sizes, tp: int) -> Mapping[str, int]:
    """Bytes by what keeps them, from q, k and v to the input of the layer behind."""
    attention, q = sizes.attention, queries(sizes, tp)
    logarithms = q * sizes.heads // sizes.width
    if attention.kind == "ring":
        return {"q, k, v": 3 * q, "logsumexp": logarithms, "input of out": q}
    if attention.kind == "gathered":
        return {
            "q, k, v": 3 * q,
            "keys and values of all": 2 * q * attention.ranks,
            "masks": _masks(sizes),
            "logsumexp": logarithms,
            "output of attention": q if attention.zigzag else 0,
            "input of out": q,
        }
    own = of_own_heads(sizes, tp)
    return {
        "q, k, v": 3 * own,
        "logsumexp": own * sizes.heads // sizes.width,
        "output of attention": own,
        "input of out": q,
    }


def _masks(sizes: Sizes) -> int:
    """Of each chunk of queries, for the keys up to its end."""
    chunk = sizes.context // len(sizes.attention.chunks)
    return sizes.itemsize * sum(chunk * (number + 1) * chunk for number in sizes.attention.chunks)


def _scores(sizes: Sizes, tp: int) -> int:
    """Bytes of a block of scores: one chunk of queries by one of keys."""
    chunk = sizes.context // len(sizes.attention.chunks)
    return sizes.itemsize * sizes.batch * sizes.heads // tp * chunk * chunk


def in_forward(sizes: Sizes, tp: int) -> int:
    """Bytes of temporaries at most, beside what is kept."""
    q, own = queries(sizes, tp), of_own_heads(sizes, tp)
    return {
        "ring": 4 * q + 2 * q // len(sizes.attention.chunks) + 2 * _scores(sizes, tp),
        "gathered": 2 * q + 2 * q * sizes.attention.ranks,
        "ulysses": 3 * q + 3 * own,
    }[sizes.attention.kind]


def in_backward(sizes: Sizes, tp: int) -> int:
    """Bytes of temporaries at most, beside what is kept and the gradient of the output."""
    q, own = queries(sizes, tp), of_own_heads(sizes, tp)
    per_query = 2 * q * sizes.heads // sizes.width
    # their gradients and q's; keys here and under way; later, the sum that leaves and the one that arrives
    going_round = {2: 7, 3: 11}.get(sizes.attention.ranks, 13) * q
    return {
        "ring": going_round + 5 * q // len(sizes.attention.chunks) + per_query + 2 * _scores(sizes, tp),
        "gathered": 4 * q * sizes.attention.ranks + 3 * q,
        "ulysses": 3 * own + 3 * q + 3 * max(q, own),
    }[sizes.attention.kind]
