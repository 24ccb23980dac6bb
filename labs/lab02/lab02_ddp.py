# ---
# jupyter:
#   minifsdp:
#     lab: "02"
#     title: Distributed data parallelism
#     minutes: 75
#     ranks: 2
# ---

# %% [markdown]
# # Lab 02: distributed data parallelism
#
# Data parallelism splits the batch across N copies of one model. Each rank computes on its own samples, and the ranks
# average their gradients before the optimizer step. This is all of data parallelism, and it takes one all-reduce per
# parameter. The rest of this lab makes it fast, first by sending fewer and larger messages, then by sending them while
# the backward pass is still running. These three stages, called *rungs* here, make up
# `torch.nn.parallel.DistributedDataParallel`.
#
# ![Gradients collected in buckets, in the order in which the backward pass computes
# them](../slides/figures/ddp-buckets.svg)
#
# *From [lecture 2, Collectives and DDP](../slides/ddp.md), which comes before this lab.*
#
# **After this lab, you will be able to**
#
# - write DDP with autograd hooks and one collective, and explain why its result equals single-process training;
# - explain the purpose of a bucket, its memory cost, and why buckets are filled from the last layer backwards;
# - determine from a log of collectives or from a timeline whether communication overlaps with the backward pass;
# - accumulate gradients over micro-batches without communicating in each of them;
# - recognize the usual bugs, most of which raise no error.
#
# **You need** to know autograd (`backward` adds to `.grad`) and, from lab 01, ranks, process
# groups, all-reduce and `wait()`.
#
# **Time** 75 minutes. **Runs** on a laptop (gloo, 2 processes), on one GPU, or on a GPU node (NCCL, one rank per GPU).
# **Memory** at most 4 MiB of tensors per rank (measured at the end); a process takes about 270 MiB, mostly for torch's
# code, which the ranks share. (gloo and NCCL are the communication libraries for CPUs and for GPUs, respectively.)

# %% tags=["setup"]
# set-up
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.instruments.launch import RankError, launch, rank_device
from minifsdp.private import at_end_of_backward

RANKS, ROWS, CONTEXT = 2, 8, 32  # N; rows per global batch; tokens per row

# %% [markdown]
# ## Two devices, two different models
#
# If two devices process half of the samples each, a batch takes half the time. But they compute two different
# gradients, and after the first step, they hold two different models.
#
# This lab trains a small GPT to count, on samples such as 41, 42, 43, ... (the rows of a batch). The global batch of a
# step is the same for any number of ranks, and each rank takes its samples from it. Every rank initializes its weights
# with a different seed, as separate programs would, and receives the weights of rank 0 before training (in
# `start_equal`, with one broadcast per parameter, as in lab 01).
#
# The GPT has two embeddings (tokens and positions), four blocks of 12 parameter tensors each (two
# LayerNorms and four linear layers, each with a weight and a bias), and a final LayerNorm and
# linear layer, with a weight and a bias each.

# %%
import contextlib
import re
import tempfile

from torch.profiler import record_function

import minifsdp
from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.gpt import GPT
from minifsdp.instruments import plots
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import overlap, read_trace
from minifsdp.instruments.watch.trace import record_trace


def new_model() -> GPT:
    """Four blocks of two LayerNorms and four Linears; two embeddings before them, a LayerNorm and a Linear after."""
    torch.manual_seed(dist.get_rank())
    return GPT(width=64, layers=4, context=CONTEXT).to(rank_device())


def start_equal(model: nn.Module) -> None:
    for p in model.parameters():
        comm.broadcast(p.data, 0, comm.world()).wait()


def whole_batch(step: int, rows: int = ROWS) -> Tensor:
    """Return [rows, CONTEXT + 1] tokens that count upwards from a random start."""
    first = torch.randint(257, (rows, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(CONTEXT + 1)) % 257


def my_rows(step: int, rows: int = ROWS) -> Tensor:
    """Return this rank's rows of the batch, [rows / N, CONTEXT + 1]."""
    return whole_batch(step, rows).chunk(dist.get_world_size())[dist.get_rank()].to(rank_device())


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean loss over this rank's rows and positions."""
    return model(rows[:, :-1], rows[:, 1:])


# %% [markdown]
# ### Measured: equal parameters, different data, different gradients
#
# After the broadcast, both ranks hold the same parameters. Their samples differ, so their gradients differ. Each rank's
# loss is the mean over its samples, and all ranks have the same number of samples. The mean of all ranks' gradients is
# therefore the gradient of the mean loss over the global batch, as a single process would compute it.


# %% tags=["C40"]
def local_gradient() -> tuple[Tensor, Tensor]:
    """Return the head's bias after the broadcast, and its gradient from this rank's own rows."""
    model = new_model()
    start_equal(model)
    loss_of(model, my_rows(0)).backward()
    return model.head.bias.detach().cpu(), model.head.bias.grad.cpu()


((alone_bias, whole),) = launch(local_gradient, 1)
(bias_0, grad_0), (bias_1, grad_1) = launch(local_gradient, RANKS)
mean = (grad_0 + grad_1) / RANKS
print(f"parameters equal on both ranks: {torch.equal(bias_0, bias_1)}")
print(f"gradients equal on both ranks:  {torch.allclose(grad_0, grad_1)}")
print(f"their mean is the gradient of one process on the full batch: {torch.allclose(mean, whole, atol=1e-6)}")
print(f"their sum is that gradient times {(grad_0 + grad_1).norm() / whole.norm():.4f}")
assert torch.equal(bias_0, bias_1)
assert not torch.allclose(grad_0, grad_1)
assert torch.allclose(mean, whole, atol=1e-6)

# %% [markdown]
# ## 2.1 Average a gradient
#
# *5 minutes, easy*
#
# A *post-accumulate-grad hook* is a function that autograd calls with a parameter as soon as
# `backward` has accumulated this parameter's gradient into `.grad`. Write the body of the hook: it replaces
# `param.grad` with its mean over the ranks of `group`.
#
# Use `comm.all_reduce(tensor, group, op)`: it reduces `tensor` in place, with the same result on
# all ranks, and returns a handle. The result may be read after `handle.wait()`. The operation `op`
# is `comm.SUM` or `comm.MEAN`; `group.size()` is N.
#
# Predict: how many all-reduces does one training step of this GPT then issue?

# %%
predict("2.1", ..., "all-reduces in one step of one rank, one per parameter tensor")


# %% tags=["exercise-2.1"]
from .ex1_average_gradient import average_gradient

# %% [markdown]
# Rung 1 registers the hook on every parameter. The training loop is the same as for a single process. In the code, a
# *rung* is a function that prepares a model and returns the function that the loop calls between `backward` and `step`.
# For rung 1, the returned function does nothing.


# %%
def nothing() -> None: ...


def alone(model: nn.Module) -> Callable[[], None]:
    """One process, no communication."""
    return nothing


def rung_1(model: nn.Module) -> Callable[[], None]:
    """Issue an all-reduce per parameter."""
    start_equal(model)
    group = comm.world()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: average_gradient(p, group))
    return nothing


