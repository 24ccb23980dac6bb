"""Exercise 0.2: The stages of ZeRO."""

from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference


@reference(
    "0.2",
    hints=(
        "Three terms: parameters, gradients, optimizer state. Each stage divides one more of them by the ranks.",
        "Stage 1 divides the optimizer state, stage 2 the gradients as well, stage 3 the parameters as well.",
    ),
    forbids=(closed_form.ddp, closed_form.zero1, closed_form.zero2, closed_form.fsdp),
)
def zero_stages(psi: int, ranks: int, k: int = 12, itemsize: int = 2) -> dict[str, float]:
    """Return the bytes of model state on each rank, replicated and in the three stages of ZeRO.

    Activations are not counted.

    Args:
        psi: total number of parameter elements, Ψ.
        ranks: N. Padding is ignored: a shard has exactly 1 / N of the bytes.
        k: bytes of optimizer state per element, K, including a float32 copy.
        itemsize: bytes per element of parameters and of gradients.

    Returns:
        Bytes by "replicated", "stage 1", "stage 2", "stage 3", in this order.
    """
    parameters = gradients = itemsize * psi
    optimizer = k * psi
    return {
        "replicated": parameters + gradients + optimizer,
        "stage 1": parameters + gradients + optimizer / ranks,
        "stage 2": parameters + (gradients + optimizer) / ranks,
        "stage 3": (parameters + gradients + optimizer) / ranks,
    }


STAGES = ("replicated", "stage 1", "stage 2", "stage 3")


@check("0.2")
def check_zero_stages(answer, variant):
    """Each stage divides one more of the three terms by the ranks, for any K and item size."""
    given = (100 * variant.size, variant.ranks, 12, 2)
    for psi, ranks, k, itemsize in ((50, 64, 12, 2), (100, 8, 8, 4), given, (100, 4, 0, 1), (100, 1, 8, 4)):
        by_default = (k, itemsize) == (12, 2)
        found = answer(psi, ranks) if by_default else answer(psi, ranks, k=k, itemsize=itemsize)
        if not isinstance(found, dict) or list(found) != list(STAGES):
            raise AnswerError(f"expected a dict with {', '.join(STAGES)}, in this order, got {found!r}")
        one, state = itemsize * psi, k * psi
        for stage in STAGES:
            right = _held(stage, one, state, ranks)
            slips = {
                "the gradients are missing: they are as large as the parameters": _held(stage, one, state - one, ranks)
                if stage == "replicated"
                else right - one / (1 if stage == "stage 1" else ranks),
                "K is an argument: 12 is Adam's with a float32 copy": _held(stage, one, 12 * psi, ranks),
                "itemsize is an argument: parameters and gradients are not always 2 bytes": _held(
                    stage, 2 * psi, state, ranks
                ),
                "k and itemsize are arguments: 12 and 2 belong to Adam in mixed precision": _held(
                    stage, 2 * psi, 12 * psi, ranks
                ),
                "K includes the float32 copy already": _held(stage, one, state + 4 * psi, ranks),
                "a shard has exactly 1 / N of the bytes: divide with /, without rounding": float(int(right)),
                "the stages build on each other: what a stage has sharded stays sharded in the next": {
                    "stage 2": one + one / ranks + state,
                    "stage 3": one / ranks + one + state,
                }.get(stage, -1.0),
                "the optimizer state is sharded first, the parameters last": one + one / ranks + state,
                "there are N shards, and a rank keeps one of them: divide by N": _held(
                    stage, one, state, max(1, ranks - 1)
                ),
                "bytes of one rank are asked for, not of all together": right * ranks,
                "exact bytes are asked for: do not round": round(right, 1),
                "bytes are asked for, not GiB": right / 2**30,
                "bytes are asked for, not GB": right / 1e9,
            }
            where = f"{stage}, Ψ = {psi:,}, N = {ranks}, K = {k}, {itemsize} bytes per element: bytes"
            expect(where, found[stage], right, slips=slips)


def _held(stage, one, state, ranks):
    """Bytes on a rank: parameters and gradients of `one` byte count each, and `state`, as far as they are sharded."""
    terms, sharded = [state, one, one], STAGES.index(stage)
    return float(sum(terms[:sharded]) / ranks + sum(terms[sharded:]))
