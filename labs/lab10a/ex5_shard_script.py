"""Exercise 10a.5: From DDP to FSDP."""

from collections.abc import Callable
from zlib import crc32

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger


@reference(
    "10a.5",
    hints=(
        "Five things, in this order: where the model is built, which modules are units, who gives them values, where "
        "they compute, and the optimizer last.",
        "`with torch.device('meta'): model = build()`; then `FullyShardedDataParallel(model, auto_wrap_policy=blocks, "
        "param_init_fn=make_init(model), device_id=where)`; then the optimizer over what *its* `parameters()` are.",
    ),
)
def shard_script(
    build: Callable[[], nn.Module],
    blocks: set[type[nn.Module]],
    make_init: Callable[[nn.Module], Callable[[nn.Module], None]],
    where: torch.device,
) -> tuple[FullyShardedDataParallel, Optimizer]:
    """Replace `model = DDP(build())` and `optimizer = AdamW(model.parameters(), lr=1e-3)`.

    Args:
        build: creates the model on the default device (`with torch.device(...)`); call it once.
        blocks: the classes of the modules that become units. All tied parameters are outside these modules.
        make_init: takes the model before it is wrapped and returns its `param_init_fn`.
        where: the device to compute on.

    Returns:
        The model under FULL_SHARD and its AdamW with lr=1e-3. A rank never holds the full model: its memory peaks at
        its shards plus two units.
    """
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Tiny(nn.Module):
    """A model with a tied head; ends in its loss."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(4)))
        self.head = nn.Linear(width, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.layers(self.embed(tokens))).flatten(0, 1), tokens.flatten())


def init_tiny(model):
    """A param_init_fn; not what `reset_parameters` does."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def init(module):
        own = list(module.parameters(recurse=False))
        if own:
            module.to_empty(device=rank_device(), recurse=False)
            torch.manual_seed(crc32(names[module].encode()))
            for p in module.parameters(recurse=False):
                p.copy_(torch.empty(p.shape, device="cpu").normal_(std=0.1))  # a GPU draws other numbers from a seed

    return init


def rows(seed, rank, step):
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(100 * seed + 10 * rank + step))


STEPS = 3
OPTIONS = ("betas", "eps", "weight_decay", "amsgrad", "maximize")


