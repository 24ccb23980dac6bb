"""The checks of lab 02."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.late import link_of
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

SECONDS = 8.0
THROUGH_COMM = "one collective through `comm`, which keeps this log; it does not see torch.distributed called directly"


def draw(seed: int, rank: int, *shape: int) -> Tensor:
    """The same numbers wherever it is called."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def parameter(value: Tensor, grad: Tensor | None) -> nn.Parameter:
    param = nn.Parameter(value.to(rank_device()))
    param.grad = None if grad is None else grad.to(rank_device())
    return param


def told(calls: list[comm.Call]) -> list[str]:
    return [f"{call.op} of {call.payload} bytes" for call in calls]


@contextmanager
def phases() -> Iterator[list[str]]:
    """ "issue" and "wait" of every collective inside the `with`, in order."""
    seen: list[str] = []

    @contextmanager
    def watch(call: comm.Call, phase: str) -> Iterator[None]:
        seen.append(phase)
        yield

    comm.observers.append(watch)
    try:
        yield seen
    finally:
        comm.observers.remove(watch)


@contextmanager
def poisoned_buffers() -> Iterator[list[tuple[int, str]]]:
    """Bytes and role of each buffer that `device.empty` hands out inside the `with`, full of NaN."""
    seen: list[tuple[int, str]] = []

    def note(buffer: Tensor, role: str) -> None:
        buffer.fill_(torch.nan)
        seen.append((buffer.nbytes, role))

    device.buffer_observers.append(note)
    try:
        yield seen
    finally:
        device.buffer_observers.remove(note)


class Travelling:
    """An all-reduce that has taken its tensor's content along and puts the result there when it is waited for."""

    def __init__(self, tensor: Tensor, start: Callable[[Tensor], Any]) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.unwritten = int(tensor.isnan().sum())
        self.changed = False  # by others, between issue and wait
        self.result = tensor.detach().clone()
        self.work = start(self.result)

    def wait(self) -> None:
        self.work.wait()
        self.changed = self.tensor._version != self.version
        with torch.no_grad():
            self.tensor.copy_(self.result)


@contextmanager
def travelling() -> Iterator[list[Travelling]]:
    """All all-reduces inside the `with`, as late as they may be: what a racy answer does is the same each time."""
    real, seen = dist.all_reduce, []

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Travelling:
        seen.append(Travelling(tensor, lambda copy: real(copy, *args, **kwargs)))
        return seen[-1]

    dist.all_reduce = all_reduce
    try:
        with link_of(None):
            yield seen
    finally:
        dist.all_reduce = real


def group_of_one() -> comm.Group:
    """This rank alone. Every rank calls this."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


# 2.1


def observe_average(answer: Any, size: int, seed: int) -> dict[str, Any]:
    """One backward with the answer as the parameter's hook; parameters differ by rank, so that moving them shows."""
    rank = dist.get_rank()
    param = parameter(draw(seed + 1, rank, size, 3), None)
    before, accumulated = param.detach().clone(), []
    param.register_post_accumulate_grad_hook(lambda p: accumulated.extend([p.grad, p.grad.detach()]))
    param.register_post_accumulate_grad_hook(lambda p: answer(p, comm.world()))
    loss = (param * draw(seed, rank, size, 3).to(param.device)).sum()
    with comm.record() as calls, phases() as seen, travelling() as sent:
        loss.backward()
    other = parameter(draw(seed + 1, rank, size), draw(seed + 2, rank, size))
    answer(other, group_of_one())
    narrow = parameter(draw(seed + 3, rank, size).bfloat16(), draw(seed + 3, rank, size).bfloat16())
    with comm.record() as narrow_calls:
        answer(narrow, comm.world())
    strided = parameter(draw(seed + 4, rank, size, 3).t(), draw(seed + 4, rank, size, 3).t())
    answer(strided, comm.world())
    scalar = parameter(draw(seed + 5, rank), draw(seed + 5, rank))
    answer(scalar, comm.world())
    with torch.no_grad():
        scalar.grad.copy_(draw(seed + 6, rank))  # as a second backward leaves it
    answer(scalar, comm.world())
    return {
        "scalar": None if scalar.grad is None else scalar.grad.cpu(),
        "strided": None if strided.grad is None else strided.grad.cpu(),
        "narrow": None if narrow.grad is None else narrow.grad.cpu(),
        "narrow calls": told(narrow_calls),
        "moved": not torch.equal(param.detach(), before),
        "calls": told(calls),
        "phases": list(seen),
        "grad": None if param.grad is None else param.grad.cpu(),
        "in place": param.grad is not None and param.grad.data_ptr() == accumulated[1].data_ptr(),
        "its .data set": accumulated[0].data_ptr() != accumulated[1].data_ptr(),
        "reduced itself": [each.tensor.data_ptr() == accumulated[1].data_ptr() for each in sent],
        "changed": any(each.changed for each in sent),
        "alone": None if other.grad is None else other.grad.cpu(),
    }


