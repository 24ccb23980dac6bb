"""The checks of lab 03."""

import sys
from contextlib import nullcontext
from itertools import accumulate, groupby
from unittest import mock

import cloudpickle
import torch
import torch.distributed as dist
from placing import garbage
from torch import nn
from torch.optim import SGD, Adam, AdamW

from minifsdp import comm, device
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks, same
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import this file

ROWS = 12  # of the whole batch: 1, 2, 3 and 4 ranks share them equally
STEPS = 3
LR = 0.05


# --- 3.1 --------------------------------------------------------------------------------------------------------------


@check("3.1")
def check_partition(answer, variant):
    """One flat buffer is the parameters' memory, cut into equal shards of it, zeros behind the last parameter."""
    for ranks in dict.fromkeys((variant.ranks, 3, 4, 16)):
        check_partition_case(answer, ranks, variant)
    check_partition_case(answer, 3, variant, torch.float64)
    for ranks in dict.fromkeys((variant.ranks, 4)):
        check_partition_case(answer, ranks, variant, divides=True)
        check_transposed(answer, ranks)


def check_transposed(answer, ranks):
    """One parameter whose rows are not contiguous, as a weight that was loaded from elsewhere, and nothing to pad."""
    value = torch.arange(1.0, 1 + 3 * ranks).view(3, ranks)
    p = nn.Parameter(value.t().contiguous().t())
    over = f"over {ranks} ranks, a single parameter {list(value.shape)} that lies transposed in memory"
    slip = "a transposed parameter has no flat view of its own memory: copy it into the buffer"
    try:
        flat, shards = answer([p], ranks)
    except RuntimeError as error:
        raise AnswerError(f"{over}: {error}\nlikely slip: {slip}") from error
    expect(
        f"{over}: the flat buffer",
        flat,
        value.flatten(),
        slips={
            "its elements in the order of memory, and not row by row, as gradients are flattened": value.t().flatten()
        },
    )
    expect(f"{over}: the shards", list(shards), list(value.flatten().chunk(ranks)))
    expect(f"{over}: the parameter", p.detach(), value, slip="p.data lost its shape or its place")
    with torch.no_grad():
        flat.fill_(7)
    slip = "the flat buffer is not its memory"
    expect(f"{over}: whether a write to the buffer shows in it", bool((p == 7).all()), True, slip=slip)


def check_partition_case(answer, ranks, variant, dtype=torch.float32, divides=False):
    shapes = [(variant.size, 3), (variant.size,), (2, 2, 3), ()]
    if divides:
        shapes.append((ranks - sum(torch.Size(shape).numel() for shape in shapes) % ranks,))
    values = torch.arange(1.0, 1 + sum(torch.Size(shape).numel() for shape in shapes), dtype=dtype)
    with Ledger() as ledger:
        pieces = values.clone().split([torch.Size(shape).numel() for shape in shapes])
        params = [nn.Parameter(piece.view(shape).clone()) for piece, shape in zip(pieces, shapes, strict=True)]
        del pieces
        params[1].requires_grad_(False)
        params[0].grad = gradient = torch.ones_like(params[0])
        given, trained = list(params), [p.requires_grad for p in params]
        over = f"over {ranks} ranks, "
        try:
            with garbage():
                result = answer(given, ranks)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("invalid for input of size", "split_sizes", "must match")):
                raise
            raise AnswerError(
                f"{over}the {len(values)} elements did not fit where they were put: {error}\n"
                "likely slip: the buffer is too short for the parameters; round up to a multiple of N, not down"
            ) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
            raise AnswerError(f"{over}expected the flat buffer and the list of shards, got {type(result).__name__}")
        flat, shards = result
        live = sum(ledger.mark("partitioned").values()) - gradient.nbytes
    numel, length = len(values), -(-len(values) // ranks)
    padding = torch.zeros(ranks * length - numel, dtype=dtype)
    wanted = torch.cat([values, padding])
    fronts = torch.cat([padding, values])
    each = torch.cat([pad(p.detach().flatten(), ranks) for p in params])
    expect(
        f"{over}entries of `params` that are the parameters still",
        [a is b for a, b in zip(given, params, strict=False)],
        [True] * len(params),
        slip="the model holds the parameters that it has: set `p.data`; another nn.Parameter, or a change of the list, "
        "does not reach it",
    )
    expect(
        f"{over}requires_grad of the parameters",
        [p.requires_grad for p in params],
        trained,
        slip="they are moved, and are otherwise as they were",
    )
    slip = "its value is moved, its .grad stays"
    expect(f"{over}whether a parameter has its .grad still", params[0].grad is gradient, True, slip=slip)
    expect(
        f"{over}elements of the flat buffer",
        flat.numel(),
        ranks * length,
        slips={
            "every parameter is padded by itself; pad once, behind the last one": each.numel(),
            "the remainder is dropped: N does not divide the number of elements": numel // ranks * ranks,
            "the padding is missing: equal shards need a multiple of N": numel,
            "a whole N of padding where N divides: `-numel % N` is 0 there, `N - numel % N` is N": numel + ranks,
        },
    )
    expect(f"{over}dimensions of the flat buffer", flat.dim(), 1)
    expect(
        f"{over}type of the flat buffer's elements",
        str(flat.dtype),
        str(dtype),
        slip="the buffer must have the parameters' dtype and device, which need not be the defaults",
    )
    expect(
        f"{over}whether autograd follows the flat buffer",
        flat.requires_grad,
        False,
        slip="the copying was recorded: copy p.detach(), p.data, or under torch.no_grad()",
    )
    expect(f"{over}number of shards", len(shards), ranks)
    expect(
        f"{over}elements of the shards",
        [shard.numel() for shard in shards],
        [length] * ranks,
        slip="the shards must be equal in length, wherever that cuts a parameter",
    )
    slips = {"the padding stands in front of the parameters; it belongs behind the last one": fronts}
    slip = "parameters in their order, then zeros to the end"
    if same(flat.detach()[:numel], wanted[:numel]):
        slips, slip = {}, "behind the last element the buffer must be zero"
        if bool(flat.isnan().any()):
            slip += ", and `empty` and `new_empty` hand out whatever memory held, here nan"
    expect(f"{over}the flat buffer", flat, wanted, slips=slips, slip=slip)
    for rank, (shard, part) in enumerate(zip(shards, wanted.chunk(ranks), strict=True)):
        expect(f"{over}the shard", shard, part, rank=rank, slip="shard r is part r of the flat buffer")
    where = flat.untyped_storage().data_ptr()
    expect(
        f"{over}parameters whose memory is the flat buffer",
        sum(p.untyped_storage().data_ptr() == where for p in params),
        len(params),
        slip="the flat buffer is a copy: let p.data be a view of it, or the model will see no update",
    )
    expect(
        f"{over}shards whose memory is the flat buffer",
        sum(shard.untyped_storage().data_ptr() == where for shard in shards),
        ranks,
        slip="the shards are copies, so what the optimizer writes there never reaches the model",
    )
    for p, shape, part in zip(params, shapes, values.split([p.numel() for p in params]), strict=True):
        expect(f"{over}a parameter", p.detach(), part.view(shape), slip="p.data lost its shape or its place")
    expect(
        f"{over}bytes alive afterwards",
        live,
        flat.nbytes,
        slip="something besides the flat buffer is alive: the parameters' old memory, or a second copy",
    )


def pad(flat, ranks):
    return torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])