@torch.no_grad()
def sgd_step(model: nn.Module) -> None:
    for p in model.parameters():
        p -= 0.5 * p.grad
        p.grad = None


def train(rung, steps: int = 6) -> list[float]:
    """Return this rank's loss at each step."""
    model = new_model()
    after_backward = rung(model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, my_rows(step))
        loss.backward()
        after_backward()
        sgd_step(model)
        losses.append(loss.item())
    return losses


def mean_losses(rung, ranks: int) -> list[float]:
    """Return the loss over the global batch at each step, which is the mean over the ranks."""
    return [sum(losses) / ranks for losses in zip(*launch(train, ranks, rung), strict=True)]


def close(mine: list[float], theirs: list[float]) -> bool:
    return all(abs(a - b) < 1e-4 for a, b in zip(mine, theirs, strict=True))


# %% [markdown]
# ### Measured: the same loss as a single process
#
# For each step, the cell prints the mean of all ranks' losses next to the loss of a single process with the full batch.
# Equal parameters, gradients and optimizers produce equal steps, so the copies of the model never need to be compared
# again.

# %% tags=["C7"]
one_process, two_ranks = mean_losses(alone, 1), mean_losses(rung_1, RANKS)
for step, (one, two) in enumerate(zip(one_process, two_ranks, strict=True)):
    print(f"step {step}: one process {one:.4f}, two ranks {two:.4f}")
assert close(one_process, two_ranks), "the ranks' losses differ from those of one process"

# %% [markdown]
# `follow` records the events of one step in order, with one letter for each: `g` means that a
# gradient has been computed, `i` that an all-reduce has been issued, `w` that the *host* (the CPU
# that runs your program) waits for it, and `|` that `backward` has returned. It also keeps the log
# of collectives.


# %%
def follow(rung) -> tuple[str, list[comm.Call]]:
    model = new_model()
    events = []
    for p in model.parameters():  # registered first, so these hooks run before those of the rung
        p.register_post_accumulate_grad_hook(lambda p: events.append("g"))
    after_backward = rung(model)

    @contextlib.contextmanager
    def watch(call: comm.Call, phase: str):
        events.append(phase[0])
        yield

    comm.observers.append(watch)
    with comm.record() as calls:
        loss_of(model, my_rows(0)).backward()
        events.append("|")
        after_backward()
    comm.observers.remove(watch)
    return "".join(events), calls


def brief(events: str) -> str:
    """Return the events, with repetitions written as `iw*4`."""
    runs = re.finditer(r"(giw|iw(?!w)|[giw|])\1*", events)
    return " ".join(run[1] + f"*{len(run[0]) // len(run[1])}" * (run[0] != run[1]) for run in runs)


events_1, calls_1 = launch(follow, RANKS, rung_1)[0]
outcome("2.1", len(calls_1), slips={"one for the whole model": 1, "a weight and its bias are two tensors": 29})
print(brief(events_1))
print(f"{len(calls_1)} all-reduces, {sum(call.payload for call in calls_1):,} bytes together")

# %% [markdown]
# ### Measured: every rank holds the full model state
#
# The *ledger* is the course's instrument for memory (lab 00). It records every memory block returned by an operator,
# and counts the block under a tag for its purpose until it is freed. Here, it counts the bytes at the end of each stage
# of a step. Let Ψ be the total number of parameter elements. The prediction is 4Ψ bytes each for parameters and
# gradients, and 8Ψ bytes for AdamW plus a step counter of 4 bytes per tensor. The values for a single process are drawn
# in grey.


