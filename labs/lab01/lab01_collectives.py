# ---
# jupyter:
#   minifsdp:
#     lab: "01"
#     title: Collectives
#     minutes: 90
#     ranks: 4
# ---

# %% [markdown]
# # Lab 01: collectives
#
# Data parallelism, ZeRO and FSDP move data between GPUs with six operations: broadcast, reduce, all-reduce, all-gather,
# reduce-scatter and send/receive. In this lab, you build the first five from send and receive, and count the bytes that
# they move.
#
# ![A ring reduce-scatter over four ranks: in each step, every rank sends one chunk to the next rank
# and adds the chunk that arrives to its own](../slides/figures/ddp-reduce-scatter.svg)
#
# *From [lecture 2, Collectives and DDP](../slides/ddp.md), which comes before this lab.*
#
# **After this lab, you will be able to** write a program that runs in N processes at the same time; explain why and
# where a group of ranks hangs; implement broadcast and reduce as trees, reduce-scatter and all-gather as rings, and
# all-reduce as a sequence of these two rings; count the bytes and messages sent by a rank in each operation; and
# predict how long an operation takes on a link.
#
# **You need** to know tensors and autograd; lab 00 is not required.
#
# **Time** 90 minutes, in two sessions; the break is marked. **Runs** on a laptop (gloo, 2 to 4 processes), or on a GPU
# node (NCCL, one rank per GPU). **Memory** at most 12 MiB of tensors per rank; a process takes 210 MiB, including 197
# MiB for torch's code, which the ranks share.
#
# An exercise is a cell with a function whose body is `...`. Until you replace these dots, the lab uses the reference
# answer and prints a note. Your own answer is checked immediately, and the cells below use it, whether correct or not.
# A failed check gives a hint, and so does `minifsdp lab hint 1.2`.

# %% tags=["setup"]
# set-up
import time
from collections.abc import Callable
from itertools import pairwise
from math import ceil, log2
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.instruments import plots
from minifsdp.instruments.launch import RankError, launch, rank_device
from minifsdp.instruments.link.emulated import EmulatedLink
from minifsdp.instruments.watch.ledger import Ledger

# %% [markdown]
# # Session one: messages
#
# ## 1.1 Who am I
#
# *5 minutes, easy*
#
# A distributed job is one program, started N times: *single program, multiple data*. The N processes are called
# **ranks** and are numbered 0 to N - 1; N is the **world size**. Only its rank distinguishes a process from the others.
# `launch(fn, N)` starts N processes that each run `fn` inside a process group, and returns their N results. Every
# collective names its **group**; `comm.world()` is the group of all ranks. A library, the *backend*, carries the
# messages: **gloo** carries them between processes on CPUs, **NCCL** between NVIDIA GPUs.


# %%
def who_am_i():
    group = comm.world()
    return f"I am rank {group.rank()} of {group.size()}"


launch(who_am_i, 4)

# %% [markdown]
# **The question.** Every rank holds the same batch. Which samples (rows of the batch) should each rank take, so that
# every sample is used exactly once and the ranks agree without communication? The number of samples need not be
# divisible by N. The slowest rank sets the pace, so the numbers of samples may differ by at most one between ranks.

# %%
predict("1.1", ..., "samples on the rank with the most, for a batch of 10 on 4 ranks")


# %% tags=["exercise-1.1"]
from .ex1_my_rows import my_rows


# %%
def count_rows(rows):
    return len(my_rows(torch.arange(rows), comm.world()))


shares = launch(count_rows, 4, 10)
print("samples on ranks 0 to 3:", shares)
outcome("1.1", max(shares), ranks=4, slips={"10 // 4 samples per rank: two samples are left over": 2})

# %% [markdown]
# ### Measured: equal parameters, different gradients
#
# This is data parallelism in its simplest form: every rank builds the same model with the same initial parameters,
# takes its samples, and computes a gradient. The parameters are equal, but the gradients differ because the data
# differ. The **mean** of the gradients is the gradient of the global batch if all ranks have the same number of samples
# and the loss is a mean over samples. The **sum** of the gradients is N times their mean, so summing has the effect of
# an N times larger learning rate.


# %% tags=["C40"]
def gradient_of(rows, everything):
    model = torch.nn.Linear(rows.shape[1], 1)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
    return model.weight.detach(), model.weight.grad


def local_gradient(batch):
    rows = my_rows(batch, comm.world())
    return *gradient_of(rows, batch), len(rows)


batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
weights, gradients, _ = zip(*launch(local_gradient, 2, batch), strict=True)
whole = gradient_of(batch, batch)[1]
print("parameters equal:", torch.equal(*weights), "   gradients equal:", torch.equal(*gradients))
for name, gradient in {"rank 0": gradients[0], "rank 1": gradients[1], "full batch": whole}.items():
    print(f"{name:>12}:", " ".join(f"{value:8.4f}" for value in gradient[0].tolist()))
mean, total = sum(gradients) / 2, sum(gradients)
print(f"mean / full batch: expected 1, measured {float((mean / whole).mean()):.4f}")
print(f"sum  / full batch: expected 2, measured {float((total / whole).mean()):.4f}")
assert torch.equal(*weights)
assert not torch.equal(*gradients)
assert torch.allclose(mean, whole)
assert torch.allclose(total, 2 * whole)

# %% [markdown]
# **Break it.** With seven samples, one rank takes three and the other takes four. The mean of the two means is then no
# longer the mean over all samples.

# %%
_, gradients, shares = zip(*launch(local_gradient, 2, batch[:7]), strict=True)
whole = gradient_of(batch[:7], batch)[1]
weighted = sum(share * gradient for share, gradient in zip(shares, gradients, strict=True)) / 7
print("the mean of the ranks' gradients equals the full batch's gradient:", torch.allclose(sum(gradients) / 2, whole))
print("the mean weighted by each rank's number of samples equals it:     ", torch.allclose(weighted, whole))

