"""Exercise 13.7: Compare the traffic."""

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference


@reference(
    "13.7",
    hints=(
        "Tensor parallelism sends activations. How many all-reduces does a block need per step, and what does a ring "
        "send for each? FSDP sends parameters and gradients. How many times does it send each of them, and what does a "
        "ring send for an all-gather or a reduce-scatter?",
        "Tensor parallelism needs 4 all-reduces of tokens · width elements, and for each a rank sends 2 (t - 1) / t "
        "of these elements. Sequence parallelism sends the same number of bytes, because it replaces each all-reduce "
        "with its two halves. FSDP needs two all-gathers and one reduce-scatter, and for each a rank sends (t - 1) / t "
        "of the parameters.",
    ),
)
def bytes_sent(tokens: int, width: int, parameters: int, ranks: int, itemsize: int) -> tuple[float, float]:
    """Compute the bytes that a rank sends for one block in one step, with ring collectives.

    Args:
        tokens: b s, the number of tokens per step on all ranks together.
        width: h.
        parameters: the number of elements in the block's parameters.
        ranks: t.
        itemsize: the size of an element in bytes.

    Returns:
        First the bytes for tensor parallelism (with or without sequence parallelism), then the bytes
        for FSDP, which reshards each unit after its forward pass. The sums of the norms' gradients do not count, and
        neither does padding.
    """
    per_element = itemsize * (ranks - 1) / ranks
    return 8 * tokens * width * per_element, 3 * parameters * per_element


@check("13.7")
def check_bytes_sent(answer, variant):
    """Tensor parallelism sends four all-reduces of activations; FSDP, two gathers and a reduce-scatter."""
    rows = []
    for tokens, width, ranks, itemsize in (
        (variant.size * 10, 12, 2, 4),
        (64, 16, 3, 2),
        (1000, 8, 8, 4),
        (32, 32, 1, 8),
        (96, 24, variant.ranks, 2),
        (48, 20, 5, 4),
    ):
        parameters = 12 * width**2 + (13 * width if ranks != 5 else -7)  # the last block has other biases
        rows.append((tokens, width, parameters, ranks, itemsize, answer(tokens, width, parameters, ranks, itemsize)))
    for *_, got in rows:
        if not (isinstance(got, tuple | list) and len(got) == 2):
            raise AnswerError(f"expected two numbers of bytes, got {describe(got)}")
    for number, name in enumerate(("tensor parallelism", "FSDP")):
        always = None
        for slip in slips_of_bytes(*rows[0][:5])[number]:
            if all(close(each[5][number], slips_of_bytes(*each[:5])[number][slip]) for each in rows):
                always = slip
        for *setting, got in rows:
            tokens, width, parameters, ranks, itemsize = setting
            where = f"{tokens} tokens, width {width}, {ranks} ranks, {itemsize} bytes per element"
            right = wanted_bytes(*setting)[number]
            slip = always or "count the bytes that one rank sends for one block in one step, with ring collectives"
            expect(f"bytes that {name} sends, {where}", got[number], right, slip=slip)


def close(got, wrong):
    return isinstance(got, int | float) and abs(got - wrong) <= 1e-9 * max(1.0, abs(wrong))


def wanted_bytes(tokens, width, parameters, ranks, itemsize):
    per_element = itemsize * (ranks - 1) / ranks
    return 8.0 * tokens * width * per_element, 3.0 * parameters * per_element


def slips_of_bytes(tokens, width, parameters, ranks, itemsize):
    tensor_parallel, fsdp = wanted_bytes(tokens, width, parameters, ranks, itemsize)
    whole = 8.0 * tokens * width * itemsize, 3.0 * parameters * itemsize
    factors = "factors of 2 (attention and MLP, forward and backward, and the two halves of an all-reduce)"
    return (
        {
            f"8 is the product of three {factors}; one is missing": tensor_parallel / 2,
            f"8 is the product of three {factors}; two are missing": tensor_parallel / 4,
            "a rank sends (t - 1) / t of a tensor each time, because it already has one shard": whole[0],
            "every rank works on all tokens: these are not data-parallel ranks": tensor_parallel / ranks,
            "this is a number of elements, not of bytes": tensor_parallel / itemsize,
            "these are the bytes of all ranks; return those of one rank": tensor_parallel * ranks,
            "return tensor parallelism first, then FSDP": fsdp,
            "an element has `itemsize` bytes, which need not be 4": tensor_parallel / itemsize * 4,
            "4 all-reduces are for one block: what the loss sends does not belong to it": tensor_parallel * 5 / 4,
            "a rank sends (t - 1) / t of a tensor, a float: nothing is rounded": 8.0
            * (tokens * width * (ranks - 1) // ranks)
            * itemsize,
        },
        {
            "parameters are gathered for the forward and again for the backward pass; gradients are reduced once": fsdp
            * 2
            / 3,
            "gradients need only a reduce-scatter, which is half an all-reduce": fsdp * 4 / 3,
            "a rank sends (t - 1) / t of a tensor each time, because it already has one shard": whole[1],
            "this is a number of elements, not of bytes": fsdp / itemsize,
            "parameters are sent twice and gradients once": fsdp / 3,
            "an element has `itemsize` bytes, which need not be 4": fsdp / itemsize * 4,
            "gradients have `itemsize` bytes per element, too, which need not be 4": fsdp
            * (2 * itemsize + 4)
            / (3 * itemsize),
            "a rank sends (t - 1) / t of a tensor, a float: nothing is rounded": 3.0
            * (parameters * (ranks - 1) // ranks)
            * itemsize,
            "`parameters` is given; it need not be 12 h^2 + 13 h": 3.0
            * (12 * width**2 + 13 * width)
            * itemsize
            * (ranks - 1)
            / ranks,
            "these are the bytes of all ranks; return those of one rank": fsdp * ranks,
        },
    )