@check("2.1")
def check_average_gradient(answer, variant):
    """One all-reduce of the gradient, waited for; `.grad` is the mean on every rank, the parameter as it was."""
    n, size = variant.ranks, variant.size
    seen = on_ranks(n, observe_average, answer, size, variant.seed, timeout=SECONDS)
    own = [draw(variant.seed, rank, size, 3) for rank in range(n)]
    total = sum(own)
    for rank, found in enumerate(seen):
        expect(
            "the parameter was changed",
            found["moved"],
            False,
            rank=rank,
            slip="the parameter is reduced instead of its gradient: the ranks' gradients stay different",
        )
        gathered = [f"all_gather of {4 * 3 * size * n} bytes"]
        expect(
            "collectives",
            found["calls"],
            [f"all_reduce of {4 * 3 * size} bytes"],
            rank=rank,
            slips={
                "an all-gather brings all N gradients to every rank: N times the memory": gathered,
                "a copy of 2 bytes per element was reduced: half the bytes, and the digits are lost; asked is the "
                "gradient in its own dtype": [f"all_reduce of {2 * 3 * size} bytes"],
                "a copy of 8 bytes per element was reduced: twice the bytes": [f"all_reduce of {8 * 3 * size} bytes"],
                "one all-reduce is enough": [f"all_reduce of {4 * 3 * size} bytes"] * 2,
            },
            slip=THROUGH_COMM,
        )
        expect(
            "what happened to the collective",
            found["phases"],
            ["issue", "wait"],
            rank=rank,
            slip="a collective's result may be read after its handle's wait(), not before",
        )
        expect(
            "the tensor was changed between issue and wait()",
            found["changed"],
            False,
            rank=rank,
            slip="while an all-reduce is under way its tensor belongs to it: dividing before wait() divides what is "
            "there so far",
        )
        slips = {
            "the sum, not the mean: steps are N times as long as one process's": total,
            "divided by N twice: MEAN has divided already": total / n**2,
            "still this rank's own gradient: the mean went into another tensor": own[rank],
        }
        expect("param.grad", found["grad"], total / n, rank=rank, slips=slips)
        expect(
            "the mean is in the tensor that backward accumulated in",
            found["in place"],
            True,
            rank=rank,
            slip="`.grad.data` was set: another memory under the same tensor, beside the one to be reduced in place"
            if found["its .data set"]
            else "a new tensor took its place: reduce in place",
        )
        expect(
            "what is all-reduced is that tensor itself",
            found["reduced itself"],
            [True],
            rank=rank,
            slip="a copy was reduced: the all-reduce works in place and needs no other memory",
        )
        other = [draw(variant.seed + 2, each, size) for each in range(n)]
        expect(
            "param.grad averaged over a group of this rank alone",
            found["alone"],
            other[rank],
            rank=rank,
            slips={"averaged over comm.world(): the ranks to average over are those of `group`": sum(other) / n},
            slip="N is the size of `group`, not a number known beforehand",
        )
        narrow = [draw(variant.seed + 3, each, size).bfloat16() for each in range(n)]
        expect(
            "param.grad of a parameter in bfloat16",
            found["narrow"],
            (sum(each.float() for each in narrow) / n).bfloat16(),
            rank=rank,
            slips={"still this rank's own gradient: `.float()` and the like make a copy here": narrow[rank]},
            tolerance=0.03,
        )
        expect(
            "collectives of a parameter in bfloat16",
            found["narrow calls"],
            [f"all_reduce of {2 * size} bytes"],
            rank=rank,
            slips={
                "its gradient was reduced as float32, in a copy of twice the bytes": [f"all_reduce of {4 * size} bytes"]
            },
            slip=THROUGH_COMM,
        )
        turned = [draw(variant.seed + 4, each, size, 3).t() for each in range(n)]
        slip = "its elements do not lie one behind the other: `.contiguous()`, `.view` and `.reshape` may make a copy"
        expect("param.grad of a transposed parameter", found["strided"], sum(turned) / n, rank=rank, slip=slip)
        slips = {"still this rank's own gradient: every backward brings one to average": draw(variant.seed + 6, rank)}
        wanted = sum(draw(variant.seed + 6, each) for each in range(n)) / n
        expect("param.grad of a scalar after a second call", found["scalar"], wanted, rank=rank, slips=slips)


