# ---
# jupyter:
#   minifsdp:
#     lab: "10a"
#     title: Wrapping and initialization
#     minutes: 70
#     ranks: 2
# ---

# %% [markdown]
# # Lab 10a: wrapping and initialization
#
# The engine of labs 05 to 09 works with any choice of units. In this lab, you choose the units, and build a model that
# is too large for a single rank. Both tasks take only the few lines that wrap the model before the first step. Those
# lines are also the cause of some common complaints about FSDP: "memory is hardly lower", "the loss starts at NaN", "it
# does not train". At the end, you turn a DDP script for a Llama model from `transformers` into an FSDP script and count
# the changes.
#
# ![Memory of a rank while a model is built: all of it together, and unit by unit from
# meta](../slides/figures/practice-construction.svg)
#
# *From [lecture 5, FSDP in practice](../slides/practice.md), which comes before this lab.*
#
# **After this lab, you will be able to**
#
# - read and write a wrapping policy, and compute its cost in collectives and bytes from the list of units;
# - build a model on the `meta` device and materialize it unit by unit, so that memory peaks at the shards plus one
#   unit;
# - reproduce the initial values of an eagerly built model, whatever the units and the number of ranks;
# - turn a DDP script into an FSDP script, and name the mistakes that raise no error.
#
# **You need** lab 04 (flat parameter, units) and lab 05 (when each unit is gathered).
#
# **Time** 70 minutes. **Runs** on a laptop (gloo, 2 processes), on one GPU, or on a GPU node (NCCL, one rank per GPU).
# **Memory** about 5 MiB of model state per rank. The last part needs `transformers`; it builds its model from a
# configuration and downloads nothing.

# %% tags=["setup"]
# set-up
from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.flat_param import FlatParameter, ParamPlaces, find_parameters
from minifsdp.fsdp import FullyShardedDataParallel

# %% [markdown]
# ## Wrapping alone saves little
#
# "Going from DDP to FSDP takes two changes: the wrap and the checkpoint." The next cell makes only the first change, on
# the course's GPT. The six blocks are grouped into three pairs (each an `nn.Sequential`), so that a policy can select
# the pairs.

# %%
import tempfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from minifsdp import DistributedDataParallel, comm
from minifsdp.course.ladder import data
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.flat_param import copy_values
from minifsdp.fsdp import SyncSchedule
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.torch_api.wrap import check_not_shared, wrap_children
from minifsdp.gpt import GPT, Block
from minifsdp.instruments import describe, plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import read_trace
from minifsdp.instruments.watch.trace import record_trace

RANKS, WIDTH, CONTEXT = 2, 63, 16


def gpt(tied: bool = False) -> GPT:
    """Return six blocks in three pairs, on the default device, with the same values on every rank."""
    torch.manual_seed(0)
    model = GPT(width=WIDTH, layers=6, context=CONTEXT, tied=tied)
    named = [(f"block{number}", block) for number, block in enumerate(model.blocks)]
    model.blocks = nn.ModuleList(nn.Sequential(OrderedDict(named[i : i + 2])) for i in (0, 2, 4))
    return model


BATCHES = list(data.batches(data.load_text(), 4, CONTEXT, seed=0, steps=4))


def mine(batch: data.Batch) -> list[Tensor]:
    """Return this rank's rows."""
    group = comm.world()
    return [part.to(rank_device()) for part in data.shard(batch, group.rank(), group.size())]


def take_step(model: nn.Module, optimizer: Optimizer, batch: data.Batch) -> float:
    with record_function("forward"):
        loss = model(*mine(batch))
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


STATE = ("parameters", "unsharded", "gradients", "optimizer", "communication")


def measure_memory(build: Callable[[], nn.Module]) -> dict[str, Any]:
    """Return the loss, collectives and peaks of the second step."""
    with Ledger() as ledger:
        model = build()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        ledger.watch(model, optimizer)
        take_step(model, optimizer, BATCHES[0])
        ledger.reset_peaks()
        with comm.record() as calls:
            loss = take_step(model, optimizer, BATCHES[1])
        return {
            "loss": loss,
            "calls": [(call.op, call.payload) for call in calls],
            "wire": sum(call.wire for call in calls),
            "unsharded": ledger.peak_of("unsharded"),
            "state": ledger.peak_of(*STATE),
        }


def the_wrap_alone() -> tuple[int, int, list[str]]:
    """Return the peaks of model state under DDP and FSDP, and the warnings of `describe` for FSDP."""
    ddp = measure_memory(lambda: DistributedDataParallel(gpt().to(rank_device())))["state"]
    wrapped = measure_memory(lambda: FullyShardedDataParallel(gpt().to(rank_device())))["state"]
    return ddp, wrapped, describe(FullyShardedDataParallel(gpt().to(rank_device()))).warnings


ddp_peak, wrapped_peak, warned = launch(the_wrap_alone, RANKS)[0]
print(f"model state at its peak: DDP {ddp_peak:,} bytes, FSDP(model) {wrapped_peak:,}")
print_wrapped(f"describe: {' '.join(warned)}")

# %% [markdown]
# Wrapping alone shards the optimizer state and, between steps, the parameters, which together take 12 / N bytes per
# element. At the peak, however, all parameters and all gradients are unsharded, which takes another 8 bytes per
# element, regardless of N. (DDP takes 16 bytes per element in total.) The reason is that the model is *one unit*: it is
# gathered before the first layer runs and freed at the end of the backward pass. `minifsdp.instruments.describe(model)`
# warns about this before the first step. The model needs a **wrapping policy**.
#
# ## 10a.1 A policy by size
#
# *5 minutes, easy*
#
# A policy is a function. The wrapper calls it for every module below the outermost one:
#
# - on the way down, with `recurse=True`: *should the walk enter this module?*
# - on the way up, if the module was entered, with `recurse=False`: *should this module be a unit?*
#
# `nonwrapped_numel` is the number of parameter elements in the module: on the way down, all elements; on the way up,
# only those outside its inner units. The simplest policy depends only on sizes: a module becomes a unit if it has at
# least `least` remaining elements. Two kinds of class are exempt. `nn.MultiheadAttention` uses its children's weights
# without calling the children, so no module inside it may be a unit. `nn.ModuleList` and `nn.ModuleDict` are never
# called themselves, so such a unit would never be gathered; their children may be units.

# %%
SIZES = {name: sum(p.numel() for p in m.parameters()) for name, m in gpt().named_modules() if name}
for name in ("embed", "position", "blocks", "blocks.0", "blocks.0.block0", "norm", "head"):
    print(f"{name:16}{SIZES[name]:9,} elements")
