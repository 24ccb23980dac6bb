"""Exercise 9.3: Where to divide."""

import torch

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import BF16, FP16, FP32, FP64


@reference(
    "9.3",
    hints=(
        "The two divisors multiply to N. Only fp16 has too small a range to leave all of the division for the end.",
        "For `torch.float16`: start with 1 and double while its square is below N; the rest is N divided by that. For "
        "any other dtype: 1 and N.",
    ),
)
def divisors(dtype: torch.dtype, ranks: int) -> tuple[int, float]:
    """Return the divisors to apply before and after summing gradients over `ranks` ranks; both together give the mean.

    For `torch.float16` the first is the smallest power of two (1, 2, 4, ...) that is at least the square root of
    `ranks`. For any other dtype it is 1, because dividing before the reduction is a pass over P elements, and dividing
    after it is a pass over only P / N. The second is the remaining factor, which need not be an integer.
    """
    before = 1
    while dtype is torch.float16 and before * before < ranks:
        before *= 2
    return before, ranks / before


@check("9.3")
def check_divisors(answer, variant):
    """fp16 is divided by about the root of N before the sum and by the rest after it; other dtypes after it only."""
    for ranks in (512, 8, 5, 1, 2, 3, 4, 6, 7, 9, 50, 64, variant.ranks, 100_000):
        for dtype in (FP16, BF16, FP32, FP64, torch.float8_e5m2):
            wanted = (1, ranks / 1)
            while dtype is FP16 and wanted[0] ** 2 < ranks:
                wanted = (2 * wanted[0], ranks / (2 * wanted[0]))
            on = f"{str(dtype).removeprefix('torch.')} on {ranks} rank{'s' * (ranks > 1)}"
            named = f"divisors of {on} (before, after the sum)"
            got = answer(dtype, ranks)
            pair = isinstance(got, tuple) and len(got) == 2 and all(isinstance(each, int | float) for each in got)
            if not pair:
                raise AnswerError(f"{named}: expected two numbers in a tuple, got {got!r}")
            before, after = (float(each) for each in got)
            expect(named, (before, after), tuple(map(float, wanted)), slip=why_divisors(dtype, ranks, before, after))


def why_divisors(dtype, ranks, before, after):
    right = 2 ** ((ranks - 1).bit_length() + 1 >> 1) if ranks > 1 else 1
    if abs(before * after - ranks) > 1e-6 * ranks:
        return f"together they divide by {before * after:g}, and the mean needs {ranks}"
    if dtype is BF16 and before != 1:
        return (
            "bf16 has fp32's range (8 bits of exponent), no sum comes near its limit: dividing first is one more pass "
            "over P elements for nothing"
        )
    if dtype is FP32 and before != 1:
        return "fp32 has range enough: dividing all P elements first is work for nothing"
    if dtype is not FP16 and before != 1:
        return "of all dtypes fp16 alone is divided before the sum"
    if before == 1:
        return "nothing is divided before the sum: N gradients above 65,504 / N overflow in it"
    if before == ranks and ranks > right:
        return "all is divided before the sum: what is below 3e-8 * N is 0 then (underflow)"
    if before != 2 ** round(torch.tensor(before).log2().item()):
        return "not a power of two: the division rounds every element; by a power of two it only changes the exponent"
    if before == torchs(ranks) != right:
        return (
            "torch's loop, which ends at the first power that does not divide N: about as good, and not the rule here, "
            "which does not ask whether N can be divided"
        )
    if before < after and right != before:
        return "rounded down: take the smallest power of two that is not below the root of N"
    return "the smallest power of two that is not below the root of N comes first, the rest after the sum"


def torchs(ranks):
    """`_get_gradient_predivide_factor` of torch's FSDP."""
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before
