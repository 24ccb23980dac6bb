# ---
# jupyter:
#   minifsdp:
#     lab: "06"
#     title: Overlap
#     minutes: 75
#     ranks: 2
# ---

# %% [markdown]
# # Lab 06: overlap
#
# The FSDP of lab 05 waits for every message. While the link is busy, nothing is computed, and while a unit is being
# computed, the link is idle. The step time is therefore the compute time **plus** the communication time. In this lab,
# communication runs on its own streams and overlaps with compute as far as the issue order allows.
#
# ![Compute and communication of one step, each on its own stream](../slides/figures/overlap-step.svg)
#
# *From [lecture 4, Overlap, prefetch, rate limit, and the allocator](../slides/overlap.md), which comes before this
# lab.*
#
# **After this lab, you will be able to**
#
# - compute when an operation starts on a device whose host runs ahead, given the streams, the events and the launch
#   time per operation;
# - overlap a gather and a reduction with compute, and name the point at which compute has to wait for each of them;
# - find a missing wait in a log, and explain why it raises no error;
# - free memory that a queued kernel has not read yet, without blocking the host or a stream;
# - predict the gain from overlap on a GPU, and explain why the same issue order saves almost nothing on a CPU.
#
# **You need** lab 05 (gather, free and reduce-scatter, and what a schedule decides). Streams and events are explained
# here.
#
# **Time** 75 minutes. **Runs** on a laptop (gloo, 2 processes), on one GPU that the ranks share
# (`MINIFSDP_SHARE_GPU=1`), or on a GPU node (NCCL, one rank per GPU). **Memory** a few tens of MiB of tensors per rank;
# each process takes a few hundred MiB, mostly for torch itself. On a GPU, one cell trains a larger model.

# %% tags=["setup"]
# set-up
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.flat_param import FlatParameter

# %% [markdown]
# ## Who waits for whom
#
# Your program does not run on the GPU. It runs on the CPU, the **host**, and puts *kernels* (one operation each, such
# as a matmul or an addition) into queues, which the GPU processes. The host needs a few microseconds to launch a
# kernel, however long the kernel runs, so it is soon far ahead of the GPU.
#
# - A **stream** is such a queue: first in, first out. Two streams run concurrently.
# - An **event** is a marker that the host records in a stream's queue. It is *complete* when the stream has reached it.
# - **A stream waits for an event**: everything queued on the stream afterwards starts only once the event is complete.
#   The host queues this wait as well, and continues.
# - **The host waits** (`synchronize`): it issues nothing more until the event is complete. It also waits whenever it
#   needs a value from the device, as in `loss.item()`.
#
# By default, PyTorch computes on a single stream, the *compute stream*. NCCL's collectives, if issued with
# `async_op=True` as here, run one after another on a stream of their communicator, in issue order. A collective starts
# when the stream on which it was *issued* reaches that point; `handle.wait()` makes the stream on which it is *called*
# wait for the collective. With gloo on a CPU, the host itself waits. Your observations therefore depend on your setup:
#
# | setup | `wait()` blocks | what runs ahead | a timeline shows | its times represent |
# |---|---|---|---|---|
# | laptop, gloo | the host | nothing | operations, waits, collectives | this CPU and an emulated link |
# | two ranks on one GPU, NCCL | the stream | the host | kernels | nothing real: see below |
# | a GPU for each rank, NCCL | the stream | the host | kernels | these GPUs and their links |
#
# On the laptop, the host itself computes, and other threads carry the messages. On a shared GPU, the streams, the
# events and the order of kernels are real, but the ranks take turns on the GPU and communicate over sockets, so you
# cannot measure the *gain* from overlap there. Some parts are the same in every setup: programs for the simulated GPU
# are recorded on the CPU, and cells that call `versus` run their ranks over gloo on the CPU. Everything else runs in
# your setup.
#
# ## 6.1 When does each piece finish?
#
# *10 minutes, medium*
#
# A dozen lines of code can implement these rules. First, make a prediction. The host queues the following five
# operations (each a `Piece` in the code) in this order. It needs 0.5 ms to queue each of them, including the first:
#
# | number | stream | duration | waits for |
# |---|---|---|---|
# | 0, gather of unit 0 | link | 2 ms | |
# | 1, compute unit 0 | compute | 3 ms | 0 |
# | 2, gather of unit 1 | link | 2 ms | |
# | 3, compute unit 1 | compute | 3 ms | 2 |
# | 4, the loss | compute | 1 ms | |

# %%
predict("6.1", ..., "ms until the last of the five is over")


