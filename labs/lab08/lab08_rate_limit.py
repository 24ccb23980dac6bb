# ---
# jupyter:
#   minifsdp:
#     lab: "08"
#     title: Rate limit
#     minutes: 110
#     ranks: 2
# ---

# %% [markdown]
# # Lab 08: the rate limit
#
# This lab starts from a symptom: `torch.cuda.memory_reserved()` is much larger than `torch.cuda.memory_allocated()`
# ([pytorch#82001](https://github.com/pytorch/pytorch/issues/82001)), `num_alloc_retries` in `torch.cuda.memory_stats()`
# is no longer 0, and steps take longer than expected
# ([pytorch#104509](https://github.com/pytorch/pytorch/issues/104509)). For T5-11B in the FSDP paper, they take two to
# three times as long (see below). There is no memory leak, and every step computes the correct result. Where does the
# memory go, and why does it cost *time*?
#
# ![Memory of gathered units: freed by the host early, usable again only when compute has read
# it](../slides/figures/overlap-lives.svg)
#
# *From [lecture 4, Overlap, prefetch, rate limit, and the allocator](../slides/overlap.md), which comes before this
# lab.*
#
# The cause is that the host runs far ahead of the device: it requests memory for the next unit long before the device
# has finished with the previous unit. The *caching allocator*, which manages the device's memory for the program, must
# not reuse memory that a stream may still be reading. In this lab, you build such an allocator, watch it run out of
# memory, and solve the problem by limiting the number of units that are gathered and not yet freed.
#
# **After this lab, you will be able to**
#
# - define `allocated`, `active` and `reserved`, and explain why they differ;
# - explain why one stream cannot use memory freed on another, and state the cost of `record_stream`;
# - describe an allocation retry, and explain why the device is idle during it;
# - limit the number of gathered units to k, and choose k for a memory budget;
# - predict when the limiter helps, when it has no effect, and when it costs time.
#
# **You need** lab 05 (units, gather, free), lab 06 (streams, events) and lab 07 (prefetching).
#
# **Time** 110 minutes, in two sessions; the break is marked. **Runs** on a laptop (gloo, 2 processes), on one GPU that
# the ranks share (`MINIFSDP_SHARE_GPU=1`), or on a GPU node (NCCL, one rank per GPU). **Memory** about 12 MiB of model
# state per rank (measured in session two); each process takes a few hundred MiB, mostly for torch itself.
#
# On a laptop, the host cannot run ahead of the device, because it *is* the device. So on every machine, this lab
# records the programs of real training steps on the CPU and replays them in virtual time on a simulated GPU. The replay
# models kernels, collectives, streams, events and your allocator. Its parameters come from a data sheet, or are
# assumptions where the data sheet gives no value. All its results are marked "model, not measured". If your ranks have
# a GPU, the lab also queries the allocator of that GPU.

# %% tags=["setup"]
# set-up
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minifsdp import device
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.fsdp.unit import SHARDED, Unit

ROUND, SEGMENT = 512, 2 * 2**20  # bytes: blocks and segments are multiples of these


class Event(Protocol):
    """A mark in a stream's queue."""

    def query(self) -> bool:
        """Return whether the device has reached it, without waiting."""


class Device(Protocol):
    """The device under an allocator."""

    def new_segment(self, nbytes: int) -> int | None:
        """Take memory from the device (cudaMalloc, slow). Returns its address, or None if the device is full.

        Segments never touch one another.
        """

    def give_back(self, start: int) -> None:
        """Return the segment at this address to the device (cudaFree, slow)."""

    def record(self, stream: int) -> Event:
        """Return an event behind all work queued on a stream so far."""

    def synchronize(self) -> None:
        """Make the host wait until the device has finished all queued work."""


@dataclass(eq=False)
class Block:
    """A range of a segment.

    Attributes:
        start: its address.
        size: bytes.
        stream: the stream whose requests it serves.
        users: the other streams recorded on it since it was handed out.
    """

    start: int
    size: int
    stream: int
    users: set[int] = field(default_factory=set)


@dataclass
class Memory:
    """The state of an allocator. A block in use is on neither list.

    Attributes:
        device: the source of segments.
        segments: bytes of each segment, by its address.
        free: blocks available for requests, in any order.
        waiting: freed blocks that other streams may still be reading, each with its events.
        retries: number of allocation retries.
    """

    device: Device
    segments: dict[int, int] = field(default_factory=dict)
    free: list[Block] = field(default_factory=list)
    waiting: list[tuple[Block, list[Event]]] = field(default_factory=list)
    retries: int = 0


# %% [markdown]
# # Session one: the allocator
#
# ## What running ahead costs in memory
#
# The model in the next cell resembles the paper's GPT-175B. Each block is a unit, and training runs on 128 GPUs, with
# backward prefetch but without a limit. `record` runs real training steps of rank 0 (modules, units, schedule,
# autograd, optimizer) on tensors without storage, and logs the requests of the host. The recorded model has 6 of the 96
# blocks, which are enough to show the effect. `replay` computes how a GPU would execute these requests. In this first
# run, the GPU has more memory than the program could ever need. The table shows three byte counts, as in
# `torch.cuda.memory_stats()`:
#
# | count | bytes |
# |---|---|
# | `allocated` | held by tensors |
# | `active` | `allocated`, plus freed memory that another stream may still be using |
# | `reserved` | taken from the device by the allocator: `active`, plus the allocator's cache |

# %%
from dataclasses import replace
from functools import partial

from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.ladder import data
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.instruments import plots
from minifsdp.instruments.machine import Run, replay
from minifsdp.instruments.machine.shapes import SHAPES, seconds, without_limiter

GIB, MIB = 2**30, 2**20
STEPS = 3  # the last one is examined
GPT_175B = replace(SHAPES["GPT-175B-like"], recorded=6, batch=2)
A100 = replace(GPT_175B.device, name="A100 with 40 GiB", capacity=40 * GIB)
PLENTY = replace(A100, name="A100 with unlimited memory", capacity=2**50)


def table(runs: dict[str, Run]) -> None:
    """Print the peaks, the retries, and the time of the last step."""
    print(f"{'GiB, model, not measured':28}{'allocated':>11}{'active':>8}{'reserved':>10}{'retries':>9}{'step, s':>9}")
    for name, run in runs.items():
        peaks = [run.peak(what) / GIB for what in ("allocated", "active", "reserved")]
        print(f"{name:28}{peaks[0]:11.1f}{peaks[1]:8.1f}{peaks[2]:10.1f}{run.retries:9}{run.seconds:9.3f}")


print(f"{GPT_175B.name}: {GPT_175B.recorded} of {GPT_175B.layers} blocks, on {GPT_175B.ranks} GPUs, batch 2 on each")
unlimited = GPT_175B.record(without_limiter(), STEPS)
plenty = replay(unlimited, PLENTY)
table({"without a limit": plenty})

# %%
plots.device_memory(
    {"without a limit": plenty},
    title=f"The program needs {plenty.peak('allocated') / GIB:.0f} GiB at its peak, and its allocator reserves "
    f"{plenty.peak('reserved') / GIB:.0f}",
    says="Bytes over the host's time. The program has freed what waits for an event, but it cannot be reused yet: "
    "the device still has to read it. Cached memory can be reused. The axis ends with the host's part of the step.",
    lab="08",
    model=PLENTY.name,
)