def observe_script(answer, seed, width):
    """What the script builds, what it costs to build, and how it trains."""
    group, built, where = comm.world(), [], rank_device()
    if where.type == "cpu":
        where = torch.device("cpu", 0)  # not the `cpu` that is found without a word on it

    def build():
        built.append(Tiny(width))
        return built[-1]

    found = {}
    with Ledger() as ledger:
        with comm.record() as calls:
            made = answer(build, {Layer}, init_tiny, where)
        found["peak"] = ledger.peak.total
    found["built"], found["sent"] = len(built), sum(call.payload for call in calls if call.op == "broadcast")
    if not (isinstance(made, tuple) and len(made) == 2):
        found["made"] = f"an object of type {type(made).__name__}"
        return found
    model, optimizer = made
    found["made"] = [type(model).__name__, type(optimizer).__name__]
    if not isinstance(model, FullyShardedDataParallel):
        return found
    found["training"] = all(module.training for module in model.modules())
    instances = FullyShardedDataParallel.fsdp_modules(model)
    found["units"] = sorted(type(each.module).__name__ for each in instances)
    found["strategies"] = sorted({each.sharding_strategy.name for each in instances})
    held = [p for each in optimizer.param_groups for p in each["params"]]
    found["held"], found["mine"] = sum(p.numel() for p in held), {id(p) for p in held} == {*map(id, model.parameters())}
    found["rate"] = [each["lr"] for each in optimizer.param_groups]
    found["options"] = [{name: each[name] for name in OPTIONS} for each in optimizer.param_groups]
    found["where"] = sorted({str(each.compute_device) for each in instances} - {str(where)})
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for step in range(STEPS):
        loss = model(rows(seed, group.rank(), step).to(rank_device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found["trains"] = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    half, _ = answer(lambda: Tiny(width).to(torch.bfloat16), {Layer}, init_tiny, where)
    found["dtypes"] = sorted({str(p.dtype) for p in half.parameters()})
    mean = torch.stack(losses)
    comm.all_reduce(mean, group, comm.MEAN).wait()
    found["losses"] = mean.tolist()
    return found


def train_alone(seed, width, ranks):
    """One process with all rows, from the same values."""
    model = Tiny(width)
    with torch.no_grad():
        for name, module in reversed(list(model.named_modules())):  # the first place of the tied weight counts
            own = list(module.parameters(recurse=False))
            torch.manual_seed(crc32(name.encode()))
            for p in own:
                p.normal_(std=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = model(torch.cat([rows(seed, rank, step) for rank in range(ranks)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def padded(numel, ranks):
    return -(-numel // ranks) * ranks


BEFORE = "the optimizer has the parameters of before wrapping: nobody computes with those, and it trains nothing"
REFUSED = {
    "the optimizer was built before wrapping": BEFORE,
    "are one parameter, but they would be in two units": "only `blocks` are units: the tied head and the embedding "
    "both stay with the root",
    "Cannot copy out of meta tensor": "`torch.device('meta')` is for `build` alone: what is made later needs memory",
    "param_init_fn left on the meta device": "the function that `make_init` returns is for the modules of the model "
    "that you wrap: give it the same one",
}


@check("10a.5")
def check_shard_script(answer, variant):
    """Units, bytes of construction, what the optimizer holds, and the losses of one process."""
    ranks, width = variant.ranks, 8 + variant.size
    try:
        seen = on_ranks(ranks, observe_script, answer, variant.seed, width, timeout=15)
    except AnswerError as error:
        slip = next((slip for text, slip in REFUSED.items() if text in str(error)), None)
        raise AnswerError(f"{error}\nlikely slip: {slip}" if slip else str(error)) from error
    root, layer = 11 * width + 11, 4 * width * width + 3 * width
    shards = (4 * padded(layer, ranks) + padded(root, ranks)) // ranks
    losses = train_alone(variant.seed, width, ranks)
    whole = root + 4 * layer
    for rank, found in enumerate(seen):
        expect("times that build was called", found["built"], 1, rank=rank)
        expect(
            "what is returned",
            found["made"],
            ["FullyShardedDataParallel", "AdamW"],
            rank=rank,
            slip="the script's optimizer is AdamW: another one is another training"
            if found["made"][:1] == ["FullyShardedDataParallel"]
            else "the wrapped model and its optimizer, in this order",
        )
        expect(
            "units",
            found["units"],
            ["Layer"] * 4 + ["Tiny"],
            rank=rank,
            slips={"without a policy all of it is one unit, whole from forward to the end of backward": ["Tiny"]},
            slip="the modules whose class is in `blocks`, and the root",
        )
        expect(
            "strategies",
            found["strategies"],
            ["FULL_SHARD"],
            rank=rank,
            slips={
                "which is DDP in FSDP's clothes": ["NO_SHARD"],
                "parameters that stay whole from forward to backward": ["SHARD_GRAD_OP"],
            },
        )
        most = 4 * (shards + 2 * padded(layer, ranks)) + 4 * 64
        if found["peak"] > most:
            raise AnswerError(
                f"rank {rank}, bytes at the peak of construction: expected at most {most:,} (shards and two units), "
                f"got {found['peak']:,}\nlikely slip: the whole model, {4 * whole:,} bytes, was in memory: build it on "
                "meta and let FSDP materialize one unit at a time"
            )
        slip = "every rank computes the same values from `make_init`: there is nothing to send"
        expect("bytes broadcast by the wrapping", found["sent"], 0, rank=rank, slip=slip)
        slip = "the shards of the flat parameters, which are what `parameters()` of the wrapped model are"
        expect("elements the optimizer holds", found["held"], shards, rank=rank, slips={BEFORE: whole}, slip=slip)
        expect("the optimizer holds what model.parameters() are", found["mine"], True, rank=rank, slip=BEFORE)
        expect("learning rates", found["rate"], [1e-3], rank=rank, slip="the script's was 1e-3")
        slip = "the script's model is in training mode, as DDP's is: `eval` switches dropout off"
        expect("modules in training mode, all of them", found["training"], True, rank=rank, slip=slip)
        slip = "`build` decides on the dtype: wrapping casts nothing"
        expect("dtypes of the shards of a model in bfloat16", found["dtypes"], ["torch.bfloat16"], rank=rank, slip=slip)
        options = {name: AdamW([torch.ones(1)]).defaults[name] for name in OPTIONS}
        slip = "of AdamW's options the script says lr alone: leave the others as they are"
        expect("options of the optimizer", found["options"], [options], rank=rank, slip=slip)
        slip = "`device_id=where`: otherwise it computes where the process group happens to be"
        expect("devices other than `where` that units compute on", found["where"], [], rank=rank, slip=slip)
        expect("three steps change the parameters", found["trains"], True, rank=rank, slip=BEFORE)
        slip = (
            "other values at the start: `reset_parameters` is not how this model is initialized, `make_init` says how"
        )
        expect("mean losses of three steps", found["losses"], losses, rank=rank, slip=slip, tolerance=1e-5)
