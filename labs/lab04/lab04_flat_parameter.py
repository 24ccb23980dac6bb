# ---
# jupyter:
#   minifsdp:
#     lab: "04"
#     title: The flat parameter
#     minutes: 60
#     ranks: 4
# ---

# %% [markdown]
# # Lab 04: the flat parameter
#
# **After this lab, you will be able to** derive the shards of N ranks from a list of parameters on paper: the amount
# and the position of the padding, the ranks that hold a given bias, and the memory cost of building a unit's flat
# parameter. You will also understand the code of torch's `FlatParamHandle`.
#
# ![The parameters of one unit, laid end to end in a flat buffer that is split into sixteen
# shards](../slides/figures/fsdp-offsets.svg)
#
# *From [lecture 3, Flat parameters and FSDP](../slides/fsdp.md), which comes before this lab.*
#
# **You need** labs 01 (collectives) and 03 (shards of optimizer state).
#
# **Time** 60 minutes. **Runs** on a laptop (gloo, 2 and 4 processes), on one GPU, or on a GPU node
# (NCCL, one rank per GPU). **Memory** at most 0.4 MiB of parameters and buffers per rank (measured
# below); a process takes a few hundred MiB, mostly for torch itself.

# %% tags=["setup"]
# set-up
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.watch.ledger import Ledger

WIDTHS = [6, 10, 9, 12, 11, 8, 5]  # widths of the activations before, between and after the six layers


def six_layers(widths: list[int]) -> nn.Sequential:
    """Six linear layers; 1 and 2 are in one submodule, 4 and 5 in another."""
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    middle = nn.Sequential(OrderedDict(layer1=layers[1], layer2=layers[2]))
    last = nn.Sequential(OrderedDict(layer4=layers[4], layer5=layers[5]))
    return nn.Sequential(OrderedDict(layer0=layers[0], middle=middle, layer3=layers[3], last=last))


# %% [markdown]
# ## The question: what should be sent?
#
# With ZeRO-2, every rank still holds all parameters, Ψ elements. The next rung also shards the parameters, which
# changes the traffic: before a layer is computed, its parameters must be gathered from all ranks. A layer has a weight
# and a bias, a model has hundreds of layers, and in general, no size is divisible by N. So which collectives should
# gather the parameters?
#
# - one gather **per parameter**, or one gather for many parameters?
# - **uneven** shards, with a shorter last shard, or **even** shards with padding?
#
# The model here consists of six linear layers and has 12 parameters. First count the messages, then measure how long
# they take.

# %%
predict(
    "4.0", ..., "messages to gather 12 parameters, each cut over 4 ranks into uneven shards, one broadcast per shard"
)


