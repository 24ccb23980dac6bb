"""The checks of lab 05."""

from collections import Counter
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import Variable

from minifsdp import comm, device
from minifsdp.cost.data_parallel import SGD, Setting, fsdp
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

# 5.1 Hooks


class Middle(nn.Module):
    """What is watched: two layers, so that its gradients do not come all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


ENDS_TWICE = (
    "the callback is queued once per output: queue it once per backward, whatever the number of outputs that get a "
    "gradient"
)
TOO_EARLY = (
    "`p.register_hook` sees a gradient before it is in `.grad`; `register_post_accumulate_grad_hook` runs when it is "
    "there, and once, however often the parameter was used"
)
END_EARLY = (
    "the last parameter of this module is not the end of backward, the modules before it still follow: let "
    "`queue_callback` tell"
)
NO_PARAMETERS = (
    "a module's backward hook runs when the gradients of its inputs are known and says nothing of its parameters: they "
    "need a hook each"
)


@check("5.1")
def check_watch(answer, variant):
    """Every event in its place, in two steps, with the module called twice, and in evaluation."""
    for calls in (1, 2):
        watched, expected = Middle(), Middle()
        for step in ("first step", "second step"):
            got, wanted = events_of(watched, answer, calls, step), events_of(expected, observe, calls, step)
            wanted_and_calls = "" if calls == 1 else ", the module called twice in it"
            compare_events(f"{step}{wanted_and_calls}", got, wanted, why_watch(got, wanted))
    for what, run in MORE.items():
        got, wanted = events_in(watched, run), events_in(expected, run)
        compare_events(what, got, wanted, SLIPS.get(what) or why_watch(got, wanted))
    frozen, expected = nn.Tanh(), nn.Tanh()
    for module, attach in ((frozen, answer), (expected, observe)):
        module.log = []
        attach(module, module.log.append)
    compare_events("a module that trains nothing", events_in(frozen, alone), events_in(expected, alone), NO_GRADIENT)
    compare_events("two modules in one model", *(side_by_side(by) for by in (answer, observe)), SHARED)


def events_of(module, attach, calls, step):
    """What `module` records in one step of a model that has it in its middle; it is hooked in the first."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    if step == "first step":
        module.log = []
        result = attach(module, lambda event: module.log.append(described(event, module, first)))
        module.result = result
    module.log.clear()
    module.first = [first]  # in a list, so that it is no submodule
    last.weight.register_post_accumulate_grad_hook(lambda p: module.log.append("(the layer behind has its gradient)"))
    first.weight.register_post_accumulate_grad_hook(lambda p: module.log.append("(the layer before has its gradient)"))
    x = first(torch.ones(2, 3))
    for _ in range(calls):
        x = module(x)
    last(x).sum().backward()
    return list(module.log)


def events_in(module, run):
    module.log.clear()
    run(module)
    return list(module.log)


def in_evaluation(module):
    with torch.no_grad():
        alone(module)


def alone(module):
    try:
        module(torch.ones(2, 3))
    except RuntimeError as error:
        module.log.append(f"RuntimeError: {error}")


def in_eval_mode(module):
    module.eval()(torch.ones(2, 3)).sum().backward()
    module.train()


def one_by_one(module):
    first, second = module(torch.ones(2, 3)), module(torch.ones(2, 3))
    second.sum().backward()
    first.sum().backward()


MORE = {
    "under torch.no_grad()": in_evaluation,
    "in eval mode, with a backward": in_eval_mode,
    "called twice, and then a backward of each": one_by_one,
}
SLIPS = {
    "in eval mode, with a backward": "`module.training` says nothing of a backward: `output.requires_grad` does",
    "called twice, and then a backward of each": "the end belongs to each backward: queue it at the first of its "
    "outputs' gradients, whichever call that is, and let the flag fall at the end",
}
NO_OUTPUT = (
    "the output has no hook: register one on it in the forward hook; its gradient begins the module's backward, and is "
    "where the callback is queued"
)
NO_GRADIENT = "an output without a gradient cannot be hooked: ask `output.requires_grad`, whatever mode it is"
SHARED = "each watched module has a state of its own: a default argument is made once, and shared by all calls"


