"""What each schedule promises: equal results, the order of events, bytes whole at once, traffic."""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm, device
from minifsdp.cost.data_parallel import SGD, Setting, fsdp
from minifsdp.flat_param import find_parameters
from minifsdp.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    ShardingStrategy,
    SyncSchedule,
)
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.unit import State, Unit
from minifsdp.fsdp.view import View
from minifsdp.instruments.launch import launch
from minifsdp.instruments.watch.ledger import Ledger

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PRE, POST = BackwardPrefetch
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
HIDDEN = (5, 31, 17, 3, 29, 23, 11)  # units of unequal size, none of which 2, 3 or 4 divide
UNITS = len(HIDDEN) + 1


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, hidden), nn.Linear(hidden, 7)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


# name: (schedule, what the closed form needs to know of it)
SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sync": (SyncSchedule, {}),
    "overlap": (OverlapSchedule, {"reductions": 1}),
    "forward only": (partial(PrefetchSchedule, backward=None), {"reductions": 1, "forward_depth": 1}),
    "pre only": (partial(PrefetchSchedule, forward=False), {"reductions": 1, "backward": "pre"}),
    "post only": (partial(PrefetchSchedule, forward=False, backward=POST), {"reductions": 1, "backward": "post"}),
    "post 3": (
        partial(PrefetchSchedule, forward=False, backward=POST, depth=3),
        {"reductions": 3, "backward": "post", "backward_depth": 3},
    ),
    "both": (PrefetchSchedule, {"reductions": 1, "forward_depth": 1, "backward": "pre"}),
    "both 2": (
        partial(PrefetchSchedule, depth=2),
        {"reductions": 2, "forward_depth": 2, "backward": "pre", "backward_depth": 2},
    ),
    "unbounded": (
        partial(PrefetchSchedule, depth=None),
        {"reductions": None, "forward_depth": None, "backward": "pre", "backward_depth": None},
    ),
    "limit": (RateLimitedSchedule, {"reductions": 1, "forward_depth": 1, "backward": "pre", "limit": 2}),
    "limit, no prefetch": (
        partial(RateLimitedSchedule, forward=False, backward=None),
        {"reductions": 1, "limit": 2},
    ),
    **{
        f"limit {k}, unbounded": (
            partial(RateLimitedSchedule, depth=None, limit=k),
            {"reductions": 1, "forward_depth": None, "backward": "pre", "backward_depth": None, "limit": k},
        )
        for k in (1, 2, 3, 4)
    },
    "limit 2, post unbounded": (
        partial(RateLimitedSchedule, depth=None, backward=POST),
        {"reductions": 1, "forward_depth": None, "backward": "post", "backward_depth": None, "limit": 2},
    ),
    "host": (HostSchedule, {"forward_depth": 1, "backward": "host"}),
}
GRAD_OPS = {"sync": {}, "limit": {}, "host": {"reductions": 1}}  # what is different with SHARD_GRAD_OP


def sharded(schedule, strategy=FULL):
    torch.manual_seed(0)
    return FullyShardedDataParallel(Net(), None, strategy, auto_wrap_policy={Block}, schedule=schedule)


def inputs(step: int):
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).chunk(dist.get_world_size())[
        dist.get_rank()
    ]


def units_of(model):
    return [m._unit for m in FullyShardedDataParallel.fsdp_modules(model)]


def alive(model):
    """Names of the units whose unsharded storage has memory, and of those with an unsharded gradient."""
    whole = [unit.name for unit in units_of(model) if unit.flat.full.untyped_storage().nbytes()]
    return whole, [unit.name for unit in units_of(model) if unit.has_gradient]


