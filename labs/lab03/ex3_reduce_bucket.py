"""Exercise 3.3: Reduce a bucket."""

from collections.abc import Callable

import torch
from torch import nn

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.zero.bucket import Bucket
from minifsdp.zero.stage1 import reduce_gradients

from .shared import Net, Watch, flatten, freed_by_resize, loss_of, my_rows, pad, received, whole_batches


@reference(
    "3.3",
    hints=(
        "Three buffers: the `.grad`s, a bucket [padded] laid out as `partition` laid out the parameters, and the mean "
        "[padded / N]. `device.empty` is uninitialized. What must still be there until the collective has ended?",
        "Zero the bucket, copy each `.grad` that is not None into its piece of it, start "
        "`comm.reduce_scatter(mean, bucket, group, comm.MEAN)`. The inner function `finish` waits, frees the bucket "
        "with `device.free`, and sets `shard.grad` to `mean`, or adds `mean` to it and frees `mean`.",
    ),
    forbids=(reduce_gradients, Bucket.start_reduction),
)
def reduce_bucket(params: list[nn.Parameter], shard: nn.Parameter, group: comm.Group) -> Callable[[], None]:
    """Start the reduce-scatter of a bucket's gradients; return the function that finishes it.

    Copy the gradients into a bucket buffer [N * shard.numel()] in the layout of `partition`. A
    `.grad` that is None counts as zeros, and so does the padding. Leave every `.grad` unchanged;
    the caller may free it as soon as this function returns.

    Both buffers come, uninitialized, from `device.empty(numel, dtype, role, device)`: the bucket with the role
    "communication", and the mean [shard.numel()] with the role "gradients".

    Args:
        params: the bucket's parameters, in the same order as for `partition`.
        shard: this rank's shard [padded / N]; its `.grad` receives the result.
        group: the ranks; `group.size()` is N.

    Returns:
        A function without arguments, to be called once. It waits for the reduction, frees the
        bucket with `device.free`, and sets `shard.grad` to the mean over the ranks [padded / N].
        If `shard.grad` exists by then, from an earlier reduction, the function adds the mean to it
        in place and then frees the mean. (A second reduction may start before the first one has
        been finished.)
    """
    bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device).zero_()
    start = 0
    for p in params:
        if p.grad is not None:
            bucket[start : start + p.numel()] = p.grad.flatten()
        start += p.numel()
    mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
    reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)

    def finish() -> None:
        reduction.wait()
        device.free(bucket)
        if shard.grad is None:
            shard.grad = mean
        else:
            shard.grad += mean
            device.free(mean)

    return finish


@check("3.3")
def check_reduce_bucket(answer, variant):
    """One reduce-scatter of the padded bucket, finished later; its mean is added to shard.grad, the bucket is freed."""
    for ranks in dict.fromkeys((variant.ranks, 3)):
        check_reduce_bucket_case(answer, variant, ranks)


