"""What happens to parameters between steps: frozen, cast, replaced, grouped, without gradients or elements."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp import comm
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp.fsdp.unit import SHARDED

check = Checks(__name__)

WIDTH = 5
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy
STRATEGIES = FULL_SHARD, SHARD_GRAD_OP, NO_SHARD
Fsdp = FullyShardedDataParallel


class Block(nn.Module):
    """A matrix, a vector and one element, of which the first rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.gain = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias) * self.gain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


def plain(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def wrapped(orig: bool = True, strategy: ShardingStrategy = FULL_SHARD, **options: Any) -> Any:
    policy = ModuleWrapPolicy({Block})
    return Fsdp(plain(), sharding_strategy=strategy, use_orig_params=orig, auto_wrap_policy=policy, **options)


def everyones_batch() -> Tensor:
    """The same on all ranks, so that one process has the same gradients."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))


def loss_of(model: nn.Module) -> Tensor:
    x = everyones_batch().to(next(iter(model.parameters())).dtype)
    return (model(x) - 1).square().sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> float:
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    return loss.item()


def assert_same(model: Any, expected: nn.Module) -> None:
    state = model.state_dict()
    for name, value in expected.state_dict().items():
        assert state[name].dtype == value.dtype, name
        torch.testing.assert_close(state[name], value, msg=lambda text, name=name: f"{name}: {text}")


# Read by another unit

READ: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one element": lambda other, x: x * other.gain,  # a slice broadcasts, or is empty
    "detached": lambda other, x: x * other.gain.detach(),
    "data": lambda other, x: x + other.gain.data,
    "a matrix": lambda other, x: torch.nn.functional.linear(x, other.weight),
    "a sum": lambda other, x: x + other.weight.square().sum(),
}


class Reader(nn.Module):
    """Uses a parameter of its second layer after the first, or after both."""

    def __init__(self, read: Any, when: str) -> None:
        super().__init__()
        self.first, self.block, self.read, self.when = nn.Linear(WIDTH, WIDTH), Block(), read, when

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        assert self.block.weight.shape == (WIDTH, WIDTH)  # harmless
        return self.block(self.read(self.block, x)) if self.when == "before" else self.read(self.block, self.block(x))


@check(orig=(False, True), when=("before", "after"), read=READ)
def a_parameter_of_a_sharded_unit_is_read_by_no_other(orig: bool, when: str, read: Any) -> None:
    model: Any = Fsdp(Reader(read, when), use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Block}))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"needs (gain|weight) of the FSDP unit block .* is sharded"):
            model(torch.randn(2, WIDTH))
        if orig:  # slices between forwards, as torch has them
            assert type(model.block.weight) is nn.Parameter
            assert model.block.weight.ndim == 1
        with Fsdp.summon_full_params(model):
            assert model.block.weight.shape == (WIDTH, WIDTH)


# Both modes


@check(
    behaviour=6,
    orig=(False, True),
    strategy=STRATEGIES,
    offload=(False, True),
    when=("before", "after"),
    wide="combinations",
)
def a_model_cast_after_wrapping_trains_on(orig: bool, strategy: ShardingStrategy, offload: bool, when: str) -> None:
    model, expected = wrapped(orig, strategy, cpu_offload=CPUOffload(offload)), plain()
    if when == "after":  # torch refuses then
        loss_of(model).backward()
        model.zero_grad()
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert_same(model, expected.double())
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (model, expected))
    for _ in range(2):
        assert step(model, ours) == pytest.approx(step(expected, theirs), rel=1e-9)
    assert_same(model, expected)


@check(behaviour=6, orig=(False, True), strategy=STRATEGIES)
def parameters_that_were_given_other_memory_train_on(orig: bool, strategy: ShardingStrategy) -> None:
    model, expected = wrapped(orig, strategy), plain()
    loss_of(model)
    for m in (model, expected):
        m._apply(lambda t: t.clone() * 2)
    assert_same(model, expected)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (model, expected))
    for _ in range(2):
        assert step(model, ours) == pytest.approx(step(expected, theirs), rel=1e-5)


@check(behaviour=3, offload=(False, True))
def a_model_moved_elsewhere_is_refused(offload: bool) -> None:
    model = wrapped(False, cpu_offload=CPUOffload(offload))
    for instance in Fsdp.fsdp_modules(model):
        # As if the parameters had been there, for want of another device
        instance._unit.unsharded._home = torch.device("meta")
    text = (
        "An FSDP-managed module with parameter CPU off" if offload else "An FSDP-managed module unexpectedly has param"
    )
    for use in (loss_of, lambda m: m.state_dict()):
        with pytest.raises(RuntimeError, match=f"{text}.*on cpu.*(weight|bias)"):
            use(model)


@check(behaviour=(3, 21), strategy=STRATEGIES, offload=(False, True))
def a_flat_parameter_may_be_frozen_and_thawed(strategy: ShardingStrategy, offload: bool) -> None:
    model, expected = wrapped(False, strategy, cpu_offload=CPUOffload(offload)), plain()
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.01, momentum=0.9) for m in (model, expected))
    for trained in (True, False, True):
        for p in (*model.module.block.params, *expected.block.parameters()):
            p.requires_grad_(trained)
        assert step(model, ours) == pytest.approx(step(expected, theirs), rel=1e-5)
    assert_same(model, expected)


@check(behaviour=39, orig=(False, True), strategy=STRATEGIES, low=(False, True))
def looking_at_the_state_does_not_disturb(orig: bool, strategy: ShardingStrategy, low: bool) -> None:
    """Also not where a unit is never freed, or is whole at that moment."""
    precision = MixedPrecision(reduce_dtype=torch.bfloat16) if low else None
    model = wrapped(orig, strategy, mixed_precision=precision)
    reference = wrapped(orig, strategy, mixed_precision=precision)
    for leave_whole in (False, True):
        if leave_whole:
            loss_of(model)
        assert_same(model, plain())
        with Fsdp.summon_full_params(model):
            assert model.module.block.module.weight.shape == (WIDTH, WIDTH)
        assert loss_of(model).item() == loss_of(reference).item()


@check(behaviour=9, strategy=(FULL_SHARD, SHARD_GRAD_OP))
def one_rank_has_no_one_to_shard_with(strategy: ShardingStrategy) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.warns(UserWarning, match="FSDP is switching to use `NO_SHARD` instead of .*since the world size is 1"):
        model = wrapped(False, strategy, process_group=alone)
    assert {instance.sharding_strategy for instance in Fsdp.fsdp_modules(model)} == {NO_SHARD}
    with comm.record() as calls:
        loss_of(model).backward()
    assert {(call.op, call.ranks) for call in calls} == {("all_reduce", 1)}


# use_orig_params


@check(behaviour=8, strategy=STRATEGIES)
def parameters_keep_their_names_and_objects(strategy: ShardingStrategy) -> None:
    net = plain()
    before = dict(net.named_parameters())
    model = Fsdp(net, sharding_strategy=strategy, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    loss_of(model).backward()
    for instance in Fsdp.fsdp_modules(model):
        unit = instance._unit
        memory = unit.flat.shard.untyped_storage().data_ptr()
        for p in unit.shards:
            if strategy is NO_SHARD:
                assert p.dim() == 2 or p.shape in ((WIDTH,), (1,))
            else:
                assert p.dim() == 1
                assert (p.grad is None) == (p.numel() == 0)
            assert not p.numel() or p.untyped_storage().data_ptr() == memory
            assert p.grad is None or p.grad.shape == p.shape
    if strategy is not NO_SHARD:
        sizes: list[Any] = [None, None]
        dist.all_gather_object(sizes, [p.numel() for p in model.parameters()])
        assert [a + b for a, b in zip(*sizes, strict=True)] == [p.numel() for p in plain().parameters()]
        assert 0 in sizes[0] + sizes[1]


@check(behaviour=8, strategy=STRATEGIES)
def outside_forward_and_backward_a_module_shows_the_optimizers_parameters(strategy: ShardingStrategy) -> None:
    model = wrapped(strategy=strategy)
    step(model, torch.optim.SGD(model.parameters(), 0.1))
    listed = dict(model.named_parameters())
    for path, module in plain().named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}".lstrip(".")
            assert getattr(model.get_submodule(path), attribute) is listed[name], name


class Penalised(Block):
    """Adds the norm of its own parameters to its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.shape for name, p in self.named_parameters()}
        return super().forward(x) + sum(p.square().sum() for p in self.parameters())


class PenalisedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block = Penalised()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * sum(p.square().sum() for p in self.first.parameters())


def torchs(net: nn.Module, strategy: ShardingStrategy) -> Any:
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy

    return fsdp.FullyShardedDataParallel(
        net,
        sharding_strategy=fsdp.ShardingStrategy[strategy.name],
        use_orig_params=True,
        auto_wrap_policy=TorchsPolicy({Block, Penalised}),
        device_id=torch.device("cpu"),
    )


@check(behaviour=8, strategy=STRATEGIES, recompute=(None, False, True))
def inside_its_forward_a_module_has_whole_parameters(strategy: ShardingStrategy, recompute: bool | None) -> None:
    """A penalty on them is that of one process, whose gradients it has; outside they are the optimizer's slices."""
    torch.manual_seed(0)
    net = PenalisedNet()
    expected = copy.deepcopy(net)
    model = Fsdp(net, None, strategy, auto_wrap_policy=ModuleWrapPolicy({Penalised}), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    held = list(model.parameters())
    block, torchs_optimizer = net.block.module, torch.optim.SGD(expected.parameters(), 0.01)
    if recompute is not None:
        inner = net.block
        net.forward = lambda x: (
            checkpoint(inner, net.first(x), use_reentrant=recompute)
            + 0.1 * sum(p.square().sum() for p in net.first.parameters())
        )
    for _ in range(2):
        loss, theirs = loss_of(model), loss_of(expected)
        torch.testing.assert_close(loss, theirs)
        assert block.seen == {name: p.shape for name, p in expected.block.named_parameters()}
        assert [id(p) for p in model.parameters()] == [id(p) for p in held]
        for each, its in ((loss, optimizer), (theirs, torchs_optimizer)):
            each.backward()
            its.step()
            its.zero_grad()
        assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    assert_same(model, expected)


class PenalisedAfterwards(Net):
    """Adds the norm of all parameters to its output, those of its blocks too, whose forward is over."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * sum(p.norm() for p in self.parameters())


@check(behaviour=8, strategy=(SHARD_GRAD_OP, NO_SHARD), recompute=(False, True))
def parameters_that_stay_whole_are_whole_until_the_outermost_forward_ends(
    strategy: ShardingStrategy, recompute: bool
) -> None:
    torch.manual_seed(0)
    net = PenalisedAfterwards()
    expected = copy.deepcopy(net)
    model = Fsdp(net, None, strategy, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    held = list(model.parameters())
    if recompute:
        inner = model.module.block.module
        run = inner.forward
        inner.forward = lambda x: checkpoint(run, x, use_reentrant=False)
    for _ in range(2):
        loss, theirs = loss_of(model), loss_of(expected)
        torch.testing.assert_close(loss, theirs)
        assert [id(p) for p in model.parameters()] == [id(p) for p in held]
        loss.backward()
        theirs.backward()
    with Fsdp.summon_full_params(model, with_grads=True):
        for ours, its in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, its.grad)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, WIDTH + 1))
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]


@check(behaviour=8, strategy=(FULL_SHARD, SHARD_GRAD_OP))
def a_unit_that_is_called_by_itself_has_slices_after_its_forward(strategy: ShardingStrategy) -> None:
    model = Fsdp(Net(), None, strategy, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    held = [id(p) for p in model.parameters()]
    loss_of(model).backward()
    with torch.no_grad():
        model.module.block(torch.randn(2, WIDTH))
    assert [id(p) for p in model.parameters()] == held


@check(behaviour=8, raises=(False, True))
def a_module_whose_forward_raised_has_slices_again(raises: bool) -> None:
    model = wrapped()
    held = [id(p) for p in model.parameters()]
    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext():
        model(torch.randn(2, WIDTH + raises))
    assert [id(p) for p in model.parameters()] == held


@check(behaviour=8, how=("data", "attribute", "object"))
def parameters_changed_before_backward_are_refused_where_they_stay_whole(how: str) -> None:
    def change(model: Any) -> None:
        block = model.module.block.module
        p = dict(block.named_parameters())["weight"]
        if how == "data":
            p.data = p.data + 1
        elif how == "attribute":  # the whole parameter, where it stays whole
            block.weight.data = block.weight.data + 1
        else:
            block.weight = nn.Parameter(p.detach() + 1)

    torch.manual_seed(0)
    for model in (wrapped(strategy=SHARD_GRAD_OP), torchs(plain(), SHARD_GRAD_OP)):
        loss = loss_of(model)
        change(model)
        with pytest.raises(AssertionError, match=r"^FSDP does not support changing the parameters between"):
            loss.backward()
    sharded, untouched = wrapped(), wrapped()
    loss, expected, held = loss_of(sharded), loss_of(untouched), list(sharded.parameters())
    change(sharded)
    loss.backward()  # with the values that forward has seen
    expected.backward()
    for p, q in zip(held, untouched.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@check(behaviour=(3, 27), strategy=STRATEGIES, set_to_none=(False, True))
def single_parameters_may_be_frozen_and_thawed(strategy: ShardingStrategy, set_to_none: bool) -> None:
    model, expected = wrapped(True, strategy), plain()

    def optimizer(m: nn.Module) -> torch.optim.Optimizer:
        weights = [p for name, p in m.named_parameters() if name.endswith("weight")]
        others = [p for name, p in m.named_parameters() if not name.endswith("weight")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        return torch.optim.SGD(groups, 0.01)

    ours, theirs = optimizer(model), optimizer(expected)
    for frozen in ((), ("block.bias",), ("block.weight", "first.bias"), ("block.bias",), ()):
        for m in (model, expected):
            for name, p in m.named_parameters():
                p.requires_grad_(name not in frozen)
        losses = [loss_of(m) for m in (model, expected)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        if set_to_none:
            assert all(dict(model.named_parameters())[name].grad is None for name in frozen)
        for o in (ours, theirs):
            o.step()
            o.zero_grad(set_to_none)
    assert_same(model, expected)


@check(behaviour=8, strategy=STRATEGIES, kind=("foreach", "fused", "single"))
def optimizers_step_over_parameters_of_no_elements(strategy: ShardingStrategy, kind: str) -> None:
    model, expected = wrapped(True, strategy), plain()
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {"foreach": False}}[kind]
    ours, theirs = (torch.optim.AdamW(m.parameters(), 0.01, eps=0.1, **options) for m in (model, expected))
    for _ in range(3):
        step(model, ours, set_to_none=False)
        step(expected, theirs, set_to_none=False)
    assert_same(model, expected)


@check(behaviour=27, orig=(False, True), strategy=STRATEGIES)
def a_module_that_is_not_used_has_no_gradients(orig: bool, strategy: ShardingStrategy) -> None:
    model = wrapped(orig, strategy)
    model.module.forward = lambda x: model.module.first(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    model(everyones_batch()).sum().backward()
    assert all(p.grad is None for p in model.module.block.params)
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("block"), name


@check(behaviour=27)
def a_parameter_that_only_one_rank_uses_has_its_gradient_everywhere() -> None:
    """On the others it counts as zero."""
    model = wrapped(True)
    block = model.module.block.module
    used = [True, dist.get_rank() == 0]
    for uses_bias in used:
        block.forward = lambda x, uses_bias=uses_bias: x @ block.weight + (block.bias if uses_bias else 0)
        model(everyones_batch()).sum().backward()
    with Fsdp.summon_full_params(model, with_grads=True):
        assert torch.equal(block.bias.grad, torch.full((WIDTH,), 4.0 + 4.0 / 2))
        assert not block.gain.grad.any()  # unused on all, but of a unit that is used


@check(behaviour=8, strategy=STRATEGIES, how=("data", "object", "part"))
def parameters_that_were_replaced_count(strategy: ShardingStrategy, how: str) -> None:
    model, other = wrapped(True, strategy), plain(1)
    loss_of(model)
    inner = model.module.block.module
    for name, p in list(inner.named_parameters()):
        new = getattr(other.block, name).data
        if how == "object":
            setattr(inner, name, nn.Parameter(new.clone()))
        elif how == "data":
            p.data = new.clone()
        elif strategy is NO_SHARD:
            p.data.copy_(new)
        else:
            index = inner_names(model).index(name)
            p.data = model.module.block._unit.contents.part_of(index, new).clone()
    expected = plain()
    expected.block.load_state_dict(other.block.state_dict())
    assert_same(model, expected)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (model, expected))
    for _ in range(2):
        assert step(model, ours) == pytest.approx(step(expected, theirs), rel=1e-5)
    assert_same(model, expected)


def inner_names(model: Any) -> list[str]:
    return [name.rpartition(".")[2] for name in model.module.block._unit.flat.names]


@check(behaviour=8, strategy=STRATEGIES, how=("data", "object"))
def a_replacement_of_another_size_is_refused(strategy: ShardingStrategy, how: str) -> None:
    model = wrapped(True, strategy)
    loss_of(model)
    inner = model.module.block.module
    if how == "data":
        inner._parameters["weight"].data = torch.zeros(7, 3)
    else:
        inner.weight = nn.Parameter(torch.zeros(7, 3))
    with pytest.raises(RuntimeError, match=r"Cannot writeback when the parameter shape changes\n.*weight has \(5, 5\)"):
        loss_of(model)


@check(behaviour=15)
def gathers_wait_for_what_was_written_back() -> None:
    """On CUDA: written on the compute stream, before the stream of the gathers is told to wait for that."""
    model = wrapped(True)
    loss_of(model).backward()
    happened: list[str] = []
    unit, schedule = model.module.block._unit, model._engine.schedule

    def noting(what: str, function: Any) -> Any:
        return lambda: (happened.append(what), function())[1]

    with (
        patch.object(unit.view, "refresh", noting("write back", unit.view.refresh)),
        patch.object(schedule, "begin_forward", noting("wait", schedule.begin_forward)),
    ):
        loss_of(model)
    assert happened == ["write back", "wait"]


@check(behaviour=5)
def a_rank_may_have_no_elements_at_all() -> None:
    model = Fsdp(nn.LayerNorm(1, bias=False), use_orig_params=True)
    (p,) = model.parameters()
    assert p.numel() == 1 - dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model._unit.state is SHARDED
    assert model.state_dict()["weight"].shape == (1,)


@check(behaviour=5, precision=(torch.float32, torch.bfloat16))
def slices_are_aligned_when_gathered(precision: torch.dtype) -> None:
    model = wrapped(True, mixed_precision=MixedPrecision(precision))
    for instance in Fsdp.fsdp_modules(model):
        offsets = instance._unit.flat.layout.offsets
        assert not any(offset * precision.itemsize % 16 for offset in offsets)
    with comm.record() as calls:
        loss_of(model)
    assert sum(c.op == "all_gather" for c in calls) == 2


class Withholding(torch.autograd.Function):
    """x + shift, whose backward gives the shift no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Withheld(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Withholding.apply(x, self.shift))


@check(orig=(False, True), strategy={each.name: each for each in STRATEGIES})
def a_function_may_give_a_parameter_no_gradient(orig: bool, strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(Withheld(), nn.Linear(WIDTH, WIDTH))
    model: Any = Fsdp(
        copy.deepcopy(alone), None, strategy, auto_wrap_policy=ModuleWrapPolicy({Withheld}), use_orig_params=orig
    )
    x = torch.randn(3, WIDTH)
    for net in (alone, model):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with Fsdp.summon_full_params(model):
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.view_as(q), q)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