# --- 3.2 --------------------------------------------------------------------------------------------------------------


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


# --- what the distributed checks share --------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of odd sizes; in float64, so that one process and N ranks agree to the last digits."""

    def __init__(self, seed, size):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in [(5, size), (size, 6), (6, size), (size, 1)])
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def bucketed(model):
    """The model's parameters in the order in which backward is expected to make their gradients."""
    params = list(reversed(list(model.parameters())))
    return [params[:3], params[3:4], params[4:]]


def whole_batches(seed, steps=STEPS):
    numbers = torch.Generator().manual_seed(seed + 1)
    draw = lambda columns: torch.randn(ROWS, columns, generator=numbers, dtype=torch.float64)  # noqa: E731
    return [(draw(5), draw(1)) for _ in range(steps)]


def loss_of(model, batch):
    x, y = (part.to(next(model.parameters()).device) for part in batch)
    return (model(x) - y).square().mean()


def my_rows(batch, group):
    return [part.chunk(group.size())[group.rank()] for part in batch]


def flatten(params, ranks):
    """The parameters' values, flat and padded."""
    return pad(torch.cat([p.detach().flatten() for p in params]), ranks)


def move(params, ranks):
    """What exercise 3.1 asks for, said differently."""
    flat = flatten(params, ranks)
    start = 0
    for p in params:
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat


def poison(buffer, role):
    """Uninitialized memory is not zero."""
    buffer.fill_(float("nan"))


class Watch:
    """What happens on this rank: collectives issued and waited for, and what else is noted."""

    def __init__(self):
        self.events = []
        self.open = self.most_open = 0

    def __call__(self, call, phase):
        self.events.append(f"{phase} {call.op}")
        self.open += 1 if phase == "issue" else -1
        self.most_open = max(self.most_open, self.open)
        return nullcontext()

    def __enter__(self):
        comm.observers.append(self)
        device.buffer_observers.append(poison)
        return self

    def __exit__(self, *exc):
        comm.observers.remove(self)
        device.buffer_observers.remove(poison)


def freed_by_resize(ledger, tag):
    """Bytes under a tag that `device.free` has given away."""
    return -sum(min(0, event.changes.get(tag, 0)) for event in ledger.events if event.cause == "resize_")


# --- 3.3 --------------------------------------------------------------------------------------------------------------


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


def received(padded, ranks):
    """Bytes that `comm` receives while a bucket is reduced, and frees: on gloo the other ranks' parts of it."""
    return closed_form_setting(ranks).reducing(padded) - padded // ranks


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


# --- 3.4 --------------------------------------------------------------------------------------------------------------


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


# --- 3.5 --------------------------------------------------------------------------------------------------------------


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
