"""Exercise 3.4: Update and gather."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from minifsdp import comm, device
from minifsdp.course.workshop.checking import check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer
from minifsdp.zero.bucket import Bucket
from minifsdp.zero.partition import ShardedOptimizer

from .shared import LR, STEPS, Net, Watch, flatten, freed_by_resize, loss_of, my_rows, pad, whole_batches


@reference(
    "3.4",
    hints=(
        "Three things in this order: update, give the gradients up, gather. `optimizer.param_groups[0]['params']` are "
        "this rank's shards, one per entry of `flats`, and each shard is this rank's part of its flat buffer.",
        "`optimizer.step()`; for each shard `device.free(shard.grad)` and `shard.grad = None`; for each bucket "
        "`comm.all_gather(flat, shard.data, group)`, and wait for every one of them.",
    ),
    forbids=(Bucket.start_gather, ShardedOptimizer.gather_parameters, Zero1Optimizer.step, Zero2Optimizer.step),
)
def update_and_gather(optimizer: Optimizer, flats: list[Tensor], group: comm.Group) -> None:
    """Update this rank's shards, free their gradients, and gather the updated parameters from all ranks.

    Args:
        optimizer: the optimizer over this rank's shards, one per bucket, as `shard_optimizer`
            returns it. Each shard has a `.grad` [padded / N]. Between the update and the gathers,
            free the memory of every `.grad` with `device.free` and set the `.grad` to None.
        flats: the buckets' flat buffers [padded]; the shards are views of them. Gather each buffer
            with one all-gather, in place, from the shard's `.data`. When this function returns,
            the buffers are equal on all ranks.
        group: the ranks.
    """
    shards = optimizer.param_groups[0]["params"]
    optimizer.step()
    for shard in shards:
        device.free(shard.grad)
        shard.grad = None
    for flat, shard in zip(flats, shards, strict=True):
        comm.all_gather(flat, shard.data, group).wait()


def bucketed(model):
    """The model's parameters in the order in which backward is expected to make their gradients."""
    params = list(reversed(list(model.parameters())))
    return [params[:3], params[3:4], params[4:]]


def move(params, ranks):
    """What exercise 3.1 asks for, said differently."""
    flat = flatten(params, ranks)
    start = 0
    for p in params:
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat


@check("3.4")
def check_update_and_gather(answer, variant):
    """Three steps equal one process with the whole batch, on all ranks bit for bit; one all-gather per bucket."""
    for ranks in dict.fromkeys((variant.ranks, 3)):
        check_update_and_gather_case(answer, variant, ranks)


