"""Exercise 6.3: Gather on the communication stream."""

from typing import Any

import torch
from torch import nn

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.late import link_of
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.machine import Recorder
from minifsdp.instruments.machine.program import DEVICE, Allocate, Issue, Kernel, Synchronize, Wait, WaitEvent

from .shared import CPU, WHOLE, LastMoment, Paper, current_stream_kept, number_of


@reference(
    "6.3",
    hints=(
        "Lab 05's gather without its last word, and inside a `with device.on_stream(...)`. Both calls belong in it: "
        "the allocator gives memory out by stream, and the collective begins when its stream has come to it.",
        "`with device.on_stream(stream):` then `device.allocate(flat.full)` and `return comm.all_gather(...)`, whose "
        "value is the handle. No wait of any kind.",
    ),
    forbids=(FlatUnit._gather,),
)
def gather(flat: FlatParameter, group: Group, stream: Any) -> Handle:
    """Start gathering the unit on `stream`; the caller waits on the returned handle.

    `flat.full` [P], freed until now, is allocated from the pool of `stream`, and one all-gather of every rank's
    `flat.shard` [P / N] into `flat.full` is issued on `stream`. Both are of the same dtype, which may be any. Use no
    other memory. Neither the host nor any stream waits.

    Use `with device.on_stream(stream):`, which makes `stream` the current stream, `device.allocate(buffer)`, and
    `comm.all_gather(output, shard, group)` with `flat.full.data` and `flat.shard.data`, which returns the handle.
    """
    with device.on_stream(stream):
        device.allocate(flat.full)
        return comm.all_gather(flat.full.data, flat.shard.data, group)


def flat_parameter(seed, size, rank, ranks, where=CPU, dtype=torch.float32):
    """Three parameters, 1 element more than a multiple of 12: padding on 2, 3 and 4 ranks. The same on every rank."""
    torch.manual_seed(seed)
    filler = -(3 * size + 5) % 12 + 1
    params = nn.ParameterList([torch.randn(3, size), torch.randn(5), torch.randn(filler)])
    return FlatParameter(find_parameters(params.to(where, dtype)), rank, ranks)