# %% tags=["C7"]
def measure_memory(rung) -> dict[str, object]:
    """Return the bytes in one step: per stage, over time, and two peaks (gradients with staging, and everything)."""
    with Ledger() as ledger:
        model = new_model()
        after_backward = rung(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(model, optimizer)
        ledger.reset_peaks()
        stages = {"built": ledger.mark("built")}
        loss = loss_of(model, my_rows(0))
        stages["forward"] = ledger.mark("forward")
        loss.backward()
        after_backward()
        stages["backward"], curve = ledger.mark("backward"), ledger.curve()
        optimizer.step()
        stages["step"] = ledger.mark("step")
        optimizer.zero_grad()
        stages["zero_grad"] = ledger.mark("zero_grad")
        peak = ledger.peak_of("gradients", "communication")
        return {"stages": stages, "curve": curve, "peak": peak, "all": ledger.peak.total}


def totals(usage: dict) -> dict[str, int]:
    return {stage: sum(sizes.values()) for stage, sizes in usage["stages"].items()}


numels = [p.numel() for p in GPT(width=64, layers=4, context=CONTEXT).parameters()]
psi = sum(numels)
setting = closed_form.Setting(RANKS)
expected = closed_form.ddp(numels, setting)
(usage_alone,) = launch(measure_memory, 1, alone)
usage_1 = launch(measure_memory, RANKS, rung_1)[0]
held = usage_1["stages"]["step"]
for tag in ("parameters", "gradients", "optimizer"):
    print(f"{tag}: predicted {getattr(expected, tag):,} bytes, measured {held[tag]:,}")
    assert held[tag] == getattr(expected, tag)
state = expected.parameters + expected.gradients + expected.optimizer
plots.stages(
    usage_1["stages"],
    predicted={"built": expected.parameters, "step": state},
    earlier={"one process": totals(usage_alone)},
    title=f"Each of {RANKS} ranks holds {state / 2**20:.1f} MiB of model state, as a single process does",
    says="Live memory at the end of each stage. The ranks differ from one process only in activations, because each "
    f"has half of the samples: after forward, a rank holds {totals(usage_1)['forward'] / 2**20:.1f} MiB, and one "
    f"process {totals(usage_alone)['forward'] / 2**20:.1f} MiB.",
    lab="02",
)

# %% [markdown]
# ### Measured: a sum instead of a mean
#
# Here, the hook deliberately sums without dividing. How much larger is the first step than with the mean?


# %% tags=["C40"]
def first_step(op, optimizer_class) -> float:
    """Return the length of the first step, which is the norm of the change in the parameters."""
    model = new_model()
    start_equal(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: comm.all_reduce(p.grad, comm.world(), op).wait())
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    loss_of(model, my_rows(0)).backward()
    optimizer_class(model.parameters(), lr=1e-3).step()
    return (torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm().item()


def compare_steps() -> dict[str, float]:
    kinds = (torch.optim.SGD, torch.optim.Adam)
    return {kind.__name__: first_step(comm.SUM, kind) / first_step(comm.MEAN, kind) for kind in kinds}


longer = launch(compare_steps, RANKS)[0]
for name, factor in longer.items():
    print(f"{name}: the step with summed gradients is {factor:.2f} times as long")
assert abs(longer["SGD"] - RANKS) < 1e-3
assert abs(longer["Adam"] - 1) < 0.02

# %% [markdown]
# With SGD, the effective learning rate is N times the specified value, so the effective rate on 64 ranks is 8 times as
# large as on 8 ranks. Adam normalizes the gradient by its magnitude, so apart from `eps`, a constant factor makes no
# difference. With Adam, the mistake is hardly visible unless gradients are clipped. The norm of the summed gradients is
# N times as large, so clipping begins at 1 / N of the intended threshold.
#
# ### Break it: reduce the parameter
#
# Other tensor hooks receive a gradient; a post-accumulate-grad hook receives the *parameter*. Here, the argument of the
# hook is named `grad`, and nothing fails:


# %%
def reduces_the_parameter(model: nn.Module) -> Callable[[], None]:
    start_equal(model)
    for grad in model.parameters():
        grad.register_post_accumulate_grad_hook(lambda grad: comm.all_reduce(grad.data, comm.world(), comm.MEAN).wait())
    return nothing


def replicas(rung, steps: int = 6) -> tuple[list[float], list[float]]:
    """Return this rank's losses, and the largest difference of its parameters from those of rank 0 after each step."""
    model = new_model()
    after_backward = rung(model)
    losses, differences = [], []
    for step in range(steps):
        loss = loss_of(model, my_rows(step))
        loss.backward()
        after_backward()
        sgd_step(model)
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        theirs = mine.clone()
        comm.broadcast(theirs, 0, comm.world()).wait()
        losses.append(loss.item())
        differences.append((mine - theirs).abs().max().item())
    return losses, differences


rungs = {"reduced parameters": reduces_the_parameter, "rung 1": rung_1}
found = launch(lambda: [replicas(rung) for rung in rungs.values()], RANKS)[1]
for name, (losses, differences) in zip(rungs, found, strict=True):
    falls = losses[-1] < losses[0]
    print(f"with {name}: the loss falls: {falls}; largest difference from rank 0: {max(differences):.4f}")
assert max(differences) == 0.0

# %% [markdown]
# ### Break it: forget the broadcast
#
# Without `start_equal`, the ranks average the gradients of two different models. A common claim is that such ranks
# diverge. How does the difference change from step to step?


# %%
def no_broadcast(model: nn.Module) -> Callable[[], None]:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: average_gradient(p, comm.world()))
    return nothing


losses, differences = launch(replicas, RANKS, no_broadcast, 8)[1]
print(f"the loss falls: {losses[-1] < losses[0]}")
print(f"largest difference from rank 0 after step 0: {differences[0]:.4f}, after step 7: {differences[-1]:.4f}")
assert abs(differences[0] - differences[-1]) < 1e-4

# %% [markdown]
# The difference stays the same to the last printed digit: equal gradients produce equal steps, and equal steps leave
# the difference unchanged (with SGD; weight decay shrinks it slowly). But each gradient is a mean over two different
# models, so it is the gradient of neither. The loss curves do not reveal the mistake, and neither does the checkpoint,
# which comes from rank 0. Only a comparison between ranks reveals it. When `DistributedDataParallel` is constructed, it
# compares the shapes of the parameters and broadcasts the parameters and buffers of rank 0.
#
# ### Break it: a parameter that one rank does not use
#
# Rank 0 uses both layers, but rank 1 uses only the first (because of a router, a modality missing
# from this batch, or an early exit). A hook fires only for a gradient that exists, so the ranks
# issue different numbers of all-reduces.


# %%
def two_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)).to(rank_device())


def one_rank_skips(rung, used: dict[int, list[int]]) -> list[Tensor]:
    """Return the gradients of two layers; each rank uses the layers that `used` lists for it."""
    model = two_layers()
    after_backward = rung(model)
    x = torch.ones(1, 4, device=rank_device()) * (1 + dist.get_rank())
    for index in used[dist.get_rank()]:
        x = model[index](x)
    x.sum().backward()
    after_backward()
    return [torch.zeros(4, 4) if p.grad is None else p.grad.cpu() for p in model.parameters()]


try:
    launch(one_rank_skips, RANKS, rung_1, {0: [0, 1], 1: [0]}, timeout=2)
except RankError as error:
    print(error)
    functions = re.findall(r"\bin (\w+)", error.failures[0])
    print("rank 0 is in", " <- ".join(name for name in functions if name in ("wait", "average_gradient")))