def side_by_side(attach):
    """What two watched modules record in one step, one after the other."""
    modules = [Middle(), Middle()]
    for module in modules:
        module.log = []
        attach(module, module.log.append)
    modules[1](modules[0](torch.ones(2, 3))).sum().backward()
    return modules[0].log + modules[1].log


def described(event, module, first):
    """The event, and whether the gradient that it speaks of is there."""
    if not isinstance(event, str):
        raise AnswerError(f"record() takes the event's name, a str; it got an object of type {type(event).__name__}")
    parameters = dict(module.named_parameters())
    p = parameters.get(event.removeprefix("gradient of "))
    if event.startswith("gradient of ") and p is not None and p.grad is None:
        return f"{event}, which is not in .grad yet"
    return event


def observe(module, record):
    """The same by other means: a counter of what is in flight in place of a flag."""
    state = {"backward": -1}

    def on_output(gradient):
        record("output gradient")
        task = torch._C._current_graph_task_id()
        if state["backward"] != task:
            state["backward"] = task
            Variable._execution_engine.queue_callback(lambda: record("end of backward"))

    def post_forward(module, args, output):
        record("post-forward")
        if output.requires_grad:
            output.register_hook(on_output)

    def name_of(p):
        return next(name for name, each in module.named_parameters() if each is p)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post_forward)
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: record(f"gradient of {name_of(p)}"))


def why_watch(got, wanted):
    ours, theirs = Counter(wanted), Counter(got)
    if any("not in .grad yet" in event for event in got):
        return TOO_EARLY
    if any(event.startswith("RuntimeError") for event in got):
        return NO_GRADIENT
    gradients = [event for event in got if event.startswith("gradient of ")]
    if any(theirs[event] > ours[event] for event in gradients):
        return "each hook needs its own name: a lambda made in a loop sees the loop's last one unless you bind it"
    if theirs["end of backward"] > ours["end of backward"]:
        return ENDS_TWICE
    if not gradients:
        return NO_PARAMETERS
    if "end of backward" in got and got[-1] != "end of backward":
        return END_EARLY
    if "output gradient" in ours and "output gradient" not in theirs:
        return NO_OUTPUT
    if theirs["end of backward"] < ours["end of backward"]:
        return "backward has ended and nobody said so: the flag that keeps the callback single has to fall at its end"
    if theirs["output gradient"] < ours["output gradient"]:
        return "every call of the module has an output of its own: hook each, in the forward hook"
    return None


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


# 5.2 to 5.4: one flat parameter

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


class Gathered(NamedTuple):
    calls: list[tuple[str, int]]
    phases: list[str]
    views: list[Any]
    full: Any
    shard: torch.Tensor
    unsharded: int
    peak: int
    version: int


def observe_gather(answer, seed, size):
    group, where = comm.world(), rank_device()
    rank, ranks = group.rank(), group.size()
    with Ledger() as ledger:
        flat = flat_parameter(seed, size, rank, ranks, where)
        buffer = flat.full
        flat.shard.data.add_(rank + 1)  # as after a step of the optimizer
        ledger.reset_peaks()
        before = sum(ledger.live().values())
        with comm.record() as calls, phases() as seen:
            answer(flat, group)
        unsharded, peak = ledger.live()["unsharded"], ledger.peak.total - before
    views, full, shard = [values(view) for view in flat.views], values(buffer), values(flat.shard)
    device.free(buffer)
    version = flat.views[0]._version
    answer(flat, group)  # once more without the ledger, under which no collective counts as a change
    version = flat.views[0]._version - version
    comm.all_reduce(torch.zeros(1, device=where), group).wait()  # nobody leaves while a gather is under way
    return Gathered([(c.op, c.payload) for c in calls], seen, views, full, shard, unsharded, peak, version)


WATCHED = "autograd is watching: hand both buffers over as `.data`, aliases that it does not follow"
GATHER_ERRORS = {
    "being modified inplace": WATCHED,
    "multiple views": WATCHED,
    "setStorage": "`flat.full` has no memory yet: `device.allocate` first",
}


