# ---
# jupyter:
#   minifsdp:
#     lab: "00"
#     title: Memory
#     minutes: 50
#     ranks: 0
# ---

# %% [markdown]
# # Lab 00: memory
#
# A training step holds four things in memory: parameters, gradients, optimizer state and activations. Every rung of
# this course shards one of them across the ranks, moves it, or shortens its lifetime. This lab measures the size of
# each of them, to the byte, and shows when it is allocated.
#
# ![Bytes per rank in each stage of ZeRO: the stages shard the optimizer state, then the gradients,
# then the parameters](../slides/figures/stages.svg)
#
# *From [lecture 1, Where memory goes, and what ZeRO saves](../slides/memory.md), which comes before this lab.*
#
# **After this lab, you will be able to**
# - compute a model's bytes of parameters, gradients and optimizer state for the usual optimizers, in float32 and in
#   mixed precision, and verify your results by measurement;
# - derive the memory per rank in each of the three stages of ZeRO;
# - write the Adam step, and say when each of its tensors is allocated;
# - count the bytes that autograd saves for the backward pass, and find the batch size at which they exceed the model
#   state.
#
# **You need** to know PyTorch on one device: modules, `backward` and optimizers. You need no
# experience with distributed training.
#
# **Time** 50 minutes. **Runs** on a laptop (one process), or on one GPU. **Memory** at most 9 MiB of tensors, as the
# ledger counts them.
#
# **How a lab works.** An exercise is a cell with a function whose body is `...`: replace the dots with your code. Until
# you do, the reference answer is used instead, so that everything below runs. As soon as you write an answer, it is
# checked in a separate process, and the cells below use it, whether correct or not. A failed check shows the expected
# result and a hint; `minifsdp lab hint 0.1` also gives a hint. The grey line below the title of each plot states
# whether the plot uses your answers or the reference answers. Before a measurement, the lab asks for a prediction:
# replace the dots with a number. A wrong prediction teaches you more than no prediction.
#
# Throughout, Ψ is the total number of parameter elements, N is the number of ranks, and K is the
# number of bytes of optimizer state per element. KiB, MiB and GiB are powers of 1,024; GB is 10⁹
# bytes, as in the papers.

# %% tags=["setup"]
# set-up
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.gpt import GPT
from minifsdp.instruments import plots
from minifsdp.instruments.watch.ledger import Ledger

torch.set_num_threads(1)  # tensors of this size are too small to split among threads
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# %% [markdown]
# ## The ledger
#
# All byte counts in this course come from one instrument. While a `Ledger` is active, it records every memory block
# returned by an operator. Each block counts once, at its full size, under a tag for its purpose, until it is freed.
# Here, the ledger records one linear layer with 15 + 5 elements of 4 bytes.

# %%
with Ledger() as ledger, DEVICE:
    layer = nn.Linear(3, 5)
    ledger.watch(layer)
    built = ledger.mark("built")
    layer(torch.ones(2, 3)).sum().backward()
    trained = ledger.mark("backward")

print({tag: size for tag, size in built.items() if size})
print({tag: size for tag, size in trained.items() if size})

# %% [markdown]
# Before you count the optimizer state, look at its contents. `optimizer.state` maps each parameter to its buffers; the
# cell shows the buffers of the layer's weight after one step.

# %%
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
}

for name, make in OPTIMIZERS.items():
    optimizer = make(layer.parameters())
    optimizer.step()
    state = optimizer.state[layer.weight]
    kept = {key: (list(t.shape), str(t.dtype)) for key, t in state.items() if isinstance(t, Tensor)}
    print_wrapped(f"{name:9} {kept or 'nothing'}")

# %% [markdown]
# ## 0.1 Bytes of model state
#
# *5 minutes, easy*
#
# **The question.** A model of 7.5 billion parameters takes 15 GB in bfloat16, yet it cannot be
# trained on a device with 80 GB. What takes up the rest of the memory?
#
# - Each gradient has the shape and dtype of its parameter.
# - An optimizer keeps the buffers shown above, each with the shape and dtype of *the tensor it updates*. Adam also
#   keeps one float32 step count for each parameter tensor.
# - In mixed precision with a **float32 copy** (*master weights*), the forward and the backward pass use 2-byte
#   parameters. The optimizer updates a 4-byte copy, which is then rounded into the parameters. The copy counts as
#   optimizer state, and all buffers of the optimizer are float32. Section 0.3 shows why the copy is needed.
#
# Predict: `nn.Linear(300, 100)` has a weight and a bias, both in float32. How many bytes of state does Adam keep for
# this layer? Replace the dots.