print("in a block: ", {name.rpartition(".")[2]: n for name, n in SIZES.items() if name.startswith("blocks.0.block0.")})

# %%
predict("10a.1", ..., "units by size, least = 16,000, the root's included")


# %% tags=["exercise-10a.1"]
from .ex1_by_size import by_size


# %%
class Marked(nn.Module):
    """Stands in for a unit when there is no other rank to shard with."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def named_units(policy: Callable[..., bool]) -> list[str]:
    """Return the names of the modules that a policy would turn into units."""
    model = gpt()
    wrap_children(model, policy, Marked)
    return [name.replace(".module", "") for name, m in model.named_modules() if isinstance(m, Marked)]


for least in (100_000_000, 100_000, 60_000, 30_000, 16_000):
    units = named_units(partial(by_size, least=least))
    print_wrapped(
        f"least {least:11,}: the root and {len(units):2}: {', '.join(units[:4])}{', ...' if len(units) > 4 else ''}"
    )
slips = {"without the root's": len(units), "`down` has 189 elements fewer than `up`, and 16,000 lies between": 21}
outcome("10a.1", 1 + len(units), how="computed", slips=slips)

# %% [markdown]
# With torch's default of a hundred million elements, a small model is a single unit, the root. With 100,000, the
# `ModuleList` would be the only other unit if it were not exempt. With 16,000, `up` is a unit and `down` is not, only
# because of the size of a bias. Size alone does not show which modules run together.
#
# torch has the same policy, `size_based_auto_wrap_policy`. With your policy, torch's own wrapping must select the same
# modules.

# %%
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy


def torch_units(policy: Callable[..., bool]) -> list[str]:
    model = gpt()
    _recursive_wrap(model, policy, Marked, set(), set(), only_wrap_children=True)
    return [name.replace(".module", "") for name, m in model.named_modules() if isinstance(m, Marked)]


for least in (100_000, 60_000, 30_000, 16_000):
    theirs = torch_units(partial(size_based_auto_wrap_policy, min_num_params=least))
    same = theirs == torch_units(partial(by_size, least=least)) == named_units(partial(by_size, least=least))
    print(f"least {least:7,}: the units that torch's own policy names: {same}")
    assert same, "your policy names other modules than torch's"

# %% [markdown]
# ## 10a.2 The walk
#
# *15 minutes, hard*
#
# Write the walk that applies a policy to a tree of modules. The order matters. Inner modules come first, and the
# unit of an outer module gets the remaining parameters. A module may also appear twice in the tree (layers that share
# all their weights, as in ALBERT). It then becomes a single unit that appears twice.
#
# Consider a step with U units, including the root. Each unit runs once and has trainable parameters. How many
# collectives does a rank issue? As in lab 05, the root is gathered once, every other unit is gathered twice, and each
# unit is reduced once. Predict the number of collectives for a policy that makes each *block* a unit.

# %%
predict("10a.2", ..., "collectives of one step, each of the 6 blocks a unit")


# %% tags=["exercise-10a.2"]
from .ex2_wrap_where import wrap_where

# %% [markdown]
# With your walk and your policy, FSDP takes 40 lines. `Sharded` wraps a module as a unit. `lab_fsdp` wraps each
# module selected by the policy. The engine, the flat parameter and the unit are minifsdp's, known from labs 04 and 05.
# `fill` writes the initial values into the flat buffer. For now, it copies the values of the module.


# %%
Fill = Callable[[list[Tensor], ParamPlaces], None]


def copied(views: list[Tensor], params: ParamPlaces) -> None:
    copy_values(views, list(params))


class Sharded(nn.Module):
    """One unit: the parameters of `module` outside any inner `Sharded`."""

    engine: Engine

    def __init__(self, module: nn.Module, fill: Fill) -> None:
        super().__init__()
        inner = [m for m in module.modules() if isinstance(m, Sharded)]
        params, group = find_parameters(module, skip=inner), comm.world()
        flat = FlatParameter(
            params, group.rank(), group.size(), lambda views, originals: fill(views, params), rank_device()
        )
        self.module, self.unit = module, FlatUnit(flat, Plan(group), type(module).__name__)
        self.register_parameter("flat_param", flat.shard)

    def forward(self, *args: Any) -> Any:
        if self.unit.is_root:
            self.engine.begin()
        self.engine.before(self.unit, args)
        output = self.module(*args)
        self.engine.after(self.unit, output)
        if self.unit.is_root:
            self.engine.end()
        return output


def lab_fsdp(
    model: nn.Module,
    policy: Callable[..., bool],
    fill: Fill = copied,
    tell: Callable[[Sharded], Any] = lambda unit: None,
) -> Sharded:
    """Build your FSDP; `tell` is called with each unit as soon as it has been sharded."""

    def wrap(module: nn.Module) -> Sharded:
        check_not_shared(model, module)  # a tied parameter belongs in one unit
        sharded = Sharded(module, fill)
        tell(sharded)
        return sharded

    wrap_where(model, policy, wrap)
    root = Sharded(model, fill)
    tell(root)
    instances = [m for m in root.modules() if isinstance(m, Sharded)]
    units = [each.unit for each in instances]
    engine = Engine(units, SyncSchedule(units))
    for each in instances:
        each.engine = engine
    root.unit.is_root = True
    return root


def instances_of(*classes: type[nn.Module]) -> Callable[..., bool]:
    """The usual policy for transformers: each instance of the given classes is a unit."""
    return lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, classes)


POLICIES = {
    "one unit": partial(by_size, least=100_000_000),
    "pairs": instances_of(nn.Sequential),
    "blocks": instances_of(Block),
    "by size": partial(by_size, least=16_000),
    "every Linear": instances_of(nn.Linear),
}

# %% [markdown]
# ### Measured: units, collectives and peak memory of five policies
#
# The prediction needs only the list of units. There are 3 U - 1 collectives. The unsharded parameters are those of the
# root, which stays unsharded, of the unit being computed, and of its enclosing units (with the size-based policy, `up`
# is inside a unit with the rest of its block). Count each in bytes, including padding. (Prefetch, lab 07, would add the
# next unit.)


# %% tags=["C20"]
def unit_sizes(model: Sharded) -> dict[str, tuple[int, int]]:
    """Return the elements and padding of each unit by name, the root first."""
    named = [(name.replace("module.", "").removesuffix("module"), m) for name, m in model.named_modules()]
    return {
        name.rstrip(".") or "root": (m.unit.flat.numel, m.unit.flat.padding)
        for name, m in named
        if isinstance(m, Sharded)
    }


def predicted_unsharded(units: dict[str, tuple[int, int]]) -> int:
    """Return the bytes of the root plus the largest unit, together with the units that enclose it."""
    whole = {name: 4 * sum(size) for name, size in units.items()}
    root = whole.pop("root")
    around = {name: [outer for outer in whole if name == outer or name.startswith(f"{outer}.")] for name in whole}
    return root + max((sum(whole[each] for each in outers) for outers in around.values()), default=0)


def try_policies() -> dict[str, dict[str, Any]]:
    found = {}
    for name, policy in POLICIES.items():
        models: list[Sharded] = []

        def build(policy: Callable[..., bool] = policy, models: list[Sharded] = models) -> Sharded:
            models.append(lab_fsdp(gpt().to(rank_device()), policy))
            return models[0]

        found[name] = {**measure_memory(build), "units": unit_sizes(models[0])}
    return found


tried = launch(try_policies, RANKS)[0]
print(f"{'':14}{'units':>6}{'collectives':>12}{'3U - 1':>7}{'padding':>8}", end="")
print(f"{'unsharded':>11}{'predicted':>11}{'state':>11}")
expected = {}
for name, found in tried.items():
    units, collectives = found["units"], len(found["calls"])
    expected[name] = predicted_unsharded(units)
    padding = sum(pad for _, pad in units.values())
    print(
        f"{name:14}{len(units):6}{collectives:12}{3 * len(units) - 1:7}{padding:8}{found['unsharded']:11,}"
        f"{expected[name]:11,}{found['state']:11,}"
    )
    assert (collectives, found["unsharded"]) == (3 * len(units) - 1, expected[name])
same_loss = len({found["loss"] for found in tried.values()}) == 1
print(f"peak bytes of a rank; model state with DDP: {ddp_peak:,}; all policies give the same loss: {same_loss}")
slips = {"the root is gathered once": 21, "forward gathers too": 13, "the root is a unit too, the seventh": 17}
slips["the root is gathered and reduced like any unit, each once"] = 18
outcome("10a.2", len(tried["blocks"]["calls"]), slips=slips)
assert same_loss, "a policy has changed what is computed"

# %%
plots.stages(
    {f"{name}: {len(found['calls'])} collectives": {"unsharded": found["unsharded"]} for name, found in tried.items()},
    predicted={f"{name}: {len(found['calls'])} collectives": expected[name] for name, found in tried.items()},
    title=f"Smaller units need {len(tried['every Linear']['calls'])} collectives, not "
    f"{len(tried['one unit']['calls'])}, but {tried['every Linear']['unsharded'] / 2**20:.2f} MiB unsharded, not "
    f"{tried['one unit']['unsharded'] / 2**20:.2f}",
    says="Peak bytes of unsharded parameters on a rank in a step, by wrapping policy. Only the single unit is gathered "
    "once; the others send nearly the same bytes.",
    lab="10a",
)

# %% [markdown]
# Small units save memory but need more collectives. Making every Linear a unit costs time, because each collective has
# a latency, whatever its size (lab 01). The next cell measures this cost on an emulated link with 1 ms latency and 100
# MB/s:


# %% tags=["nbval-ignore-output"]
def trace_policies(names: list[str], folder: Path) -> None:
    let_communication_go_first()
    with parse_link("latency=1ms,bandwidth=100MB/s") as link:
        for name in names:
            model = lab_fsdp(gpt().to(rank_device()), POLICIES[name])
            optimizer = AdamW(model.parameters(), lr=1e-3)
            take_step(model, optimizer, BATCHES[0])
            for attempt in range(TRACES):
                with record_trace(folder / f"{name}-{attempt}-{comm.world().rank()}.json", link):
                    comm.all_reduce(torch.zeros(1, device=rank_device()), comm.world()).wait()  # start together
                    take_step(model, optimizer, BATCHES[1])


shown, TRACES = ["one unit", "blocks", "every Linear"], 3
with tempfile.TemporaryDirectory() as folder:
    launch(trace_policies, RANKS, shown, Path(folder))
    traces = {
        name: [read_trace(Path(folder, f"{name}-{attempt}-0.json")) for attempt in range(TRACES)] for name in shown
    }
spans = {name: min(each, key=lambda trace: max(span.end for span in trace)) for name, each in traces.items()}
ends = {name: 1e3 * max(span.end for span in each) for name, each in spans.items()}
link = {name: len(tried[name]["calls"]) + tried[name]["wire"] / 1e5 for name in shown}  # 1 ms each, 100 MB/s
for name in shown:
    print(f"{name:13} expected of the link alone {link[name]:4.0f} ms, the step took {ends[name]:4.0f}")
plots.timeline(
    {f"{name}: {len(tried[name]['calls'])} collectives": each for name, each in spans.items()},
    title=f"The same bytes in {len(tried['every Linear']['calls'])} collectives take {ends['every Linear']:.0f} ms, "
    f"and {ends['blocks']:.0f} ms in {len(tried['blocks']['calls'])} collectives",
    says=f"A step of your FSDP on rank 0, the fastest of {TRACES}; gathers and reductions run one after the other, "
    "without overlap. Each collective costs the link's latency and work on the host. A bar far longer than its "
    "neighbours is a delay of this machine, not of the link.",
    lab="10a",
)

# %% [markdown]
# Each collective costs its latency and some host time (if the CPU also computes the model, the host time is the larger
# cost). A single unit is the fastest choice, and the right one for a model that fits in memory unsharded. Otherwise, a
# transformer block is the usual unit: its layers run one after the other, all blocks have the same size, and their
# collectives are large. Overlap and prefetch (labs 06 and 07) hide as much communication as the compute time allows.
#
# ### Measured: a unit is not a pipeline stage
#
# Six blocks in three pairs result in four units, including the root. The figure shows the wrapped model. Each rank also
# records which blocks it runs: as in lab 04, it runs all of them.


# %% tags=["C9"]
BLOCKS = [f"blocks.{number // 2}.block{number}" for number in range(6)]
LAYERS = ["embed", "position", *BLOCKS, "norm", "head"]


def layouts_and_runs() -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return the elements per layer for each unit's flat parameter, and the blocks that this rank ran."""
    model, ran = gpt().to(rank_device()), list[str]()
    for name in BLOCKS:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    places = {m: name for name, m in model.named_modules()}
    layouts: dict[str, dict[str, int]] = {}

    def tell(sharded: Sharded) -> None:
        flat, layout = sharded.unit.flat, dict[str, int]()
        for (place, *_), numel in zip(flat.places, flat.layout.numels, strict=True):
            layer = next(layer for layer in LAYERS if f"{places[place.module]}.".startswith(f"{layer}."))
            kind = f"{layer}.{'bias' if place.attribute == 'bias' else 'weights'}"
            layout[kind] = layout.get(kind, 0) + numel
        layouts[places[sharded.module] or "root"] = {**layout, "padding": flat.padding}

    wrapped = lab_fsdp(model, POLICIES["pairs"], tell=tell)
    with torch.no_grad():
        wrapped(*mine(BATCHES[0]))
    return {"root": layouts.pop("root"), **layouts}, ran