@check("5.2")
def check_gather(answer, variant):
    """One all-gather into the memory that the views look at, waited for; nothing else is allocated."""
    try:
        seen = on_ranks(variant.ranks, observe_gather, answer, variant.seed, variant.size, timeout=8)
    except AnswerError as error:
        slip = next((slip for text, slip in GATHER_ERRORS.items() if text in str(error)), None)
        raise AnswerError(f"{error}\nlikely slip: {slip}" if slip else str(error)) from error
    start = [flat_parameter(variant.seed, variant.size, rank, variant.ranks) for rank in range(variant.ranks)]
    shards = [flat.shard.detach() + rank + 1 for rank, flat in enumerate(start)]
    full = torch.cat(shards)
    payload = full.numel() * ITEM
    for rank, found in enumerate(seen):
        expect(
            "collectives (operation, bytes)",
            found.calls,
            [("all_gather", payload)],
            rank=rank,
            slips={
                "this rank's own shard is only 1/N of the unit: the others' have to be fetched": [],
                "an all-reduce of zero-filled buffers gives the same values and sends twice the bytes": [
                    ("all_reduce", payload)
                ],
            },
        )
        expect(
            "what was issued and waited for",
            found.phases,
            ["issue all_gather", "wait all_gather"],
            rank=rank,
            slips={
                "`comm.all_gather` only starts it: until the handle's `wait()` the buffer holds anything": [
                    "issue all_gather"
                ]
            },
        )
        if any(view is None for view in found.views):
            raise AnswerError(
                f"rank {rank}, memory behind `flat.views`: expected that of `flat.full`, got none\n"
                "likely slip: gathered into a fresh tensor. The views, and autograd, look at the old buffer: give "
                "that one its memory back with `device.allocate`"
            )
        expect("`flat.full` after the gather", found.full, full, rank=rank, slips={"rank order": full.flip(0)})
        expect(
            "bytes allocated meanwhile, at most",
            found.peak,
            payload,
            rank=rank,
            slips={"the unit is there twice: gather into `flat.full`, not into a buffer to copy from": 2 * payload},
            slip="gather into `flat.full`; another buffer costs its bytes just when memory is tightest",
        )
        expect(
            "changes that autograd has counted on the views",
            found.version,
            0,
            rank=rank,
            slip="gathering refills what autograd has saved, which is no change of it: gather into `flat.full.data`, "
            "an alias with a version counter of its own, or backward will refuse",
        )
        expect("`flat.shard`", found.shard, shards[rank], rank=rank, slip="gather reads the shard and leaves it alone")


@check("5.3")
def check_free(answer, variant):
    """The storage has given its bytes back, and the tensors are the same objects as before."""
    with Ledger() as ledger:
        flat = flat_parameter(variant.seed, variant.size, 0, variant.ranks)
        full, views, shard = flat.full, flat.views, flat.shard
        wanted = shard.detach().clone()
        storage, shape = full.untyped_storage(), full.shape
        device.allocate(full)
        full.data.fill_(1.0)
        leaf = nn.Parameter(views[0])
        saved = (leaf * torch.ones_like(leaf).requires_grad_()).sum()  # autograd has saved the leaf
        answer(flat)
        unsharded = ledger.live()["unsharded"]
    if flat.shard is not shard or nbytes(shard) != wanted.numel() * ITEM:
        raise AnswerError(
            "the shard's memory: expected it to stay, got none\n"
            "likely slip: the shard is what the unit is gathered from, and nobody else has it: free `flat.full` alone"
        )
    slip = "nothing gives the memory back: the storage has to shrink to 0 bytes"
    if not hasattr(flat, "full") or flat.full is None:
        slip = "dropping a name frees nothing: the views and autograd hold the same storage"
    elif flat.full is not full:
        slip = "another tensor under the same name: the views and autograd still hold the old one's storage"
    elif full.shape != shape and full.untyped_storage()._cdata == storage._cdata:
        slip = "`Tensor.resize_` changes the tensor's shape and leaves the storage as it is: resize the storage"
    elif full.untyped_storage()._cdata != storage._cdata:
        slip = "`.data = ...` gives this one tensor another storage: the views and autograd still hold the old one"
    elif bool((full == 0).all()) if nbytes(full) else False:
        slip = "zeros take as much memory as any other values: the storage has to shrink to 0 bytes"
    expect("bytes behind `flat.full` and its views", storage.nbytes(), 0, slip=slip)
    expect("unsharded bytes by the ledger", unsharded, 0, slip=slip)
    same = getattr(flat, "full", None) is full and full.shape == shape
    expect("`flat.full` is the same tensor with the same shape", same, True, slip="the next gather fills this tensor")
    expect("`flat.shard`", shard.detach(), wanted)
    del saved


