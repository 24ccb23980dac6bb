"""Exercise 3.5: Reduce during the backward pass."""

from collections.abc import Callable
from itertools import accumulate, groupby
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minifsdp import comm, device
from minifsdp.course.workshop.checking import check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.zero import Zero2Optimizer
from minifsdp.zero.stage2 import BucketGradients

from .shared import Net, Watch, flatten, loss_of, my_rows, pad, poison, received, whole_batches


@reference(
    "3.5",
    hints=(
        "`p.register_post_accumulate_grad_hook(f)` calls `f(p)` once `p.grad` is complete. The order in which the "
        "gradients of a bucket come is autograd's. How do you know that the one that came was the last, and what must "
        "be as before when the next backward begins?",
        "Keep the set of parameters still missing. When it runs empty: fill it again, finish what is in `in_flight`, "
        "append `start(params, shard, group)` to it, and only then set every `.grad` of the bucket to None.",
    ),
    forbids=(Zero2Optimizer.__init__, BucketGradients.start_reduction),
)
def reduce_in_backward(
    params: list[nn.Parameter],
    shard: nn.Parameter,
    start: Callable[[list[nn.Parameter], nn.Parameter, comm.Group], Callable[[], None]],
    in_flight: list[Callable[[], None]],
    group: comm.Group,
) -> list[RemovableHandle]:
    """Register hooks that reduce a bucket during backward, as soon as it is full, and free its gradients.

    The hooks work for any number of backward passes. Each backward pass uses all parameters of the bucket and reduces
    the bucket once.

    Args:
        params: the bucket's parameters.
        shard: this rank's shard of the bucket.
        start: `reduce_bucket`; `start(params, shard, group)` returns the function that finishes the reduction.
        in_flight: holds at most one such function, for the reduction that is under way, whichever
            bucket it belongs to. Before you start this bucket's reduction, call that function and
            remove it; then add the function that `start` returns.
        group: the ranks.

    Returns:
        The handles of the hooks, one per parameter. After the hook of the last gradient, every `.grad` of the bucket is
        None.
    """
    missing: set[Tensor] = set(params)

    def on_gradient(p: Tensor) -> None:
        missing.remove(p)
        if missing:
            return
        missing.update(params)
        while in_flight:
            in_flight.pop()()
        in_flight.append(start(params, shard, group))
        for q in params:
            q.grad = None

    return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]


@check("3.5")
def check_reduce_in_backward(answer, variant):
    """Each bucket is reduced once per backward, when it is full, one in flight; then its gradients are freed."""
    ranks = variant.ranks
    seen = on_ranks(ranks, observe_backward, answer, variant.seed, variant.size, timeout=8)
    for rank, found in enumerate(seen):
        check_backward_order(found, rank)
        means = [mean.chunk(ranks)[rank] for mean in found["means"]]
        expect(
            "shard.grad of each bucket after one backward",
            found["first"],
            means,
            rank=rank,
            slip="a gradient was not in its .grad when the reduction started: not yet, or not any more",
        )
        check_backward_memory(found, rank)
        check_second_backward(found, rank)
        expect(
            "shard.grad of each bucket after a second backward of the same batch",
            found["second"],
            [2 * mean for mean in means],
            rank=rank,
            slip="the second backward's mean is added to the first's",
        )


