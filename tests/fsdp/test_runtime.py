"""What a step does: how many collectives, from which hooks, and what it says to those who call in from outside."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from minifsdp import comm
from minifsdp.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    RateLimitedSchedule,
    ShardingStrategy,
    register_fsdp_forward_method,
)
from minifsdp.fsdp.unit import SHARDED, UNSHARDED
from minifsdp.instruments.launch import launch

check = Checks(__name__)

WIDTH = 5
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_ZERO2 = ShardingStrategy
Fsdp = FullyShardedDataParallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain


class Recomputed(nn.Module):
    """Its inner module in an activation checkpoint."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


Path = Callable[[Any, Tensor], Tensor]


def in_a_row(units: Any, x: Tensor) -> Tensor:
    for unit in units:
        x = unit(x)
    return x


class Edge(nn.Linear):
    """A layer that policies can tell from those inside blocks."""


class Net(nn.Module):
    """Four units: three blocks, and the root with what is before and after them."""

    def __init__(self, blocks: list[nn.Module] | None = None, path: Path = in_a_row) -> None:
        super().__init__()
        self.first, self.head = Edge(WIDTH, WIDTH), Edge(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block(), Block(), Block()])
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.path(self.blocks, self.first(x)))

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def frozen(*names: str) -> Net:
    net = Net()
    for name in names:
        net.get_submodule(name).requires_grad_(False)
    return net


def without_gains() -> Net:
    net = Net()
    for block in net.blocks:
        block.gain.requires_grad_(False)
    return net


# How many collectives. One step is a list of phases; each phase says how many all-gathers, and how many reductions.