per_rank = launch(layouts_and_runs, RANKS)
layouts = per_rank[0][0]
print("units:", {name: sum(layout.values()) for name, layout in layouts.items()})
for rank, (_, ran) in enumerate(per_rank):
    print_wrapped(
        f"rank {rank} runs {', '.join(ran)}: expected: six with FSDP, three with a pipeline of {RANKS} stages"
    )
assert all(ran == BLOCKS for _, ran in per_rank)
plots.units(
    LAYERS,
    {name.replace("blocks.", "pair "): layout for name, layout in layouts.items()},
    RANKS,
    title=f"Six blocks in three pairs form {len(layouts)} units: the root unit holds the rest",
    says="Top: the layers as every rank runs them. Below: each unit's flat parameter and the ranks that share it; "
    "weights solid, biases dotted, padding hatched. Without names: position, norm and the head's bias in the root.",
    lab="10a",
)

# %% [markdown]
# ### Break it: the tied head
#
# Many language models use one matrix twice: as the embedding and as the head. In two separate units, the matrix would
# be sharded twice, and its two gradients would never be added. Two seemingly harmless policies cause this mistake with
# the tied GPT:

# %% tags=["C9"]
for name in ("every Linear", "by size"):
    model = gpt(tied=True)
    try:
        wrap_where(model, POLICIES[name], lambda module, model=model: check_not_shared(model, module) or Marked(module))
    except ValueError as error:
        said = str(error)
        print_wrapped(f"{name}: {said}")
    assert {"head.weight", "embed.weight"} <= set(said.replace(",", "").split())