@contextmanager
def counted(*names):
    """Counts calls of functions of torch.distributed by patching them there, and the bytes of their first tensor."""
    originals, calls = {name: getattr(dist, name) for name in names}, []

    def patched(name):
        def call(*args, **kwargs):
            calls.append((name, max(t.numel() * t.element_size() for t in args if isinstance(t, torch.Tensor))))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, patched(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


GATHER, SCATTER = "broadcast", "isend"  # as on gloo (gloo.py): of N parts each, and of N - 1


def run_schedule(schedule, strategy):
    """Losses of a few steps, bytes by the ledger and traffic of the last."""
    with Ledger() as ledger:
        model = sharded(schedule, strategy)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        ledger.watch(model, optimizer)
        losses = []
        for step in range(3):
            ledger.reset_peaks()
            with counted(GATHER, SCATTER, "all_reduce", comm._ALL_GATHER, comm._REDUCE_SCATTER) as calls:
                loss = model(inputs(step))
                after_forward = alive(model)
                loss.backward()
            after_backward = alive(model)
            losses.append(loss.item())
            optimizer.step()
            rest = ledger.live()
            measured = (
                rest["parameters"],
                rest["gradients"],
                rest["optimizer"],
                ledger.peak_of("unsharded"),
                ledger.peak_of("gradients", "communication"),
            )
            optimizer.zero_grad()
    parameters = [p.detach().clone() for p in model.parameters()]
    return losses, parameters, measured, calls, after_forward, after_backward


def run_schedules(names):
    results = {(name, FULL): run_schedule(SCHEDULES[name][0], FULL) for name in names}
    return results | {(name, GRAD_OP): run_schedule(SCHEDULES[name][0], GRAD_OP) for name in GRAD_OPS}


OTHER_RANKS = {4: pytest.mark.wide, 1: pytest.mark.slow, 3: pytest.mark.slow}


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=mark) for n, mark in OTHER_RANKS.items())])
def results(request):
    """All schedules on two ranks, the rungs of the ladder on the others."""
    names = list(SCHEDULES) if request.param == 2 else ["sync", "overlap", "post 3", "unbounded", "limit 2, unbounded"]
    return request.param, launch(run_schedules, request.param, names)


def test_all_schedules_compute_the_same_bits(results):
    for rank in results[1]:
        losses, parameters = rank["sync", FULL][:2]
        for name, other in rank.items():
            assert other[0] == losses, name
            assert all(torch.equal(a, b) for a, b in zip(other[1], parameters, strict=True)), name


@pytest.mark.behaviour(6, 30)
def test_bytes_are_the_closed_form_to_the_byte(results):
    n, ranks = results
    model = Net()
    units = [[p.numel() for p in find_parameters(model, skip=model.blocks)]]
    units += [[p.numel() for p in block.parameters()] for block in model.blocks]
    for rank in ranks:
        for (name, strategy), result in rank.items():
            known = SCHEDULES[name][1] | {"reshard_after_forward": strategy is FULL}
            known |= GRAD_OPS[name] if strategy is GRAD_OP else {}
            predicted = fsdp(units, Setting(n, optimizer=SGD, by_all_to_all=True), **known)
            expected = (
                predicted.parameters,
                predicted.gradients,
                predicted.optimizer,
                predicted.unsharded_peak,
                predicted.gradients_peak,
            )
            assert result[2] == expected, (name, strategy)