# %% [markdown]
# Look at the time axis: the host issues the step in a small fraction of the time that the device takes to run it. The
# host gathers and frees one unit after another, so `allocated` never includes more than two unsharded blocks of 3.4 GiB
# each. At its peak, it also includes the unsharded gradients of two blocks (3.4 GiB each), the root and its gradient
# (2.4 GiB each), activations (3 GiB) and the shards. But the memory of a freed unit cannot be reused until the device
# has *computed* with that unit, so the allocator has to take new memory for every unit. The paper's GPUs have 80 GB,
# which would be enough for a step of 6 blocks. To make memory scarce, our GPU has only 40 GiB.
#
# The allocator decides when a freed block can be reused. You will build one that follows torch's rules
# (`c10/cuda/CUDACachingAllocator.cpp`), with fewer special cases.
#
# ## 8.1 malloc
#
# *15 minutes, medium*
#
# `cudaMalloc` and `cudaFree` are slow, and `cudaFree` also waits for the device. So a *caching* allocator requests
# memory from the device in *segments*, and keeps them. It splits each segment into *blocks*, and serves each request
# from the smallest free block that is large enough (*best fit*). The remainder of that block stays free.
#
# Every block belongs to the stream that first requested it. Once freed, it can serve the next request *of that stream*,
# even while kernels that read it are still queued, because the new owner's kernels come later in the same queue. On
# another stream, there is no such guarantee, so that stream cannot use the block.
#
# Three small classes describe the allocator's state. They are defined in the folded set-up cell at the top:
#
# - a `Block` is a range of a segment, with its `start` (address), its `size` (bytes), the `stream` that it serves, and
#   its `users` (other streams recorded on it);
# - a `Memory` is the allocator's own state: `free` (list of blocks), `waiting` (list of pairs: a freed block and its
#   events), `segments` (bytes of each segment, by its address), `retries` (a count), and `device` (see below);
# - a `Device` has four methods: `new_segment(nbytes)` returns an address, or None if the device is full;
#   `give_back(start)` returns a segment to the device; `record(stream)` returns an event; and `synchronize()` makes the
#   host wait for the device.
#
# Block sizes are multiples of 512 bytes. Predict: how large is the block that serves a request for 1,000,000 bytes?

# %%
predict("8.1", ..., "bytes of the block that serves a request of 1,000,000 bytes")


# %% tags=["exercise-8.1"]
from .ex1_malloc import malloc

# %% [markdown]
# `Toy` is a device on which you can try your function. It has a given capacity in bytes, and its streams take no time.


# %% tags=["shown"]
@dataclass
class Toy:
    """A device that is never busy."""

    room: int
    segments: dict[int, int] = field(default_factory=dict)
    next: int = 0

    def new_segment(self, nbytes: int) -> int | None:
        if nbytes > self.room:
            return None
        start, self.next, self.room = self.next, self.next + nbytes + SEGMENT, self.room - nbytes
        self.segments[start] = nbytes
        return start

    def give_back(self, start: int) -> None:
        self.room += self.segments.pop(start)

    def synchronize(self) -> None: ...


memory = Memory(Toy(room=3 * SEGMENT))
first = malloc(memory, 1_000_000, stream=0)
slips = {
    "not rounded": 1_000_000,
    "the device's segment; a block is cut from it": SEGMENT,
    "rounded down": 999_936,
    "to a power of two: torch does that only if asked": 2**20,
}
outcome("8.1", first.size, how="computed", slips=slips)
print("free after it:", [(block.start, block.size) for block in memory.free])
second = malloc(memory, 1_000_000, stream=1)
print(f"the same request from another stream: at {second.start:,}, in a segment of its own")

# %% [markdown]
# ## 8.2 Put back
#
# *8 minutes, medium*
#
# Splitting creates small blocks. To undo the splitting, the allocator merges a returned block with its free neighbours,
# that is, with adjacent free blocks. Segments are never adjacent, so neighbours always belong to the same segment and
# the same stream.
#
# A segment is split into four equal blocks, 0 to 3. Blocks 0, 2 and 3 are freed. Predict: how many free blocks are
# there?

# %%
predict("8.2", ..., "free blocks after blocks 0, 2 and 3 of a segment of 4 are freed")


# %% tags=["exercise-8.2"]
from .ex2_put_back import put_back