@check("6.3")
def check_gather(answer, variant):
    """Allocated and issued on the given stream, nobody waits, and the handle brings every rank's shard."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        gathered_on_paper(answer, variant, dtype)
    ranks = variant.ranks
    full = torch.cat([flat_parameter(variant.seed, variant.size, r, ranks).shard.data + (r + 1) for r in range(ranks)])
    for r, found in enumerate(on_ranks(ranks, gathered_for_real, answer, variant.seed, variant.size, timeout=8)):
        expect("`flat.full` after `handle.wait()`, on real ranks", found, full, rank=r)


def gathered_on_paper(answer, variant, dtype):
    """A unit that is gathered, freed, and gathered again with other values on another stream."""
    ranks, rank = variant.ranks, variant.ranks - 1
    setting = variant.seed, variant.size, ranks
    shards = [flat_parameter(*setting[:2], r, ranks, dtype=dtype).shard.data + (r + 1) for r in range(ranks)]

    def fill(call, output, shard):
        output.copy_(torch.cat([*shards[:rank], shard, *shards[rank + 1 :]]))

    link = LastMoment(fill)
    with link_of(link), Recorder() as recorder:
        flat = flat_parameter(*setting[:2], rank, ranks, dtype=dtype)
        flat.shard.data.add_(rank + 1)
        buffer = flat.full
        for again in ("", ", in a second gather of the unit"):
            link.waited, stream, version = 0, device.new_stream(CPU), buffer._version
            gathered_once(answer, flat, Paper(rank, ranks), stream, recorder, link, again)
            slip = "autograd takes a gather into `flat.full` for a change of what it has saved: gather into its `.data`"
            expect(f"changes of `flat.full` that autograd has counted{again}", buffer._version - version, 0, slip=slip)
            views = [None if view.untyped_storage().nbytes() == 0 else view.detach().clone() for view in flat.views]
            if buffer is not flat.full or any(view is None for view in views):
                raise AnswerError("memory behind `flat.views`: expected that of `flat.full`, got none")
            full, got = torch.cat(shards), buffer.detach().clone()
            slip = "it holds what was gathered before: each call issues a gather of its own" if again else None
            if got.isnan().any():
                slip = "what this rank sends is its shard; its part of `flat.full` holds nothing yet"
            expect(f"`flat.full` after `handle.wait()`{again}", got, full, slip=slip)
            slip = "gather reads the shard and leaves it alone"
            expect("this rank's shard", flat.shard.detach(), shards[rank], slip=slip)
            device.free(buffer)
            flat.shard.data.mul_(2)
            shards = [2 * shard for shard in shards]


def gathered_once(answer, flat, group, stream, recorder, link, again):
    """One call, looked at, and its wait."""
    (flat.shard.data * 1).sum()  # compute is busy: a gather that waits for it is late
    start = len(recorder.program().instructions)
    with current_stream_kept():
        try:
            handle = answer(flat, group, stream)
        except RuntimeError as error:
            if "no process group" not in str(error):
                raise
            slip = "a unit's group need not be all ranks there are: gather over `group`"
            raise AnswerError(
                f"the group of the all-gather: expected `group`, got the world\nlikely slip: {slip}"
            ) from error
    compute = number_of(recorder, device.current_stream(CPU))
    check_asked(recorder.program(), start, flat, (number_of(recorder, stream), compute), again)
    expect("messages that somebody has waited for", link.waited, 0, slip="the caller waits, when it needs the data")
    if not callable(getattr(handle, "wait", None)):
        raise AnswerError(
            f"what is returned: expected the collective's handle, got {type(handle).__name__}\n"
            "likely slip: without the handle nobody can wait: return what `comm.all_gather` returns"
        )
    handle.wait()


def check_asked(program, start, flat, streams, again):
    """One allocation and one all-gather, both on the stream, and no wait of any kind."""
    asked, (stream, compute) = program.instructions[start:], streams
    waits = [each for each in asked if isinstance(each, Wait | WaitEvent | Synchronize)]
    if waits:
        match waits[0]:
            case Wait():
                slip = "waited for: the host, or a stream, stands still until the data is there; return the handle"
            case WaitEvent(_, on) if on == stream:
                slip = (
                    "the gather would start when all compute queued so far is over: it reads the shard alone, and the "
                    "schedule has had the stream wait for the optimizer"
                )
            case Synchronize(event) if event == DEVICE:
                slip = WHOLE
            case WaitEvent():
                slip = "the compute stream waits: it may, just before it uses the data, and by the handle"
            case _:
                slip = "`synchronize` stops the host"
        raise AnswerError(f"waits while the gather is issued: expected 0, got {len(waits)}\nlikely slip: {slip}")
    nbytes, item = flat.full.nbytes, flat.full.element_size()
    allocated = [each for each in asked if isinstance(each, Allocate)]
    issued = [each for each in asked if isinstance(each, Issue)]
    slips = {
        "each call issues a gather of its own: the handle of an earlier one tells nothing of this": [],
        "no gather was issued by then: memory holds anything, and one issued at the wait hides under nothing": [],
        "the padding is gathered, too, or the shards would not be of one length": [("all_gather", flat.numel * item)],
    }
    if not again:
        del slips[next(iter(slips))]
    expect(
        f"collectives (operation, bytes){again}",
        [(each.call.op, each.call.payload) for each in issued],
        [("all_gather", nbytes)],
        slips=slips,
    )
    slip = "issued on the current stream, it starts when all compute queued there is over: use `device.on_stream`"
    if issued[0].stream not in (stream, compute):
        slip = "a stream of its own is in no order with the optimizer, which has written the shard: `stream` is"
    expect("the all-gather was issued on `stream`", issued[0].stream == stream, True, slip=slip)
    sizes = [program.buffers[each.buffer].nbytes for each in allocated]
    slip = "the unit is there twice: gather into `flat.full`, not into a buffer to copy from"
    if sizes and sum(sizes) - nbytes < nbytes:
        slip = "a copy of the shard takes memory of its own: send `flat.shard.data` itself, neither cloned nor cast"
    expect("buffers allocated", len(allocated), 1, slip=slip)
    slip = f"an element has not always 4 bytes, but {item} here: `device.allocate` asks the buffer for its bytes"
    expect("bytes allocated", sizes, [nbytes], slip=slip)
    expect(
        "the memory was allocated on `stream`",
        allocated[0].stream == stream,
        True,
        slip="memory is handed out by stream: that of the compute stream's pool may be in use by kernels queued there, "
        "and the gather, on another stream, does not wait for them. Allocate inside `device.on_stream(stream)`",
    )
    kernels = [each.name for each in asked if isinstance(each, Kernel)]
    expect("kernels", [name for name in kernels if name != "fill_"], [], slip="a gather computes nothing")


def gathered_for_real(answer, seed, size):
    group, where = comm.world(), rank_device()
    flat = flat_parameter(seed, size, group.rank(), group.size(), where)
    flat.shard.data.add_(group.rank() + 1)
    stream = device.new_stream(where)
    stream.wait_stream(device.current_stream(where))
    answer(flat, group, stream).wait()
    return flat.full.detach().cpu().clone()
