"""Exercise 15.8: Ring attention."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.context_parallel import blocks as course_blocks
from minifsdp.context_parallel import ring_attention as course_ring
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks, same
from minifsdp.course.workshop.references import reference

from .shared import EXACT, here, randn

Sums = tuple[Tensor, Tensor, Tensor]


@reference(
    "15.8",
    hints=(
        "Softmax does not change if the same number is subtracted from all scores. Two blocks have subtracted "
        "different numbers, their maxima. By which factor do you multiply `out` and `total` of each, so that both are "
        "as if the larger maximum had been subtracted?",
        "Combine (out, top, total) with a new block: `highest = torch.maximum(top, new_top)`, and multiply `out` and "
        "`total` of each side by `(its top - highest).exp()` before you add them. In round s of c, the keys and values "
        "are those of rank (r - s) % c; start `send` to (r + 1) % c and `recv` from (r - 1) % c before you compute, "
        "and wait for both afterwards. The last round sends nothing.",
    ),
    forbids=(course_blocks.add_block, course_blocks.block, course_ring.rounds, course_ring._Ring.forward),
)
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Sequence[Sequence[int]],
    block: Callable[[Tensor, Tensor, Tensor, bool], Sums],
    group: Group,
) -> Tensor:
    """Return the causal attention of this rank's queries to the keys of all ranks.

    Args:
        q, k, v: this rank's tokens, [heads, tokens, d] each.
        chunks: of each rank, the numbers of its chunks, in the order in which it has them. A sequence is cut into equal
            chunks, numbered from its start, and all ranks have equally many: one, or two with a zig-zag cut. A rank's
            tokens are its chunks, joined along dimension 1.
        block: `block(q, k, v, diagonal)` attends from a chunk of queries to a chunk of keys. `diagonal` says that
            both are the same chunk. It returns `out` [heads, tokens, d], `top` and `total` [heads, tokens, 1]: with
            weights exp(score - top), where `top` is each query's largest score, `out` is the weighted sum of the values
            and `total` the sum of the weights.
        group: the c ranks. Keys and values make c - 1 hops around the ring, in either direction: from each rank r to
            rank r + 1, or from each to rank r - 1, modulo c.

    Returns:
        The attention [heads, tokens, d]. `block` is called once for each pair of chunks that the causal mask permits,
        and for no other. Nothing overflows, however large the scores are.
    """
    rank, ranks = group.rank(), group.size()
    mine = chunks[rank]
    queries = q.chunk(len(mine), 1)
    sums: list[Sums | None] = [None] * len(mine)

    def combine(old: Sums | None, new: Sums) -> Sums:
        if old is None:
            return new
        highest = torch.maximum(old[1], new[1])
        a, b = (old[1] - highest).exp(), (new[1] - highest).exp()
        return a * old[0] + b * new[0], highest, a * old[2] + b * new[2]

    kv = torch.stack([k, v])
    for hop in range(ranks):
        arriving, handles = torch.empty_like(kv), []
        if hop < ranks - 1:
            handles = [comm.send(kv, (rank + 1) % ranks, group), comm.recv(arriving, (rank - 1) % ranks, group)]
        keys, values = kv[0].chunk(len(mine), 1), kv[1].chunk(len(mine), 1)
        for i, query in enumerate(mine):
            for j, key in enumerate(chunks[(rank - hop) % ranks]):
                if key <= query:
                    sums[i] = combine(sums[i], block(queries[i], keys[j], values[j], key == query))
        for handle in handles:
            handle.wait()
        kv = arriving
    return torch.cat([out / total for each in sums if each is not None for out, _, total in [each]], 1)


HEADS, WIDTH = 2, 4


def cuts_of(c):
    """Contiguous, zig-zag, and dealt out in another order."""
    yield "contiguous", [(rank,) for rank in range(c)]
    yield "zig-zag", [(rank, 2 * c - 1 - rank) for rank in range(c)]
    yield "from the end", [(2 * rank + 1, 2 * rank) for rank in reversed(range(c))]


def inputs_of(cut, size, seed, large):
    """q, k, v of the whole sequence [heads, s, d]; keys grow along the sequence, and so do the maxima."""
    tokens = size * sum(map(len, cut))
    q, k, v = (randn(HEADS, tokens, WIDTH, seed=seed + n) for n in range(3))
    growing = torch.linspace(0.5, 3, tokens, dtype=torch.float64)[:, None]
    return q * large, k * growing, v


def part_of(whole, cut, rank):
    chunks = whole.chunk(sum(map(len, cut)), 1)
    return torch.cat([chunks[number] for number in cut[rank]], 1).contiguous()


def scores_of(q, k, diagonal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(after, float("-inf")) if diagonal else scores


def block_of(log):
    def block(q, k, v, diagonal):
        if not isinstance(diagonal, bool):
            raise AnswerError(f"`diagonal` of `block`: expected True or False, got {describe(diagonal)}")
        scores = scores_of(q, k, diagonal)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        log.append("diagonal" if diagonal else "whole")
        return weights @ v, top, weights.sum(-1, keepdim=True)

    return block


def observe_ring(answer, cut, wholes):
    group, log = comm.world(), []
    mine = here(*(part_of(whole, cut, group.rank()) for whole in wholes))
    given = [each.clone() for each in mine]
    with comm.record() as calls:
        out = answer(*given, cut, block_of(log), group)
    if not isinstance(out, Tensor):
        raise AnswerError(f"expected a tensor, got {describe(out)}")
    changed = not all(torch.equal(a, b) for a, b in zip(mine, given, strict=True))
    return out, log, [(call.op, call.payload) for call in calls], changed


def attention(q, k, v, causal=True):
    return scores_of(q, k, causal).softmax(-1) @ v


@check("15.8")
def check_ring_attention(answer, variant):
    """The attention is that of one process; keys go round once; no rank computes a masked block."""
    for c in dict.fromkeys((variant.ranks, 3)):
        for name, cut in cuts_of(c):
            for large in (1.0, 1e3) if name == "zig-zag" else (1.0,):
                where = f"{c} ranks, {name}" + (", large scores" if large > 1 else "")
                wholes = inputs_of(cut, max(1, variant.size // 2), variant.seed, large)
                compare_ring(answer, cut, wholes, where)


def compare_ring(answer, cut, wholes, where):
    c = len(cut)
    right = attention(*wholes)
    for rank, (out, log, sent, changed) in enumerate(on_ranks(c, observe_ring, answer, cut, wholes, slip=WAITS)):
        expect(f"q, k, v are changed, {where}", changed, False, rank=rank, slip="the inputs are the caller's")
        pairs = [(query, key) for query in cut[rank] for owner in cut for key in owner]
        wanted = ["diagonal" if key == query else "whole" for query, key in pairs if key <= query]
        slips = slips_of_ring(wholes, cut, rank)
        usual = slip_of_blocks(sorted(log), wanted, pairs)
        slip = usual if out.isfinite().all() else OVERFLOW
        if any(same(out, taken_for_others(wholes, cut, rank, way), 1e-9) for way in (1, -1)):
            slip = OTHER_SIDE
        EXACT(f"the attention, {where}", out, part_of(right, cut, rank), rank=rank, slips=slips, slip=slip)
        expect(f"blocks, {where}", sorted(log), sorted(wanted), rank=rank, slip=usual)
        size = 2 * part_of(wholes[1], cut, rank).nbytes * (c - 1)
        there = [f"{op} of {sum(n for o, n in sent if o == op)} bytes" for op in dict.fromkeys(op for op, _ in sent)]
        wanted = [f"send of {size} bytes", f"recv of {size} bytes"] if c > 1 else []
        slip = "each rank sends the keys and values that it has c - 1 times: in the last round all ranks have seen all"
        gathers = "a gather holds the keys and values of all ranks at once; in a ring, they pass by"
        collective = any(op not in ("send", "recv") for op, _ in sent)
        expect(f"messages, {where}", sorted(there), sorted(wanted), rank=rank, slip=gathers if collective else slip)


OVERFLOW = (
    "exp() overflows: rescale both blocks to the larger of their maxima, not to the newest one and not to 0, so that "
    "no exponent is positive"
)
OTHER_SIDE = (
    "in round s, a rank has the keys of the rank s places away, on the side from which they come and not on the side "
    "to which they go"
)
WAITS = "a `send` ends when its receiver receives: start `recv` before you wait for `send`"


def slip_of_blocks(log, wanted, pairs):
    if len(log) == len(pairs) > len(wanted):
        return "a block of keys that all come after the queries is masked: leave it out"
    if len(log) == len(wanted) and log.count("diagonal") != wanted.count("diagonal"):
        return "`diagonal` is True if the chunk of keys is the chunk of queries, and False otherwise"
    if len(log) != len(wanted):
        return f"{len(wanted)} pairs of chunks are permitted (key chunk <= query chunk), and {len(log)} were computed"
    return None


def slips_of_ring(wholes, cut, rank):
    """The results of mistakes, for one rank."""
    q, k, v = wholes
    mine = part_of(q, cut, rank)
    per_rank, number = len(cut[rank]), sum(map(len, cut))
    keys, values = k.chunk(number, 1), v.chunk(number, 1)
    mean, sums, plain, undivided, unscaled = [], [], [], [], []
    for query, of_query in zip(mine.chunk(per_rank, 1), cut[rank], strict=True):
        found = [block_of([])(query, keys[n], values[n], n == of_query) for n in range(of_query + 1)]
        mean.append(sum(out / total for out, _, total in found) / len(found))
        sums.append(sum(out / total for out, _, total in found))
        plain.append(sum(out for out, _, _ in found) / sum(total for _, _, total in found))
        highest = torch.stack([top for _, top, _ in found]).amax(0)
        undivided.append(sum((top - highest).exp() * out for out, top, _ in found))
        unscaled.append(undivided[-1] / sum(total for _, _, total in found))
    return {
        "this is the mean of the blocks' attentions: a block counts by the sum of its weights": torch.cat(mean, 1),
        "this adds up the blocks' attentions, each divided by its own total": torch.cat(sums, 1),
        "each block has subtracted a maximum of its own: bring both to one maximum before you add": torch.cat(plain, 1),
        "the weighted sums of values are not yet divided by the sums of weights": torch.cat(undivided, 1),
        "the values are rescaled and the sums of weights are not: both belong to the same maximum": torch.cat(
            unscaled, 1
        ),
        "the causal mask is missing: every query attends to all keys": part_of(attention(q, k, v, False), cut, rank),
    }


def taken_for_others(wholes, cut, rank, way):
    """The attention if keys go round by `way`, and are taken for those of the rank on the other side."""
    q, k, v = wholes
    c, number = len(cut), sum(map(len, cut))
    keys, values = k.chunk(number, 1), v.chunk(number, 1)
    done = []
    for query, of_query in zip(part_of(q, cut, rank).chunk(len(cut[rank]), 1), cut[rank], strict=True):
        pairs = []
        for hop in range(c):
            pairs += zip(cut[(rank - way * hop) % c], cut[(rank + way * hop) % c], strict=True)
        scores = [scores_of(query, keys[there], said == of_query) for there, said in pairs if said <= of_query]
        found = [values[there] for there, said in pairs if said <= of_query]
        done.append(torch.cat(scores, -1).softmax(-1) @ torch.cat(found, 1))
    return torch.cat(done, 1)