@pytest.mark.behaviour(17)
@pytest.mark.behaviour(17)
def test_traffic_as_torch_distributed_sees_it(results):
    n, ranks = results
    model = Net()
    sizes = [4 * -(-sum(p.numel() for p in block.parameters()) // n) * n for block in model.blocks]
    root = 4 * -(-sum(p.numel() for p in find_parameters(model, skip=model.blocks)) // n) * n
    psi = root + sum(sizes)
    for rank in ranks:
        for (name, strategy), result in rank.items():
            calls, payload = Counter(op for op, _ in result[3]), Counter()
            for op, nbytes in result[3]:
                payload[op] += nbytes
            if n == 1:
                assert calls == {"all_reduce": UNITS}, name
            elif strategy is FULL:
                assert calls == {GATHER: n * (2 * UNITS - 1), SCATTER: (n - 1) * UNITS}, name
                assert payload == {GATHER: 2 * psi - root, SCATTER: psi - psi // n}, name
            else:
                assert calls == {GATHER: n * UNITS, SCATTER: (n - 1) * UNITS}, name
                assert payload == {GATHER: psi, SCATTER: psi - psi // n}, name


@pytest.mark.behaviour(17, 25)
@pytest.mark.behaviour(17, 25)
def test_after_forward_only_the_root_is_whole_and_after_backward_nothing(results):
    n, ranks = results
    if n == 1:
        pytest.skip("on one rank nothing is sharded")
    for rank in ranks:
        for (name, strategy), result in rank.items():
            after_forward, after_backward = result[4], result[5]
            assert after_forward == ((["Net"] if strategy is FULL else ["Net"] + ["Block"] * len(HIDDEN)), []), name
            assert after_backward == ([], []), name


# The order in which a schedule puts things on the link, and frees


class Recorder(Unit):
    """A unit made of nothing, which writes down what happens to it."""

    def __init__(self, name, log):
        super().__init__(name)
        self.log, self.leaves, self.shards, self.device = log, [], [], torch.device("cpu")
        self.view, self.pending = View([], []), False

    def _gather(self):
        self.log.append(f"g{self.name}")
        return _Done()

    def _release(self):
        self.log.append(f"f{self.name}")

    def take_gradient(self, index):
        self.pending = True

    @property
    def has_gradient(self):
        return self.pending

    def _reduce(self):
        self.log.append(f"r{self.name}")
        self.pending = False
        return _Done()

    def _accumulate(self): ...

    def store(self): ...


class _Done:
    def wait(self): ...


def test_a_unit_says_what_it_is():
    unit = Recorder("blocks.1", [])
    unit.shards = [nn.Parameter(torch.zeros(35))]
    assert repr(unit) == "<blocks.1: sharded; 35 elements, 140 bytes on this rank>"
    unit.start_gather()
    assert "gathering" in repr(unit)


def order(make_schedule, log, names=("0", "1", "2", "3"), steps=2, kind=Recorder):
    """What happens to a chain of units in the last of `steps` steps; the root, `R`, computes first and last."""
    root, *blocks = units = [kind(name, log) for name in ("R", *names)]
    root.is_root = True
    schedule = make_schedule(units)
    for _ in range(steps):
        log.clear()
        schedule.begin_forward()
        schedule.pre_forward(root)
        for unit in blocks:
            schedule.pre_forward(unit)
            log.append(f"[{unit.name}]")
            schedule.post_forward(unit, True)
        schedule.post_forward(root, True)
        log.append("|")
        schedule.begin_backward([*blocks, root])
        schedule.pre_backward(root)
        for unit in reversed(blocks):
            schedule.pre_backward(unit)
            log.append(f"[{unit.name}]")
            unit.take_gradient(0)
            schedule.post_backward(unit)
        root.take_gradient(0)
        schedule.post_backward(root)
        schedule.end_backward()
        assert all(unit.state is State.SHARDED for unit in units)
    return " ".join(log)


ORDERS = {
    "sync": (
        SyncSchedule,
        "gR g0 [0] f0 g1 [1] f1 g2 [2] f2 g3 [3] f3 | g3 [3] f3 r3 g2 [2] f2 r2 g1 [1] f1 r1 g0 [0] f0 r0 fR rR",
    ),
    "overlap: the next gather goes before the reduction that is due": (
        OverlapSchedule,
        "gR g0 [0] f0 g1 [1] f1 g2 [2] f2 g3 [3] f3 | g3 [3] f3 g2 r3 [2] f2 g1 r2 [1] f1 g0 r1 [0] f0 fR r0 rR",
    ),
    "prefetch by one": (
        PrefetchSchedule,
        "gR g0 g1 [0] f0 g2 [1] f1 g3 [2] f2 [3] f3 | g3 g2 [3] f3 r3 g1 [2] f2 r2 g0 [1] f1 r1 [0] f0 r0 fR rR",
    ),
    "prefetch after: one unit whole": (
        partial(PrefetchSchedule, forward=False, backward=POST),
        "gR g0 [0] f0 g1 [1] f1 g2 [2] f2 g3 [3] f3 | g3 [3] f3 g2 r3 [2] f2 g1 r2 [1] f1 g0 r1 [0] f0 r0 fR rR",
    ),
    "unbounded": (
        partial(PrefetchSchedule, depth=None),
        "gR g0 g1 g2 g3 [0] f0 [1] f1 [2] f2 [3] f3 | g3 g2 g1 g0 [3] f3 r3 [2] f2 r2 [1] f1 r1 [0] f0 r0 fR rR",
    ),
    "limit: over the cap a gather is put off to the next free": (
        partial(RateLimitedSchedule, depth=None),
        "gR g0 g1 [0] f0 g2 [1] f1 g3 [2] f2 [3] f3 | g3 g2 [3] f3 g1 r3 [2] f2 g0 r2 [1] f1 r1 [0] f0 r0 fR rR",
    ),
    "limit of one": (
        partial(RateLimitedSchedule, depth=None, limit=1),
        "gR g0 [0] f0 g1 [1] f1 g2 [2] f2 g3 [3] f3 | g3 [3] f3 g2 r3 [2] f2 g1 r2 [1] f1 g0 r1 [0] f0 r0 fR rR",
    ),
    "limit without prefetch": (
        partial(RateLimitedSchedule, forward=False, backward=None),
        "gR g0 [0] f0 g1 [1] f1 g2 [2] f2 g3 [3] f3 | g3 [3] f3 g2 r3 [2] f2 g1 r2 [1] f1 g0 r1 [0] f0 r0 fR rR",
    ),
}


@pytest.mark.behaviour(16, 22, 29, 30)
@pytest.mark.behaviour(16, 22, 29, 30)
@pytest.mark.parametrize("name", ORDERS)
def test_order_on_the_link(name):
    schedule, expected = ORDERS[name]
    assert order(schedule, []) == expected


class Waited(Recorder):
    """Writes down, with `w`, that its reduction has been waited for."""

    def _accumulate(self):
        self.log.append(f"w{self.name}")


class Whole(Waited):
    """Of SHARD_GRAD_OP."""

    def __init__(self, name, log):
        super().__init__(name, log)
        self.reshard_after_forward = False


ON_CPU = {
    "a second gradient only beside memory that has been freed": (
        Waited,
        "gR g0 g1 [0] f0 g2 [1] f1 g3 [2] f2 [3] f3 |"
        " g3 [3] f3 g2 r3 w3 g1 [2] f2 r2 w2 g0 [1] f1 r1 w1 [0] f0 r0 w0 fR rR wR",
    ),
    "what had stayed whole is freed, so the next unit computes meanwhile": (
        Whole,
        "gR g0 g1 [0] g2 [1] g3 [2] [3] | [3] f3 r3 w3 [2] f2 r2 [1] f1 w2 r1 [0] f0 w1 r0 fR w0 rR wR",
    ),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_order_of_the_default_on_cpu(name):
    kind, expected = ON_CPU[name]
    assert order(HostSchedule, [], kind=kind) == expected


def test_on_cpu_backward_prefetches_though_its_first_unit_ends_without_a_reduction():
    """As inside `no_sync`, or where it is frozen: the engine frees it."""
    log: list[str] = []
    units = [Recorder(name, log) for name in "012"]
    schedule = HostSchedule(units)
    schedule.begin_forward()
    for unit in units:
        schedule.pre_forward(unit)
        schedule.post_forward(unit, True)
    log.clear()
    schedule.begin_backward(units)
    for unit in units[:0:-1]:
        schedule.pre_backward(unit)
        log.append(f"[{unit.name}]")
        schedule.free(unit)
    assert " ".join(log) == "g2 [2] f2 g1 g0 [1] f1"


@pytest.mark.behaviour(29)
@pytest.mark.behaviour(29)
def test_first_forward_has_no_order_to_prefetch_by():
    assert order(PrefetchSchedule, [], steps=1).startswith("gR g0 [0] f0 g1 [1]")


@pytest.mark.behaviour(31)
@pytest.mark.behaviour(31)
def test_limiter_waits_for_the_oldest_free_on_the_device(monkeypatch):
    log = []

    class Event:
        def __init__(self):
            log.append("free")

        def synchronize(self):
            log.append("wait")
            assert events.pop(0) is self  # the oldest first

    def record_event(stream):
        events.append(Event())
        return events[-1]

    events = []
    monkeypatch.setattr(device.CpuStream, "record_event", record_event)
    order(RateLimitedSchedule, log, steps=1)
    gathers = [i for i, entry in enumerate(log) if entry.startswith("g")]
    for i in gathers:  # of the frees that were issued all but one have happened on the device
        assert log[:i].count("free") - log[:i].count("wait") <= 1
    assert log.count("wait") == 5  # so it does wait, on a host that would run ahead


def test_limit_below_one_is_refused():
    with pytest.raises(ValueError, match=r"limit=0.*1 is the least"):
        RateLimitedSchedule([Recorder("0", [])], limit=0)


def test_unforeseen_unit_evicts_what_nobody_uses():
    """Another order than the last forward's: the cap holds all the same, and nothing dead-locks."""
    log: list[str] = []
    units = [Recorder(name, log) for name in "0123"]
    schedule = RateLimitedSchedule(units, depth=None, limit=2)
    for sequence in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 0]):
        schedule.begin_forward()
        for i in sequence:
            schedule.pre_forward(units[i])
            assert sum(unit.state is not State.SHARDED for unit in units) <= 2
            assert units[i].state is State.UNSHARDED
            schedule.post_forward(units[i], True)
        schedule.begin_backward([units[i] for i in sequence])
        for i in reversed(sequence):
            schedule.pre_backward(units[i])
            assert sum(unit.state is not State.SHARDED for unit in units) <= 2
            schedule.post_backward(units[i])
        schedule.end_backward()


# Another kind of unit


class HoldingUnit(Unit):
    """Every parameter cut on its own, gathered by a collective each; holds references instead of recording streams.

    What it frees it keeps until its next gather is waited for: by then whatever read it has been ordered before.
    """

    def __init__(self, params, group):
        super().__init__("holding")
        self.group, self.device, self.held = group, torch.device("cpu"), []
        n, rank = group.size(), group.rank()
        self.whole, self.parts, leaves, self.taken = [], [], [], {}
        for p in params:
            whole = torch.zeros(-(-p.numel() // n) * n)
            whole[: p.numel()] = p.detach().flatten()
            self.parts.append(nn.Parameter(whole.chunk(n)[rank].clone()))
            self.whole.append(whole.data)
            leaves.append(nn.Parameter(whole[: p.numel()].view(p.shape)))
        self.view = View(list(params.values()), self.parts)
        self._set_leaves(leaves)
        self._release()

    def _gather(self):
        for whole in self.whole:
            device.allocate(whole)
        works = [comm.all_gather(w, p.data, self.group) for w, p in zip(self.whole, self.parts, strict=True)]
        return _All(works, self.held.clear)  # once the gather is here, what it replaces is read no more

    def _release(self):
        for whole in self.whole:
            self.held.append(whole.clone())
            device.free(whole)

    def take_gradient(self, index):
        leaf = self.leaves[index]
        self.taken[index] = self.taken.get(index, 0) + leaf.grad
        leaf.grad = None

    @property
    def has_gradient(self):
        return bool(self.taken)

    def _reduce(self):
        self.means, works = [], []
        for i, (leaf, part) in enumerate(zip(self.leaves, self.parts, strict=True)):
            full = torch.zeros(part.numel() * self.group.size())
            full[: leaf.numel()] = self.taken.pop(i, torch.zeros_like(leaf)).flatten()
            self.means.append(torch.empty_like(part))
            works.append(comm.reduce_scatter(self.means[-1], full, self.group, comm.MEAN))
        return _All(works, lambda: None)

    def _accumulate(self):
        for part, mean in zip(self.parts, self.means, strict=True):
            part.grad = mean if part.grad is None else part.grad + mean

    def store(self): ...


class _All:
    def __init__(self, works, then):
        self.works, self.then = works, then

    def wait(self):
        for work in self.works:
            work.wait()
        self.then()


def train_holding_units(make_schedule):
    torch.manual_seed(0)
    model, group = Net(), comm.world()
    places = {model: find_parameters(model, skip=model.blocks)} | {b: find_parameters(b) for b in model.blocks}
    units = {module: HoldingUnit(params, group) for module, params in places.items()}
    units[model].is_root = True
    engine = Engine(list(units.values()), make_schedule(list(units.values())))
    model.register_forward_pre_hook(lambda *_: engine.begin())
    for module, unit in units.items():
        module.register_forward_pre_hook(lambda _, args, unit=unit: engine.before(unit, args))
        module.register_forward_hook(lambda _, args, out, unit=unit: engine.after(unit, out))
    optimizer = torch.optim.SGD([shard for unit in units.values() for shard in unit.shards], 1e-2)
    losses = []
    for step in range(3):
        loss = model(inputs(step))
        loss.backward()
        assert not any(whole.untyped_storage().nbytes() for unit in units.values() for whole in unit.whole)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_holding_units():
    return {name: train_holding_units(schedule) for name, (schedule, _) in SCHEDULES.items()}, run_schedule(
        SyncSchedule, FULL
    )[0]


def test_another_kind_of_unit_runs_on_every_schedule():
    for held, flat in launch(run_holding_units, 2):
        for name, losses in held.items():
            assert losses == held["sync"], name
        assert held["sync"] == pytest.approx(flat, rel=1e-6)