# %% [markdown]
# ## 1.2 Exchange: a deadlock and how to avoid it
#
# *10 minutes, medium*
#
# All other operations build on `comm.send(tensor, target, group)` and `comm.recv(tensor, source, group)`. Both return a
# *handle* immediately; `handle.wait()` returns when the operation is complete. To exchange two tensors, two ranks might
# both send first and then receive:


# %% tags=["shown"]
def send_then_receive():
    group = comm.world()
    other = 1 - group.rank()
    mine, theirs = torch.full((4,), float(group.rank()), device=rank_device()), torch.empty(4, device=rank_device())
    comm.send(mine, other, group).wait()
    comm.recv(theirs, other, group).wait()
    return theirs.tolist()


def show(error):
    """Print the error, and for every blocked rank the line of this notebook at which it waits."""
    print(error)
    for rank, stack in sorted(error.failures.items()):
        at = [source.strip() for frame, source in pairwise(stack.splitlines()) if "Cell In" in frame]
        print(f"  rank {rank} waits in: {at[0] if at else 'no cell of this notebook'}")


try:
    print(launch(send_then_receive, 2, timeout=2))
except RankError as error:
    show(error)

# %% [markdown]
# Both ranks wait at the same line. Rank 0's send completes only when rank 1 receives the message. Rank 1 receives only
# after its own send has completed, and that send completes only when rank 0 receives it. This is a circular wait. With
# gloo, every send waits for the matching receive, however small the message is. MPI and NCCL may copy a small message
# into an internal buffer, so that the send returns. The same program then works with small tensors and hangs with large
# tensors, so tests with small tensors miss the bug.
#
# **The fix**: no rank waits until it has *posted* both of its messages. You now write the step that is repeated in the
# rings of session two. The ranks form a ring: the right neighbour of rank r is rank r + 1, and its left neighbour is
# rank r - 1, modulo N. Each rank sends to the right and receives from the left. NCCL needs another precaution. The two
# operations may share a stream, which executes them in the order in which they were posted, so a circular wait is
# possible again. Therefore, even ranks post the send first, and odd ranks post the receive first.

# %%
predict("1.2", ..., "messages in all, if each of 4 ranks passes one tensor to its right neighbour")


# %% tags=["exercise-1.2"]
from .ex2_exchange import exchange


# %% tags=["shown"]
def pass_right():
    group = comm.world()
    outgoing = torch.full((2,), float(group.rank()), device=rank_device())
    incoming = torch.empty_like(outgoing)
    with comm.record() as log:
        exchange(outgoing, incoming, group)
    return incoming.tolist(), [call.op for call in log]


received, logs = zip(*launch(pass_right, 4, timeout=20), strict=True)
print("ranks 0 to 3 received:", received)
slips = {"a ring is closed: the last rank sends to the first": 3, "sends and receives are the same messages": 8}
outcome("1.2", sum(log.count("send") for log in logs), ranks=4, slips=slips)

# %% [markdown]
# **Break it.** Sender and receiver must agree on the message size, but nothing checks it. Here, one rank sends four
# elements, and the other expects eight.


# %% tags=["shown"]
def mismatched():
    group = comm.world()
    if group.rank() == 0:
        comm.send(torch.ones(4, device=rank_device()), 1, group).wait()
        return "sent 4 elements"
    buffer = torch.full((8,), -1.0, device=rank_device())
    comm.recv(buffer, 0, group).wait()
    return buffer.tolist()


try:
    print(launch(mismatched, 2, timeout=10))
except RankError as error:
    show(error)

# %% [markdown]
# gloo raises no error: half of the buffer is unchanged. (In the opposite case, with eight elements for a buffer of
# four, gloo aborts the process with "Is there a distributed collective mismatch in your code?". With NCCL, the
# behaviour with different sizes is undefined; usually the ranks hang.)
#
# ## 1.3 Wait: the contents of a buffer before `wait()`
#
# *5 minutes, easy*
#
# The call *starts* a collective, and `wait()` *finishes* it. In between, the buffer belongs to the communication
# library: its contents are undefined, and you must not write to it or free it. The advantage is that the rank can
# compute during the transfer. DDP and FSDP depend on this overlap.
#
# Below, a buffer filled with -1 is the output of a reduce-scatter: each rank contributes two
# elements, and rank r gets element r of the sum. The cell reads this buffer before and after the
# wait.

# %%
predict("1.3", ..., "value in the output, which was filled with -1, just before wait(), on gloo")


# %% tags=["shown"]
def look():
    group = comm.world()
    full = torch.full((group.size(),), group.rank() + 1.0, device=rank_device())
    part = torch.full((1,), -1.0, device=rank_device())
    handle = comm.reduce_scatter(part, full, group)
    time.sleep(0.1)
    before = part.item()
    handle.wait()
    return before, part.item()


before, after = launch(look, 2)[0]
print(f"before wait(): {before}   after: {after}")
outcome("1.3", before, slips={"the sum, which is there only after wait()": after})

# %% [markdown]
# With gloo, a rank receives the contributions of the other ranks, and `comm` sums them inside `wait()`, so reading too
# early gives a wrong value every time here. All-gather and all-reduce write to the output as soon as data arrive, so
# without the wait, a program computes correct values on an idle machine and wrong values on a busy one. With NCCL,
# `wait()` does not block the host: it makes the current *stream* wait, and the host continues.
#
# Now make use of the time between the call and the wait.


# %% tags=["exercise-1.3"]
from .ex3_reduce_while import reduce_while

# %% [markdown]
# How much time does this save? An **emulated link** makes each collective take as long as on a given network (here 40
# ms), and the computation also takes 40 ms.


# %% tags=["shown", "nbval-ignore-output"]
def work_40_ms():
    time.sleep(0.04)
    return torch.zeros(1)


