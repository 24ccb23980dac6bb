"""Exercise 13.5: Shard the sequence."""

from typing import Any

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.tensor_parallel import layouts

from .shared import (
    APART,
    ITEM,
    ONE_GROUP,
    ORDER,
    Operator,
    crossed,
    exact,
    here,
    kept_apart,
    of_two_groups,
    pair_of,
    part,
    randn,
)


@reference(
    "13.5",
    hints=(
        "The backward pass is the transpose of the forward pass. After a gather, every rank multiplies the full "
        "sequence by its own weights, so the gradients have to be summed, and each rank keeps its shard of the sum. "
        "Collectives join and split tensors along the first dimension, but the sequence is the second dimension.",
        "Write two helpers. `gathered(x)` takes `x.movedim(1, 0).contiguous()` [s / t, b, h], gathers it into "
        "[s, b, h], and moves the dimension back. `scattered(x)` does the same with a reduce-scatter, from s to s / t. "
        "f calls `gathered` in the forward and `scattered` in the backward pass; g does the opposite.",
    ),
    forbids=(layouts.move, layouts.relaid, layouts.all_gathered, layouts.reduce_scattered),
)
def sequence_f_and_g(group: Group) -> tuple[Operator, Operator]:
    """Return f and g for activations that are sharded along dimension 1, the sequence, in rank order.

    f(part): [b, s / t, h] -> [b, s, h], the tokens of all ranks. In the backward pass, f receives a
        gradient [b, s, h] that is a partial sum.
    g(partial sum): [b, s, h] -> [b, s / t, h], this rank's tokens of the sum. s is divisible by t.

    Each function runs one collective in each direction, in the dtype of its input. The collectives join and
    split contiguous tensors along the first dimension: `comm.all_gather(output, part, group).wait()` and
    `comm.reduce_scatter(part, full, group).wait()`.
    """

    def gathered(x: Tensor) -> Tensor:
        part = x.movedim(1, 0).contiguous()
        whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        comm.all_gather(whole.view(-1), part.view(-1), group).wait()
        return whole.movedim(0, 1).contiguous()

    def scattered(x: Tensor) -> Tensor:
        whole = x.movedim(1, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
        comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
        return part.movedim(0, 1).contiguous()

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return scattered(gradient)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return scattered(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gathered(gradient)

    return Enter.apply, Leave.apply


def not_contiguous(function, x, gradient):
    """The effect on tensors that are stored in another order."""
    try:
        found = crossed(function, x, gradient)
    except RuntimeError as error:
        if "view" not in str(error) and "contiguous" not in str(error):
            raise
        raise AnswerError(f"a tensor that is not contiguous: it raises {error}\nlikely slip: {ORDER}") from error
    return found["value"], found["gradient"]


def inputs_of_sequence(t, variant):
    """For each rank: a part [b, s / t, h], and a whole tensor [b, s, h]."""
    b, s, h = 2, variant.size, 3
    return [
        (randn(b, s, h, seed=variant.seed, rank=r), randn(b, t * s, h, seed=variant.seed + 3, rank=r)) for r in range(t)
    ]


def observe_sequence(answer, inputs):
    group = comm.world()
    mine, whole = here(*inputs[group.rank()])
    f, g = pair_of(answer, group)
    found = {"f": crossed(f, mine, whole), "g": crossed(g, whole, mine)}
    turned = whole.movedim(1, 0).contiguous().movedim(0, 1)
    other = mine.movedim(1, 0).contiguous().movedim(0, 1)
    found["g"]["order"] = not_contiguous(g, turned, other)
    found["f"]["order"] = not_contiguous(f, other, turned)
    for name, x, gradient in (("f", mine, whole), ("g", whole, mine)):
        if found[name]["value"].shape == gradient.shape and found[name]["gradient"].shape == x.shape:
            several = kept_apart({"f": f, "g": g}[name], x, gradient)
            one = kept_apart({"f": f, "g": g}[name], x[:1], gradient[:1])  # a move of dimensions copies nothing
            found[name]["apart"] = tuple(a and b for a, b in zip(several, one, strict=True))
    results = [found[name][what] for name in "fg" for what in ("value", "gradient")]
    shapes = [None if each is None else each.shape for each in results]
    if shapes == [whole.shape, mine.shape, mine.shape, whole.shape]:
        small = mine[:1, :1], whole[:1, : group.size()]
        found["small"] = crossed(f, *small), crossed(g, *small[::-1])
        floats = mine.float(), whole.float()
        found["float32"] = crossed(f, *floats), crossed(g, *floats[::-1])
        found["two"] = of_two_groups(answer, f, g, whole)
    return found


@check("13.5")
def check_sequence(answer, variant):
    """f gathers the sequence and reduce-scatters its gradient; g does the opposite. Both work along dimension 1."""
    for t in dict.fromkeys((variant.ranks, 3)):
        inputs = inputs_of_sequence(t, variant)
        parts, wholes = zip(*inputs, strict=True)
        joined, total = torch.cat(parts, 1), sum(wholes)
        bytes_of = total.numel() * ITEM
        gather, scatter = [f"all_gather of {bytes_of} bytes"], [f"reduce_scatter of {bytes_of} bytes"]
        for rank, found in enumerate(on_ranks(t, observe_sequence, answer, inputs)):
            f, g = found["f"], found["g"]
            what = f"f on {t} ranks"
            exact(f"{what}, its output", f["value"], joined, rank=rank, slips=joining(parts), slip=f"{DIMENSION}")
            slips = scattering(wholes, t, rank, "gradient")
            exact(f"{what}, the gradient", f["gradient"], part(total, 1, t, rank), rank=rank, slips=slips, slip=OWN)
            expect(f"{what}, messages forward", f["forward"], gather, rank=rank, slips=dear(bytes_of))
            expect(f"{what}, messages backward", f["backward"], scatter, rank=rank, slips=dear(bytes_of))
            what = f"g on {t} ranks"
            slips = scattering(wholes, t, rank, "x")
            exact(f"{what}, its output", g["value"], part(total, 1, t, rank), rank=rank, slips=slips)
            slips = joining(parts) | alone(parts, rank)
            exact(f"{what}, the gradient", g["gradient"], joined, rank=rank, slips=slips, slip=DIMENSION)
            expect(f"{what}, messages forward", g["forward"], scatter, rank=rank, slips=dear(bytes_of))
            expect(f"{what}, messages backward", g["backward"], gather, rank=rank, slips=dear(bytes_of))
            own = part(total, 1, t, rank)
            orders = (("f", f["order"], (joined, own)), ("g", g["order"], (own, joined)))
            for name, got, wanted in orders:
                for which, a, b in zip(("an x", "a gradient"), got, wanted, strict=True):
                    exact(f"{name} on {t} ranks, {which} that is not contiguous", a, b, rank=rank, slip=ORDER)
            for name, apart in (("f", f["apart"]), ("g", g["apart"])):
                what = f"{name} on {t} ranks, result and gradient after a second call: unchanged"
                expect(what, apart, (True, True), rank=rank, slip=APART)
            more_sequences(found, parts, wholes, t, rank)


def more_sequences(found, parts, wholes, t, rank):
    """One sequence with one token on each rank; float32; two groups."""
    total = sum(wholes)
    own = part(total, 1, t, rank)
    tokens, sums = torch.cat([each[:1, :1] for each in parts], 1), total[:1, :t]
    small = tokens, sums[:, rank : rank + 1]
    halves = (torch.cat([each.float() for each in parts], 1), own.float())
    cases = ("one sequence, with one token on each rank", "small", small), ("in float32", "float32", halves)
    for where, key, (a, b) in cases:
        for name, got, value, gradient in (("f", found[key][0], a, b), ("g", found[key][1], b, a)):
            slip = "everything stays in the dtype of x" if key == "float32" else DIMENSION
            for what, one, other in (("output", got["value"], value), ("gradient", got["gradient"], gradient)):
                expect(f"{name} on {t} ranks, its {what}, {where}", one, other, rank=rank, slip=slip)
            sent = [int(each.split()[2]) for each in (*got["forward"], *got["backward"])]
            expect(f"{name} on {t} ranks, bytes sent, {where}", sent, [a.nbytes] * 2, rank=rank, slip=slip)
    mine, ones = wholes[rank], torch.ones_like(wholes[rank])
    of_tokens = torch.cat([torch.ones_like(parts[rank]) * (1 + r) for r in range(t)], 1)
    wanted = (
        ("f of one rank", mine, ones * (1 + rank)),
        ("g of one rank", mine, ones * (1 + rank)),
        (f"f of {t} ranks", torch.cat(wholes, 1), ones * (t * (t + 1) // 2)),
        (f"g of {t} ranks", own, of_tokens),
    )
    for got, (name, *values) in zip(found["two"], wanted, strict=True):
        for what, one, other in zip(("its output", "the gradient of x"), got, values, strict=True):
            exact(f"{name}, with two pairs, {what}", one, other, rank=rank, slip=ONE_GROUP)


DIMENSION = (
    "the sequence is dimension 1; collectives join and split dimension 0: use `movedim(1, 0)` and `.contiguous()`"
)


OWN = "a rank keeps only its own tokens: the gradient of x has the shape of x"


def joining(parts):
    whole = torch.cat(parts, 1)
    rows = torch.cat(parts)
    return {
        "the shards are joined along the batch: bring the sequence to the front before the gather": rows,
        "the gathered buffer is [t, b, s / t, h]; viewing it as [b, s, h] mixes sequences": rows.view(whole.shape),
        "the ranks' tokens are joined in rank order; here they are in the reverse order": torch.cat(parts[::-1], 1),
        "the tokens of a rank keep their order; here the sequence is reversed": whole.flip(1),
        "`reshape` and `view` do not move dimensions: `movedim(1, 0)` does": moved_by_view(parts, whole),
    }


def moved_by_view(parts, whole):
    """Dimensions 0 and 1 renamed instead of moved, before the gather."""
    b, s, h = parts[0].shape
    return torch.cat([each.reshape(s, b, h) for each in parts]).movedim(0, 1).contiguous().view(whole.shape)


def alone(parts, rank):
    zeros = [each if r == rank else torch.zeros_like(each) for r, each in enumerate(parts)]
    return {
        "every rank's x contributes to the sums of all tokens, so its gradient covers the other ranks' tokens, too": (
            torch.cat(zeros, 1)
        )
    }


def scattering(wholes, t, rank, name):
    total = sum(wholes)
    flat = total.flatten()
    size = flat.numel() // t
    mine = part(total, 1, t, rank)
    slips = {
        f"this is a shard of only this rank's {name}, which is a partial sum: add up those of all ranks": (
            part(wholes[rank], 1, t, rank)
        ),
        "partial sums are added up; a mean also divides by t": mine / t,
    }
    if size * t == flat.numel():
        slips["this splits the batch: bring the sequence to the front before the reduce-scatter"] = flat[
            rank * size : (rank + 1) * size
        ].view(mine.shape)
    return slips


def dear(size):
    return {
        "taking a shard of an all-reduce's result gives the right values, but sends twice the bytes": [
            f"all_reduce of {size} bytes"
        ],
        "return f first, then g": [],
    }
