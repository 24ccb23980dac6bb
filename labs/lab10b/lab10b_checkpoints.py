# ---
# jupyter:
#   minifsdp:
#     lab: "10b"
#     title: Checkpoints, frozen parameters, recomputation
#     minutes: 85
#     ranks: 3
# ---

# %% [markdown]
# # Lab 10b: checkpoints, frozen parameters, recomputation
#
# Once you have trained a sharded model, you may want to save it, continue on more GPUs, run it in a program without
# FSDP, or fine-tune one per cent of its parameters. Yet no rank holds the parameters of the plain model. In this lab,
# you save and load the parameters and the optimizer state, so that even a power failure does no harm. Then you reduce
# memory in two more ways: by freezing parameters and by recomputing activations.
#
# ![Rows of a sharded checkpoint, written by one number of ranks and read by
# another](../slides/figures/practice-rows.svg)
#
# *From [lecture 5, FSDP in practice](../slides/practice.md), which comes before this lab.*
#
# **After this lab, you will be able to**
#
# - collect a full state dict while unsharding only one unit at a time, and explain why every rank must take part;
# - split tensors so that a checkpoint saved on any number of ranks can be loaded on any other number;
# - store optimizer state under parameter names, and commit a checkpoint so that it is either complete or absent;
# - compute the cost of a frozen parameter inside a flat parameter, and choose units that avoid it;
# - place an activation checkpoint so that it costs no extra all-gather, and say which memory it does not save.
#
# **You need** lab 04 (the flat parameter) and lab 05 (units, gather, free). Lab 10a shows how modules become units.
#
# **Time** 85 minutes. **Runs** on a laptop (gloo, 2 and 3 processes), on one GPU, or on a GPU node (NCCL, one rank per
# GPU). **Memory** less than 8 MiB of tensors per rank.

# %% tags=["setup"]
# set-up
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.flat_param import FlatParameter, find_parameters


class NamedUnit(NamedTuple):
    """A unit's flat parameter, with the names that the parameters have in the plain module.

    Attributes:
        flat: `flat.full` [P] is currently freed; `flat.views` are the parameters as views of it; `flat.shard` [P / N]
            is this rank's shard.
        names: for each of `flat.views`, the parameter's names; more than one if it is tied, i.e. used in several
            places.
    """

    flat: FlatParameter
    names: list[list[str]]


class Piece(Protocol):
    """Some rows of a saved tensor.

    Attributes:
        first: the number of the first row in the tensor.
        count: the number of rows; may be 0.
    """

    first: int
    count: int

    def read(self) -> Tensor:
        """Read the rows from disk: [count, ...]."""


class Disk(Protocol):
    """The destination of a checkpoint."""

    def make_folder(self, path: Path) -> None:
        """Create a folder; raises FileExistsError if it exists."""

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file. Its bytes and its name may still be only in the system's cache."""

    def sync(self, path: Path) -> None:
        """Flush a file's written bytes to disk; for a folder, flush the names in it."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically; the new name is on disk once the parent folder is synced."""


# %% [markdown]
# ## What a rank holds after training
#
# The next cell trains a GPT, with one unit per block, for two steps on two ranks. What does each rank hold afterwards?

# %%
import io
import os
import tempfile
import warnings
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from unittest.mock import Mock, patch

import torch.distributed as dist
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from minifsdp import FullyShardedDataParallel
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.fsdp import FullStateDictConfig, StateDictType
from minifsdp.fsdp.torch_api.policies import CustomPolicy
from minifsdp.gpt import GPT, Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import RankError, launch, rank_device
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import Span, overlap, read_trace
from minifsdp.instruments.watch.trace import record_trace
from minifsdp.wrapper_names import clean_name

RANKS = 2
SETTINGS = Settings(ranks=RANKS, batch=6, layers=4, width=75, context=16)
BATCHES = list(SETTINGS.batches())
PSI = sum(p.numel() for p in SETTINGS.model().parameters())


def step(model: nn.Module, optimizer: Optimizer, batch: data.Batch) -> float:
    """Take one step on this rank's samples; return the loss before the step."""
    world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tokens, targets = (part.to(next(model.parameters()).device) for part in data.shard(batch, *world))
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def build(**options: Any) -> tuple[FullyShardedDataParallel, Optimizer]:
    model = FullyShardedDataParallel(SETTINGS.model().to(rank_device()), auto_wrap_policy={Block}, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(steps: int = 2) -> tuple[FullyShardedDataParallel, Optimizer]:
    model, optimizer = build()
    for batch in BATCHES[:steps]:
        step(model, optimizer, batch)
    return model, optimizer


def what_a_rank_has() -> tuple[dict[str, list[int]], str]:
    model, _ = trained()
    mine = {clean_name(name): p.detach().cpu() for name, p in model.named_parameters()}
    try:
        SETTINGS.model().load_state_dict(mine)
        said = "no error"
    except RuntimeError as error:
        said = str(error)
    return {name: list(p.shape) for name, p in mine.items()}, said


has, said = launch(what_a_rank_has, RANKS)[0]
for name, shape in has.items():
    print(f"{name:24}{shape}")
print("\nloaded into a plain model:", said.splitlines()[0], "...")
print(f"missing keys: {said.count('weight') + said.count('bias')}, unexpected keys: {said.count('flat_param')}")

# %% [markdown]
# Each rank holds half the elements of five anonymous vectors. A checkpoint of these vectors could be read only by two
# ranks with the same units. A checkpoint should use the *names* and *shapes* of the plain model. `units_of` returns the
# parameter names in each unit's flat parameter:


# %%
def units_of(model: nn.Module) -> list[NamedUnit]:
    """The units of a wrapped model, in the same order on all ranks."""
    units = []
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._unit is not None:
            flat = module._unit.flat
            names = [[clean_name(f"{prefix}.{place.name}").strip(".") for place in users] for users in flat.places]
            units.append(NamedUnit(flat, names))
    return units


def look_at_units() -> list[tuple[int, list[str]]]:
    return [(unit.flat.full.numel(), [names[0] for names in unit.names]) for unit in units_of(build()[0])]


UNITS = launch(look_at_units, RANKS)[0]
for numel, names in UNITS:
    print_wrapped(f"{numel:7,} elements, unsharded: {', '.join(names[:3])}, ... {len(names)} parameters")
print(f"the unsharded model: {4 * PSI:,} bytes")

# %% [markdown]
# ## 10b.1 Full parameters, one unit at a time
#
# *10 minutes, medium*
#
# Two things can go wrong when one rank asks for the full model: it runs out of memory, on the device or on the host
# ([accelerate#1181](https://github.com/huggingface/accelerate/pull/1181)), or it hangs
# ([pytorch#122903](https://github.com/pytorch/pytorch/issues/122903)). You can avoid both problems. First, the full
# model never needs to be on one device: gather a unit, copy it to its destination (host memory on rank 0), free it, and
# go on to the next unit. Second, a gather is a collective, so *every* rank must take part in every gather, even if it
# keeps nothing.
#
# Predict: how many bytes of unsharded parameters does a rank hold at the peak? The table above shows the unit sizes.

# %%
predict("10b.1", ..., "bytes of unsharded parameters at the peak, on any rank")


# %% tags=["exercise-10b.1"]
from .ex1_whole_values import whole_values

# %% [markdown]
# Rank 0 uses the notebook's `to_host` as `keep`. The result is compared with
# `FullyShardedDataParallel.state_dict` under torch's usual settings,
# `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)`. (torch 2.13 deprecates `state_dict_type` in favour of
# `get_state_dict` in torch.distributed.checkpoint. The underlying work is the same.)


# %%
def to_host(whole: Tensor) -> Tensor:
    return whole.detach().to("cpu", copy=True)


def nbytes_of(state: Mapping[str, Tensor]) -> int:
    return sum(value.untyped_storage().nbytes() for value in state.values())


def save_full(at_once: bool = False) -> dict[str, Any]:
    """Return a trained model's full state dict, the ledger's record of saving it, and minifsdp's own state dict."""
    group = comm.world()
    with Ledger() as ledger:
        model, optimizer = trained()
        ledger.watch(model, optimizer)
        units = units_of(model)
        keep = to_host if group.rank() == 0 else None
        ledger.reset_peaks()
        if at_once:  # gather everything, then copy it
            for flat, _ in units:
                device.allocate(flat.full)
                comm.all_gather(flat.full.data, flat.shard.data, group).wait()
            pairs = [pair for flat, names in units for pair in zip(names, flat.views, strict=True)]
            full = {names[0]: to_host(view) for names, view in pairs if keep}
            for flat, _ in units:
                device.free(flat.full)
        else:
            full = whole_values(units, group, keep)
        ledger.mark("saving")
        peak, curve = ledger.peak_of("unsharded"), ledger.curve()
    how = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, how):
        theirs = model.state_dict()
    return {"full": full, "theirs": theirs, "peak": peak, "curve": curve, "loss": step(model, optimizer, BATCHES[2])}