# 2.2


def cut(sizes: list[tuple[int, torch.dtype]], cap: int, *, by: str = "begin", one_cap: bool = False) -> list[list[int]]:
    """The indices that belong together: a bucket of each dtype is open until a parameter reaches the cap.

    Args:
        by: the order of the buckets, that in which they "begin" or "close".
        one_cap: whether all that is open counts together, and is closed together.
    """
    began: list[list[int]] = []
    closed: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    for index in range(len(sizes) - 1, -1, -1):
        dtype = sizes[index][1]
        if dtype not in filling:
            filling[dtype] = []
            began.append(filling[dtype])
        filling[dtype].append(index)
        counted = [each for bucket in filling.values() for each in bucket] if one_cap else filling[dtype]
        if sum(sizes[i][0] * sizes[i][1].itemsize for i in counted) >= cap:
            closed += filling.values() if one_cap else [filling[dtype]]
            filling = {} if one_cap else {kind: bucket for kind, bucket in filling.items() if kind != dtype}
    return began if by == "begin" else closed + list(filling.values())


def cut_at_change(
    sizes: list[tuple[int, torch.dtype]], cap: int, one_dtype: bool = True, afresh: bool = True
) -> list[list[int]]:
    """One bucket open at a time: it ends with the parameter that reaches the cap, or before a dtype.

    Args:
        one_dtype: close a bucket before another dtype.
        afresh: begin to count anew after that.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index in range(len(sizes) - 1, -1, -1):
        if one_dtype and current and sizes[current[-1]][1] != sizes[index][1]:
            buckets.append(current)
            current, held = [], 0 if afresh else held
        current = [*current, index]
        held += sizes[index][0] * sizes[index][1].itemsize
        if held >= cap:
            buckets.append(current)
            current, held = [], 0
    return buckets + [current] * bool(current)


def cut_before(sizes: list[tuple[int, torch.dtype]], cap: int) -> list[list[int]]:
    """The same, but a bucket never exceeds the cap."""
    buckets: list[list[int]] = []
    for index in range(len(sizes) - 1, -1, -1):
        held = sum(sizes[i][0] * sizes[i][1].itemsize for i in buckets[-1]) if buckets else cap
        new = sizes[index][0] * sizes[index][1].itemsize
        if not buckets or held + new > cap or sizes[buckets[-1][-1]][1] != sizes[index][1]:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def mirrored(buckets: list[list[int]], count: int) -> list[list[int]]:
    return [[count - 1 - index for index in bucket] for bucket in buckets]


def made(index: int, numel: int, dtype: torch.dtype, within: int) -> nn.Parameter:
    """A parameter of one, two or three dimensions, in a storage `within` times as long, as that of a flat parameter."""
    shape = [(1, numel), (numel, 1), (numel,), (1, numel, 1)][index % 4]
    return nn.Parameter(torch.zeros(within * numel, dtype=dtype)[:numel].view(shape))


@check("2.2")
def check_assign_buckets(answer, variant):
    """Reverse order, closed at the cap, one open bucket per dtype, every parameter once, and the list as it was."""
    size = variant.size
    full, half, double = torch.float32, torch.bfloat16, torch.float64
    plain = [(numel, full) for numel in (size, 4 * size, 2 * size, size, 5 * size, 3 * size, size)]
    mixed = [(2 * size, full), (size, full), (3 * size, half), (size, half), (size, full)]
    turns = [(size, full), (size, half), (size, full), (size, half)]
    wide = [(size, double), (2 * size, half), (size, full), (3 * size, double), (size, half), (size, double)]
    for sizes, cap in (
        (plain, 16 * size),
        (plain, 0),
        (plain, 10**9),
        (mixed, 16 * size),
        (mixed, 4 * size),
        (mixed, 10**9),
        (turns, 10**9),
        (turns, 8 * size),
        (wide, 10**9),
        (wide, 8 * size),
        ([], 16 * size),
    ):
        params = [made(index, *size, within=3 if sizes is turns else 1) for index, size in enumerate(sizes)]
        index_of = {param: index for index, param in enumerate(params)}
        for param in params[1:2]:
            param.requires_grad_(False)  # which parameters are to be reduced is for the caller to choose
        given = list(params)
        result = answer(given, cap)
        after = [index_of.get(param) for param in given]
        slip = "the list is the caller's: `reverse()`, `pop()` and the like change it, `reversed()` does not"
        expect("indices of the parameters in `params` afterwards", after, list(range(len(params))), slip=slip)
        try:
            got = [[index_of[param] for param in bucket] for bucket in result]
        except (KeyError, TypeError):
            raise AnswerError(f"cap of {cap} bytes: expected a list of lists of the parameters given") from None
        wanted = cut(sizes, cap)
        every = [[index] for index in range(len(sizes))]
        forward = mirrored(cut(sizes[::-1], cap), len(sizes))
        slips = {
            "an element of bfloat16 has 2 bytes: ask its element_size()": cut(
                [(numel * 4 // dtype.itemsize, dtype) for numel, dtype in sizes], cap
            ),
            "in order of registration: backward makes the last parameters' gradients first": forward,
            "cut from the first parameter on and then reversed: what is left over belongs at the end of backward, and "
            "so do the cuts": [bucket[::-1] for bucket in forward[::-1]],
            "the cap itself is enough: a bucket that holds cap_bytes is closed": cut(sizes, cap + 1),
            "the count of bytes begins anew with every bucket, also where the dtype changes": cut_at_change(
                sizes, cap, afresh=False
            ),
            "each dtype has an open bucket of its own: a parameter joins it, whatever came in between": cut_at_change(
                sizes, cap
            ),
            "buckets stand in the order in which they begin, not that in which they are full": cut(
                sizes, cap, by="close"
            ),
            "the cap is that of one bucket: each dtype counts its own bytes": cut(sizes, cap, one_cap=True),
            "no parameter, no bucket: an empty one would be reduced too": [[]],
            "a bucket per parameter: one latency each, as without buckets": every[::-1],
            "the last bucket is lost: it never reaches the cap, and must be reduced too": wanted[:-1],
            "the cap is in bytes; an element has element_size() of them": cut(sizes, cap * 4),
            "one buffer has one dtype: each dtype needs a bucket of its own": cut_at_change(
                sizes, cap, one_dtype=False
            ),
            "closed before the cap is reached; as in torch, the parameter that reaches it belongs to it": cut_before(
                sizes, cap
            ),
        }
        if sizes is turns:
            stored = cut([(3 * numel, dtype) for numel, dtype in sizes], cap)
            slips = {"the bytes are those of the parameter: its storage may hold others": stored} | slips
        slips = {words: wrong for words, wrong in slips.items() if wrong != wanted}
        held = ", ".join(f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in sizes)
        expect(f"indices of the parameters ({held}) in each bucket, cap {cap} bytes", got, wanted, slips=slips)


# 2.3


def bucket_of_rank(seed: int, rank: int, size: int) -> list[Tensor | None]:
    """The gradients of a bucket's three parameters; rank 0 has none for the second."""
    grads = [draw(seed, rank, size, 3), draw(seed + 1, rank, 2 * size), draw(seed + 2, rank, 2, 2)]
    return [grads[0], None if rank == 0 else grads[1], grads[2]]


