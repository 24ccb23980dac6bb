"""Exercise 2.5: Reduction during the backward pass."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.course.workshop.checking import check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.ddp.overlapped import LaunchQueue, OverlappedDDP
from minifsdp.ddp.reducer import Reducer
from minifsdp.instruments.launch import rank_device
from minifsdp.private import at_end_of_backward

from .shared import SECONDS, draw, told


@reference(
    "2.5",
    hints=(
        "`len(reducer.in_flight)` is the number of buckets launched, and so also the number of the one whose turn it "
        "is. One gradient can complete that bucket and find those behind it full already.",
        "Count down `reducer.missing[reducer.bucket_of[param]]`. Then, while there is a bucket whose turn it is and it "
        "misses nothing, append `reducer.start(bucket)` to `in_flight`. Once all are in flight, "
        "`at_end_of_backward(reducer.finish)`.",
    ),
    forbids=(OverlappedDDP.on_gradient, LaunchQueue.launch_full, Reducer.on_gradient, Reducer.mark_ready),
)
def on_gradient(param: nn.Parameter, reducer: SimpleNamespace) -> None:
    """The hook of every parameter: count its gradient, and launch full buckets in order.

    Args:
        param: `.grad` has just been accumulated.
        reducer: fields `buckets`, `bucket_of`, `missing`, `in_flight`, `sync`, `start`, `finish` as in the table.

    Decrement the bucket's entry of `reducer.missing`. Launch a bucket by appending the result of `reducer.start` to
    `reducer.in_flight`. Buckets are launched in the order 0, 1, 2, ..., whatever the order in which they fill. Do not
    wait for anything here. When the last bucket has been launched, queue `reducer.finish` once for the end of backward.
    If `reducer.sync` is False, do nothing.
    """
    if not reducer.sync:
        return
    buckets, in_flight = reducer.buckets, reducer.in_flight
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
        in_flight.append(reducer.start(buckets[len(in_flight)]))
    if len(in_flight) == len(buckets):
        at_end_of_backward(reducer.finish)


LAYERS = 3


class Rotating(nn.Module):
    """Equal layers that are called in a circle, beginning with `first`: backward reaches them in another order then."""

    def __init__(self, width: int, seed: int, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.first = first
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(draw(seed + 20 + number, 0, *p.shape) / width)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(LAYERS):
            x = self.layers[(self.first + step) % LAYERS](x).tanh()
        return x.square().sum()


class Watched:
    """A handle that notes when it is waited for."""

    def __init__(self, handle: Any, number: int, events: list[str]) -> None:
        self.handle, self.number, self.events = handle, number, events

    def wait(self) -> None:
        self.events.append(f"wait {self.number}")
        self.handle.wait()


class Arrived:
    """What has not been sent need not be waited for."""

    def wait(self) -> None: ...


def observe_hook(answer: Any, width: int, seed: int, dry: bool = False) -> dict[str, Any]:
    """Two backwards with the answer as every parameter's hook: one that communicates, one that does not.

    Args:
        dry: nothing is sent, so that no rank hangs whatever it launches; and after these two a third backward, as the
            first, and a fourth with one more bucket, of a parameter that has no gradient.
    """
    rank, group, where = dist.get_rank(), comm.world(), rank_device()
    model = Rotating(width, seed, rank % LAYERS).to(where)
    buckets = [list(reversed(list(layer.parameters()))) for layer in reversed(model.layers)]
    events: list[str] = []
    arrived = 0

    def start(bucket: list[nn.Parameter]) -> tuple[Tensor, Watched]:
        number = next(i for i, each in enumerate(buckets) if each[0] is bucket[0])
        flat = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in bucket])
        events.append(f"bucket {number} after {arrived} gradients")
        return flat, Watched(Arrived() if dry else comm.all_reduce(flat, group, comm.MEAN), number, events)

    def finish() -> None:
        events.append("finish")
        for bucket, (flat, handle) in zip(reducer.buckets, reducer.in_flight, strict=False):
            handle.wait()
            for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
                p.grad.copy_(part.view(p.shape))
        reducer.in_flight = []
        reducer.missing = [len(bucket) for bucket in reducer.buckets]

    def count(param: nn.Parameter) -> None:
        nonlocal arrived
        arrived += 1

    reducer = SimpleNamespace(
        buckets=buckets,
        bucket_of={p: number for number, bucket in enumerate(buckets) for p in bucket},
        missing=[len(bucket) for bucket in buckets],
        in_flight=[],
        sync=True,
        start=start,
        finish=finish,
    )
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
        p.register_post_accumulate_grad_hook(lambda p: answer(p, reducer))

    def backward(step: int) -> None:
        nonlocal arrived
        arrived = 0
        x = draw(seed + step, rank, 4, width).to(where).requires_grad_() * 1.0
        x.register_hook(lambda grad: events.append("rest of backward"))  # autograd's work behind the first layer
        model(x).backward()
        events.append("return")

    with comm.record() as calls:
        backward(0)
    if dry:
        first = list(events)
        reducer.sync = False
        backward(1)
        events.clear()
        reducer.sync = True
        backward(2)
        again = list(events)
        unused = nn.Parameter(torch.zeros(1, device=where))
        buckets.append([unused])
        reducer.bucket_of[unused] = LAYERS
        reducer.in_flight.clear()
        reducer.missing[:] = [len(bucket) for bucket in buckets]
        events.clear()
        backward(3)
        return {"events": first, "again": again, "unused": events.count("finish")}
    grads = [p.grad.clone().cpu() for p in model.parameters()]  # type: ignore[union-attr]
    synced = list(events)
    events.clear()
    reducer.sync = False
    with comm.record() as silent:
        backward(1)
    return {
        "events": synced,
        "calls": told(calls),
        "grads": grads,
        "silent": told(silent),
        "left": [*reducer.missing, len(reducer.in_flight)],
    }


def launches_of(rank: int) -> dict[str, list[str]]:
    """How a rank's buckets are launched: rightly, as soon as each is full, all at the end, all but the last."""
    first = rank % LAYERS
    reached = [(first + step) % LAYERS for step in reversed(range(LAYERS))]  # the layers as backward comes to them
    full_at = [2 * (reached.index(LAYERS - 1 - number) + 1) for number in range(LAYERS)]
    turns = [max(full_at[: number + 1]) for number in range(LAYERS)]
    eager = sorted(range(LAYERS), key=lambda number: full_at[number])
    return {
        "right": [f"bucket {number} after {turns[number]} gradients" for number in range(LAYERS)],
        "eager": [f"bucket {number} after {full_at[number]} gradients" for number in eager],
        "late": [f"bucket {number} after {2 * LAYERS} gradients" for number in range(LAYERS)],
    }