def check_reduce_bucket_case(answer, variant, ranks):
    seen = on_ranks(ranks, observe_reduction, answer, variant.seed, variant.size, timeout=8)
    model = Net(variant.seed, variant.size)
    params = list(model.parameters())
    unused = params[1]
    per_rank = [local_gradients(variant.seed, variant.size, rank, ranks) for rank in range(ranks)]
    as_laid_out = [flat_gradients(grads, params, unused, ranks) for grads in per_rank]
    whole = torch.stack(as_laid_out)
    for rank, found in enumerate(seen):
        check_reduction_traffic(found, rank, whole[0].nbytes)
        mine = lambda full, rank=rank: full.chunk(ranks)[rank]  # noqa: E731
        mean = mine(whole.mean(0))
        squeezed = torch.stack([squeeze(grads, params, unused, ranks) for grads in per_rank]).mean(0)
        slips = {
            "the sum of the gradients; data parallelism averages (comm.MEAN)": mine(whole.sum(0)),
            "these are the parameters, not the gradients": mine(flatten(params, ranks)),
            "a parameter without a gradient leaves zeros in its own place; what follows must not move up": mine(
                squeezed
            ),
            "the padding belongs behind the last parameter": mine(fronted(whole.mean(0), params)),
            "the gradients are laid out in reverse; partition goes by the order of params": mine(
                pad(torch.cat([g.flatten() for g in reversed(mean_gradients(per_rank, params, unused))]), ranks)
            ),
            "this rank's own gradients, not the mean over the ranks": mine(as_laid_out[rank]),
        }
        if ranks > 1:
            slips["this is another rank's shard of the mean"] = whole.mean(0).chunk(ranks)[(rank + 1) % ranks]
        expect(
            "parameters that still have their .grad",
            found["grads"],
            found["grads_before"],
            rank=rank,
            slip="a .grad was cleared; the caller frees it",
        )
        first = found["first"]
        if isinstance(first, torch.Tensor) and bool(first.isnan().any()):
            raise AnswerError(
                f"rank {rank}, shard.grad: {int(first.isnan().sum())} elements are what uninitialized memory held\n"
                "likely slip: device.empty is not zero, so neither is the padding nor the place of a parameter that "
                "has no gradient; or the mean was read before the collective had written it"
            )
        expect("shard.grad", first, mean, rank=rank, slips=slips)
        expect(
            "shard.grad after a second bucket of the same gradients",
            found["second"],
            2 * mean,
            rank=rank,
            slips={
                "the second reduction replaced the first; accumulation adds": mean,
                "the first mean was added twice": 3 * mean,
            },
        )
        check_reduction_memory(found, rank, whole[0].nbytes, mean.nbytes, received(whole[0].nbytes, ranks))
        slip = "look at shard.grad in the function that is returned: another reduction may have written it by then"
        expect(
            "shard.grad after two that were under way together", found["two under way"], 2 * mean, rank=rank, slip=slip
        )
        what = "shard.grad where it was set to None while the reduction was under way"
        expect(what, found["emptied"], mean, rank=rank, slip=slip)
        alone = [torch.full((2,), (ranks + 1) / 2), torch.full((2 * ranks,), rank + 1.0)]
        slip = "the bucket is another buffer than the gradient's, with the shard's dtype"
        for what, got, right in zip(("shard.grad", "the .grad afterwards"), found["alone"], alone, strict=True):
            expect(f"{what} of one parameter in bfloat16", got, right.bfloat16(), rank=rank, slip=slip)
        expect(
            "whether the second mean was added to the shard.grad that was there",
            found["kept"],
            True,
            rank=rank,
            slip="the mean took its place: who holds the earlier shard.grad, freed by now, sees no second micro-batch",
        )


def check_reduction_traffic(found, rank, padded):
    if not found["callable"]:
        raise AnswerError(f"rank {rank}, reduce_bucket returned nothing that can be called: return the inner function")
    expect(
        "collectives (operation, bytes of the full tensor)",
        found["log"],
        [("reduce_scatter", padded)],
        rank=rank,
        slips={
            "an all-reduce hands every rank the whole mean, at twice the traffic; each needs its shard": [
                ("all_reduce", padded)
            ],
        },
        slip="one reduce-scatter of the whole padded bucket",
    )
    expect(
        "events, the loop's own 'reduce_bucket returned' among them",
        found["events"],
        ["issue reduce_scatter", "reduce_bucket returned", "wait reduce_scatter"],
        rank=rank,
        slips={
            "reduce_bucket waits itself: nothing could run beside it; wait in the function that it returns": [
                "issue reduce_scatter",
                "wait reduce_scatter",
                "reduce_bucket returned",
            ],
            "nobody waits: on gloo the result is written in wait(), on NCCL some time later": [
                "issue reduce_scatter",
                "reduce_bucket returned",
            ],
        },
    )


def check_reduction_memory(found, rank, padded, mean, received):
    expect(
        "bytes of communication buffers while the reduction is under way",
        found["under way"],
        padded + received,
        rank=rank,
        slips={
            'the bucket is not from device.empty(numel, dtype, "communication", device), or nothing holds it until '
            "the finishing function frees it with device.free": received
        },
        slip="one bucket [padded], on gloo the other ranks' parts of it, and no other buffer of the role",
    )
    expect(
        "bytes of communication buffers afterwards",
        found["communication"],
        0,
        rank=rank,
        slip="the bucket is still alive after the reduction: free it with device.free once it has been waited for",
    )
    expect(
        "bytes of communication buffers that device.free gave away",
        found["freed"],
        padded + received,
        rank=rank,
        slip="the finishing function frees it: a bucket that is merely dropped may live on in the backend",
    )
    expect(
        "bytes of reduced gradients after the second reduction",
        found["gradients"],
        mean,
        rank=rank,
        slip='allocate the mean with role "gradients"; add the second one in place, or the sum is a third tensor, '
        "which the ledger cannot see; and free it then",
    )
    expect(
        "bytes of reduced gradients that device.free gave away in the second reduction",
        found["freed gradients"],
        mean,
        rank=rank,
        slip="a mean that is added to an earlier one is needed no longer: device.free(mean)",
    )