def make_bucket(seed: int, rank: int, size: int) -> list[nn.Parameter]:
    grads = bucket_of_rank(seed, rank, size)
    shapes = [(size, 3), (2 * size,), (2, 2)]
    return [parameter(draw(seed + 9, rank, *shape), grad) for shape, grad in zip(shapes, grads, strict=True)]


def flattened(seed: int, rank: int, size: int) -> Tensor:
    grads = bucket_of_rank(seed, rank, size)
    return torch.cat([torch.zeros(2 * size) if grad is None else grad.flatten() for grad in grads])


def observe_start(answer: Any, size: int, seed: int) -> dict[str, Any]:
    rank = dist.get_rank()
    bucket = make_bucket(seed, rank, size)
    with comm.record() as calls, phases() as seen, poisoned_buffers() as buffers, travelling() as sent:
        flat, handle = buffer_and_handle(answer(bucket, comm.world()))
        at_return, unwritten = list(seen), int(flat.isnan().sum())
        handle.wait()
    other_flat, other_handle = buffer_and_handle(answer(bucket, comm.world()))
    other_handle.wait()
    half = [parameter(draw(seed + 9, rank, size).bfloat16(), draw(seed + 3, rank, size).bfloat16())]
    with poisoned_buffers() as half_buffers:
        half_flat, handle = buffer_and_handle(answer(half, group_of_one()))
        handle.wait()
    unused = [parameter(draw(seed + 9, rank, size).bfloat16(), None), parameter(torch.ones(2).bfloat16(), None)]
    with comm.record() as unused_calls, poisoned_buffers():
        unused_flat, handle = buffer_and_handle(answer(unused, group_of_one()))
        handle.wait()
    laid = draw(seed + 5, rank, 2, size, 2, 3).contiguous(memory_format=torch.channels_last)
    try:
        turned_flat, handle = buffer_and_handle(answer([parameter(laid, laid.clone())], group_of_one()))
    except RuntimeError as error:
        raise AnswerError(
            f"the gradient of a convolution's weight in torch.channels_last: {error}\n"
            "likely slip: its elements do not lie in the order of its dimensions, so it has no flat view: `.flatten()`"
        ) from error
    handle.wait()
    own = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().cpu() for p in bucket])
    return {
        "calls": told(calls),
        "phases": at_return,
        "buffers": [f"{size} bytes of {role}" for size, role in buffers],
        "unwritten": [*(each.unwritten for each in sent), unwritten],
        "flat": flat.detach().cpu(),
        "apart": other_flat.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr(),
        "own": own,
        "none": [index for index, p in enumerate(bucket) if p.grad is None],
        "half": half_flat.detach().cpu(),
        "unused": unused_flat.detach().cpu(),
        "turned": turned_flat.detach().cpu(),
        "unused calls": told(unused_calls),
        "half buffers": [f"{size} bytes of {role}" for size, role in half_buffers],
    }