saved = launch(save_full, RANKS)
root, block = 4 * UNITS[0][0], 4 * UNITS[1][0]
slips = {
    "the unsharded model: the device never needs all of it at once": 4 * sum(numel for numel, _ in UNITS),
    "the root's; the blocks are larger": root,
    "two units: the one before is freed before this one is gathered": 2 * block,
}
outcome("10b.1", saved[1]["peak"], ranks=RANKS, slips=slips)
for rank, each in enumerate(saved):
    print(f"rank {rank}: {each['peak']:,} bytes unsharded at the peak; state dict of {nbytes_of(each['full']):,} bytes")
FULL, theirs = saved[0]["full"], saved[0]["theirs"]
print("names and values equal to minifsdp's state_dict:", FULL.keys() == theirs.keys(), end=", ")
print(all(torch.equal(FULL[name], theirs[name]) for name in theirs))
plain = SETTINGS.model()
print("loaded into the plain model:", plain.load_state_dict(FULL))
with torch.no_grad():
    alone = plain(*BATCHES[2]).item()
together = sum(each["loss"] for each in saved) / RANKS
print(f"the next loss, plain model in one process {alone:.4f}, sharded on {RANKS} ranks {together:.4f}")
assert saved[0]["peak"] == saved[1]["peak"] == block
assert abs(alone - together) < 1e-4

# %%
MIB = 2**20


def only(curve: dict[str, Any], tag: str) -> dict[str, Any]:
    tags = {each: sizes if each == tag else [0] * len(sizes) for each, sizes in curve["tags"].items()}
    return {"tags": tags, "marks": curve["marks"]}


at_once = launch(save_full, RANKS, True)[1]
plots.curve(
    only(saved[1]["curve"], "unsharded"),
    title=f"Gathering unit by unit peaks at {saved[1]['peak'] / MIB:.2f} MiB instead of {at_once['peak'] / MIB:.2f}",
    says="Unsharded parameters of rank 1, which keeps nothing, while rank 0 saves. Grey: the same with all units "
    "gathered first and freed last.",
    lab="10b",
    predicted_peak=block,
    earlier={"everything at once": only(at_once["curve"], "unsharded")},
)

# %% [markdown]
# The *largest unit* determines the peak on the device. On the host, rank 0 holds one copy of the full model. Without
# `rank0_only`, every rank on a machine has such a copy, so a machine with 8 GPUs holds 8 copies in host memory. These
# copies are the cause of out-of-memory errors on the host.
#
# ### Break it: a `keep` that copies nothing, and a rank that does not take part


# %%
def broken(how: str) -> str:
    model, _ = trained(1)
    units, group = units_of(model), comm.world()
    if how == "no copy":
        state = whole_values(units, group, lambda whole: whole)
        weight = state["head.weight"]
        return f"shape {list(weight.shape)}, bytes of its storage: {weight.untyped_storage().nbytes()}"
    if group.rank() == 0:  # "only rank 0 saves, so only rank 0 calls it"
        whole_values(units, group, to_host)
    return "returned"


print("kept without a copy:", launch(broken, RANKS, "no copy")[0])

# %% tags=["nbval-ignore-output"]
try:
    launch(broken, RANKS, "rank 0 alone", timeout=2.0)
except RankError as error:
    print("called on rank 0 alone:", str(error).splitlines()[0])
    where = [line for line in "\n".join(error.failures.values()).splitlines() if "in whole_values" in line]
    print(where[0].strip().rpartition(",")[2].strip() if where else "")

# %% [markdown]
# Rank 0 waits in the first gather, and no other rank joins it. With NCCL, it hangs until the collective times out,
# minutes later, and the watchdog aborts the process. Put `if rank == 0:` around the file *write*, never around the call
# that builds the state dict.
#
# ## 10b.2 Rows
#
# *8 minutes, medium*
#
# If the model does not fit in the memory of one host, no rank can hold the full state dict. Each rank then saves its
# own shards. But shards of the *flat* parameter cannot be loaded in any other configuration, because their boundaries
# depend on N and on the units. Instead, split each original tensor separately, along dimension 0: rank r gets
# `ceil(rows / N)` rows, starting at row `r * ceil(rows / N)`. The last ranks get fewer rows, or none.
#
# Predict: if a tensor with 5 rows is split across 4 ranks, how many rows does rank 3 get?

# %%
predict("10b.2", ..., "rows of rank 3 of 4, of a tensor with 5 rows")


# %% tags=["exercise-10b.2"]
from .ex2_my_rows import my_rows

# %%
layout = {ranks: [len(my_rows(torch.zeros(5, 2), rank, ranks)[1]) for rank in range(ranks)] for ranks in (1, 2, 3, 4)}
slips = {"5 / 4 rounded down is 1, and then one row is left over": 1, "ceil(5 / 4) is 2, for as long as any": 2}
outcome("10b.2", layout[4][3], how="computed", slips=slips)
for ranks, rows in layout.items():
    print(f"5 rows on {ranks} ranks: {rows}")


def rows_to_host(whole: Tensor) -> tuple[int, Tensor]:
    """Keep this rank's rows, selected on the device so that only they are copied to the host."""
    first, rows = my_rows(whole.detach(), dist.get_rank(), dist.get_world_size())
    return first, to_host(rows)


def save_rows() -> dict[str, tuple[int, Tensor]]:
    """Combine your two functions: return each rank's rows of every parameter."""
    model, _ = trained()
    return whole_values(units_of(model), comm.world(), rows_to_host)