Counts = list[tuple[int, int]]
GATHERS = (comm._ALL_GATHER, "all_gather")  # torch's FSDP1 gathers lists on CPU
REDUCTIONS = (comm._REDUCE_SCATTER, "all_reduce")
IN_PARTS = {"broadcast": 2, "isend": 1}  # ours on gloo (gloo.py): so many on two ranks are a gather, or a reduction


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts calls of functions of torch.distributed by patching them there."""
    originals = {name: getattr(dist, name) for name in (*GATHERS, *REDUCTIONS, *IN_PARTS)}
    calls = Counter[str]()

    def patched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, patched(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def taken(calls: Counter[str]) -> tuple[int, int]:
    assert not any(calls[name] % parts for name, parts in IN_PARTS.items())
    gathers, reductions = (calls[name] // parts for name, parts in IN_PARTS.items())
    counts = sum(calls[name] for name in GATHERS) + gathers, sum(calls[name] for name in REDUCTIONS) + reductions
    calls.clear()
    return counts


def train(model: nn.Module, calls: Counter[str]) -> Counts:
    loss = model(batch()).sum()
    forward = taken(calls)
    loss.backward()
    return [forward, taken(calls)]


def accumulate(model: nn.Module, calls: Counter[str]) -> Counts:
    with model.no_sync():
        inside = train(model, calls)
    return inside + train(model, calls)


def two_forwards(model: nn.Module, calls: Counter[str]) -> Counts:
    loss = model(batch()).sum() + model(batch()).sum()
    forward = taken(calls)
    loss.backward()
    return [forward, taken(calls)]


def evaluate(mode: Any, model: nn.Module, calls: Counter[str]) -> Counts:
    model.eval()
    with mode():
        model(batch())
    model.train()
    return [taken(calls)]


class Case(NamedTuple):
    """A model, what a step does with it, and the counts under FULL_SHARD, SHARD_GRAD_OP and NO_SHARD."""

    full: Counts
    grad_op: Counts
    none: Counts
    net: Callable[[], Net] = Net
    step: Callable[[nn.Module, Counter[str]], Counts] = train
    units: tuple[type[nn.Module], ...] = (Block,)
    use_orig_params: tuple[bool, ...] = (False, True)
    as_in_torch: bool = True  # else torch leaves units whole from one forward to the next, or as the case says


PLAIN: tuple[Counts, Counts, Counts] = ([(4, 0), (3, 4)], [(4, 0), (0, 4)], [(0, 0), (0, 4)])


def recomputed(reentrant: bool) -> Net:
    return Net([Recomputed(Block(), reentrant) for _ in range(3)])


CASES = {
    "a step": Case(*PLAIN),
    "no_grad": Case([(4, 0)], [(4, 0)], [(0, 0)], step=partial(evaluate, torch.no_grad), as_in_torch=False),
    "inference_mode": Case(
        [(4, 0)], [(4, 0)], [(0, 0)], step=partial(evaluate, torch.inference_mode), as_in_torch=False
    ),
    "no_sync: FULL_SHARD gathers again, SHARD_GRAD_OP stays whole": Case(
        [(4, 0), (3, 0), (4, 0), (3, 4)],
        [(4, 0), (0, 0), (0, 0), (0, 4)],
        [(0, 0), (0, 0), (0, 0), (0, 4)],
        step=accumulate,
    ),
    "two forwards, one backward": Case([(7, 0), (3, 4)], [(4, 0), (0, 4)], [(0, 0), (0, 4)], step=two_forwards),
    # FSDP(checkpoint(m)): recomputation is inside a backward that has gathered. checkpoint(FSDP(m)): so it is, unless
    # it is reentrant, where recomputation comes first, is a forward of its own, and frees.
    "checkpoint inside": Case(*PLAIN, lambda: recomputed(False), units=(Recomputed,)),
    "checkpoint inside, reentrant": Case(*PLAIN, lambda: recomputed(True), units=(Recomputed,)),
    "checkpoint outside": Case(*PLAIN, lambda: recomputed(False)),
    "checkpoint outside, reentrant": Case([(4, 0), (6, 4)], *PLAIN[1:], lambda: recomputed(True)),
    "called twice": Case(
        [(4, 0), (2, 3)],
        [(3, 0), (0, 3)],
        [(0, 0), (0, 3)],
        lambda: Net(path=lambda units, x: units[0](units[1](units[0](x)))),
    ),
    "unused unit": Case(
        [(3, 0), (2, 3)], [(3, 0), (0, 3)], [(0, 0), (0, 3)], lambda: Net(path=lambda units, x: units[2](units[0](x)))
    ),
    # The loss of another rank may depend on it, so its turn is taken; in torch, ranks that differ hang.
    "unused output: its turn is taken all the same": Case(
        *PLAIN, lambda: Net(path=lambda units, x: (units[1](x), units[2](units[0](x)))[1]), as_in_torch=False
    ),
    "frozen unit": Case([(4, 0), (3, 3)], [(4, 0), (0, 3)], [(0, 0), (0, 3)], lambda: frozen("blocks.1")),
    "frozen at last": Case([(4, 0), (3, 3)], [(4, 0), (0, 3)], [(0, 0), (0, 3)], lambda: frozen("blocks.2")),
    "frozen up to a unit: backward does not come to them": Case(
        [(5, 0), (2, 2)],
        [(5, 0), (0, 2)],
        [(0, 0), (0, 2)],
        lambda: frozen("first", "blocks.0", "blocks.1"),
        units=(Block, Edge),
        as_in_torch=False,
    ),
    "parameters frozen one by one": Case(*PLAIN, without_gains, use_orig_params=(True,)),
}


def ours(net: Net, case: Case, strategy: ShardingStrategy, use_orig_params: bool) -> nn.Module:
    return Fsdp(net, None, strategy, auto_wrap_policy=set(case.units), use_orig_params=use_orig_params)


def torchs(net: Net, case: Case, strategy: ShardingStrategy, use_orig_params: bool) -> nn.Module:
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return fsdp.FullyShardedDataParallel(
        net,
        sharding_strategy=fsdp.ShardingStrategy[strategy.name],
        auto_wrap_policy=ModuleWrapPolicy(set(case.units)),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


Counted = dict[tuple[str, str, bool], Counts]


def count(wrap: Callable[..., nn.Module]) -> Counted:
    """The counts of each case's second step: the first has no order to prefetch by."""
    warnings.simplefilter("ignore")
    found: Counted = {}
    for name, case in CASES.items():
        for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD):
            for use_orig_params in case.use_orig_params:
                model = wrap(case.net(), case, strategy, use_orig_params)
                with counted() as calls:
                    case.step(model, calls)
                    found[name, strategy.name, use_orig_params] = case.step(model, calls)
    return found


# On two ranks


def wrapped(strategy: ShardingStrategy = FULL_SHARD, net: Net | None = None, **options: Any) -> Fsdp:
    torch.manual_seed(0)
    return Fsdp(net or Net(), None, strategy, auto_wrap_policy={Block}, **options)


def units_of(model: nn.Module) -> list[Any]:
    return [m._unit for m in Fsdp.fsdp_modules(model) if m._unit is not None]