def buffer_and_handle(result: object) -> tuple[Tensor, Any]:
    match result:
        case (Tensor() as flat, handle) if hasattr(handle, "wait"):
            return flat, handle
    raise AnswerError(f"expected a buffer and a handle, got {type(result).__name__}")


@check("2.3")
def check_start_bucket(answer, variant):
    """One buffer, one all-reduce of all its bytes, on its way when the function returns; None counts as zero."""
    n, size, seed = variant.ranks, variant.size, variant.seed
    seen = on_ranks(n, observe_start, answer, size, seed, timeout=SECONDS)
    rows = [flattened(seed, rank, size) for rank in range(n)]
    parts = [f"all_reduce of {4 * numel} bytes" for numel in (3 * size, 2 * size, 4)]
    weights = [
        torch.cat([draw(seed + 9, rank, *shape).flatten() for shape in ((size, 3), (2 * size,), (2, 2))])
        for rank in range(n)
    ]
    for rank, found in enumerate(seen):
        expect(
            "buffers that device.empty handed out",
            found["buffers"],
            [f"{rows[0].nbytes} bytes of communication"],
            rank=rank,
            slip="allocate one flat buffer of role 'communication' with device.empty, or nobody can count its bytes",
        )
        expect(
            "collectives",
            found["calls"],
            [f"all_reduce of {rows[0].nbytes} bytes"],
            rank=rank,
            slips={"an all-reduce per parameter: a bucket is there to pay the latency once": parts},
            slip=THROUGH_COMM,
        )
        expect(
            "what happened to the collective before the function returned",
            found["phases"],
            ["issue"],
            rank=rank,
            slip="waiting at once leaves nothing to overlap: wait where the bucket is finished",
        )
        at_issue, at_return = found["unwritten"]
        slips = {"the place of a gradient that is None must be zeroed: the buffer comes uninitialized": 2 * size}
        slip = "nothing was copied into the buffer: `part = ...` only gives a name to something else, part.copy_ writes"
        if at_return < at_issue:
            slip = "the copy comes after the all-reduce was issued, which has then sent what was there before"
        expect(
            "elements of the buffer not written yet when its all-reduce was issued",
            at_issue,
            0,
            rank=rank,
            slips=slips if rank == 0 and at_return == at_issue else None,
            slip=slip,
        )
        total = sum(rows)
        slips = {
            "the sum, not the mean": total,
            "divided by N twice": total / n**2,
            "the parameters were copied in, not their gradients": sum(weights) / n,
        }
        expect("the buffer after wait()", found["flat"], total / n, rank=rank, slips=slips)
        slip = "each call takes a buffer of its own: the last one may be under way still, and is freed when it ends"
        expect("whether a second call has another buffer", found["apart"], True, rank=rank, slip=slip)
        expect("the gradients themselves, before the bucket is finished", found["own"], rows[rank], rank=rank)
        expect(
            "indices of the gradients that are None, before the bucket is finished",
            found["none"],
            [1] if rank == 0 else [],
            rank=rank,
            slip="a gradient that is None stays so here: zero its part of the buffer, which needs no other memory",
        )
        expect(
            "buffers that device.empty handed out for a bucket of bfloat16",
            found["half buffers"],
            [f"{2 * size} bytes of communication"],
            rank=rank,
            slip="the buffer has the dtype of the bucket's parameters",
        )
        other = [draw(seed + 3, each, size).bfloat16() for each in range(n)]
        expect(
            "the buffer of a bucket of bfloat16, over a group of this rank alone",
            found["half"],
            other[rank],
            rank=rank,
            slips={"reduced over comm.world(): the ranks to average over are those of `group`": sum(other) / n},
            slip="N is the size of `group`, not a number known beforehand",
        )
        what = "of a bucket of bfloat16 that has no gradient at all"
        slip = "the other ranks may have gradients of it, and wait for this one"
        wanted = [f"all_reduce of {2 * (size + 2)} bytes"]
        expect(f"collectives {what}", found["unused calls"], wanted, rank=rank, slip=slip)
        expect(f"the buffer {what}", found["unused"], torch.zeros(size + 2).bfloat16(), rank=rank)
        expect(
            "the buffer of a convolution's weight in torch.channels_last",
            found["turned"],
            draw(seed + 5, rank, 2, size, 2, 3).flatten(),
            rank=rank,
            slip="its elements in the order of memory, and not in that of its dimensions: `.flatten()`",
        )