# %% tags=["shown"]
class Piece(NamedTuple):
    """A piece of work that the host queues.

    Attributes:
        stream: the stream on which the piece is queued.
        seconds: how long it takes.
        after: the numbers of earlier pieces. Before starting this piece, its stream waits for an event behind each of
            them.
        host_waits: whether the host waits until this piece has finished before it issues the next one.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    host_waits: bool = False


# %% tags=["exercise-6.1"]
from .ex1_finish_times import finish_times

# %%
FIVE = [
    Piece("link", 2e-3),
    Piece("compute", 3e-3, after=(0,)),
    Piece("link", 2e-3),
    Piece("compute", 3e-3, after=(2,)),
    Piece("compute", 1e-3),
]
slips = {
    "one after the other": 11.0,
    "compute alone: nothing hides the first gather": 7.0,
    "the host first has to queue number 0": 9.0,
    "gather 1 waits for nothing: the link is free": 11.5,
}
outcome("6.1", round(1e3 * finish_times(FIVE, 0.5e-3)[-1], 3), how="computed", slips=slips)

# %% [markdown]
# Now apply your function to the forward pass of six units. The kernels and collectives are the same in the following
# three settings:
#
# - **lab 05 on a GPU**: everything is issued on one stream, so a gather starts only when all earlier compute has
#   finished;
# - **two streams on a GPU**: a gather starts when the link is free, and each unit's compute waits for that unit's
#   gather;
# - **two streams on a CPU**: as before, but the host itself computes. While it computes, it issues nothing, as if it
#   waited for every kernel.
#
# Predict: in which two settings does the forward pass take the same time?

# %%
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from minifsdp import FullyShardedDataParallel
from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings, align, take_step
from minifsdp.course.ladder.rungs import LEARNING_RATE, Trainer, closed_form_setting, sizes_of
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.flat_param import find_parameters
from minifsdp.fsdp import SyncSchedule
from minifsdp.fsdp.unit import Unit
from minifsdp.gpt import Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.machine import A100, Program, Recorder, Run, record_on_paper, replay
from minifsdp.instruments.machine.program import Issue, Kernel, Record, Wait, WaitEvent
from minifsdp.instruments.machine.versus import gains, versus
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.records import show_record
from minifsdp.instruments.watch.timeline import Span, overlap, read_trace
from minifsdp.instruments.watch.trace import record_trace

MIB = 2**20
LANES = {"link": "communication", "compute": "compute"}


def forward(units: int, one_stream: bool = False, host_computes: bool = False) -> list[Piece]:
    """Queue the gather (2 ms) and the compute (3 ms) of each unit."""
    queued: list[Piece] = []
    for unit in range(units):
        behind = (len(queued) - 1,) if one_stream and unit else ()
        queued.append(Piece("link", 2e-3, behind))
        queued.append(Piece("compute", 3e-3, (len(queued) - 1,), host_waits=host_computes))
    return queued


def as_spans(queued: list[Piece]) -> list[Span]:
    ends = finish_times(queued, launch=0.01e-3)
    spans = []
    for number, (piece, end) in enumerate(zip(queued, ends, strict=True)):
        name = f"all_gather {number // 2}" if piece.stream == "link" else f"{number // 2}"
        spans.append(Span(LANES[piece.stream], name, end - piece.seconds, piece.seconds))
    return spans


shown = {
    "lab 05 on a GPU": as_spans(forward(6, one_stream=True)),
    "two streams on a GPU": as_spans(forward(6)),
    "two streams on a CPU": as_spans(forward(6, host_computes=True)),
}
plots.timeline(
    shown,
    title="Two streams hide five of six gathers if the host runs ahead, none if it computes",
    says="Forward of six units, timed by your finish_times: each unit needs a gather of 2 ms and 3 ms of compute. Only "
    "the first gather has nothing to hide under.",
    lab="06",
    model="finish_times",
)

# %% [markdown]
# `minifsdp.instruments.machine` is a full version of your function. A `Recorder` logs every request that a real
# training step makes to its device: kernels with their FLOPs and bytes, collectives, waits, allocations and frees, each
# with its stream. Then `replay` computes when each request would run on given hardware. This lab uses the model
# wherever a laptop cannot measure an effect, and every such figure is labelled *model, not measured*. The model ignores
# jitter on the host, the mutual slowdown of kernels and collectives, and the multiprocessors occupied by NCCL.
#
# ## 6.2 Order two streams
#
# *5 minutes, easy*
#
# Two streams are always ordered in the same way: one records an event, and the other waits for it. On CUDA, these are
# torch's streams and events. On a CPU, a stream is only a name, and a wait does nothing. Still, every function in
# `device.command_observers` is called with each command that a GPU would receive. The recorder and the checks in this
# lab rely on these calls.
#
# Predict: `giver` has 40 ms of work queued. For how many milliseconds does `order_streams` block the host?

# %%
predict("6.2", ..., "ms for which the host waits in order_streams")


# %% tags=["exercise-6.2"]
from .ex2_order_streams import order_streams

# %%
CPU = torch.device("cpu")


@contextmanager
def asked_of_the_device(names: Mapping[Any, str]) -> Iterator[list[str]]:
    """Collect the commands that streams and the host receive inside the `with`."""
    said: list[str] = []

    def listen(command: device.Command) -> None:
        said.append(f"{names.get(command.stream, 'the host')}: {command.verb}")

    device.command_observers.append(listen)
    yield said
    device.command_observers.remove(listen)


link_stream, compute_stream = device.new_stream(CPU), device.current_stream(CPU)
with asked_of_the_device({link_stream: "link", compute_stream: "compute"}) as said:
    order_streams(link_stream, compute_stream)
print(*said, sep="\n")
stands = 40 * sum("the host" in each for each in said)
slips = {"that would be `synchronize`, and the end of all running ahead": 40}
outcome("6.2", stands, how="computed", slips=slips)

# %% [markdown]
# ## 6.3 Gather on the communication stream
#
# *8 minutes, medium*
#
# This is lab 05's gather, on its own stream and without the final wait. It performs two operations, and *both* belong
# on that stream: the collective, which starts when the stream reaches it, and the allocation. The allocator keeps a
# separate pool of memory for each stream. A freed block can be reused on its own stream immediately, because its last
# user comes earlier in the same queue. A block from the compute stream's pool, by contrast, may still be in use by
# compute when the gather writes to it.
#
# The gather reads this rank's shard, which the optimizer has written on the compute stream. One wait per step, before
# the first gather, is enough to order the two streams (with your function from 6.2). That wait does not belong in
# `gather`: a gather that waited for all previously queued compute would not overlap with anything.
#
# The cell below runs your function on a worst-case link: no data arrives until something waits for it, and until then,
# the buffer contains NaN. Predict: how many elements of `flat.full` are correct when your function returns?

# %%
predict("6.3", ..., "elements of a block's `flat.full` that are correct when gather returns")


# %% tags=["exercise-6.3"]
from .ex3_gather import gather

# %%
RANKS = 2
SETTINGS = Settings(ranks=RANKS, batch=2, layers=5, width=105, context=16)
BATCHES = list(SETTINGS.batches())
SIZES = sizes_of(SETTINGS.model())


class LastMoment:
    """A link on which no data arrives until something waits for it; until then, gathered buffers hold NaN."""

    def submit(self, call: comm.Call, collective: partial[Any]) -> Any:
        if call.op == "all_gather":
            output = collective.args[0]
            output.fill_(torch.nan)
            device.synchronize(output.device)  # on a GPU, fill_ is a kernel and could run after the data arrives
        return SimpleNamespace(wait=cache(lambda: collective().wait()))


@contextmanager
def carried_by(link: Any) -> Iterator[None]:
    comm.link = link
    yield
    comm.link = None


def gather_a_block() -> tuple[int, bool]:
    """Return how many elements are right when `gather` returns, and whether all are right after the wait."""
    where, group = rank_device(), comm.world()
    block = SETTINGS.model().to(where).blocks[0]
    whole = torch.cat([p.detach().flatten() for p in block.parameters()])
    flat = FlatParameter(find_parameters(block), group.rank(), group.size())
    stream = device.new_stream(where)
    order_streams(device.current_stream(where), stream)
    with carried_by(LastMoment()):
        handle = gather(flat, group, stream)
        order_streams(stream, device.current_stream(where))
        right = int((flat.full[: flat.numel] == whole).sum())
        handle.wait()
        return right, torch.equal(flat.full[: flat.numel], whole)


(right, after), *_ = launch(gather_a_block, RANKS)
block_elements = sum(SIZES.units[1])
slips = {"this rank's own shard: the collective brings it, too": -(-block_elements // RANKS)}
outcome("6.3", right, ranks=RANKS, slips=slips)
print(
    f"{right} of {block_elements:,} elements are correct when gather returns; all of them after handle.wait(): {after}"
)
assert after

# %% [markdown]
# A missing `wait()` on a handle is the typical bug in this lab. It raises no error: the shapes are correct, the memory
# is allocated, and the values may look correct. With gloo, there is a race between the host and gloo's threads; with
# NCCL, there is a race between two streams.
#
# ## 6.4 Find the missing wait
#
# *15 minutes, hard*
#
# The values do not reveal such a bug, but the issue order does. The log used here has one line for each action of the
# host:
#
# | verb | object | stream | meaning |
# |---|---|---|---|
# | `gather` | unit | the issuing stream | from here on, the gather is in progress; the stream itself does not wait |
# | `wait` | unit | the waiting stream | it waits for the unit's most recent gather |
# | `record` | event | the recording stream | the event covers all gathers that the stream is *ordered after* |
# | `wait event` | event | the waiting stream | it waits for the event's last `record` and inherits its gathers |
# | `read` | unit | the kernel's stream | a kernel computes with the unit's parameters |
#
# A stream is *ordered after* a gather if it has waited for that gather itself, or for an event recorded on a stream
# that was already ordered after that gather. A wait covers only one gather: the next gather of the same unit needs
# another wait.


# %%
class Did(NamedTuple):
    verb: str
    what: str
    stream: str


# %% tags=["exercise-6.4"]
from .ex4_missing_waits import missing_waits

# %% tags=["shown"]
log = [
    Did("gather", "block 0", "link"),
    Did("gather", "block 1", "link"),
    Did("wait", "block 0", "compute"),
    Did("read", "block 0", "compute"),
    Did("read", "block 1", "compute"),
    Did("wait", "block 1", "compute"),
    Did("read", "block 1", "compute"),
    Did("record", "e", "compute"),
    Did("wait event", "e", "side"),
    Did("read", "block 1", "side"),
    Did("gather", "block 0", "link"),
    Did("read", "block 0", "compute"),
]
for number in missing_waits(log):
    print(f"line {number}: {log[number].stream} reads {log[number].what} too early")

# %% [markdown]
# `torch.cuda._sanitizer` performs this check for every tensor of a program. Instead of sets of gathers, each stream
# keeps a *vector clock*: for every other stream, a number that records how far that stream is known to have progressed.
# `minifsdp/instruments/machine/hazards.py` uses the same method.
#
# ## 6.5 Free without stopping
#
# *8 minutes, medium*
#
# The host frees a unit once it has *issued* the unit's last kernel. That kernel still has to read the unit's memory,
# and may run as much as a second later. If the host waited for the kernel, it could not run ahead. So the allocator
# must know which streams are still reading the memory. It knows the stream on which the memory was allocated; every
# other stream that reads it must be recorded before the memory is freed:
#
#     device.record_stream(buffer)        # the *current* stream uses this buffer; torch: Tensor.record_stream
#
# When the memory is freed, the allocator records an event on each recorded stream, and reuses the memory only after
# these events have completed.
#
# In the cell below, a 12 MiB buffer is "gathered" on the link's stream and summed on the compute stream. The sum takes
# a long time. The host frees the buffer immediately and allocates the next one, also of 12 MiB. The result of the sum
# takes 2 MiB, the smallest amount that the allocator requests from the device. Predict: how many MiB does the allocator
# request in total?

# %%
predict("6.5", ..., "MiB reserved: two gathers of 12 MiB, the first freed while it is read, and 2 MiB")


# %% tags=["exercise-6.5"]
from .ex5_free import free

# %%
SMALL = replace(
    A100,
    name="a GPU of 40 GFLOP/s on a link of 250 MB/s",
    flops={4: 40e9},
    memory_bandwidth=4e9,
    latency=0.2e-3,
    bandwidth=0.25e9,
    launch=2e-6,
    issue=10e-6,
    segment=(0.0, 0.0),
)


def refill(free: Callable[[Tensor, list[Any]], None]) -> Run:
    """Write a buffer, read it on another stream, free it, write the next; record this on a CPU, and replay it."""
    numel = 12 * MIB // 4
    with Recorder() as recorder:
        link, compute = device.new_stream(CPU), device.current_stream(CPU)
        with device.on_stream(link):
            first = device.empty(numel, torch.float32, "unsharded", CPU).fill_(1.0)
        order_streams(link, compute)
        first.sum()
        free(first, [compute])
        with device.on_stream(link):
            device.empty(numel, torch.float32, "unsharded", CPU).fill_(2.0)
    program = recorder.program()
    gathers = [number for number, buffer in program.buffers.items() if buffer.tag == "unsharded"]
    for number, name in zip(gathers, ("the first gather", "the second gather"), strict=True):
        program.buffers[number] = program.buffers[number]._replace(name=name)
    return replay(program, SMALL)


def without_record_stream(buffer: Tensor, readers: list[Any]) -> None:
    buffer.untyped_storage().resize_(0)


run = refill(free)
slips = {"the freed memory is handed out under the kernel that reads it": 14}
outcome("6.5", run.peak("reserved") // MIB, how="model", slips=slips)
print("stream 1 is the link's")
for name, each in (("yours", run), ("without record_stream", refill(without_record_stream))):
    hazards = [f"{hazard.kind}: {hazard.text}" for hazard in each.hazards]
    print_wrapped(
        f"{name}: {each.peak('reserved') // MIB} MiB reserved; {'; '.join(hazards) or 'nothing is overwritten'}"
    )
assert not run.hazards, "the next gather is written over what compute still reads: the allocator was not told"

# %% [markdown]
# Freed memory is not necessarily available yet. The farther the host runs ahead, the more memory is freed but not yet
# available; this is the subject of lab 08.
#
# ## 6.6 Reduce on its own stream
#
# *10 minutes, medium*
#
# Suppose that the host has issued all kernels for a unit's gradient and has freed the unit's parameters. Next, the host
# issues the reduction. The reduction reads the gradient, which the compute stream is still writing, so the two streams
# must be ordered. The rest of the backward pass does not read the result, so it does not have to wait for the
# reduction. What does have to wait, and when?
#
# - The optimizer waits for it, at the end of the backward pass.
# - The next reduction waits for it, so that only one unsharded gradient is held at a time. (This limit holds in the
#   order in which the host issues the work; on a CPU, there is no other order. On a GPU, the memory of a freed gradient
#   becomes available only once its event has completed, so several gradients may still occupy memory.)
#
# `unit.wait_reduce()` does more than wait: on the current stream, it also adds the mean to the shard's `.grad` and
# frees the unsharded gradient. Therefore, this call belongs on the reduction stream, too.
#
# Make a prediction for the lab's model (5 blocks of 133,665 elements, 2 ranks): at the peak of a step, how many more
# bytes does a rank hold than in lab 05, where the host waited for each reduction immediately? In lab 05, the peak
# occurred when the gradient of block 0, the last block in the backward pass, was complete and the block's parameters
# had not yet been freed. With gloo, also count the receive buffers of a reduction in progress: they hold the other
# ranks' contributions, which amount to (N - 1) / N of a block. NCCL needs no such memory.

# %%
predict("6.6", ..., "bytes more at the peak of a step than without overlap, 2 ranks")


# %%
from collections.abc import Callable


class Reducing(NamedTuple):
    """The methods of a unit that 6.6 may use; the real class is `minifsdp.fsdp.unit.Unit`."""

    device: torch.device
    start_reduce: Callable[[], None]
    wait_reduce: Callable[[], None]


# %% tags=["exercise-6.6"]
from .ex6_start_reduction import start_reduction

# %% [markdown]
# ## The schedule
#
# In minifsdp, a unit knows *how* to allocate, gather, free and reduce, and a schedule decides *when*. In this lab, the
# units use your functions, and the schedule is a `SyncSchedule` with four changes. The rest of `SyncSchedule` stays the
# same: before a unit is computed, `pre_forward` and `pre_backward` issue its gather and wait for it on the compute
# stream.


# %%
class Pieces(NamedTuple):
    """The functions of this lab from which a schedule is built."""

    order_streams: Callable[[Any, Any], None]
    gather: Callable[[FlatParameter, Group, Any], Handle]
    free: Callable[[Tensor, list[Any]], None]
    start_reduction: Callable[[Any, Any, list[Any]], None]


PIECES = Pieces(order_streams, gather, free, start_reduction)


class LabOverlap(SyncSchedule):
    """Gathers and reductions on streams of their own."""

    def __init__(self, units: list[Unit], pieces: Pieces) -> None:
        super().__init__(units)
        self.pieces, self.where = pieces, units[0].device
        self.gathers, self.reductions = device.new_stream(self.where), device.new_stream(self.where)
        self.under_way: list[Unit] = []
        for unit in units:
            unit._gather = partial(pieces.gather, unit.flat, unit.group, self.gathers)
            unit._release = partial(self.release, unit)

    @property
    def compute(self) -> Any:
        return device.current_stream(self.where)

    def release(self, unit: Unit) -> None:
        self.pieces.free(unit.flat.full, [self.compute])

    def begin_forward(self) -> None:
        self.pieces.order_streams(self.compute, self.gathers)  # the optimizer has written the shards

    def reduce(self, unit: Unit) -> None:
        self.pieces.start_reduction(unit, self.reductions, self.under_way)

    def end_backward(self) -> None:
        with device.on_stream(self.reductions):
            while self.under_way:
                self.under_way.pop().wait_reduce()
        self.pieces.order_streams(self.reductions, self.compute)  # the optimizer reads the shards' gradients


yours = partial(LabOverlap, pieces=PIECES)


def build(schedule: Any, paper: Group | None = None, settings: Settings = SETTINGS) -> Trainer:
    """Build the lab's model on all ranks, or on a paper group, where tensors have no values."""
    model = settings.model().to(rank_device()) if paper is None else settings.model()
    model = FullyShardedDataParallel(model, paper, auto_wrap_policy={Block}, schedule=schedule)
    return Trainer(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, foreach=False))