class Reduced(NamedTuple):
    calls: list[tuple[str, int]]
    phases: list[str]
    parameter: torch.Tensor
    first: Any  # shard.grad after the first reduction
    kept: int  # bytes that the unsharded gradient still has
    gradients: int
    second: Any
    after_second: int


def unsharded_gradient(seed, rank, micro, flat, ranks):
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + micro)
    padded = torch.zeros(-(-flat.numel // ranks) * ranks, dtype=flat.full.dtype)
    padded[: flat.numel] = torch.randn(flat.numel, generator=generator)
    return padded


def observe_reductions(answer, seed, sizes):
    return [observe_reduce(answer, seed, size) for size in sizes]


def kept_in(buffers):
    """`device.empty`, with another reference to each result: only `device.free` frees its memory."""
    empty = device.empty

    def keep(*args, **kwargs):
        buffers.append(empty(*args, **kwargs))
        return buffers[-1]

    return keep


def observe_reduce(answer, seed, size):
    group, where = comm.world(), rank_device()
    rank, ranks = group.rank(), group.size()
    with Ledger() as ledger:
        flat = flat_parameter(seed, size, rank, ranks, where)
        flat.shard.data.add_(rank)
        buffers, seen = [], []
        for micro in range(2):
            values_of = unsharded_gradient(seed, rank, micro, flat, ranks).to(where)
            buffer = device.empty(values_of.numel(), values_of.dtype, "gradients", values_of.device)
            buffer.copy_(values_of)
            flat.padding_of(buffer).fill_(torch.nan)  # nobody has written there
            buffers.append(buffer)
            own = []  # the answer's buffers, until its next call
            with comm.record() as calls, phases() as order, patch.object(device, "empty", kept_in(own)):
                answer(flat, buffer, group)
            kept, gradients = nbytes(buffer), ledger.live()["gradients"]
            seen.append((calls, order, None if flat.shard.grad is None else values(flat.shard.grad), kept, gradients))
    comm.all_reduce(torch.zeros(1, device=where), group).wait()
    (calls, order, first, kept, gradients), (_, _, second, _, after_second) = seen
    log = [(c.op, c.payload) for c in calls]
    return Reduced(log, order, values(flat.shard), first, kept, gradients, second, after_second)


NO_PADDING = ", of a unit without padding"


@check("5.4")
def check_reduce_gradient(answer, variant):
    """One reduce-scatter of the mean, zeros for the padding, accumulated; only the shard's gradient is left."""
    ranks = max(3, variant.ranks)
    sizes = {variant.size: "", 0: ", of one element in bfloat16", -1: NO_PADDING}
    try:
        seen = on_ranks(ranks, observe_reductions, answer, variant.seed, tuple(sizes), timeout=8)
    except AnswerError as error:
        if "of dtype torch.bfloat16" in str(error):
            slip = "the mean has the dtype of `gradient`, which need not be float32: a collective does not cast"
            raise AnswerError(f"{error}\nlikely slip: {slip}") from error
        raise
    for number, (size, which) in enumerate(sizes.items()):
        check_reduced([each[number] for each in seen], variant.seed, size, which)


def check_reduced(seen, seed, size, which):
    """Of two reductions of one unit, seen on each rank."""
    ranks = len(seen)
    flats = [flat_parameter(seed, size, rank, ranks) for rank in range(ranks)]
    each = [
        torch.stack([unsharded_gradient(seed, rank, micro, flats[0], ranks) for rank in range(ranks)])
        for micro in range(2)
    ]
    item, rounding = flats[0].full.dtype.itemsize, 1e-5 if size else 2e-2
    payload, length = each[0].shape[1] * item, each[0].shape[1] // ranks
    for rank, found in enumerate(seen):
        first, second = (gradients.mean(0)[rank * length :][:length] for gradients in each)
        own = each[0][rank][rank * length :][:length]
        padding = length - max(0, min(length, flats[0].numel - rank * length))
        expect(
            "`flat.shard` (the parameter)",
            found.parameter,
            flats[rank].shard.detach() + rank,
            rank=rank,
            slip="this reduces the parameter; what the ranks have to agree on is the gradient",
        )
        expect(
            f"collectives (operation, bytes){which}",
            found.calls,
            [("reduce_scatter", payload)],
            rank=rank,
            slips={
                "every rank receives the whole mean to keep 1/N of it: the values are right, and the bytes on the "
                "wire twice those of a reduce-scatter": [("all_reduce", payload)],
                "gradients differ between ranks, as their data does: without communication this is not training on "
                "all of it": [],
            },
        )
        expect(
            "what was issued and waited for",
            found.phases,
            ["issue reduce_scatter", "wait reduce_scatter"],
            rank=rank,
            slips={"the output is unwritten until the handle's `wait()`, and its input still read": found.phases[:1]},
        )
        if padding and found.first is not None and bool(found.first[length - padding :].isnan().any()):
            raise AnswerError(
                f"rank {rank}, the last {padding} of `flat.shard.grad`: expected 0, got what lay in memory (nan)\n"
                "likely slip: the padding has no gradient, and nobody but you writes it: every rank zeroes its own "
                "before the reduction, which takes the mean of what all ranks have there"
            )
        if which == NO_PADDING and found.first is not None and not found.first.any():
            raise AnswerError(
                f"rank {rank}, `flat.shard.grad`{which}: expected the mean, got zeros\n"
                "likely slip: `buffer[-0:]` is all of the buffer: `flat.padding_of(gradient)` is right for any padding"
            )
        expect(
            f"`flat.shard.grad`{which}",
            found.first,
            first,
            rank=rank,
            tolerance=rounding,
            slips={
                "the sum over the ranks, not their mean: `comm.MEAN`": first * ranks,
                "divided by 2, whatever the number of ranks: `comm.MEAN`, or `group.size()`": first * ranks / 2,
                "this rank's own gradient": own,
                "it is the optimizer's input: put the mean there": None,
            },
        )
        expect(
            f"`flat.shard.grad` after a second reduction{which}",
            found.second,
            first + second,
            rank=rank,
            tolerance=rounding,
            slips={
                "the second gradient has overwritten the first: backward accumulates": second,
                "what was reduced before is reduced again: add to `flat.shard.grad` after the reduction": second
                + first / ranks,
            },
        )
        expect(
            "bytes of the unsharded gradient afterwards",
            found.kept,
            0,
            rank=rank,
            slip="the unsharded gradient is still there: dropping the name is not enough, since others may refer to "
            "it; `device.free` it",
        )
        shard_bytes = length * item
        unseen = {
            '`flat.shard.grad` is not a buffer of `device.empty(..., "gradients", ...)`: the ledger cannot see it': 0
        }
        expect(
            "bytes of gradients afterwards",
            found.gradients,
            shard_bytes,
            rank=rank,
            slips=unseen,
            slip="keep the shard's alone",
        )
        expect(
            "bytes of gradients after the second reduction",
            found.after_second,
            shard_bytes,
            rank=rank,
            slips={"`flat.shard.grad` is another tensor than before, which the ledger cannot see: add in place": 0},
            slip="the second mean has been added: free its buffer",
        )


# 5.5 and 5.6: a unit that writes down what is done to it


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


@check("5.5")
def check_attach(answer, variant):
    """Gathered before forward and before backward, freed after both, then reduced; the root stays from end to end."""
    check_events(answer, kept_after_forward=False)
    check_training(answer, variant, kept_after_forward=False)


@check("5.6")
def check_attach_grad_op(answer, variant):
    """Gathered once a step, whole from forward to the end of the unit's backward, sharded between steps."""
    check_events(answer, kept_after_forward=True)
    check_training(answer, variant, kept_after_forward=True)