# 2.4


class Arriving:
    """A handle whose data is there only once it has been waited for."""

    def __init__(self, flat: Tensor, values: Tensor) -> None:
        self.flat, self.values, self.waits = flat, values, 0
        self.call = SimpleNamespace(ranks=dist.get_world_size())

    def wait(self) -> None:
        if not device.is_allocated(self.flat):
            raise AnswerError("the buffer was freed before its all-reduce had ended: wait, copy, then free")
        self.waits += 1
        self.flat.copy_(self.values)


def observe_finish(answer: Any, size: int, seed: int) -> dict[str, Any]:
    rank = dist.get_rank()
    bucket = make_bucket(seed, rank, size)
    flat = device.empty(5 * size + 4, torch.float32, "communication", rank_device()).fill_(torch.nan)
    handle = Arriving(flat, draw(seed + 5, 0, flat.numel()).to(flat.device))
    given, values = list(bucket), [p.detach().clone() for p in bucket]
    before = [None if p.grad is None else p.grad.detach() for p in bucket]  # its memory, whatever becomes of the tensor
    with Ledger() as ledger:
        ledger.watch(nn.ParameterList(bucket))
        ledger.reset_peaks()
        already = sum(ledger.live().values())
        answer(given, flat, handle)
        taken = ledger.peak.total - already
    moved = sum(not torch.equal(p, value) for p, value in zip(bucket, values, strict=True))
    wide = parameter(torch.ones(size, dtype=torch.float64), None)
    scalar = parameter(torch.tensor(1.0, dtype=torch.float64), None)
    last = device.empty(size + 1, torch.float64, "communication", rank_device())
    answer([wide, scalar], last, Arriving(last, torch.arange(size + 1).double().to(last.device)))
    image = nn.Parameter(torch.ones(1, 2, 2, size, device=rank_device()).to(memory_format=torch.channels_last))
    image.grad = torch.zeros_like(image)
    pixels = device.empty(image.numel(), torch.float32, "communication", rank_device())
    answer([image], pixels, Arriving(pixels, torch.arange(image.numel()).float().to(pixels.device)))
    storage = flat.untyped_storage()._cdata
    views = [p.grad is not None and p.grad.untyped_storage()._cdata == storage for p in bucket]
    return {
        "waits": handle.waits,
        "freed": not device.is_allocated(flat),
        "given": [a is b for a, b in zip(given, bucket, strict=False)],
        "moved": moved,
        "wide": None if wide.grad is None or device.is_allocated(last) else wide.grad.cpu(),
        "image": image.grad.cpu(),
        "scalar": None if scalar.grad is None else scalar.grad.cpu(),
        "taken": taken,
        "views": sum(views),
        "replaced": [
            index
            for index, (p, grad) in enumerate(zip(bucket, before, strict=True))
            if grad is not None and (p.grad is None or p.grad.data_ptr() != grad.data_ptr())
        ],
        "grads": [p.grad.cpu() if p.grad is not None and not any(views) else None for p in bucket],
    }