SHARDED = launch(save_rows, RANKS)
for rank, state in enumerate(SHARDED):
    held = sum(rows.untyped_storage().nbytes() for _, rows in state.values())
    first, rows = state["embed.weight"]
    print(f"rank {rank}: {held:,} bytes; embed.weight: {len(rows)} rows from {first} on")
print(f"together {sum(r.untyped_storage().nbytes() for s in SHARDED for _, r in s.values()):,} of {4 * PSI:,} bytes")

# %% [markdown]
# A rank keeps only its rows, and briefly holds one unsharded unit at a time, as in every forward pass. In torch, this
# format is SHARDED_STATE_DICT; its values are of type `ShardedTensor` or `DTensor`, which record the position of their
# rows. Here, the pair (first row, rows) records that position.
#
# ## 10b.3 A different number of ranks
#
# *10 minutes, medium*
#
# A checkpoint saved by two ranks is now loaded by three. `embed.weight` has 257 rows, which are saved in pieces of 129
# and 128 rows, and loaded in pieces of 86, 86 and 85 rows. Each loading rank reads its rows from the saved pieces that
# contain them. Every rank could also read the full tensor, but the checkpoint would then be read N times, which is slow
# on a shared file system.
#
# Predict: how many reads of pieces of `embed.weight` do the three ranks make in total?

# %%
predict("10b.3", ..., "reads of the pieces of embed.weight, saved by 2 ranks, by 3 loading ranks in total")


# %% tags=["exercise-10b.3"]
from .ex3_fill_rows import fill_rows


# %% tags=["shown"]
@dataclass
class InMemory:
    """A piece that counts its reads."""

    first: int
    rows: Tensor
    reads: int = 0

    @property
    def count(self) -> int:
        return len(self.rows)

    def read(self) -> Tensor:
        self.reads += 1
        return self.rows


pieces = [InMemory(*state["embed.weight"]) for state in SHARDED]
found = []
for rank in range(3):
    first, rows = my_rows(FULL["embed.weight"], rank, 3)
    out = torch.full_like(rows, torch.nan)
    fill_rows(out, first, pieces)
    found.append(out)
    print(f"rank {rank} of 3: rows {first} to {first + len(out)}, reads of the two pieces so far "
          f"{[piece.reads for piece in pieces]}")  # fmt: skip
slips = {"every rank reads every piece": 6, "one each: rank 1 has rows of both": 3}
outcome("10b.3", sum(piece.reads for piece in pieces), how="computed", slips=slips)
print("equal to what was saved:", torch.equal(torch.cat(found), FULL["embed.weight"]))

# %% [markdown]
# Loading in a plain process is the special case of one rank: `first` is 0, and `out` is the full tensor.
#
# ## 10b.4 The optimizer state
#
# *15 minutes, hard*
#
# Adam keeps two tensors per parameter, `exp_avg` and `exp_avg_sq`, and a step counter, `step`. Here, its parameters are
# flat shards, so the tensors are flat and sharded in the same way, [P / N]. Each rank has one `step` per *unit*, with
# the same value on all ranks. A checkpoint must store the state under the original parameter names and in the original
# shapes, with a `step` for each parameter.
#
# Predict: how many all-gathers does this take? Count the units in the table, and leave out the state that every rank
# already has.

# %%
predict("10b.4", ..., "all-gathers for the states of Adam, 5 units")


# %% tags=["exercise-10b.4"]
from .ex4_whole_states import whole_states

# %% [markdown]
# The next cell tests your function: a plain model with a plain AdamW loads the parameters and the optimizer state, and
# continues training.


# %%
def save_optimizer() -> dict[str, Any]:
    model, optimizer = trained()
    group = comm.world()
    units, keep = units_of(model), to_host if dist.get_rank() == 0 else None
    with comm.record() as calls:
        states = whole_states(units, optimizer, group, keep)
    theirs = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    losses = [step(model, optimizer, batch) for batch in BATCHES[2:5]]
    return {"states": states, "theirs": theirs, "calls": calls, "losses": losses}