# %%
def gather_three_ways(widths: list[int]) -> dict[str, tuple[int, int]]:
    """Return, for each way, the number of messages and the bytes that this rank sends."""
    group, where = comm.world(), rank_device()
    ranks = group.size()
    sizes = [p.numel() for p in six_layers(widths).parameters()]

    def even(numel: int) -> list:
        length = -(-numel // ranks)
        full, shard = torch.empty(ranks * length, device=where), torch.empty(length, device=where)
        return [comm.all_gather(full, shard, group)]

    def uneven(numel: int) -> list:
        shards = torch.empty(numel, device=where).tensor_split(ranks)
        return [comm.broadcast(shard, source, group) for source, shard in enumerate(shards)]

    ways = {
        "uneven shards, each parameter": lambda: [handle for numel in sizes for handle in uneven(numel)],
        "even shards, each parameter": lambda: [handle for numel in sizes for handle in even(numel)],
        "even shards, all in one": lambda: even(sum(sizes)),
    }
    found = {}
    for name, start in ways.items():
        with comm.record() as calls:
            for handle in start():
                handle.wait()
        found[name] = len(calls), round(sum(call.wire for call in calls))
    return found


# %% [markdown]
# ### Measured: even shards need one message, uneven shards a broadcast from each rank
#
# An all-gather requires equal shards from all ranks. How does gloo respond to a shorter last shard? Uneven shards need
# a broadcast from each rank in turn. torch's NCCL backend issues such broadcasts itself if
# `torch.distributed.all_gather` receives a list of unequal tensors.

# %% tags=["C6"]
WIDE = [60, 100, 90, 120, 110, 80, 50]


def gather_uneven() -> str:
    """Return the backend's response to a shorter shard on the last rank."""
    group = comm.world()
    ranks, rank, where = group.size(), group.rank(), rank_device()
    lengths = [4] * (ranks - 1) + [3]
    shards = [torch.empty(length, device=where) for length in lengths]
    try:
        torch.distributed.all_gather(shards, torch.ones(lengths[rank], device=where))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "gathered, as broadcasts: this is NCCL"


said, counted = launch(lambda: (gather_uneven(), gather_three_ways(WIDE)), 4, timeout=30)[0]
print(said, "\n")
for way, (messages, sent) in counted.items():
    print(f"{way:32} {messages:3} messages, {sent:8,} bytes sent by a rank")
outcome("4.0", counted["uneven shards, each parameter"][0], ranks=4, slips={"a message per parameter": 12})

total = 4 * sum(p.numel() for p in six_layers(WIDE).parameters())
padded = total + -total % (4 * 4)
assert [messages for messages, _ in counted.values()] == [48, 12, 1]
assert counted["even shards, all in one"][1] == padded * 3 // 4
print(f"expected: 48, 12, 1 messages; one all-gather of {padded:,} bytes sends 3/4 of them: {padded * 3 // 4:,}")

# %% [markdown]
# Even shards of all parameters together need one message and the fewest bytes. (The byte counts are nominal and assume
# the ring algorithm: in a broadcast, a rank forwards the entire message; in an all-gather, it forwards (N-1)/N of the
# message.)

# %% [markdown]
# ### Measured: the same bytes in fewer messages
#
# On a link, every message takes the latency plus a time proportional to its size. The processes here run on one
# machine, so the messages are sent over an emulated link, with a latency of 2 ms and a bandwidth of 50 MB/s. The same
# 512 KiB are sent in 1, 4, 16 and 64 all-gathers. This is the experiment of figure 2(b) in the FSDP paper, scaled down
# to a laptop.

# %% tags=["C6", "nbval-ignore-output"]
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.instruments import plots
from minifsdp.instruments.link.emulated import EmulatedLink, let_communication_go_first


def gather_in_pieces(link: EmulatedLink, numel: int, counts: list[int]) -> list[float]:
    """Return the milliseconds to gather `numel` elements, for each number of messages; the best of three."""
    group, where = comm.world(), rank_device()
    full = torch.empty(numel, device=where)

    def milliseconds(count: int) -> float:
        parts = full.view(count, -1)
        shards = parts.chunk(group.size(), dim=1)[group.rank()].contiguous()
        torch.distributed.barrier()
        began = time.perf_counter()
        for handle in [comm.all_gather(part, shard, group) for part, shard in zip(parts, shards, strict=True)]:
            handle.wait()
        device.synchronize(where)
        return (time.perf_counter() - began) * 1e3

    with link:
        return [min(milliseconds(count) for _ in range(3)) for count in counts]


counts, numel, latency, bandwidth = [1, 4, 16, 64], 2**17, 2e-3, 50e6
measured = launch(gather_in_pieces, 2, EmulatedLink(latency, bandwidth), numel, counts, timeout=30)[0]
wire = 4 * numel / 2  # with 2 ranks, a rank sends half of the bytes
model = [(count * latency + wire / bandwidth) * 1e3 for count in counts]
assert all(got > 0.95 * wanted for got, wanted in zip(measured, model, strict=True))
assert measured[-1] > 2 * measured[0]
plots.lines(
    {"512 KiB gathered": (counts, measured)},
    expected={"messages × latency + bytes / bandwidth": (counts, model)},
    xlabel="number of all-gathers",
    ylabel="time, ms",
    title=f"The same bytes in 64 messages take {measured[-1] / measured[0]:.0f} times as long as in one",
    says="2 ranks, emulated link of 2 ms and 50 MB/s: each message costs the latency, the bytes cost the same. "
    "Best of three runs; a point above its diamond had to share its cores.",
    lab="04",
    logx=True,
)

# %% [markdown]
# The next cell traces a gather of all six layers and the subsequent forward pass. (Above, the "uneven" gather sent each
# parameter separately, in 48 broadcasts; here, it sends one buffer in 4 broadcasts.)

# %% tags=["nbval-ignore-output"]
from torch.profiler import record_function

from minifsdp.instruments.plots.drawing import step_of
from minifsdp.instruments.watch.timeline import read_trace
from minifsdp.instruments.watch.trace import record_trace


def trace_gathers(link: EmulatedLink, widths: list[int]) -> dict[str, tuple[list, float]]:
    """Return, for each way, the spans of a gather and the forward pass after it, and the link's own seconds."""
    let_communication_go_first()
    group, where = comm.world(), rank_device()
    model = six_layers(widths).to(where)
    sizes = [p.numel() for p in model.parameters()]
    data = torch.ones(2000, widths[0], device=where)
    ways = {
        "even: an all-gather per parameter": sizes,
        "uneven: a broadcast per rank": [sum(sizes)],
        "even: one all-gather": [sum(sizes)],
    }

    def forward(name: str, buffers: list[Tensor]) -> None:
        if "uneven" in name:
            parts = buffers[0].tensor_split(group.size())
            handles = [comm.broadcast(part, source, group) for source, part in enumerate(parts)]
        else:
            handles = [comm.all_gather(full, full.chunk(group.size())[group.rank()], group) for full in buffers]
        for handle in handles:
            handle.wait()
        model(data)
        device.synchronize(where)

    found = {}
    for name, numels in ways.items():
        buffers = [torch.empty(n + -n % group.size(), device=where) for n in numels]
        takes = []
        with tempfile.TemporaryDirectory() as folder:
            with comm.record() as calls:
                forward(name, buffers)  # warm-up
            for _ in range(3):
                with link, record_trace(Path(folder, "trace.json"), link):
                    torch.distributed.barrier()
                    with record_function("forward"):
                        forward(name, buffers)
                takes.append(read_trace(Path(folder, "trace.json")))
        alone = sum(link.latency + call.wire / link.bandwidth for call in calls)
        found[name] = min(takes, key=step_of), alone
    return found


def travelling(spans: list) -> float:
    """Return the seconds from the start of the first message to the end of the last."""
    messages = [span for span in spans if span.lane == "communication"]
    return max(span.end for span in messages) - min(span.start for span in messages)


found = launch(trace_gathers, 4, EmulatedLink(latency=10e-3, bandwidth=20e6), WIDE, timeout=60)[0]
took = {name: travelling(spans) for name, (spans, _) in found.items()}
for name, (_, alone) in found.items():
    print(f"{name:34} travels for {1e3 * took[name]:4.0f} ms, the link alone takes {1e3 * alone:4.0f}")
    assert took[name] > 0.95 * alone, "a message was faster than its link"
many, uneven, one = (1e3 * seconds for seconds in took.values())
assert one < uneven < many, "fewer messages took longer"
plots.timeline(
    {name: spans for name, (spans, _) in found.items()},
    title=f"Twelve messages are on the link for {many:.0f} ms, four for {uneven:.0f} ms, and one for {one:.0f} ms",
    says=f"4 ranks, a link of 10 ms and 20 MB/s. Each rank gathers {total / 2**10:.0f} KiB, in the middle row by "
    "broadcasts, and runs all layers after the last transfer; the fastest of three runs. The times above the lanes "
    "include the layers.",
    lab="04",
)

# %% [markdown]
# The answer is **many parameters in one buffer, split evenly.** This buffer is the flat parameter. Building it takes
# four steps: flatten, concatenate, pad, chunk. You implement these steps in the rest of the lab.

# %% [markdown]
# ## 4.1 Pad and chunk
#
# *5 minutes, easy*
#
# Start with the last two of the four steps. Pad a flat tensor until its size is divisible by N, and split it into N
# equal shards. The last ranks hold the padding.
#
# - For any number of elements, add as few zeros as possible, and none if this number is divisible by N.
# - Explicitly set the padding to zero, because it is reduced, squared for gradient norms and updated by the optimizer
#   like all other elements.
# - `chunk` returns views. All shards are views of one buffer, and `flat` stays unchanged.
#
# The example is from the FSDP paper (section 3.2.1): a 4 x 3 linear layer on 16 GPUs.

# %%
predict("4.1", ..., "elements of padding for the weight and bias of nn.Linear(4, 3) over 16 ranks")


# %% tags=["exercise-4.1"]
from .ex1_pad_and_chunk import pad_and_chunk

# %% [markdown]
# ### Measured: padding is at most N - 1 elements
#
# In the next cell, the elements of the weight have the value 1, and those of the bias have the value 2. Your function
# splits this tensor, and the drawing shows the positions of the values.

# %% tags=["C10"]
sizes = {"weight": 12, "bias": 3}
marks = torch.cat([torch.full((size,), float(mark)) for mark, size in enumerate(sizes.values(), start=1)])
shards = pad_and_chunk(marks, 16)


def marked(shards: list[Tensor], mark: int) -> list[tuple[int, int]]:
    """Return, for each shard, the interval of the elements with a given mark."""
    places = [(shard == mark).nonzero().flatten().tolist() for shard in shards]
    return [(place[0], place[-1] + 1) if place else (0, 0) for place in places]


outcome("4.1", sum(shard.numel() for shard in shards) - 15, ranks=16, slips={"the weight alone": 4})
padded_ranks = [rank for rank, shard in enumerate(shards) if not shard.all()]
for ranks in (2, 3, 4, 16):
    most = max(ranks * pad_and_chunk(torch.ones(numel), ranks)[0].numel() - numel for numel in range(1, 100))
    print(f"{ranks:2} ranks, 1 to 99 elements: at most {most:2} elements of padding, expected {ranks - 1:2}")
    assert most == ranks - 1, "too much padding, or none"
drawn = plots.flat_layout(
    sizes,
    {name: marked(shards, mark) for mark, name in enumerate(sizes, start=1)},
    shards[0].numel(),
    title=f"{16 - len(padded_ranks)} of 16 ranks hold {shards[0].numel()} element of nn.Linear(4, 3), "
    f"rank {', '.join(map(str, padded_ranks))} only padding",
    says="Top: the flat parameter, weight solid, bias dotted, padding hatched. Bottom: what each rank keeps.",
    lab="04",
)
assert drawn.data["offsets"] == {"weight": [0, 12], "bias": [12, 15]}
assert drawn.data["padding"] == [15, 16]
drawn

# %% [markdown]
# No rank holds the complete weight, and a rank does not need to know whether its element belongs to the weight or to
# the bias. Sharding ignores parameter boundaries. This is not tensor parallelism: no layer ever computes with a shard.

# %% [markdown]
# ### Break it: garbage in the padding
#
# `torch.empty` often returns zeros, so uninitialized padding may work for weeks. If deterministic algorithms are
# enabled, torch fills such memory with NaN. The cell pads a gradient of ones with zeros and with uninitialized memory,
# and computes its norm from the shards; gradient clipping divides by this norm:


# %%
def pad_with_garbage(flat: Tensor, ranks: int) -> list[Tensor]:
    """`pad_and_chunk`, but with uninitialized padding."""
    padded = flat.new_empty(flat.numel() + -flat.numel() % ranks)
    padded[: flat.numel()] = flat
    return list(padded.chunk(ranks))


torch.use_deterministic_algorithms(True)
norms = {}
for pad in (pad_with_garbage, pad_and_chunk):
    squares = [float(shard.square().sum()) for shard in pad(torch.ones(15), 16)]  # one per rank; then all-reduced
    norms[pad.__name__] = sum(squares) ** 0.5
    print(
        f"{pad.__name__:16} rank 15 adds {squares[-1]}, the norm is {norms[pad.__name__]:.4f}, expected {15**0.5:.4f}"
    )
torch.use_deterministic_algorithms(False)
assert abs(norms["pad_and_chunk"] - 15**0.5) < 1e-6, "the padding is not zero"

# %% [markdown]
# One NaN on the last rank is enough: after clipping and a step, every parameter on every rank is NaN.

# %% [markdown]
# ## 4.2 Parameters as views
#
# *10 minutes, medium*
#
# Next come the first two steps: flatten and concatenate. If the buffer were only a copy of the
# parameters, every gather would have to be followed by a copy back into them. Instead, the parameters *become* views of
# the buffer: they share its storage, with individual shapes and offsets. Then an all-gather into the buffer fills all
# parameters at once, and freeing the buffer frees their memory too.
#
# Modules and optimizers refer to a Parameter object, and `.data` is the tensor inside this object. Setting `p.data`
# replaces the tensor and keeps the object, so every module that uses `p` sees the view. (Assigning to a variable named
# `p` replaces nothing.) The old tensor has no more references, so it is freed.
#
# Allocate the buffer with `device.empty(numel, dtype, "unsharded", device)`: it is uninitialized, and the ledger counts
# it under its role.

# %%
predict("4.2", ..., "bytes at the peak while the six layers (52,350 elements of float32, over 4 ranks) are flattened")


# %% tags=["exercise-4.2"]
from .ex2_flatten_parameters import flatten_parameters

# %%
model = six_layers(WIDTHS)
full = flatten_parameters(list(model.parameters()), 16)
print(f"buffer of {full.numel()} elements, the parameters have {sum(p.numel() for p in model.parameters())}")
for name, p in model.named_parameters():
    inside = p.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    print(f"{name:20} {list(p.shape)!s:9} at {p.storage_offset():3}, in the buffer's storage: {inside}")
full[60:70] = 0.5
print("written to the buffer, read from the layer:", model.layer0.bias.data.unique().tolist())

# %% [markdown]
# ### Measured: memory while a rank flattens and shards
#
# A rank builds the model, flattens it, keeps its shard and frees the buffer. Your
# `flatten_parameters` runs on four ranks, and the ledger counts the bytes.

# %%
STAGES = ["built", "flattening, peak", "flattened", "sharding, peak", "sharded"]


def flatten_and_shard(widths: list[int]) -> dict[str, dict[str, int]]:
    """Return this rank's bytes by tag, for each stage."""
    group, found = comm.world(), []
    with Ledger() as ledger:
        model = six_layers(widths).to(rank_device())
        ledger.watch(model)
        found.append(ledger.mark("built"))
        ledger.reset_peaks()
        full = flatten_parameters(list(model.parameters()), group.size())
        found += [ledger.peak.tags, ledger.mark("flattened")]
        ledger.reset_peaks()
        shard = full.chunk(group.size())[group.rank()].clone()
        ledger.tag(shard, "parameters")
        found.append(ledger.peak.tags)
        device.free(full)  # frees all parameters too: their views lose their memory
        found.append(ledger.mark("sharded"))
    return dict(zip(STAGES, found, strict=True))


per_rank = launch(flatten_and_shard, 4, WIDE, timeout=30)
measured = per_rank[0]
outcome(
    "4.2",
    sum(measured["flattening, peak"].values()),
    ranks=4,
    slips={
        "the originals are freed only when they have been copied": padded,
        "the buffer stands beside the model": total,
        "the padding is in the buffer": 2 * total,
    },
)
assert all(each == measured for each in per_rank), "equal on all ranks, because shards are even"
predicted = dict(zip(STAGES, [total, total + padded, padded, padded + padded // 4, padded // 4], strict=True))
plots.stages(
    measured,
    predicted=predicted,
    earlier={"DDP, ZeRO-1, ZeRO-2": dict.fromkeys(STAGES, total)},
    title=f"A rank keeps {sum(measured['sharded'].values()) / total:.0%} of the parameters, but holds "
    f"{sum(measured['flattening, peak'].values()) / total:.0%} at the peak of flattening",
    says="Parameters of the six layers on each of 4 ranks. Grey: DDP, ZeRO-1 and ZeRO-2 always keep all of them.",
    lab="04",
)

# %%
KINDS = ["the model", "the model and the buffer", "the buffer", "the buffer and the shard", "the shard"]
for stage, kinds in zip(STAGES, KINDS, strict=True):
    bytes_held = sum(measured[stage].values())
    print(f"{stage:17} measured {bytes_held:8,} bytes, expected {predicted[stage]:8,}: {kinds}")
    assert bytes_held == predicted[stage], f"{stage}: a rank should hold {kinds}, and nothing else"

# %% [markdown]
# The buffer and the original parameters exist at the same time, so a rank needs memory for both while it builds the
# buffer. If the entire model is one unit, the peak is 2Ψ elements, which is more than the model needs without sharding.
# The units in 4.5 reduce this peak.

# %% [markdown]
# ### Break it: replace `.data` behind the buffer's back
#
# An in-place change to a view also changes the buffer. But setting `p.data` detaches the parameter from the buffer, and
# some calls do this silently: `model.double()`, `.half()`, `.to(device)`, `vector_to_parameters`.


# %%
def in_buffer(model: nn.Module, full: Tensor) -> int:
    """Count the parameters that are views of the buffer."""
    return sum(p.untyped_storage().data_ptr() == full.untyped_storage().data_ptr() for p in model.parameters())


model = six_layers(WIDTHS)
full = flatten_parameters(list(model.parameters()), 4)
data = torch.ones(1, WIDTHS[0])
print(f"flattened:               {in_buffer(model, full):2} of 12 parameters in the buffer")
model.layer0.bias.data.add_(1)
print(f"p.data.add_(1):          {in_buffer(model, full):2}, the buffer has the change: {bool(full[60] > 0.5)}")
model.layer0.bias.data = model.layer0.bias.data + 1
print(f"p.data = p.data + 1:     {in_buffer(model, full):2}, the buffer has the change: {bool(full[60] > 1.5)}")
model.double().float()
print(f"model.double().float():  {in_buffer(model, full):2}")
before = model(data)
full.zero_()
unchanged = torch.equal(model(data), before)
print(f"buffer set to zero, as an optimizer or a gather would write to it: output unchanged: {unchanged}")

# %% [markdown]
# There is no error. The ranks still gather, reduce and update the buffer, but the model computes with other memory.
# Therefore, FSDP moves modules to their device *before* it flattens them (`device_id`), and performs the casts for
# mixed precision itself. With `use_orig_params=True`, torch also compares data pointers before each use
# (`_writeback_orig_params` in `_flat_param.py`).

# %% [markdown]
# ## 4.3 Bounds of a parameter in a shard
#
# *8 minutes, medium*
#
# Collectives do not need to know to which parameter an element belongs. Other code does: a checkpoint by parameter
# name, a norm per parameter, or weight decay for weights but not for biases. On every rank, such code needs parameter
# i's elements in the *rank's own* shard. The shard may contain none, some or all of these elements.
#
# The unit in this section holds layers 0 and 3. Their parameters have 60, 10, 132 and 11 elements,
# 213 in total, and are sharded over 16 ranks.

# %%
predict("4.3", ..., "of the 16 ranks, how many hold elements of the last bias, those at [202, 213)")


# %% tags=["exercise-4.3"]
from .ex3_shard_bounds import shard_bounds

# %% [markdown]
# ### Measured: every offset over 16 ranks

# %% tags=["C10"]
layers = {"layer0.weight": 60, "layer0.bias": 10, "layer3.weight": 132, "layer3.bias": 11}
length = -(-sum(layers.values()) // 16)
bounds = {name: [shard_bounds([*layers.values()], i, rank, 16) for rank in range(16)] for i, name in enumerate(layers)}
holders = {name: sum(low < high for low, high in parts) for name, parts in bounds.items()}
outcome("4.3", holders["layer3.bias"], ranks=16, slips={"11 elements fit into a shard of 14, but it begins at 202": 1})
drawn = plots.flat_layout(
    layers,
    bounds,
    length,
    title=f"213 elements have {16 * length - 213} of padding; {holders['layer3.bias']} of 16 ranks share the last bias",
    says="Top: the unit of layers 0 and 3, weights solid, biases dotted, padding hatched. Bottom: the shards, "
    "drawn from the bounds that 4.3 returned.",
    lab="04",
)
assert drawn.data["offsets"] == {
    "layer0.weight": [0, 60],
    "layer0.bias": [60, 70],
    "layer3.weight": [70, 202],
    "layer3.bias": [202, 213],
}
assert drawn.data["padding"] == [213, 16 * length]
for name, (start, end) in drawn.data["offsets"].items():  # the drawn intervals make up the parameter
    pieces = [rank * length + at for rank, (low, high) in enumerate(bounds[name]) for at in range(low, high)]
    assert pieces == list(range(start, end)), f"the pieces of {name}, put together, are not {name}"
drawn

# %% [markdown]
# Rank 4 holds four elements of a weight and a complete bias. Rank 15 holds three elements of a bias and all of the
# padding. Neither case needs special code.
#
# With these bounds, you can compute the norm of a weight even though no rank holds the complete weight.


# %%
def norm_of(index: int) -> tuple[float, float]:
    """Return the norm of one parameter, from the shards and from the full parameter."""
    torch.manual_seed(0)
    group = comm.world()
    params = list(six_layers(WIDTHS).to(rank_device()).parameters())
    sizes, whole = [p.numel() for p in params], float(params[index].detach().norm())
    shard = flatten_parameters(params, group.size()).chunk(group.size())[group.rank()]
    low, high = shard_bounds(sizes, index, group.rank(), group.size())
    squares = shard[low:high].square().sum()
    comm.all_reduce(squares, group).wait()
    return float(squares.sqrt()), whole


from_shards, whole = launch(norm_of, 4, 6, timeout=30)[0]
print(f"norm of layer3.weight: from 4 shards {from_shards:.4f}, from the unsharded weight {whole:.4f}")
assert abs(from_shards - whole) < 1e-5

# %% [markdown]
# ### Compared with torch: the position of the padding
#
# The cell wraps the same two layers with `torch.distributed.fsdp`, on 4 ranks. On each rank,
# torch's flat parameter records the padding in `_shard_numel_padded`. For each parameter, an entry of
# `_shard_param_infos` records whether the parameter is in the shard, and its position and length in the shard.


# %%
def torch_layout(orig: bool = False) -> tuple[bool, int, list, list, list]:
    """Return whether torch's shard equals that of 4.1, its padding, intervals, numels, and padding values."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")  # torch warns that FSDP1 is in maintenance mode
    torch.manual_seed(0)
    group = comm.world()
    model = nn.Sequential(OrderedDict(layer0=nn.Linear(6, 10), layer3=nn.Linear(12, 11))).to(rank_device())
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    wrapped = FullyShardedDataParallel(model, device_id=rank_device(), use_orig_params=orig)
    flat = wrapped._handle.flat_param
    equal = torch.equal(flat.detach(), pad_and_chunk(values, group.size())[group.rank()])
    parts = [tuple(info)[1:3] if info.in_shard else None for info in flat._shard_param_infos]
    filling = sorted({value for value in flat.detach().tolist() if value in (0.0, 42.0)})
    return equal, flat._shard_numel_padded, parts, list(flat._numels_with_padding), filling


for rank, (equal, padding, parts, _, _) in enumerate(launch(torch_layout, 4, timeout=40)):
    bounds_here = [shard_bounds([*layers.values()], index, rank, 4) for index in range(4)]
    ours = [(low, high - low) if low < high else None for low, high in bounds_here]
    print(f"rank {rank}: values equal to 4.1's: {equal}; padding {padding}; parts {parts}, as 4.3's: {parts == ours}")
    assert equal, "torch's shard has other elements"
    assert parts == ours, "torch's shard has other bounds"

# %%
both = launch(lambda: [torch_layout(orig) for orig in (False, True)], 2, timeout=40)[1]
for orig, (_, _, _, numels, filling) in zip((False, True), both, strict=True):
    padding = sum(numels) + -sum(numels) % 2 - 213
    print(f"use_orig_params={orig}, 2 ranks: flattened {numels}, {padding} of padding, filled with {filling}")

# %% [markdown]
# By default (`use_orig_params=False`), torch uses our layout: the parameters are contiguous, and zeros fill the end of
# the last shards. Instead of padding the buffer before splitting it, torch splits first and pads the short shards
# (`_get_shard`), with the same result. With `use_orig_params=True`, it also pads *between* parameters, so that each
# parameter begins at a multiple of 16 bytes, and it fills this padding with 42, which is easy to recognize. So "at most
# N - 1 elements of padding" is true only for the first layout: in the second layout, there are 3 elements of padding on
# 2 ranks here.

# %% [markdown]
# ## 4.4 Tied weights
#
# *10 minutes, medium*
#
# Setting `p.data = view` keeps the Parameter. FSDP goes further: it replaces the original Parameters in their modules
# by views, and autograd traces these views back to a single flat Parameter. The optimizer then sees a single Parameter,
# whose `.grad` collects all gradients in the layout required for a reduce-scatter. (In minifsdp's own FSDP, each view
# is a leaf instead, and its gradient is copied into that layout, so that a unit can detect its last gradient.)
#
# But several modules may use the same Parameter, as in a language model whose head uses the embedding's weight. It must
# be flattened **once**, and **both** modules must get the view. There are two pitfalls: `module.named_parameters()`
# lists only one name of each Parameter, and equal values do not mean that two Parameters are tied (all LayerNorms have
# equal initial values).
#
# A module keeps its own Parameters in the dict `_parameters`; after deleting a Parameter from this dict, you can set a
# tensor as an attribute with the same name.

# %%
predict("4.4", ..., "elements, padding included, of a tied GPT on 16 ranks: names list 15,457, two of them 4,112")


# %% tags=["exercise-4.4"]
from .ex4_place_views import place_views

# %%
from minifsdp.gpt import GPT

torch.manual_seed(0)
plain, model = GPT(width=16, layers=2, tied=True), GPT(width=16, layers=2, tied=True)
model.load_state_dict(plain.state_dict())
listed = sum(value.numel() for value in model.state_dict().values())


flats: list[nn.Parameter] = []


def flatten(params: list[nn.Parameter]) -> list[Tensor]:
    """Make a flat Parameter, append it to `flats`, and return views of it."""
    sizes, shapes = [p.numel() for p in params], [p.shape for p in params]
    flat = nn.Parameter(flatten_parameters(params, 16))
    flats.append(flat)
    *parts, _ = flat.split([*sizes, flat.numel() - sum(sizes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


names, flat = place_views(model, flatten), flats[0]
elements = sum(p.numel() for p in plain.parameters())
print(f"the names list {listed:,} elements; in two places: {[each for each in names if len(each) > 1]}")
slips = {"a tied weight is flattened once": listed + -listed % 16, "and the padding": elements}
outcome("4.4", flat.numel(), ranks=16, slips=slips)
assert flat.numel() == listed - 4112 + 15, "the tied weight belongs into the buffer once"
print("both places share one view:", model.embed.weight is model.head.weight)
print("Parameters that the model registers:", len(list(model.parameters())))

# %% [markdown]
# Does autograd reach the flat Parameter? The embedding and the head each produce a gradient for the tied weight; the
# buffer's gradient must contain their sum.

# %%
tokens, targets = torch.randint(257, (2, 8)), torch.randint(257, (2, 8))
loss, wanted = model(tokens, targets), plain(tokens, targets)
loss.backward()
wanted.backward()
expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
print("loss equal:", torch.allclose(loss, wanted))
print("one gradient tensor,", f"{flat.grad.numel():,}", "elements; equal to those of the plain model:", end=" ")
print(torch.allclose(flat.grad[:elements], expected, atol=1e-6))
print("gradient of the padding:", flat.grad[elements:].abs().sum().item())
assert torch.allclose(flat.grad[:elements], expected, atol=1e-6), "a place has not the view: its gradient is not there"
assert not flat.grad[elements:].any()

# %% [markdown]
# ## 4.5 Units: six layers, three flat parameters
#
# *12 minutes, medium*
#
# With one flat parameter for the entire model, a single large message would be enough, but no layer could be computed
# before all parameters had been gathered. With one flat parameter per layer, a rank needs little memory but many
# messages. The compromise is to group layers into **units**, each with its own flat parameter. Wrapping determines the
# units: each wrapped module is a unit, and the root unit holds all parameters outside the inner units. So a root unit
# may contain non-consecutive layers. Here, `middle` (layers 1 and 2) and `last` (4 and 5) are wrapped, and layers 0 and
# 3 remain in the root, as in figure 1 of the FSDP paper.
#
# A tied parameter must belong to one unit. If it belonged to two units, it would be sharded twice and updated twice,
# and its two gradients would not be added. The only correct response is an error.
# (`named_parameters(remove_duplicate=False)` lists all names.)

# %%
predict(
    "4.5", ..., "elements that a rank keeps of the three units' flat parameters (213, 219 and 141 elements), 4 ranks"
)


# %% tags=["exercise-4.5"]
from .ex5_assign_units import assign_units

# %% [markdown]
# ### Measured: the units of a wrapped model
#
# On four ranks, the cell manually wraps the six layers with `FullyShardedDataParallel`, inner modules first. The
# drawing shows the layouts of the wrapped model; your layouts must be the same. Each rank also records which layers it
# runs.

# %% tags=["C9"]
from minifsdp.fsdp import FullyShardedDataParallel

LAYERS = ["layer0", "middle.layer1", "middle.layer2", "layer3", "last.layer4", "last.layer5"]


def wrap_and_run(widths: list[int]) -> tuple[dict[str, dict[str, int]], list[str], list[tuple[str, int]]]:
    """Return the units' layouts by name, the layers that this rank ran, and its collectives with their bytes."""
    model = six_layers(widths).to(rank_device())
    ran: list[str] = []
    for name in LAYERS:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    model.middle = FullyShardedDataParallel(model.middle)
    model.last = FullyShardedDataParallel(model.last)
    wrapped = FullyShardedDataParallel(model)
    with comm.record() as calls, torch.no_grad():
        wrapped(torch.ones(1, widths[0], device=rank_device()))
    layouts = {}
    for unit, prefix in ((wrapped, ""), (wrapped.middle, "middle."), (wrapped.last, "last.")):
        flat = unit._unit.flat
        layouts[prefix.rstrip(".") or "root"] = {
            **{prefix + name: size for name, size in zip(flat.names, flat.layout.numels, strict=True)},
            "padding": flat.padding,
        }
    return layouts, ran, [(call.op, call.payload) for call in calls]


per_rank = launch(wrap_and_run, 4, WIDTHS, timeout=30)
layouts, ran, calls = per_rank[0]
model = six_layers(WIDTHS)
mine = assign_units(model, [model.middle, model.last], 4)
outcome(
    "4.5",
    sum(sum(layout.values()) // 4 for layout in mine),
    ranks=4,
    slips={"each unit is padded": 144, "and padding": 143.25},
)
print("layouts equal to those of the wrapped model:", mine == list(layouts.values()))
print("every rank runs every layer:", all(each[1] == LAYERS for each in per_rank))
print("collectives of a forward (bytes):", calls)
assert mine == list(layouts.values()), "your units are not those of the wrapped model"
assert all(each[1] == LAYERS for each in per_rank)
assert calls == [("all_gather", 4 * sum(layouts[unit].values())) for unit in ("root", "middle", "last")]
plots.units(
    LAYERS,
    layouts,
    4,
    title=f"{len(LAYERS)} layers form {len(layouts)} units, one message each; the root unit holds layers 0 and 3",
    says="Top: the layers as every rank runs them. Below: each unit's flat parameter and the ranks that share it; "
    "weights solid, biases dotted, padding hatched.",
    lab="04",
)

# %% [markdown]
# **A unit is not a pipeline stage.** Diagrams with units side by side suggest this misconception. In a pipeline with
# three stages, a rank would run two of the six layers; here, all four ranks run all six layers, each on its own data. A
# unit groups parameters only for communication: they are gathered together and freed together.

# %% [markdown]
# ### Break it: a tie between two units, mixed dtypes, frozen next to trainable parameters
#
# In three cases, a flat parameter is impossible, and `minifsdp` raises an error. The last two messages begin with
# torch's own text; torch, however, does not name the parameters. Mixed dtypes occur in adapter training
# ([peft#484](https://github.com/huggingface/peft/issues/484),
# [trl#1723](https://github.com/huggingface/trl/issues/1723),
# [axolotl#1494](https://github.com/axolotl-ai-cloud/axolotl/issues/1494)).

# %% tags=["C9"]
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.fsdp.torch_api.wrap import check_not_shared


def refusal(attempt: Callable[[], object]) -> str:
    """Return the error message of a failed attempt."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    raise AssertionError("it should have been refused")


tied = six_layers([8] * 7)
tied.last.layer5.weight = tied.layer0.weight
print_wrapped(f"yours:    {refusal(lambda: assign_units(tied, [tied.middle, tied.last], 4))}")
print_wrapped(f"minifsdp: {refusal(lambda: check_not_shared(tied, tied.last))}\n")
said = refusal(lambda: check_not_shared(tied, tied.last))
assert {"layer0.weight", "last.layer5.weight"} <= set(said.split())

mixed = six_layers(WIDTHS)
mixed.layer3.bfloat16()
print_wrapped(f"{refusal(lambda: FlatParameter(find_parameters(mixed), rank=0, ranks=4))}\n")

frozen = six_layers(WIDTHS)
frozen.middle.requires_grad_(False)
print_wrapped(refusal(lambda: FlatParameter(find_parameters(frozen), rank=0, ranks=4)))

# %% [markdown]
# A buffer has one dtype, and a flat Parameter either requires a gradient or does not. A LoRA adapter in float32 with a
# frozen base in bfloat16 violates both rules at once. The messages name the fix: put the differing parameters into a
# separate unit.

# %% [markdown]
# ### Measured: unit by unit, the peak is smaller
#
# At its peak, flattening in 4.2 needed memory for 2Ψ elements. If a rank works unit by unit, it holds the parameters of
# the remaining units, the buffer of the current unit, and the shards of earlier units. The cell uses the functions from
# this lab:


# %%
def shard_units(widths: list[int], one_unit: bool) -> dict:
    """Return this rank's memory during sharding, as one unit or as three."""
    group, shards = comm.world(), []
    with Ledger() as ledger:
        model = six_layers(widths).to(rank_device())
        ledger.watch(model)
        ledger.reset_peaks()
        ledger.mark("built")
        inner = [] if one_unit else [model.middle, model.last]
        for layout in reversed(assign_units(model, inner, group.size())):  # from the inside out
            params = [model.get_parameter(name) for name in layout if name != "padding"]
            full = flatten_parameters(params, group.size())
            shards.append(full.chunk(group.size())[group.rank()].clone())
            ledger.tag(shards[-1], "parameters")
            device.free(full)
            if not one_unit:
                ledger.mark({3: "root", 2: "middle", 1: "last"}[len(shards)] + " sharded")
        if one_unit:
            ledger.mark("sharded")
        return {"curve": ledger.curve(), "peak": ledger.peak.total}


at_once, by_unit = launch(lambda: [shard_units(WIDE, one_unit) for one_unit in (True, False)], 4, timeout=30)[0]
wide = six_layers(WIDE)
largest = max(sum(layout.values()) for layout in assign_units(wide, [wide.middle, wide.last], 4))
print(f"as one unit: peak {at_once['peak']:,} bytes, expected {total + padded:,}")
print(f"as three:    peak {by_unit['peak']:,} bytes, at most the model and the largest unit: {total + 4 * largest:,}")
assert at_once["peak"] == total + padded, "beside the model there was more than the one buffer"
assert by_unit["peak"] <= total + 4 * largest, "beside the model there was more than one unit's buffer"
plots.curve(
    by_unit["curve"],
    earlier={"as one unit": at_once["curve"]},
    title="Sharding by unit peaks at {}, as one unit at {}".format(
        *(f"{each['peak'] / 2**10:.0f} KiB ({each['peak'] / total:.2f} × 4Ψ)" for each in (by_unit, at_once))
    ),
    says="One of 4 ranks flattens and shards the six layers (4Ψ bytes). Dark: originals, then shards; light: the "
    "buffer. The stages are those of the three units; the grey curve is stretched to the same width.",
    lab="04",
)

# %% [markdown]
# ## What is still missing
#
# The shards are even and the buffers are freed, but the model can no longer compute, because its parameters are views
# of freed memory. The missing parts are gathering parameters before a layer runs, freeing them afterwards, and reducing
# gradients. **Lab 05** adds these parts. In the forward pass, each unit is gathered, computed and freed; in the
# backward pass, it is gathered, computed and freed, and its gradient is reduce-scattered.

# %% [markdown]
# ## What to remember
#
# 1. Collectives need even shards and large messages. A flat parameter provides both: flatten,
#    concatenate, pad, chunk.
# 2. Padding consists of `-numel % N` zeros at the end of the unit, at most N - 1 elements. It must never be
#    uninitialized.
# 3. Parameters are views of the buffer. Writing through a view is safe; replacing `.data` detaches it without an error.
# 4. The elements of a parameter in a shard are the intersection of two intervals, which may be empty and ignores row
#    boundaries.
# 5. A unit groups parameters only for communication. Every rank runs every layer. A tied parameter belongs to one unit,
#    which holds it once.
#
# ## Questions
#
# **1. How many bytes does padding cost at most for a bfloat16 model with 80 units on 512 ranks?**
#
# <details><summary>Answer</summary>
#
# Each unit has at most 511 elements of padding, so padding costs at most 80 x 511 x 2 = 81,760 bytes across all ranks.
# Shards of equal size therefore cost almost nothing here. Padding per parameter, or units of a few hundred elements,
# would make the cost noticeable. </details>
#
# **2. Why must padding be zero if it belongs to no parameter?**
#
# <details><summary>Answer</summary>
#
# Other code reads the padding: a gradient norm over the shard includes it, a gradient scaler checks it for infinities,
# and the reduction sums it across ranks. A NaN in the padding makes the norm NaN, and clipping then makes every
# gradient NaN.
# </details>
#
# **3. What does `model.half()` break, if parameters are views as in 4.2?**
#
# <details><summary>Answer</summary>
#
# `half` sets `p.data` to new tensors: the parameters leave the buffer, the buffer stays float32, and a gather writes to
# memory that no module reads. Cast before flattening, or let FSDP's mixed precision cast the shard for the gather.
# </details>
#
# **4. With 16 ranks and a unit of 10 elements, what do ranks 10 to 15 hold?**
#
# <details><summary>Answer</summary>
#
# They hold one zero each. A shard has ceil(10 / 16) = 1 element, and the padding of 6 elements fills six entire shards.
# `torch.chunk` alone would return only ten chunks, and none for these ranks, so the all-gather would fail.
# </details>
#
# **5. Why does the root unit hold layers 0 and 3, and not 0 and 1?**
#
# <details><summary>Answer</summary>
#
# Layers 1 and 2 were wrapped, and the root unit holds the remaining layers. The root is the only unit whose layers need
# not be consecutive. It stays unsharded from the beginning of the forward pass to the end of the backward pass (lab
# 05), so keep it small.
# </details>
#
# ## Further reading
#
# - PyTorch FSDP (arXiv 2304.11277): section 3.2.1, figures 1 and 2.
# - ZeRO (arXiv 1910.02054), section 5: partitioning parameters.
# - torch/distributed/fsdp/_flat_param.py: `FlatParamHandle._init_flat_param_and_metadata`, `_get_shard`,
# `_get_shard_metadata`, `_get_unflat_views_unaligned`.
# - minifsdp/flat_param.py: this lab in 150 lines.
