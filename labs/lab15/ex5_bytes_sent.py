"""Exercise 15.5: Bytes by axis."""

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference
from minifsdp.mesh import Mesh


@reference(
    "15.5",
    hints=(
        "Take the axes one by one. How many all-reduces does a block need for a micro-batch, and which elements do "
        "embedding, head and loss add? How often per step are gradients reduced? With how many stages does this one "
        "exchange messages, and does a point-to-point message have a factor (n - 1) / n?",
        "tp: m · 2 (t - 1) / t · tokens · ((4 · blocks + first + last) · width + 3 · last) elements, where `first` and "
        "`last` are 1 on the first and the last stage, and 0 elsewhere. dp: 2 (d - 1) / d · parameters. pp: m · "
        "(number of neighbours) · tokens · width.",
    ),
)
def bytes_sent(
    mesh: Mesh, rank: int, tokens: int, width: int, blocks: int, parameters: int, micros: int, itemsize: int
) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, for each of the axes "pp", "dp" and "tp": 0 for one with one rank.

    Args:
        mesh: with the sizes `mesh.pp`, `mesh.dp` and `mesh.tp`, and the places `mesh.place(rank, axis)`.
        rank: whose bytes to compute. Its stage is its place on "pp".
        tokens: in a micro-batch, b s.
        width: h. Stages pass on activations [b, s, h].
        blocks: in this rank's stage.
        parameters: elements that this rank holds. All ranks of a dp group hold the same.
        micros: m, the number of micro-batches.
        itemsize: bytes of an element.

    A block has two all-reduces of its activations in the forward and two in the backward pass. The first stage has one
    more for its embedding, the last one more for its head; a single stage has both. The loss all-reduces three numbers
    per token, all in elements of `itemsize` bytes. Gradients are all-reduced once, after the last micro-batch. A ring
    all-reduce among n ranks sends 2 (n - 1) / n of the data.
    """
    place, last = mesh.place(rank, "pp"), mesh.pp - 1
    sums = 4 * blocks + (place == 0) + (place == last)
    of_token = sums * width + 3 * (place == last)
    neighbours = (place > 0) + (place < last)
    return {
        "tp": 2 * (mesh.tp - 1) / mesh.tp * micros * tokens * of_token * itemsize,
        "dp": 2 * (mesh.dp - 1) / mesh.dp * parameters * itemsize,
        "pp": float(neighbours * micros * tokens * width * itemsize),
    }


def settings(variant):
    """Mesh, tokens, width, blocks, parameters, micro-batches, bytes of an element."""
    yield Mesh(pp=2, dp=2, tp=2), 64, 16, 2, 9_000, 4, 4
    yield Mesh(pp=4, dp=3, tp=2, axes=("dp", "pp", "tp")), 40, 12, 1, 5_001, 6, 2
    yield Mesh(pp=1, dp=4, tp=2), 32, 8, 3, 4_321, 1, 4
    yield Mesh(pp=3, dp=1, tp=4), 48, 20, 2, 7_777, 5, 8
    yield Mesh(pp=2, dp=8, tp=1), 16, 24, 4, 30_003, 2, 4
    yield Mesh(pp=variant.ranks, dp=2, tp=2), 8 * variant.size, 16, 1, 1_000 + variant.seed, 3, 4


@check("15.5")
def check_bytes_sent(answer, variant):
    """Activations are summed over tp, gradients over dp, and passed on over pp; each byte is counted."""
    rows = []
    for mesh, *numbers in settings(variant):
        for rank in range(mesh.ranks):
            got = answer(mesh, rank, *numbers)
            if not isinstance(got, dict) or sorted(got) != ["dp", "pp", "tp"]:
                slip = "likely slip: an axis with one rank is in the result, too, with 0 bytes"
                raise AnswerError(f'expected a dict with the keys "pp", "dp" and "tp", got {describe(got)}\n{slip}')
            rows.append((mesh, rank, numbers, got))
    for axis in ("tp", "dp", "pp"):
        known = [slips_of_bytes(mesh, rank, *numbers)[axis] for mesh, rank, numbers, _ in rows]
        always = next(
            (
                text
                for text in known[0]
                if all(close(row[3][axis], each[text]) for row, each in zip(rows, known, strict=True))
            ),
            None,
        )
        for mesh, rank, numbers, got in rows:
            where = f"pp={mesh.pp}, dp={mesh.dp}, tp={mesh.tp}, stage {mesh.place(rank, 'pp')}"
            right = right_bytes(mesh, rank, *numbers)[axis]
            if not close(got[axis], right):
                expect(f"bytes along {axis}, {where}", in_full(got[axis]), in_full(right), slip=always)


def close(got, wrong):
    return isinstance(got, int | float) and abs(got - wrong) <= 1e-9 * max(1.0, abs(wrong))


def in_full(value):
    """A number of bytes with all its digits before the point; anything else in the usual words."""
    return f"{value:,.1f}".removesuffix(".0") if isinstance(value, int | float) else describe(value)


def right_bytes(mesh, rank, tokens, width, blocks, parameters, micros, itemsize):
    stages = [*range(mesh.pp)]
    stage = mesh.place(rank, "pp")
    sums = [4 * blocks, stage == stages[0], stage == stages[-1]]
    numbers = tokens * (width * sum(sums) + (3 if stage == stages[-1] else 0))
    messages = len({stage - 1, stage + 1} & {*stages})
    return {
        "tp": 2.0 * micros * numbers * itemsize * (mesh.tp - 1) / mesh.tp,
        "dp": 2.0 * parameters * itemsize * (mesh.dp - 1) / mesh.dp,
        "pp": 1.0 * micros * messages * tokens * width * itemsize,
    }


def slips_of_bytes(mesh, rank, tokens, width, blocks, parameters, micros, itemsize):
    """The results of mistakes, by axis."""
    right = right_bytes(mesh, rank, tokens, width, blocks, parameters, micros, itemsize)
    tp, dp, pp = right["tp"], right["dp"], right["pp"]
    place, last = mesh.place(rank, "pp"), mesh.pp - 1
    ring = 2 * (mesh.tp - 1) / mesh.tp * micros * tokens * itemsize
    ends = (place == 0) + (place == last)
    loss = 3 * (place == last)
    message = micros * tokens * width * itemsize
    return {
        "tp": {
            "a block has four all-reduces in a step: two in the forward and two in the backward pass": (
                ring * ((2 * blocks + ends) * width + loss)
            ),
            "embedding and head are missing: each has one more all-reduce": ring * (4 * blocks * width + loss),
            "the embedding has an all-reduce, too": ring * ((4 * blocks + (place == last)) * width + loss),
            "the head has an all-reduce, too": ring * ((4 * blocks + (place == 0)) * width + loss),
            "embedding and head have one all-reduce each, in one of the two passes": (
                ring * ((4 * blocks + 2 * ends) * width + loss)
            ),
            "embedding and head are on the first and the last stage only": ring * ((4 * blocks + 2) * width + loss),
            "the loss is missing: it all-reduces three numbers per token": ring * (4 * blocks + ends) * width,
            "the loss is computed on the last stage only": ring * ((4 * blocks + ends) * width + 3),
            "this is for one micro-batch; a step has m": tp / micros,
            "an all-reduce is a reduce-scatter and an all-gather: 2 (t - 1) / t of the data": tp / 2,
            "a rank sends 2 (t - 1) / t of the data: this sends it twice": tp * mesh.tp / max(1, mesh.tp - 1)
            if mesh.tp > 1
            else 2.0 * micros * tokens * itemsize * ((4 * blocks + ends) * width + loss),
            "these are elements, not bytes": tp / itemsize,
            "all ranks of a tp group compute with the same tokens: these are not divided by t": tp / mesh.tp,
        },
        "dp": {
            "gradients add up over the micro-batches, and are reduced once": dp * micros,
            "`parameters` is this rank's part already: pipeline and tensor parallelism have divided it": dp
            / mesh.pp
            / mesh.tp,
            "an all-reduce is a reduce-scatter and an all-gather: 2 (d - 1) / d of the data": dp / 2,
            "a rank sends 2 (d - 1) / d of the data: this sends it twice": 2.0 * parameters * itemsize,
            "these are elements, not bytes": dp / itemsize,
            "gradients are averaged over dp, not over all ranks": 2
            * (mesh.ranks - 1)
            / mesh.ranks
            * parameters
            * itemsize,
        },
        "pp": {
            "a stage sends activations to the next and gradients to the one before; the first and the last have one "
            "neighbour": 2.0 * message if mesh.pp > 1 else 0.0,
            "gradients of activations are sent, too: back to the stage before": 1.0 * message * (place < last),
            "a stage in the middle has two neighbours": 1.0 * message if mesh.pp > 1 else 0.0,
            "a single stage has no neighbour, an end stage has one, and the others have two": 2.0 * message,
            "a message goes to one rank: it has no factor 2 (p - 1) / p": pp * 2 * (mesh.pp - 1) / mesh.pp,
            "a message goes to one rank: it has no factor (p - 1) / p": pp * (mesh.pp - 1) / mesh.pp,
            "this is for one micro-batch; a step has m": pp / micros,
            "these are elements, not bytes": pp / itemsize,
            "every rank of a tp group sends its copy of the activations": pp / mesh.tp,
            "the batch of a micro-batch is given: `tokens` are not divided by d": pp / mesh.dp,
        },
    }
