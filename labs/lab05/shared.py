"""What several exercises of lab 05 share."""

from collections import Counter
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.cost.data_parallel import SGD, Setting, fsdp
from minifsdp.course.workshop.checking import AnswerError, expect, on_ranks
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger


class LabUnit(Protocol):
    """The unit interface that `attach` may use; the notebook defines the class."""

    leaves: list[nn.Parameter]
    is_root: bool

    @property
    def whole(self) -> bool: ...
    def gather(self) -> None: ...
    def free(self) -> None: ...
    def take_gradient(self, leaf: Tensor) -> None: ...
    def reduce_gradient(self) -> None: ...


def compare_events(what, got, wanted, slip):
    """Reject unless the events are the wanted ones; names the first difference and what led there."""
    if got == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    before = f"after `{wanted[at - 1]}`" if at else "at the start"
    expected = f"`{wanted[at]}`" if at < len(wanted) else "nothing more"
    found = f"`{got[at]}`" if at < len(got) else "nothing more"
    lines = [f"{what}, {before} (event {at + 1}): expected {expected}, got {found}"]
    if slip:
        lines.append(f"likely slip: {slip}")
    raise AnswerError("\n".join(lines))


ITEM = 4  # bytes


def flat_parameter(seed, size, rank, ranks, where="cpu"):
    """Three parameters, 1 element more than a multiple of 12: padding on 2, 3 and 4 ranks. The same on every rank.

    Of size 0 it is one element in bfloat16, whose padding is more than a shard where there are three ranks; of a
    negative size it is two elements for each rank, without padding.
    """
    if size < 0:
        return FlatParameter(find_parameters(nn.ParameterList([torch.ones(2, ranks)]).to(where)), rank, ranks)
    if not size:
        gain = nn.ParameterList([torch.ones(1, dtype=torch.bfloat16)])
        return FlatParameter(find_parameters(gain.to(where)), rank, ranks)
    torch.manual_seed(seed)
    filler = -(3 * size + 5) % 12 + 1
    params = nn.ParameterList([torch.randn(3, size), torch.randn(5), torch.randn(filler)])
    return FlatParameter(find_parameters(params.to(where)), rank, ranks)


@contextmanager
def phases():
    """The issues and waits of collectives, in order."""
    seen: list[str] = []

    @contextmanager
    def watcher(call, phase):
        seen.append(f"{phase} {call.op}")
        yield

    comm.observers.append(watcher)
    try:
        yield seen
    finally:
        comm.observers.remove(watcher)


def nbytes(tensor):
    return tensor.untyped_storage().nbytes()


def values(tensor):
    """A copy of what is in it; None if there is no memory behind it."""
    if not isinstance(tensor, torch.Tensor) or nbytes(tensor) < tensor.numel() * tensor.element_size():
        return None
    return tensor.detach().cpu().clone()


class Op(torch.autograd.Function):
    """`x * w`, told to the log with whether the unit's parameters are there."""

    @staticmethod
    def forward(ctx, x, w, unit):
        ctx.save_for_backward(x, w)
        ctx.unit = unit
        unit.tell("forward")
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        ctx.unit.tell("backward")
        return gradient * w, (gradient * x).sum(0), None


REVERSED = ("1",)  # units that use their leaves in the opposite order, so that neither end of the list comes last


class Recorder:
    """A unit without memory, which writes down what is done to it."""

    def __init__(self, name, log, is_root=False):
        self.name, self.log, self.is_root = name, log, is_root
        self.leaves = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        self.uses = self.leaves[::-1] if name in REVERSED else self.leaves
        self.whole, self.taken = False, 0

    def tell(self, what):
        self.log.append(f"{what} {self.name}" + ("" if self.whole else " while sharded"))

    def gather(self):
        self.log.append(f"gather {self.name}")
        self.whole = True

    def free(self):
        self.log.append(f"free {self.name}")
        self.whole = False

    def take_gradient(self, leaf):
        assert leaf.grad is not None, f"take_gradient of a leaf of unit {self.name} that has no .grad"
        held = sum(each.grad is not None for each in self.leaves)
        if held > 1:
            self.log.append(f"{held} leaves of {self.name} hold a gradient at once")
        leaf.grad = None
        self.taken += 1

    def reduce_gradient(self):
        short = "" if self.taken == len(self.leaves) else f" with {self.taken} of {len(self.leaves)} leaves' gradients"
        self.log.append(f"reduce {self.name}{short}")
        self.taken = 0