# %%
predict("0.1", ..., "bytes of Adam's state for nn.Linear(300, 100) in float32")


# %% tags=["exercise-0.1"]
from .ex1_training_bytes import training_bytes

# %%
with Ledger() as ledger, DEVICE:
    layer = nn.Linear(300, 100)
    optimizer = torch.optim.Adam(layer.parameters())
    ledger.watch(layer, optimizer)
    layer(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    measured = ledger.mark("step")["optimizer"]

outcome(
    "0.1",
    measured,
    slips={
        "each of the two parameter tensors has a step count of 4 bytes": measured - 8,
        "one step count for each parameter tensor, and there are two": measured - 4,
        "the bias has its state too": 8 * 300 * 100 + 4,
        "Adam keeps two buffers, exp_avg and exp_avg_sq": 4 * 30_100 + 8,
    },
)

# %% [markdown]
# ### Measured: what each optimizer keeps
#
# Now we measure a complete model: a small version of the course's GPT, trained with torch's own optimizers. `stages_of`
# runs the first training step of the model and reads the ledger at the end of each stage; the rest of the lab uses this
# function.

# %%
STAGES = ("built", "optimizer made", "forward", "backward", "step", "zero_grad")


def build(dtype: torch.dtype = torch.float32, layers: int = 2) -> GPT:
    torch.manual_seed(0)
    with DEVICE:
        return GPT(width=64, layers=layers).to(dtype)


def batch_of(rows: int) -> Tensor:
    """Return [rows, 24] tokens, also used as targets, because nothing here depends on their values."""
    return torch.arange(rows * 24, device=DEVICE).view(rows, 24) % 257


def stages_of(
    make_optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, set_to_none: bool = True
) -> dict[str, dict[str, int]]:
    """Return the bytes by tag at the end of each stage of a model's first training step."""
    tokens = batch_of(rows=2)
    with Ledger() as ledger:
        model = build(dtype)
        ledger.watch(model)
        marks = [ledger.mark("built")]
        optimizer = make_optimizer(model.parameters())
        ledger.watch(model, optimizer)
        marks.append(ledger.mark("optimizer made"))
        loss = model(tokens, tokens)
        marks.append(ledger.mark("forward"))
        loss.backward()
        del loss
        marks.append(ledger.mark("backward"))
        optimizer.step()
        marks.append(ledger.mark("step"))
        optimizer.zero_grad(set_to_none)
        marks.append(ledger.mark("zero_grad"))
    return dict(zip(STAGES, marks, strict=True))


NUMELS = [p.numel() for p in build().parameters()]
PSI = sum(NUMELS)
print(f"Ψ = {PSI:,} elements in {len(NUMELS)} parameter tensors")

# %% tags=["C3"]
print("                    parameters, gradients      optimizer state        bytes per element")
print("                     measured    expected    measured    expected       K        total")
for dtype in (torch.float32, torch.bfloat16):
    for name, make in OPTIMIZERS.items():
        found = stages_of(make, dtype)["step"]
        expected = training_bytes(NUMELS, dtype.itemsize, name)
        model_state = {tag: found[tag] for tag in expected}
        trained, wanted = (each["parameters"] + each["gradients"] for each in (found, expected))
        k, in_all = found["optimizer"] / PSI, sum(model_state.values()) / PSI
        print(
            f"{str(dtype).removeprefix('torch.'):9} {name:9} {trained:10,}  {wanted:10,}  {found['optimizer']:10,}"
            f"  {expected['optimizer']:10,}   {k:7.4f}   {in_all:7.4f}"
        )
        assert model_state == expected, f"{name}: measured {model_state}, expected {expected}"

# %% [markdown]
# The measured and the expected values agree to the byte. Column K reflects the buffers of the optimizer: none for SGD,
# one for momentum, two for Adam and three for AMSGrad. The decimals of Adam's K come from the step counts, 120 bytes
# here; no paper mentions them.
#
# This corrects two common mistakes. First, K is not a constant for Adam: it is 8 in pure float32 and 4 in pure
# bfloat16, and the ZeRO paper's value of 12 applies to mixed precision with a float32 copy. Second, "mixed precision
# halves the memory" is wrong for model state: pure float32 takes 4 + 4 + 8 = 16 bytes per element, and mixed precision
# takes 2 + 2 + 12 = 16 bytes as well. Between steps, when there are no gradients, pure float32 takes 12 bytes per
# element, and mixed precision takes 14.

# %%
for name, state in {
    "float32 throughout": training_bytes(NUMELS, 4, "adam"),
    "bfloat16, float32 copy": training_bytes(NUMELS, 2, "adam", master_copy=True),
}.items():
    print(f"{name:23}", {tag: round(size / PSI, 2) for tag, size in state.items()}, "bytes per element")

# %% [markdown]
# ## 0.2 The stages of ZeRO
#
# *8 minutes, medium*
#
# **The question.** 16 bytes times 7.5 billion is 120 GB, and every rank needs this much: data parallelism replicates
# the full model state, so N devices hold N identical copies. How much would each device hold if nothing were stored
# twice?
#
# ZeRO (*Zero Redundancy Optimizer*) *shards* tensors: it splits a tensor into N equal shards, and each rank keeps one
# shard. Stage 1 shards the optimizer state, stage 2 also shards the gradients, and stage 3 also shards the parameters.
# The computation is not divided: every rank still runs the full model on its own data. (ZeRO is therefore not a kind of
# tensor parallelism.)

# %%
predict("0.2", ..., "GB on each rank in stage 2, to one decimal: Ψ = 7.5 billion, N = 64, K = 12, 2 bytes per element")


# %% tags=["exercise-0.2"]
from .ex2_zero_stages import zero_stages

# %% [markdown]
# ### Derived: 120, 31.4, 16.6, 1.9 GB
#
# The cell compares your numbers with table 1 of the ZeRO paper, to one decimal, for every N in that table. It also
# compares them with the closed form of the course, which predicts the measurements from lab 03 onwards.

# %% tags=["C2"]
paper = {
    "replicated": {1: 120, 4: 120, 16: 120, 64: 120, 256: 120, 1024: 120},
    "stage 1": {1: 120, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1},
    "stage 2": {1: 120, 4: 41.3, 16: 21.6, 64: 16.6, 256: 15.4, 1024: 15.1},
    "stage 3": {1: 120, 4: 30, 16: 7.5, 64: 1.9, 256: 0.5, 1024: 0.1},
}
psi = 7_500_000_000
ours = {ranks: zero_stages(psi, ranks) for ranks in paper["replicated"]}
outcome(
    "0.2",
    round(ours[64]["stage 2"] / 1e9, 1),
    slips={
        "that is stage 1: in stage 2 the gradients are sharded too": 31.4,
        "that is stage 3: in stage 2 the parameters are still unsharded": 1.9,
        "that is in GiB": round(ours[64]["stage 2"] / 2**30, 1),
        "K stands for the float32 copy too: 12, not 8": round(zero_stages(psi, 64, k=8)["stage 2"] / 1e9, 1),
    },
)

setting = closed_form.Setting(64, itemsize=2, optimizer=closed_form.OptimizerState(12, 0))
course = {
    "replicated": closed_form.ddp([psi], setting),
    "stage 1": closed_form.zero1([psi], psi, setting),
    "stage 2": closed_form.zero2([psi], psi, setting),
    "stage 3": closed_form.fsdp([[psi]], setting),
}
print("N = 64        derived   the paper   the course    in GiB")
for stage, size in ours[64].items():
    other = course[stage].parameters + course[stage].gradients + course[stage].optimizer
    print(f"{stage:10} {size / 1e9:7.1f} GB {paper[stage][64]:8.1f} GB {other / 1e9:9.1f} GB {size / 2**30:7.1f} GiB")
    assert abs(size - other) < 1, f"{stage}: the closed form says {other:,}"
    for ranks, said in paper[stage].items():
        assert abs(ours[ranks][stage] / 1e9 - said) <= 0.051, f"{stage}, N = {ranks}: the paper says {said} GB"

floor = zero_stages(psi, 10**12)
plots.lines(
    {stage: (list(ours), [sizes[stage] / 1e9 for sizes in ours.values()]) for stage in paper},
    expected={stage: (list(points), list(points.values())) for stage, points in paper.items()},
    source="table 1 of the paper",
    xlabel="ranks N",
    ylabel="model state per rank, GB",
    title=f"On 64 ranks, stage 3 needs {ours[64]['stage 3'] / 1e9:.1f} of {ours[64]['replicated'] / 1e9:.0f} GB; "
    f"stages 1 and 2 level off at {floor['stage 1'] / 1e9:.0f} and {floor['stage 2'] / 1e9:.0f}",
    says="Lines: zero_stages for 7.5 billion parameters, K = 12. Diamonds: values of the paper, to 0.1 GB. Stages 1 "
    "and 2 level off at the state that they do not shard, 4Ψ and 2Ψ; only stage 3 falls as 1/N, a straight line here.",
    lab="00",
    logx=True,
    logy=True,
)

# %% [markdown]
# A GB in the paper is 10⁹ bytes. `nvidia-smi` and torch print MiB and GiB, so they show 120 GB as 111.8 GiB. The
# difference of 7 % can decide whether a model fits on a device.
#
# So far, this is arithmetic. It covers model state, but neither peak memory nor traffic. You will measure both in lab
# 03, which builds stages 1 and 2, and in lab 05, which builds stage 3.

# %% [markdown]
# ## 0.3 The Adam step
#
# *10 minutes, medium*
#
# **The question.** The optimizer state accounts for 12 of the 16 bytes. What is its purpose, and when is it allocated?
#
# For one parameter θ with gradient g, at step t = 1, 2, ..., Adam computes the following (algorithm 1 of the paper):
#
# $$m \leftarrow \beta_1 m + (1 - \beta_1)\, g \qquad v \leftarrow \beta_2 v + (1 - \beta_2)\, g^2$$
# $$\hat m = \frac{m}{1 - \beta_1^t} \qquad \hat v = \frac{v}{1 - \beta_2^t} \qquad
# \theta \leftarrow \theta - \text{lr}\,\frac{\hat m}{\sqrt{\hat v} + \epsilon}$$
#
# m and v start at zero. ε is added outside the square root. torch calls m `exp_avg` and v `exp_avg_sq`.
#
# Before you write this step, make a prediction. The GPT from above is trained in float32 with Adam, up to the first
# `step()` and a `zero_grad()`. How many bytes of parameters, gradients and optimizer state are allocated at this point?

# %%
predict("0.3", ..., f"bytes of model state after the first zero_grad: Ψ = {PSI:,} in {len(NUMELS)} tensors, float32")


# %% tags=["exercise-0.3"]
from .ex3_adam_step import adam_step

# %% [markdown]
# The optimizer around this function is only a loop. The base class `Optimizer` provides the rest: `self.state[p]` is a
# dict, initially empty, for every parameter.


# %% tags=["shown"]
class WrittenOutAdam(torch.optim.Optimizer):
    """A `torch.optim.Adam` that uses your `adam_step`."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    adam_step(p, p.grad, self.state[p])


# %% [markdown]
# ### Measured: when each tensor appears
#
# Your Adam and torch's Adam get the same gradients for five steps; your Adam works on views of one long tensor, as it
# will in lab 04. Then the ledger shows the bytes at the end of every stage of a first step.

# %% tags=["C36"]
model, tokens = build(), batch_of(rows=2)
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
views = [nn.Parameter(part) for part in flat.split(NUMELS)]  # writing to a view changes flat
theirs, mine = torch.optim.Adam(model.parameters(), foreach=False), WrittenOutAdam(views)
for _ in range(5):
    theirs.zero_grad()
    model(tokens, tokens).backward()
    for view, p in zip(views, model.parameters(), strict=True):
        view.grad = p.grad.flatten()
    mine.step()
    theirs.step()

apart = (flat - torch.cat([p.detach().flatten() for p in model.parameters()])).abs().max().item()
print("after 5 steps at lr = 0.001, the largest difference from torch.optim.Adam is below 1e-6:", apart < 1e-6)
assert apart < 1e-6, f"the written-out Adam is {apart:.1e} away from torch's"

stages = stages_of(WrittenOutAdam)
assert stages == stages_of(lambda params: torch.optim.Adam(params, foreach=False)), "torch's Adam holds other bytes"
state = training_bytes(NUMELS, 4, "adam")
p, g, o = state.values()
expected = {"built": p, "optimizer made": p, "backward": p + g, "step": p + g + o, "zero_grad": p + o}
for stage, sizes in stages.items():
    print(f"{stage:15}", {tag: size for tag, size in sizes.items() if size})
for stage, size in expected.items():
    assert sum(stages[stage].values()) == size, f"{stage}: expected {size:,} bytes"
outcome(
    "0.3",
    sum(stages["zero_grad"].values()),
    slips={
        "zero_grad frees the gradients: it sets them to None": p + g + o,
        "the optimizer state is there since the first step": p,
        "each parameter tensor has a step count of 4 bytes": 12 * PSI,
        "the parameters themselves are missing": o,
    },
)

# %%
plots.stages(
    stages,
    predicted=expected,
    title=f"Adam holds no state before its first step, and {o / p:.1f} times the parameters after it",
    says="Bars: live bytes at the end of each stage of the first step, float32, Adam. Diamonds: training_bytes. It "
    "does not count activations, so forward has no diamond.",
    lab="00",
    ylabel="memory",
)

# %% [markdown]
# Creating the optimizer allocates nothing: it only keeps references to the parameters. `backward` allocates the
# gradients and at the same time frees the saved activations; the first `step` allocates `exp_avg` and `exp_avg_sq`.
# Therefore, a job may run out of memory in its *second* forward pass: during the first forward pass, 8 bytes per
# element were not yet allocated. One successful training step does not prove that the next will succeed.
#
# **Break it.** Read a gradient before the backward pass; then zero the gradients instead of freeing them.

# %%
try:
    print(sum(p.grad.nbytes for p in build().parameters()))
except AttributeError as error:
    print("before backward:", error)

for set_to_none in (True, False):
    left = stages_of(WrittenOutAdam, set_to_none=set_to_none)["zero_grad"]["gradients"]
    print(f"zero_grad(set_to_none={set_to_none}) leaves {left:,} bytes of gradients")

# %% [markdown]
# With `set_to_none=False`, the default before torch 2.0, gradients are never freed, so they add to the activations,
# which peak at the end of the forward pass. With `set_to_none=True`, gradients and activations hardly overlap in time.
#
# **Break it.** An optimizer holds references to the parameters. What happens if the parameters
# change after the optimizer has been created?

# %%
with Ledger() as ledger, DEVICE:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.to(torch.bfloat16)
    (updated,) = optimizer.param_groups[0]["params"]
    print("the optimizer still holds the model's weight after .to(bfloat16):", updated is model.weight)
    model.weight = nn.Parameter(model.weight.float())
    print("the optimizer still holds the model's weight after a new Parameter:", updated is model.weight)
    ledger.watch(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    print("the step has changed the weight:", not torch.equal(before, model.weight))
    print(f"parameters: {ledger.mark('step')['parameters']:,} bytes, for a weight of {model.weight.nbytes:,}")

# %% [markdown]
# `Module.to` converts a parameter in place, so an existing optimizer still works, although existing optimizer state is
# not converted. But if a parameter is *replaced*, the optimizer keeps the old parameter: there is no error, the model
# does not learn, and the 8,192 bytes of the old weight stay allocated. So replace parameters before you create the
# optimizer. Sharding (lab 05) is such a replacement.

# %% [markdown]
# ### Measured: 2 + 2 + 12 bytes
#
# The next cell uses mixed precision as in the ZeRO paper: parameters and gradients are in bfloat16, and your
# `adam_step` updates a float32 copy of each parameter. The copies are allocated when the optimizer is created, and the
# moments in its first step.


# %%
class MixedPrecisionAdam(torch.optim.Optimizer):
    """Updates a float32 copy of each parameter, then rounds it into the parameter."""

    def __init__(self, params):
        super().__init__(params, {})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"copy": p.detach().float(), "adam": {}}

    @torch.no_grad()
    def step(self):
        for p, state in self.state.items():
            adam_step(state["copy"], p.grad, state["adam"])
            p.copy_(state["copy"])


# %% tags=["C1"]
mixed = stages_of(MixedPrecisionAdam, torch.bfloat16)
expected = training_bytes(NUMELS, 2, "adam", master_copy=True)
print("                 measured    expected   per element")
for tag, size in expected.items():
    print(f"{tag:12} {mixed['step'][tag]:12,} {size:11,} {size / PSI:13.4f}")
    assert mixed["step"][tag] == size, f"{tag}: expected {size:,} bytes"
ratio = [mixed["step"][tag] / mixed["step"]["parameters"] for tag in expected]
print("parameters : gradients : optimizer =", " : ".join(f"{each:.3f}" for each in ratio))
kept, kept_in_float32 = mixed["forward"]["activations"], stages["forward"]["activations"]
print(f"activations after forward, 2 sequences: {kept:,} bytes, in float32 {kept_in_float32:,}")

p, g, o = expected.values()
copy = 4 * PSI
held, in_float32 = (sum(each["step"].values()) for each in (mixed, stages))
plots.stages(
    mixed,
    predicted={"built": p, "optimizer made": p + copy, "backward": p + copy + g, "step": p + g + o, "zero_grad": p + o},
    earlier={"float32 throughout": {stage: sum(sizes.values()) for stage, sizes in stages.items()}},
    title=f"After a step, mixed precision holds {held / in_float32:.0%} of float32's bytes: "
    f"{held / PSI:.2f} per element",
    says="Bars: bfloat16 parameters with a float32 copy. Diamonds: predicted. Grey: totals in float32 throughout. "
    f"Activations shrink to {kept / kept_in_float32:.0%}, from {kept_in_float32 / 2**20:.2f} to {kept / 2**20:.2f} MiB."
    " But the copy exists from the start: the total after forward is no smaller, and the total after zero_grad is "
    "larger.",
    lab="00",
    ylabel="memory",
)

# %% [markdown]
# The ratio is 1 : 1 : 6, and the sum is 16 bytes per element. This well-known number is a **lower bound** on the memory
# from the end of the backward pass to `zero_grad`, because it does not include activations and temporaries; between
# steps, 14 bytes remain. Frameworks that accumulate gradients in float32 need 18 bytes (Megatron-LM's own table lists
# 16, 18 and 20). The step itself also needs memory. Every out-of-place operator allocates a temporary as large as the
# parameter. The denominator needs two temporaries at the same time: the square root of `exp_avg_sq`, and the quotient
# computed from this root. So with `foreach=False`, and in the reference answer, the peak includes two temporaries of
# the size of the largest parameter. With `foreach=True`, torch's default on a GPU, a few large operators update all
# parameters, and the temporaries are as large as all parameters together.

# %%
for name, make in {
    "yours": WrittenOutAdam,
    "torch, foreach=False": lambda params: torch.optim.Adam(params, foreach=False),
    "torch, foreach=True": lambda params: torch.optim.Adam(params, foreach=True),
}.items():
    with Ledger() as ledger:
        model = build()
        optimizer = make(model.parameters())
        ledger.watch(model, optimizer)
        model(tokens, tokens).backward()
        ledger.reset_peaks()
        optimizer.step()
        held, peak = sum(ledger.mark("step").values()), ledger.peak.total
    print(f"{name:20} holds {held / PSI:.2f} bytes per element after the step, {peak / PSI:.2f} at its peak")
print(f"two temporaries of the largest parameter: {2 * 4 * max(NUMELS) / PSI:.2f} bytes per element of the model")

# %% [markdown]
# **Break it: leave out the copy.** Why spend 4 bytes on a copy of an existing weight? Consider a weight with initial
# value 1 and a gradient of 1 in each of a hundred steps, so that Adam changes the weight by the learning rate, 0.001,
# in every step.

# %%
steps, lr = 100, 1e-3
gradient = torch.ones(1, dtype=torch.bfloat16)
alone, alone_state = torch.ones(1, dtype=torch.bfloat16), {}
copy, copy_state = torch.ones(1), {}
moved = {"bfloat16 alone": [0.0], "float32 copy, rounded": [0.0]}
with torch.no_grad():
    for _ in range(steps):
        adam_step(alone, gradient, alone_state, lr=lr)
        adam_step(copy, gradient, copy_state, lr=lr)
        moved["bfloat16 alone"].append(1 - alone.item())
        moved["float32 copy, rounded"].append(1 - copy.bfloat16().item())

below = 1 - torch.nextafter(torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)).item()
print_wrapped(
    f"bfloat16 has no number between {1 - below} and 1: a step of {lr} is less than half of the {below} between"
)
print("distance moved:", {name: round(values[-1], 4) for name, values in moved.items()})
lost = moved["bfloat16 alone"][-1]
plots.lines(
    {name: (list(range(steps + 1)), values) for name, values in moved.items()},
    expected={"exact": (list(range(0, steps + 1, 10)), [lr * t for t in range(0, steps + 1, 10)])},
    stairs=("float32 copy, rounded",),
    xlabel="step",
    ylabel="distance moved, 1 - weight",
    title=f"{steps} steps of {lr} "
    + (f"move a weight in bfloat16 by {lost:g}" if lost else "do not move a weight in bfloat16 at all"),
    says="A weight kept in bfloat16 loses every update to rounding. With a float32 copy, the weight moves; only its "
    "bfloat16 value, which forward uses, moves in steps.",
    lab="00",
)

# %% [markdown]
# The copy does more than improve the last digit: without it, the weight does not change at all. The same happens to
# `exp_avg_sq` in bfloat16, which should change by a thousandth of the remaining difference in every step. (Stochastic
# rounding and compensated summation avoid the copy, at the cost of noise and of another buffer, respectively.)

# %% [markdown]
# ## 0.4 What autograd keeps
#
# *10 minutes, medium*
#
# **The question.** In the first plot of 0.3, the bar for the forward pass had no diamond. What does this bar contain?
#
# To compute gradients, the backward pass needs values from the forward pass: a linear layer or a GELU needs its input,
# a softmax needs its result. An operator *saves* these values when it runs, and they stay in memory until the backward
# pass has used them. These saved values are the activations. They are not part of model state, and they grow with the
# number of tokens.
#
# A pair of hooks can intercept every saved tensor. Inside `with torch.autograd.graph.saved_tensors_hooks(pack,
# unpack):`, torch calls `pack(tensor)` for each saved tensor and keeps the result. In the backward pass, it calls
# `unpack` on that result, and `unpack` must return the tensor.
#
# Count the bytes of storages, not of tensors: two operators may save the same tensor, and a view keeps its entire
# storage alive. `tensor.untyped_storage()` returns this storage. Be careful with the return value of `pack`, because
# the graph keeps it alive. The result of an operator has a reference to the graph, so if `pack` returns such a result
# unchanged, there is a reference cycle, and the memory is not freed together with the loss.
#
# You can compute the prediction from a number printed above, under the table of 2 + 2 + 12: the bytes saved by 2
# sequences in bfloat16.

# %%
predict("0.4", ..., "sequences of 24 tokens, the fewest whose saved bytes exceed the 16Ψ of mixed precision")


# %% tags=["exercise-0.4"]
from .ex4_saved_bytes import saved_bytes

# %% [markdown]
# ### Measured: activations compared with model state
#
# The ledger provides an independent count: all memory allocated after the forward pass except parameters and gradients.
# Your counts for the first two batch sizes predict the counts for the other batch sizes.


# %% tags=["C35"]
def saved_by(model: GPT, tokens: Tensor) -> int:
    return saved_bytes(lambda: model(tokens, tokens), model)


numbers = (1, 2, 4, 8, 16, 24, 32, 48, 64)
found, counted = [], []
for rows in numbers:
    with Ledger() as ledger:
        model = build(torch.bfloat16)
        ledger.watch(model)
        tokens = batch_of(rows)
        counted.append(saved_by(model, tokens))
        loss = model(tokens, tokens)
        found.append(ledger.mark("forward")["activations"])
    assert counted[-1] == found[-1] - loss.nbytes, f"the ledger has {found[-1]:,} bytes, you count {counted[-1]:,}"

model_state = sum(training_bytes(NUMELS, 2, "adam", master_copy=True).values())
each = counted[1] - counted[0]
cross = next(rows for rows in range(1, 1000) if counted[0] + (rows - 1) * each > model_state)
print(f"one sequence: {counted[0]:,} bytes saved; model state: {model_state:,} bytes")
print(f"64 sequences: {counted[-1]:,} bytes saved, {counted[-1] / model_state:.2f} times the model state")
in_float32 = model_state // (2 * each) + 1
outcome("0.4", cross, slips={"twice the bytes per sequence: those of float32, or of 2 sequences": in_float32})
assert counted[-1] > 2 * model_state
plots.lines(
    {
        "activations, measured": (numbers, [size / 2**20 for size in found]),
        "model state, 16Ψ": (numbers, [model_state / 2**20] * len(numbers)),
    },
    expected={
        "predicted from 1 and 2 sequences": (numbers, [(counted[0] + (rows - 1) * each) / 2**20 for rows in numbers])
    },
    xlabel="sequences in the batch",
    ylabel="memory, MiB",
    title=f"From {cross} sequences of 24 tokens on, activations exceed the entire model state",
    says="Activations after forward against the batch size, measured by the ledger. Diamonds: saved_bytes of one "
    "sequence, and of each further sequence. Model state does not depend on the batch size.",
    lab="00",
)

# %% [markdown]
# So a step needs more than "16 bytes per parameter". How many bytes does one transformer block save? Add a layer and
# count again.

# %%
tokens, width = batch_of(rows=2), 64
two, three = (saved_by(build(torch.bfloat16, layers), tokens) for layers in (2, 3))
per_token = (three - two) / tokens.numel()
print(f"a block saves {per_token:.0f} bytes per token, which is {per_token / width:.2f} times its width")
assert abs(per_token / width - 32) < 2

# %% [markdown]
# Of these bytes, 32 are for 16 bfloat16 elements in each of the `width` channels: the inputs of two norms (2), their
# outputs, which are the inputs of `qkv` and `up` (2), q, k and v (3), the output of attention (1), the input of the
# GELU (4) and its output (4). The remaining 0.62 bytes per channel are 40 bytes per token: the means and standard
# deviations of the norms (8), and one float32 for each of 8 heads (32), which fused attention saves instead of the
# matrix of attention weights. Korthikanti et al. count 34 bytes, two of which are dropout masks, which this model does
# not have; the ZeRO paper (section 3.2) assumes 12 elements, or 24 bytes.
#
# A block has about 12 width² parameters, that is, 192 width² bytes of model state, compared with 32 width bytes of
# activations per token. So **activations exceed model state from about 6 × width tokens per rank on**, whatever the
# number of layers. If model state is sharded over N ranks, activations exceed it from 6 × width / N tokens on.

# %%
for name, width, ranks in (("this lab's", 64, 1), ("width 4,096", 4096, 1), ("width 4,096, stage 3", 4096, 64)):
    block = zero_stages(12 * width**2, ranks)["stage 3"]
    print(f"{name:21} N = {ranks:2}: more than {block / (32 * width):6,.0f} tokens")

# %% [markdown]
# For our GPT, this rule gives 384 tokens, or 16 sequences; the embeddings and the head, which the rule ignores, add to
# both sides. The last line shows why sharding alone is not enough: in stage 3 on 64 ranks, the activations of a tenth
# of a 4,096-token sequence outweigh the model state. Other methods reduce activations: smaller batches with gradient
# accumulation (lab 02), recomputation, and tensor or pipeline parallelism.

# %% [markdown]
# ## What is still missing
#
# This lab ran in one process. If a rank holds less than a replica's 16Ψ bytes, it must receive the missing values from
# other ranks. Lab 01 builds the collectives for this exchange, lab 02 builds data parallelism, which still replicates
# everything, and lab 03 builds the first two stages of ZeRO.
#
# ## What to remember
#
# 1. With Adam, model state takes 2Ψ + 2Ψ + 12Ψ bytes in mixed precision and 4Ψ + 4Ψ + 8Ψ bytes in pure float32: 16Ψ
#    bytes in both cases while gradients exist, without activations and temporaries. Between steps, 14Ψ bytes remain in
#    mixed precision, and 12Ψ bytes in float32.
# 2. K depends on the optimizer and on the dtype of the tensors that it updates: in float32, K is 0
#    for SGD, 4 for momentum, 8 for Adam and 12 for AMSGrad.
# 3. Gradients appear in `backward`, optimizer state in the first `step`; creating the optimizer
#    allocates nothing except, in mixed precision, the float32 copy.
# 4. Stage 1 of ZeRO divides the optimizer state by N, stage 2 also divides the gradients, and stage 3 divides
#    everything; only in stage 3 does the memory per rank have no lower bound.
# 5. None of this includes activations. They grow with the number of tokens and exceed model state from about 6 × width
#    tokens on.
#
# ## Questions
#
# **1. A model with 1.5 billion parameters is trained with Adam in mixed precision. How large is its model state? Why
# can a device with 32 GB still be too small?**
#
# <details><summary>Answer</summary>
#
# The model state takes 16 × 1.5 = 24 GB. For 1,024 tokens per sequence and a batch of 32, the ZeRO paper adds about 60
# GB of activations. Temporaries, communication buffers and fragmentation need further memory.
# </details>
#
# **2. The first step of a job succeeds, and the second runs out of memory. What changed in between?**
#
# <details><summary>Answer</summary>
#
# The first `optimizer.step()` allocated the optimizer state, 8 bytes per element in float32. It stays in memory during
# the second forward and backward pass.
# </details>
#
# **3. Under `torch.autocast`, the parameters stay float32 and operators cast them as needed. How
# large is the model state with Adam?**
#
# <details><summary>Answer</summary>
#
# Parameters, gradients and optimizer state are all in float32: again, 4 + 4 + 8 = 16 bytes per element. The bfloat16
# casts, which are cached while autocast is on, need additional memory.
# </details>
#
# **4. How much does stage 1 of ZeRO save if the optimizer is SGD without momentum?**
#
# <details><summary>Answer</summary>
#
# In float32, it saves nothing: K is 0, so there is no state to shard. In mixed precision, K is 4 because of the float32
# copy, and stage 1 shards this copy.
# </details>
#
# **5. Half of a model's parameters are frozen (`requires_grad=False`). Which terms shrink?**
#
# <details><summary>Answer</summary>
#
# The gradients and optimizer state of that half disappear: the backward pass computes no gradients for frozen
# parameters, and the optimizer keeps no state for a parameter without a gradient. The frozen parameters themselves stay
# in memory. Activations shrink less: a frozen linear layer no longer saves its input, but gradients still pass through
# it to earlier trainable layers.
# </details>
#
# ## Further reading
#
# - Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (arXiv 1910.02054),
#   sections 3 and 5, figure 1, table 1.
# - Micikevicius et al., *Mixed Precision Training* (arXiv 1710.03740), section 3.1: the float32 copy.
# - Kingma and Ba, *Adam* (arXiv 1412.6980), section 2: algorithm 1, and after it the shortened form with its own ε̂.
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models* (arXiv 2205.05198), section 4.
# - `torch/optim/adam.py`, `_single_tensor_adam` and `_multi_tensor_adam`; `torch/autograd/graph.py`,
#   `saved_tensors_hooks`.
