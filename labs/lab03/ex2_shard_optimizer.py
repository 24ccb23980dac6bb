"""Exercise 3.2: An optimizer over shards."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.zero.partition import ShardedOptimizer

from .shared import LR


@reference(
    "3.2",
    hints=(
        "An optimizer updates what it was given, and makes state for nothing else. Which tensors are this rank's?",
        "`nn.Parameter(t)` shares the memory of `t`. Make one of shard number `rank` of every bucket, and give the "
        "list to `optimizer_class` together with `**defaults`.",
    ),
    forbids=(ShardedOptimizer.__init__,),
)
def shard_optimizer(
    buckets: list[list[Tensor]], rank: int, optimizer_class: type[Optimizer], **defaults: Any
) -> Optimizer:
    """Return an optimizer over this rank's shard of every bucket.

    Args:
        buckets: for each bucket, its N shards, which are views of a flat buffer, as `partition` returns them.
        rank: the rank that owns the optimizer.
        optimizer_class: such as `torch.optim.Adam`; takes a list of leaf tensors.
        **defaults: for `optimizer_class`, such as `lr`.

    Returns:
        The optimizer. Its one parameter group holds one `nn.Parameter` per bucket, in the order of
        the buckets. Each of them shares its storage with this rank's shard of the bucket.
    """
    return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)


@check("3.2")
def check_shard_optimizer(answer, variant):
    """Each rank's optimizer holds its own shards, as views of the flat buffers, and state for nothing else."""
    for ranks in dict.fromkeys((variant.ranks, 3)):
        for rank in range(ranks):
            check_shard_optimizer_case(answer, rank, ranks, variant)
    adamw = {"lr": LR, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    for optimizer_class, defaults in (
        (AdamW, adamw),
        (SGD, {"lr": LR, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
        (Adam, {}),
    ):
        check_class_and_defaults(answer, optimizer_class, defaults, variant)


def check_class_and_defaults(answer, optimizer_class, defaults, variant):
    """Three buckets in float64, on the second of two ranks."""
    asked = ", ".join([optimizer_class.__name__, *(f"{name}={value}" for name, value in defaults.items())])
    lengths = [variant.size + 2, variant.size, 1]
    flats = [torch.full((2 * length,), float(length == lengths[0]), dtype=torch.float64) for length in lengths]
    buckets = [list(flat.chunk(2)) for flat in flats]
    kept = [list(shards) for shards in buckets]
    optimizer = answer(buckets, 1, optimizer_class, **defaults)
    wanted = optimizer_class([nn.Parameter(torch.ones(1))], **defaults)
    slip = "`optimizer_class` is an argument"
    expect(f"{asked}: class of the optimizer", type(optimizer).__name__, type(wanted).__name__, slip=slip)
    slip = "one parameter group with all shards: a scheduler and `param_groups[0]` see one"
    expect(f"{asked}: parameter groups", len(optimizer.param_groups), 1, slip=slip)
    group = optimizer.param_groups[0]
    slip = "one shard per bucket, in the order of the buckets, of however many buckets"
    expect(
        f"{asked}: elements of the tensors that it updates",
        [p.numel() for p in group["params"]],
        lengths,
        slips={
            "a shard whose elements are all zero is no padding: biases begin as zeros, and are trained": lengths[:1]
        },
        slip=slip,
    )
    places = lambda tensors: [tensor.untyped_storage().data_ptr() for tensor in tensors]  # noqa: E731
    slip = "nn.Parameter(shard) shares its memory; what changes the dtype makes a copy"
    shared = [a == b for a, b in zip(places(group["params"]), places(flats), strict=True)]
    expect(f"{asked}: tensors in the memory of the flat buffers, in float64", shared, [True] * 3, slip=slip)
    options = lambda of: {name: str(value) for name, value in sorted(of.items()) if name != "params"}  # noqa: E731
    slip = "all of `**defaults` go to `optimizer_class`, and nothing besides"
    expect(f"{asked}: defaults", options(group), options(wanted.param_groups[0]), slip=slip)
    same = [a is b for shards, old in zip(buckets, kept, strict=False) for a, b in zip(shards, old, strict=False)]
    slip = "the lists are the caller's, and are only read"
    expect(f"{asked}: entries of `buckets` that are as they were", same, [True] * 6, slip=slip)


def check_shard_optimizer_case(answer, rank, ranks, variant):
    lengths = [variant.size, variant.size + 3]
    with Ledger() as ledger:
        flats = [torch.arange(1.0, 1 + ranks * length) for length in lengths]
        buckets = [list(flat.chunk(ranks)) for flat in flats]
        before = sum(ledger.mark("flats").values())
        optimizer = answer(buckets, rank, Adam, lr=LR)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise AnswerError(f"rank {rank}, expected an optimizer, got {optimizer!r}")
        held = [p for group in optimizer.param_groups for p in group["params"]]
        expect(f"rank {rank} of {ranks}, class of the optimizer", type(optimizer).__name__, "Adam")
        expect(
            f"rank {rank} of {ranks}, elements of the tensors that the optimizer updates",
            [p.numel() for p in held],
            lengths,
            slips={
                "every rank updates everything: the values will be right, and no rank saves any state": [
                    length for length in lengths for _ in range(ranks)
                ],
                "one shard of every bucket, not of the first alone": lengths[:1],
                "one rank's shards are those with its number in each bucket, not one bucket's shards": [
                    shard.numel() for shard in buckets[rank % len(buckets)]
                ],
            },
        )
        expect(
            f"rank {rank} of {ranks}, tensors of the optimizer that are an nn.Parameter",
            sum(isinstance(p, nn.Parameter) for p in held),
            len(held),
            slip="a piece of a buffer is a plain tensor; nn.Parameter(piece) shares its memory",
        )
        expect(
            f"rank {rank} of {ranks}, bytes that building the optimizer took",
            sum(ledger.mark("built").values()) - before,
            0,
            slip="the optimizer was given copies of the shards, so the parameters would never change",
        )
        old = [flat.clone() for flat in flats]
        for p in held:
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p in held:
            p.grad = None
        state = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    changed = [(flat != past).nonzero().flatten().tolist() for flat, past in zip(flats, old, strict=True)]
    spans = [[list(range(r * length, (r + 1) * length)) for length in lengths] for r in range(ranks)]
    expect(
        f"rank {rank} of {ranks}, elements of the flat buffers that a step has changed (first to last)",
        [f"{span[0]}..{span[-1]}" if span else "none" for span in changed],
        [f"{span[0]}..{span[-1]}" for span in spans[rank]],
        slips={
            f"this is the shard of rank {other}": [f"{span[0]}..{span[-1]}" for span in spans[other]]
            for other in range(ranks)
            if other != rank
        },
        slip="the optimizer must update this rank's shards, in the flat buffers' memory",
    )
    step = [float((past[span] - flat[span])[0]) for flat, past, span in zip(flats, old, spans[rank], strict=True)]
    expect(
        f"rank {rank} of {ranks}, size of Adam's first step with lr {LR} and gradients of 1",
        step,
        [LR] * len(step),
        slip="the defaults, such as the learning rate, did not reach the optimizer",
        tolerance=1e-3,
    )
    expect(
        f"rank {rank} of {ranks}, bytes of optimizer state",
        state,
        sum(8 * length + 4 for length in lengths),
        slip="two moments of 4 bytes per element of this rank's shards, and a step count of 4 per shard",
    )