def check_update_and_gather_case(answer, variant, ranks):
    seen = on_ranks(ranks, observe_steps, answer, variant.seed, variant.size, timeout=8)
    wanted = train_alone(variant.seed, variant.size, ranks)
    for rank, found in enumerate(seen):
        check_step_order(found, rank)
        check_step_values(found, wanted, seen[0]["flats"], rank)
        expect(
            "bytes of gradient shards after a step",
            found["gradients"],
            0,
            rank=rank,
            slip="the shards' gradients are still there; freed they make room, kept they are added to the next step's",
        )
        expect(
            "bytes of gradient shards when the first gather is issued",
            found["gradients in the gather"],
            0,
            rank=rank,
            slip="free the gradients between the update and the gathers: nobody needs them after the update",
        )
        expect(
            f"bytes of gradient shards that device.free gave away in {STEPS} steps",
            found["freed"],
            STEPS * sum(flat.nbytes // ranks for flat in wanted["flats"]),
            rank=rank,
            slip="a .grad that is only set to None lives on where anything else holds it: device.free(shard.grad)",
        )
        expect(
            "gathers whose input lies in the buffer that they fill",
            found["in place"],
            len(found["flats"]),
            rank=rank,
            slip="gather in place, from shard.data itself; a copy costs a shard more",
        )
        slip = "the shards are the optimizer's parameters: not every optimizer has state of them"
        expect("shards that keep their .grad with SGD", found["left by SGD"], 0, rank=rank, slip=slip)
        step = torch.full_like(found["SGD's step"], LR)
        expect("step of SGD for gradients of 1", found["SGD's step"], step, rank=rank, slip=slip)
        expect(
            "bytes of optimizer state",
            found["optimizer"],
            sum(2 * flat.nbytes // ranks + 4 for flat in wanted["flats"]),
            rank=rank,
            slip="state for this rank's shards alone, 1 / N",
        )


def check_step_order(found, rank):
    updates_and_gathers = [event for event in found["events"] if not event.startswith("wait")]
    buckets = len(found["flats"])
    expect(
        "what one step does, waiting left out",
        updates_and_gathers,
        ["update"] + ["issue all_gather"] * buckets,
        rank=rank,
        slips={
            "the parameters are gathered before they are updated: the others' updates arrive a step late": (
                ["issue all_gather"] * buckets + ["update"]
            ),
            "the updated shards are never gathered: each rank sees its own updates only, and they drift apart": [
                "update"
            ],
            "the optimizer steps twice": ["update", "update"] + ["issue all_gather"] * buckets,
            "nothing is updated": ["issue all_gather"] * buckets,
            "one all-gather per bucket; a bucket is left out": ["update"] + ["issue all_gather"] * (buckets - 1),
            "one all-gather per bucket; buckets are left out": ["update"] + ["issue all_gather"] * (buckets - 2),
            "averaging the parameters mixes each updated shard with the other ranks' old copies of it": (
                ["update"] + ["issue all_reduce"] * buckets
            ),
            "a broadcast per shard is N messages per bucket where one all-gather does": (
                ["update"] + ["issue broadcast"] * buckets * found["ranks"]
            ),
        },
        slip="one update, then one all-gather per bucket",
    )
    expect("bytes of each full buffer gathered", found["payloads"], [flat.nbytes for flat in found["flats"]], rank=rank)
    expect(
        "gathers waited for",
        sum(event == "wait all_gather" for event in found["events"]),
        buckets,
        rank=rank,
        slip="wait for every gather: before that the model may compute with old parameters",
    )


def check_step_values(found, wanted, of_rank_0, rank):
    for number, (got, right) in enumerate(zip(found["flats"], wanted["flats"], strict=True)):
        expect(
            f"parameters of bucket {number} after {STEPS} steps",
            got,
            right,
            rank=rank,
            slips={
                "as after no step at all: the optimizer found no gradient; free the gradients after the update": (
                    wanted["start"][number]
                ),
                "as if each step's gradient were added to those before: they were never freed": (
                    wanted["accumulated"][number]
                ),
                "as if each step used the gradient of the step before": wanted["stale"][number],
            },
            slip=f"not what one process with the whole batch has after {STEPS} steps",
            tolerance=1e-9,
        )
        expect(
            f"whether bucket {number} equals rank 0's bit for bit",
            torch.equal(got, of_rank_0[number]),
            True,
            rank=rank,
            slip="every rank must end with the same parameters; what was not gathered differs",
        )


def train_alone(seed, size, ranks):
    """Flat buckets after the steps, by one process with the whole batch and a torch optimizer; and usual mistakes."""
    ends = {}
    for kind in ("flats", "accumulated", "stale"):
        model = Net(seed, size)
        parts = bucketed(model)
        ends.setdefault("start", [flatten(part, ranks) for part in parts])
        optimizer = Adam(model.parameters(), lr=LR)
        past = None
        for batch in whole_batches(seed):
            loss_of(model, batch).backward()
            fresh = [p.grad.clone() for p in model.parameters()]
            if kind == "stale":
                for p, old in zip(model.parameters(), past or map(torch.zeros_like, fresh), strict=True):
                    p.grad = old
            optimizer.step()
            past = fresh
            if kind != "accumulated":
                optimizer.zero_grad()
        ends[kind] = [flatten(part, ranks) for part in parts]
    return ends


def observe_steps(answer, seed, size):
    group, where = comm.world(), rank_device()
    ranks, rank = group.size(), group.rank()
    with Ledger() as ledger:
        model = Net(seed, size).to(where)
        parts = bucketed(model)
        flats = [move(part, ranks) for part in parts]
        shards = [nn.Parameter(flat.chunk(ranks)[rank]) for flat in flats]
        optimizer = Adam(shards, lr=LR)
        ledger.watch(model, optimizer)
        for batch in whole_batches(seed):
            loss_of(model, my_rows(batch, group)).backward()
            reduce_plainly(parts, shards, group)
            for p in model.parameters():
                p.grad = None
            with comm.record() as log, Watch() as watch:
                note = optimizer.register_step_post_hook(lambda *_, watch=watch: watch.events.append("update"))
                gather = Gather(ledger)
                with mock.patch.object(comm, "all_gather", gather):
                    answer(optimizer, flats, group)
                note.remove()
        live = ledger.mark("stepped")
        freed = freed_by_resize(ledger, "gradients")
        trained = [flat.detach().clone().cpu() for flat in flats]
        plain = SGD(shards, lr=LR)  # has no state
        for shard in shards:
            shard.grad = device.empty(shard.numel(), shard.dtype, "gradients", shard.device).fill_(1)
        answer(plain, flats, group)
    return {
        "SGD's step": torch.cat(trained) - torch.cat([flat.detach().cpu() for flat in flats]),
        "left by SGD": sum(shard.grad is not None for shard in shards),
        "ranks": ranks,
        "flats": trained,
        "events": watch.events,
        "payloads": [call.payload for call in log],
        "gradients": live["gradients"],
        "gradients in the gather": gather.gradients[0] if gather.gradients else None,
        "in place": gather.in_place,
        "freed": freed,
        "optimizer": live["optimizer"],
    }


class Gather:
    """`comm.all_gather`, noting what it is given and which gradients are alive then."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.gather = comm.all_gather
        self.gradients = []
        self.in_place = 0

    def __call__(self, output, shard, group):
        self.gradients.append(self.ledger.live()["gradients"])
        self.in_place += shard.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        return self.gather(output, shard, group)


def reduce_plainly(parts, shards, group):
    """The gradients' mean into, or onto, `shard.grad`, by an all-reduce."""
    for part, shard in zip(parts, shards, strict=True):
        full = pad(torch.cat([p.grad.flatten() for p in part]), group.size())
        dist.all_reduce(full)
        mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
        mean.copy_(full.chunk(group.size())[group.rank()] / group.size())
        shard.grad = mean if shard.grad is None else shard.grad + mean