@check("2.4")
def check_finish_bucket(answer, variant):
    """Waits first, then every gradient holds its part of the buffer in memory of its own, and the buffer is freed."""
    n, size, seed = variant.ranks, variant.size, variant.seed
    seen = on_ranks(n, observe_finish, answer, size, seed, timeout=SECONDS)
    first, second, third = draw(seed + 5, 0, 5 * size + 4).split([3 * size, 2 * size, 4])
    means = [first.view(size, 3), second, third.view(2, 2)]
    for rank, found in enumerate(seen):
        expect(
            "calls of handle.wait()",
            found["waits"],
            1,
            rank=rank,
            slip="before wait() the buffer holds whatever the collective has left there so far",
        )
        expect(
            "gradients that are views of the buffer",
            found["views"],
            0,
            rank=rank,
            slip="a .grad that views the buffer loses its memory when the buffer is freed: copy",
        )
        own = bucket_of_rank(seed, rank, size)
        for index, (grad, mean) in enumerate(zip(found["grads"], means, strict=True)):
            unchanged = "the means were never copied back"
            if own[index] is None:
                unchanged = "a gradient that was None stays None: give it memory of its own"
            slips: dict[str, Any] = {
                unchanged: own[index],
                "divided by N again: start_bucket asked for the mean": mean / n,
                "the mean was added to this rank's own gradient: it must replace it": mean
                + (own[index] if own[index] is not None else 0),
            }
            slip = "the buffer was read before wait()" if grad is not None and bool(grad.isnan().any()) else None
            expect(f"gradient {index} of the bucket", grad, mean, rank=rank, slips=slips, slip=slip)
        expect(
            "indices of the gradients that were there and have other memory now",
            found["replaced"],
            [],
            rank=rank,
            slip="twice the memory while both live: write into the gradient that exists, copy_ does",
        )
        expect(
            "the buffer is freed",
            found["freed"],
            True,
            rank=rank,
            slip="without device.free all buckets' buffers pile up",
        )
        slip = "the list is the caller's, and has a next backward"
        expect("parameters that are in `bucket` as before", found["given"], [True] * 3, rank=rank, slip=slip)
        slip = "the optimizer moves parameters, after all gradients have been averaged"
        expect("parameters whose values have changed", found["moved"], 0, rank=rank, slip=slip)
        expect("gradient of a parameter in float64", found["wide"], torch.arange(size).double(), rank=rank)
        slip = "a scalar's gradient is one too: a view in the parameter's shape, []"
        expect("gradient of a scalar", found["scalar"], torch.tensor(float(size)).double(), rank=rank, slip=slip)
        pixels = torch.arange(4 * size).float().view(1, 2, 2, size)
        slip = "reshape and flatten give a copy where a gradient is not contiguous: write into the gradient itself"
        what = "gradient of a parameter that lies in memory channels last"
        expect(what, found["image"], pixels, rank=rank, slip=slip)
        slip = "copy each part into the gradient that exists, and clone it only where there was None"
        wanted = 4 * 2 * size if own[1] is None else 0
        expect("bytes allocated, at most at one time", found["taken"], wanted, rank=rank, slip=slip)


# 2.5

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
    grads = [p.grad.clone().cpu() for p in model.parameters()]
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


# 2.6


def observe_accumulation(answer: Any, size: int, seed: int, micro: int) -> dict[str, Any]:
    rank, group, where = dist.get_rank(), comm.world(), rank_device()
    weight = parameter(draw(seed + 40, 0, size), None)
    scale = parameter(draw(seed + 41, 0, 1), None)
    params = [weight, scale]
    reducer = SimpleNamespace(sync=True, buckets=[params], bucket_of=dict.fromkeys(params, 0))
    given: list[int] = []
    backwards = 0
    reductions: list[int] = []  # in each backward

    def hook(param: nn.Parameter) -> None:
        nonlocal backwards
        if param is weight:
            backwards += 1
        if reducer.sync:
            comm.all_reduce(param.grad, group, comm.MEAN).wait()

    saved: list[Any] = []  # by autograd, for the backward of each micro-batch
    kept: list[int] = []

    def loss_of(batch: Tensor) -> Tensor:
        if given:
            reductions.append(len(calls) - sum(reductions))
        given.append(batch.shape[0])
        kept.append(sum(storage() is not None for storage in saved))
        output = ((batch @ weight) * scale).tanh()
        saved.append(weakref.ref(output.untyped_storage()))
        return output.mean()

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    drawn = [draw(seed + number, rank, 4, size).to(where) for number in range(2)]
    micro_batches = [drawn[number % 2] for number in range(micro)]  # of three the last is the first once more
    list_given, values = list(micro_batches), [batch.clone() for batch in micro_batches]
    with comm.record() as calls:
        answer(list_given, loss_of, reducer)
    reductions.append(len(calls) - sum(reductions))
    in_list = [a is b for a, b in zip(list_given, micro_batches, strict=False)]
    same = [torch.equal(batch, value) for batch, value in zip(micro_batches, values, strict=True)]
    return {
        "list": in_list,
        "kept": kept,
        "values": same,
        "given": given,
        "backwards": backwards,
        "reductions": reductions,
        "sync": reducer.sync,
        "grads": [None if p.grad is None else p.grad.cpu() for p in params],
    }


