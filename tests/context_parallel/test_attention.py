"""Context parallelism computes the attention of one process, and sends what its formulas say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import Checks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minifsdp import comm
from minifsdp.context_parallel import Cut, GatheredAttention, RingAttention, UlyssesAttention, ring_attention
from minifsdp.context_parallel.blocks import add_block, block
from minifsdp.context_parallel.cut import SequencePart
from minifsdp.losses import cross_entropy, token_mean

check = Checks(__name__)

KINDS: dict[str, Callable[..., Any]] = {
    "ring": RingAttention,
    "gathered": GatheredAttention,
    "ulysses": UlyssesAttention,
}
HEADS = {"plain": (6, 6), "grouped": (6, 2), "one key": (4, 1), "fewer than ranks": (2, 2), "odd groups": (9, 3)}
B, S, D = 2, 24, 5


def drawn(heads: tuple[int, int], dtype: torch.dtype = torch.float64, s: int = S) -> list[Tensor]:
    """Q, K, V and the gradient of the output, whole, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = heads[0], heads[1], heads[1], heads[0]
    return [torch.randn(B, h, s, D, dtype=torch.float64, generator=generator).to(dtype) for h in sizes]


def alone(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    """Output and gradients of q, k, v in one process."""
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def together(kind: str, cut: Cut, whole: list[Tensor], causal: bool) -> tuple[list[Tensor], list[Any], list[Any]]:
    """This rank's parts of the same, and the calls of forward and of backward."""
    rank = dist.get_rank()
    q, k, v, grad = (cut.take(each, rank, 2) for each in whole)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    attention = KINDS[kind](comm.world(), cut, causal)
    with comm.record() as forward:
        out = attention(*leaves)
    with comm.record() as backward:
        gradients = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), *gradients], forward, backward


def assert_equal(kind: str, zigzag: bool, heads: tuple[int, int], causal: bool) -> None:
    cut = Cut(dist.get_world_size(), zigzag)
    whole = drawn(heads)
    found, _, _ = together(kind, cut, whole, causal)
    for mine, each in zip(found, alone(*whole, causal), strict=True):
        torch.testing.assert_close(mine, cut.take(each, dist.get_rank(), 2), rtol=1e-12, atol=1e-12)


@check(ranks=2, kind=list(KINDS), zigzag={"contiguous": False, "zigzag": True}, heads=HEADS)
def is_that_of_one_process(kind: str, zigzag: bool, heads: tuple[int, int]) -> None:
    assert_equal(kind, zigzag, heads, causal=True)
    assert_equal(kind, zigzag, heads, causal=False)


@check(ranks=3, kind=list(KINDS), zigzag={"contiguous": False, "zigzag": True}, heads=HEADS)
def is_that_of_one_process_on_an_odd_number(kind: str, zigzag: bool, heads: tuple[int, int]) -> None:
    assert_equal(kind, zigzag, heads, causal=True)
    assert_equal(kind, zigzag, heads, causal=False)


def elements(calls: list[Any]) -> float:
    """What this rank sends, in elements of float64."""
    return sum(Fraction(call.wire).limit_denominator() for call in calls) / 8


@check(ranks=3, heads={"plain": (6, 6), "grouped": (6, 3)})
def sends_what_the_formulas_say(heads: tuple[int, int]) -> None:
    c, (h, keys) = dist.get_world_size(), heads
    q, r = B * h * S * D, Fraction(keys, h)
    round_trip = 2 * r * q * Fraction(c - 1, c)
    parts = (2 + 2 * r) * Fraction(q, c) * Fraction(c - 1, c)
    expected = {"ring": (round_trip, 2 * round_trip), "gathered": (round_trip, round_trip), "ulysses": (parts, parts)}
    for kind, (forward, backward) in expected.items():
        _, *calls = together(kind, Cut(c), drawn(heads), causal=True)
        assert [elements(each) for each in calls] == [forward, backward], kind