# %% [markdown]
# ### Measured: the same losses, and one more gradient in memory at the peak
#
# The computation is unchanged, so every rank's losses are bitwise equal to those of lab 05's schedule. Memory use is
# slightly higher. (The ledger counts allocations and frees in the host's order. On a GPU, freed memory may still be in
# use; the simulated GPU below counts that memory, too.)


# %%
def train_and_measure(schedules: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each schedule, return this rank's losses in four steps, and its bytes in the second of two further steps."""
    where = rank_device()
    shards = [data.shard(batch, dist.get_rank(), RANKS) for batch in BATCHES[:4]]
    found = {}
    for name, schedule in schedules.items():
        trainer = build(schedule)
        losses = [take_step(trainer, batch, where).item() for batch in shards]
        with Ledger() as ledger:
            trainer = build(schedule)
            ledger.watch(trainer.model, trainer.optimizer)
            take_step(trainer, shards[0], where)
            ledger.reset_peaks()
            stages: dict[str, dict[str, int]] = {}
            loss = trainer.model(*(part.to(where) for part in shards[1]))
            stages["forward"] = ledger.mark("forward")
            loss.backward()
            stages["peak"] = ledger.peak.tags
            stages["backward"] = ledger.mark("backward")
            found[name] = {
                "losses": losses,
                "stages": stages,
                "unsharded": ledger.peak_of("unsharded"),
                "gradients": ledger.peak_of("gradients", "communication"),
            }
    return found


ranks = launch(train_and_measure, RANKS, {"lab 05": SyncSchedule, "yours": yours})
for rank, found in enumerate(ranks):
    same = found["yours"]["losses"] == found["lab 05"]["losses"]
    print(f"rank {rank}: losses {[round(loss, 4) for loss in found['yours']['losses']]}, equal to lab 05's: {same}")
    assert same, "overlap has changed the values: something is read before it is there"

sync, mine = ranks[0]["lab 05"], ranks[0]["yours"]
setting = closed_form_setting(RANKS)
held = {name: closed_form.fsdp(SIZES.units, setting, reductions=k) for name, k in (("lab 05", 0), ("yours", 1))}
for name in held:
    expected = (held[name].unsharded_peak, held[name].gradients_peak)
    measured = (ranks[0][name]["unsharded"], ranks[0][name]["gradients"])
    print_wrapped(
        f"{name:7} unsharded at most: predicted {expected[0]:,}, measured {measured[0]:,}; gradients at most: "
        f"predicted {expected[1]:,}, measured {measured[1]:,}"
    )
    assert measured == expected
totals = {stage: sum(tags.values()) for stage, tags in sync["stages"].items()}
more = sum(mine["stages"]["peak"].values()) - totals["peak"]
gradient = setting.padded(block_elements)
received = setting.reducing(gradient) - gradient // RANKS  # in addition to the mean's shard, on gloo only
slips = {
    "the gradient's shard; the whole gradient has to stay until the reduction has read it": gradient // RANKS,
    "on gloo what its reduction receives comes on top": gradient,
}
outcome("6.6", more, ranks=RANKS, slips=slips)

# %%
peak = totals["peak"] + gradient + received
plots.stages(
    mine["stages"],
    predicted={"peak": peak},
    earlier={"lab 05": totals},
    title=f"A reduction in progress adds {more / MIB:.2f} MiB: a block's gradient"
    + (" and the bytes it receives" if received else ""),
    says="Bytes of a rank after forward, at the peak of the step, and after backward. Predicted: lab 05's peak, one "
    "block's unsharded gradient and, on gloo, what the reduction receives.",
    lab="06",
)

# %% [markdown]
# ## Break it: a wait that comes too late
#
# The cell below moves one line: in the forward pass, the wait for block 2's gather now comes after the block's
# computation. Both the changed and the unchanged schedule run on the worst-case link.


# %%
class LateWait(LabOverlap):
    """A schedule in which block 2 computes first and waits for its gather afterwards, in the forward pass."""

    def pre_forward(self, unit: Unit) -> None:
        self.gather(unit)
        if unit is self.units[3]:  # the root is the first
            self.handle, unit._gathering = unit._gathering, SimpleNamespace(wait=lambda: None)
        unit.wait_gather()

    def post_forward(self, unit: Unit, backward_follows: bool) -> None:
        if unit is self.units[3]:
            self.handle.wait()
        super().post_forward(unit, backward_follows)


late = partial(LateWait, pieces=PIECES)


def losses(schedule: Any, link: Any) -> list[float]:
    """Return this rank's losses in four steps, as measured above."""
    with carried_by(link):
        trainer = build(schedule)
        shards = [data.shard(batch, dist.get_rank(), RANKS) for batch in BATCHES[:4]]
        return [round(take_step(trainer, shard, rank_device()).item(), 4) for shard in shards]


def losses_of_both() -> list[list[float]]:
    return [losses(late, None), losses(late, LastMoment()), losses(yours, LastMoment())]


plausible, wrong, right = launch(losses_of_both, RANKS)[0]
print_wrapped(f"gathers completed as late as possible: yours {right}; with the late wait {wrong}")
assert right == [round(loss, 4) for loss in mine["losses"]]

# %% tags=["nbval-ignore-output"]
print(f"gathers completed as usual: with the late wait {plausible}")

# %% [markdown]
# The loss is NaN because the emulated link fills memory with NaN until the data arrives. On a real link, block 2 would
# compute with the current contents of its memory, which may be part of the gathered data or older values. The loss
# could then be correct, wrong but plausible, or NaN, and could differ from run to run. So check the order, not the
# values. The next cell translates the recorded program of one rank into the notation of 6.4. It compares the findings
# of your detector with those of the simulated GPU, which checks every buffer.


# %%
def batch() -> data.Batch:
    """Return one rank's rows; only their sizes matter in a recording."""
    tokens = torch.zeros(12, SETTINGS.context, dtype=torch.long)
    return tokens, tokens


def program_of(schedule: Any) -> Program:
    """Record what rank 0 requests of its device in two steps."""
    return record_on_paper(partial(build, schedule), batch, RANKS)


def log_of(program: Program) -> list[Did]:
    """Translate the program into the notation of 6.4."""
    log, gathers = [], {}
    for each in program.instructions:
        match each:
            case Issue(call, unit, stream) if call.op == "all_gather":
                gathers[call.order] = unit
                log.append(Did("gather", unit, str(stream)))
            case Wait(call, stream) if call.order in gathers:
                log.append(Did("wait", gathers[call.order], str(stream)))
            case Record(event, stream):
                log.append(Did("record", str(event), str(stream)))
            case WaitEvent(event, stream):
                log.append(Did("wait event", str(event), str(stream)))
            case Kernel(_, _, stream, reads):
                for name in [program.buffers[buffer].name for buffer in reads]:
                    if name.endswith(" parameters"):
                        log.append(Did("read", name.removesuffix(" parameters"), str(stream)))
    return log


programs = {"yours": program_of(yours), "late wait": program_of(late)}
for name, program in programs.items():
    log = log_of(program)
    units = sorted({log[number].what for number in missing_waits(log)})
    hazards = [hazard for hazard in replay(program, SMALL).hazards if hazard.kind == "missing wait"]
    said = sorted({hazard.unit for hazard in hazards})
    print(f"{name}: {len(missing_waits(log))} reads too early, of {units}; the simulated GPU finds {said}")
    assert units == said == ([] if name == "yours" else ["blocks.2"])
print_wrapped(hazards[0].text)

# %% [markdown]
# ### Break it: the streams are not ordered
#
# The next cell runs the same check on a schedule that omits your `order_streams` at the beginning of a step and at the
# end of the backward pass.

# %%
unordered = program_of(partial(LabOverlap, pieces=PIECES._replace(order_streams=lambda giver, taker: None)))
hazards = replay(unordered, SMALL).hazards
for begins, op in (("where a step begins", "all_gather"), ("where backward ends", "reduce_scatter")):
    print_wrapped(f"{begins}: {next((hazard.text for hazard in hazards if op in hazard.text), 'nothing is missing')}")
assert {hazard.kind for hazard in hazards} == {"missing wait"}

# %% [markdown]
# ### Break it: free without recording the reader
#
# This is your schedule again, but the compute stream is not recorded as a reader of the gathered memory.

# %%
untold = program_of(partial(LabOverlap, pieces=PIECES._replace(free=without_record_stream)))
for name, program in (("yours", programs["yours"]), ("without record_stream", untold)):
    run = replay(program, SMALL)
    reused = [hazard for hazard in run.hazards if hazard.kind == "reused too early"]
    print(f"{name}: {run.peak('reserved') / MIB:.0f} MiB reserved, memory reused too early {len(reused)} times")
    if reused:
        print_wrapped(f"    first: {reused[0].text}")
assert reused, "the next gather should have got memory that is still read"

# %% [markdown]
# The gather of block 1 overwrites block 0 before block 0's kernels have run. This cannot happen on a CPU, where the
# host itself computes, so such a bug appears only once the program runs on GPUs.
#
# ## The gain from overlap
#
# ### Modelled: a host that runs ahead
#
# The next cell compares three schedules: lab 05's, yours, and yours with one change. They run on a simulated GPU that
# is slow enough for this small model to keep it busy. At the end of a unit's backward pass, your schedule issues the
# unit's reduction, and then the gather of the next unit. A communicator has only *one* queue to the link. So the gather
# waits for the reduction, and the reduction waits for the gradient, which is still being computed. In the changed
# schedule, the gather is issued first.


# %%
class GatherFirst(LabOverlap):
    """A schedule that issues the next unit's gather before the reduction that is due, in the backward pass."""

    due: Unit | None = None

    def issue_backward(self, unit: Unit) -> None:
        super().issue_backward(unit)
        self.issue_due()

    def reduce(self, unit: Unit) -> None:
        self.issue_due()
        self.due = unit

    def issue_due(self) -> None:
        if self.due is not None:
            unit, self.due = self.due, None
            super().reduce(unit)

    def end_backward(self) -> None:
        self.issue_due()
        super().end_backward()


SCHEDULES = {"lab 05": SyncSchedule, "yours": yours, "yours, gather first": partial(GatherFirst, pieces=PIECES)}
programs |= {name: program_of(schedule) for name, schedule in SCHEDULES.items() if name not in programs}


def kernels_meanwhile(program: Program, op: str) -> int:
    """Return the largest number of kernels that the host issues between a collective and the wait for it."""
    issued: dict[tuple[str, int], int] = {}
    kernels = most = 0
    for each in program.instructions:
        match each:
            case Kernel():
                kernels += 1
            case Issue(call) if call.op == op:
                issued[call.group, call.order] = kernels
            case Wait(call) if (call.group, call.order) in issued:
                most = max(most, kernels - issued[call.group, call.order])
    return most


# %% tags=["C14"]
runs = {name: replay(programs[name], SMALL) for name in SCHEDULES}
stopped = {name: replay(programs[name], replace(SMALL, runs_ahead=False)) for name in SCHEDULES}
busy = dict.fromkeys(("compute", "communication"), 0.0)
for span in runs["lab 05"].last_step():
    if span.lane in busy:
        busy[span.lane] += span.duration
both = sum(busy.values())
print(f"a step: compute {1e3 * busy['compute']:.1f} ms, communication {1e3 * busy['communication']:.1f} ms")
for name, run in runs.items():
    meanwhile = [kernels_meanwhile(programs[name], op) for op in ("all_gather", "reduce_scatter")]
    print_wrapped(
        f"{name:20} {1e3 * run.seconds:.1f} ms, {run.overlap:.0%} of communication under compute; if the host computes "
        f"{1e3 * stopped[name].seconds:.1f} ms. Kernels between issue and wait: gather {meanwhile[0]}, reduction "
        f"{meanwhile[1]}"
    )
assert not any(run.hazards for run in runs.values())
assert abs(runs["lab 05"].seconds / both - 1) < 0.02, "one stream: compute plus communication"
assert runs["lab 05"].overlap < 0.01 < 0.25 < runs["yours"].overlap < runs["yours, gather first"].overlap
assert runs["yours, gather first"].seconds < 0.9 * runs["yours"].seconds < 0.9 * runs["lab 05"].seconds
assert stopped["yours"].seconds > 0.98 * stopped["lab 05"].seconds, "a host that computes hides nothing in this order"
assert kernels_meanwhile(programs["yours"], "all_gather") == 0 < kernels_meanwhile(programs["yours"], "reduce_scatter")

# %%
plots.timeline(
    runs,
    title="Forward gathers hide without further work; in backward, the issue order decides",
    says="A step on a simulated GPU. In backward of the middle row, compute waits for each reduction and for the "
    "gather behind it. In the last row, the gather goes first. The host had issued everything before the step began.",
    lab="06",
)

# %% [markdown]
# This plot reproduces figure 5 of the FSDP paper (arXiv 2304.11277, sections 3.3.1 and 3.3.2) with your own program. In
# the forward pass, the host has issued all gathers before the first unit has been computed, and each gather starts as
# soon as the link is free. In the backward pass, the middle row shows the paper's case without prefetching: the gather
# of block 3 is queued behind the reduction of block 4, which is waiting for a gradient. In the last row, gathers
# overlap with compute in the backward pass as well. Only the first gather and the last reductions remain exposed,
# because there is nothing to compute at the same time. (Block 4 is gathered twice in a row because it is freed after
# its forward pass and is the first block in the backward pass.)
#
# Your program is the same on every host: it issues a gather and then waits for it immediately, with no kernel in
# between. If a stream waits, the host continues with the next unit. If the host waits, no gather is hidden. Between the
# issue of a reduction and the wait for it, there are always kernels. But the next gather is queued behind the reduction
# on the link, and compute waits for that gather. So on a CPU, where the host itself computes, a step takes almost as
# long as before, unless the gather is issued first.
#
# ### Measured: on a CPU
#
# The next cell measures the wall-clock time of the same schedules, with two ranks on an emulated link with a latency of
# 2 ms and a bandwidth of 50 MB/s. The schedules take turns, step by step. They run over gloo on the CPU even if there
# are GPUs, because this measurement is about hosts that compute themselves. Each measurement is shown next to the
# model's prediction for this machine. The model takes the measured compute time of each schedule as input and predicts
# the waiting time. It ignores the time that threads need to wake up. The first error refers to the entire step, the
# second only to the waiting time.


# %% tags=["C14", "nbval-ignore-output"]
BIG = Settings(ranks=RANKS, batch=12, layers=3, width=175, context=48)
results = versus(BIG, SCHEDULES, steps=5)
for name, each in results.items():
    print(
        f"{name:20} measured {1e3 * each.median:.0f} ms, predicted {1e3 * each.predicted:.0f} ms ({each.error:+.0%}); "
        f"waiting time alone: {each.waiting_error:+.0%}"
    )


# %% tags=["nbval-ignore-output"]
def gain(name: str) -> str:
    """Return the share of lab 05's median that the median saves, if all turns agree on its sign."""
    turns = gains(results[name], results["lab 05"])
    saved = 1 - results[name].median / results["lab 05"].median
    return f"{saved:.0%}" if turns[0] * turns[-1] > 0 else "no more than the steps' scatter"


plots.versus(
    results,
    title=f"Measured: your schedule gains {gain('yours')}, and {gain('yours, gather first')} with the gather first",
    says="Two ranks on an emulated link of 2 ms and 50 MB/s; the host computes. Only reductions can be hidden.",
    lab="06",
)

# %% [markdown]
# To isolate the effect of waiting, the next cell replays the three programs, each with lab 05's compute time, on a
# model of this machine and of a similar machine whose host runs ahead:

# %% tags=["nbval-ignore-output"]
for name, each in results.items():
    same = replace(each.hardware, scale=each.hardware.scale * results["lab 05"].computing / each.computing)
    stops, ahead = replay(each.program, same), replay(each.program, replace(same, runs_ahead=True))
    print_wrapped(
        f"{name:20} the host computes: {1e3 * stops.seconds:.0f} ms; it runs ahead: {1e3 * ahead.seconds:.0f} ms, "
        f"{ahead.overlap:.0%} under compute (model, not measured)"
    )

# %% [markdown]
# ### Traced: a step in your setup
#
# The next cell traces a step of each of the three schedules in your setup. On a CPU, this is the setup that you have
# just measured. On a GPU, the streams, the events and `record_stream` are torch's, the links are real, and the model is
# larger, so that its kernels take longer to run than to launch. In such a trace, communication consists of NCCL's own
# kernels. They run on a stream of the process group; your two streams only determine their order and own their memory.
# (`launch` gives the process group's stream high priority, `ProcessGroupNCCL.Options(is_high_priority_stream=True)`, so
# its kernels are scheduled first on free multiprocessors.)


# %% tags=["nbval-ignore-output"]
LARGE = Settings(ranks=RANKS, batch=8, layers=6, width=1024, context=512)  # for a GPU


def trace_steps(folder: Path) -> None:
    """Trace two steps of each schedule, which take turns; the steps before them are a warm-up."""
    where = rank_device()
    on_cpu = where.type == "cpu"
    settings = BIG if on_cpu else LARGE
    if on_cpu:
        let_communication_go_first()
    shard = data.shard(next(settings.batches()), dist.get_rank(), RANKS)
    with parse_link("latency=2ms,bandwidth=50MB/s") if on_cpu else nullcontext() as link:
        trainers = {name: build(schedule, settings=settings) for name, schedule in SCHEDULES.items()}
        for trainer in trainers.values():
            take_step(trainer, shard, where)
        for take in range(2):
            for name, trainer in trainers.items():
                with record_trace(folder / f"{name}-{take}-{dist.get_rank()}.json", link):
                    align(where)
                    take_step(trainer, shard, where)


with tempfile.TemporaryDirectory() as folder:
    launch(trace_steps, RANKS, Path(folder), timeout=110)
    takes = {name: [read_trace(Path(folder, f"{name}-{take}-0.json")) for take in range(2)] for name in SCHEDULES}
traced = {name: min(each, key=lambda spans: max(span.end for span in spans)) for name, each in takes.items()}
hidden = {name: overlap(spans) for name, spans in traced.items()}
plots.timeline(
    traced,
    title=f"Your schedule hides {hidden['yours']:.0%} of its communication, and "
    f"{hidden['yours, gather first']:.0%} with the gather first",
    says="A step of rank 0, the faster of two, in this notebook's process group. If ranks share a GPU, look only at "
    "the order.",
    lab="06",
)

# %% [markdown]
# On a CPU, no gather overlaps with compute in any row, because the host waits for each gather immediately. In the last
# row, reductions do overlap with compute, because no gather is queued behind them. On a GPU, look for effects that a
# CPU cannot show: gathers in the forward pass that overlap with the previous unit's compute, and gaps in the backward
# pass in the middle row but not in the last one.

# %% tags=["nbval-ignore-output"]
show_record(
    "06",
    says="""
The record shows a step of the ladder's rungs: `fsdp` is lab 05's schedule, and `fsdp-overlap` is yours with
the gather first. Compare it with your own trace: does `fsdp` have no overlap there, either? Compare it with the
simulated GPU: is all of forward's communication hidden, except for the first gather, and are the last reductions
exposed? If nothing is hidden, check whether compute has gaps everywhere: a small model's kernels are shorter than
their launches, so the host cannot run ahead. (Do not compare milliseconds: the simulated GPU is a slower one.)
""",
)

# %% [markdown]
# ## What is still missing
#
# Two problems remain. First, on a CPU, where the host itself computes, every gather is issued too late to overlap, in
# both passes, unless the schedule issues the next unit's gather *before* it computes the current unit. This is
# prefetching, the subject of lab 07. Second, if the host runs ahead, units are gathered as fast as the link allows,
# long before they are needed:

# %%
for name, run in runs.items():
    peaks = ", ".join(f"{what} {run.peak(what) / MIB:.1f}" for what in ("allocated", "active", "reserved"))
    issued = f"the host has issued both steps after {1e3 * run.memory[-1].at:.1f} of {1e3 * run.done:.0f} ms"
    print_wrapped(f"{name:20} MiB at most: {peaks}; {issued}")
whole = 4 * sum(map(sum, SIZES.units)) / MIB
print(f"all units, unsharded: {whole:.1f} MiB")
assert runs["lab 05"].peak("active") == runs["lab 05"].peak("allocated") == runs["yours"].peak("allocated")
assert runs["yours"].peak("active") / MIB > runs["lab 05"].peak("active") / MIB + whole

# %% [markdown]
# *Active* memory is allocated memory plus freed memory that is still waiting for an event. Allocated memory never
# exceeds lab 05's. But the host is so far ahead that freed parameters and gradients accumulate: the additional 10.8 MiB
# of active memory are nearly four times the size of the unsharded model. The rate limiter of lab 08 solves this
# problem.
#
# ## What to remember
#
# 1. An operation starts once it has been queued, its stream is free, and all events that its stream waits for are
#    complete.
# 2. To order two streams, record an event on one stream and make the other wait for it. While the host waits, it cannot
#    run ahead.
# 3. A collective is ordered twice: it comes after the work queued on the stream on which it is issued, and before any
#    later work on the stream that waits for its handle. The wait belongs just before the data is used, once per gather.
# 4. A missing wait raises no error. Check the order, not the values.
# 5. Memory belongs to the stream that allocated it. If another stream reads it, record that stream before freeing the
#    memory; the memory becomes available only after the reader has finished.
# 6. A communicator is a single queue to the link: collectives run in issue order, however urgent a later collective is.
#
# ## Questions
#
# **1. Your overlapped FSDP is no faster than lab 05's on a GPU, and a profile shows the host waiting in the middle of
# every step. What might be the cause?**
#
# <details><summary>Answer</summary>
#
# The likely cause is code that needs a value from the device: `.item()`, `print(loss)`, a comparison of tensors in an
# `if`, `nonzero`, or a copy to the CPU. Each of these blocks the host until the device has caught up, so all later work
# is issued late.
# </details>
#
# **2. Why does `begin_forward` make the gather stream wait for the compute stream, and why is one wait per step
# enough?**
#
# <details><summary>Answer</summary>
#
# The optimizer writes the shards on the compute stream, and gathers read them. Nothing else writes to the shards until
# the next optimizer step, and a stream runs in order, so everything queued after the wait runs after it.
# </details>
#
# **3. Is `record_stream` necessary? Could the gather stream instead wait for the compute stream before it reuses a
# freed block?**
#
# <details><summary>Answer</summary>
#
# That would be correct, but the next gather would start only after all previously queued compute had finished, so
# nothing would overlap. FSDP2, however, does not need `record_stream`. It copies the gathered data into the parameters
# on the compute stream. Then it makes the gather streams wait for an event recorded after that copy, and drops its
# reference to the gathered buffer (`_wait_all_gather_streams_on_event`). So the gather streams wait for the work queued
# before the unit's computation, but not for the computation itself. When the memory can be reused does not depend on
# when the allocator polls events.
# </details>
#
# **4. With two communicators, one for gathers and one for reductions, would the issue order still matter?**
#
# <details><summary>Answer</summary>
#
# It would matter less. Each communicator has its own queue, so a gather does not wait behind a reduction. But the two
# queues share the link (and the GPU's multiprocessors), so collectives that run at the same time slow each other down.
# Moreover, all ranks must issue gathers and reductions in an order that cannot deadlock.
# </details>
#
# **5. On a CPU, what carries the messages while the host computes?**
#
# <details><summary>Answer</summary>
#
# gloo's threads carry them or, in this lab, the threads of the emulated link. So once issued, messages make progress
# during compute; a host that is busy computing merely issues them late. Real gloo messages also take CPU time away from
# compute; the model ignores this effect.
# </details>
#
# ## Further reading
#
# - FSDP: [arXiv 2304.11277](https://arxiv.org/abs/2304.11277), sections 3.3.1 (overlap) and 3.4 (memory management),
#   figure 5.
# - PyTorch: [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html), on streams and on the caching
#   allocator; `Tensor.record_stream`.
# - torch: `torch/distributed/fsdp/_runtime_utils.py` (`_init_streams`, `_root_pre_forward`, `_post_backward_hook`),
#   `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` (question 3), `torch/cuda/_sanitizer.py`.
# - minifsdp: `fsdp/schedules/overlap.py`, the next rung; `instruments/machine/queues.py` and `hazards.py`, the full
#   versions of 6.1 and 6.4.