# %% [markdown]
# Rank 0's second all-reduce has no counterpart on rank 1. If the ranks have different numbers of batches, the effect is
# the same: the rank with an additional batch waits in that batch's first all-reduce. The stack trace of the stuck rank
# shows *where* it is waiting; the logs of the other ranks show what they did instead. (With NCCL, `wait` blocks a
# stream and not the host, so the rank hangs only where the host needs the value of a gradient.)
#
# A hang is not the worst outcome. Now rank 0 uses layer 0 and rank 1 uses layer 1, so each rank issues one all-reduce:


# %%
def skipped_under(rungs: list, used: dict[int, list[int]]) -> list[tuple[list[Tensor], ...]]:
    """Return the result of `one_rank_skips` under each rung: the gradients of rank 0, of rank 1, ..."""
    each_rank = launch(lambda: [one_rank_skips(rung, used) for rung in rungs], RANKS)
    return list(zip(*each_rank, strict=True))


own, found = skipped_under([alone, rung_1], {0: [0], 1: [1]})
mixed = torch.allclose(found[0][0], (own[0][0] + own[1][1]) / RANKS)
print(f"rank 0's gradient of layer 0 is averaged with rank 1's gradient of layer 1: {mixed}")

# %% [markdown]
# There is neither an error nor a hang, but the gradients are meaningless. Collectives have no names; they are matched
# by the order in which they are issued. With the buckets of exercise 2.3, every rank issues the same collectives, with
# zeros for unused parameters.
#
# **What is still missing**: a step sends 54 messages, most of them tiny, and the host waits for
# each of them.
#
# ## 2.2 Assign buckets
#
# *12 minutes, medium*
#
# However short it is, every message takes the full latency, plus bytes / bandwidth. Collecting gradients in *buckets*
# reduces the number of latencies. Buckets are assigned by the same three rules as in torch
# (`_compute_bucket_assignment_by_size`):
#
# - Process the parameters in *reverse* order of registration. The backward pass begins at the last layer, so the first
#   bucket is complete first.
# - Add parameters to a bucket until its size is at least `cap_bytes`. The parameter that reaches the cap still belongs
#   to the bucket (parameters are never split).
# - A buffer has one dtype, so each dtype has its own open bucket. A parameter joins the open bucket
#   of its dtype, even if parameters of another dtype came in between. The buckets are listed in the
#   order in which they are opened.
#
# The remaining parameters also form a bucket. The GPT has Ψ = 235,265 elements of 4 bytes. In reverse order, the head
# and its LayerNorm take 67 kB, each of the four blocks takes 200 kB, and the embeddings take 74 kB. No tensor is larger
# than 66 kB. The cap below is 256 KiB, or 262 kB. Predict: how many buckets are there?

# %%
CAP = 256 * 2**10
predict("2.2", ..., "buckets with a cap of 256 KiB")


# %% tags=["exercise-2.2"]
from .ex2_assign_buckets import assign_buckets

# %%
params = list(GPT(width=64, layers=4, context=CONTEXT).parameters())
buckets = assign_buckets(params, CAP)
bucket_bytes = [sum(p.numel() * p.element_size() for p in bucket) for bucket in buckets]
outcome("2.2", len(buckets), slips={"Ψ / cap: elements against bytes": 1, "what is left at the end is a bucket too": 3})
for number, bucket in enumerate(buckets):
    print(f"bucket {number}: {len(bucket)} parameters, {sum(p.numel() for p in bucket):,} elements")
backwards = params[::-1]
torchs = [[backwards[i] for i in indices] for indices in dist._compute_bucket_assignment_by_size(backwards, [CAP])[0]]
print(f"the same buckets as torch's: {[list(map(id, b)) for b in buckets] == [list(map(id, b)) for b in torchs]}")

# %% [markdown]
# ## 2.3 Start a bucket
#
# *10 minutes, medium*
#
# The reduction of a bucket has two halves. The first half copies the gradients into one flat buffer and issues the
# all-reduce. The second half (exercise 2.4) waits for the all-reduce and copies the means back. Other work can run
# between the two halves, as it does in rung 3.
#
# `device.empty(numel, dtype, "communication", where)` allocates the buffer without initializing it, and records its
# role in the ledger; `where` is the `.device` of a parameter. `flat.split([n, m, ...])` returns views of consecutive
# ranges of the buffer.
#
# A gradient that is None on this rank counts *as zero*. All ranks then have the same buckets,
# whichever parameters they used, and the mean over the ranks is still the sum divided by N.
#
# These buffers are called *staging* buffers. Suppose that each bucket is finished before the next one is started.
# Predict: how many bytes of staging buffers are allocated at the peak? (The number of elements in each bucket is
# printed above.)

# %%
predict("2.3", ..., "bytes of staging at the peak, one bucket after the other")


# %% tags=["exercise-2.3"]
from .ex3_start_bucket import start_bucket

# %% [markdown]
# ## 2.4 Finish a bucket
#
# *10 minutes, medium*
#
# Wait for the all-reduce, copy the means back into the existing gradients, and free the buffer (`device.free(flat)`). A
# gradient that was None becomes a tensor with its own storage.


# %% tags=["exercise-2.4"]
from .ex4_finish_bucket import finish_bucket

# %% [markdown]
# Rung 2 reduces the buckets after the backward pass, one after another.


# %% tags=["shown"]
def rung_2(model: nn.Module) -> Callable[[], None]:
    """Issue an all-reduce per bucket, after backward."""
    start_equal(model)
    group = comm.world()
    buckets = assign_buckets(list(model.parameters()), CAP)

    def after_backward() -> None:
        for bucket in buckets:
            finish_bucket(bucket, *start_bucket(bucket, group))

    return after_backward


(events_2, calls_2), usage_2 = launch(lambda: (follow(rung_2), measure_memory(rung_2)), RANKS)[0]
staging = usage_2["peak"] - 4 * psi
over = "the cap: a bucket exceeds it by a part of its last parameter"
first = {"the first bucket; the largest counts": bucket_bytes[0]}
outcome("2.3", staging, slips={over: CAP, "all buckets at once": 4 * psi} | first)
print(brief(events_2))
assert staging == max(bucket_bytes), f"{staging:,} bytes on top of the gradients, the largest bucket has less"