def check_backward_order(found, rank):
    """The gradients of each bucket, its start, and that of the bucket before it finished."""
    counts = found["counts"]
    wanted = [event for bucket, count in enumerate(counts) for event in as_asked(bucket, count)]
    early = [event for bucket, count in enumerate(counts) for event in one_early(bucket, count)]
    slips = {
        "a reduction is started for every gradient; a bucket is one message, sent when it is full": every_one(counts),
        "the reduction is finished at once, so backward stands still while it travels; finish it when the next one "
        "starts": [e for b, n in enumerate(counts) for e in [*as_asked(b, n)[:1], f"start {b}", f"finish {b}"]],
        "no reduction is ever finished, so all buckets are in flight, and in memory, together": [
            event for event in wanted if not event.startswith("finish")
        ],
        "this hook runs before the gradient is in p.grad; use register_post_accumulate_grad_hook": early,
        "finish the one before, then start: otherwise two buckets are held at once": [
            e for b, n in enumerate(counts) for e in [*as_asked(b, n)[:1], f"start {b}", *as_asked(b, n)[1:-1]]
        ],
    }
    got = grouped(found["events"])
    slip = next((words for words, wrong in slips.items() if got == wrong), order_slip(got))
    expect_events("events of one backward", got, wanted, rank, slip)
    expect(
        "reductions left in in_flight when backward has returned",
        found["left"],
        1,
        rank=rank,
        slip=f"the last bucket's, number {len(counts) - 1}: the training loop finishes it",
    )
    expect("hooks returned", found["hooks"], sum(counts), rank=rank, slip="one handle per parameter")


def check_second_backward(found, rank):
    counts = found["counts"]
    wanted = [event for bucket, count in enumerate(counts) for event in as_asked(bucket, count)]
    starts = sum(event.startswith("start") for event in found["second events"])
    slip = "the hooks serve any number of backwards, each as the first"
    if not starts:
        slip = "the second backward was not reduced: what counts the arrivals must start anew"
    elif starts > len(counts):
        slip = "the count was not taken back, so in the second backward every gradient starts a reduction"
    expect_events("events of a second backward", grouped(found["second events"]), wanted, rank, slip)


def grouped(events):
    return [together(event, len(list(run))) for event, run in groupby(events)]


def expect_events(what, got, wanted, rank, slip):
    """Shows both lists up to the first event that differs, and one more."""
    if got != wanted:
        shorter = min(len(got), len(wanted))
        end = 2 + next((i for i in range(shorter) if got[i] != wanted[i]), shorter)
        expect(f"{what}, to just behind the first that differs", got[:end], wanted[:end], rank=rank, slip=slip)


def together(event, times):
    return event if times == 1 else f"{times} times {event}"


def as_asked(bucket, count):
    before = [f"finish {bucket - 1}"] * (bucket > 0)
    return [together(f"gradient of {bucket}", count), *before, f"start {bucket}"]


def one_early(bucket, count):
    before = [f"finish {bucket - 1}"] * (bucket > 0)
    return [together(f"gradient of {bucket}", count - 1), *before, f"start {bucket}", f"gradient of {bucket}"]


def every_one(counts):
    events = []
    for bucket, count in enumerate(counts):
        for _ in range(count):
            before = [event.replace("start", "finish") for event in events[-1:]]
            events += [f"gradient of {bucket}", *before, f"start {bucket}"]
    return events


def order_slip(events):
    if not any(event.startswith("start") for event in events):
        return "nothing was started during backward: are the hooks registered?"
    return "start a bucket when the last of its gradients has come, whichever that is, and finish the one before"


def check_backward_memory(found, rank):
    expect(
        "parameters that keep their .grad after backward",
        found["grads"],
        0,
        rank=rank,
        slip="the values are right, the memory is not saved: once a bucket's reduction has started, nobody needs its "
        ".grads",
    )
    expect(
        "bytes of gradients after backward",
        found["gradients"],
        sum(found["shards"]),
        rank=rank,
        slip="only this rank's shards may be left",
    )
    expect(
        "most bytes of gradients and buckets at any moment of backward",
        found["peak"],
        predicted_peak(found),
        rank=rank,
        slip="more than one bucket's .grads, two buckets, and the shards so far: something is freed too late",
    )


def predicted_peak(found):
    """While bucket b starts: its .grads, its buffer, what is received, all shards up to b. Just before: b - 1's."""
    ranks = found["padded"][0] // found["shards"][0]
    reduced = [size + received(size, ranks) for size in found["padded"]]
    sizes, shards = found["sizes"], list(accumulate(found["shards"]))
    before = [0, *(reduced[b] + shards[b] for b in range(len(sizes) - 1))]
    return max(sizes[b] + max(reduced[b] + shards[b], before[b]) for b in range(len(sizes)))


