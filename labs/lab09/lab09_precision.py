# ---
# jupyter:
#   minifsdp:
#     lab: "09"
#     title: Precision, accumulation, offload
#     minutes: 85
#     ranks: 2
# ---

# %% [markdown]
# # Lab 09: precision, accumulation, offload
#
# A unit can use several dtypes, keep its shards in host or device memory, and reduce its gradients less often than in
# every backward pass. This lab covers all three options. The engine of labs 05 to 08 stays the same; only the *unit*
# changes, in a few places.
#
# ![The dtypes of parameters, gradients and optimizer state in mixed precision](../slides/figures/practice-dtypes.svg)
#
# *From [lecture 5, FSDP in practice](../slides/practice.md), which comes before this lab.*
#
# **After this lab, you will be able to**
#
# - name the dtype of each stage of a step in mixed precision, and say which stages need fp32;
# - predict how much memory and traffic bf16 saves, and what it does not save;
# - scale the loss in fp16 so that all ranks agree although each rank holds only shards, and say why bf16 needs no
#   scaling;
# - choose between accumulating sharded and unsharded gradients by comparing bytes and collectives;
# - move shards, gradients and the optimizer to the host without reading values before they have arrived;
# - weigh micro-batches so that every token counts the same, although ranks and micro-batches differ in their numbers.
#
# **You need** lab 05 (units, gather, reduce-scatter) and lab 06 (streams and events).
#
# **Time** 85 minutes. **Runs** on a laptop (gloo, 2 processes), on one GPU, or on a GPU node (NCCL, one rank per GPU).
# **Memory** less than 20 MiB of tensors per rank. On a CPU, host and device memory are the same; the copies between
# them are still performed, so their bytes can be counted, but their speed cannot be measured.

# %% tags=["setup"]
# set-up
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.losses import IGNORED

# %% [markdown]
# ## The costs that remain
#
# The remaining costs of FSDP are the memory of the unsharded units and the bytes sent. With 2 bytes per element instead
# of 4, both are halved. A GPU also computes faster in low precision, on its tensor cores: 312 TFLOP/s in bf16 and fp16
# and 156 TFLOP/s in TF32, compared with 19.5 TFLOP/s in fp32 (NVIDIA's A100 data sheet). The compute time falls by a
# larger factor than the size of messages, so communication is harder to hide. Why not convert the entire model to bf16?
#
# | dtype | bytes | exponent | mantissa | largest | smallest above 0 |
# |---|---|---|---|---|---|
# | fp32 | 4 | 8 bits | 23 bits | 3.4e38 | 1.4e-45 |
# | bf16 | 2 | 8 bits | 7 bits | 3.4e38 | 9.2e-41 |
# | fp16 | 2 | 5 bits | 10 bits | 65,504 | 6.0e-8 |
#
# Just below 1, adjacent bf16 numbers differ by 1/256. An optimizer subtracts 0.001 from a parameter 500 times, starting
# at 1.0. Predict the result.

# %%
predict("9.0", ..., "a bf16 parameter of 1.0 after 500 updates of -0.001")

# %%
import tempfile
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import record_function

from minifsdp import FullyShardedDataParallel
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.fsdp import CPUOffload, MixedPrecision, SyncSchedule
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.reduction import Reduction
from minifsdp.gpt import Block
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import read_trace
from minifsdp.instruments.watch.trace import record_trace

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

low, high = torch.ones(1, dtype=BF16), torch.ones(1)
for _ in range(500):
    low -= 0.001
    high -= 0.001
outcome("9.0", low.item(), how="computed", slips={"that is exact arithmetic, and about what fp32 gives": 0.5})
print(f"fp32: {high.item():.4f}; bf16: {low.item():.4f}, because 1.0 - 0.001 rounds back to 1.0")

# %% [markdown]
# What happens in a model? Adam's first step moves *every* element up or down by about the learning rate. The next cell
# counts the elements of this lab's model that such a step leaves unchanged if they are kept in bf16. (Elements with
# initial value 0 can take a step of any size; those with initial value 1, the weights of the norms, lose almost every
# step.)