def mean_gradients(ranks: int, width: int, seed: int) -> list[Tensor]:
    """One process with every rank's rows and every rank's order."""
    each = []
    for rank in range(ranks):
        model = Rotating(width, seed, rank % LAYERS)
        model(draw(seed, rank, 4, width)).backward()
        each.append([p.grad for p in model.parameters()])
    return [sum(grads) / ranks for grads in zip(*each, strict=True)]


@check("2.5")
def check_on_gradient(answer, variant):
    """Each bucket leaves during backward, in bucket order on all ranks, and is waited for when backward is over."""
    n, width, seed = variant.ranks, variant.size, variant.seed
    launched = on_ranks(n, observe_hook, answer, width, seed, True, timeout=SECONDS)
    for rank, found in enumerate(launched):  # before anything communicates: where launches differ, ranks would hang
        forms = launches_of(rank)
        launches = [event for event in found["events"] if event.startswith("bucket")]
        never = "the last bucket is never launched: nothing comes after it that could push it out"
        if forms["eager"] != forms["right"]:
            never = "a bucket that was full before its turn never left: after each launch look at the next, in a loop"
        slips = {
            "all buckets leave with the last gradient: nothing overlaps with backward": forms["late"],
            never: forms["right"][:-1],
            "launched as soon as it is full, out of turn: another rank launches another bucket, and the two are "
            "summed": forms["eager"],
        }
        slips = {words: wrong for words, wrong in slips.items() if wrong != forms["right"]}
        slip = "a bucket leaves when the last of its gradients has come, in whatever order they come"
        if len(launches) > LAYERS:
            slip = "a bucket is launched once per backward"
        expect("launches", launches, forms["right"], rank=rank, slips=slips, slip=slip)
    seen = on_ranks(n, observe_hook, answer, width, seed, timeout=SECONDS)
    wanted_grads = mean_gradients(n, width, seed)
    for rank, found in enumerate(seen):
        events = found["events"]
        ended = events.index("finish") if "finish" in events else len(events)
        expect(
            "waits while backward still runs",
            [event for event in events[:ended] if event.startswith("wait")],
            [],
            rank=rank,
            slip="the values are right, but the host stands still where it could compute: wait in finish only",
        )
        around = [event for event in events if event in ("rest of backward", "finish", "return")]
        expect(
            "the end of backward",
            around,
            ["rest of backward", "finish", "return"],
            rank=rank,
            slips={
                "finish is never called: the means stay in the buffers": ["rest of backward", "return"],
                "finish is called inside the hook, which holds up the rest of backward; use at_end_of_backward": [
                    "finish",
                    "rest of backward",
                    "return",
                ],
            },
            slip="at_end_of_backward(reducer.finish) once, when the last bucket has left",
        )
        payload = 4 * (width * width + width)
        expect("collectives", found["calls"], [f"all_reduce of {payload} bytes"] * LAYERS, rank=rank)
        for index, (grad, wanted) in enumerate(zip(found["grads"], wanted_grads, strict=True)):
            expect(f"gradient of parameter {index} after backward", grad, wanted, rank=rank, tolerance=1e-5)
        expect(
            "collectives of a backward with reducer.sync = False",
            found["silent"],
            [],
            rank=rank,
            slip="the hook has to leave at once if reducer.sync is False",
        )
        expect(
            "missing gradients by bucket, then buckets in flight, after a backward with reducer.sync = False",
            found["left"],
            [2] * LAYERS + [0],
            rank=rank,
            slip="a gradient that is only accumulated is not counted: the next backward would launch too early",
        )
    for rank, found in enumerate(launched):
        expect(
            "events of a third backward, with reducer.sync = True again",
            found["again"],
            found["events"],
            rank=rank,
            slip="the hook serves any number of backwards: what it counts or remembers itself has to begin anew, and "
            "`reducer.missing` does",
        )
        expect(
            "calls of finish in a backward in which the last bucket never leaves",
            found["unused"],
            0,
            rank=rank,
            slip="finish waits for buckets that have left: at_end_of_backward(reducer.finish) when the last one has",
        )