class Toy(nn.Module):
    """A unit's module: two operations, each with one of the leaves, and other units between them."""

    def __init__(self, unit, inner=()):
        super().__init__()
        self.unit, self.inner, self.detaches = unit, nn.ModuleList(inner), False

    def forward(self, x):
        first, last = self.unit.uses
        x = Op.apply(x, first, self.unit)
        for module in self.inner:
            x = module(x)
        x = Op.apply(x, last, self.unit)
        return x.detach() if self.detaches else x


def recorded(attach, calls):
    """By phase, what happens to a root and the units in it, as forward calls them."""
    log: list[str] = []
    units = {name: Recorder(name, log) for name in calls}
    toys = {name: Toy(unit) for name, unit in units.items()}
    root = Recorder("root", log, is_root=True)
    model = Toy(root, [toys[name] for name in calls])
    for module, unit in ((model, root), *zip(toys.values(), units.values(), strict=True)):
        attach(module, unit)
    said = {}
    for phase in PHASES:
        log.clear()
        model.train("eval mode" not in phase)
        model.detaches = "detached" in phase
        with torch.set_grad_enabled("no_grad" not in phase):
            losses = [model(torch.ones(3, 2)).sum() for _ in range(1 + ("two forward" in phase))]
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        said[phase] = list(log)
    return said


PHASES = (
    "first step",
    "second step",
    "a forward under torch.no_grad()",
    "a step after an evaluation",
    "a step in eval mode",
    "two forward passes, then their two backward passes",
    "a forward with a detached output",
)


def expected_events(kept_after_forward, calls):
    """By phase; those of the last two for units that are freed after forward."""
    forward, evaluation, backward = ["gather root", "forward root"], ["gather root", "forward root"], ["backward root"]
    for before, name in pairwise([None, *calls]):
        computed = [f"gather {name}", f"forward {name}", f"forward {name}"]
        if kept_after_forward:
            forward += computed[1:] if name == before else computed
        else:
            forward += [*computed, f"free {name}"]
        evaluation += [*computed, f"free {name}"]
    for name, in_a_row in groupby(reversed(calls)):
        backward += [] if kept_after_forward else [f"gather {name}"]
        backward += [f"backward {name}"] * 2 * len(list(in_a_row)) + [f"free {name}", f"reduce {name}"]
    forward, backward = [*forward, "forward root"], [*backward, "backward root", "free root", "reduce root"]
    found = {phase: [*forward, *backward] for phase in PHASES}
    for phase in found:
        if "no_grad" in phase or "detached" in phase:
            found[phase] = [*evaluation, "forward root", "free root"]
        elif "two forward" in phase:
            found[phase] = [*forward, *forward[1:], *backward, "gather root", *backward]
    return found