def assert_sharded(model: nn.Module) -> None:
    for unit in units_of(model):
        assert unit.state is SHARDED, unit.title
        assert unit.flat.full.untyped_storage().nbytes() == 0, unit.title


@check(behaviour=13)
def the_outermost_instance_that_runs_first_is_the_root() -> None:
    model = wrapped()
    assert [m._is_root for m in Fsdp.fsdp_modules(model)] == [None] * 4
    model(batch()).sum().backward()
    assert [m.check_is_root() for m in Fsdp.fsdp_modules(model)] == [True, False, False, False]
    engines = {id(m._engine) for m in Fsdp.fsdp_modules(model)}
    assert len(engines) == 1  # streams, order and limiter are shared
    assert [unit.title for unit in units_of(model)] == ["root (Net)"] + [f"blocks.{i} (Block)" for i in range(3)]


@check(behaviour=13)
def a_child_that_ran_before_its_root_is_an_error_of_the_root() -> None:
    model = wrapped()
    model.blocks[1](batch())
    assert model.blocks[1].check_is_root()
    with pytest.raises(AssertionError, match=r"^Non-root FSDP instance's `_is_root` should not have been set yet or"):
        model(batch())


class Casts(TorchDispatchMode):
    """Counts conversions of tensors of a batch's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += str(func) == "aten._to_copy.default" and args[0].shape == (3, WIDTH)
        return func(*args, **(kwargs or {}))


@check(behaviour=15)
def root_inputs_are_cast_once_in_whatever_container() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.got = Net(), {}

        def forward(self, inputs: Any, ids: Tensor, *, mask: Tensor) -> Tensor:
            self.got = {"inputs": inputs["deep"][0], "ids": ids, "mask": mask}
            return self.net(inputs["deep"][0] * mask)

    model = Fsdp(Takes(), auto_wrap_policy={Block}, mixed_precision=MixedPrecision(torch.bfloat16))
    given, ids = {"deep": [batch()]}, torch.arange(3)
    model(given, ids, mask=torch.ones(3, WIDTH)).sum().backward()
    with Casts() as casts:
        loss = model(given, ids, mask=torch.ones(3, WIDTH)).sum()
    assert casts.seen == 2  # the input and the mask, at the root and nowhere else
    got = model.module.got
    assert [got[name].dtype for name in ("inputs", "ids", "mask")] == [torch.bfloat16, torch.int64, torch.bfloat16]
    assert got["ids"] is ids  # not a copy
    assert given["deep"][0].dtype is torch.float32  # the caller's container is as it was
    loss.backward()


class Log(RateLimitedSchedule):
    """Writes down its events."""

    log: list[str]

    def __init__(self, units: Any) -> None:
        super().__init__(units)
        self.log = []

    def pre_forward(self, unit: Any) -> None:
        self.log.append(f"pre_forward {unit.title}")
        super().pre_forward(unit)

    def pre_backward(self, unit: Any) -> None:
        self.log.append(f"pre_backward {unit.title}")
        super().pre_backward(unit)

    def post_backward(self, unit: Any) -> None:
        self.log.append(f"post_backward {unit.title}")
        super().post_backward(unit)

    def free(self, unit: Any) -> None:
        if unit.state is UNSHARDED:
            self.log.append(f"free {unit.title}")
        super().free(unit)

    def end_backward(self) -> None:
        self.log.append("end_backward")
        super().end_backward()


def logged_backward(net: Net) -> list[str]:
    model = wrapped(net=net, schedule=Log)
    loss = model(batch()).sum()
    log = model._engine.schedule.log
    log.clear()
    loss.backward()
    assert_sharded(model)
    return log


class Many(nn.Module):
    """Several outputs, all of which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": self.linear(x), "deep": ([torch.tanh(self.linear(x))], x * 2)}