def timed_overlap():
    group, where = comm.world(), rank_device()
    full = torch.ones(1000, device=where)
    comm.all_reduce(full, group).wait()  # the first collective connects the ranks
    with EmulatedLink(latency=0.04, bandwidth=1e12):
        start = time.perf_counter()
        reduce_while(full, work_40_ms, group)
        device.synchronize(where)  # with NCCL, `wait` blocks only a stream; block the host too
        together = time.perf_counter() - start
        start = time.perf_counter()
        comm.reduce_scatter(torch.empty(500, device=where), full, group).wait()
        device.synchronize(where)
        work_40_ms()
        return together, time.perf_counter() - start


together, in_turn = launch(timed_overlap, 2)[0]
print(f"message and work in turn: {in_turn * 1e3:.0f} ms; with yours: {together * 1e3:.0f} ms")
print("expected: 80 and 40 ms, and slightly more if other processes share the cores")

# %% [markdown]
# ## 1.4 Broadcast as a tree
#
# *10 minutes, medium*
#
# Rank 0 has the initial parameters, and all ranks need them. Sending a tensor to one rank after another takes N - 1
# messages in sequence. But every rank can forward the tensor once it has received it, so each round doubles the number
# of ranks with the tensor:
#
# ```
# N = 8, from rank 0        round 1     0 → 1
#                           round 2     0 → 2   1 → 3
#                           round 3     0 → 4   1 → 5   2 → 6   3 → 7
# ```
#
# This tree takes ceil(log2 N) rounds, and still N - 1 messages in total. In the round with distance d = 1, 2, 4, ...,
# the rank at place p < d sends to the rank at place p + d, if that place exists. The *place* of a rank is relative to
# the source: the source is at place 0, the next rank is at place 1, and so on around the ring.

# %%
predict("1.4", ..., "messages that the source sends, if there are 4 ranks")


# %% tags=["exercise-1.4"]
from .ex4_broadcast import broadcast


# %%
def count_broadcast(source):
    group = comm.world()
    tensor = torch.full((256,), float(group.rank()), device=rank_device())
    with comm.record() as log:
        broadcast(tensor, source, group)
    return tensor[0].item(), [call.op for call in log].count("send")


values, sends = zip(*launch(count_broadcast, 4, 1, timeout=20), strict=True)
print("source 1; values on ranks 0 to 3:", values, "  messages sent by each:", sends)
outcome("1.4", sends[1], ranks=4, slips={"N - 1: it need not send them all itself": 3})

# %% [markdown]
# ## 1.5 Reduce: the same tree, backwards
#
# *10 minutes, medium*
#
# If you reverse the arrows and start at the leaves, the tree computes a sum: in each round, half of the remaining ranks
# send their partial sums, and their partners add these sums to their own.
#
# ```
# N = 8, to rank 0          round 1     1 → 0   3 → 2   5 → 4   7 → 6
#                           round 2     2 → 0   6 → 4
#                           round 3     4 → 0
# ```

# %%
predict("1.5", ..., "bytes that one rank other than the target sends, to reduce 1024 float32 over 4 ranks")


# %% tags=["exercise-1.5"]
from .ex5_reduce import reduce


# %%
def count_reduce(target):
    group = comm.world()
    tensor = torch.full((1024,), group.rank() + 1.0, device=rank_device())
    with comm.record() as log:
        reduce(tensor, target, group)
    return tensor[0].item(), sum(call.payload for call in log if call.op == "send")


values, sent = zip(*launch(count_reduce, 4, 0, timeout=20), strict=True)
print("sum of 1 + 2 + 3 + 4 on rank 0:", values[0], "  bytes sent by each rank:", sent)
outcome("1.5", sent[1], ranks=4)

# %% [markdown]
# ### Measured: the primitives and their results
#
# On four ranks, the cell runs the primitives of torch and NCCL. Rank r holds the number r + 2 or, for an operation on
# chunks, the vector (10 r, 10 r + 1, 10 r + 2, 10 r + 3). The results of your broadcast and reduce are printed next to
# torch's.