# %%
memory = Memory(Toy(room=SEGMENT))
quarters = [malloc(memory, SEGMENT // 4, stream=0) for _ in range(4)]
for number in (0, 2, 3):
    put_back(memory, quarters[number])
outcome("8.2", len(memory.free), how="computed", slips={"without joining neighbours": 3})
print("free:", sorted((block.start, block.size) for block in memory.free))
print("a request for three quarters of a segment:", malloc(memory, 3 * SEGMENT // 4, stream=0))

# %% [markdown]
# Three quarters of the segment are free, but the request fails because no single free block is large enough. This is
# *fragmentation*.
#
# ## 8.3 Free while another stream is reading
#
# *8 minutes, medium*
#
# A unit's memory is allocated on the gather stream and read by kernels on the compute stream. When the host frees the
# memory, those kernels may not even have started. The allocator knows about them only through
# `Tensor.record_stream(s)`, which adds stream `s` to the block's users (`block.users`). When the block is freed, the
# allocator records an *event* on each of those streams, after all queued work. The block stays unavailable until all of
# these events are complete.


# %% tags=["exercise-8.3"]
from .ex3_release import release

# %% [markdown]
# ## 8.4 Collect
#
# *8 minutes, medium*
#
# The allocator is not notified when an event completes. It polls the events before every `malloc`.


# %% tags=["exercise-8.4"]
from .ex4_collect import collect

# %% [markdown]
# ## 8.5 Out of memory
#
# *15 minutes, hard*
#
# Suppose that no free block is large enough and that the device has no room for another segment. Some memory may still
# be recoverable: blocks that are waiting for an event, and free blocks of other streams. To recover this memory, the
# host has to wait for the device. torch waits until all events are complete, returns every entirely free segment to the
# device, and tries again. This is a *retry*, counted by `num_alloc_retries`.


# %% tags=["exercise-8.5"]
from .ex5_malloc_or_retry import malloc_or_retry

# %% [markdown]
# ### Your allocator under a real program
#
# `LabAllocator` combines your five functions into an allocator for the simulated GPU. The simulated GPU's queues handle
# events and synchronization, and account for the time that the host spends in `cudaMalloc` and `cudaFree`.


# %%
from typing import NamedTuple

from minifsdp.instruments.machine import Segment
from minifsdp.instruments.machine.blocks import Block as Shown


@dataclass
class PaperEvent:
    queues: Any
    moment: Any

    def query(self) -> bool:
        return self.queues.happened(self.moment)


class PaperDevice(Toy):
    """The memory of a simulated GPU."""

    def __init__(self, capacity: int, queues: Any) -> None:
        super().__init__(capacity)
        self.queues = queues
        self.synchronize = queues.synchronize

    def new_segment(self, nbytes: int) -> int | None:
        start = super().new_segment(nbytes)
        if start is not None:
            self.queues.cuda_malloc(nbytes)
        return start

    def give_back(self, start: int) -> None:
        self.queues.cuda_free(self.segments[start])
        super().give_back(start)

    def record(self, stream: int) -> Event:
        return PaperEvent(self.queues, self.queues.record(stream))


class Pieces(NamedTuple):
    """The five functions of an allocator."""

    malloc: Callable = malloc
    put_back: Callable = put_back
    release: Callable = release
    collect: Callable = collect
    malloc_or_retry: Callable = malloc_or_retry


class LabAllocator:
    """Your allocator, with torch's counts."""

    def __init__(self, capacity: int, queues: Any, pieces: Pieces | None = None) -> None:
        self.pieces, self.memory = pieces or Pieces(), Memory(PaperDevice(capacity, queues))
        self.used: dict[Block, None] = {}
        self.snapshots: dict[str, list[Segment]] = {}  # before each retry, by the request that caused it

    def malloc(self, nbytes: int, stream: int) -> Block:
        self.pieces.collect(self.memory, self.pieces.put_back)
        block = self.pieces.malloc_or_retry(self.memory, nbytes, stream, self._malloc, self.pieces.put_back)
        self.used[block] = None
        return block

    def _malloc(self, memory: Memory, nbytes: int, stream: int) -> Block | None:
        block = self.pieces.malloc(memory, nbytes, stream)
        if block is None:
            request = f"retry {self.retries + 1} of the run, for {nbytes / GIB:.3g} GiB on stream {stream}"
            self.snapshots[request] = self.snapshot()
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        if stream != block.stream:
            block.users.add(stream)

    def free(self, block: Block) -> None:
        del self.used[block]
        self.pieces.release(self.memory, block, self.pieces.put_back)

    @property
    def retries(self) -> int:
        return self.memory.retries

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.used)

    @property
    def reserved(self) -> int:
        return sum(self.memory.segments.values())

    @property
    def active(self) -> int:
        return self.reserved - sum(block.size for block in self.memory.free)

    @property
    def fragmented(self) -> int:
        whole = self.memory.segments
        return sum(block.size for block in self.memory.free if whole.get(block.start) != block.size)

    def snapshot(self) -> list[Segment]:
        """The segments and their blocks, for the figures."""
        blocks = [Shown(b.start, b.size, b.stream, False) for b in self.memory.free]
        blocks += [Shown(b.start, b.size, b.stream, False, events=1) for b, _ in self.memory.waiting]
        blocks += [Shown(b.start, b.size, b.stream, False, requested=b.size) for b in self.used]
        blocks.sort(key=lambda block: block.start)
        return [
            Segment(start, size, parts[0].stream, False, parts)
            for start, size in self.memory.segments.items()
            if (parts := [block for block in blocks if start <= block.start < start + size])
        ]


yours = replay(unlimited, A100, LabAllocator)
table({"your allocator": yours, "by torch's rules": replay(unlimited, A100)})
print(f"hazards: {len(yours.hazards)}")

# %% [markdown]
# With 40 GiB, your allocator behaves like the course's own, which follows torch's rules more closely (separate pools
# for small and large requests, segments of at least 20 MiB). The peaks differ slightly because torch's rules round
# sizes up.
#
# No hazards were found, so the order of any two uses of the same bytes is guaranteed. To check this, the replay keeps a
# vector clock for every stream, as torch's `_sanitizer` does (lab 06).
#
# ### Break it: free without waiting
#
# An allocator that ignores other streams needs far less memory:


# %%
def at_once(memory: Memory, block: Block, put_back: Callable[[Memory, Block], None]) -> None:
    put_back(memory, block)


careless = replay(unlimited, A100, partial(LabAllocator, pieces=Pieces(release=at_once)))
table({"freed at once": careless})
early = [hazard for hazard in careless.hazards if hazard.kind == "reused too early"]
print_wrapped(f"{len(early)} hazards, such as {early[0].text}")
assert early, "this allocator should cause hazards, and none were found"

# %% [markdown]
# A GPU would report no error. Depending on the network load, the next unit's parameters arrive either while a matmul is
# still reading the same memory or just after it has finished. Occasionally, a loss is wrong.
#
# ## The cost of a retry
#
# ### Modelled: memory fragments, and a retry stalls the device
#
# The next cells show the same run, with your allocator, on a device with 40 GiB. The first figure shows memory over
# time; marks indicate where the allocator releases its cached memory. The second figure shows the blocks just before
# the first retry of that step.


# %% tags=["C43"]
def pauses(run: Run) -> float:
    """Seconds of the last step without computation on the device."""
    return run.seconds - sum(span.duration for span in run.last_step() if span.lane == "compute")


last = yours.last_step()
driver = sum(span.duration for span in last if span.name in ("cudaFree", "cudaMalloc"))
in_last = [at for at in yours.retries_at if at >= [mark for mark in yours.marks if mark.name == "step"][-1].host]
print(f"retries: {yours.retries} in {STEPS} steps, {len(in_last)} in the last")
print(f"the last step: {yours.seconds:.3f} s; with enough memory: {plenty.seconds:.3f} s")
print(f"in it, the device computes nothing for {pauses(yours):.3f} s; with enough memory: {pauses(plenty):.3f} s")
print(f"cudaFree and cudaMalloc take the host {driver:.3f} s")
assert in_last
assert pauses(yours) > pauses(plenty) + driver / 2
plots.device_memory(
    {"without a limit, 40 GiB": yours},
    title=f"The allocator empties its cache {len(in_last)} times in a step of {yours.seconds:.2f} s",
    says="Freed blocks wait until there is no room; then the host waits for the device, which runs out of work. After "
    "that, segments are allocated again, one slow call after another. The axis ends with the host's part of the step.",
    lab="08",
    model=A100.name,
)

# %%
request, before_retry = [*yours.snapshots.items()][yours.retries - len(in_last)]
pieces_of = [block for segment in before_retry for block in segment.blocks]
kinds = {state: sum(b.size for b in pieces_of if b.state == state) / GIB for state in ("in use", "waiting", "free")}
largest = max((block for block in pieces_of if block.state == "free"), key=lambda block: block.size)
assert largest.stream == 0, "the largest free block should be the compute stream's"
plots.blocks(
    {request: before_retry},
    title=f"Memory runs out with {kinds['in use']:.0f} GiB in use: {kinds['waiting']:.0f} GiB wait for an event",
    says=f"Just before retry {yours.retries - len(in_last) + 1} of the run, the first of this step: segments and their "
    "blocks, by stream; 1 has the gathers, 2 the reductions. The large free pieces are in the compute stream's pool, "
    "and a gather on stream 1 cannot use them.",
    lab="08",
    model=A100.name,
)

# %%
plots.timeline(
    {"without a limit, enough memory": plenty, "40 GiB, with retries": yours},
    title=f"{len(in_last)} retries stop the device for {pauses(yours) - pauses(plenty):.2f} s of the step",
    says="Lanes of rank 0 over the last step. With enough memory, the host issues the step in less than 10 ms. While "
    "the host waits, nothing new is queued. When the device has finished, cudaFree and cudaMalloc run, and only then "
    "does the host queue the next kernel.",
    lab="08",
)

# %% [markdown]
# There are two causes. Memory that the compute stream may still read cannot be reused, and the memory that is free
# belongs to another stream or consists of blocks that are too small. The FSDP paper (section 5.4) reports such retries
# in the backward pass of GPT-175B, with two samples per GPU on 128 GPUs. There, each GPU reaches 90.5 TFLOPS, compared
# with 186 TFLOPS on 192 GPUs (figure 7(b)). In our model, the retries cost only 6 % of the step time.
#
# The model omits several effects. Kernels slow each other down, including NCCL's own kernels. A real launch queue is
# full after about a thousand kernels, and then the host waits anyway. The speed of the host varies. The other ranks
# wait for the retrying rank in their next collective. The model also omits `expandable_segments`, torch's option for
# growing segments. The duration of a driver call, 1 ms plus 1 ms per GiB, is an assumption, because data sheets do not
# specify it. The next cell shows the effect of this assumption:

# %%
print("per call, and per GiB     a step without a limit (model, not measured)")
quicker = {call: replay(unlimited, replace(A100, segment=(call, call)), LabAllocator) for call in (0, 0.3e-3)}
for call, run in {**quicker, A100.segment[0]: yours}.items():
    longer = run.seconds / plenty.seconds - 1
    print(f"{1e3 * call:19.1f} ms{run.seconds:25.3f} s, {longer:.1%} longer, {run.retries} retries")

# %% [markdown]
# The next cell reads the retry counter of your own device:

# %% tags=["nbval-ignore-output"]
import torch

from minifsdp.instruments.launch import launch, rank_device

print("starting two ranks ...")
stats = launch(lambda: device.memory_stats(rank_device()), 2)[0]
print("this device's caching allocator:", stats or "none; torch does not cache CPU memory")

# %% [markdown]
# # Break. Session two: the limiter
#
# ## 8.6 Hold the host back
#
# *15 minutes, hard*
#
# The allocator cannot do any better, but the host does not need to run so far ahead. FSDP's rate limiter
# (`limit_all_gathers`, on by default in torch) keeps a queue of events, one for each freed unit. If the queue contains
# `limit` or more events before a gather, the *host* waits for the oldest event with `event.synchronize()`. After the
# wait, the memory of the corresponding unit is available. It belongs to the right stream and has the right size, so the
# gather reuses it.
#
# Not every call takes effect. A schedule calls `gather(unit)` again for a unit that has already been prefetched, and
# `free(unit)` again for a unit that has already been freed; both calls do nothing. To find out whether a call will take
# effect, check `unit.state`: it is `SHARDED` until the unit's gather starts, and again after the unit has been freed.
#
# Some units stay unsharded from their forward pass to the end of their backward pass: the root always does, and with
# SHARD_GRAD_OP, all units do. For these units, `unit.freed_after_forward` is False. (Read it at each call: the root is
# known only when the first forward pass begins, so in a schedule's `__init__`, the root's `freed_after_forward` is
# still True.) These units are freed much later, so their gathers do not wait, and their frees are not added to the
# queue. (torch counts every free, including those of these units. Before a gather, it waits for a single event, however
# many are in the queue.)
#
# The recorded GPT has 6 blocks and a root. Every block, including the last one, is freed after its forward pass and
# again after its backward pass. Predict: with a limit of 2, how many events does the host wait for in each step after
# the first?

# %%
predict("8.6", ..., "events that the host waits for in a later step, 6 blocks and a root, limit 2")


# %% tags=["exercise-8.6"]
from .ex6_rate_limit import rate_limit

# %% [markdown]
# This schedule calls your two functions instead of `gather` and `free`. The rest is lab 07's schedule. With `PRE`, the
# backward pass issues the next gather before it computes the current unit's gradients. `depth` is the number of units
# gathered ahead (None means all of them), `forward` determines whether the forward pass also gathers ahead, and
# `reductions` is the number of reductions in progress while the next gradient is being computed. Here, the backward
# pass gathers one unit ahead, and at most one reduction is in progress.


# %% tags=["shown"]
from minifsdp.fsdp import PrefetchSchedule
from minifsdp.fsdp.schedules.prefetch import PRE
from minifsdp.instruments.machine.program import STEP, Mark, Synchronize


class HeldBack(PrefetchSchedule):
    """Prefetches one unit ahead in backward, which is torch's default; a limit holds the host back."""

    def __init__(self, units: Sequence[Unit], limit: int = 2, forward: bool = False, depth: int | None = 1) -> None:
        super().__init__(units, forward, PRE, depth)
        self.reductions = 1  # one reduction under way, one gradient being computed
        self.limited_gather, self.limited_free = rate_limit(super().gather, super().free, limit)

    def gather(self, unit: Unit) -> None:
        self.limited_gather(unit)

    def free(self, unit: Unit) -> None:
        self.limited_free(unit)


limited = GPT_175B.record(partial(HeldBack, limit=2), STEPS)
last_begins = max(at for at, each in enumerate(limited.instructions) if each == Mark(STEP))
waits = sum(isinstance(each, Synchronize) and each.event is not None for each in limited.instructions[last_begins:])
slips = {
    "forward alone; backward gathers every block once more": 6,
    "the queue is not empty when the step begins: the last step's frees are in it": 10,
    "the root is not freed after forward, and does not count": 14,
}
outcome("8.6", waits, how="computed", slips=slips)
held = replay(limited, A100, LabAllocator)
table({"without a limit": yours, "your limit, k = 2": held})
assert held.retries == 0

# %%
plots.device_memory(
    {"without a limit": yours, "your limit, k = 2": held},
    title=f"With a limit {held.peak('reserved') / GIB:.0f} GiB suffice, and the allocator never empties its cache",
    says="Before a gather, the host waits for the older of two freed units; the next figure shows both. The rest of "
    "what waits is gradients being reduced.",
    lab="08",
    model=A100.name,
)

# %%
forward, backward = ([mark.host for mark in held.marks if mark.name == name][-1] for name in ("forward", "backward"))
waiting = [(each.active - each.allocated) / GIB for each in held.memory if forward <= each.at < backward]
one, two = (count * next(size for size in waiting if size > 0) for count in (1, 2))
assert max(waiting) == two, "more than two freed units wait for their events"
plots.lines(
    {"freed, waiting": (range(len(waiting)), waiting)},
    stairs=["freed, waiting"],
    xlabel="allocations and frees of forward, in order",
    ylabel="freed, waiting for an event, GiB",
    title=f"In forward, two freed units wait for their events ({two:.1f} GiB) until the next gather, then one "
    f"({one:.1f} GiB)",
    says="The same step with your limit. At each gather, the host has just waited for the older of the two units, and "
    "the gather takes its memory.",
    lab="08",
    model=A100.name,
)

# %% [markdown]
# In each step after the first, the host waits for 12 events, because a step frees blocks 12 times. The queue has the
# same length at the end of every step, so a step removes as many events as it adds.
#
# `allocated` is unchanged; it was never the problem. The limit bounds the difference *between* allocated and reserved
# memory. The step is as fast as on a device with enough memory: at least one unit is always queued, so the device never
# runs out of work.
#
# ## 8.7 Postpone gathers that do not fit
#
# *10 minutes, medium*
#
# On a laptop, the host itself computes, and the event queue has no effect: when the host reaches the next gather, all
# earlier frees have already completed. On such a machine, units accumulate for another reason: a *deep* prefetch
# gathers all units of the recorded order (`depth=None`, lab 07). What would happen if a limiter simply waited? Suppose
# that at most two units may be unsharded. Two units already are, and the prefetch requests a third:

# %%
import threading


def waits_for_a_free(limit: int, seconds: float = 0.2) -> str:
    """Gathers three units before the first computation; waits while `limit` units are unsharded."""
    room = threading.Semaphore(limit)
    for number in range(3):
        if not room.acquire(timeout=seconds):
            return f"unit {number} waits for a free that only this host can issue, behind this very line: forever"
    return "all gathered"


print("limit 3:", waits_for_a_free(3))
print("limit 2:", waits_for_a_free(2))

# %% [markdown]
# So torch's limiter, like yours in 8.6, counts only frees that have been *issued*, and waits only for those. The host
# must never wait for a free that it has not issued yet. A deep prefetch therefore needs another solution: a gather
# beyond the limit is *postponed* until another unit has been freed.
#
# On 2 ranks, the lab's own model has 6 unsharded blocks of 534,664 bytes each and an unsharded root of 224,472 bytes.
# Predict: with a limit of 3, how many bytes of gathered parameters does a rank hold at most?

# %%
predict("8.7", ..., "peak bytes of gathered parameters, limit 3, blocks of 534,664 and a root of 224,472")


# %% tags=["exercise-8.7"]
from .ex7_prefetch_within import prefetch_within


# %% tags=["shown"]
class LabLimited(HeldBack):
    """Your limiter: it holds the host back, and puts off units for which there is no room."""

    def __init__(self, units: Sequence[Unit], limit: int = 2, forward: bool = True, depth: int | None = None) -> None:
        super().__init__(units, limit, forward, depth)
        self.limit, self.whole, self.put_off = limit, [], []

    def gather(self, unit: Unit) -> None:
        if unit.state is SHARDED and unit.freed_after_forward:
            self.whole.append(unit)
        super().gather(unit)

    def free(self, unit: Unit) -> None:
        super().free(unit)
        if unit in self.whole:
            self.whole.remove(unit)
        self.prefetch(self.put_off)

    def prefetch(self, units: list[Unit]) -> None:
        self.put_off = prefetch_within(self.limit, self.whole, units[: self.depth], self.gather)

    def begin_forward(self) -> None:
        self.put_off = []
        super().begin_forward()

    def end_forward(self) -> None:
        self.put_off = []
        super().end_forward()

    def end_backward(self) -> None:
        self.put_off = []
        super().end_backward()


# %% [markdown]
# ### Measured: k units at a time, to the byte
#
# The next cells run real training on 2 ranks, with your limiter and unlimited prefetch depth. The ledger counts the
# bytes of the second step in the host's order, so the result is the same on every device. The count corresponds to
# `allocated`, the bytes that the program holds. The expected peak is the size of the root plus the total size of the k
# largest consecutive blocks.

# %%
from typing import NamedTuple

import torch.distributed as dist

from minifsdp import FullyShardedDataParallel
from minifsdp.course.ladder.measure import Settings, take_step
from minifsdp.course.ladder.rungs import LEARNING_RATE, Trainer, closed_form_setting, sizes_of
from minifsdp.gpt import Block as ModelBlock
from minifsdp.instruments.watch.cuda_memory import MemoryHistory
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.records import show_record

RANKS = 2
SETTINGS = Settings(ranks=RANKS, batch=2, layers=6, width=105, context=16)
STATE = ("parameters", "unsharded", "gradients", "optimizer", "communication")


class Usage(NamedTuple):
    unsharded: int  # peak bytes
    state: int  # peak bytes of everything but activations
    curve: dict[str, Any]
    allocator: dict[str, Any] | None  # on a GPU: what its allocator held during the step


def mark_stages(ledger: Ledger, history: MemoryHistory, begins: str) -> None:
    """Mark the stage that has just ended and, on a GPU, also the one that begins."""
    ended = {"backward": "forward", "optimizer": "backward", "rest": "optimizer"}
    if begins in ended:
        ledger.mark(ended[begins])
    if begins != "rest":
        history.mark(begins)


def measure_memory(schedules: dict[str, Callable]) -> dict[str, Usage]:
    """Return the ledger's record of a second step with each schedule."""
    usage = {}
    where = rank_device()
    batch = data.shard(next(SETTINGS.batches()), dist.get_rank(), RANKS)
    for name, schedule in schedules.items():
        with Ledger() as ledger:
            model = SETTINGS.model().to(where)
            model = FullyShardedDataParallel(model, auto_wrap_policy={ModelBlock}, schedule=schedule)
            trainer = Trainer(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))
            ledger.watch(trainer.model, trainer.optimizer)
            take_step(trainer, batch, where)
            ledger.reset_peaks()
            with MemoryHistory(where) as history:
                take_step(trainer, batch, where, partial(mark_stages, ledger, history))
            peaks = ledger.peak_of("unsharded"), ledger.peak_of(*STATE)
            usage[name] = Usage(*peaks, ledger.curve(), history.beside(ledger))
    return usage


def bounded(limit: int | None, reductions: int | None, units: Sequence[Unit]) -> PrefetchSchedule:
    """Return a deep prefetch with a limit on unsharded units and reductions in flight; None means no limit."""
    schedule = PrefetchSchedule(units, depth=None) if limit is None else LabLimited(units, limit)
    schedule.reductions = reductions
    return schedule


BOUNDS = {f"k = {k}": (k, 1) for k in (1, 2, 3)}
BOUNDS |= {"no limit on gathers": (None, 1), "no limit on reductions": (2, None), "no limit on either": (None, None)}
usage = launch(measure_memory, RANKS, {name: partial(bounded, *bounds) for name, bounds in BOUNDS.items()})[0]

# %% tags=["C4"]
setting = closed_form_setting(RANKS)
SIZES = sizes_of(SETTINGS.model())
root, *blocks = (setting.padded(sum(unit)) for unit in SIZES.units)
outcome(
    "8.7",
    usage["k = 3"].unsharded,
    slips={
        "the root does not count: it is unsharded besides the three blocks": root + 2 * blocks[0],
        "without the root": 3 * blocks[0],
        "without the limit": root + sum(blocks),
    },
)
ahead = {"forward_depth": None, "backward": "pre", "backward_depth": None}
for name, mine in usage.items():
    k = BOUNDS[name][0] or len(blocks)
    expected = closed_form.fsdp(SIZES.units, setting, limit=k, **ahead).unsharded_peak
    print(f"{name:25} gathered at most: expected {expected:9,}  measured {mine.unsharded:9,}")
    assert mine.unsharded == expected == root + k * blocks[0]
print(f"the unsharded model, 4Ψ: {4 * sum(SIZES.parameters):,}")

# %% tags=["nbval-ignore-output"]
picture = None
if recorded := {name: mine.allocator for name, mine in usage.items() if mine.allocator}:
    picture = plots.allocator_memory(
        recorded,
        title="This GPU's allocator, next to the ledger, over one step",
        says="Bytes of a rank over a step, as the allocator recorded them. The ledger slows the host down, so less "
        "memory waits for the device than in a step without it.",
        lab="08",
    )
else:
    print("no caching allocator here: torch does not cache CPU memory")
picture


# %%
def without_activations(curve: dict[str, Any]) -> dict[str, Any]:
    tags = {tag: [0] * len(sizes) if tag == "activations" else sizes for tag, sizes in curve["tags"].items()}
    return {"tags": tags, "marks": curve["marks"]}


for name, mine in usage.items():
    print(f"{name:25} {mine.state / MIB:5.2f} MiB of model state at most")
assert usage["no limit on reductions"].state == usage["no limit on either"].state
others = ("no limit on gathers", "no limit on either")
plots.curve(
    without_activations(usage["k = 2"].curve),
    title=f"Model state peaks at {usage['k = 2'].state / MIB:.2f} MiB with k = 2, and at "
    f"{usage['no limit on gathers'].state / MIB:.2f} with no limit on gathers",
    says="Bytes of a rank over the allocations of a step, without activations. With no limit on gathers, the entire "
    "model is gathered before the first block computes. With no limit on either, any number of reductions can be in "
    "progress too. After the optimizer, zero_grad frees the gradients.",
    lab="08",
    earlier={name: without_activations(usage[name].curve) for name in others},
)

# %% [markdown]
# The next cell shows the same steps with a slider. Count the light blue rows under `k = 2` and under `no limit on
# gathers`:

# %% tags=["nbval-ignore-output"]
from minifsdp.course.ladder.measure import log_step
from minifsdp.instruments.explore.page import show


def build_bounded(name: str) -> Trainer:
    model = SETTINGS.model().to(rank_device())
    schedule = partial(bounded, *BOUNDS[name])
    model = FullyShardedDataParallel(model, auto_wrap_policy={ModelBlock}, schedule=schedule)
    return Trainer(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))


def log_mine() -> dict[str, Any]:
    batch = data.shard(next(SETTINGS.batches()), dist.get_rank(), RANKS)
    shown = ("no limit on gathers", "k = 1", "k = 3", "k = 2")
    return {name: log_step(partial(build_bounded, name), batch) for name in shown}


logged = launch(log_mine, RANKS)
show(
    "One step under your limiter",
    f"GPT of {sum(SIZES.parameters):,} parameters on {RANKS} ranks.",
    {name: [rank[name] for rank in logged] for name in logged[0]},
)

# %% [markdown]
# With a deep prefetch, reductions accumulate too, and each holds an unsharded gradient (lab 07). The peak then occurs
# at the end of the backward pass, when all gradients are allocated, so limiting only the gathers does not lower it. For
# this reason, `HeldBack` limits both gathers and reductions.
#
# ## 8.8 Choose k
#
# *10 minutes, medium*
#
# How much memory does a larger k cost? The peak of a step includes more than gathered parameters. Consider the moment
# when the backward pass has computed the gradient of block j (blocks are counted from 0 in forward order). At this
# moment, a rank holds:
#
# - block j and the blocks gathered ahead, j - 1, j - 2, ..., as many as the limit allows, down to block 0;
# - `held[j]` bytes of other tensors, which do not depend on k: the shards and the optimizer state; the root and its
#   unsharded gradient; the unsharded gradients of block j and of block j + 1, whose reduction is in progress; and the
#   gradient shards of the blocks after j. (With gloo, this reduction also holds the contributions received from the
#   other ranks, which amount to (N - 1) / N of a block. NCCL needs no such memory.)
#
# The peak is the maximum of this sum over all j. Here, all blocks have the same size. Predict: by how many bytes does
# the peak rise from k = 1 to k = 2?

# %%
predict("8.8", ..., "bytes by which the peak rises from k = 1 to k = 2, blocks of 534,664 bytes on 2 ranks")


# %% tags=["exercise-8.8"]
from .ex8_largest_limit import largest_limit

# %%
at_rest = closed_form.fsdp(SIZES.units, setting)
received = [setting.reducing(block) - block // RANKS for block in blocks]  # in addition to a mean's shard, on gloo only
always = at_rest.parameters + at_rest.optimizer + 2 * root
held_at = [
    always + sum(blocks[j : j + 2]) + sum(received[j + 1 : j + 2]) + sum(blocks[j + 1 :]) // RANKS
    for j in range(len(blocks))
]
slip = "one block more is unsharded, but a block earlier in backward, when there is a gradient shard less"
outcome("8.8", usage["k = 2"].state - usage["k = 1"].state, slips={slip: blocks[0]})


def fitting(budget: int) -> str:
    try:
        return str(largest_limit(budget, blocks, held_at))
    except ValueError:
        return "none"


for k in (1, 2, 3):
    peak = usage[f"k = {k}"].state
    print(
        f"k = {k}: {peak:,} bytes measured at most; largest limit for {peak:,} bytes: {fitting(peak)}, "
        f"for {peak - 1:,}: {fitting(peak - 1)}"
    )
    assert (fitting(peak), fitting(peak - 1)) == (str(k), str(k - 1) if k > 1 else "none")

# %%
ks = list(range(1, len(blocks) + 1))
peaks = [max(held_at[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks))) / MIB for k in ks]
more = [peak - peaks[0] for peak in peaks]
last = ks[more.index(max(more))]
plots.lines(
    {"measured, 2 ranks": ([1, 2, 3], [usage[f"k = {k}"].state / MIB - peaks[0] for k in (1, 2, 3)])},
    expected={"measured, 2 ranks": (ks, more)},
    xlabel="limit k",
    ylabel="peak above that of k = 1, MiB",
    title=f"Up to k = {last}, one more unit, {blocks[0] / MIB:.3f} MiB, raises the peak by {more[1]:.3f} MiB",
    says="The ledger's peak of a step, without activations. On N ranks, it rises by 1 - 1/N of a block: with one "
    "more unsharded unit, the peak comes one block earlier in backward, when there is one gradient shard fewer. When "
    f"all {len(blocks)} blocks are gathered, no reduction is in progress yet, so the last step of k adds nothing.",
    lab="08",
)

# %% [markdown]
# ## The limiter helps only if memory is scarce
#
# ### Modelled: three of the paper's models
#
# The FSDP paper (section 5.3) compares training with and without the limiter. According to the text, the limiter makes
# T5-11B up to five times as fast, does not affect RegNet-9B, and makes DeepViT-8B 5 % slower. Figure 6(c) of the paper
# shows the seconds per batch, by which T5-11B becomes 2.23 and 3.05 times as fast:
#
# | model | machines | without the limiter | with the limiter | effect of the limiter |
# |---|---|---|---|---|
# | T5-11B | 2 | 18.61 s | 8.36 s | 2.23 times as fast |
# | T5-11B | 4 | 15.33 s | 5.02 s | 3.05 times as fast |
# | RegNet-9B | 2 | 14.80 s | 14.81 s | none |
# | RegNet-9B | 4 | 21.81 s | 21.70 s | none |
# | DeepViT-8B | 2 | 18.00 s | 18.78 s | 4 % slower |
# | DeepViT-8B | 4 | 21.64 s | 22.79 s | 5 % slower |
#
# So the figure does not show a speed-up of five. The next cell records models with the same layer shapes on 16 GPUs
# (two machines, each with a 2 Tb/s network, as in the paper), with and without your limiter, and replays them:

# %% tags=["C16"]
from minifsdp.instruments.machine.shapes import Shape


def device_of(shape: Shape, program: Any) -> Any:
    """The device for a shape's replay, with the memory that the shape specifies."""
    if shape.room is None:
        return shape.device
    need = replay(program, replace(shape.device, capacity=2**50)).peak("reserved")
    return replace(shape.device, capacity=int(shape.room * need))


print("three models are recorded and replayed, which takes about a minute\n")
factors, devices, programs = {}, {}, {}
print(f"{'model':17}{'memory':>9}{'without a limit':>22}{'k = 2':>20}{'factor':>8}")
for name in ("T5-11B-like", "RegNet-9B-like", "DeepViT-8B-like"):
    shape = SHAPES[name]
    programs[name] = {k: shape.record(partial(HeldBack, limit=k) if k else without_limiter()) for k in (None, 2)}
    devices[name] = device_of(shape, programs[name][2])
    without, with_two = (replay(program, devices[name]) for program in programs[name].values())
    factors[name] = seconds(without) / seconds(with_two)
    texts = [f"{1e3 * seconds(run):.1f} ms, {run.retries} retries" for run in (without, with_two)]
    room = f"{devices[name].capacity / GIB:.1f} GiB"
    print(f"{name:17}{room:>9}{texts[0]:>22}{texts[1]:>20}{factors[name]:8.2f}")
    print_wrapped(f"    in the paper: {shape.paper}")
    assert with_two.retries == 0
    if without.retries:
        assert factors[name] > 1.5
    else:
        assert 0.9 < factors[name] < 1.02
assert factors["DeepViT-8B-like"] < 0.99 < factors["RegNet-9B-like"]

# %% [markdown]
# The table counts retries over 6 steps. In all three cases, the direction of the effect agrees with the paper. The
# model cannot predict the size of the effect, because it omits too much and its settings were chosen to show the
# effect. For T5 and DeepViT, we chose the batch size at which the limiter matters most. (With 2 or 8 samples instead of
# 4, it makes no difference for DeepViT.) T5's device has 5 % more memory than the step needs with k = 2.
#
# - **It helps** if memory is scarce and the host runs far ahead. In this case, retries cost more than the limiter's
#   waits.
# - **It has no effect** if memory is plentiful and computing takes longer than gathering, as with RegNet: the delayed
#   gathers still finish in time.
# - **It costs time** if memory is sufficient without it and gathering takes about as long as computing, as with
#   DeepViT. The next gather is issued only after a unit has been freed on the device. If the previous gather finishes
#   earlier, the link is idle until then.
#
# For T5-11B, the next cell shows the effect of k = 1, and the quantities that determine the speed-up:

# %% tags=["C16"]
print("five more replays, about half a minute\n")
T5, T5_DEVICE = SHAPES["T5-11B-like"], devices["T5-11B-like"]
by_limit = {**programs["T5-11B-like"], 1: T5.record(partial(HeldBack, limit=1))}
roomy = replace(T5_DEVICE, capacity=2**50)
need = {k: replay(program, roomy) for k, program in by_limit.items()}
print("T5-11B-like, enough memory (model, not measured)")
for k in (1, 2, None):
    name = "no limit" if k is None else f"k = {k}"
    print(f"{name:9}{1e3 * seconds(need[k]):6.1f} ms, {need[k].peak('reserved') / GIB:5.2f} GiB reserved")
assert seconds(need[1]) > seconds(need[2]) == seconds(need[None])


def factor(room: float = T5.room, call: float = T5_DEVICE.segment[0]) -> float:
    """Return the duration of a step without a limit, divided by that with k = 2, which never retries here.

    Args:
        room: the memory of the device, divided by the memory needed with k = 2.
        call: seconds per segment, plus seconds per GiB of it.
    """
    where = replace(T5_DEVICE, capacity=int(room * need[2].peak("reserved")), segment=(call, call))
    return seconds(replay(by_limit[None], where)) / seconds(need[2])


by_call = {call: factor(call=call) for call in (0.0, 0.3e-3)} | {1e-3: factors["T5-11B-like"]}
print("factor, by the time of cudaMalloc:", ", ".join(f"{1e3 * call:.1f} ms {x:.2f}" for call, x in by_call.items()))
assert 1 <= by_call[0.0] < by_call[0.3e-3] < by_call[1e-3]
by_room = {T5.room: factors["T5-11B-like"]} | {room: factor(room) for room in (1.4, 1.7, 2.0)}
assert by_room[2.0] == 1
plots.lines(
    {"T5-11B-like": (list(by_room), list(by_room.values()))},
    xlabel="device memory, multiples of the need with k = 2",
    ylabel="time of a step, relative to k = 2",
    title=f"Without a limit, a step takes {by_room[T5.room]:.1f} times as long, but not if memory is ample",
    says="With k = 2, a step takes the same time everywhere. Mean of all steps except the first.",
    lab="08",
    model=T5_DEVICE.name,
)

# %% [markdown]
# torch uses k = 2 ("empirically chosen", according to `_limiter_utils.py`), the smallest limit that lets a gather run
# while another unit is being computed. torch does not adapt the limit to `num_alloc_retries`.
#
# ## Measured: a limit on a laptop
#
# On a laptop, you can measure a different effect: how a limit changes the speed of a deep prefetch. The next cell
# trains on 2 ranks over gloo and an emulated link (2 ms latency, 50 MB/s), always on the CPU, even if there are GPUs.
# The two schedules take turns: in each *turn*, each schedule runs one step. For each schedule, the figure also shows
# the prediction of a model of this machine, whose host does *not* run ahead. The model takes a step's computing time
# from the measurement and predicts only the *waiting time*, that is, the time that the host spends waiting for
# communication. So the cell prints two errors: the error of the predicted step time, and the error of the waiting time
# alone.


# %% tags=["nbval-ignore-output"]
from minifsdp.instruments.machine.versus import gains, versus

CLOCK = Settings(ranks=RANKS, batch=24, layers=4, context=48)
results = versus(
    CLOCK,
    {
        "prefetch without a limit": partial(bounded, None, 1),
        "your limit, k = 2": partial(bounded, 2, 1),
    },
    steps=6,
)
for name, each in results.items():
    print(
        f"{name:26}{1e3 * each.median:5.0f} ms measured,{1e3 * each.predicted:5.0f} ms predicted: {each.error:+.0%}, "
        f"of the waiting time alone {each.waiting_error:+.0%}"
    )
deep, with_two = results["prefetch without a limit"], results["your limit, k = 2"]
turns = [-share for share in gains(with_two, deep)]
print(f"k = 2 against no limit, turn by turn: {min(turns):+.0%} to {max(turns):+.0%} of a step")
said = "slower in every turn" if min(turns) > 0 else "faster in every turn" if max(turns) < 0 else "within the scatter"
plots.versus(
    results,
    title=f"A step takes {1e3 * with_two.median:.0f} ms with k = 2, {1e3 * deep.median:.0f} ms without a limit: {said}",
    says="Median of the measured steps, and the prediction of the model of this machine. It ignores the CPU time that "
    "gloo's real collectives take from the computation, and the time to wake up after a wait.",
    lab="08",
)

# %%
sizes = sizes_of(CLOCK.model()).units
for name, limit in (("prefetch without a limit", None), ("your limit, k = 2", 2)):
    whole = closed_form.fsdp(sizes, setting, reductions=1, limit=limit, **ahead).unsharded_peak
    print(f"{name:26}{whole / MIB:5.2f} MiB of gathered parameters at most")

# %% [markdown]
# On a laptop, the limiter saves the memory that a deep prefetch would use. The line above the figure gives the smallest
# and the largest effect on speed in any turn. If this range includes zero, the measurement is inconclusive, and the
# title says so. On a busy machine, the range is wide. On a GPU, the limiter saves the memory that would be used because
# the host runs ahead. In both cases, two unsharded units are enough: one that is being computed and one that is being
# gathered.

# %% tags=["nbval-ignore-output"]
show_record(
    "08",
    says="""
The record shows the bytes of its allocator over a step of the ladder's rungs: `fsdp-prefetch` has no limit,
and `fsdp-limit` has a limit of k. Compare it with your measurements: does the limit lower `allocated` as much as
it lowers the ledger's curve? Compare it with the simulated GPU: how far above `allocated` are `active` and
`reserved`, without a limit and with one? (The ladder's model is small: its host may not be far ahead of the
device, and then little memory waits for an event.)
""",
)

# %% [markdown]
# ## FSDP2 has no limiter
#
# With `record_stream`, memory becomes available only when the allocator next polls the events. FSDP2 (`fully_shard`)
# does not use `record_stream`. It keeps a *reference* to a gathered buffer until every operation that reads the buffer
# has been issued. Before dropping the reference, FSDP2 makes the gather streams wait for an event recorded after the
# last such operation (`torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`). Any later work on this memory in
# those streams therefore runs after the event. So when the host frees the block, the block returns directly to the pool
# of its own stream, however far ahead the host is. Memory use is the same in every step, and no limiter is needed.
#
# ## What is still missing
#
# - `expandable_segments:True` lets a segment grow and thereby avoids most fragmentation within a stream. It does not
#   help with blocks that are waiting for an event.
# - A limit counts units, not bytes. If units differ in size, choose the limit as in 8.8.
# - Results marked "model" were not measured on a GPU.
#
# ## What to remember
#
# 1. `allocated` counts the bytes that the program holds. `active` also counts freed memory that a stream may still
#    read. `reserved` counts all memory taken from the device. When the host runs ahead, freed memory waits for the
#    device, and `active` rises above `allocated`.
# 2. A freed block belongs to its stream. If other streams were recorded on it, the block becomes available only once
#    the events recorded on those streams when it was freed have completed.
# 3. A retry waits for the device, releases the cached memory and allocates again. In the meantime, the device is idle.
# 4. The limiter makes the host wait for the oldest of k frees. When a gather is issued, the device is still using at
#    most k - 1 freed units. With k = 2, one unit is being computed while the next one arrives.
# 5. The limiter counts only frees that have been issued. If the host waited for a free that it had not issued yet, it
#    would wait forever.
#
# ## More: the fastest schedule in 8 GiB
#
# *20 to 40 minutes, not counted in the lab's time*
#
# This is an open-ended task without a reference answer. The model resembles T5-11B and runs on 16 simulated GPUs, on
# which gathering takes about as long as computing. Write the fastest possible schedule with which the allocator
# reserves at most 8 GiB. A hazard (a kernel that reads data before it arrives) disqualifies the schedule.
#
# A schedule is a class whose methods are called at the following points of a step. You may override any of them:
#
# | method | called |
# |---|---|
# | `begin_forward()` | when a step begins: makes the gathers wait for the optimizer |
# | `pre_forward(unit)` | before a unit's forward pass: gathers it and prefetches others, then waits for its gather |
# | `post_forward(unit, backward_follows)` | after a unit's forward pass: frees the unit unless it is the root |
# | `begin_backward(units)` | when the backward pass begins, with the units in forward order |
# | `pre_backward(unit)` | before a unit's backward pass: as `pre_forward`; also issues any reduction that is due |
# | `post_backward(unit)` | when a unit's gradient is complete: frees the unit, then calls `reduce(unit)` |
# | `end_backward()` | when all gradients are complete: waits for all reductions |
# | `end_forward()` | after a forward pass under `torch.no_grad()`, so never in a training step |
#
# These methods call `gather(unit)`, `free(unit)`, `prefetch(units)` (with the units in order of use), `reduce(unit)`
# and `issue_reduction()`, which you may also override. Call `super()`'s method unless you replace it. The base classes
# keep their state in attributes such as `order`, `seen`, `ahead`, `whole`, `deferred`, `frees`, `due` and `reducing`,
# so choose other names for your own attributes.
#
# To keep a unit unsharded from its forward to its backward pass, return early from `post_forward` for that unit, before
# it is freed. `self.units` lists the units: first the root, then the blocks in forward order. Free every unit after its
# backward pass. A unit that is never freed is not gathered in the next step, and computes with the parameters from
# before the optimizer step. You can start from this schedule:

# %% tags=["shown"]
from minifsdp.course.workshop.scores import enter
from minifsdp.fsdp import RateLimitedSchedule


class MySchedule(RateLimitedSchedule):
    """Gather two units ahead in backward and one in forward? Reduce later? Keep the last block unsharded? You
    decide."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units, forward=True, depth=1, limit=2)


enter("my schedule", MySchedule)

# %% [markdown]
# With torch's defaults, a step takes 66.4 ms, and the allocator reserves 7.48 GiB. With prefetching two units ahead and
# k = 3, a step takes 63.5 ms, but the allocator reserves 9.23 GiB. In both schedules, the gathers and reductions keep
# the link busy for 59.0 ms, so a step cannot take less time. The bound is lower for a schedule with fewer gathers, and
# is printed with its result. `minifsdp lab score 08` shows the table of your attempts.
#
# ## Questions
#
# **1. `reserved` is twice `allocated`, and `num_alloc_retries` is 0. Is this a problem?**
#
# <details><summary>Answer</summary>
#
# No. Cached memory costs nothing unless something else needs it, such as a second process on the same device, or a
# library that allocates directly from the driver, as NCCL does. Only retries cost time.
# </details>
#
# **2. Calling `torch.cuda.empty_cache()` in every step eliminates the retries. Why is this not a solution?**
#
# <details><summary>Answer</summary>
#
# It does the work of a retry in every step: it waits for the device and releases segments, which must then be allocated
# again. Moreover, it can release only segments that are entirely free.
# </details>
#
# **3. What does a limiter with k = 1 do to prefetching?**
#
# <details><summary>Answer</summary>
#
# It disables prefetching. The next gather is issued only when the previous unit has been computed and freed. Compute
# and communication take turns, and memory use is the same as with the synchronous schedule.
# </details>
#
# **4. All ranks run the same program, and one rank has a retry. What do the other ranks do?**
#
# <details><summary>Answer</summary>
#
# They wait for that rank in the next collective. A retry on one of 128 GPUs stalls all of them.
# </details>
#
# **5. With SHARD_GRAD_OP, what does the limiter do?**
#
# <details><summary>Answer</summary>
#
# In this lab, it has no effect: units are not freed after their forward pass, so their frees do not count. All units
# are unsharded at the end of the forward pass anyway. torch, however, counts the frees in the backward pass, so the
# host waits for some of them in the next forward pass.
# </details>
#
# **6. Why must the event in 8.3 be recorded when the block is freed, and not when `record_stream` is called?**
#
# <details><summary>Answer</summary>
#
# Between the call and the free, more kernels that read the block may be queued on the stream. An event recorded during
# the call would complete before those kernels run.
# </details>
#
# ## Further reading
#
# - FSDP: [arXiv 2304.11277](https://arxiv.org/abs/2304.11277), sections 3.4 (memory) and 5.3, figure 7b.
# - torch: `c10/cuda/CUDACachingAllocator.cpp` (`malloc`, `free_block`, `process_events`, `release_cached_blocks`),
#   `torch/distributed/fsdp/_limiter_utils.py`, `_unshard` and `_reshard` in `_runtime_utils.py`.
# - [FSDP & CUDACachingAllocator](https://dev-discuss.pytorch.org/t/1486): the same topic on
#   torch's developer forum.
# - minifsdp: `fsdp/schedules/rate_limit.py` (8.6 and 8.7 for every model), `instruments/machine/allocator.py` (8.1 to
#   8.5 with torch's pools).