def gradients_of(ranks: int, size: int, seed: int, micro: int) -> list[list[Tensor]]:
    """For each micro-batch, the mean over the ranks of its loss's gradients, in one process."""
    found = []
    for number in range(micro):
        weight, scale = (nn.Parameter(draw(seed + 40 + i, 0, shape)) for i, shape in enumerate((size, 1)))
        batches = [draw(seed + number % 2, rank, 4, size) for rank in range(ranks)]
        losses = [((batch @ weight) * scale).tanh().mean() for batch in batches]
        found.append(list(torch.autograd.grad(sum(losses) / ranks, [weight, scale])))
    return found


@check("2.6")
def check_accumulate(answer, variant):
    """A backward per micro-batch, communication in the last one only, the gradient of the mean over all of them."""
    for number in (3, 1):
        check_accumulate_case(answer, variant, number)


def check_accumulate_case(answer: Any, variant: Any, number: int) -> None:
    n, size, seed = variant.ranks, variant.size, variant.seed
    seen = on_ranks(n, observe_accumulation, answer, size, seed, number, timeout=SECONDS)
    micro = gradients_of(n, size, seed, number)
    for rank, found in enumerate(seen):
        expect(
            "rows given to loss_of at each call",
            found["given"],
            [4] * number,
            rank=rank,
            slip="one forward per micro-batch: a single large one needs all their activations at once",
        )
        expect(
            "backward passes",
            found["backwards"],
            number,
            rank=rank,
            slip="adding up the losses keeps the graphs of all micro-batches alive until the one backward",
        )
        expect(
            "all-reduces in the backward of each micro-batch (two parameters)",
            found["reductions"],
            [0] * (number - 1) + [2],
            rank=rank,
            slips={
                "every micro-batch is reduced: k times the bytes, and what is reduced is reduced again": [2] * number,
                "the last backward has to communicate, or the ranks' gradients never meet": [0] * number,
                "the first backward communicates: what comes after it stays on its rank": [2] + [0] * (number - 1),
                "one and the same batch may come twice: the last is known by its place, not by what it is": [2, 0, 2],
            },
        )
        expect(
            "reducer.sync afterwards",
            found["sync"],
            True,
            rank=rank,
            slip="the next plain step would not be reduced",
        )
        slip = "a backward frees what its micro-batch has saved, without retain_graph: one is in memory at a time"
        expect("graphs alive at each call of loss_of", found["kept"], [0] * number, rank=rank, slip=slip)
        slip = "the list and its tensors are the caller's, and are only read"
        expect("whether the list holds its micro-batches", found["list"], [True] * number, rank=rank, slip=slip)
        expect("whether the micro-batches are as they were", found["values"], [True] * number, rank=rank, slip=slip)
        for index, grad in enumerate(found["grads"]):
            total = sum(each[index] for each in micro)
            slips = {
                "k times too long: the k gradients are added up, so divide each loss by k": total,
                "only the last micro-batch is left: the gradients of those before it were dropped": micro[-1][index]
                / number,
                "only the last micro-batch is left, and nothing divides by k": micro[-1][index],
                "divided by k twice": total / number**2,
                f"k is {number} here, the length of micro_batches, and not always 4": total / 4,
            }
            if number == 1:
                slips["k is 1 here, and the mean over one micro-batch is divided by 1, not by 2"] = total / 2
            slips["divided by the number of ranks too: the reduction takes the mean already"] = total / (number * n)
            expect(f"gradient of parameter {index}", grad, total / number, rank=rank, slips=slips, tolerance=1e-5)