# %% [markdown]
# ### Measured: buckets save latency
#
# Both rungs move the same number of bytes. The emulated link has a latency of 1 ms and a bandwidth of 25 MB/s per
# direction. This is slow enough to matter for a model that fits on a laptop. A message of `wire` bytes takes latency +
# wire / bandwidth. In a ring of N ranks, each rank sends 2 (N - 1) / N * b bytes in an all-reduce of b bytes.

# %% tags=["C7"]
LINK = "latency=1ms,bandwidth=25MB/s"
link = parse_link(LINK)
for name, calls in {"rung 1": calls_1, "rung 2": calls_2}.items():
    payload, latency = sum(call.payload for call in calls), len(calls) * link.latency
    total = sum(map(link.seconds, calls))
    print(
        f"{name}: {len(calls)} all-reduces, {payload:,} bytes; the link takes {1e3 * total:.1f} ms, "
        f"of which {1e3 * latency:.0f} are latency"
    )
assert (len(calls_1), len(calls_2)) == (len(params), len(buckets))
assert sum(call.payload for call in calls_1) == sum(call.payload for call in calls_2) == 4 * psi

# %% [markdown]
# The cost is a staging buffer: while a bucket is being reduced, it occupies a buffer of its own size, so the peak is
# the size of the largest bucket.

# %%
plots.curve(
    usage_2["curve"],
    earlier={"rung 1": usage_1["curve"]},
    title=f"Rung 2 stages one bucket at a time: {staging / 2**20:.2f} MiB on top of the gradients",
    says="Live memory in forward and backward. The buckets' buffers come last, one at a time, when the activations are "
    "already freed. They do not raise the peak.",
    lab="02",
)

# %% [markdown]
# ### The fix for unused parameters
#
# The next cell repeats the two cases from above with rung 2. Every rank reduces every bucket, with zeros for unused
# parameters.

# %%
for used in ({0: [0, 1], 1: [0]}, {0: [0], 1: [1]}):
    own, grads = skipped_under([alone, rung_2], used)
    means = [(own[0][layer] + own[1][layer]) / RANKS for layer in (0, 1)]
    right = all(torch.allclose(mine[layer], means[layer]) for mine in grads for layer in (0, 1))
    print(f"layers used {used}: every gradient is the mean over the ranks: {right}")
    assert right

# %% [markdown]
# Rung 3 will not have this fix, because its hooks fire only for existing gradients.
#
# **What is still missing**: the first message is sent only after the entire backward pass is over.
#
# ## 2.5 Reduction during the backward pass
#
# *12 minutes, hard*
#
# The gradients of the last layers are ready long before those of the first layers. So a bucket can be reduced as soon
# as its last gradient is ready, while the backward pass continues. The host has to wait only at the end of the backward
# pass.
#
# One condition must hold: **all ranks launch the buckets in the same order**. The order in which gradients become ready
# may differ from rank to rank, because the graphs may differ. But collectives are matched across ranks by the order in
# which they are issued. So bucket i is launched when it is full *and* buckets 0 to i - 1 have been launched.
#
# The state of the hook is in `reducer`:
#
# | field | content |
# |---|---|
# | `buckets` | list of buckets, each a list of parameters |
# | `bucket_of` | the number of a parameter's bucket: `reducer.bucket_of[param]` |
# | `missing` | per bucket, the number of gradients still missing in this backward pass; your hook decrements it |
# | `in_flight` | results of `start` for the buckets 0, 1, ... launched so far; your hook appends them |
# | `sync` | whether this backward pass communicates; if False, the hook returns immediately |
# | `start` | `start(bucket)` copies gradients into a buffer, launches the all-reduce, returns buffer and handle |
# | `finish` | `finish()` finishes every bucket in flight, then resets `missing` and `in_flight` |
#
# Autograd's engine has a queue of functions that run after all gradients are computed and before
# `backward` returns. A hook adds a function to this queue with `at_end_of_backward(function)`.
#
# Predict: now that no bucket is finished before the end of the backward pass, how many bytes of staging buffers are
# allocated at the peak?

# %%
predict("2.5", ..., "staging at the peak, as a multiple of the gradients' bytes, two decimals")


# %% tags=["exercise-2.5"]
from .ex5_on_gradient import on_gradient

# %% [markdown]
# Rung 3 combines the functions of exercises 2.2 to 2.5.


# %% tags=["shown"]
def make_reducer(model: nn.Module, cap_bytes: int, hook=None) -> SimpleNamespace:
    """Buckets, their state, and the hook on every parameter."""
    buckets = assign_buckets(list(model.parameters()), cap_bytes)
    reducer = SimpleNamespace(
        buckets=buckets,
        bucket_of={p: number for number, bucket in enumerate(buckets) for p in bucket},
        missing=[len(bucket) for bucket in buckets],
        in_flight=[],
        sync=True,
        start=lambda bucket: start_bucket(bucket, comm.world()),
    )

    def finish() -> None:
        for bucket, (flat, handle) in zip(buckets, reducer.in_flight, strict=True):
            finish_bucket(bucket, flat, handle)
        reducer.missing = [len(bucket) for bucket in buckets]
        reducer.in_flight = []

    reducer.finish = finish
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (hook or on_gradient)(p, reducer))
    return reducer


def rung_3(model: nn.Module) -> Callable[[], None]:
    """Issue an all-reduce per bucket, during backward."""
    start_equal(model)
    make_reducer(model, CAP)
    return nothing


# %% [markdown]
# ### Measured: reductions start before the backward pass has ended
#
# The cell prints the events of one step of each rung, in order and with the letters from above: `g` gradient, `i`
# issue, `w` wait, `|` backward has returned. Rung 1 also issues its all-reduces early, but the host waits for each one
# immediately (`giw`), and the backward pass continues only when the result has arrived. An all-reduce overlaps with the
# backward pass only if it is in progress while gradients are still being computed.

# %% tags=["C7"]
seen = launch(follow, RANKS, rung_3)
events_3, calls_3 = seen[0]
for name, events in {"rung 1": events_1, "rung 2": events_2, "rung 3": events_3}.items():
    early = events[: events.rindex("g")].count("i")
    under_way, most = 0, 0
    for event in events:
        under_way += {"i": 1, "w": -1}.get(event, 0)
        most = max(most, under_way)
    print(f"{name}: {early} of {events.count('i')} issued before the last gradient, at most {most} in progress")
    print(f"    {brief(events)}")