# %%
RANKS = 2
SETTINGS = Settings(ranks=RANKS, batch=4, layers=5, width=105, context=16)
BATCHES = list(SETTINGS.batches())  # the same on every rank; each takes its own rows
SIZES = sizes_of(SETTINGS.model())  # elements of each parameter, grouped by unit, the root first
PADDED = [RANKS * -(-sum(unit) // RANKS) for unit in SIZES.units]  # elements of each unit, padded for the ranks
UNITS, MIB = len(PADDED), 2**20

start = torch.cat([p.detach().flatten() for p in SETTINGS.model().parameters()])
sign = torch.randint(2, start.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
for rate in (1e-2, 1e-3, 1e-4, 1e-5):
    lost = [int(((before + rate * sign).to(before.dtype) == before).sum()) for before in (start.to(BF16), start)]
    print(f"learning rate {rate:g}: unchanged in bf16 {lost[0] / len(start):6.1%}, in fp32 {lost[1] / len(start):.1%}")

# %% [markdown]
# So the *shards*, which the optimizer updates, stay in fp32: they are called *master weights*. Only the temporary
# tensors derived from them are in bf16:
#
#     shard (fp32) --cast--> full (param_dtype) --compute--> gradient (param_dtype)
#     shard.grad (fp32) <--cast-- mean (reduce_dtype) <--reduce-scatter-- gradient (reduce_dtype)
#
# FSDP has an advantage here (FSDP paper, section 4.4): the master weights are sharded. On a single device, mixed
# precision holds 4 + 2 bytes per element at all times. FSDP holds 4 / N bytes per element, plus 2 bytes for each
# element of the units that are currently unsharded.
#
# Predict: with FULL_SHARD, bf16 parameters and bf16 reductions (and shards still in fp32), what fraction of the fp32
# bytes does each of 2 ranks send in a step?

# %%
predict("9.1", ..., "bytes sent in a step of FULL_SHARD in bf16, as a fraction of fp32's")

# %% [markdown]
# ## 9.1 Gather in a different dtype
#
# *8 minutes, medium*
#
# A collective moves bytes and does not cast them, so this rank's shard has to be cast before it is sent. For the
# duration of a gather, torch allocates a buffer of P / N elements for the cast shard, `_mp_shard`
# (`torch/distributed/fsdp/_flat_param.py`). But this memory exists already: one slice of `full`, the output of the
# gather, belongs to this rank. The cast shard can be written there, and the all-gather then works *in place*. The
# gather is non-blocking: the caller waits for the returned handle before it computes.


# %% tags=["exercise-9.1"]
from .ex1_gather_low import gather_low

# %% [markdown]
# ## 9.2 Return the gradient to the shard
#
# *8 minutes, medium*
#
# In the backward pass, the gradient of each leaf has the dtype of `full`. The engine copies these gradients into one
# unsharded gradient in `reduce_dtype`, which is then sent and summed. The reduce-scatter leaves this rank's shard of
# the mean, also in `reduce_dtype`. The optimizer needs the mean in the dtype of the shard, and the gradients of
# micro-batches must be added in that dtype: low precision loses small terms just as it loses small updates.


# %% tags=["exercise-9.2"]
from .ex2_deliver import deliver

# %% [markdown]
# ## 9.3 Where to divide
#
# *5 minutes, easy*
#
# The mean over N ranks is a sum and a division. The range of fp32 and bf16 is wide enough for either order, but that of
# fp16 is not. N gradients above 65,504 / N overflow if they are summed first, and values below 3e-8 * N become 0 if
# they are divided first. So the division is split: divide by about √N before the sum, and by the remaining factor after
# it. Division by a power of two changes only the exponent, and is exact above 6e-5; below that, fp16 loses bits.
# (torch's FSDP1 splits the division in every dtype, and only by powers of two that divide N: see
# `_get_gradient_predivide_factor` in `torch/distributed/algorithms/_comm_hooks/default_hooks.py`. FSDP2 splits it only
# in fp16: see `_get_gradient_divide_factors` in `_fully_shard/_fsdp_collectives.py`. In other dtypes the reduction
# itself divides (`ReduceOp.AVG`), as it does in minifsdp's own unit.)
#
# Predict: by what number are fp16 gradients divided *before* they are summed across 512 ranks?

# %%
predict("9.3", ..., "divisor of fp16 gradients before the sum over 512 ranks")


# %% tags=["exercise-9.3"]
from .ex3_divisors import divisors

# %%
before, after = divisors(FP16, 512)
outcome("9.3", 32, how="computed", slips={"the power of two below the root": 16, "all of it": 512, "nothing": 1})
print("fp16, the same gradient on 512 ranks; the mean, with the division in three places:")
for gradient in (2_000.0, 2e-6):
    found = []
    for first, rest in ((1, 512), (512, 1), (before, after)):
        divided = torch.full((512,), gradient, dtype=FP16) / first
        summed = divided.sum(dtype=FP32).to(FP16)  # rounded once, so that only the range matters
        found.append((summed / rest).item())
    print(f"gradient {gradient:g}: after the sum {found[0]:g}, before the sum {found[1]:g}, split {found[2]:g}")

# %% [markdown]
# Splitting the division costs a factor of √N at each end of the range, instead of a factor of N at one end: gradients
# above 65,504 / √N still overflow, and 2e-6 / 32 has lost bits. Loss scaling (9.4) is another remedy for the narrow
# range.
#
# ## Your unit in the engine
#
# `FlatUnit` is the unit of labs 05 to 08. It consists of a flat parameter and a plan, which specifies the process group
# and the dtypes. Your functions carry out the plan: the class below calls them instead of the code in `FlatUnit`, and a
# `Reduction` uses your divisors. Both are passed to FSDP (`unit=`); the engine and the schedules stay unchanged.


# %%
class SplitDivision(Reduction):
    """Sums gradients, with the divisions given by `divisors`."""

    def scaling(self, dtype: torch.dtype, ranks: int) -> tuple[Any, float, float]:
        return comm.SUM, *divisors(dtype, ranks)


class LowPrecisionUnit(FlatUnit):
    """Computes and reduces in the dtypes of its plan, and keeps an fp32 shard."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, reduction=SplitDivision(), **kwargs)

    def gather_into(self, full: Tensor) -> Handle:
        handle = gather_low(full, self.flat.shard.data, self.group)
        assert handle is not None, "gather_low has returned no handle: mend 9.1 first"
        return handle

    def _deliver(self, mean: Tensor) -> None:
        deliver(self.flat.shard, mean)


PRECISIONS = {
    "fp32": MixedPrecision(FP32),
    "bf16": MixedPrecision(BF16),
    "bf16, reduced in fp32": MixedPrecision(BF16, FP32),
    "fp16": MixedPrecision(FP16),
}


def yours(precision: MixedPrecision = PRECISIONS["fp32"], **options: Any) -> FullyShardedDataParallel:
    """Build the lab's model in minifsdp's FSDP with your unit: FULL_SHARD, no overlap, one unit per block."""
    model = SETTINGS.model().to(rank_device())
    options = {"schedule": SyncSchedule, "auto_wrap_policy": {Block}, **options}
    return FullyShardedDataParallel(model, mixed_precision=precision, unit=LowPrecisionUnit, **options)


def mine_of(batch: data.Batch) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a batch."""
    tokens, targets = data.shard(batch, dist.get_rank(), dist.get_world_size())
    return tokens.to(rank_device()), targets.to(rank_device())


def shards_of(model: FullyShardedDataParallel) -> list[nn.Parameter]:
    return [wrapped.params[0] for wrapped in FullyShardedDataParallel.fsdp_modules(model)]


# %% [markdown]
# ### Measured: the dtype of each stage
#
# The dtypes are recorded in three places: in a linear layer of a block while it computes, in the buffers of the engine,
# and in the optimizer.


# %%
def note_dtypes(name: str) -> dict[str, torch.dtype]:
    seen: dict[str, torch.dtype] = {}
    model = yours(PRECISIONS[name])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    layer, unit = model.module.blocks[0].module.up, model.module.blocks[0]._unit

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.update({"gathered": module.weight.dtype, "activation": output.dtype})
        module.weight.register_hook(lambda gradient: seen.update({"gradient": gradient.dtype}))

    layer.register_forward_hook(look)
    with comm.record() as calls:
        model(*mine_of(BATCHES[0])).backward()
    (reduction,) = (call for call in calls if call.op == "reduce_scatter" and call.label.what == unit.title)
    optimizer.step()
    shard = shards_of(model)[1]
    return {
        "shard": shard.dtype,
        **seen,
        "reduced": reduction.dtype,
        "shard.grad": shard.grad.dtype,
        "Adam": optimizer.state[shard]["exp_avg"].dtype,
    }


def note_all() -> list[dict[str, torch.dtype]]:
    return [note_dtypes(name) for name in PRECISIONS]


NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
noted = dict(zip(PRECISIONS, launch(note_all, RANKS)[0], strict=True))
print(f"{'':22}" + "".join(f"{stage:>11}" for stage in noted["fp32"]))
for name, dtypes in noted.items():
    print(f"{name:22}" + "".join(f"{NAMES[dtype]:>11}" for dtype in dtypes.values()))
    low, reduced = PRECISIONS[name].param_dtype, PRECISIONS[name].reduce_dtype or PRECISIONS[name].param_dtype
    assert list(dtypes.values()) == [FP32, low, low, low, reduced, FP32, FP32], f"{name}: {dtypes}"

# %% [markdown]
# ### Measured: the same gradients as torch's FSDP
#
# The next cell compares the gradient shards of one step from three sources: your unit, minifsdp's own unit, and torch's
# `FullyShardedDataParallel` with the same `mixed_precision`. On two ranks, a sum is a single addition, and halving is
# exact (far from the ends of the fp16 range), so rounding errors cannot differ.


# %%
def gradients_with(kind: str, name: str) -> Tensor:
    """Return this rank's gradient shards, concatenated."""
    if kind == "yours":
        model = yours(PRECISIONS[name])
        shards = shards_of(model)
    elif kind == "minifsdp":
        model = SETTINGS.model().to(rank_device())
        model = FullyShardedDataParallel(model, mixed_precision=PRECISIONS[name], auto_wrap_policy={Block})
        shards = shards_of(model)
    else:
        warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives that its own FSDP1 uses
        from torch.distributed import fsdp
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        model = fsdp.FullyShardedDataParallel(
            SETTINGS.model().to(rank_device()),
            mixed_precision=fsdp.MixedPrecision(PRECISIONS[name].param_dtype, PRECISIONS[name].reduce_dtype),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=rank_device(),
        )
        shards = [wrapped._flat_param for wrapped in fsdp.FullyShardedDataParallel.fsdp_modules(model)]
    model(*mine_of(BATCHES[0])).backward()
    return torch.cat([shard.grad.detach().cpu() for shard in shards])


def compare() -> dict[str, tuple[bool, bool, float]]:
    """Return, for each precision, whether the gradients equal minifsdp's and torch's, and the largest distance from
    fp32, relative to the largest gradient."""
    found, exact = {}, gradients_with("yours", "fp32")
    for name in PRECISIONS:
        mine, ours, torchs = (gradients_with(kind, name) for kind in ("yours", "minifsdp", "torch"))
        distance = float((mine - exact).abs().max() / exact.abs().max())
        found[name] = torch.equal(mine, ours), torch.equal(mine, torchs), distance
    return found


for name, (ours, torchs, distance) in launch(compare, RANKS)[0].items():
    print(f"{name:22} equal to minifsdp's {ours}, to torch's {torchs}; within 5 % of fp32: {distance < 0.05}")
    assert ours, f"{name}: not the gradients of minifsdp's unit"
    assert torchs, f"{name}: not the gradients of torch's FSDP"

# %% [markdown]
# ### Measured: bytes at each stage
#
# Let p and r be the bytes per element in `param_dtype` and `reduce_dtype`. Let R, B and Ψ be the number of elements,
# including padding, in the root, in the largest block and in the entire model. The predictions are:
#
# - between steps: (4 + 8) Ψ / N for the shards and Adam's state in fp32 (plus 4 bytes per unit for Adam's counter),
#   **whatever the precision**;
# - unsharded parameters: p R at the end of the forward pass, p (R + B) at the peak;
# - sent: (N - 1) / N times p (2Ψ - R) in gathers and r Ψ in reductions.


# %%
def measure_memory(name: str) -> dict[str, Any]:
    """Return the bytes and the collectives of the second step."""
    with Ledger() as ledger:
        model = yours(PRECISIONS[name])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ledger.watch(model, optimizer)
        for batch in BATCHES[:2]:
            ledger.reset_peaks()
            stages = {"before the step": ledger.mark("before")}
            with comm.record() as calls:
                loss = model(*mine_of(batch))
                stages["forward"] = ledger.mark("forward")
                loss.backward()
            stages["peak"] = ledger.peak.tags
            stages["backward"] = ledger.mark("backward")
            optimizer.step()
            stages["after the optimizer"] = ledger.mark("step")
            optimizer.zero_grad()
            del loss
        return {"stages": stages, "unsharded": ledger.peak_of("unsharded"), "calls": calls}


def measure_all() -> dict[str, dict[str, Any]]:
    return {name: measure_memory(name) for name in list(PRECISIONS)[:3]}


usage = launch(measure_all, RANKS)[0]
psi, root, block = sum(PADDED), PADDED[0], max(PADDED[1:])
share = (RANKS - 1) / RANKS
print(f"{'':22}{'before step':>12}{'forward ends':>14}{'unsharded at most':>19}{'sent':>12}")
for name, found in usage.items():
    p = PRECISIONS[name].param_dtype.itemsize
    r = PRECISIONS[name].reduce_dtype.itemsize if PRECISIONS[name].reduce_dtype else p
    rest = {tag: size for tag, size in found["stages"]["before the step"].items() if tag in ("parameters", "optimizer")}
    sent = round(sum(call.wire for call in found["calls"]))
    row = [sum(rest.values()), found["stages"]["forward"]["unsharded"], found["unsharded"], sent]
    steps = 4 * UNITS  # Adam's counter of steps, 4 bytes per shard
    wanted = [12 * psi // RANKS + steps, p * root, p * (root + block), round(share * (p * (2 * psi - root) + r * psi))]
    for text, (rest, forward, most, wire) in (("expected", wanted), (name, row)):
        print(f"{text:22}{rest:12,}{forward:14,}{most:19,}{wire:12,}")
    assert row == wanted, f"{name}: {row}, not {wanted}"
sent = {name: sum(call.wire for call in found["calls"]) for name, found in usage.items()}
slips = {
    "nothing is sent in fp32: gathers and reductions are both bf16": 5 / 6,
    "that is with reduce_dtype fp32": 2 / 3,
}
outcome("9.1", sent["bf16"] / sent["fp32"], ranks=RANKS, slips=slips)

# %%
whole = {name: {stage: sum(held.values()) for stage, held in found["stages"].items()} for name, found in usage.items()}
plots.stages(
    usage["bf16"]["stages"],
    predicted={
        "before the step": 12 * psi // RANKS + 4 * UNITS,
        "backward": 16 * psi // RANKS + 4 * UNITS,
        "after the optimizer": 16 * psi // RANKS + 4 * UNITS,
    },
    earlier={
        f"{name}\n(peak {whole[name]['peak'] / MIB:.1f})": whole[name] for name in ("fp32", "bf16, reduced in fp32")
    },
    title=f"bf16 lowers the peak from {whole['fp32']['peak'] / MIB:.1f} to {whole['bf16']['peak'] / MIB:.1f} MiB, "
    "but saves nothing between steps",
    says="A rank's bytes at the end of each stage of a step in bf16, and at its peak. Narrow bars: fp32, and bf16 with "
    "gradients reduced in fp32. Shards, their gradients and Adam's state are fp32 in all three.",
    lab="09",
)

# %% [markdown]
# So bf16 halves the size of unsharded parameters and gradients, and the bytes sent, and almost halves the size of the
# activations (logits and loss are in fp32). It saves nothing between steps. In this small model, the optimizer state
# dominates. Reducing in fp32 doubles the memory of the unsharded gradients and the bytes sent to reduce them, but the
# sum across the ranks is no longer rounded to the 7 mantissa bits of bf16. On 2 ranks, there is only one rounding; on
# 512 ranks, there are many.
#
# ## 9.4 fp16: all ranks step, or no rank does
#
# *12 minutes, hard*
#
# fp16 has more mantissa bits than bf16, but a narrow range. Gradients are small: below 6e-5 they lose bits, and below
# 3e-8 they vanish. *Loss scaling* multiplies the loss, and thereby all gradients, by a large number S, and divides the
# gradients by S again in fp32, before the optimizer step. S is found by trial and error: start high, and if any
# gradient is infinite or NaN, skip the step and halve S. (After 2,000 good steps, torch doubles S again, which this lab
# omits. Neither torch nor this lab sets a lower limit. With a NaN in the data, S would be halved forever; the run
# should stop instead.) Gradient clipping belongs between unscaling and the step, and needs the norm over all shards
# (`model.clip_grad_norm_`).
#
# With *sharding*, a rank sees only the gradients of its own shards, so an overflow in one shard is visible on only one
# rank. How do the other ranks find out?
#
# Predict: the initial scale is 2**24, but the largest scale without overflow is 2**20. How many steps are skipped?

# %%
predict("9.4", ..., "steps skipped while the scale falls from 2**24 to 2**20")


# %% tags=["exercise-9.4"]
from .ex4_step_together import step_together

# %% [markdown]
# ### Measured: all ranks agree
#
# Two ranks train in fp16 with your unit. In the third step, one element of rank 1's gradients is set to infinity. Your
# function is compared with minifsdp's `ShardedGradScaler` and with a scaler that checks only its own rank, as torch's
# plain `GradScaler` does.


# %%
def alone(optimizer: torch.optim.Optimizer, scale: float, group: Group) -> float:
    """Each rank decides for itself."""
    grads = [p.grad.div_(scale) for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
    if not all(bool(grad.isfinite().all()) for grad in grads):
        return scale / 2
    optimizer.step()
    return scale


class Library:
    """minifsdp's scaler with the signature of `step_together`."""

    def __init__(self, scale: float) -> None:
        self.scaler = ShardedGradScaler(rank_device().type, init_scale=scale)
        self.scaler.scale(torch.zeros(1, device=rank_device()))  # a torch scaler has no scale before its first use

    def __call__(self, optimizer: torch.optim.Optimizer, scale: float, group: Group) -> float:
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


def with_an_infinity(how: str) -> tuple[list[float], list[bool], Tensor]:
    """Return, for each step, the scale and whether this rank has stepped; then its final shards."""
    steps = {"your step_together": step_together, "each alone": alone, "ShardedGradScaler": Library(1024.0)}
    model, group = yours(PRECISIONS["fp16"]), comm.world()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scales, stepped, scale = [], [], 1024.0
    for number, batch in enumerate(BATCHES[:4]):
        (scale * model(*mine_of(batch))).backward()
        if number == 2 and group.rank() == 1:
            shards_of(model)[1].grad[7] = torch.inf
        before = shards_of(model)[0].detach().clone()
        scale = steps[how](optimizer, scale, group)
        scales.append(scale)
        stepped.append(not torch.equal(before, shards_of(model)[0]))
        optimizer.zero_grad()
    return scales, stepped, torch.cat([shard.detach().cpu() for shard in shards_of(model)])


HOWS = ("each alone", "your step_together", "ShardedGradScaler")


def infinities() -> dict[str, tuple[list[float], list[bool], Tensor]]:
    return {how: with_an_infinity(how) for how in HOWS}


# %% tags=["C18"]
both = launch(infinities, RANKS)
for how in HOWS:
    for rank, found in enumerate(both):
        print_wrapped(
            f"{how:20} rank {rank}: stepped {found[how][1]}, scale after each step {[int(s) for s in found[how][0]]}"
        )
agreed = {how: both[0][how][:2] == both[1][how][:2] for how in HOWS}
print("ranks agree:", ", ".join(f"{how} {agreed[how]}" for how in HOWS))
expected = ([1024.0, 1024.0, 512.0, 512.0], [True, True, False, True])
assert all(found["your step_together"][:2] == expected for found in both), "not all ranks skip the third step"
assert not agreed["each alone"]
same = all(torch.equal(found["your step_together"][2], found["ShardedGradScaler"][2]) for found in both)
print_wrapped(f"expected: steps {expected[1]}; your parameters equal ShardedGradScaler's bit for bit: {same}")
assert same

# %% [markdown]
# With the local check, rank 0 has updated its half of the model in a step that rank 1 skipped. The scales now differ:
# rank 0 multiplies its loss by 1024, rank 1 by 512, and the reduce-scatter averages gradients with two different
# scales. This raises no error, and neither rank can detect the mismatch. (torch's own `ShardedGradScaler` is not
# compared here, because it disables itself without CUDA.)
#
# ### Measured: why scaling helps, and the cost of a bad guess
#
# Here, a rank has 32 tokens, and each token contributes 1/32 of the mean loss. With 65,536 tokens per rank, that
# fraction would be 2,048 times smaller, and so would the gradient propagated for each token. To simulate this case, the
# next cell divides the loss by 2,048 before scaling it. (This also shrinks the gradients of weights, which are sums
# over tokens. With a real batch of that size, they would not shrink, so less precision would be lost.) The cell prints
# the relative error of the gradients (in the norm) compared with fp32. Then it runs nine steps with an initial scale
# that is far too high. In bf16, the scale can stay at 1, because the exponent of bf16 has as many bits as that of fp32.


# %% tags=["C18", "nbval-ignore-output"]
LARGE_BATCH = 2048


def gradient_of(name: str, scale: float) -> Tensor:
    model = yours(PRECISIONS[name])
    (scale * model(*mine_of(BATCHES[0])) / LARGE_BATCH).backward()
    return torch.cat([shard.grad for shard in shards_of(model)]) / scale


def guess_badly(name: str, scale: float) -> list[float]:
    """Return the scale after each of nine steps."""
    model = yours(PRECISIONS[name])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scales = []
    for batch in BATCHES[:9]:
        (scale * model(*mine_of(batch)) / LARGE_BATCH).backward()
        scale = step_together(optimizer, scale, comm.world())
        scales.append(scale)
        optimizer.zero_grad()
    return scales


def too_high() -> int:
    """Count the steps skipped from a scale of 2**24, if scales above 2**20 overflow on one rank."""
    group, scale, thrown = comm.world(), 2.0**24, 0
    shard = nn.Parameter(torch.zeros(1, device=rank_device()))
    while True:
        overflows = scale > 2**20 and group.rank() == 0
        shard.grad = torch.full_like(shard, torch.inf if overflows else 1.0)
        before, scale = scale, step_together(torch.optim.SGD([shard], 0.1), scale, group)
        if scale == before or thrown > 9:
            return thrown
        thrown += 1


SCALED = [("bf16", 1.0), ("bf16", 2.0**20), ("fp16", 1.0), ("fp16", 2.0**20)]


def scaling() -> tuple[list[float], list[float], int]:
    exact = gradient_of("fp32", 1.0)
    errors = [float((gradient_of(*each) - exact).abs().sum() / exact.abs().sum()) for each in SCALED]
    return errors, guess_badly("fp16", 2.0**30), too_high()


errors, scales, thrown = launch(scaling, RANKS)[0]
for (name, scale), error in zip(SCALED, errors, strict=True):
    print(f"{name}, scale {scale:9,.0f}: {error:7.2%} off fp32's gradients")
wasted = sum(after < before for before, after in zip([2.0**30, *scales], scales, strict=False))
print(f"fp16 from a scale of 2**30: {wasted} of 9 steps skipped")
print("exponents of the scale:", [int(torch.tensor(scale).log2()) for scale in scales])
outcome("9.4", thrown, slips={"halving four times leads there, and the step after it is good": 5})
assert errors[2] > 2 * errors[3], "scaling has not helped fp16"
assert abs(errors[0] - errors[1]) < 0.1 * errors[0], "scaling should make no difference to bf16"
assert scales[0] == 2.0**29, f"the first guess was too high, and is halved: {scales}"
assert scales[-1] == scales[-2], f"the guess was not corrected: {scales}"

# %% [markdown]
# Each halving costs an entire forward and backward pass. Overflows return whenever S has grown too large; with fp16,
# this is a normal part of training. bf16 has replaced fp16 where the hardware supports it.
#
# ## 9.5 Accumulate with and without communication
#
# *8 minutes, medium*
#
# A batch that does not fit in memory is divided into k *micro-batches*, whose gradients are summed. When is a gradient
# reduced?
#
# - **with communication**: after every micro-batch. Every backward pass reduce-scatters the gradient and adds the
#   result to the shard's gradient. Between micro-batches, a rank keeps sharded gradients, 4Ψ / N bytes in fp32.
# - **without communication**: inside `model.no_sync()`, each unit keeps its unsharded gradient. The first backward pass
#   outside `no_sync` reduces the sum. Between micro-batches, a rank keeps 4Ψ bytes, as much as DDP.
#
# Many texts say that accumulation with communication reduces after several steps. This is wrong: it reduce-scatters in
# **every** micro-batch. So it saves memory but sends more bytes.
#
# Predict for k = 3 micro-batches and this lab's model with its 6 units: with communication, how many reduce-scatters
# are there? Without communication, how many bytes of gradients does each of 2 ranks keep between micro-batches? (The
# model has `psi` elements including padding; your answer may be an expression.)

# %%
predict("9.5a", ..., "reduce-scatters of 3 micro-batches with communication, 6 units")
predict("9.5b", ..., "bytes of gradients between micro-batches without communication, on one rank")


# %% tags=["exercise-9.5"]
from .ex5_accumulate import accumulate

# %%
K = 3


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    return [mine_of(batch) for batch in BATCHES[:K]]


def measure_accumulation() -> dict[bool, dict[str, Any]]:
    """Return, for each value of `communicate`, collectives, bytes of gradients after each backward and at the peak, and
    the gradients."""
    found = {}
    for communicate in (True, False):
        with Ledger() as ledger:
            model = yours()
            ledger.watch(model)
            held: list[int] = []  # at the start of each forward
            model.register_forward_pre_hook(lambda *_, live=ledger.live, held=held: held.append(live()["gradients"]))
            batches = micro_batches()
            with comm.record() as calls:
                accumulate(model, batches, communicate)
            gradients = torch.cat([shard.grad.cpu() for shard in shards_of(model)])
            peak = ledger.peak_of("gradients")
        found[communicate] = {"calls": calls, "held": held, "peak": peak, "gradients": gradients}
    return found


# %% [markdown]
# ### Measured: bytes and collectives

# %% tags=["C17"]
accumulated = launch(measure_accumulation, RANKS)[0]
print(f"{'k = 3':24}{'gathers':>9}{'reductions':>12}{'sent':>12}{'kept between':>14}{'gradients at most':>19}")
for communicate in (True, False):
    found = accumulated[communicate]
    ops = [call.op for call in found["calls"]]
    reductions = K * UNITS if communicate else UNITS
    wire = share * 4 * (K * (2 * psi - root) + (K if communicate else 1) * psi)
    kept = 4 * psi // RANKS if communicate else 4 * psi
    row = [ops.count("all_gather"), ops.count("reduce_scatter"), round(sum(call.wire for call in found["calls"]))]
    print(f"{'with' if communicate else 'without'} communication".ljust(24), end="")
    print(f"{row[0]:9}{row[1]:12}{row[2]:12,}{found['held'][-1]:14,}{found['peak']:19,}")
    print(f"{'  expected':24}{K * (2 * UNITS - 1):9}{reductions:12}{round(wire):12,}{kept:14,}")
    assert [*row, found["held"][-1]] == [K * (2 * UNITS - 1), reductions, round(wire), kept]
slips = {"of one micro-batch": UNITS, "gathers are counted too": K * (3 * UNITS - 1)}
outcome("9.5a", K * UNITS, slips=slips)
outcome("9.5b", accumulated[False]["held"][-1], ranks=RANKS, slips={"of all micro-batches": K * 4 * psi})
with_communication, without = (accumulated[communicate]["gradients"] for communicate in (True, False))
close = bool((with_communication - without).abs().max() < 1e-6 * without.abs().max() * K)
print(f"the same gradient within rounding: {close}")
assert close

# %% [markdown]
# The number of reductions falls from kU to U; the gathers remain, because parameters are resharded after every backward
# pass. With FULL_SHARD, the gathers account for two thirds of the traffic. Jobs that use `no_sync` run out of memory
# because of the additional 4Ψ bytes. (With SHARD_GRAD_OP, parameters stay unsharded inside `no_sync`. This saves the
# gathers as well, but costs another 4Ψ bytes: see `kept` in `minifsdp/fsdp/engine.py`.) minifsdp accumulates unsharded
# gradients in `reduce_dtype`; torch leaves them in autograd's `.grad`, in `param_dtype`.
#
# The next cell traces both kinds of accumulation on an emulated link (1 ms latency, 100 MB/s):


# %% tags=["nbval-ignore-output"]
def mark_passes(model: nn.Module) -> ExitStack:
    """Mark the passes in a trace: a backward pass lasts from the end of a forward pass to the next, or to the exit."""
    passes = ExitStack()

    def begin(name: str) -> None:
        passes.close()
        passes.enter_context(record_function(name))

    model.register_forward_pre_hook(lambda *_: begin("forward"), prepend=True)
    model.register_forward_hook(lambda *_: begin("backward"))
    return passes


def trace_both(folder: Path) -> None:
    let_communication_go_first()
    with parse_link("latency=1ms,bandwidth=100MB/s") as link:
        for communicate in (True, False):
            model = yours(schedule=None)  # the library's own schedule, which overlaps
            passes = mark_passes(model)
            with passes:
                accumulate(model, micro_batches(), communicate)
            for take in range(3):
                model.zero_grad()
                with record_trace(folder / f"{communicate}-{take}-{dist.get_rank()}.json", link):
                    dist.barrier()  # start together
                    with passes:
                        accumulate(model, micro_batches(), communicate)


with tempfile.TemporaryDirectory() as folder:
    launch(trace_both, RANKS, Path(folder))
    takes = {each: [read_trace(Path(folder, f"{each}-{n}-0.json")) for n in range(3)] for each in (True, False)}
spans = {each: min(takes[each], key=lambda take: max(span.end for span in take)) for each in takes}
plots.timeline(
    {"with communication": spans[True], "without (no_sync)": spans[False]},
    title=f"no_sync issues {UNITS} reductions instead of {K * UNITS}, and the same {K * (2 * UNITS - 1)} gathers",
    says="Lanes of one rank, three micro-batches. With communication, every backward reduces; without, only the last. "
    "The fastest of three runs of each; a busy machine lengthens spans, those of reductions most.",
    lab="09",
)

# %% [markdown]
# ## 9.6 Moving the gradient to the host
#
# *12 minutes, hard*
#
# *CPU offload* keeps the shards, their gradients and the optimizer state in host memory, and the optimizer runs on the
# CPU. The device holds only the units being computed. Your function from 9.1 already moves shards *to* the device:
# `copy_` both moves and casts, and with `non_blocking=True`, the host does not wait. (To do both at once, torch makes a
# temporary copy of the shard on the device: `aten/src/ATen/native/cuda/Copy.cu`.) Gradients move in the other
# direction, which has a pitfall. The host only *starts* a copy from a GPU to pinned (page-locked) host memory. Without
# a wait, the optimizer, which runs on the host, would read that memory before the gradient has arrived. When must the
# host wait?
#
# - It must not wait immediately, because it would then block after every unit and could issue no further work.
# - It must wait at the end of the backward pass, before the optimizer runs, and only for this copy, that is, for an
#   *event* recorded after the copy. (torch waits once, for all work on the stream: `_post_backward_final_callback` in
#   `_runtime_utils.py`.)
#
# The new gradient is added to the existing one. torch's FSDP overwrites it instead (`_offload_grad` in
# `torch/distributed/fsdp/_runtime_utils.py` copies into `_cpu_grad`), and its documentation therefore rules out
# accumulation outside `no_sync()`.
#
# Predict: between steps, after `zero_grad`, how many bytes of parameters and Adam's state does a *device*
# hold with offload?

# %%
predict("9.6", ..., "bytes of parameters and Adam's state on the device between steps, with offload")


# %% tags=["exercise-9.6"]
from .ex6_offload_gradient import offload_gradient


# %% tags=["shown"]
class HostUnit(FlatUnit):
    """A unit whose shards live in host memory."""

    start = staticmethod(offload_gradient)
    gather_into = LowPrecisionUnit.gather_into

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.under_way: list[Callable[[], None]] = []

    def _deliver(self, mean: Tensor) -> None:
        self.under_way.append(self.start(self.flat.shard, mean))

    def finish_reduce(self) -> None:
        """Called at the end of the backward pass."""
        super().finish_reduce()
        for arrive in self.under_way:
            arrive()
        self.under_way.clear()


def offloaded(unit: type[FlatUnit] = HostUnit) -> FullyShardedDataParallel:
    """Build your offloaded FSDP, in fp32."""
    model = SETTINGS.model().to(rank_device())
    return FullyShardedDataParallel(
        model, cpu_offload=CPUOffload(True), auto_wrap_policy={Block}, schedule=SyncSchedule, unit=unit
    )


# %% [markdown]
# ### Counted: bytes on the device with and without offload
#
# On a GPU, `tensor.device` shows where a tensor is. On a CPU, host and device memory are the same, so the lab keeps its
# own count. The engine's buffers (`device.empty`) count as device memory, and tensors returned by `device.copy_to_host`
# count as host memory. Gradients and Adam's state are counted where their shards are.


# %%
class DeviceBytes:
    """Counts the bytes on the device."""

    def __init__(self) -> None:
        self.buffers: list[weakref.ref[Tensor]] = []
        self.on_host: list[Tensor] = []

    @contextmanager
    def counting(self) -> Any:
        def made(buffer: Tensor, role: str) -> None:
            self.buffers.append(weakref.ref(buffer))

        def asked(command: device.Command) -> None:
            if command.verb == "copy_to_host":
                self.on_host.append(command.subject)

        device.buffer_observers.append(made)
        device.command_observers.append(asked)
        try:
            yield self
        finally:
            device.buffer_observers.remove(made)
            device.command_observers.remove(asked)

    def now(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Return the bytes on the device: of shards, of Adam's two moments, of the engine's buffers."""
        host = {tensor.untyped_storage().data_ptr() for tensor in self.on_host}
        buffers = [buffer for each in self.buffers if (buffer := each()) is not None]
        shards = [p for group in optimizer.param_groups for p in group["params"]]
        there = [p for p in shards if p.device == rank_device() and p.untyped_storage().data_ptr() not in host]
        moments = [optimizer.state[shard][name] for shard in there for name in ("exp_avg", "exp_avg_sq")]
        return {
            "shards": sum(shard.untyped_storage().nbytes() for shard in there),
            "Adam": sum(moment.untyped_storage().nbytes() for moment in moments),
            "buffers": sum(buffer.untyped_storage().nbytes() for buffer in buffers),
        }


def follow_device() -> dict[str, dict[str, dict[str, int]]]:
    """Return the bytes on the device, by kind and by moment in the second step."""
    found = {}
    for name, build in (("on the device", yours), ("offloaded", offloaded)):
        with DeviceBytes().counting() as count:
            model = build()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            model(*mine_of(BATCHES[0])).backward()  # creates Adam's state
            optimizer.step()
            optimizer.zero_grad()
            stages = {"between steps": count.now(optimizer)}
            loss = model(*mine_of(BATCHES[1]))
            stages["forward ends"] = count.now(optimizer)
            loss.backward()
            stages["backward ends"] = count.now(optimizer)
        found[name] = stages
    return found


# %% tags=["C41"]
on_device = launch(follow_device, RANKS)[0]
shard = 4 * psi // RANKS
wanted = {
    "on the device": {"between steps": 3 * shard, "forward ends": 3 * shard + 4 * root, "backward ends": 4 * shard},
    "offloaded": {"between steps": 0, "forward ends": 4 * root, "backward ends": 0},
}
for name, stages in on_device.items():
    for stage, held in stages.items():
        parts = ", ".join(f"{what} {size:,}" for what, size in held.items())
        total = sum(held.values())
        print_wrapped(f"{name:14} {stage:14} expected {wanted[name][stage]:10,}, measured {total:10,} ({parts})")
        assert total == wanted[name][stage], f"{name}, {stage}"
outcome("9.6", sum(on_device["offloaded"]["between steps"].values()), slips={"the shards alone": shard})

# %% [markdown]
# All of the model state, 16Ψ / N bytes including the gradients, is in host memory. The cost is the transfer over the
# bus, and an optimizer that runs at CPU speed. In every step, 4Ψ / N bytes are copied to the device twice (those of the
# root only once), and 4Ψ / N bytes are copied back. A run on the CPU alone cannot measure these transfer times.
#
# ### Measured: the same gradient, even when accumulated
#
# Offload changes where tensors are, not their values. The next cell runs two micro-batches with communication, and
# compares your offloaded unit with minifsdp's and with a unit without offload. torch's FSDP is omitted because its
# offload fails in `pin_memory` without a CUDA device.
#
# ### Break it: overwrite the gradient
#
# The same cell also runs a unit that overwrites the gradient, as torch does.


# %%
def overwriting(shard: nn.Parameter, mean: Tensor) -> Callable[[], None]:
    on_host = device.copy_to_host(mean)
    device.free(mean)

    def arrive() -> None:
        shard.grad = on_host

    return arrive


class Overwriting(HostUnit):
    start = staticmethod(overwriting)


def accumulate_offloaded() -> dict[str, Tensor]:
    """Return the gradient shards after two micro-batches, and those of the second alone."""
    models = {
        "no offload": yours(),
        "yours": offloaded(),
        "minifsdp's": offloaded(FlatUnit),
        "overwriting": offloaded(Overwriting),
        "the second alone": yours(),
    }
    for name, model in models.items():
        accumulate(model, micro_batches()[1:2] if name == "the second alone" else micro_batches()[:2], communicate=True)
    return {name: torch.cat([shard.grad.cpu() for shard in shards_of(model)]) for name, model in models.items()}


found = launch(accumulate_offloaded, RANKS)[0]
for name in ("yours", "minifsdp's", "overwriting"):
    print(f"{name:12} equal to no offload: {torch.equal(found[name], found['no offload'])}")
half = torch.equal(2 * found["overwriting"], found["the second alone"])
print(f"overwriting equals half of the second micro-batch's gradient, so the first is lost: {half}")
assert torch.equal(found["yours"], found["no offload"]), "offload has changed the gradient"
assert half

# %% [markdown]
# There is no error: each step uses only the gradient of its last micro-batch, and the others have no effect. A
# comparison like this one reveals the mistake. Another mistake, omitting the wait for the copy, cannot be shown on a
# CPU, where a copy is complete when the call returns. On a GPU, the optimizer would read the previous contents of the
# pinned memory.
#
# ### Break it: sum in bf16
#
# A small gradient is added to a large one 64 times, once in fp32 (with your function from 9.2) and once in bf16.

# %%
shard = nn.Parameter(torch.zeros(1))
in_bf16 = torch.zeros(1, dtype=BF16)
for value in [1.0] + 64 * [2.0**-9]:
    mean = device.empty(1, BF16, "gradients", torch.device("cpu")).fill_(value)
    in_bf16 += mean
    deliver(shard, mean)
print(f"1 + 64/512: in fp32 {shard.grad.item():.4f}, in bf16 {in_bf16.item():.4f}")
assert shard.grad.item() == 1.125

# %% [markdown]
# This is the lost update again. Sums of many small terms need fp32: weights, accumulated gradients, the moments of the
# optimizer and, with many ranks, the reduction.
#
# ## 9.7 A mean over tokens, not over ranks
#
# *10 minutes, medium*
#
# In 9.5, each micro-batch has the weight 1/k, and FSDP's average gives each rank the weight 1/N. This is right if all
# of them have as many targets. With masked prompts, padding or packed sequences, they have not, and some micro-batches
# have no targets at all. One process would divide by the number of *all* targets, T. A mean of means divides by the
# number in one micro-batch: the fewer targets a micro-batch has, the more each of them counts. There is no error
# message, and the loss looks healthy. But in the batch below, the gradient of a mean of means misses the right gradient
# by more than the length of the latter. Twelve trainers whose issues and pull requests report mistakes of this kind are
# listed at the end of this section.
#
# Your function divides by T before it calls backward, so all micro-batches of a step have to be there when it begins.
# One can also run backward on sums, and multiply the gradients by N / T before the optimizer step.
#
# Predict: 2 ranks have 3 micro-batches each, with 60 targets altogether. One micro-batch has a single target. In a mean
# of means over all micro-batches of all ranks, how many times its right weight does this target have?

# %%
predict("9.7", ..., "weight of a micro-batch's only target in a mean of means, relative to the right one")


# %% tags=["exercise-9.7"]
from .ex7_accumulate_tokens import accumulate_tokens

# %%
from functools import partial

import torch.nn.functional as F

from minifsdp import DistributedDataParallel
from minifsdp.losses import Loss, cross_entropy, token_mean
from minifsdp.trainer import Trainer

COUNTS = torch.tensor([[32, 5, 7], [1, 0, 15]])  # targets of each micro-batch of each rank, of 2 x 16 tokens
Accumulate = Callable[[Any, Sequence[tuple[Tensor, Tensor]], Group], None]


def masked(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each token, times a mask."""
    return cross_entropy(logits, targets.clamp(min=0), "none").view_as(targets) * (targets != IGNORED)


class TokenLosses(nn.Module):
    """The lab's model; returns losses of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = SETTINGS.model()

    def forward(self, tokens: Tensor, targets: Tensor, loss: Loss = masked) -> Tensor:
        return self.gpt(tokens, targets, loss)


def uneven(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's micro-batches; only their first tokens have targets."""
    pairs = torch.randint(256, (K, 2, 2, SETTINGS.context), generator=torch.Generator().manual_seed(rank))
    for (_, targets), count in zip(pairs, COUNTS[rank], strict=True):
        targets.view(-1)[count:] = IGNORED
    return [(tokens.to(rank_device()), targets.to(rank_device())) for tokens, targets in pairs]


def weighing(weights: Tensor) -> Accumulate:
    """Accumulate with the weights [N, k] of the summed losses."""

    def accumulate_with(model: Any, micro_batches: Sequence[tuple[Tensor, Tensor]], group: Group) -> None:
        for number, (weight, micro_batch) in enumerate(zip(weights[group.rank()], micro_batches, strict=True), start=1):
            with nullcontext() if number == K else model.no_sync():
                (float(weight) * model(*micro_batch).sum()).backward()

    return accumulate_with


def library(model: Any, micro_batches: Sequence[tuple[Tensor, Tensor]], group: Group) -> None:
    """Accumulate as `minifsdp train` does."""
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), loss_of=partial(token_mean, group=group))
    *_, loss = trainer.share(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == K else model.no_sync():
            trainer.backward(*micro_batch, loss, is_last=number == K)


T, ONES = int(COUNTS.sum()), torch.ones(RANKS, K)
WAYS: dict[str, Accumulate] = {
    "yours": accumulate_tokens,
    "minifsdp's": library,
    "mean of means": weighing(1 / COUNTS.clamp(min=1) / K),
    "the same, 0 / 0": weighing(torch.where(COUNTS > 0, 1 / COUNTS / K, torch.nan)),
    "sum of means": weighing(1 / COUNTS.clamp(min=1)),
    "means of ranks": weighing(ONES / COUNTS.sum(1, keepdim=True)),
    "means over ranks": weighing(RANKS * ONES / COUNTS.sum(0) / K),
    "padding counted": weighing(ONES / (K * 32)),
    "without N": weighing(ONES / T),
    "sums": weighing(ONES),
}


def accumulate_in(way: Accumulate, parallel: Callable[[nn.Module], Any]) -> tuple[Tensor, list[float]]:
    """Return the full gradient, and this rank's weight of a target in each micro-batch."""
    model = parallel(TokenLosses().to(rank_device()))
    weights: list[float] = []

    def look(module: nn.Module, args: Any, losses: Tensor) -> None:
        losses.register_hook(lambda gradient: weights.append(float(gradient.flatten()[0]) / RANKS))

    model.register_forward_hook(look)
    way(model, uneven(dist.get_rank()), comm.world())
    full = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        full = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with full:
        return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu(), weights


def accumulate_all() -> dict[str, tuple[Tensor, list[float]]]:
    fsdp = partial(FullyShardedDataParallel, auto_wrap_policy={Block}, use_orig_params=True)
    found = {name: accumulate_in(way, fsdp) for name, way in WAYS.items()}
    return {**found, "yours, in DDP": accumulate_in(accumulate_tokens, DistributedDataParallel)}


def accumulate_alone() -> Tensor:
    model = TokenLosses().to(rank_device())
    sum(model(*micro_batch).sum() / T for rank in range(RANKS) for micro_batch in uneven(rank)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()


# %% [markdown]
# ### Measured: 2 ranks with 3 micro-batches each, and one process
#
# Rank 0's micro-batches have 32, 5 and 7 targets, and rank 1's have 1, 0 and 15. The next cell weighs them in several
# ways, and compares the gradients with that of one process that has all tokens. A "mean of means" divides by the
# targets of each micro-batch, "means of ranks" by those of each rank, and "means over ranks" by those of the same
# micro-batch on all ranks. Your function runs in minifsdp's FSDP and in its DDP.

# %% tags=["C46"]
(right,) = launch(accumulate_alone, 1)
by_rank = launch(accumulate_all, RANKS)
for name, (gradient, _) in by_rank[0].items():
    length, far = (float(each.norm() / right.norm()) for each in (gradient, gradient - right))
    cosine = float(F.cosine_similarity(gradient, right, dim=0))
    print(f"{name:17} {length:5.2f} times as long; cosine of the angle {cosine:.2f}; off by {far:.0%}")
    assert not name.startswith(("yours", "minifsdp")) or far < 1e-5, f"{name}: not the gradient of one process"
assert by_rank[0]["the same, 0 / 0"][0].isnan().any()
weights = {name: torch.tensor([found[name][1] for found in by_rank]) * T for name in WAYS if name != "minifsdp's"}
slips = {
    "its micro-batch counts 1/6, and not 1/3: the ranks are averaged as well": 20,
    "that is without the division by the 6 micro-batches": 60,
    "its micro-batch counts 1/6, and the target's right weight is 1/60": 1 / 6,
}
outcome("9.7", round(float(weights["mean of means"][1, 0]), 4), slips=slips)

# %%
order = sorted((int(count), rank, micro) for rank, own in enumerate(COUNTS) for micro, count in enumerate(own) if count)
plots.lines(
    {
        name: ([count for count, *_ in order], [float(weights[name][rank, micro]) for _, rank, micro in order])
        for name in ("yours", "mean of means", "means of ranks", "without N")
    },
    expected={"one process": ([1, 32], [1.0, 1.0])},
    xlabel="targets in a micro-batch",
    ylabel="weight of a target, relative to one process",
    logx=True,
    logy=True,
    title="In a mean of means, a micro-batch's only target counts ten times too much",
    says="The weights that reached the losses in the backward passes, averaged over the ranks as gradients are. Means "
    "of ranks have a level for each of the two ranks.",
    lab="09",
)

# %% [markdown]
# A wrong factor that is the same for all, such as a missing N, changes only the length of the gradient: it acts like
# another learning rate, and AdamW hardly notices it. A mean of means changes the *direction*. A micro-batch without
# targets that divides by its own number gives 0 / 0, and the reduce-scatter carries the NaN to all ranks.
#
# Published mistakes, as of November 2026; some were in proposals that have not been merged:
#
# - a mean of means over micro-batches and ranks: [prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/pull/1957),
#   [ms-swift](https://github.com/modelscope/ms-swift/pull/10165);
# - a sum of the means of micro-batches: [transformers](https://github.com/huggingface/transformers/issues/37766);
# - the mean of each micro-batch, weighted by its samples: [verl](https://github.com/verl-project/verl/issues/5625);
# - means of ranks: [prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/pull/2562),
#   [speculators](https://github.com/vllm-project/speculators/pull/942),
#   [torchtitan](https://github.com/pytorch/torchtitan/issues/1842);
# - means over ranks, one for each micro-batch: [prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/pull/1960);
# - without N: [verl-SpeCo](https://github.com/verl-project/verl-SpeCo/pull/29);
# - sums, although T is counted: [miles](https://github.com/radixark/miles/pull/3231);
# - a T in which samples without targets count as one: [miles](https://github.com/radixark/miles/pull/2796);
# - 0 / 0 on a rank without targets ([OLMo-core](https://github.com/allenai/OLMo-core/pull/657)), or if no rank has any
#   ([Automodel](https://github.com/NVIDIA-NeMo/Automodel/pull/3797));
# - a rank skips micro-batches without targets, and the others wait for it:
#   [TorchSpec](https://github.com/lightseekorg/TorchSpec/issues/126),
#   [Automodel](https://github.com/NVIDIA-NeMo/Automodel/pull/2468);
# - T is known only at the end, so the activations of all micro-batches are kept:
#   [torchtune](https://github.com/meta-pytorch/torchtune/pull/1875), and
#   [corrected](https://github.com/meta-pytorch/torchtune/pull/1917).
#
# In minifsdp, `token_mean` (`minifsdp/losses.py`) counts the targets, and `Trainer` (`minifsdp/trainer.py`) calls it
# once per step, for all micro-batches. `minifsdp train --ranks 2 --accumulate 3 --batch 12 --lines` trains on sequences
# in which only the tokens up to the end of the first line have targets. With context parallelism, the parts of one
# sequence also differ in their numbers of targets: see lab 15.
#
# ## What is still missing
#
# Buffers (such as running means) have a separate dtype, `buffer_dtype`; the inputs of a module are also cast; modules
# such as BatchNorm should stay in fp32 (`_module_classes_to_ignore`). `param_dtype` casts everything in a unit,
# including norms, whereas `torch.autocast` keeps norms, softmax and losses in fp32. minifsdp implements all of this in
# `fsdp/torch_api` (`mixed_precision.py`, `exempt.py`). Lab 10a, on construction, covers ignored modules and equal
# initial values on all ranks (`sync_module_states`).
#
# ## What to remember
#
# 1. bf16 halves the size of the unsharded parameters and the bytes sent. (If reductions stay in fp32, it saves only a
#    third of the bytes sent.) The shards, their gradients and the optimizer state stay in fp32: 16Ψ / N bytes whatever
#    the precision.
# 2. The cast needs no buffer: the shard is cast into its own slice of the gathered buffer.
# 3. fp16 needs loss scaling, a split division, and agreement on infinities: all ranks step, or no rank does. bf16 needs
#    none of this.
# 4. Accumulation with communication reduce-scatters in every micro-batch and keeps sharded gradients. `no_sync` reduces
#    once and keeps unsharded gradients, which take N times as many bytes. The gathers are the same.
# 5. To offload a gradient, start the copy, record an event, wait for the event at the end of the backward pass, then
#    add the gradient.
# 6. The loss is a mean over tokens. The sum of each micro-batch's losses is multiplied by N / T, where T counts the
#    targets of all ranks and micro-batches: before backward, or the gradients afterwards.
#
# ## Questions
#
# **1. A model is cast with `model.to(torch.bfloat16)` before it is wrapped. What does mixed precision do then?**
#
# <details><summary>Answer</summary>
#
# The shards have the dtype of the parameters, bf16. There are no master weights, Adam's state is in bf16 as well, and
# small updates are lost. Wrap an fp32 model and pass `MixedPrecision(param_dtype=torch.bfloat16)`.
# </details>
#
# **2. The bf16 rows show no fp32 activation. Why is the loss still fp32?**
#
# <details><summary>Answer</summary>
#
# A layer computes in the dtype of its weights and inputs, here bf16. The course's GPT casts its logits to fp32 before
# the cross-entropy (`minifsdp/gpt.py`), since a sum over the vocabulary needs more mantissa bits.
# </details>
#
# **3. Can each replica of a data-parallel model (DDP) check for infinities on its own?**
#
# <details><summary>Answer</summary>
#
# Yes, every replica reaches the same conclusion: after the all-reduce, all ranks hold the same gradients, so an
# infinity on one rank appears in the mean on every rank. With sharded gradients, each rank sees only a part of them, so
# the ranks have to agree.
# </details>
#
# **4. With FULL_SHARD on 64 ranks, each rank has room for 2 more bytes per parameter. Is that enough for `no_sync`?**
#
# <details><summary>Answer</summary>
#
# No: unsharded fp32 gradients take 4Ψ bytes. With `reduce_dtype=bfloat16`, there would be just enough room, but sums of
# micro-batches in bf16 lose small terms.
# </details>
#
# **5. Suppose the host does not wait for the copies of 9.6. Which unit's gradient is most likely to be read too
# early?**
#
# <details><summary>Answer</summary>
#
# The root's gradient is the most likely: the backward pass ends with the root, so the copy of its gradient starts last,
# and the optimizer follows immediately, starting with the parameters of the root. A large root takes longer to copy.
# The race does not occur in every step, which makes it hard to find.
# </details>
#
# **6. Every rank packs its sequences to the same number of tokens. Is a mean of the ranks' means right then?**
#
# <details><summary>Answer</summary>
#
# Only if all tokens have targets. With masked prompts, a rank with one long sequence has one prompt without targets,
# and a rank with many short ones has many
# ([speculators](https://github.com/vllm-project/speculators/pull/942)). It is the number of targets that counts.
# </details>
#
# ## Further reading
#
# - FSDP: [arXiv 2304.11277](https://arxiv.org/abs/2304.11277), section 4.4 (mixed precision).
# - Mixed precision training: [arXiv 1710.03740](https://arxiv.org/abs/1710.03740), sections 3.1 (master weights) and
#   3.2 (loss scaling).
# - ZeRO-Offload: [arXiv 2101.06840](https://arxiv.org/abs/2101.06840), sections 3 and 4.
# - torch: `torch/distributed/fsdp/_flat_param.py` (`_mp_shard`), `_runtime_utils.py` (`_reduce_grad`,
#   `_offload_grad`), `sharded_grad_scaler.py`. In FSDP2 (`fully_shard`): `MixedPrecisionPolicy`, `CPUOffloadPolicy`,
#   `set_requires_gradient_sync` for `no_sync`.
# - minifsdp: `fsdp/plan.py`, `fsdp/flat_unit.py`, `fsdp/reduction.py`, `grad_scaler.py`, `losses.py`: the same
#   functions, for any model.