# %% [markdown]
# The message gives both names and the fix. (torch's FSDP1 shards the matrix twice without a warning, and trains two
# diverging copies.) With the policy `{Block}`, both uses of the matrix stay in the root unit, and training is correct.
# The root may then be large: with a large vocabulary, the root with its embedding *is* the largest unit.
#
# ### Break it: one module with a different dtype
#
# A flat parameter has one dtype. Norms in float32 inside a bfloat16 model raise an error, and so does a float32 adapter
# on a bfloat16 base ([peft#484](https://github.com/huggingface/peft/issues/484),
# [axolotl#1494](https://github.com/axolotl-ai-cloud/axolotl/issues/1494)). minifsdp's error message names the
# parameters; torch's does not:


# %%
def flattened(module: nn.Module) -> Marked:
    """Flatten the parameters of a unit, and do nothing else with them."""
    inner = [m for m in module.modules() if isinstance(m, Marked)]
    FlatParameter(find_parameters(module, skip=inner), rank=0, ranks=RANKS)
    return Marked(module)


for classes in ((Block,), (Block, nn.LayerNorm)):
    mixed = gpt()
    for name, p in mixed.blocks.named_parameters():
        if "norm" not in name:
            p.data = p.data.bfloat16()
    names = ", ".join(each.__name__ for each in classes)
    try:
        taken = wrap_where(mixed, instances_of(*classes), flattened)
        print(f"{{{names}}}: {sum(isinstance(m, Marked) for m in mixed.modules())} units of {taken:,} elements")
    except ValueError as error:
        print_wrapped(f"{{{names}}}: {error}")

# %% [markdown]
# If only a few modules have another dtype, such as an adapter, put them into separate units. Thirteen norms would
# become thirteen small units with three collectives each, for a total of 59 collectives per step instead of 20. In this
# case, it is better to store everything in one dtype and compute in another one with `MixedPrecision` (lab 09).
#
# ## 10a.3 Materialize one unit from meta
#
# *12 minutes, medium*
#
# So far, each rank has built the full model and then sharded it. This fails if the model is too large for one rank.
# **Deferred initialization** (FSDP paper, section 3.1) builds the model on the `meta` device, where a tensor has a
# shape but no storage. It then materializes one unit at a time: it allocates memory for the unit, initializes it, keeps
# a shard and frees the rest.
#
# By torch's convention, a module that owns parameters directly has a method `reset_parameters()`, which initializes its
# own parameters in place, but not those of its children. Your function does not need to allocate any memory:
# `FlatParameter` allocates its buffer, provides a view for each parameter, and copies the shard out of the buffer. Your
# function fills the views.
#
# Uninitialized memory is a pitfall: it contains arbitrary values. No initializer writes NaN intentionally, so fill the
# memory with NaN first, and check for NaN afterwards.
#
# The model's parameters take 4Ψ = 1,297,820 bytes. Predict the peak on one of 2 ranks while it shards the model block
# by block, with the root last. While the rank shards a unit, it holds that unit unsharded and all shards created so
# far, including the shard of that unit. (A block has 48,447 elements, the root 33,773; for two ranks a flat parameter
# is padded to an even number.)

# %%
predict("10a.3", ..., "bytes at the peak of construction from meta, blocks as units, 2 ranks")


# %% tags=["exercise-10a.3"]
from .ex3_fill_from_meta import fill_from_meta

# %% [markdown]
# ### Measured: shards plus one unit at the peak
#
# The ledger records the construction of the model, up to the last shard, in three ways: eagerly, from meta with your
# function, and from meta with torch's FSDP.


# %% tags=["C19"]
def construct(build: Callable[[Callable[..., None]], None]) -> dict[str, Any]:
    """Return the peak and the curve of memory during construction."""
    with Ledger() as ledger:

        def sharded(shard: Tensor, name: str = "") -> None:
            ledger.tag(shard, "parameters")
            if name:
                ledger.mark(name)

        build(sharded)
        return {"peak": ledger.peak.total, "curve": ledger.curve()}


def eager(sharded: Callable[..., None]) -> None:
    model = gpt().to(rank_device())
    for p in model.parameters():
        sharded(p)
    lab_fsdp(model, POLICIES["blocks"], tell=lambda each: sharded(each.unit.flat.shard, each.unit.name))


def deferred(sharded: Callable[..., None]) -> None:
    with torch.device("meta"):
        model = gpt()
    lab_fsdp(model, POLICIES["blocks"], fill_from_meta, lambda each: sharded(each.unit.flat.shard, each.unit.name))


def torchs(sharded: Callable[..., None]) -> None:
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")  # torch's own warnings are not the subject here
    with torch.device("meta"):
        model = gpt()
    TorchFSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=rank_device())


def construct_all() -> dict[str, dict[str, Any]]:
    return {name: construct(build) for name, build in {"eager": eager, "meta": deferred, "torch": torchs}.items()}