def why_attach(phase, got, kept_after_forward):
    """The slip behind a wrong order of events."""
    count = Counter(got)
    if "eval mode" in phase:
        return "`module.training` says nothing of a backward: `output.requires_grad` does"
    if "detached" in phase:
        return "with gradients enabled, a backward follows only where the output requires a gradient"
    if "two forward" in phase:
        if count["gather root"] > 2:
            return TWICE
        return "a second forward may come before the first one's backward: what a forward sets, it must not set again"
    if "after an evaluation" in phase:
        return "what an evaluation has set is there in the next step: ask each forward's own output"

    def at(event):
        return got.index(event) if event in got else len(got)

    if not any(event.startswith("gather") for event in got):
        return "nothing is gathered: hook `unit.gather` to run before the module's forward"
    if any(event.startswith("forward") and event.endswith("sharded") for event in got):
        return "a unit computes in forward without its parameters: gather in a forward pre-hook, free in a forward hook"
    if "no_grad" in phase:
        return "no backward follows a forward under no_grad, so nobody else will free what it gathered"
    if not any(event.startswith("free") for event in got):
        return "nothing is ever freed: every rank keeps the whole model, which is DDP"
    if count["reduce 1"] == 0 and phase == "second step":
        return "the first backward has used up the count of missing leaves: start the next one with all of them again"
    if count["reduce 1 with 1 of 2 leaves' gradients"] > 1:
        return "reduced at every leaf: the unit's gradient is complete with the last of them, and is one message"
    if any(event.endswith("at once") for event in got):
        return (
            "gradients wait in their leaves, a second copy of the unit's: each leaf's own hook calls "
            "`unit.take_gradient(leaf)`"
        )
    reduced = [event for event in got if event.startswith("reduce")]
    if reduced and all(" with 0 of " in event for event in reduced):
        return "no gradient was handed over: call `unit.take_gradient(leaf)` in each leaf's hook"
    if any(" with 1 of " in event for event in reduced):
        return (
            "leaves' gradients do not arrive in the order of the list: the unit ends when all have come, so count them"
        )
    if any("leaves" in event for event in reduced):
        return (
            "reduced before all leaves had their gradient: a module's backward hook knows of its inputs alone; the "
            "end of a unit is the last of its leaves"
        )
    sharded = next((i for i, e in enumerate(got) if e.startswith("backward") and e.endswith("sharded")), None)
    if sharded is not None:
        return why_sharded(got, sharded, got[sharded].split()[1], kept_after_forward)
    backward = at("backward root")
    if kept_after_forward:
        if at("free 0") < backward:
            return "freed after forward, which is FULL_SHARD: keep it until the unit's backward is over"
        if count["gather 1"] > 1:
            return "it is still unsharded: SHARD_GRAD_OP gathers once a step"
    else:
        if count["free 1"] == 1 and at("free 1") > backward:
            return "kept unsharded from forward to backward, which is SHARD_GRAD_OP: free after forward"
        if count["gather root"] > 1:
            return "the root's backward begins at once, and lasts to the end: it stays unsharded"
    if "free 1" not in got[backward:]:
        return (
            "unsharded after backward: what is kept between steps is not sharded, and out of date after the optimizer"
        )
    if at("reduce 1") > at("backward 0"):
        return "reduced only when others' backward has run: their unsharded gradients pile up to a whole model's"
    if "free 1" in got[at("reduce 1") :]:
        return "free first: the reduction reads the gradient alone, and the parameters would stay in memory during it"
    return None


TWICE = (
    "a unit's backward has two beginnings and one end then: gather it only if it is not unsharded yet, and count leaves"
)
GATHERED_TWICE = "a unit that is called again is unsharded already: gather it only if it is not"


def why_sharded(got, event, name, kept_after_forward):
    """Why a unit's backward runs while it is sharded."""
    gathers = [i for i, each in enumerate(got) if each == f"gather {name}"]
    if not kept_after_forward:
        if name == "root" and got.index("free root") < got.index("backward root while sharded") == event:
            first = next(i for i, each in enumerate(got) if each.startswith("backward"))
            if first == event:
                return "the root's backward begins at once, and lasts to the end: it stays unsharded"
        if len(gathers) > 1 and gathers[1] > event:
            return "gathered again only after the unit's backward: hook the gradient of the output, not of the input"
        if len(gathers) == 1 and name != "root":
            return "freed after forward and not gathered again: backward reads the parameters too"
    return "freed before the last use: gradients of the unit were still to come, and they read its parameters"


def check_events(answer, kept_after_forward):
    plain, again = recorded(answer, "012"), recorded(answer, "0112")
    wanted, wanted_again = (expected_events(kept_after_forward, calls) for calls in ("012", "0112"))
    for phase in PHASES[:5]:
        compare_events(phase, plain[phase], wanted[phase], why_attach(phase, plain[phase], kept_after_forward))
    slip = GATHERED_TWICE if kept_after_forward else TWICE
    for phase in PHASES[:5]:
        compare_events(f"unit 1 called twice in a row, {phase}", again[phase], wanted_again[phase], slip)
    for phase in () if kept_after_forward else PHASES[5:]:
        compare_events(phase, plain[phase], wanted[phase], why_attach(phase, plain[phase], kept_after_forward))