print(f"the same collectives in the same order on both ranks: {seen[0][1] == seen[1][1]}")
print(f"the loss is that of one process: {close(one_process, mean_losses(rung_3, RANKS))}")
assert events_3[: events_3.rindex("g")].count("i") == len(buckets) - 1
assert most == len(buckets), "rung 3 waits before all of its buckets have left"
assert seen[0][1] == seen[1][1]

# %% [markdown]
# Bucket 0 has 12 parameters, but is launched only after 14 gradients: gradients do not arrive exactly in reverse order
# of registration. Bucket 0 ends with the first linear layer of the last block. The block's second LayerNorm is
# registered before this layer, so it belongs to bucket 1, but its two gradients are computed earlier. The all-reduce of
# the last bucket is launched only with the last gradient, so its communication is always exposed.
#
# By default, torch uses a single bucket in the first training step. From the second step on, it applies the rules of
# 2.2 in the order in which the gradients actually arrived. The cap is 1 MiB for bucket 0, so that it is launched early,
# and 25 MiB for the others.
#
# The next figure shows one step of each rung over time, on rank 0 and on the emulated link. Here, the batch has more
# samples, so that the backward pass is long enough to hide some of the communication. Even if most of the communication
# is hidden, the step may be only a little shorter: on a CPU, gloo's reductions run on the same cores as the backward
# pass, and slow it down.


# %% tags=["C7", "nbval-ignore-output"]
TRACED_ROWS = 64