def go_on(states: Mapping[str, Mapping[str, Tensor]]) -> tuple[list[float], set[float]]:
    """Return the losses of three steps of a plain model that loads everything, and the `step` values afterwards."""
    model = SETTINGS.model()
    model.load_state_dict(FULL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    groups = optimizer.state_dict()["param_groups"]
    mine = deepcopy(states)  # load_state_dict keeps the tensors passed to it
    optimizer.load_state_dict({"state": {numbers[name]: state for name, state in mine.items()}, "param_groups": groups})
    losses = [step(model, optimizer, batch) for batch in BATCHES[2:5]]
    return losses, {state["step"].item() for state in optimizer.state.values()}


def go_on_each(*states: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[list[float], set[float]]]:
    torch.set_num_threads(1)  # like each of the two ranks; for tensors of this size a second thread does not help
    return [go_on(each) for each in states]


each = launch(save_optimizer, RANKS)
STATES, theirs = each[0]["states"], each[0]["theirs"]
gathers = [call.op for call in each[0]["calls"]].count("all_gather")
slips = {"`step` needs none": 15, "a unit's parameters are gathered together": 2 * len(FULL), "two keys each": 5}
outcome("10b.4", gathers, slips=slips)
equal = all(torch.equal(STATES[name][key].cpu(), theirs[name][key].cpu()) for name in theirs for key in theirs[name])
print(f"{len(STATES)} parameters, equal to minifsdp's optim_state_dict: {equal}")
print(f"sharded: {', '.join(f'{sum(pair) / RANKS:.4f}' for pair in zip(*(e['losses'] for e in each), strict=True))}")
(PLAIN, _), (anew, _) = launch(go_on_each, 1, STATES, {})[0]
print(f"plain:   {', '.join(f'{loss:.4f}' for loss in PLAIN)}")
print(f"without: {', '.join(f'{loss:.4f}' for loss in anew)}   (model loaded, new optimizer)")
assert equal
assert theirs.keys() == STATES.keys()

# %% [markdown]
# Without the optimizer state, the model still trains, with slightly different losses. Loading a checkpoint that lacks
# the optimizer state raises no error.
#
# ### Break it: one `step` for all
#
# If all parameters of a unit share *one* tensor for `step`, each parameter's update adds 1 to this tensor. The next
# state dict shows the error:

# %%
shared = {name: dict(state) for name, state in STATES.items()}
one = STATES["head.weight"]["step"].clone()
for state in shared.values():
    state["step"] = one
for name, (losses, after) in zip(
    ("a step each", "one step for all"), launch(go_on_each, 1, STATES, shared)[0], strict=True
):
    print(f"{name:18}step after 2 + 3 steps: {after}, losses {', '.join(f'{loss:.4f}' for loss in losses)}")

# %% [markdown]
# ## 10b.5 Commit
#
# *12 minutes, medium*
#
# A job can be killed, or the disk can fill up, in the middle of a checkpoint. Two rules prevent a partial checkpoint:
# *a checkpoint with its final name is complete*, and *a rename is atomic*. So write the checkpoint under a temporary
# name, then rename it. There are two pitfalls between the write and the rename:
#
# - `write` leaves bytes in the system's cache. If the process is killed, the bytes still reach the disk; if the *power*
#   fails, they are lost. `fsync` forces them to disk. A directory is itself a file that lists names, so it needs
#   `fsync` too.
# - Several ranks write. The rank that renames the folder must wait until the others have finished. A barrier ensures
#   this: no rank passes the barrier before all ranks have reached it.
#
# Rank 0 has one file to write, and could be killed at any call to `Disk`. Predict: how many such calls does it make?

# %%
predict("10b.5", ..., "calls of Disk by rank 0, which has one file")


# %% tags=["exercise-10b.5"]
from .ex5_commit import commit

# %% [markdown]
# The next cell uses this machine's disk, and kills rank 0 just before call k. `os._exit` is as abrupt as `kill -9`: no
# `finally` or `except` runs. A real process with rank 0 is killed at each of its calls in turn, and the cell lists the
# folder's contents each time.


# %%
class RealDisk:
    """The system calls."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)


class Fused:
    """A disk that kills the calling process just before call number `last + 1`."""

    def __init__(self, disk: Disk, last: int | None) -> None:
        self.disk, self.left, self.calls = disk, last, 0

    def __getattr__(self, verb: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.left is not None and self.calls == self.left:
                os._exit(9)
            self.calls += 1
            getattr(self.disk, verb)(*args)

        return call


def write_checkpoint(folder: Path, name: str, last: int | None) -> int:
    rank = dist.get_rank()
    dist.barrier()  # all are connected before any rank is killed
    disk = Fused(RealDisk(), last if rank == 0 else None)
    commit(disk, folder, name, {f"rank-{rank}.pt": bytes([rank]) * 1000}, rank, dist.barrier)
    return disk.calls


def state_of(checkpoint: Path) -> str:
    files = {file.name: len(file.read_bytes()) for file in checkpoint.iterdir()}
    return "complete" if files == {f"rank-{rank}.pt": 1000 for rank in range(RANKS)} else f"HALF: {files}"


def kill_at_every_call() -> tuple[int, dict[int, list[str]]]:
    found = {}
    with tempfile.TemporaryDirectory() as root:
        calls = launch(write_checkpoint, RANKS, Path(root), "step-1", None)[0]
        for last in range(calls):
            folder = Path(root, f"killed {last}")
            folder.mkdir()
            try:
                launch(write_checkpoint, RANKS, folder, "step-2", last)
            except RankError:
                found[last] = [f"{each.name} {state_of(each)}" for each in sorted(folder.glob("step-*"))]
    return calls, found


calls, found = kill_at_every_call()
slips = {"without the syncs of folders": 4, "without any sync": 3, "the file is synced too": calls - 1}
outcome("10b.5", calls, slips=slips)
for last, there in found.items():
    print(f"killed after {last} calls: {', '.join(there) or 'no new checkpoint, the previous one counts'}")
assert len(found) == calls
assert not [text for there in found.values() for text in there if "HALF" in text]

# %% [markdown]
# Killing the process does not test the syncs, because the operating system and its cache survive. With a real disk,
# only a power cut would test them. A simulated disk can also test them: it records which bytes and names have been
# synced, and lists the files that a power cut after the last call could lose.


# %%
class PaperDisk:
    """Simulates a power cut: the only unsynced operations that survive are renames."""

    def __init__(self) -> None:
        self.written: dict[Path, bool] = {}  # for each file: True if its bytes are on the disk
        self.named: dict[Path, bool] = {}  # for each file or folder: True if its name is on the disk

    def make_folder(self, path: Path) -> None:
        self.named[path] = False

    def write(self, path: Path, content: bytes) -> None:
        self.written[path] = self.named[path] = False

    def sync(self, path: Path) -> None:
        if path in self.written:
            self.written[path] = True
        self.named |= {each: True for each in self.named if each.parent == path}

    def rename(self, old: Path, new: Path) -> None:
        def moved(each: Path) -> Path:
            return new / each.name if each.parent == old else each

        self.written = {moved(each): done for each, done in self.written.items()}
        self.named = {moved(each): done for each, done in self.named.items() if each != old} | {new: False}

    def missing(self) -> str:
        """List what a power cut may lose."""
        lost = [f"the bytes of {each.name}" for each, done in self.written.items() if not done]
        lost += [f"the name {each.name}" for each, done in self.named.items() if not done]
        return ", ".join(lost) or "nothing"


class Forgetful(PaperDisk):
    """Ignores call number `without`, if that is a sync."""

    def __init__(self, without: int) -> None:
        super().__init__()
        self.without, self.calls = without, 0

    def sync(self, path: Path) -> None:
        self.calls += 1
        if self.calls != self.without:
            super().sync(path)


for without in range(4):
    disk = Forgetful(without)
    commit(disk, Path("run"), "step-2", {"rank-0.pt": b"..."}, 0, lambda: None)
    print(f"{f'without sync number {without}' if without else 'with all syncs':24} may be missing: {disk.missing()}")

# %% [markdown]
# If either of the first two syncs is omitted, the checkpoint has its final name but not its contents. If the third is
# omitted, the rename may not be on disk when `commit` returns. The job then deletes the old checkpoint, and a power cut
# leaves no checkpoint at all.
#
# An object store has no rename operation. Writing the last file can serve as the commit: torch.distributed.checkpoint
# writes `.metadata` after all ranks have written, and a folder without it is not a checkpoint
# (`checkpoint/filesystem.py`, `finish`).
#
# ### Measured: two ranks save a checkpoint; three ranks and a plain process load it
#
# This test uses all five functions. Two ranks commit the model and the optimizer state to disk; each rank writes its
# own rows. Then three ranks load the checkpoint, and so does a plain process. Both results are compared with the full
# state dict from above.


# %%
def save_checkpoint(folder: Path, name: str) -> None:
    model, optimizer = trained()
    group, units = comm.world(), units_of(model)
    rank = group.rank()
    content = dict(whole_values(units, group, rows_to_host))
    for param, state in whole_states(units, optimizer, group, rows_to_host).items():
        content |= {f"{param}/{key}": value if isinstance(value, tuple) else (0, value) for key, value in state.items()}
    file = io.BytesIO()
    torch.save(content, file)
    commit(RealDisk(), folder, name, {f"rank-{rank}.pt": file.getvalue()}, rank, dist.barrier)


def index_of(whole: Path) -> dict[str, list[InMemory]]:
    """Return which file holds each row. (torch.distributed.checkpoint stores this in `.metadata`.)

    The files are memory-mapped (`mmap`): the rows of a piece enter memory only when they are read.
    """
    index: dict[str, list[InMemory]] = {}
    for file in sorted(whole.glob("rank-*.pt")):
        for name, (first, rows) in torch.load(file, mmap=True).items():
            index.setdefault(name, []).append(InMemory(first, rows))
    return index


def load_into_shard(flat: FlatParameter, shard: Tensor, number: int, pieces: list[InMemory], group: Group) -> None:
    """Load parameter `number` of a unit: read this rank's rows, gather the full tensor, keep this rank's slice."""
    shape = flat.layout.shapes[number]
    size = -(-shape[0] // group.size())
    first = min(group.rank() * size, shape[0])
    padded = torch.zeros(size, *shape[1:])
    fill_rows(padded[: min(size, shape[0] - first)], first, pieces)
    whole = device.empty(size * group.size() * shape[1:].numel(), torch.float32, "communication", shard.device)
    comm.all_gather(whole, padded.view(-1).to(shard.device), group).wait()
    low, high = flat.layout.bounds(number, group.rank())
    shard[low:high].copy_(flat.layout.part(number, whole[: shape.numel()].view(shape), group.rank()))
    device.free(whole)


def load_checkpoint(whole: Path) -> dict[str, Any]:
    """Load on any number of ranks; return the full state dicts afterwards, and the next losses."""
    model, optimizer = build()
    group, units, index = comm.world(), units_of(model), index_of(whole)
    for flat, names in units:
        state = {key: torch.zeros_like(flat.shard.data) for key in ("exp_avg", "exp_avg_sq")}
        for number, (name, *_) in enumerate(names):
            load_into_shard(flat, flat.shard.data, number, index[name], group)
            for key, shard in state.items():
                load_into_shard(flat, shard, number, index[f"{name}/{key}"], group)
        optimizer.state[flat.shard] = state | {"step": index[f"{names[0][0]}/step"][0].read().clone()}
    return {
        "full": whole_values(units, group, to_host),
        "states": whole_states(units, optimizer, group, to_host),
        "loss": [step(model, optimizer, batch) for batch in BATCHES[2:4]],
    }


# %% tags=["C22"]
with tempfile.TemporaryDirectory() as folder:
    launch(save_checkpoint, RANKS, Path(folder), "step-2")
    whole = Path(folder, "step-2")
    sizes = {file.name: sum(r.numel() for _, r in torch.load(file).values()) for file in sorted(whole.iterdir())}
    loaded = launch(load_checkpoint, 3, whole)
    plain, index = SETTINGS.model(), index_of(whole)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            fill_rows(p, 0, index[name])
print("elements in each file:", ", ".join(f"{name} {numel:,}" for name, numel in sizes.items()))
same = {
    "2 ranks saved rows, 3 ranks loaded them: parameters equal": all(
        torch.equal(each["full"][name], FULL[name]) for each in loaded for name in FULL
    ),
    "the same, optimizer states equal": all(
        torch.equal(each["states"][name][key].cpu(), STATES[name][key].cpu())
        for each in loaded
        for name in STATES
        for key in STATES[name]
    ),
    "2 ranks saved rows, a plain module loaded them: equal": all(
        torch.equal(p, FULL[name]) for name, p in plain.named_parameters()
    ),
    "2 ranks saved full values, a plain module loaded them": plain.load_state_dict(FULL) is not None,
}
for what, equal in same.items():
    print(f"{what}: {equal}")
three = [sum(losses) / 3 for losses in zip(*(each["loss"] for each in loaded), strict=True)]
print(f"the next two losses, 3 ranks: {', '.join(f'{loss:.4f}' for loss in three)}; plain, in one process: ", end="")
print(", ".join(f"{loss:.4f}" for loss in PLAIN[:2]))
assert all(same.values())

# %% [markdown]
# The files hold 3 Ψ elements, plus one `step` per parameter in each file. At no time did a rank hold more than one full
# tensor or one unsharded unit on its device. (The full state dicts on the host are only needed for the comparison.)
#
# ## The same initial values on every rank
#
# ### Measured: sync_module_states, ignored modules
#
# At the start, and after loading, all ranks must hold the same model. If every rank initializes the model with a
# different seed, each rank keeps a shard of a *different* model. With `sync_module_states=True`, rank 0 first
# broadcasts all values. A module in `ignored_modules` stays unsharded on each rank. This section measures the effect of
# both. (Lab 09 covers `cpu_offload`.)


# %% tags=["C41"]
def start(sync: bool) -> tuple[float, int, int]:
    """Start each rank with different random numbers; return the fraction that equals rank 0's, broadcasts, bytes."""
    torch.manual_seed(dist.get_rank())
    mine = GPT(width=SETTINGS.width, layers=SETTINGS.layers, context=SETTINGS.context).to(rank_device())
    original = {name: to_host(p) for name, p in mine.named_parameters()}
    with comm.record() as calls:
        model = FullyShardedDataParallel(mine, auto_wrap_policy={Block}, sync_module_states=sync)
    sent = [call.payload for call in calls if call.op == "broadcast"]
    full = whole_values(units_of(model), comm.world(), to_host)
    random = [name for name in full if full[name].dim() == 2]  # biases and norms start equal
    equal = sum((full[name] == original[name]).sum().item() for name in random)
    return equal / sum(full[name].numel() for name in random), len(sent), sum(sent)


def ignoring(ignore: bool) -> tuple[int, int, Tensor]:
    """Return a rank's bytes of parameters and gradients after backward, and its gradient of the head's bias."""
    with Ledger() as ledger:
        module = SETTINGS.model().to(rank_device())
        head = module.head
        model = FullyShardedDataParallel(module, auto_wrap_policy={Block}, ignored_modules=[head] if ignore else None)
        ledger.watch(model)
        model(*(part.to(rank_device()) for part in data.shard(BATCHES[0], dist.get_rank(), RANKS))).backward()
        live = ledger.mark("backward")
        return live["parameters"], live["gradients"], to_host(head.bias.grad) if ignore else torch.zeros(1)


def starts() -> Any:
    return [start(False), start(True)], [ignoring(False), ignoring(True)]


(starting, ignored), (_, others) = launch(starts, RANKS)
for name, (share, messages, nbytes) in zip(("without", "with"), starting, strict=True):
    print(f"{name:8}sync_module_states: {share:.4f} of the weights are rank 0's,", end=" ")
    print(f"{messages} broadcasts, {nbytes:,} bytes")
head = sum(p.numel() for p in SETTINGS.model().head.parameters())
expected = 4 * (head - head // RANKS)
print(f"\na rank also holds the other half of an ignored head of {head:,} elements: {expected:,} bytes more expected")
for name, (held, gradients, _) in zip(("nothing ignored", "head ignored"), ignored, strict=True):
    print(f"{name:16} parameters {held:9,} bytes per rank, gradients {gradients:9,}")
agree = torch.equal(ignored[1][2], others[1][2])
print(f"the ignored head has the same gradient on both ranks: {agree}")
assert (starting[1][0], starting[1][2]) == (1, 4 * PSI)
assert 0.4 < starting[0][0] < 0.6
more = [after - before for before, after in zip(ignored[0][:2], ignored[1][:2], strict=True)]
assert all(abs(each - expected) <= 8 for each in more)
assert not agree

# %% [markdown]
# Without the broadcast, half of each unit comes from one seed and half from another. Such values are still valid for
# initialization, but no single seed reproduces this model, and a different N gives a different model. *Loaded* weights,
# however, are ruined: if only rank 0 has loaded a checkpoint, the other half of each unit is noise. The broadcast sends
# the bytes of the model once, here one tensor at a time; torch packs tensors into buckets of 250 MiB
# (`fsdp/_init_utils.py`).
#
# An ignored module is neither sharded nor gathered, and its gradients are *not reduced*. Each rank trains its own head,
# and the heads silently diverge unless your code averages these gradients. Ignore a module only if it is frozen, or if
# you reduce its gradients yourself.
#
# ## Frozen parameters
#
# Fine-tuning with adapters (LoRA, [arXiv 2106.09685](https://arxiv.org/abs/2106.09685)) trains a pair of low-rank
# matrices next to a frozen one. Without FSDP, only these two matrices have gradients. But a unit with one flat
# parameter has one gradient, which is as long as the entire unit, including the frozen parameters.


# %%
class Adapter(nn.Module):
    """Adds up(down(x)): width -> 4 -> width, with few parameters."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class Adapted(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.adapter = base.requires_grad_(False), Adapter(base.in_features, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def adapted() -> nn.Module:
    """The GPT, frozen, with adapters on two layers of each block."""
    model = SETTINGS.model().requires_grad_(False)
    torch.manual_seed(1)
    for each in model.blocks:
        each.qkv, each.down = Adapted(each.qkv), Adapted(each.down)
    return model


ADAPTERS = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
every = sum(p.numel() for p in adapted().parameters())
print(f"{ADAPTERS:,} of {every:,} elements are trained: {ADAPTERS / every:.4f}")


def wrap_mixed() -> tuple[str, str]:
    """Return the error with one flat Parameter per unit, and the warning with original parameters."""
    said = "no error"
    try:
        FullyShardedDataParallel(adapted(), auto_wrap_policy={Block})
    except ValueError as error:
        said = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FullyShardedDataParallel(adapted(), auto_wrap_policy={Block}, use_orig_params=True)
    return said.splitlines()[0], str(caught[0].message).splitlines()[0]


error, warning = launch(wrap_mixed, RANKS)[0]
print_wrapped(f"error:   {error}")
print_wrapped(f"warning: {warning}")

# %% [markdown]
# `use_orig_params=True` allows such a unit, with the warning above. The optimizer then sees the original parameters,
# each as a slice of the shard, and frozen slices get no `.grad`. But memory for the frozen slices' gradients may still
# be allocated. Predict: with the blocks as units, how many bytes of gradients does one of 2 ranks hold after the
# backward pass? There are 4 blocks with 68,475 elements each, plus 2,700 elements of adapters per block.

# %%
predict("10b.6", ..., "bytes of gradients of a rank of 2 after backward, adapters trained, blocks are units")

# %% [markdown]
# ## 10b.6 Units that do not mix
#
# *15 minutes, hard*
#
# To avoid these gradients, wrap the model so that no unit mixes frozen and trainable parameters. Each block is a unit.
# If this unit would be mixed, the block's trainable parameters get separate units, which should be as large as
# possible, since each unit needs its own collectives.


# %% tags=["exercise-10b.6"]
from .ex6_units_for import units_for


# %%
class Tuned(NamedTuple):
    """A rank's gradient bytes after backward and at the peak, and the bytes sent."""

    left: int
    peak: int
    wire: int
    messages: int
    units: list[int]  # elements of each unit with trainable parameters


def tune(make: Callable[[], nn.Module], units: Callable[[nn.Module], set[nn.Module]]) -> Tuned:
    with Ledger() as ledger:
        module = make().to(rank_device())
        chosen = units(module)
        policy = CustomPolicy(chosen.__contains__)
        model = FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=True)
        ledger.watch(model)
        ledger.reset_peaks()
        with comm.record() as calls:
            model(*(part.to(rank_device()) for part in data.shard(BATCHES[0], dist.get_rank(), RANKS))).backward()
        left = ledger.mark("backward")["gradients"]
        sent = [call for call in calls if call.op == "reduce_scatter"]
        numels = [
            w._unit.flat.full.numel()
            for w in FullyShardedDataParallel.fsdp_modules(model)
            if any(p.requires_grad for p in w._unit.shards)
        ]
        return Tuned(left, ledger.peak_of("gradients"), round(sum(c.wire for c in sent)), len(calls), numels)


def last_block_only() -> nn.Module:
    model = SETTINGS.model().requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    return model


def blocks_of(model: nn.Module) -> set[nn.Module]:
    return set(model.blocks)


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], set[nn.Module]]]] = {
    "all trained": (SETTINGS.model, blocks_of),
    "adapters, mixed": (adapted, blocks_of),
    "adapters, your units": (adapted, lambda model: units_for(model, Block)),
    "last block only": (last_block_only, lambda model: units_for(model, Block)),
}