# %% tags=["C5"]
def primitives():
    group, rank = comm.world(), comm.world().rank()

    def number():
        return torch.tensor([rank + 2.0], device=rank_device())

    def vector():
        return torch.arange(4.0, device=rank_device()) + 10 * rank

    def result(output, start, *args):
        start(output, *args).wait()
        return output.tolist()

    ops = {"sum": comm.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": comm.MAX, "avg": comm.MEAN}
    found = {f"all-reduce {name}": result(number(), comm.all_reduce, group, op) for name, op in ops.items()}
    found["all-gather"] = result(torch.empty(4, device=rank_device()), comm.all_gather, number(), group)
    found["reduce-scatter"] = result(torch.empty(1, device=rank_device()), comm.reduce_scatter, vector(), group)
    found["broadcast from 2"] = result(number(), comm.broadcast, 2, group)
    reduced = result(number(), comm.reduce, 0, group)
    mine = number()
    broadcast(mine, 2, group)
    found["your broadcast from 2"] = mine.tolist()
    mine = number()
    reduce(mine, 0, group)
    if rank == 0:
        found |= {"reduce to 0": reduced, "your reduce to 0": mine.tolist()}
    return found


found = launch(primitives, 4, timeout=20)
for name in found[0]:
    print(f"{name:>14}:", "  ".join(str(each.get(name, "")) for each in found))
expected = {"sum": 14.0, "prod": 120.0, "min": 2.0, "max": 5.0, "avg": 3.5}
for rank, each in enumerate(found):
    assert all(each[f"all-reduce {name}"] == [value] for name, value in expected.items())
    assert each["all-gather"] == [2.0, 3.0, 4.0, 5.0]
    assert each["reduce-scatter"] == [60.0 + 4 * rank]
    yours = each["your broadcast from 2"]
    assert yours == each["broadcast from 2"] == [4.0], f"rank {rank} has {yours}; has a check above failed?"
yours = found[0]["your reduce to 0"]
assert yours == found[0]["reduce to 0"] == [14.0], f"rank 0 has the sum {yours}; has a check above failed?"

# %% [markdown]
# **What is still missing.** A reduce to one rank followed by a broadcast from that rank is an all-reduce, which can
# average the gradients of 1.1. But the root receives and sends the entire tensor ceil(log2 N) times while most ranks
# are idle, and the time grows with the number of ranks. Can all links be kept busy all the time?
#
# ---
# # Break. Session two: the ring
#
# (In a new kernel, first run all cells above, because they contain your answers.)
#
# Split the tensor into N chunks, and let every rank be the root for one chunk. The partial sum of chunk c starts at
# rank c + 1 and is sent once around the ring. Every rank on the way adds its own chunk, and the sum is complete on rank
# c. All N partial sums move at the same time: in each step, every rank sends one chunk to the right and receives one
# chunk from the left. For N = 4, the ranks send these chunks:
#
# ```
#                        rank     0   1   2   3
# reduce-scatter   step 0         3   0   1   2        step s: rank r sends chunk    r - 1 - s
#                  step 1         2   3   0   1                  and receives chunk  r - 2 - s, adds its own to it
#                  step 2         1   2   3   0        at the end rank r holds chunk r of the sum
#
# all-gather       step 0         0   1   2   3        step s: rank r sends chunk    r - s
#                  step 1         3   0   1   2                  and receives chunk  r - 1 - s
#                  step 2         2   3   0   1        at the end every rank holds every chunk
# ```
#
# All numbers are modulo N. In each step after the first, a rank sends the chunk that it received in
# the previous step.
#
# ## 1.6 Ring reduce-scatter
#
# *15 minutes, hard*

# %%
predict("1.6", ..., "bytes one rank sends in a ring reduce-scatter of 1,000,000 float32 over 4 ranks")


# %% tags=["exercise-1.6"]
from .ex6_reduce_scatter import reduce_scatter


# %%
def ring_reduce_scatter(output, full, group):
    reduce_scatter(output, full, group, exchange)


def count_reduce_scatter(numel):
    group = comm.world()
    full = torch.arange(float(numel), device=rank_device()) + group.rank()
    ours, torchs = (torch.empty(numel // group.size(), device=rank_device()) for _ in range(2))
    with comm.record() as log:
        ring_reduce_scatter(ours, full, group)
    comm.reduce_scatter(torchs, full, group).wait()
    return torch.equal(ours, torchs), [call.payload for call in log if call.op == "send"]


same, sends = zip(*launch(count_reduce_scatter, 4, 1_000_000, timeout=20), strict=True)
print("equal to torch's on every rank:", all(same), "  bytes of each step's send:", sends[0])
outcome("1.6", sum(sends[0]), ranks=4, slips={"N steps; the ring needs N - 1": 4_000_000})

# %% [markdown]
# ## 1.7 Ring all-gather
#
# *10 minutes, medium*

# %%
predict("1.7", ..., "bytes one rank sends in a ring all-gather whose output has 1 MiB (1,048,576 bytes), over 4 ranks")


# %% tags=["exercise-1.7"]
from .ex7_all_gather import all_gather


# %%
def ring_all_gather(output, shard, group):
    all_gather(output, shard, group, exchange)


def count_all_gather(numel):
    group = comm.world()
    shard = torch.arange(float(numel), device=rank_device()) + 1000.0 * group.rank()
    ours, torchs = (torch.empty(group.size() * numel, device=rank_device()) for _ in range(2))
    with comm.record() as log:
        ring_all_gather(ours, shard, group)
    comm.all_gather(torchs, shard, group).wait()
    return torch.equal(ours, torchs), sum(call.payload for call in log if call.op == "send")


same, sent = zip(*launch(count_all_gather, 4, 65_536, timeout=20), strict=True)
print("equal to torch's on every rank:", all(same), "  bytes sent by each rank:", sent)
outcome("1.7", sent[0], ranks=4)

# %% [markdown]
# ### Measured: a gather and a broadcast move more bytes than the ring
#
# An all-gather can also be built from a gather and a broadcast: every rank sends its shard to rank 0, and rank 0
# broadcasts the full tensor. The result is correct. Let S be the size of the full tensor in bytes. In total, the ranks
# send (N - 1) S / N bytes to rank 0 and then (N - 1) S bytes in the broadcast; the ring sends (N - 1) S bytes in total.
# Rank 0 alone sends ceil(log2 N) S bytes, whereas each rank of the ring sends (N - 1) S / N bytes.


# %% tags=["C39"]
def gather_then_broadcast(output, shard, group):
    chunks = output.view(group.size(), -1)
    if group.rank() == 0:
        chunks[0] = shard
        for source in range(1, group.size()):
            comm.recv(chunks[source], source, group).wait()
    else:
        comm.send(shard, 0, group).wait()
    broadcast(output, 0, group)


def bytes_of_both(whole):
    group = comm.world()
    shard = torch.full((whole // 4 // group.size(),), float(group.rank()), device=rank_device())
    outputs, sent = [], []
    for way in (ring_all_gather, gather_then_broadcast):
        outputs.append(torch.empty(whole // 4, device=rank_device()))
        with comm.record() as log:
            way(outputs[-1], shard, group)
        sent.append(sum(call.payload for call in log if call.op == "send"))
    return torch.equal(*outputs), *sent


S = 12 * 2**14
print(f"an all-gather of {S:,} bytes                 all ranks together      the rank that sends most")
print("   N                                     measured    expected      measured    expected")
for ranks in (2, 3, 4):
    same, ring, both = zip(*launch(bytes_of_both, ranks, S, timeout=20), strict=True)
    assert all(same)
    rows = {
        "ring": (sum(ring), (ranks - 1) * S, max(ring), (ranks - 1) * S // ranks),
        "gather, broadcast": (
            sum(both),
            (ranks - 1) * S // ranks + (ranks - 1) * S,
            max(both),
            ceil(log2(ranks)) * S,
        ),
    }
    for name, (together, together_expected, most, most_expected) in rows.items():
        print(f"   {ranks}  {name:<28} {together:>12,}{together_expected:>12,}{most:>14,}{most_expected:>12,}")
        assert (together, most) == (together_expected, most_expected), "has a check above failed?"

# %% [markdown]
# ## 1.8 All-reduce: the two rings together
#
# *10 minutes, medium*
#
# A reduce-scatter leaves chunk r of the sum on rank r; an all-gather sends the chunks to all ranks. Together, they form
# an all-reduce. It works for tensors of any size: if the size is not divisible by N, the last chunk is padded with
# zeros.

# %%
predict("1.8", ..., "bytes one rank sends in a ring all-reduce of 10 float32 over 4 ranks")


# %% tags=["exercise-1.8"]
from .ex8_all_reduce import all_reduce


# %%
def ring_all_reduce(tensor, op, group):
    all_reduce(tensor, op, group, ring_reduce_scatter, ring_all_gather)


def count_all_reduce(numel):
    group = comm.world()
    ours = torch.arange(float(numel), device=rank_device()) * (group.rank() + 1)
    torchs = ours.clone()
    with comm.record() as log:
        ring_all_reduce(ours, "mean", group)
    comm.all_reduce(torchs, group, comm.MEAN).wait()
    return torch.allclose(ours, torchs), sum(call.payload for call in log if call.op == "send")


same, sent = zip(*launch(count_all_reduce, 4, 10, timeout=20), strict=True)
print("equal to torch's on every rank:", all(same), "  bytes sent by each rank:", sent)
outcome("1.8", sent[0], ranks=4, slips={"the padding travels too: 12 elements, not 10": 60})

# %% [markdown]
# ### Measured: an all-reduce is a reduce-scatter and an all-gather, and a rank sends 2 (N - 1) / N of the data
#
# Remember this factor: it hardly depends on N. Patarasuk and Yuan (2009) show that no algorithm sends less if only the
# ranks perform additions. If the switches also add (SHARP on InfiniBand, NVLS on NVLink 4), a rank sends its tensor
# once and receives the sum once: the factor is 1 instead of 2 (N - 1) / N, which is about half for many ranks. The cell
# compares the ring with two other algorithms: a reduce to rank 0 followed by a broadcast, and an all-gather of the full
# tensors, which every rank then adds up.


# %% tags=["C5"]
def reduce_then_broadcast(tensor, op, group):
    reduce(tensor, 0, group)
    broadcast(tensor, 0, group)


def gather_all_then_add(tensor, op, group):
    everything = device.empty(group.size() * tensor.numel(), tensor.dtype, "communication", tensor.device)
    ring_all_gather(everything, tensor.view(-1), group)
    tensor.copy_(everything.view(group.size(), *tensor.shape).sum(0))


WAYS = {"ring": ring_all_reduce, "reduce, broadcast": reduce_then_broadcast, "gather all, add": gather_all_then_add}


def bytes_of_ways(numel):
    group, sent = comm.world(), {}
    for name, way in WAYS.items():
        tensor = torch.full((numel,), group.rank() + 1.0, device=rank_device())
        with comm.record() as log:
            way(tensor, "sum", group)
        wrong = f"{name}: the tensor does not hold the sum; has a check above failed?"
        assert tensor.unique().tolist() == [group.size() * (group.size() + 1) / 2], wrong
        sent[name] = sum(call.payload for call in log if call.op == "send")
    return sent


def expected_bytes(name, ranks):
    """Return the bytes sent by the busiest rank, per byte of the tensor."""
    return {
        "ring": 2 * (ranks - 1) / ranks,
        "reduce, broadcast": ceil(log2(ranks)),
        "gather all, add": ranks - 1,
    }[name]


LARGER = [4, 6, 8, 12, 16]
most = {name: [] for name in WAYS}
for ranks in (2, 3, 4):
    by_rank = launch(bytes_of_ways, ranks, S // 4, timeout=20)
    for name in WAYS:
        most[name].append(max(each[name] for each in by_rank))
        expected = round(expected_bytes(name, ranks) * S)
        print(f"N = {ranks}  {name:<18} the busiest rank sends {most[name][-1]:>9,} bytes, expected {expected:>9,}")
        assert most[name][-1] == expected, f"{name}: not what the formula says; has a check above failed?"
per_byte = {name: [each / S for each in sizes] for name, sizes in most.items()}
plots.lines(
    {name: ([2, 3, 4], per_byte[name]) for name in reversed(WAYS)},
    expected={name: (LARGER, [expected_bytes(name, ranks) for ranks in LARGER]) for name in reversed(WAYS)},
    xlabel="ranks N",
    logx=True,
    ylabel="bytes sent by the busiest rank / bytes of the tensor",
    title=f"On 4 ranks, a ring all-reduce sends {per_byte['ring'][2]:.4g} times the tensor, gathering all "
    f"{per_byte['gather all, add'][2]:.4g} times",
    says="Points: measured on 2, 3 and 4 ranks. Diamonds: the formulas for more ranks, from top to bottom in the order "
    "of the legend. Only the ring stays below 2 for every N.",
    lab="01",
)

# %% [markdown]
# Your all-reduce can now average the gradients of 1.1 in place. This completes data parallelism: every rank has the
# gradient of the global batch, so initially equal parameters stay equal.


# %%
def reduced_gradient(batch, op):
    gradient = gradient_of(my_rows(batch, comm.world()), batch)[1].to(rank_device())
    ring_all_reduce(gradient, op, comm.world())
    return gradient.cpu()


def both_gradients(batch):
    return {op: reduced_gradient(batch, op) for op in ("mean", "sum")}


whole = gradient_of(batch, batch)[1]
on_ranks = launch(both_gradients, 4, batch, timeout=20)
for op, factor in {"mean": 1, "sum": 4}.items():
    same = all(torch.equal(each[op], on_ranks[0][op]) for each in on_ranks)
    right = torch.allclose(on_ranks[0][op], factor * whole, atol=1e-6)
    print(f"{op}: bit-identical on all ranks: {same}; equal to {factor} x the full batch's gradient: {right}")

# %% [markdown]
# ### Measured: the memory of an all-reduce, stage by stage
#
# A `Ledger` counts live bytes by purpose. For a tensor of S bytes on four ranks, the prediction per rank is: S bytes
# before the operation; S + S + 2 S / 4 bytes in the reduce-scatter, for the tensor, the padded buffer and two chunks in
# transit; S + S bytes in the all-gather, for the tensor and the buffer. Gathering all tensors takes N S bytes in
# addition to the tensor, and another S bytes for the sum.


# %%
def staged_memory(numel):
    """Return the bytes of rank 0 at each stage of a ring all-reduce, and its peak in `gather_all_then_add`."""
    group, stages = comm.world(), {}
    if group.rank() > 0:  # the same collectives, not counted
        tensor = torch.ones(numel, device=rank_device())
        ring_all_reduce(tensor, "sum", group)
        return gather_all_then_add(tensor, "sum", group)
    with Ledger() as ledger:
        tensor = device.empty(numel, torch.float32, "gradients", rank_device()).fill_(1.0)
        stages["before"] = ledger.mark("before")

        def measured(stage, piece):
            def run(output, tensor, group):
                ledger.reset_peaks()
                piece(output, tensor, group)
                stages[stage] = ledger.peak.tags

            return run

        scatter = measured("reduce-scatter", ring_reduce_scatter)
        all_reduce(tensor, "sum", group, scatter, measured("all-gather", ring_all_gather))
        stages["after"] = ledger.mark("after")
        ledger.reset_peaks()
        gather_all_then_add(tensor, "sum", group)
        return stages, ledger.peak.total


numel = 2**18
size = 4 * numel
memory, lazy = launch(staged_memory, 4, numel, timeout=30)[0]
predicted = {"before": size, "reduce-scatter": size * 5 // 2, "all-gather": 2 * size, "after": size}
for stage, expected in predicted.items():
    print(f"{stage:>15}: measured {sum(memory[stage].values()):>9,} bytes, predicted {expected:>9,}")
print(f"gather all, add: measured {lazy:>9,} bytes, predicted {6 * size:>9,}")
plots.stages(
    memory,
    predicted=predicted,
    earlier={"gather all, add": {"before": size, "all-gather": lazy, "after": size}},
    title=f"A ring all-reduce peaks at {max(sum(each.values()) for each in memory.values()) / size:.4g} times the "
    f"tensor, gathering all tensors at {lazy / size:.4g} times",
    says="Live bytes of rank 0 of 4 at each stage's peak, for a tensor of 1 MiB. Grey: every rank gathers all tensors, "
    f"which takes {lazy / 2**20:.4g} MiB.",
    lab="01",
)

# %% [markdown]
# ## Links
#
# ### Measured: the cost of a message on different links
#
# A link has a latency α and a bandwidth β, and a message of n bytes takes about α + n / β. At n = α β, the latency
# accounts for half of that time; shorter messages waste most of the bandwidth of the link.
#
# The bandwidths below are per direction. On an H100, NVLink 4 provides 18 links of 25 GB/s each (the data sheet gives
# 900 GB/s for both directions together), PCIe 5.0 x16 provides 32 GT/s x 16 lanes x 128/130, InfiniBand NDR 400 Gbit/s,
# and Ethernet, in this table, 25 Gbit/s. The latencies are those of a ring step in NCCL's cost model (`hwLat` in
# `src/graph/tuning.cc`, protocol Simple: 3.4, 5.7 and 14 µs for NVLink, PCI and network). For TCP over Ethernet, the
# table assumes 30 µs, roughly the latency of the kernel's network stack. Measure your own cluster with `nccl-tests`.
#
# Each emulated link is a thousand times slower than the real link, so microseconds become milliseconds. The measured
# column shows wall-clock time on the emulated link.

# %% tags=["C38", "nbval-ignore-output"]
LINKS = {  # seconds, bytes per second
    "NVLink 4": (3.4e-6, 450e9),
    "PCIe 5.0 x16": (5.7e-6, 63e9),
    "InfiniBand NDR": (14e-6, 50e9),
    "Ethernet 25G": (30e-6, 3.125e9),
}
SLOWER = 1000


def time_messages(sizes):
    """Return the seconds that one message takes, by link and size."""
    group, took = comm.world(), {}
    way = comm.send if group.rank() == 0 else comm.recv
    way(
        torch.zeros(sizes[-1], dtype=torch.uint8, device=rank_device()), 1 - group.rank(), group
    ).wait()  # connects the ranks
    for name, (latency, bandwidth) in LINKS.items():
        with EmulatedLink(latency * SLOWER, bandwidth / SLOWER):
            for size in sizes:
                message = torch.zeros(size, dtype=torch.uint8, device=rank_device())
                start = time.perf_counter()
                way(message, 1 - group.rank(), group).wait()
                device.synchronize(message.device)
                took[name, size] = time.perf_counter() - start
    return took


sizes = (4_000, 1_000_000)
took = launch(time_messages, 2, sizes)[0]
print("                half latency at      message   predicted   emulated, x 1000: predicted   measured")
for name, (latency, bandwidth) in LINKS.items():
    for size in sizes:
        predicted = latency + size / bandwidth
        print(
            f"{name:<16}{latency * bandwidth / 1e3:>12,.0f} kB {size / 1e3:>9,.0f} kB{predicted * 1e6:>9.1f} µs"
            f"{predicted * SLOWER * 1e3:>27.1f} ms{took[name, size] * 1e3:>8.1f} ms"
        )
        assert took[name, size] > 0.99 * predicted * SLOWER

# %% [markdown]
# ### Measured: few, large and even messages are the fastest
#
# Every message incurs the latency α. This is why NCCL uses trees for small tensors, DDP collects gradients in buckets,
# and FSDP collects parameters in flat parameters. The FSDP paper (figure 2) gathers the same volume with increasingly
# smaller all-gathers: below about 33 million elements per all-gather, the total time rises steeply. Here, two ranks
# gather 4 MiB in 1 to 64 messages: the number of bytes stays the same, but every message adds a latency. In α + n / β,
# n is the number of bytes sent by a rank; on two ranks, it is half of the gathered bytes.
#
# The paper also finds that shards should be **even**. Neither NCCL nor gloo gathers uneven shards in one operation:
# with NCCL, torch broadcasts each rank's shard (N messages), and with gloo, torch rejects the call. The alternative is
# to pad every shard to the length of the longest shard (one message, more bytes). Here, the shards are 40, 30, 20 and
# 10 per cent of 1 MiB.


# %% tags=["C6"]
def timed(start_all):
    """Run some collectives; return their log and their time in seconds."""
    dist.barrier()
    start = time.perf_counter()
    with comm.record() as log:
        start_all()
    device.synchronize(rank_device())
    return log, time.perf_counter() - start


def in_pieces(total, pieces):
    """Gather `total` bytes in `pieces` messages."""
    group = comm.world()
    shards = torch.zeros(pieces, total // 4 // pieces // group.size(), device=rank_device())
    outputs = torch.empty(pieces, total // 4 // pieces, device=rank_device())
    return timed(lambda: [comm.all_gather(outputs[i], shards[i], group).wait() for i in range(pieces)])


def in_shards(shares):
    """Gather shards of these sizes by broadcasts and with padding, and even shards of the same total size."""
    group = comm.world()
    parts = [torch.zeros(numel, device=rank_device()) for numel in shares]
    even = torch.zeros(sum(shares) // group.size(), device=rank_device())
    longest = torch.zeros(max(shares), device=rank_device())
    outputs = [torch.empty(group.size() * shard.numel(), device=rank_device()) for shard in (even, longest)]
    return {
        "even shards": timed(lambda: comm.all_gather(outputs[0], even, group).wait()),
        "uneven, broadcasts": timed(lambda: [comm.broadcast(p, r, group).wait() for r, p in enumerate(parts)]),
        "uneven, padded": timed(lambda: comm.all_gather(outputs[1], longest, group).wait()),
    }


TOTAL, LINK = 2**22, EmulatedLink(latency=2e-3, bandwidth=100e6)
PIECES = (1, 2, 4, 8, 16, 32, 64)


def every_case(shares=None):
    """Gather in `pieces`, or shards if `shares` is given, on the bare backend and on LINK; keep the faster of two
    runs."""

    def cases():
        return in_shards(shares) if shares else {pieces: in_pieces(TOTAL, pieces) for pieces in PIECES}

    def best():
        runs = [cases() for _ in range(2)]
        return {name: min((run[name] for run in runs), key=lambda timed: timed[1]) for name in runs[0]}

    plain = best()
    with LINK:
        return plain, best()


def model(log):
    """Return messages, bytes that one rank sends (in a ring), and seconds on LINK by α + n / β."""
    wire = sum(call.wire for call in log)
    return len(log), round(wire), len(log) * LINK.latency + wire / LINK.bandwidth


plain, emulated = launch(every_case, 2, timeout=60)[0]
print("4 MiB on 2 ranks              messages   bytes sent   α + n / β")
for pieces, (log, _) in emulated.items():
    messages, wire, seconds = model(log)
    print(f"  {TOTAL // pieces // 1024:>5} KiB per all-gather    {messages:>8}{wire:>13,}{seconds * 1e3:>9.1f} ms")
    assert (messages, wire) == (pieces, TOTAL // 2)
    assert abs(seconds - (pieces * 2e-3 + TOTAL / 2 / 100e6)) < 1e-9
shares = [104_858, 78_643, 52_429, 26_214]
plain_shards, emulated_shards = launch(every_case, 4, shares, timeout=60)[0]
print("1 MiB on 4 ranks              messages   bytes sent   α + n / β")
for name, (log, _) in emulated_shards.items():
    messages, wire, seconds = model(log)
    print(f"  {name:<26} {messages:>9}{wire:>13,}{seconds * 1e3:>9.1f} ms")
found = {name: model(log) for name, (log, _) in emulated_shards.items()}
assert [messages for messages, _, _ in found.values()] == [1, 4, 1]
assert [wire for _, wire, _ in found.values()] == [3 * 2**18, 2**20, 3 * 4 * max(shares)]
assert min(found, key=lambda name: found[name][2]) == "even shards"

# %% [markdown]
# The cell times the same messages over the emulated link and over plain gloo on this machine.
# Within one machine, gloo's α is small and varies with the load on the machine: the cost of many small messages is
# visible, but the ranking of the three shard layouts may be reversed. On the emulated link, both effects are visible.

# %% tags=["nbval-ignore-output"]
per_message = [TOTAL / pieces / 1024 for pieces in PIECES]
on_link, on_gloo = ([seconds * 1e3 for _, seconds in runs.values()] for runs in (emulated, plain))
by_model = [model(log)[2] * 1e3 for log, _ in emulated.values()]
print("1 MiB on 4 ranks         α + n / β    emulated     gloo itself")
for name, (log, seconds) in emulated_shards.items():
    bare = plain_shards[name][1]
    print(f"  {name:<20} {model(log)[2] * 1e3:>9.1f} ms{seconds * 1e3:>9.1f} ms{bare * 1e3:>13.1f} ms")
assert all(measured > 0.99 * predicted for measured, predicted in zip(on_link, by_model, strict=True))
assert on_link[-1] > on_link[0]
plots.lines(
    {"emulated link": (per_message, on_link), "gloo itself": (per_message, on_gloo)},
    expected={"emulated link": (per_message, by_model)},
    source="pieces × (α + n / β)",
    xlabel="KiB per all-gather, 4 MiB in total",
    ylabel="total time of the all-gathers, ms",
    title=f"Gathering 4 MiB over the link takes {on_link[0]:.0f} ms in one piece, and {on_link[-1]:.0f} ms in 64",
    says="Time to gather 4 MiB on two ranks in equal pieces, over gloo alone and over an emulated link with α = 2 ms "
    "and β = 100 MB/s. For each piece, a rank sends n bytes, half of the piece.",
    lab="01",
    logx=True,
    logy=True,
)

# %% [markdown]
# ## Break it on purpose
#
# **A rank that does not take part.** All ranks of a group must call the same collectives in the same order. The usual
# causes of a violation are an `if rank == 0:` around code that communicates (a checkpoint, a metric), and a rank that
# runs out of data one batch early.


# %%
def only_rank_0():
    group = comm.world()
    loss = torch.tensor([float(group.rank())], device=rank_device())
    if group.rank() == 0:
        comm.all_reduce(loss, group, comm.MEAN).wait()
    return loss.item()


try:
    print(launch(only_rank_0, 2, timeout=2))
except RankError as error:
    show(error)

# %% [markdown]
# The rank *named* in the error is not the cause; look for the mistake on a rank that has finished or is waiting
# elsewhere.
#
# **A different order.** Rank 1 reduces two gradients of the same shape in a different order, for
# example because it iterates over a set. There is no hang and no error:


# %%
def another_order():
    group, rank = comm.world(), comm.world().rank()
    first = torch.full((2,), rank + 1.0, device=rank_device())
    second = torch.full((2,), 10 * (rank + 1.0), device=rank_device())
    for tensor in (first, second) if rank == 0 else (second, first):
        comm.all_reduce(tensor, group).wait()
    return first.tolist(), second.tolist()


for rank, (first, second) in enumerate(launch(another_order, 2)):
    print(f"rank {rank}: first {first}, expected [3.0, 3.0]; second {second}, expected [30.0, 30.0]")

# %% [markdown]
# Collectives have no names: the k-th call on one rank is matched with the k-th call on the others. If the calls differ
# in kind or size, the job hangs or aborts; otherwise, the results are wrong. If you suspect such a mismatch, compare
# the ranks' logs (`comm.record()`); `TORCH_DISTRIBUTED_DEBUG=DETAIL` makes torch compare the calls of all ranks.
#
# ## What is still missing
#
# You can now average the gradients of a model with one all-reduce per parameter. But a model has hundreds of mostly
# small parameters, and small messages are inefficient, as measured above. Also, all reductions wait for the end of the
# backward pass, although 1.3 shows that this is unnecessary. Lab 02 solves both problems: it collects gradients in
# buckets, and it reduces the buckets during the backward pass.
#
# ## What to remember
#
# 1. All ranks run one program with the same `world size`; only `rank` differs.
# 2. The call starts a collective and `wait()` finishes it; in between, do not touch its buffers.
# 3. An all-reduce is a reduce-scatter followed by an all-gather. In a ring, each rank sends (N - 1) / N of the data in
#    each of these two operations, for every N.
# 4. A message takes α + n / β, so send few, large and even messages.
# 5. All ranks must call the same collectives in the same order; otherwise the job hangs or silently
#    computes wrong numbers.
#
# ## Questions
#
# **1. How many bytes does one GPU send in a ring all-reduce of 1 GiB over 8 GPUs, and how many over 64 GPUs?**
#
# <details><summary>Answer</summary>
#
# One GPU sends 2 x 7/8 = 1.75 GiB in 14 messages over 8 GPUs, and 2 x 63/64 = 1.97 GiB in 126 messages over 64 GPUs.
# The number of bytes hardly grows. The number of messages grows with N, and so does the fraction of time spent on
# latency, because each message is smaller: 16 MiB instead of 128 MiB.
# </details>
#
# **2. When is the tree better than the ring?**
#
# <details><summary>Answer</summary>
#
# The tree is better when n is small. A reduce and a broadcast as trees take 2 log2 N (α + n / β), and the ring takes 2
# (N - 1) (α + n / (N β)). For n → 0, these times become 2 log2 N and 2 (N - 1) latencies. NCCL chooses by size. Its
# trees process chunks of the tensor in a pipeline, so they lose little bandwidth on large tensors.
# </details>
#
# **3. Your job hangs, and the timeout message names ranks 0 to 6 of 8, all in the same all-reduce. Where do you look
# for the cause?**
#
# <details><summary>Answer</summary>
#
# On rank 7, which did not call the all-reduce. It has finished, has raised an exception, or is waiting somewhere else.
# </details>
#
# **4. The loss of a data-parallel run diverges unless the learning rate is divided by the number of
# GPUs. What is the likely mistake?**
#
# <details><summary>Answer</summary>
#
# The gradients are summed instead of averaged, so the step is N times too large.
# </details>
#
# **5. Why may the output of a reduce-scatter be chunk r of its own input?**
#
# <details><summary>Answer</summary>
#
# Rank r reads its chunk r only in the last step, just before it writes the complete sum. ZeRO and
# FSDP use this to save a buffer.
# </details>
#
# ## Further reading
#
# - Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
#   Comput. 2009: the ring, and the proof that no algorithm sends less if only the ranks perform additions.
# - Graham et al., "Scalable Hierarchical Aggregation Protocol (SHArP)", COMHPC 2016: switches that reduce; in NCCL the
#   algorithms `NVLS` and `CollNet`.
# - Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005: trees, rings,
#   recursive halving, and when to use which.
# - Zhao et al., "PyTorch FSDP", arXiv 2304.11277, section 3.2.1 and figure 2: even and large collectives.
# - `minifsdp/ring.py`, the ring of this lab for tensors of any layout; `minifsdp/comm.py`, the shim over torch.
# - torch: `torch/distributed/distributed_c10d.py`. NCCL: `src/graph/tuning.cc` (its α and β), and the page "Collective
#   Operations" of its documentation.