def trace_rungs(rungs: dict, text: str) -> dict[str, list]:
    """Return the spans of one step of each rung on this rank, the fastest of three; rungs alternate."""
    let_communication_go_first()
    models = {name: new_model() for name in rungs}
    after = {name: rung(models[name]) for name, rung in rungs.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    rows = my_rows(0, TRACED_ROWS)
    steps = {name: [] for name in rungs}
    with parse_link(text) as link, tempfile.TemporaryDirectory() as folder:
        for name in [*rungs] * 3:
            with record_trace(f"{folder}/trace.json", link):
                comm.all_reduce(torch.zeros(1, device=rank_device()), comm.world()).wait()  # all ranks begin together
                with record_function("forward"):
                    loss = loss_of(models[name], rows)
                with record_function("backward"):
                    loss.backward()
                    after[name]()
                with record_function("optimizer"):
                    optimizers[name].step()
                    device.synchronize(rank_device())
            optimizers[name].zero_grad()
            steps[name].append(read_trace(f"{folder}/trace.json"))
    return {name: min(each, key=end_of) for name, each in steps.items()}


def end_of(spans: list) -> float:
    return max(span.end for span in spans)


spans = launch(trace_rungs, RANKS, {"rung 1": rung_1, "rung 2": rung_2, "rung 3": rung_3}, LINK)[0]
times = {name: end_of(each) for name, each in spans.items()}
if times["rung 3"] > times["rung 2"]:
    print("rung 3 was not faster here: its compute shares the cores. Look at the overlap instead.")
plots.timeline(
    spans,
    title=f"{overlap(spans['rung 3']):.0%} of rung 3's communication is under compute; steps take "
    + ", ".join(f"{1e3 * seconds:.0f}" for seconds in times.values())
    + " ms",
    says="One step on a link of 1 ms and 25 MB/s. Rung 1 pays a latency per parameter, rung 2 communicates after "
    "backward, rung 3 during it.",
    lab="02",
)

# %% [markdown]
# ### Measured: overlap costs a copy of the gradients
#
# The buffer of every bucket now stays alive from its launch to the end of the backward pass.

# %%
usage_3 = launch(measure_memory, RANKS, rung_3)[0]
staging_3 = usage_3["peak"] - 4 * psi
largest = round(max(bucket_bytes) / (4 * psi), 2)
outcome("2.5", round(staging_3 / (4 * psi), 2), slips={"the largest bucket: none is freed before the end": largest})
assert staging_3 == 4 * psi
everything = closed_form.ddp(numels, setting, staging=psi)
print(f"gradients and staging: predicted {everything.gradients_peak:,} bytes, measured {usage_3['peak']:,}")
peaks = set()
for name, usage in {"rung 1": usage_1, "rung 2": usage_2, "rung 3": usage_3}.items():
    highest = max(map(sum, zip(*usage["curve"]["tags"].values(), strict=True)))
    print(f"{name}: at most {highest:,} bytes in forward and backward, {usage['all']:,} in the whole step")
    peaks.add((highest, usage["all"]))
assert len(peaks) == 1
plots.curve(
    usage_3["curve"],
    earlier={"rung 2": usage_2["curve"]},
    title=f"Rung 3 stages all buckets: {staging_3 / 2**20:.2f} MiB, as much as the gradients take",
    says="Live memory in forward and backward. The buffers fill while backward frees activations, and they still exist "
    "when all gradients are complete.",
    lab="02",
)

# %% [markdown]
# Neither the peak of the two passes nor that of the entire step changes from rung to rung, because the buffers use the
# memory freed by the backward pass. If there are few activations, for example with activation checkpointing or with one
# sample per rank, the buffers do raise the peak. `gradient_as_bucket_view=True` avoids this copy of the gradients: the
# buckets are permanent, and every `.grad` is a view of a bucket. In `minifsdp/ddp/buckets.py`, the two kinds of bucket
# are `StagingBucket` and `GradientBucket`, with about thirty lines each. Unlike your functions, `StagingBucket` copies
# nothing back: each gradient is moved into the buffer as soon as it has been computed, and stays there. But unlike a
# `GradientBucket`, it is not permanent: every backward pass allocates a new buffer, which `zero_grad` frees.
#
# ### Compared with torch
#
# The next cell compares your gradients after one backward pass, bit for bit, with those of `DistributedDataParallel` in
# torch and in `minifsdp`.


# %%
def gradients_under(kind: str) -> Tensor:
    model = new_model()
    if kind == "yours":
        rung_3(model)
        wrapped = model
    else:
        ddp = {"torch": nn.parallel.DistributedDataParallel, "minifsdp": minifsdp.DistributedDataParallel}[kind]
        wrapped = ddp(model, bucket_cap_mb=CAP / 2**20)
    loss_of(wrapped, my_rows(0)).backward()
    return torch.cat([p.grad.flatten().cpu() for p in model.parameters()])


def compare_gradients() -> dict[str, bool]:
    mine = gradients_under("yours")
    return {kind: torch.equal(mine, gradients_under(kind)) for kind in ("torch", "minifsdp")}


same = launch(compare_gradients, RANKS)
print(same)
assert all(all(each.values()) for each in same)

# %% [markdown]
# **What is still missing**: with several micro-batches per step, every backward pass communicates.
#
# ## 2.6 Accumulate without communication
#
# *8 minutes, medium*
#
# A batch that does not fit in memory is processed in k micro-batches, and `backward` accumulates their gradients in
# `.grad`. The mean over ranks is needed only after the last micro-batch. In torch, the first k - 1 micro-batches run
# inside `with ddp.no_sync():`. Here, `reducer.sync` decides whether a backward pass communicates, and your hook reads
# this flag.
#
# When your function returns, `.grad` is the gradient of the *mean* loss over all micro-batches and
# ranks, and `reducer.sync` is True again.
#
# The bytes passed to an all-reduce are its *payload*; the number of bytes sent by a rank depends on the algorithm, as
# above. Predict: what is the payload of a step with k = 4 micro-batches?

# %%
predict("2.6", ..., "payload of a step of 4 micro-batches, as a multiple of the gradients' bytes, two decimals")


# %% tags=["exercise-2.6"]
from .ex6_accumulate import accumulate

# %%
MICRO = 4


def accumulated(how) -> tuple[Tensor, int, int]:
    """Return the head's gradient after four micro-batches, the number of all-reduces, and their bytes."""
    model = new_model()
    start_equal(model)
    reducer = make_reducer(model, CAP)
    with comm.record() as calls:
        how(list(my_rows(0).chunk(MICRO)), lambda rows: loss_of(model, rows), reducer)
    return model.head.weight.grad.cpu(), len(calls), sum(call.payload for call in calls)


def one_batch() -> Tensor:
    model = new_model()
    loss_of(model, my_rows(0)).backward()
    return model.head.weight.grad.cpu()


def every_time(micro_batches, loss_of, reducer) -> None:
    """Accumulate without `no_sync`."""
    for batch in micro_batches:
        (loss_of(batch) / len(micro_batches)).backward()


(whole_gradient,) = launch(one_batch, 1)
gradient, messages, payload = launch(accumulated, RANKS, accumulate)[0]
outcome("2.6", round(payload / (4 * psi), 2), slips={"once per micro-batch, as without no_sync": MICRO})
print(f"equal to the gradient of one process on the full batch: {torch.allclose(gradient, whole_gradient, atol=1e-6)}")
print(f"{messages} all-reduces, {payload:,} bytes")
assert payload == 4 * psi
assert torch.allclose(gradient, whole_gradient, atol=1e-6)

# %% [markdown]
# ## What is still missing
#
# Overlap hides communication but saves no memory. Each rank holds all parameters, all gradients and
# all optimizer state, and all ranks compute the same optimizer step. Each of the N devices holds
# 16Ψ bytes. Lab 03 shards the optimizer state, then the gradients.

# %%
rungs = {"one process": usage_alone, "rung 1": usage_1, "rung 2": usage_2, "rung 3": usage_3}
for name, usage in rungs.items():
    held = usage["stages"]["step"]
    kept = sum(held[tag] for tag in ("parameters", "gradients", "optimizer"))
    print(f"{name}: {kept:,} bytes of model state on a rank; gradients and staging at most {usage['peak']:,}")
print(f"most memory that a rank held at any time: {max(w['all'] for w in (usage_1, usage_2, usage_3)) / 2**20:.1f} MiB")

# %% [markdown]
# ## What to remember
#
# 1. With equal initial weights, averaged gradients and equal steps, N copies remain one model, and never need to be
#    compared again.
# 2. Take the mean, not the sum. Reduce the gradient, not the parameter. Broadcast before the first
#    step. None of the three mistakes raises an error.
# 3. With buckets, there is one latency per bucket, not per parameter. Buckets are filled in reverse order of the
#    parameters, because the backward pass completes gradients in roughly this order.
# 4. Overlap separates the two halves of a reduction: launch the reduction of every full bucket, in order, and wait at
#    the end of the backward pass. It costs a copy of the gradients, unless the gradients are views of the buckets.
# 5. Collectives are matched by order. Every rank must issue the same collectives in the same order,
#    whether or not it uses all parameters, has as many batches as the others, or accumulates over
#    micro-batches.
#
# ## More: break it
#
# The lab is complete. This section shows three mistakes that raise no error. Two mistakes give wrong gradients; the
# third causes unnecessary traffic.
#
# ### Break it: launch a bucket when it is full
#
# Rank 1 calls two layers of the same size in the opposite order, so its buckets also fill in the opposite order. The
# following hook launches the reduction of each bucket as soon as the bucket is full:


# %%
def launch_when_full(param: nn.Parameter, reducer: SimpleNamespace) -> None:
    number = reducer.bucket_of[param]
    reducer.missing[number] -= 1
    if reducer.missing[number] == 0:
        reducer.in_flight.append((number, reducer.start(reducer.buckets[number])))
    if len(reducer.in_flight) == len(reducer.buckets):
        reducer.in_flight = [sent for _, sent in sorted(reducer.in_flight, key=lambda each: each[0])]
        at_end_of_backward(reducer.finish)


def eager(model: nn.Module) -> Callable[[], None]:
    start_equal(model)
    make_reducer(model, 0, launch_when_full)
    return nothing


def in_turn(model: nn.Module) -> Callable[[], None]:
    start_equal(model)
    make_reducer(model, 0)
    return nothing


local, *launched = skipped_under([alone, eager, in_turn], {0: [0, 1], 1: [1, 0]})
for name, grads in zip(("when full", "in turn"), launched, strict=True):
    right = [torch.allclose(grads[0][i], (local[0][i] + local[1][i]) / RANKS) for i in (0, 1)]
    crossed = torch.allclose(grads[0][0], (local[0][0] + local[1][1]) / RANKS)
    print_wrapped(
        f"launched {name}: gradients correct: {right}; layer 0 averaged with layer 1 of the other rank: {crossed}"
    )

# %% [markdown]
# If the buckets have equal sizes, the sums are wrong; if the sizes differ, there is an error or a hang. NCCL cannot
# detect the mistake either: it relies on the program for the order of collectives. The order differs between ranks if
# layers are called in a data-dependent order, or if only some ranks take a branch.
#
# ### Break it: an unused parameter, with rung 3
#
# Rank 0 uses layer 0, rank 1 uses layer 1, and both layers are in one bucket.

# %%
own, found = skipped_under([alone, rung_3], {0: [0], 1: [1]})
untouched = all(torch.equal(found[rank][layer], own[rank][layer]) for rank in (0, 1) for layer in (0, 1))
print(f"each rank still has its own gradients: {untouched}")
assert untouched

# %% [markdown]
# The hook of a parameter without a gradient never fires. Neither its bucket nor any later one is ever reduced, and
# here, neither rank reports an error. If one rank uses all its parameters, that rank waits forever. So rung 3 requires
# every parameter to be used on every rank. torch's DDP requires this too, and otherwise raises an error in the next
# forward pass. With `find_unused_parameters=True`, torch traverses the autograd graph after each forward pass and marks
# unused parameters as ready. An additional all-reduce finds the parameters that are unused on *all* ranks.
#
# ### Break it: forget `no_sync`

# %%
gradient, messages, forgotten = launch(accumulated, RANKS, every_time)[0]
print(f"gradient correct: {torch.allclose(gradient, whole_gradient, atol=1e-6)}")
print(f"{messages} all-reduces, {forgotten:,} bytes: {forgotten / payload:.0f} times as many")
assert forgotten == MICRO * payload

# %% [markdown]
# The gradient is still correct: averaging equal values returns the same value, so reducing the accumulated part again
# does not change it. But reducing with a *sum* and dividing only at the end is wrong, because each reduction multiplies
# the accumulated `.grad` by N. In the next cell, element i of the gradient comes only from micro-batch i, so it shows
# how many times this micro-batch is counted:


# %%
def counted_how_often(op) -> list[float]:
    weight = nn.Parameter(torch.zeros(MICRO, device=rank_device()))
    weight.register_post_accumulate_grad_hook(lambda p: comm.all_reduce(p.grad, comm.world(), op).wait())
    for index in range(MICRO):
        weight[index].backward()
    divisor = dist.get_world_size() if op == comm.SUM else 1
    return (weight.grad / divisor).tolist()


means, sums = launch(lambda: (counted_how_often(comm.MEAN), counted_how_often(comm.SUM)), RANKS)[0]
print("mean at every reduction:            ", means)
print("sums, divided by N at the end:      ", sums)

# %% [markdown]
# A common misconception is that accumulation *with* communication "reduces after several steps". In fact, it reduces in
# every micro-batch. In DDP, this only causes traffic; with sharded gradients, it saves memory (labs 03 and 09).
#
# ## Questions
#
# **1. Rank 1's data loader has one batch fewer than rank 0's. What happens, and what are three ways to fix it?**
#
# <details><summary>Answer</summary>
#
# Rank 0 waits in the first all-reduce of its last backward pass until the timeout. There are three fixes. The first is
# to drop the last batch, with a sampler that gives all ranks the same number of batches. The second is an all-reduce of
# one number per step, with which the ranks agree on whether to continue. The third is to let the ranks that have
# finished take part in the remaining collectives with zeros, as torch's `Join` does, and to divide by the number of
# ranks that still have data.
# </details>
#
# **2. The samples are padded sentences and the loss is the mean over non-padding tokens. Is the mean of all ranks'
# gradients still the gradient of the global batch?**
#
# <details><summary>Answer</summary>
#
# No. It is a mean of means: a rank with few non-padding tokens counts as much as a rank with many. Divide the summed
# loss by the number of non-padding tokens on all ranks (one more all-reduce, of one number), and multiply it by N,
# because the hook takes the mean. The same applies to the micro-batches in 2.6.
# </details>
#
# **3. Why are buckets not simply as large as possible?**
#
# <details><summary>Answer</summary>
#
# If there is only one bucket, its reduction is launched after the last gradient, so there is only one latency, but no
# overlap. Buckets with one parameter each are reduced as early as possible, but each incurs a latency. The best size
# lies in between and grows with the latency and with N; torch's default is 25 MiB.
# </details>
#
# **4. Is it enough to put only the backward pass inside `with ddp.no_sync():`?**
#
# <details><summary>Answer</summary>
#
# Not in torch. `DistributedDataParallel.forward` decides whether the following backward pass reduces the gradients, so
# the forward pass must be inside too. A forward pass outside the `with` block is the usual reason why `no_sync` seems
# to have no effect.
# </details>
#
# **5. gloo's all-reduce blocks the host in `wait()`, whereas NCCL's does not. What does the `finish` of rung 3 do on a
# GPU?**
#
# <details><summary>Answer</summary>
#
# `wait()` makes the compute stream wait for the communication stream, and the host runs ahead. The host issues the
# kernels that copy the means back and those of the optimizer. They start when the reductions have finished. So the host
# determines the order of the work, and the device determines when it runs.
# </details>
#
# ## Further reading
#
# - S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020, sections 3.2
#   (buckets, overlap, accumulation) and 4.2 (the reducer).
# - torch: `torch/nn/parallel/distributed.py`; `torch/csrc/distributed/c10d/reducer.cpp`, `mark_variable_ready` and
#   `finalize_backward`.
# - A. Sergeev, M. Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*,
#   2018, on tensor fusion, another name for buckets.
# - In this repository: `minifsdp/ddp/naive.py`, `bucketed.py` and `overlapped.py` are rungs 1 to 3,
#   and the last has a fix for unused parameters. You do not need to read the drop-in replacement
#   for torch's class (`distributed.py`); its search for unused parameters is in `unused.py`.