def tune_all() -> dict[str, Tuned]:
    warnings.simplefilter("ignore")  # the warning above, once per block
    return {name: tune(*way) for name, way in WAYS.items()}


# %% [markdown]
# ### Measured: gradients of frozen parameters
#
# After the backward pass, every unit with a trainable parameter should have a gradient shard of full length, [P / N].

# %% tags=["C23"]
tuned = launch(tune_all, RANKS)[0]
mixed, separate = tuned["adapters, mixed"], tuned["adapters, your units"]
slips = {
    "right, but for the padding that aligns original parameters": 4 * 4 * (68_475 + 2_700) // RANKS,
    "the trained ones alone; but a slice keeps the shard that it is cut from": 4 * ADAPTERS // RANKS,
    "the blocks without their adapters": 4 * 4 * 68_475 // RANKS,
    "root and all; the root is frozen through and through": 4 * every // RANKS,
}
outcome("10b.6", mixed.left, ranks=RANKS, slips=slips)
print(f"{'':24}{'after backward':>15}{'expected':>10}{'peak':>11}{'sent':>9}{'collectives':>13}")
for name, each in tuned.items():
    expected = 4 * sum(each.units) // RANKS
    print(f"{name:24}{each.left:15,}{expected:10,}{each.peak:11,}{each.wire:9,}{each.messages:13}")
    assert each.left == expected