built = launch(construct_all, RANKS)[0]
PSI = 4 * sum(p.numel() for p in gpt().parameters())
NUMELS = [tried["blocks"]["units"][name][0] for name in (*BLOCKS, "root")]  # in the order of wrapping
PADDED = [numel + numel % RANKS for numel in NUMELS]  # as two ranks need it


def peak_of_construction(*beside: list[int]) -> int:
    """Return the bytes of the shards so far plus the buffers of the current unit; arguments are in elements."""
    return 4 * max(sum(PADDED[: i + 1]) // RANKS + sum(each[i] for each in beside) for i in range(len(PADDED)))


one, two = peak_of_construction(PADDED), peak_of_construction(PADDED, NUMELS)
print(f"the unsharded model {PSI:,} bytes; its shards {2 * sum(PADDED):,}; the largest unit {4 * max(PADDED):,}")
print(f"eager:            {built['eager']['peak']:9,} at the peak, more than the whole model")
print(f"from meta, yours: {built['meta']['peak']:9,}, expected {one:9,}: shards and one unit")
print(f"from meta, torch: {built['torch']['peak'] / PSI:.2f} of the model: shards and two units, but for padding")
slips = {
    "the largest unit alone: the shards made so far are there as well": 4 * max(PADDED),
    "the root comes last, when all other shards are there": peak_of_construction([*PADDED[:-1], 0]),
    "without the padding": 4 * (sum(NUMELS) / RANKS + NUMELS[-1]),
    "the whole model": PSI,
}
outcome("10a.3", built["meta"]["peak"], ranks=RANKS, slips=slips)
assert built["eager"]["peak"] > PSI
assert built["meta"]["peak"] == one, "beside the shards there was more than one unit"
assert abs(built["torch"]["peak"] - two) <= 4 * RANKS


def with_new_shards(curve: dict[str, Any]) -> dict[str, Any]:
    """Return the curve, counting shards as parameters from their allocation, slightly before they are tagged."""
    tags = dict(curve["tags"])
    tags["parameters"] = [sum(each) for each in zip(tags["parameters"], tags["activations"], strict=True)]
    tags["activations"] = [0] * len(tags["parameters"])
    return {**curve, "tags": tags}


plots.curve(
    with_new_shards(built["meta"]["curve"]),
    earlier={"eager": built["eager"]["curve"]},
    predicted_peak=one,
    title="On meta, a rank peaks at {}, built eagerly at {}".format(
        *(f"{built[how]['peak'] / 2**20:.2f} MiB ({built[how]['peak'] / PSI:.2f} × 4Ψ)" for how in ("meta", "eager"))
    ),
    says="One of 2 ranks builds and shards the GPT (4Ψ bytes), block by block, the root last. Dark: shards; light: the "
    "unit that is being sharded. With more ranks, the shards shrink, and one unit remains.",
    lab="10a",
)

# %% [markdown]
# torch briefly holds two copies of a unit: it materializes the modules and then copies them into a flat buffer
# (`_materialize_meta_module` in `torch/distributed/fsdp/_init_utils.py`). minifsdp initializes in the flat buffer, as
# your function does.
#
# ### Break it: reset_parameters differs from your model's own initialization
#
# A model built from meta may differ from an eagerly built model. The course's GPT initializes its embeddings with small
# random values, `std=0.02`, in *its own* constructor. On meta, the constructor has no effect, and
# `nn.Embedding.reset_parameters` runs afterwards:


# %%
def embedding_spread(meta: bool) -> float:
    with torch.device("meta" if meta else "cpu"):
        model = gpt()
    sharded = FullyShardedDataParallel(model.to("cpu") if not meta else model, device_id=rank_device())
    with FullyShardedDataParallel.summon_full_params(sharded):
        return float(sharded.module.embed.weight.detach().std())


both = launch(lambda: [embedding_spread(meta) for meta in (False, True)], RANKS)[0]
print(f"standard deviation of the embedding: eager {both[0]:.2f}, from meta {both[1]:.2f}")
assert both[1] > 10 * both[0]

# %% [markdown]
# The values of the embedding are fifty times too large, and there is neither an error nor a NaN. The custom layers of
# models from `transformers` have no `reset_parameters`; they are initialized in `_init_weights(module)`.
# `param_init_fn` covers both cases.
#
# ## 10a.4 A param_init_fn whose values do not depend on the wrapping
#
# *15 minutes, hard*
#
# If any tensor of a unit is on meta, `FullyShardedDataParallel(..., param_init_fn=f)` calls `f(module)` instead of
# `reset_parameters()` for each module of the unit. `f` must allocate the module's own tensors with
# `module.to_empty(device=..., recurse=False)` and initialize them.
#
# Buffers are also on meta, but they are not part of the flat parameter, and those with `persistent=False` are not in
# any checkpoint either. The RoPE frequencies of a Llama model, `inv_freq`, are one such buffer. The constructor
# computes them, which has no effect on meta, so the initializer must compute them again (as `_init_weights` in
# transformers 5 does).
#
# There is another pitfall. Eager code draws all random numbers from one generator, in the order of construction. With
# initialization from meta, the order is that of the units, innermost first, and one additional draw on a rank shifts
# all its later values. Therefore, each module gets its own seed, derived from its name, so that the values do not
# depend on the policy, the number of ranks or the order. (Python's `hash()` of a string differs from process to
# process; `crc32(name.encode())` does not.)
#
# `to_empty` allocates separate memory, without padding, whose contents are then copied into the flat buffer. Predict:
# what is the peak now, in the setting of 10a.3?

# %%
predict("10a.4", ..., "bytes at the peak of construction with a param_init_fn, blocks as units, 2 ranks")


# %% tags=["exercise-10a.4"]
from .ex4_initializer import initializer


# %%
def reset_gpt(module: nn.Module) -> None:
    """The initialization from the course's GPT constructors, for one module."""
    module.reset_parameters()
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def eager_values(model: nn.Module, initialize: Callable[[nn.Module], None]) -> nn.Module:
    """Return the full model, initialized in one process. The first place of a tied weight comes last, so its values are
    kept."""
    for module in reversed(list(model.modules())):
        initialize(module)
    return model


def from_meta(policy: Any) -> tuple[int, bool]:
    """Return the peak during construction, and whether all values equal those of an eager model."""
    with Ledger() as ledger:
        with torch.device("meta"):
            model = gpt()
        init = initializer(model, reset_gpt, rank_device(), seed=7)
        sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, param_init_fn=init, device_id=rank_device())
        peak = ledger.peak.total
    whole = gpt().to(rank_device())
    whole = dict(eager_values(whole, initializer(whole, reset_gpt, rank_device(), seed=7)).named_parameters())
    with FullyShardedDataParallel.summon_full_params(sharded):
        return peak, all(torch.equal(p, whole[name]) for name, p in sharded.named_parameters())