class Start:
    """What exercise 3.3 asks for, said differently, and noting when it is called."""

    def __init__(self, parts, watch):
        self.parts = parts
        self.watch = watch

    def __call__(self, params, shard, group):
        number = next((i for i, part in enumerate(self.parts) if part[0] is params[0]), -1)
        self.watch.events.append(f"start {number}")
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params]
        bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device)
        bucket.zero_()
        torch.cat(flat, out=bucket[: sum(each.numel() for each in flat)])
        del flat
        mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
        handle = comm.reduce_scatter(mean, bucket, group, comm.MEAN)

        done = []

        def finish():
            if done:
                raise RuntimeError(f"the reduction of bucket {number} was finished twice: take it out of in_flight")
            done.append(True)
            self.watch.events.append(f"finish {number}")
            handle.wait()
            device.free(bucket)
            if shard.grad is None:
                shard.grad = mean
            else:
                shard.grad += mean
                device.free(mean)

        return finish


def free_no_gradient(params, free):
    """`device.free` for buffers alone: autograd may hold a `.grad`'s memory, and would write where there is none."""

    def freed(buffer):
        if any(p.grad is buffer for p in params):
            raise RuntimeError("a .grad is autograd's, not a buffer: free it by setting it to None")
        free(buffer)

    return freed


def observe_backward(answer, seed, size):
    group, where = comm.world(), rank_device()
    ranks, rank = group.size(), group.rank()
    batch = my_rows(whole_batches(seed)[0], group)
    with Ledger() as ledger:
        model = Net(seed, size).to(where)
        ledger.watch(model)
        params = list(reversed(list(model.parameters())))
        parts = [params[:2], params[3:1:-1], params[:3:-1]]  # the order in a bucket is not always that of backward
        watch = Watch()
        for number, part in enumerate(parts):
            for p in part:
                p.register_post_accumulate_grad_hook(
                    lambda _, number=number: watch.events.append(f"gradient of {number}")
                )
        loss_of(model, batch).backward()
        means = [pad(torch.cat([p.grad.flatten() for p in part]), ranks) for part in parts]
        for mean in means:
            dist.all_reduce(mean)
            mean /= ranks
        for p in params:
            p.grad = None
        shards = [nn.Parameter(flatten(part, ranks).chunk(ranks)[rank].clone()) for part in parts]
        in_flight, hooks = [], []
        start = Start(parts, watch)
        for part, shard in zip(parts, shards, strict=True):
            hooks += answer(part, shard, start, in_flight, group) or []
        watch.events.clear()
        ledger.reset_peaks()
        device.buffer_observers.append(poison)
        guard = mock.patch.object(device, "free", free_no_gradient(params, device.free))
        guard.start()
        loss_of(model, batch).backward()
        seen = {"events": list(watch.events), "left": len(in_flight), "hooks": len(hooks)}
        while in_flight:
            in_flight.pop()()
        seen["peak"] = ledger.peak_of("gradients", "communication")
        seen["grads"] = sum(p.grad is not None for p in params)
        seen["gradients"] = ledger.mark("backward")["gradients"]
        seen["first"] = [None if s.grad is None else s.grad.detach().clone().cpu() for s in shards]
        watch.events.clear()
        loss_of(model, batch).backward()
        seen["second events"] = list(watch.events)
        while in_flight:
            in_flight.pop()()
        guard.stop()
        device.buffer_observers.remove(poison)
        seen["second"] = [None if s.grad is None else s.grad.detach().clone().cpu() for s in shards]
    seen["means"] = [mean.cpu() for mean in means]
    seen["counts"] = [len(part) for part in parts]
    seen["sizes"] = [sum(p.nbytes for p in part) for part in parts]
    seen["padded"] = [mean.nbytes for mean in means]
    seen["shards"] = [s.nbytes for s in shards]
    return seen