@check(behaviour=(17, 19, 20, 25))
def backward_begins_and_ends_once_per_unit_however_often_it_was_called() -> None:
    def path(units: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            out = units[0](x)
            x = out["a"] + out["deep"][0][0] * out["deep"][1]
        return units[1](x)

    model = Fsdp(Net([Many(), Block()], path), auto_wrap_policy={Many, Block}, schedule=Log)
    loss = model(batch()).sum()
    log = model._engine.schedule.log
    log.clear()
    loss.backward()
    events = Counter(event for event in log if not event.startswith("free"))
    titles = ["root (Net)", "blocks.0 (Many)", "blocks.1 (Block)"]
    assert events == Counter([f"{phase} {t}" for t in titles for phase in ("pre_backward", "post_backward")]) + Counter(
        ["end_backward"]
    )
    assert log.index("post_backward blocks.1 (Block)") < log.index("pre_backward blocks.0 (Many)")
    assert log[-1].startswith("end_backward")


@check(behaviour=21)
def a_frozen_unit_is_freed_when_its_inputs_have_their_gradients() -> None:
    log = logged_backward(frozen("blocks.1"))
    assert "post_backward blocks.1 (Block)" not in log  # nothing to reduce
    assert log.index("free blocks.1 (Block)") < log.index("post_backward blocks.0 (Block)") < log.index("end_backward")


@check()
def an_output_that_is_changed_in_place_by_whoever_called_still_begins_the_units_backward() -> None:
    """A linear layer's output of three dimensions is a view, and to change one puts another node in its place."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Edge(WIDTH, WIDTH), nn.ReLU(inplace=True), Edge(WIDTH, WIDTH))

    def path(model: nn.Module) -> Tensor:
        x = torch.ones(2, 3, WIDTH, requires_grad=True)
        y = model(x)
        y += 1
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    for strategy in (FULL_SHARD, SHARD_GRAD_OP):
        model = Fsdp(net(), sharding_strategy=strategy, auto_wrap_policy={Edge})
        with counted() as calls:
            given = path(model)
        assert torch.equal(given, path(net()))
        whole = 2 if strategy is FULL_SHARD else 1  # gathers of each of the two layers; the root has no parameters
        assert sum(calls[each] for each in GATHERS) + calls["broadcast"] // 2 == 2 * whole


@check()
def hooks_on_a_leaf_that_a_unit_passes_on_end_with_the_backward() -> None:
    """A leaf of the module's own announces its backward; an input does not."""

    class PassesOn(Block):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.ones(2, WIDTH, requires_grad=True)

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x, self.own

    model = Fsdp(PassesOn())
    x, own = torch.ones(2, WIDTH, requires_grad=True), model.module.own
    gradients = []
    for _ in range(2):
        y, same, passed = model(x)
        assert passed._backward_hooks
        assert not same._backward_hooks
        (y + same + passed).square().sum().backward()
        assert not own._backward_hooks
        gradients.append((x.grad, own.grad))
        x.grad = own.grad = None
    for before, after in zip(*gradients, strict=True):
        assert torch.equal(before, after)


@check()
def a_unit_that_returns_a_view_of_its_input_is_not_gathered_again_when_that_gets_its_gradient() -> None:
    class Reshapes(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.view(-1)

    def path(units: Any, x: Tensor) -> Tensor:
        y, flat = units[1](units[0](x))
        return units[2](y) + flat.view_as(y)

    log = logged_backward(Net([Block(), Reshapes(), Block()], path))
    assert [each for each in log if each.startswith("pre_backward")].count("pre_backward blocks.1 (Reshapes)") == 1


@check(behaviour=22)
def a_unit_is_freed_before_its_gradient_is_reduced() -> None:
    order: list[str] = []
    model = wrapped()
    model(batch()).sum().backward()
    for unit in units_of(model)[1:]:
        release, reduce = unit._release, unit._reduce
        unit._release = lambda unit=unit, release=release: (order.append(f"free {unit.title}"), release())[1]
        unit._reduce = lambda unit=unit, reduce=reduce: (order.append(f"reduce {unit.title}"), reduce())[1]
    loss = model(batch()).sum()
    order.clear()
    loss.backward()
    for unit in units_of(model)[1:]:
        assert order.index(f"free {unit.title}") < order.index(f"reduce {unit.title}")


@check(behaviour=(25, 27))
def what_backward_does_not_reach_is_freed_and_has_no_gradient() -> None:
    """A unit whose output is not in the loss, one that was not called, and parameters unused in a unit that was."""

    class Half(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

    def path(units: Any, x: Tensor) -> Tensor:
        units[1](x)
        return units[0](x)

    for strategy in (FULL_SHARD, SHARD_GRAD_OP):
        for use_orig_params in (False, True):
            net = Net([Half(), Block(), Block()], path)
            model = wrapped(strategy, net, use_orig_params=use_orig_params)
            model(batch()).sum().backward()
            assert_sharded(model)
            used, *unused = [[p.grad for p in unit.shards if p.numel()] for unit in units_of(model)][1:]
            assert all(gradient is not None for gradient in used)
            assert all(gradient is None for unit in unused for gradient in unit)
            gains = [p for name, p in model.named_parameters() if name == "blocks.0.gain" and p.numel()]
            assert all(not p.grad.any() for p in gains)  # zeros: other ranks may have had a gradient for it


@check(behaviour=28)
def gradients_of_gradients_are_refused() -> None:
    for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD):
        model = wrapped(strategy)
        with pytest.raises(RuntimeError, match="does not support gradients of gradients"):
            model(batch()).square().sum().backward(create_graph=True)
        model.zero_grad()
        model(batch()).sum().backward()  # and nothing of it is left
        assert all(p.grad is not None for p in model.parameters())


@check(behaviour=17)
def a_forward_without_grad_leaves_nothing_whole() -> None:
    for strategy in (FULL_SHARD, SHARD_GRAD_OP):
        for mode in (torch.no_grad, torch.inference_mode):
            model = wrapped(strategy)
            for _ in range(2):
                with mode():
                    assert not model.eval()(batch()).requires_grad
                assert_sharded(model)


@check(behaviour=18)
def a_reentrant_checkpoint_around_units_that_stay_whole_leaves_nothing_whole() -> None:
    model = wrapped(SHARD_GRAD_OP, recomputed(True))
    loss = model(batch()).sum()
    assert all(unit.state is UNSHARDED for unit in units_of(model))
    loss.backward()
    assert_sharded(model)


@check(behaviour=29)
def backward_prefetches_by_the_order_of_each_forward() -> None:
    turn = [0, 1, 2]
    model = wrapped(net=Net(path=lambda units, x: in_a_row([units[i] for i in turn], x)))
    order: list[int] = []
    for i, unit in enumerate(units_of(model)[1:]):
        gather = unit._gather
        unit._gather = lambda i=i, gather=gather: (order.append(i), gather())[1]
    for turn[:] in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        loss = model(batch()).sum()
        order.clear()
        loss.backward()
        assert order == turn[::-1]


# From outside of forward


@check()
def a_module_called_outside_its_unit_s_forward_says_so() -> None:
    for use_orig_params in (False, True):
        for strategy in (FULL_SHARD, SHARD_GRAD_OP):
            model = wrapped(strategy, use_orig_params=use_orig_params)
            outside = pytest.raises(RuntimeError, match=r"linear\.weight.* of the FSDP unit Block, which is sharded")
            with outside:  # before the root is known
                model.blocks[1].module.linear(batch())
            for _ in range(2):
                model(batch()).sum().backward()
                for call, names, unit in (
                    (model.first, "first.weight", "root (Net)"),
                    (model.blocks[1].module.linear, "linear.weight", "blocks.1 (Block)"),
                    (partial(model.generate, steps=1), "first.weight", "root (Net)"),
                ):
                    text = rf"{re.escape(names)}.* of the FSDP unit {re.escape(unit)}, which is sharded.*Call the"
                    with pytest.raises(RuntimeError, match=text):
                        call(batch())
            with Fsdp.summon_full_params(model):
                model.first(batch())
                model.module(batch())
            with pytest.raises(RuntimeError, match="is sharded"):
                model.first(batch())


@check()
def a_whole_unit_pays_nothing_for_that() -> None:
    """The guards are hooks that are there only while the unit is sharded; a user's own stay."""
    model, seen = wrapped(use_orig_params=True), []
    linear = model.blocks[0].module.linear
    assert len(linear._forward_pre_hooks) == 1
    linear.register_forward_pre_hook(lambda module, args: seen.append(len(module._forward_pre_hooks)))
    model(batch()).sum().backward()
    assert seen == [1]
    assert len(linear._forward_pre_hooks) == 2
    replicated = wrapped(NO_SHARD, use_orig_params=True)
    assert not replicated.first._forward_pre_hooks
    replicated.first(batch())


@check(behaviour=17)
def a_registered_method_gathers_and_frees_as_forward_does() -> None:
    for use_orig_params in (False, True):
        model = wrapped(use_orig_params=use_orig_params)
        expected = Net()
        expected.load_state_dict(model.state_dict())
        register_fsdp_forward_method(model, "generate")
        with counted() as calls, torch.no_grad():
            assert torch.equal(model.generate(batch(), steps=2), expected.generate(batch(), steps=2))
        assert taken(calls)[0] == 1 + 2 * 3  # the root once, its blocks in each of the steps
        assert_sharded(model)
        model.generate(batch(), 2).sum().backward()
        assert all(p.grad is not None for p in model.parameters() if p.numel())
    with pytest.raises(ValueError, match="does not have a method generally"):
        register_fsdp_forward_method(model, "generally")
    register_fsdp_forward_method(expected, "anything")  # not FSDP: as in torch nothing


# torch.compile


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(3):
        loss = model(batch()).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@check(strategy=(FULL_SHARD,), orig=(False,))
@check(strategy=(SHARD_GRAD_OP,), orig=(True,), wide=True)
def a_compiled_model_computes_the_same_one_graph_for_each_unit(strategy: ShardingStrategy, orig: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    expected = losses(wrapped(strategy, use_orig_params=orig))
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(wrapped(strategy, use_orig_params=orig), backend=graphs)
    assert losses(compiled) == expected
    assert graphs.frame_count >= 1  # blocks; none of it is a gather or a free
    assert not any("all_gather" in str(graph.code) for graph in graphs.graphs)


@check()
def modules_compiled_before_they_are_wrapped_compute_the_same() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    expected = losses(wrapped())
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    net = Net()
    net.blocks[0].compile(backend=graphs)
    assert losses(wrapped(net=net)) == expected
    assert graphs.frame_count >= 1


@check()
def one_graph_of_a_sharded_model_is_refused() -> None:
    torch._dynamo.reset()
    model = torch.compile(wrapped(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"FullyShardedDataParallel\.forward"):
        model(batch())


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


def expected(name: str) -> Counted:
    case = CASES[name]
    counts = {"FULL_SHARD": case.full, "SHARD_GRAD_OP": case.grad_op, "NO_SHARD": case.none}
    return {(name, strategy, orig): each for strategy, each in counts.items() for orig in case.use_orig_params}


@cache
def counted_on_ranks(wrap: Callable[..., nn.Module]) -> list[Counted]:
    return launch(count, 2, wrap, timeout=120)


@pytest.mark.behaviour(16, 17, 18, 20, 21, 26)
@pytest.mark.parametrize("name", CASES)
def test_collectives_are_as_many_as_they_should_be(name: str) -> None:
    for found in counted_on_ranks(ours):
        assert found.items() >= expected(name).items()


@pytest.mark.wide
@pytest.mark.behaviour(16, 17, 18, 20, 21, 26)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.as_in_torch])
def test_torch_s_are_as_many(name: str) -> None:
    for found in counted_on_ranks(torchs):
        assert found.items() >= expected(name).items()


# Hybrid sharding, on four ranks


def count_hybrid() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2))
    found = {}
    for strategy in (HYBRID_SHARD, HYBRID_ZERO2):
        for use_orig_params in (False, True):
            model = Fsdp(
                Net(), None, strategy, auto_wrap_policy={Block}, device_mesh=mesh, use_orig_params=use_orig_params
            )
            model(batch()).sum().backward()
            with comm.record() as log:
                model(batch()).sum().backward()
            across, inside = (mesh.get_group(dim).group_name for dim in (0, 1))
            of = {inside: "inside", across: "across"}
            found[strategy.name, use_orig_params] = dict(Counter((call.op, of[call.group]) for call in log))
    return found


@pytest.mark.behaviour(10, 24)
def test_hybrid_sharding_gathers_inside_a_group_and_reduces_across() -> None:
    for results in launch(count_hybrid, 4, timeout=60):
        for (strategy, _), counts in results.items():
            gathers = 7 if strategy == "HYBRID_SHARD" else 4
            assert counts == {
                ("all_gather", "inside"): gathers,
                ("reduce_scatter", "inside"): 4,
                ("all_reduce", "across"): 4,
            }


# Uneven numbers of batches


def run_out_of_batches() -> str:
    model = wrapped()
    for _ in range(3 if dist.get_rank() else 4):
        model(batch()).sum().backward()
    return "ended"


def test_uneven_batches_end_at_a_time_out_that_names_the_rank() -> None:
    with pytest.raises(RuntimeError, match=r"no answer from rank\(s\) 0 within 2 s; finished: 1"):
        launch(run_out_of_batches, 2, timeout=2)