@check(ranks=3)
def the_next_keys_are_on_their_way_while_a_block_is_computed() -> None:
    events: list[str] = []

    def computed(*args: Any) -> tuple[Tensor, Tensor]:
        events.append("block")
        return block(*args)

    @contextmanager
    def heard(call: Any, phase: str) -> Iterator[None]:
        events.append(f"{phase} {call.op}" if phase == "issue" else phase)
        yield

    q, k, v, _ = drawn((2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_attention, "block", computed)
        patch.setattr(comm, "observers", [heard])
        RingAttention(comm.world(), Cut(3), causal=False)(
            *(Cut(3).take(each, dist.get_rank(), 2) for each in (q, k, v))
        )
    begin = ["issue recv", "issue send"] if dist.get_rank() % 2 else ["issue send", "issue recv"]
    assert events == [*begin, "block", "wait", "wait"] * 2 + ["block"]


@check(ranks=4, kind=list(KINDS), heads={name: HEADS[name] for name in ("plain", "fewer than ranks")})
def can_be_recomputed(kind: str, heads: tuple[int, int]) -> None:
    """By ranks without heads, too: each message needs all ranks."""
    cut, rank = Cut(4, zigzag=True), dist.get_rank()
    q, k, v, grad = drawn(heads)
    parts = [cut.take(each, rank, 2).requires_grad_() for each in (q, k, v)]
    out = checkpoint(KINDS[kind](comm.world(), cut), *parts, use_reentrant=False)
    out.backward(cut.take(grad, rank, 2))
    _, *right = alone(q, k, v, grad, True)
    for mine, each in zip(parts, right, strict=True):
        torch.testing.assert_close(mine.grad, cut.take(each, rank, 2), rtol=1e-12, atol=1e-12)


@check(ranks=2, kind=list(KINDS))
def sums_are_wider_than_bfloat16(kind: str) -> None:
    """At most as far from exact as one process in bfloat16 is, and an ulp."""
    whole, exact = drawn((4, 2), torch.bfloat16), drawn((4, 2), torch.bfloat16)
    right = alone(*(each.double() for each in exact), True)
    found, _, _ = together(kind, Cut(2, zigzag=True), whole, causal=True)
    for mine, each, near in zip(found, right, alone(*whole, True), strict=True):
        assert mine.dtype == torch.bfloat16
        allowed = (near.double() - each).abs().max() + torch.finfo(torch.bfloat16).eps * each.abs().max()
        assert (mine.double() - Cut(2, zigzag=True).take(each, dist.get_rank(), 2)).abs().max() <= allowed


@check(ranks=2, kind=list(KINDS))
def shapes_that_do_not_fit_are_refused_before_a_message(kind: str) -> None:
    def shaped(h: int, s: int) -> Tensor:
        return torch.zeros(1, h, s, 4)

    cut = Cut(2, zigzag=True)
    wrong = {
        "5 heads of q and 2 of k": (shaped(5, 4), shaped(2, 4), shaped(2, 4)),
        "give .b, h, s, d. of the same tokens": (shaped(4, 4), shaped(4, 6), shaped(4, 6)),
        "and k as v": (shaped(4, 4), shaped(4, 4), shaped(2, 4)),
        "3 tokens on a rank are not 2 equal chunks": (shaped(4, 3), shaped(4, 3), shaped(4, 3)),
        "give a token, a row and a head or more": (shaped(4, 0), shaped(4, 0), shaped(4, 0)),
        "and a head or more": (shaped(4, 4), shaped(0, 4), shaped(0, 4)),
        "to one dtype": (shaped(4, 4).double(), shaped(4, 4), shaped(4, 4)),
    }
    tries = [(words, cut, inputs) for words, inputs in wrong.items()]
    fits = (shaped(4, 4),) * 3
    tries += [(f"among {ranks} ranks, and 2 in the group", Cut(ranks), fits) for ranks in (1, 4)]
    for words, each, inputs in tries:
        with comm.record() as calls, pytest.raises((ValueError, TypeError), match=words):
            KINDS[kind](comm.world(), each)(*inputs)
        assert not calls


@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
class TestCut:
    def test_every_token_is_on_one_rank_and_joins_again(self, ranks: int, zigzag: bool) -> None:
        cut = Cut(ranks, zigzag)
        whole = torch.arange(48).view(2, 24)[:, : 24 - 24 % cut.chunks]
        parts = [cut.take(whole, rank, 1) for rank in range(ranks)]
        assert [part.shape for part in parts] == [(2, whole.shape[1] // ranks)] * ranks
        assert torch.equal(cut.join(parts, 1), whole)
        here = torch.device("cpu")
        assert [SequencePart(cut, rank).positions(parts[0].shape[1], here).tolist() for rank in range(ranks)] == [
            part[0].tolist() for part in parts
        ]

    def test_work_is_that_of_the_pairs_of_tokens(self, ranks: int, zigzag: bool) -> None:
        """Counted in chunks of 60 tokens; the formula is for long ones."""
        cut, size = Cut(ranks, zigzag), 60
        length = cut.chunks * size
        attended = torch.arange(1, length + 1, dtype=torch.float64)  # by the token at each place
        shares = [float(cut.take(attended, rank, 0).sum() / attended.sum()) for rank in range(ranks)]
        assert shares == pytest.approx([cut.work(rank) for rank in range(ranks)], abs=1 / length)
        if zigzag:
            assert {round(cut.work(rank), 12) for rank in range(ranks)} == {round(1 / ranks, 12)}
        else:
            assert cut.work(ranks - 1) * ranks == pytest.approx((2 * ranks - 1) / ranks)

    def test_tokens_that_make_no_equal_chunks_are_refused(self, ranks: int, zigzag: bool) -> None:
        cut = Cut(ranks, zigzag)
        if cut.chunks > 1:
            with pytest.raises(ValueError, match=f"{cut.chunks + 1} tokens cannot be cut into {cut.chunks} equal"):
                cut.take(torch.zeros(1, cut.chunks + 1), 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_share_of_the_mean_has_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(2, 4, 9, dtype=dtype), torch.tensor([[1, -100, 3, 4], [-100] * 4])
    share = token_mean(targets)(logits, targets)
    assert share.dtype == dtype
    torch.testing.assert_close(share, cross_entropy(logits, targets))
    assert token_mean(targets[1:])(logits[1:], targets[1:]) == 0


def test_blocks_add_up_in_any_order() -> None:
    q, k, v, _ = drawn((4, 2))
    parts = list(zip(k.chunk(4, 2), v.chunk(4, 2), strict=True))
    whole = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), float("-inf"))
        for number in order:
            add_block(out, lse, block(q, *parts[number], causal=False))
        torch.testing.assert_close(out, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