def forgetful(module: nn.Module) -> None:
    """Initializes only Linear layers."""
    if isinstance(module, nn.Linear):
        module.reset_parameters()


class Calibrated(nn.Linear):
    """A head whose scale is set by the embedding: a parameter of another unit."""

    def __init__(self, embed: nn.Embedding) -> None:
        self.source = [embed]  # in a list, so that it is not registered as a submodule
        super().__init__(embed.embedding_dim, embed.num_embeddings, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(self.source[0].weight.std())


def calibrated() -> nn.Module:
    embed = nn.Embedding(11, 4)
    return nn.Sequential(embed, nn.Sequential(nn.Linear(4, 4)), Calibrated(embed))


def refusals() -> list[str]:
    """Return the errors for unwritten values and for a parameter of another unit."""
    said = []
    with torch.device("meta"):
        model, needs = gpt(), calibrated()
    init = initializer(model, forgetful, rank_device(), seed=7)
    attempts = [
        lambda: FullyShardedDataParallel(model, param_init_fn=init, device_id=rank_device()),
        lambda: FullyShardedDataParallel(needs, auto_wrap_policy={nn.Embedding, Calibrated}, device_id=rank_device()),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("no error")
        except RuntimeError as error:
            said.append(str(error))
    return said


def all_of_10a4() -> tuple[dict[str, tuple[int, bool]], list[str]]:
    policies = {"one unit": partial(by_size, least=10**8), "blocks": {Block}, "every Linear": {nn.Linear}}
    return {name: from_meta(policy) for name, policy in policies.items()}, refusals()


found, said = launch(all_of_10a4, RANKS)[0]

# %% tags=["C19"]
for name, (peak, equal) in found.items():
    print(f"{name:14} peak {peak:9,} bytes, all values equal to those of an eager model: {equal}")
    assert equal, "the values depend on the wrapping"
peak_at_root = 4 * (sum(PADDED) // RANKS + PADDED[-1] + NUMELS[-1])
print(f"blocks: expected {two:,}, shards and two units; in the flat buffer it was {one:,}")
slips = {
    "memory of `to_empty` and the flat buffer: two units": one,
    "blocks are larger than the root: two of them, and the shards so far": peak_at_root,
    "without the padding": 4 * (sum(NUMELS[:-1]) / RANKS + 2 * max(NUMELS)),
    "the whole model": PSI,
}
outcome("10a.4", found["blocks"][0], ranks=RANKS, slips=slips)
assert found["blocks"][0] == two
print("unwritten:", said[0])
print_wrapped(f"another unit's parameter: {said[1].partition(';')[0]}")
assert "embed.weight" in said[0]
assert "sharded" in said[1]

# %% [markdown]
# The seeds have two consequences. First, after construction, torch's generator is in the same state on every rank, so
# all ranks would use the same dropout masks: reseed with the rank, or seed the initializer inside
# `torch.random.fork_rng()`. Second, the values equal those of an eager model only on the same kind of device: CPU and
# CUDA generate different numbers from the same seed.
#
# The last line of the output shows a limit of deferred initialization, also mentioned in the paper: an initializer sees
# only one unit. Here, the embedding is a separate unit, and is already sharded when the head is initialized. There are
# two solutions: put both into one unit, or initialize such modules after wrapping, inside
# `FullyShardedDataParallel.summon_full_params(model)`, which gathers the full model and writes the changes back.
#
# (A third way to initialize a model: rank 0 builds it eagerly, the others build it on meta, and
# `sync_module_states=True` broadcasts the values of each unit. Rank 0 then has the full model in memory. External
# checkpoints are often loaded this way. In minifsdp, the meta ranks need no `param_init_fn`. torch's FSDP1 calls
# `reset_parameters` on meta ranks even then, so in torch they need
# `param_init_fn=lambda module: module.to_empty(device=device, recurse=False)`.)
#
# ## 10a.5 From DDP to FSDP
#
# *8 minutes, medium*
#
# A DDP script has these two lines:
#
#     model = DistributedDataParallel(build().to(device))
#     optimizer = AdamW(model.parameters(), lr=1e-3)
#
# Write a function that replaces these two lines. The lab then uses your function in a script that trains a small Llama
# model from `transformers`, whose head is tied to its embedding. (In minifsdp `auto_wrap_policy` also accepts a set of
# classes; torch requires a `ModuleWrapPolicy` around it. `device_id` is the device for compute and shards.)
#
# Predict: how many elements does the optimizer on each of 2 ranks update if the model has 158,112 elements and needs no
# padding?

# %%
predict("10a.5", ..., "elements that one rank's optimizer updates, 158,112 in the model, 2 ranks")


# %% tags=["exercise-10a.5"]
from .ex5_shard_script import shard_script

# %% [markdown]
# ### Measured: the changes required
#
# Importing `transformers` on each rank takes time, so a single launch runs everything: the DDP script, your script, and
# variants of your script that each omit one change.


# %%
def llama() -> tuple[Callable[[], nn.Module], type[nn.Module]]:
    """Return a function that builds a small Llama with a tied head, and the class of its blocks."""
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.models.llama import modeling_llama as m

    sizes = {"hidden_size": 48, "intermediate_size": 120, "num_hidden_layers": 6, "num_attention_heads": 4}
    text = {"vocab_size": 257, "max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 1}
    config = m.LlamaConfig(**sizes, **text, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False)
    return lambda: m.LlamaForCausalLM(config), m.LlamaDecoderLayer


def make_init(model: nn.Module) -> Callable[[nn.Module], None]:
    return initializer(model, model._init_weights, rank_device(), seed=7)


def train(model: nn.Module, optimizer: Optimizer, clip: Callable[[float], Tensor]) -> list[tuple[float, float]]:
    """Run the training loop of either script: three steps with clipping; return the loss and norm of each step."""
    history = []
    for batch in BATCHES[:3]:
        tokens, _ = mine(batch)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(loss.detach()), float(norm)))
    return history


def ddp_script(build: Callable[[], nn.Module]) -> tuple[nn.Module, Optimizer, Callable[[float], Tensor]]:
    whole = build().to(rank_device())
    model = DistributedDataParallel(eager_values(whole, make_init(whole)))
    return model, AdamW(model.parameters(), lr=1e-3), partial(nn.utils.clip_grad_norm_, list(model.parameters()))


def fsdp_script(build: Callable[[], nn.Module], block: type) -> tuple[nn.Module, Optimizer, Callable[[float], Tensor]]:
    model, optimizer = shard_script(build, {block}, make_init, rank_device())
    return model, optimizer, model.clip_grad_norm_


def measure_script(script: Callable[[], Any]) -> dict[str, Any]:
    with Ledger() as ledger:
        model, optimizer, clip = script()
        found: dict[str, Any] = {"construction": ledger.peak.total}
        ledger.watch(model, optimizer)
        ledger.reset_peaks()
        before = [p.detach().clone() for p in model.parameters()]
        found["history"] = train(model, optimizer, clip)
        found |= {"state": ledger.peak_of(*STATE), "unsharded": ledger.peak_of("unsharded"), "peak": ledger.peak.tags}
        found["trains"] = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        found["elements"] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        return found


def change_the_script() -> dict[str, Any]:
    build, block = llama()
    wrap = partial(FullyShardedDataParallel, device_id=rank_device())

    def no_policy() -> Any:
        with torch.device("meta"):
            model = build()
        model = wrap(model, param_init_fn=make_init(model))
        return model, AdamW(model.parameters(), lr=1e-3), model.clip_grad_norm_

    def no_meta() -> Any:
        whole = build()
        model = wrap(eager_values(whole, make_init(whole)), auto_wrap_policy={block})
        return model, AdamW(model.parameters(), lr=1e-3), model.clip_grad_norm_

    def early_optimizer() -> Any:
        whole = build()
        optimizer = AdamW(eager_values(whole, make_init(whole)).parameters(), lr=1e-3)
        model = wrap(whole, auto_wrap_policy={block})
        return model, optimizer, model.clip_grad_norm_

    def early_in_torch() -> bool:
        """Return whether an optimizer that was built before torch's FSDP changes any parameter."""
        import warnings

        from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

        warnings.simplefilter("ignore")  # torch's own warnings are not the subject here
        layer = nn.Linear(4, 4, device=rank_device())
        optimizer = AdamW(layer.parameters(), lr=1e-3)
        (flat,) = (model := TorchFSDP(layer, device_id=rank_device())).parameters()
        before = flat.detach().clone()
        model(torch.ones(1, 4, device=rank_device())).sum().backward()
        optimizer.step()
        return not torch.equal(before, flat)

    def old_clip() -> Any:
        model, optimizer, _ = fsdp_script(build, block)
        return model, optimizer, partial(nn.utils.clip_grad_norm_, list(model.parameters()))

    def refused(attempt: Callable[[], Any]) -> str:
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "no error"

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    scripts = {
        "DDP": lambda: ddp_script(build),
        "FSDP": lambda: fsdp_script(build, block),
        "no policy": no_policy,
        "no meta": no_meta,
        "nn.utils.clip_grad_norm_": old_clip,
    }
    found: dict[str, Any] = {name: measure_script(script) for name, script in scripts.items()}
    found["optimizer first"] = refused(lambda: train(*early_optimizer())), early_in_torch()
    found["no param_init_fn"] = refused(lambda: wrap(on_meta(), auto_wrap_policy={block}))
    found["every Linear"] = refused(lambda: wrap(on_meta(), auto_wrap_policy={nn.Linear}))
    model, *_ = fsdp_script(build, block)
    whole = build().to(rank_device())
    eager_values(whole, make_init(whole))
    prompt, settings = torch.full((1, 4), 65, device=rank_device()), {"max_new_tokens": 4, "do_sample": False}
    settings |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 1}
    found["generate"] = refused(lambda: model.generate(prompt, **settings))
    with FullyShardedDataParallel.summon_full_params(model):
        found["generates"] = torch.equal(model.module.generate(prompt, **settings), whole.generate(prompt, **settings))
    found["units"] = [(row.name, row.parameters, row.numel) for row in describe(model).rows]
    found["keys"] = model.state_dict().keys() == whole.state_dict().keys()
    return found


per_rank = launch(change_the_script, RANKS, timeout=110)
of = per_rank[0]

# %%
for name, parameters, numel in of["units"]:
    print(f"{name:37} {parameters} parameters, {numel:,} elements")
for step in range(3):
    mean = {name: sum(rank[name]["history"][step][0] for rank in per_rank) / RANKS for name in ("DDP", "FSDP")}
    print(f"step {step}: loss of the DDP script {mean['DDP']:.4f}, of yours {mean['FSDP']:.4f}")
    assert abs(mean["DDP"] - mean["FSDP"]) < 1e-4, "it does not train like the DDP script"
outcome("10a.5", of["FSDP"]["elements"], ranks=RANKS, slips={"its shards are all that it has": of["DDP"]["elements"]})
assert of["units"][0][1] == 2, "the root has the embedding, tied to the head and there once, and the last norm"

# %% tags=["C21"]
PSI_LLAMA = 4 * of["DDP"]["elements"]
norms = {name: [rank[name]["history"][0][1] for rank in per_rank] for name in ("DDP", "nn.utils.clip_grad_norm_")}
local = norms["nn.utils.clip_grad_norm_"]
changes = {
    "the policy": f"without: {of['no policy']['unsharded']:,} bytes of unsharded parameters instead of "
    f"{of['FSDP']['unsharded']:,}; the model has {PSI_LLAMA:,}",
    "build on meta": f"without: {of['no meta']['construction']:,} bytes at the peak of construction instead of "
    f"{of['FSDP']['construction']:,}",
    "param_init_fn": f"without: {of['no param_init_fn'].split(' with error ')[1].partition('.')[0]}",
    "the optimizer after wrapping": f"built before: torch's FSDP trains: {of['optimizer first'][1]}, "
    f"without an error; minifsdp: {of['optimizer first'][0].partition(':')[0]}",
    "model.clip_grad_norm_": f"nn.utils': norms {local[0]:.4f} and {local[1]:.4f} on the ranks instead of "
    f"{norms['DDP'][0]:.4f}",
    "generate()": f"{of['generate'].partition(';')[0]}",
    "tied weights in one unit": f"every Linear: {of['every Linear'].partition(',')[0]}",
}
print(f"expected by folklore: 2 changes, the wrap and the checkpoint; measured: {len(changes)} more\n")
for change, without in changes.items():
    print(f"- {change}")
    print_wrapped(f"    {without}")
root, block = (4 * of["units"][number][2] for number in (0, 1))
assert of["no policy"]["unsharded"] == PSI_LLAMA
assert of["FSDP"]["unsharded"] == root + 2 * block, "the root, the block that runs, and the one that is prefetched"
assert of["FSDP"]["trains"]
assert not of["optimizer first"][1]
assert of["FSDP"]["construction"] < PSI_LLAMA < of["no meta"]["construction"]
assert abs(sum(norm**2 for norm in local) ** 0.5 - norms["DDP"][0]) < 1e-3 * norms["DDP"][0]
assert of["generates"]
assert of["keys"]

# %% [markdown]
# With torch's FSDP1, forgetting any of the following five changes raises no error. Without *building on meta*, only
# memory is lost, and *tied weights* in separate units diverge (see above). The other three are:
#
# - **No policy**: the model trains, but holds all its parameters and gradients unsharded at the
#   peak, regardless of N.
# - **An optimizer built before wrapping** holds the old parameters, which the model no longer uses. They get no
#   gradient, so the optimizer skips them, and the model's parameters never change. The optimizer also keeps the old
#   parameters in memory. (With `use_orig_params=True`, torch keeps the original Parameters, and the model trains.
#   minifsdp checks at each `step()` that the model still uses the optimizer's parameters.)
# - **`torch.nn.utils.clip_grad_norm_`** sees only this rank's shards, so each rank computes the norm of *different
#   elements*. Each rank scales its shards by a different factor, which changes the direction of the gradient as well as
#   its length. The squares of these norms add up to the square of the true norm. The model's own `clip_grad_norm_`
#   computes the true norm with one all-reduce.
#
# `generate()` is not `forward`, so it does not gather the root. Inside `summon_full_params`, it works, and returns the
# same tokens as the plain model. `register_fsdp_forward_method(model, "generate")` makes it gather units as a forward
# pass does (torch has this for FSDP2 only). The checkpoint, the second change in the quotation above, also needs work:
# `model.state_dict()` uses the names of the plain model, and gathers the full model on every rank. Lab 10b avoids this
# gather.
#
# In torch's FSDP2, you call `fully_shard(module)` explicitly, on each block and finally on the model; it shards each
# parameter separately. A model on meta is sharded first; then `model.to_empty(device=...)` allocates only the shards,
# which are initialized afterwards. Seed all ranks alike for that. On a GPU, and in minifsdp also on a CPU, each rank
# then draws its part of the values that one process would draw. On a CPU, torch initializes every rank's shard with
# *the same numbers*, in silence: draw the full tensor there and pass it to `distribute_tensor`.
# `torch.nn.utils.clip_grad_norm_` is correct under FSDP2; the optimizer must still be built last.


# %%
peaks = {name: of[name]["peak"] for name in ("DDP", "no policy", "FSDP")}
most = {name: sum(held.values()) / 2**20 for name, held in peaks.items()}
plots.stages(
    peaks,
    title=f"Training the Llama, a rank peaks at {most['FSDP']:.2f} MiB, at {most['DDP']:.2f} with DDP, and at "
    f"{most['no policy']:.2f} without a policy",
    says="Memory of one of 2 ranks at the peak of three steps, activations included: the DDP script (whose bucket is "
    "allocated in full with the first gradient), FSDP with the root as its only unit, and FSDP with a unit for each "
    "block.",
    lab="10a",
)

# %% [markdown]
# ## What is still missing
#
# The model trains. Its parameters and the optimizer state are N shards of 7 flat parameters. A checkpoint should not
# depend on N, and should not require the full model in the memory of one device. **Lab 10b** builds such a checkpoint.
#
# ## What to remember
#
# 1. Wrapping determines memory and collectives: always print the table of units
#    (`minifsdp.instruments.describe(model)`). With a single unit, the peak includes all parameters and all gradients
#    unsharded, regardless of N.
# 2. A policy is called on the way down and on the way up. U units cost 3 U - 1 collectives per step; the peak of
#    unsharded parameters is the root, the largest unit, and the prefetched units (lab 07; one by default). Blocks are
#    the usual choice; tied parameters must stay in one unit.
# 3. When a model is built from meta, unit by unit, memory peaks at the shards plus one unit if values are written in
#    the flat buffer, and at the shards plus two units with a `param_init_fn` or in torch.
# 4. `reset_parameters` initializes a module's own parameters, never those of its children. Any other initialization,
#    for example in a constructor, needs a `param_init_fn`, seeded so that order and ranks do not matter. The
#    `param_init_fn` must also initialize the buffers.
# 5. Moving from DDP to FSDP takes these changes: the wrap, the policy, building on meta, initialization, the optimizer
#    *after* wrapping, the model's own clipping, and the checkpoint. Methods other than `forward` need extra care.
#
# ## Questions
#
# **1. A model has 80 equal blocks and an embedding as large as 4 blocks, with the head tied to it. Each block is a
# unit. What determines the peak?**
#
# <details><summary>Answer</summary>
#
# The root determines the peak. It holds the embedding and is unsharded from the start of the forward pass to the end of
# the backward pass. Its gradient is also unsharded during the backward pass. At the peak, the unsharded parameters are
# as large as 4 + 1 blocks, or 4 + 2 blocks with prefetch. Without weight tying, the embedding and the head could be
# separate units.
# </details>
#
# **2. Why does the walk wrap the innermost modules first?**
#
# <details><summary>Answer</summary>
#
# A unit's flat parameter holds the parameters outside its inner units. If outer modules came first, an outer unit would
# take all parameters and leave none for the inner units.
# </details>
#
# **3. Why must `reset_parameters` not recurse into wrapped children?**
#
# <details><summary>Answer</summary>
#
# The children are already sharded, and their unsharded parameters have been freed. Even otherwise, the children would
# be initialized twice, and the random numbers that a parent draws for its children would depend on the wrapping.
# </details>
#
# **4. What does `sync_module_states=True` cost, and what does it achieve, if every rank builds the model from meta?**
#
# <details><summary>Answer</summary>
#
# It costs a broadcast of every unit, and makes the values equal on all ranks without seeds. Otherwise, every rank keeps
# a shard of *its own* random model, and the resulting model consists of shards of different random models.
# </details>
#
# **5. Which numbers in the policy table change with 4 ranks instead of 2?**
#
# <details><summary>Answer</summary>
#
# The number of collectives and the peak of unsharded parameters stay the same, apart from padding. The shards change:
# the parameters between steps, the gradients and the optimizer state take half as many bytes.
# </details>
#
# ## Further reading
#
# - FSDP: [arXiv 2304.11277](https://arxiv.org/abs/2304.11277), sections 3.2.1 (units) and 3.1 (deferred
#   initialization, and its limits).
# - torch: `torch/distributed/fsdp/wrap.py` (policies, `_recursive_wrap`), `torch/distributed/fsdp/_init_utils.py`
#   (`_materialize_meta_module`, `_materialize_with_param_init_fn`).
# - minifsdp: `wrap.py`, `policies.py`, `auto_wrap.py`, `materialize.py` in `fsdp/torch_api`; `unwritten.py`.