trained_bytes = 4 * ADAPTERS // RANKS
print(f"the adapters' own gradients, sharded: {trained_bytes:,} bytes")
assert separate.left < 1.01 * trained_bytes
assert mixed.left > 20 * separate.left


# %%
def gradients_at_peak(units: list[int], root: int = 0) -> int:
    """Return the peak bytes of gradients.

    Args:
        units: the elements of each unit, in forward order, so the last in backward come first.
        root: the elements of the root's unit if it is trained: its gradient lives through the entire backward pass.
    """
    if closed_form_setting(RANKS).runs_behind:  # on a GPU, one unit is reduced while the next is computed
        return 4 * (root + sum(units[:2]) + sum(units[1:] or units) // RANKS)
    return 4 * max(root + units[i] + sum(units[i:]) // RANKS for i in range(len(units)))


expected = {name: gradients_at_peak(each.units) for name, each in tuned.items()}
expected["all trained"] = gradients_at_peak(tuned["all trained"].units[1:], tuned["all trained"].units[0])
assert closed_form_setting(RANKS).runs_behind or all(each.peak == expected[name] for name, each in tuned.items())
plots.stages(
    {name: {"gradients": each.peak} for name, each in tuned.items()},
    predicted=expected,
    title=f"Gradients peak at {separate.peak / 1024:.0f} KiB with adapters in units of their own, at "
    f"{mixed.peak / 1024:.0f} in mixed units",
    says="Gradients of a rank at their peak in backward. Diamonds: the shards so far, and the unsharded gradients "
    "in progress: one unit's if the host computes and waits for each reduction, two units' on a GPU. For 'all "
    "trained', the root's unsharded gradient comes on top: it lives through the entire backward.",
    lab="10b",
    ylabel="gradients per rank",
)

# %% [markdown]
# In mixed units, freezing saves no gradient bytes compared with training all parameters of the blocks, and the
# gradients of frozen parameters are also reduced and sent (pytorch#91167, PR 104967). Like torch, minifsdp warns when
# it wraps such a unit. Your units need more collectives, all of them small (last column). The adapters of several
# layers could share a unit if they were in one module.
#
# A fully frozen unit has no gradient at all ("last block only"): FSDP reads `requires_grad` in every forward pass.
#
# ## Recomputation
#
# Model state is sharded; activations are not, and they often take more memory than model state (lab 00). An
# **activation checkpoint** (`torch.utils.checkpoint`) saves only a module's inputs, and runs the module's forward pass
# again during the backward pass. With FSDP, the parameters must be unsharded for this second forward pass. This is
# already the case if the unit's backward pass has begun, that is, if the checkpoint is *inside* the unit. If the
# checkpoint is *around* the unit, its variant matters: torch has an old variant, `use_reentrant=True`, and a new one,
# `use_reentrant=False`. The old variant first recomputes the activations, and then runs a nested backward pass.
# Recomputation costs one more forward pass of the module. For the entire model, that is a third more compute, because a
# backward pass costs about as much as two forward passes.
#
# FULL_SHARD issues 2 U - 1 = 9 all-gathers per step for the 5 units here. Predict: how many all-gathers does it issue
# with reentrant checkpoints *around* the four blocks?

# %%
predict("10b.7", ..., "all-gathers of a step, reentrant checkpoints around the 4 blocks' units")


# %%
class Recomputed(nn.Module):
    """A module under an activation checkpoint; `clean_name` drops the name of this attribute."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self._checkpoint_wrapped_module, self.reentrant = module, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._checkpoint_wrapped_module, x, use_reentrant=self.reentrant)


def recomputing(where: str, reentrant: bool = False) -> tuple[nn.Module, Optimizer]:
    """Return an FSDP model with activation checkpoints inside or around the units of the blocks."""
    module = SETTINGS.model().to(rank_device())
    if where == "inside":  # FullyShardedDataParallel(checkpoint(block))
        for number, each in enumerate(module.blocks):
            module.blocks[number] = Recomputed(each, reentrant)
        model = FullyShardedDataParallel(module, auto_wrap_policy={Recomputed})
    else:
        model = FullyShardedDataParallel(module, auto_wrap_policy={Block})
        for number, each in enumerate(module.blocks if where == "around" else []):  # checkpoint(FSDP(block))
            module.blocks[number] = Recomputed(each, reentrant)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


KINDS = {
    "none": ("none", False),
    "inside": ("inside", False),
    "inside, reentrant": ("inside", True),
    "around": ("around", False),
    "around, reentrant": ("around", True),
}
STATE = ("parameters", "unsharded", "gradients", "optimizer", "communication")


def recompute(where: str, reentrant: bool) -> dict[str, Any]:
    with Ledger() as ledger:
        model, optimizer = recomputing(where, reentrant)
        ledger.watch(model, optimizer)
        step(model, optimizer, BATCHES[0])
        ledger.reset_peaks()
        with comm.record() as calls:
            loss = model(*(part.to(rank_device()) for part in data.shard(BATCHES[1], dist.get_rank(), RANKS)))
            forward = ledger.mark("forward")
            loss.backward()
        ops = [call.op for call in calls]
        return {
            "gathers": ops.count("all_gather"),
            "reductions": ops.count("reduce_scatter"),
            "kept": forward["activations"],
            "peak": ledger.peak.total,
            "state": ledger.peak_of(*STATE),
            "at_peak": ledger.peak.tags,
            "loss": loss.item(),
        }


def recompute_all() -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")  # torch advises against the reentrant kind
    return {name: recompute(*kind) for name, kind in KINDS.items()}


# %% [markdown]
# ### Measured: fewer activations, the same model state

# %% tags=["C42"]
again = launch(recompute_all, RANKS)[0]
slips = {
    "as without: a reentrant checkpoint around a unit has it gathered for the recomputation alone": 9,
    "the root has no checkpoint: 1 + 3 x 4": 15,
    "the first forward, the second, backward: three times each, not four": 17,
}
outcome("10b.7", again["around, reentrant"]["gathers"], slips=slips)
print(f"{'':19}{'gathers':>8}{'kept by forward':>17}{'model state, peak':>19}{'total, peak':>18}{'loss':>9}")
for name, each in again.items():
    print(f"{name:19}{each['gathers']:8}{each['kept']:17,}{each['state']:19,}{each['peak']:18,}{each['loss']:9.4f}")
none, inside = again["none"], again["inside"]
rows, width = SETTINGS.batch // RANKS * SETTINGS.context, SETTINGS.width
print(f"inputs of {SETTINGS.layers} blocks, which recomputation keeps: {4 * SETTINGS.layers * rows * width:,} bytes")
assert [each["gathers"] for each in again.values()] == [9, 9, 9, 9, 13]
assert len({each["loss"] for each in again.values()}) == 1
assert inside["state"] == none["state"], "an activation checkpoint changes no model state"
assert 4 * SETTINGS.layers * rows * width < inside["kept"] < none["kept"] / 3
assert all(each["peak"] < none["peak"] for name, each in again.items() if name != "none")

# %%
plots.stages(
    {name: again[name]["at_peak"] for name in ("none", "inside", "around, reentrant")},
    title=f"Recomputation lowers the peak from {none['peak'] / MIB:.2f} MiB to {inside['peak'] / MIB:.2f} inside, "
    f"{again['around, reentrant']['peak'] / MIB:.2f} around the units",
    says="Memory of a rank at the peak of a step, without checkpoints, with checkpoints inside the units, and around "
    "them. The peaks come at different moments, so more than activations differs. The table has model state's peak.",
    lab="10b",
)

# %% [markdown]
# The rule "a checkpoint around the unit costs a third gather" holds only for the old variant, which gathers for the
# recomputation, frees, and gathers again. (Its peak of model state is half a block lower: nothing is prefetched during
# a recomputation, so one fewer block is unsharded, but one more gradient shard of a block is allocated.) With
# `use_reentrant=False`, the recomputation begins when the backward pass needs the first saved tensor, after the hook on
# the unit's output has run. A checkpoint inside the unit costs no extra gather with either variant. The next cells
# count torch's gathers and trace steps over an emulated link.


# %%
def torchs_gathers(reentrant: bool) -> int:
    """Count the all-gathers in a step of torch's FSDP with checkpoints around its units."""
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    model = TorchFSDP(SETTINGS.model().to(rank_device()), auto_wrap_policy=policy, device_id=rank_device())
    for number, each in enumerate(model.module.blocks):
        model.module.blocks[number] = Recomputed(each, reentrant)
    tokens = [part.to(rank_device()) for part in data.shard(BATCHES[0], dist.get_rank(), RANKS)]
    counted = Mock()
    with ExitStack() as patches:
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                patches.enter_context(patch.object(dist, name, counting(counted, getattr(dist, name))))
        model(*tokens).backward()
    return counted.call_count


def counting(counted: Mock, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        counted()
        return function(*args, **options)

    return call


def torchs() -> list[int]:
    warnings.simplefilter("ignore")
    return [torchs_gathers(reentrant) for reentrant in (False, True)]


print("torch's FSDP, checkpoints around: {} gathers; reentrant: {}".format(*launch(torchs, RANKS)[0]))


# %% tags=["nbval-ignore-output"]
def trace_steps(folder: Path) -> None:
    warnings.simplefilter("ignore")
    let_communication_go_first()
    with parse_link("latency=1ms,bandwidth=100MB/s") as link:
        for name in SHOWN:
            model, optimizer = recomputing(*KINDS[name])
            step(model, optimizer, BATCHES[0])
            for number in range(STEPS):
                with record_trace(folder / f"{name}-{number}-{dist.get_rank()}.json", link):
                    tokens = (part.to(rank_device()) for part in data.shard(BATCHES[1], dist.get_rank(), RANKS))
                    comm.all_reduce(torch.zeros(1, device=rank_device()), comm.world()).wait()  # start together
                    with record_function("forward"):
                        loss = model(*tokens)
                    with record_function("backward"):
                        loss.backward()
                    with record_function("optimizer"):
                        optimizer.step()
                optimizer.zero_grad()


def fastest(folder: Path, name: str) -> list[Span]:
    """Return the step least disturbed by other programs on this machine."""
    steps = [read_trace(folder / f"{name}-{number}-0.json") for number in range(STEPS)]
    return min(steps, key=lambda spans: max(span.end for span in spans))


SHOWN, STEPS = ("none", "inside", "around, reentrant"), 4
with tempfile.TemporaryDirectory() as folder:
    launch(trace_steps, RANKS, Path(folder))
    spans = {name: fastest(Path(folder), name) for name in SHOWN}
hidden = {name: overlap(each) or 0.0 for name, each in spans.items()}
plots.timeline(
    spans,
    title=f"Checkpoints inside the units hide {hidden['inside']:.0%} of the communication, those around them "
    f"{hidden['around, reentrant']:.0%}",
    says=f"Lanes of one rank, the fastest of {STEPS} steps over an emulated link. Recomputation makes backward compute "
    "longer; with checkpoints around the units, its gathers come while nothing computes. A bar far longer than its "
    "neighbours is a delay of this machine, not of the link.",
    lab="10b",
)

# %% [markdown]
# Reversible layers ([arXiv 1707.04585](https://arxiv.org/abs/1707.04585)) go one step further: they compute a layer's
# input from its output, so they do not even keep the inputs. They also reduce only activation memory. Parameters,
# gradients and optimizer state still need to be sharded.
#
# ## What is still missing
#
# Training stops while your checkpoint is being read or written. torch.distributed.checkpoint can write from a copy in
# the background (`async_save`), at the cost of holding that copy in host memory. The next run must delete the leftovers
# of a killed run (`.step-2.part`), and only one run may write into a folder at a time:
# `minifsdp/course/train/checkpoint.py` handles both. A checkpoint also needs the buffers, the states of the random
# number generators, the position in the dataset and the state of the learning-rate scheduler; 10b.1 saves none of
# these.
#
# ## What to remember
#
# 1. Building a state dict is a collective operation. Every rank must call it, even a rank that keeps nothing. Use `if
#    rank == 0` only around the file write.
# 2. A full state dict needs one unsharded unit at a time on the device, and the full model in the memory of rank 0's
#    host. A sharded state dict holds rows of each original tensor, and any number of ranks can load it.
# 3. The optimizer state is flat and sharded like the parameters. Stored by name in the original shapes, with a `step`
#    for each parameter, it can be loaded on any number of ranks and in a plain process.
# 4. To commit a checkpoint, write the files under a temporary name, sync them, wait at a barrier, sync the folder,
#    rename it, sync its parent folder, and wait at a second barrier. A checkpoint with its final name is complete.
# 5. A flat parameter has one gradient, which includes frozen parameters, so put trainable parameters into separate
#    units. Recomputation saves activation memory but no model state; inside the unit, it costs no extra gather.
#
# ## Questions
#
# **1. A model with 70 billion fp32 parameters is trained on 64 GPUs, 8 per host. How much memory does a host need for a
# full state dict with `offload_to_cpu`, with and without `rank0_only`?**
#
# <details><summary>Answer</summary>
#
# The state dict takes 280 GB. With `rank0_only`, one host needs this much, and the others need none. Without
# `rank0_only`, each host needs 8 x 280 GB = 2.2 TB. With a sharded state dict, each rank keeps 4.4 GB, and each host
# keeps 35 GB.
# </details>
#
# **2. Saving the flat shards themselves would need no communication at all. Why does 10b.2 not do this?**
#
# <details><summary>Answer</summary>
#
# torch's LOCAL_STATE_DICT does save them. But they can be loaded only on the same number of ranks, with the same units
# and the same version of torch. This is the fastest way to resume after a crash, but not a format for long-term
# storage.
# </details>
#
# **3. How do you delete an old checkpoint so that a half-deleted one never looks complete?**
#
# <details><summary>Answer</summary>
#
# Reverse the order: rename it to `.step-1.old`, sync the folder, then delete it. A checkpoint that no longer has its
# final name may be incomplete. Do this only after the new checkpoint has been committed.
# </details>
#
# **4. You unfreeze a frozen block after 1,000 steps. What happens to its unit, its optimizer state and its
# checkpoints?**
#
# <details><summary>Answer</summary>
#
# The unit reads `requires_grad` again in the next forward pass, and has gradients from then on. The unit's parameter
# must have been passed to the optimizer, which creates the parameter's state at the next step, with `step` 1; for the
# other units, `step` is 1,001. Earlier checkpoints have no state under these names. In a mixed unit with one flat
# parameter, a single `step` could not hold both values; with original parameters, each parameter has its own `step`.
# </details>
#
# **5. You add activation checkpoints, but peak memory does not fall. Name two possible reasons.**
#
# <details><summary>Answer</summary>
#
# First, with a small batch and a large model, the peak comes from model state, not from activations. Second, with a
# single checkpoint around the entire model, recomputation restores all activations at once, at the beginning of the
# backward pass. With one checkpoint per block, only one block's activations are restored at a time.
# </details>
#
# ## Further reading
#
# - torch: `torch/distributed/fsdp/_state_dict_utils.py`, `_optim_utils.py`;
#   `torch/distributed/checkpoint/` (its planner maps rows to files); `torch/utils/checkpoint.py`
#   (both kinds, explained in detail).
# - All file systems are not created equal (Pillai and others, OSDI 2014): the state of files after
#   a power cut, and common programming mistakes.
# - Training deep nets with sublinear memory cost: [arXiv 1604.06174](https://arxiv.org/abs/1604.06174). LoRA:
#   [arXiv 2106.09685](https://arxiv.org/abs/2106.09685).
# - minifsdp: `fsdp/torch_api/state/saving.py`, `loading.py`, `checkpoint/optim_units.py`, `sharded_values.py`
#   (your functions), `fsdp/torch_api/original_params.py`, `fsdp/engine.py` (`before`, `after`: recomputation),
#   `course/train/checkpoint.py` (10b.5, with the parts it leaves out).