def local_gradients(seed, size, rank, ranks):
    """Gradients of one rank's rows, in the order of the parameters."""
    model = Net(seed, size)
    x, y = (part.chunk(ranks)[rank] for part in whole_batches(seed)[0])
    return torch.autograd.grad(loss_of(model, (x, y)), list(model.parameters()))


def flat_gradients(grads, params, unused, ranks):
    kept = [torch.zeros_like(g) if p is unused else g for p, g in zip(params, grads, strict=True)]
    return pad(torch.cat([g.flatten() for g in kept]), ranks)


def mean_gradients(per_rank, params, unused):
    means = [torch.stack(of_one).mean(0) for of_one in zip(*per_rank, strict=True)]
    return [torch.zeros_like(g) if p is unused else g for p, g in zip(params, means, strict=True)]


def squeeze(grads, params, unused, ranks):
    """The gradients that there are, without a gap."""
    flat = torch.cat([g.flatten() for p, g in zip(params, grads, strict=True) if p is not unused])
    numel = sum(p.numel() for p in params)
    full = flat.new_zeros(numel + -numel % ranks)
    full[: flat.numel()] = flat
    return full


def fronted(flat, params):
    return flat.roll(flat.numel() - sum(p.numel() for p in params))


def observe_reduction(answer, seed, size):
    group, where = comm.world(), rank_device()
    with Ledger() as ledger:
        model = Net(seed, size).to(where)
        params = list(model.parameters())
        shard = nn.Parameter(flatten(params, group.size()).chunk(group.size())[group.rank()].clone())
        ledger.watch(model)
        loss_of(model, my_rows(whole_batches(seed)[0], group)).backward()
        params[1].grad = None
        params[2].grad = params[2].grad.t().contiguous().t()  # as a loss may leave it
        before = ledger.mark("backward")
        seen = {"grads_before": sum(p.grad is not None for p in params)}
        ledger.reset_peaks()
        with comm.record() as log, Watch() as watch:
            finish = answer(params, shard, group)
            watch.events.append("reduce_bucket returned")
            seen["under way"] = ledger.live()["communication"]
            seen["callable"] = callable(finish)
            if callable(finish):
                finish()
        seen["log"] = [(call.op, call.payload) for call in log]
        seen["events"] = watch.events
        seen["freed"] = freed_by_resize(ledger, "communication")
        seen["first"] = None if shard.grad is None else shard.grad.detach().clone().cpu()
        seen["grads"] = sum(p.grad is not None for p in params)
        held = None if shard.grad is None else shard.grad.data_ptr()
        if callable(finish):
            again = answer(params, shard, group)
            if callable(again):
                again()
            del again
        del finish
        after = ledger.mark("reduced")
        seen["kept"] = shard.grad is not None and shard.grad.data_ptr() == held
        seen["second"] = None if shard.grad is None else shard.grad.detach().clone().cpu()
        seen["communication"] = after["communication"]
        seen["gradients"] = after["gradients"] - before["gradients"]
        seen["freed gradients"] = freed_by_resize(ledger, "gradients")
        if seen["callable"]:
            shard.grad = None
            for end in [answer(params, shard, group) for _ in range(2)]:
                end()
            seen["two under way"] = None if shard.grad is None else shard.grad.detach().clone().cpu()
            end = answer(params, shard, group)
            shard.grad = None
            end()
            seen["emptied"] = None if shard.grad is None else shard.grad.detach().clone().cpu()
            seen["alone"] = reduce_one(answer, group, where)
    return seen


def reduce_one(answer, group, where):
    """The mean of a bucket of one bfloat16 parameter, which needs no padding; and the gradient afterwards."""
    single = nn.Parameter(torch.ones(2 * group.size(), dtype=torch.bfloat16, device=where))
    single.grad = torch.full_like(single, group.rank() + 1.0)
    shard = nn.Parameter(single.detach()[:2].clone())
    answer([single], shard, group)()
    left = single.grad if single.grad is not None and device.is_allocated(single.grad) else None
    return [None if each is None else each.detach().cpu() for each in (shard.grad, left)]