class Sharded:
    """A unit of real memory, for the checks alone."""

    def __init__(self, module, inner, group, is_root):
        self.group, self.is_root, self.gradient = group, is_root, None
        self.flat = FlatParameter(find_parameters(module, skip=inner), group.rank(), group.size())
        self.leaves = [nn.Parameter(view) for view in self.flat.views]
        for leaf, places in zip(self.leaves, self.flat.places, strict=True):
            for place in places:
                del place.module._parameters[place.attribute]
                place.module.__dict__[place.attribute] = leaf
        module.register_parameter("flat", self.flat.shard)

    @property
    def whole(self):
        return device.is_allocated(self.flat.full)

    def gather(self):
        device.allocate(self.flat.full)
        comm.all_gather(self.flat.full.data, self.flat.shard.data, self.group).wait()

    def free(self):
        device.free(self.flat.full)

    def take_gradient(self, leaf):
        if self.gradient is None:
            size, shard = self.flat.numel + self.flat.padding, self.flat.shard
            self.gradient = device.empty(size, shard.dtype, "gradients", shard.device)
            self.gradient.zero_()
        index = next(i for i, each in enumerate(self.leaves) if each is leaf)
        self.flat.unflatten(self.gradient)[index].copy_(leaf.grad)
        leaf.grad = None

    def reduce_gradient(self):
        gradient, self.gradient = self.gradient, None
        mean = device.empty(self.flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
        comm.reduce_scatter(mean, gradient, self.group, comm.MEAN).wait()
        device.free(gradient)
        if self.flat.shard.grad is None:
            self.flat.shard.grad = mean
        else:
            self.flat.shard.grad += mean
            device.free(mean)


class Layers(nn.Module):
    """A root with a parameter before and one behind its blocks, of unequal odd sizes."""

    def __init__(self, seed, size):
        super().__init__()
        torch.manual_seed(seed)
        hidden = [size, 2 * size + 1, size + 2]
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(5), nn.Linear(5, h), nn.Tanh(), nn.Linear(h, 5)) for h in hidden
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


def rows(seed, step, ranks):
    return torch.randn(2 * ranks, 5, generator=torch.Generator().manual_seed(100 * seed + step)).chunk(ranks)


class Trained(NamedTuple):
    calls: list[str]
    after_forward: int
    after_backward: int
    peak: int
    gradients: list[torch.Tensor]


def observe_training(attach, seed, size):
    """The second of two steps of SGD."""
    group, where = comm.world(), rank_device()
    with Ledger() as ledger:
        model = Layers(seed, size).to(where)
        blocks = list(model.blocks)
        units = [Sharded(model, blocks, group, True)] + [Sharded(block, (), group, False) for block in blocks]
        for module, unit in zip((model, *blocks), units, strict=True):
            attach(module, unit)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ledger.watch(model, optimizer)
        for step in range(2):
            ledger.reset_peaks()
            optimizer.zero_grad()
            with comm.record() as calls:
                loss = model(rows(seed, step, group.size())[group.rank()].to(where))
                after_forward = ledger.mark("forward")["unsharded"]
                loss.backward()
            after_backward = ledger.mark("backward")["unsharded"]
            gradients = [values(unit.flat.shard.grad) for unit in units]
            optimizer.step()
    return Trained([c.op for c in calls], after_forward, after_backward, ledger.peak_of("unsharded"), gradients)


def check_training(answer, variant, kept_after_forward):
    ranks = variant.ranks
    seen = on_ranks(ranks, observe_training, answer, variant.seed, variant.size, timeout=8)
    model = Layers(variant.seed, variant.size)
    blocks = list(model.blocks)
    root = list(find_parameters(model, skip=blocks))
    units = [root, *(list(block.parameters()) for block in blocks)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.cat(rows(variant.seed, step, ranks))).backward()
        gradients = [torch.cat([p.grad.flatten() for p in unit]) for unit in units]
        optimizer.step()
    padded = [-(-len(gradient) // ranks) * ranks for gradient in gradients]
    number = len(units)
    gathers = number if kept_after_forward else 2 * number - 1
    held = ITEM * (sum(padded) if kept_after_forward else padded[0])
    sizes = [[p.numel() for p in unit] for unit in units]
    peak = held if kept_after_forward else ITEM * (padded[0] + max(padded[1:]))
    if ranks > 1:  # on one rank the closed form shards nothing
        setting = Setting(ranks, optimizer=SGD)
        peak = fsdp(sizes, setting, reshard_after_forward=not kept_after_forward).unsharded_peak
    for rank, found in enumerate(seen):
        calls = Counter(found.calls)
        expect("all-gathers of a step", calls["all_gather"], gathers, rank=rank)
        expect("reduce-scatters of a step", calls["reduce_scatter"], number, rank=rank)
        expect("unsharded bytes after forward", found.after_forward, held, rank=rank)
        expect(
            "unsharded bytes after backward", found.after_backward, 0, rank=rank, slip="something is still unsharded"
        )
        expect("unsharded bytes at the peak", found.peak, peak, rank=rank)
        for got, gradient, size in zip(found.gradients, gradients, padded, strict=True):
            wanted = torch.zeros(size)
            wanted[: len(gradient)] = gradient
            mine = wanted.chunk(ranks)[rank]
            expect("`flat.shard.grad` beside one process with all data", got, mine, rank=rank, tolerance=1e-4)
