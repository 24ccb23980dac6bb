"""What surrounds training: state dicts, whole parameters, what the optimizer sees, wrapping, errors that explain."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp import comm, device
from minifsdp.fsdp import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    RateLimitedSchedule,
    ShardingStrategy,
    SyncSchedule,
)
from minifsdp.fsdp.torch_api.wrap import wrap_children
from minifsdp.fsdp.unit import SHARDED
from minifsdp.instruments.launch import launch

check = Checks(__name__)

WIDTH = 3  # with bias 12 elements per layer: an odd total below
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy
STRATEGIES = FULL_SHARD, SHARD_GRAD_OP, NO_SHARD

Fsdp = FullyShardedDataParallel
summon = FullyShardedDataParallel.summon_full_params


class Block(nn.Module):
    """Parameters and buffers of several dtypes, one weight under two names and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.again = nn.ModuleList([self.one])
        self.odd = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.again[0](torch.tanh(self.two(self.norm(self.one(x))))) * self.odd


class Model(nn.Module):
    greeting = "hello"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.mask
        for block in self.blocks:
            x = block(x)
        return x


def plain(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(seed: int = 0, strategy: ShardingStrategy = FULL_SHARD, **options: Any) -> Fsdp:
    return Fsdp(plain(seed), None, strategy, auto_wrap_policy={Block}, **options)


def plain_inside_a_plain_module(seed: int = 0) -> nn.ModuleDict:
    model = plain(seed)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return nn.ModuleDict({"encoder": model, "decoder": other, "plain": nn.Linear(WIDTH, WIDTH)})


def inside_a_plain_module(seed: int = 0) -> nn.ModuleDict:
    """Two FSDP models side by side under a module that knows nothing of it."""
    model = plain_inside_a_plain_module(seed)
    model["encoder"] = Fsdp(model["encoder"], auto_wrap_policy={Block})
    model["decoder"] = Fsdp(model["decoder"], auto_wrap_policy={nn.Linear})
    return model


def batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def train_a_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batch()).square().sum().backward()
    optimizer.step()


def shards(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


def assert_freed(model: nn.Module) -> None:
    for instance in Fsdp.fsdp_modules(model):
        if instance._unit is not None and instance.sharding_strategy is not NO_SHARD:
            assert instance._unit.state is SHARDED
            assert instance._unit.flat.full.untyped_storage().nbytes() == 0


# State dicts


@check(strategy=STRATEGIES)
def a_state_dict_is_the_plain_model_s(strategy: ShardingStrategy) -> None:
    model = sharded(strategy=strategy)
    assert_same(model.state_dict(), plain().state_dict())
    assert model.state_dict()._metadata.keys() == plain().state_dict()._metadata.keys()
    assert_freed(model)
    train_a_step(model)
    state = model.state_dict()
    assert_freed(model)
    assert not torch.equal(state["head.weight"], plain().head.weight)
    loaded = plain(1)
    loaded.load_state_dict(state)
    x = batch()
    assert torch.equal(loaded.eval()(x), model.eval()(x))


@check()
def a_state_dict_goes_through_a_plain_module() -> None:
    assert_same(inside_a_plain_module().state_dict(), plain_inside_a_plain_module().state_dict())
    assert_same(inside_a_plain_module().state_dict(prefix="x."), plain_inside_a_plain_module().state_dict(prefix="x."))


@check(strategy=STRATEGIES)
def a_state_dict_holds_copies(strategy: ShardingStrategy) -> None:
    model = sharded(strategy=strategy)
    before = shards(model)
    state = model.state_dict()
    for name, p in plain().named_parameters(remove_duplicate=False):
        assert state[name].untyped_storage().nbytes() == p.numel() * p.element_size(), name
        assert not state[name].requires_grad
        state[name].fill_(9)
    assert all(torch.equal(a, b) for a, b in zip(shards(model), before, strict=True))
    assert not any((value == 9).all() for name, value in model.state_dict().items() if "first" in name)


@check(strategy=STRATEGIES)
def a_state_dict_is_up_to_date_after_a_forward_and_a_step(strategy: ShardingStrategy) -> None:
    """Between a forward without backward and the next one, what the forward gathered is older than the shards."""
    model = sharded(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batch()).sum().backward()
    model(batch())
    optimizer.step()
    state = model.state_dict()
    model.eval()(batch())  # gathers anew
    assert_same(model.state_dict(), state)


# Loading


@check(strategy=STRATEGIES)
def loading_gives_the_saved_model(strategy: ShardingStrategy) -> None:
    model = sharded(0, strategy)
    parameters = list(model.parameters())
    saved = plain(1).state_dict()
    keys = list(saved)
    result = model.load_state_dict(saved)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert list(saved) == keys
    assert_freed(model)
    assert_same(model.state_dict(), saved)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model.eval()(batch()), _loaded(plain(), saved).eval()(batch()))


def _loaded(model: nn.Module, state: dict[str, Any]) -> nn.Module:
    model.load_state_dict(state)
    return model


@check()
def loading_goes_through_a_plain_module() -> None:
    model, saved = inside_a_plain_module(0), plain_inside_a_plain_module(1).state_dict()
    model.load_state_dict(saved)
    assert_same(model.state_dict(), saved)
    assert_freed(model)


@check(strategy=STRATEGIES)
def loading_after_a_forward_counts(strategy: ShardingStrategy) -> None:
    model, saved = sharded(0, strategy), plain(1).state_dict()
    model(batch())
    model.load_state_dict(saved)
    assert_same(model.state_dict(), saved)
    assert torch.equal(model.eval()(batch()), _loaded(plain(), saved).eval()(batch()))


@check()
def loading_names_keys_without_wrappers() -> None:
    for make, prefix in ((sharded, ""), (inside_a_plain_module, "encoder.")):
        model = make()
        state = model.state_dict()
        state[f"{prefix}blocks.1.surprise"] = torch.zeros(1)
        for name in ("blocks.0.odd", "first.weight"):
            del state[prefix + name]
        state[f"{prefix}blocks.1.odd"] = torch.zeros(7)
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(state)
        text = str(error.value)
        assert f'Missing key(s) in state_dict: "{prefix}first.weight", "{prefix}blocks.0.odd"' in text, text
        assert f'Unexpected key(s) in state_dict: "{prefix}blocks.1.surprise"' in text, text
        assert f"size mismatch for {prefix}blocks.1.odd:" in text, text
        assert "_fsdp" not in text, text
        assert_freed(model)
        del state[f"{prefix}blocks.1.odd"]
        result = model.load_state_dict(state, strict=False)
        assert set(result.missing_keys) == {
            f"{prefix}{name}" for name in ("first.weight", "blocks.0.odd", "blocks.1.odd")
        }
        assert result.unexpected_keys == [f"{prefix}blocks.1.surprise"]


@check()
def loading_cannot_assign() -> None:
    model = sharded()
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(plain(1).state_dict(), assign=True)
    assert_same(model.state_dict(), plain().state_dict())


# Whole parameters


@check(strategy=STRATEGIES)
def summoned_parameters_are_the_plain_model_s(strategy: ShardingStrategy) -> None:
    model = sharded(strategy=strategy)
    outside = [name for name, _ in model.named_parameters()]
    with summon(model):
        assert_same(dict(model.named_parameters()), dict(plain().named_parameters()))
        assert torch.equal(model.module.blocks[0].module.one.weight, plain().blocks[0].one.weight)
        assert_same(model.state_dict(), plain().state_dict())
        with summon(model):  # once is enough
            pass
        assert model.module.first.weight.numel() == WIDTH * WIDTH
    assert [name for name, _ in model.named_parameters()] == outside
    assert all(name.endswith("_flat_param") for name in outside)
    assert_freed(model)


@check()
def summoned_names_are_clean_if_the_root_has_no_parameters() -> None:
    model = Fsdp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), auto_wrap_policy={nn.Linear})
    with summon(model):
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@check(strategy=STRATEGIES)
def what_is_written_to_summoned_parameters_stays_if_wanted(strategy: ShardingStrategy) -> None:
    model = sharded(strategy=strategy)
    for writeback, value in ((True, 3.0), (False, 4.0)):
        with summon(model, writeback=writeback), torch.no_grad():
            for p in model.parameters():
                p.fill_(value)
        stays = writeback or strategy is NO_SHARD  # there is nothing but the summoned memory
        expected = value if stays else 3.0
        assert all((p == expected).all() for name, p in model.state_dict().items() if name.endswith(("weight", "odd")))
        assert_freed(model)


@check()
def what_is_not_to_stay_does_not_reach_the_next_forward() -> None:
    """Under SHARD_GRAD_OP in no_sync the parameters stay whole from one micro-batch to the next."""
    model = sharded(strategy=SHARD_GRAD_OP)
    with model.no_sync():
        model(batch()).sum().backward()
        before = model(batch())
        with summon(model, writeback=False), torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert torch.equal(model(batch()), before)


@check(strategy=STRATEGIES)
def summoning_does_not_undo_a_step(strategy: ShardingStrategy) -> None:
    model = sharded(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batch()).sum().backward()
    model(batch())
    optimizer.step()
    after = shards(model)
    with summon(model):
        pass
    assert all(torch.equal(a, b) for a, b in zip(shards(model), after, strict=True))


@check()
def summoning_without_recursion_is_for_the_outermost_unit() -> None:
    model = sharded()
    with summon(model, recurse=False):
        assert torch.equal(model.module.first.weight, plain().first.weight)
        inner = [m for m in Fsdp.fsdp_modules(model) if m is not model]
        assert all(m._unit.state is SHARDED for m in inner)
        assert sum(name.endswith("_flat_param") for name, _ in model.named_parameters()) == len(inner)
    assert_freed(model)


@check()
def summoned_memory_goes_when_the_body_raises() -> None:
    model = sharded()
    with contextlib.suppress(ZeroDivisionError), summon(model):
        raise ZeroDivisionError
    assert_freed(model)
    train_a_step(model)


@check()
def summoning_reaches_models_inside_a_plain_module() -> None:
    model = inside_a_plain_module()
    with summon(model):
        assert torch.equal(model["encoder"].module.first.weight, plain().first.weight)
        assert model["decoder"].module[0].module.weight.shape == (WIDTH, WIDTH)
    assert_freed(model)


@check()
def summoning_inside_backward_is_refused() -> None:
    model = sharded()
    output = model(batch())

    def hook(gradient: Tensor) -> None:
        with summon(model):
            pass

    output.register_hook(hook)
    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
        output.sum().backward()
    train_a_step(model)
    assert_freed(model)


@check()
def summoned_changes_are_what_the_next_forward_computes_with() -> None:
    model = sharded()
    model(batch())  # the root stays whole
    with summon(model), torch.no_grad():
        model.module.head.weight.zero_()
    assert not model(batch()).any()


# What the optimizer and the user see


@check()
def the_optimizer_sees_shards_only() -> None:
    seen: list[list[nn.Parameter]] = []

    class Spy(Model):
        def features(self, x: Tensor) -> Tensor:
            assert isinstance(self.first.weight, nn.Parameter)
            assert isinstance(self.blocks[0].module.odd, Tensor)
            seen.append(list(self.parameters()))
            return super().features(x)

    torch.manual_seed(0)
    model = Fsdp(Spy(), auto_wrap_policy={Block})
    parameters = list(model.parameters())
    model(batch()).sum().backward()
    assert [[id(p) for p in inside] for inside in seen] == [[id(p) for p in parameters]]
    units = [m._unit for m in Fsdp.fsdp_modules(model)]
    assert [id(p) for p in parameters] == [id(unit.flat.shard) for unit in units]
    assert [p.numel() for p in parameters] == [-(-unit.flat.numel // 2) for unit in units]
    assert sum(unit.flat.numel for unit in units) == sum(p.numel() for p in plain().parameters())
    for p in parameters:
        assert isinstance(p, nn.Parameter)
        assert p.is_leaf
        assert p.grad is not None
        assert p.grad.shape == p.shape
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert [m.numel() for m in moments] == [p.numel() for p in parameters for _ in range(2)]


@check(strategy=STRATEGIES)
def what_got_no_gradient_has_none(strategy: ShardingStrategy) -> None:
    """A unit that was not used, and a frozen one, on all ranks; in a used unit, unused parameters get zeros."""
    model = plain()
    model.blocks[1].requires_grad_(False)
    model = Fsdp(model, None, strategy, auto_wrap_policy={Block})
    model.module.features = lambda x: model.blocks[1](model.first(x))
    model(batch()).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [False, True, True]


@check()
def attributes_and_indices_are_the_wrapped_module_s() -> None:
    model = sharded()
    assert model.greeting == "hello"
    assert model.blocks is model.module.blocks
    assert torch.equal(model.mask, torch.ones(WIDTH, dtype=torch.int64))
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nonsense'"):
        _ = model.nonsense
    row = Fsdp(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert isinstance(row[1], nn.Tanh)
    assert row[0] is row.module[0]
    assert len(row.module) == 2


@check()
def attributes_say_how_it_was_made() -> None:
    model = sharded(strategy=SHARD_GRAD_OP, forward_prefetch=True)
    assert (model.rank, model.world_size) == (dist.get_rank(), 2)
    assert model.process_group is dist.group.WORLD
    assert (model.forward_prefetch, model.limit_all_gathers) == (True, True)
    assert {m.sharding_strategy for m in Fsdp.fsdp_modules(model)} == {SHARD_GRAD_OP}
    assert [len(m.params) for m in Fsdp.fsdp_modules(model)] == [1, 1, 1]
    assert model.params[0] is next(model.parameters())
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()
    assert Fsdp.fsdp_modules(model) == [model, model.blocks[0], model.blocks[1]]


@check(strategy=STRATEGIES)
def a_method_that_needs_a_sharded_weight_explains(strategy: ShardingStrategy) -> None:
    model = sharded(strategy=strategy)
    for _ in range(2):
        explains = pytest.raises(RuntimeError, match=r"is sharded.*Call the wrapped module.*summon_full_params")
        with contextlib.nullcontext() if strategy is NO_SHARD else explains:
            model.first(batch())
        train_a_step(model)
    assert model.first.weight.shape == (WIDTH, WIDTH)
    assert model.first.weight.dtype == torch.float32
    assert model.first.weight.numel() == WIDTH * WIDTH
    assert "size" in repr(model.first.weight) or strategy is NO_SHARD
    with summon(model):
        model.first(batch())


@check()
def the_device_is_moved_to_first() -> None:
    model = Fsdp(plain().to(torch.float64), device_id=torch.device("cpu"))
    assert {p.device for p in model.parameters()} == {torch.device("cpu")}
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@check()
def clipping_returns_the_norm_in_the_gradients_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = Fsdp(nn.Linear(2, 2, dtype=dtype))
        assert model.clip_grad_norm_(1.0) == 0  # no gradients yet
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        norm = model.clip_grad_norm_(1.0)
        assert norm.dtype == dtype
        torch.testing.assert_close(norm, torch.tensor(6**0.5, dtype=dtype))
        total = sum(p.grad.float().square().sum() for p in model.parameters())
        dist.all_reduce(total)
        torch.testing.assert_close(total, torch.tensor(1.0), rtol=1e-2, atol=0)


@check()
def a_model_without_parameters_runs() -> None:
    x = batch().requires_grad_()
    for schedule in (None, SyncSchedule, RateLimitedSchedule):
        model = Fsdp(nn.Sequential(nn.Tanh(), nn.ReLU()), schedule=schedule)
        model(x).sum().backward()
        assert model.state_dict() == {}
        assert model.clip_grad_norm_(1.0) == 0


# Wrapping


@check()
def a_module_under_two_names_is_one_unit() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)
            self.same = self.one
            self.deep = nn.ModuleDict({"again": self.one})

        def forward(self, x: Tensor) -> Tensor:
            return self.deep["again"](self.same(self.one(x)))

    torch.manual_seed(0)
    reference = Twice()
    torch.manual_seed(0)
    model = Fsdp(Twice(), auto_wrap_policy={nn.Linear})
    assert model.one is model.same is model.deep["again"]
    assert torch.equal(model(batch()), reference(batch()))
    assert_same(model.state_dict(), reference.state_dict())
    saved = {name: value + 1 for name, value in reference.state_dict().items()}
    model.load_state_dict(saved)
    assert_same(model.state_dict(), saved)


@check()
def a_parameter_in_two_units_is_an_error_that_names_both_places() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        model[2].weight = model[0].weight
        return model

    with pytest.raises(ValueError, match=r"0\.weight and 2\.weight are one parameter"):
        Fsdp(tied(), auto_wrap_policy={nn.Linear})
    for by_hand in (0, 2):
        model = tied()
        model[by_hand] = Fsdp(model[by_hand])
        with pytest.raises(ValueError, match=rf"weight and {2 - by_hand}\.weight are one parameter"):
            Fsdp(model)
    Fsdp(tied())


@check()
def a_policy_wants_a_model_that_nobody_has_wrapped() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Fsdp(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="requires modules to not already have FSDP applied but found 1 in Sequential"):
        Fsdp(model, auto_wrap_policy={nn.Linear})


@check()
def parameters_of_two_kinds_in_a_unit_are_an_error_that_names_them() -> None:
    model = plain()
    model.blocks[1].one.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"blocks\.1 has both parameters with requires_grad=True and False"):
        Fsdp(model, auto_wrap_policy={Block})
    model = plain()
    model.head.double()
    with pytest.raises(ValueError, match=r"uniform dtype.*head\.weight is torch\.float64"):
        Fsdp(model)


# Who may call what, and when


@check()
def a_unit_that_ran_alone_cannot_get_a_root() -> None:
    model = sharded()
    model.blocks[1](batch())
    with pytest.raises(
        AssertionError, match=r"Non-root FSDP instance's `_is_root` should not have been set yet.*Block"
    ):
        model(batch())


@check()
def what_is_for_the_root_says_so() -> None:
    model = sharded()
    model(batch()).sum().backward()
    with (
        pytest.raises(RuntimeError, match=re.escape("`no_sync()` on inner FSDP instances is not supported.")),
        model.blocks[0].no_sync(),
    ):
        pass
    with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
        model.blocks[0].clip_grad_norm_(1.0)


@check(strategy=STRATEGIES)
def gradients_of_gradients_are_refused(strategy: ShardingStrategy) -> None:
    model = sharded(strategy=strategy)
    with pytest.raises(RuntimeError, match="FSDP does not support gradients of gradients"):
        model(batch()).sum().backward(create_graph=True)
    x = batch().requires_grad_()
    with pytest.raises(RuntimeError, match="FSDP does not support gradients of gradients"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    train_a_step(model)
    assert_freed(model)


@check()
def a_forward_that_raises_costs_the_next_one_nothing() -> None:
    class Fragile(nn.Linear):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if Fragile.broken:
                raise ZeroDivisionError
            return super().forward(x)

    for options in ({}, {"depth": None}, {"depth": None, "limit": 1}):
        layers = [Fragile(WIDTH, WIDTH) if i == 1 else nn.Linear(WIDTH, WIDTH) for i in range(5)]
        policy = {nn.Linear, Fragile}
        model = Fsdp(nn.Sequential(*layers), auto_wrap_policy=policy, schedule=partial(RateLimitedSchedule, **options))
        calls = []
        for broken in (False, False, True, False, False):
            Fragile.broken = broken
            with comm.record() as log, contextlib.suppress(ZeroDivisionError):
                model(batch()).sum().backward()
            calls.append(len(log))
        assert calls[0] == calls[1] == calls[3] == calls[4], (options, calls)


@check()
def a_unit_is_freed_when_its_own_backward_ends() -> None:
    """Frozen or not, in a checkpoint of either kind or in none."""
    for frozen in (False, True):
        for reentrant in (None, False, True):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            model[2].requires_grad_(not frozen)
            model = Fsdp(model, auto_wrap_policy={nn.Linear}, schedule=SyncSchedule)
            unit, seen = model[2]._unit, []

            def half(h: Tensor, model: Any = model) -> Tensor:
                return model[3](model[2](h))

            model._lazy_init()  # its units run by themselves here
            h = model[0](batch())
            h.register_hook(lambda gradient, unit=unit, seen=seen: seen.append(unit.state))
            h = model[1](h)
            output = half(h) if reentrant is None else checkpoint(half, h, use_reentrant=reentrant)
            output.sum().backward()
            assert seen == [SHARDED], (frozen, reentrant, seen)


@check()
def everything_is_freed_that_was_allocated() -> None:
    """By its roles, over construction, a step, evaluation, saving and loading: nothing unsharded is left."""
    made: list[tuple[Tensor, str]] = []
    device.buffer_observers.append(lambda buffer, role: made.append((buffer, role)))
    try:
        model = sharded()
        train_a_step(model)
        with torch.no_grad():
            model(batch())
        model.load_state_dict(model.state_dict())
        with summon(model):
            pass
        kept = [p.grad.data_ptr() for p in model.parameters()]
    finally:
        device.buffer_observers.pop()
    alive = [(len(buffer), role) for buffer, role in made if buffer.untyped_storage().nbytes()]
    assert len(alive) == len(kept) == 3, alive
    assert {role for _, role in alive} == {"gradients"}


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


# Other numbers of ranks


def save() -> dict[str, Tensor]:
    model = sharded(1)
    train_a_step(model)
    return model.state_dict()


def load_and_save(state: dict[str, Tensor]) -> dict[str, Tensor]:
    model = sharded(0)
    model.load_state_dict(state)
    return model.state_dict()


def on_a_part_of_the_ranks() -> list[int] | None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    model = Fsdp(plain(), group, auto_wrap_policy={Block})
    train_a_step(model)
    assert (model.rank, model.world_size) == (dist.get_rank(group), 2)
    assert_freed(model)
    return [p.numel() for p in model.parameters()]


def save_on_two() -> dict[str, Tensor]:
    return save()


def on_three(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[int] | None]:
    return load_and_save(state), on_a_part_of_the_ranks()


def test_a_state_dict_fits_another_number_of_ranks_and_a_group_is_a_world() -> None:
    saved = launch(save, 2)
    for state in saved:
        assert_same(state, saved[0] | {name: value for name, value in state.items() if "running" in name})
    results = launch(on_three, 3, saved[0])
    for loaded, _ in results:
        assert_same(loaded, saved[0])
    sizes = [of_rank for _, of_rank in results]
    assert sizes[1] is None
    assert sizes[0] == sizes[2]
    alone = plain()
    alone.load_state_dict(saved[0])


def alone() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    texts = []
    for make in (partial(Torchs, device_id=torch.device("cpu")), Fsdp):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(nn.Linear(2, 2))
        texts.append([str(w.message) for w in caught if "NO_SHARD" in str(w.message)][:1])
    assert texts[0] == texts[1] != []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, reference = sharded(), plain()
        Fsdp(nn.Linear(2, 2), sharding_strategy=NO_SHARD)
    assert len(caught) == 1  # not one for each unit, and none where NO_SHARD was asked for
    assert caught[0].filename == __file__
    assert {m.sharding_strategy for m in Fsdp.fsdp_modules(model)} == {NO_SHARD}
    for _ in range(2):
        train_a_step(model)
        train_a_step(reference)
        assert_same(model.state_dict(), reference.state_dict())


def test_one_rank_has_nothing_to_shard() -> None:
    launch(alone, 1)


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=re.escape("call torch.distributed.init_process_group() first")):
        Fsdp(nn.Linear(2, 2))


# Policies


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def a_deep_model() -> nn.Module:
    """Modules of 6, 12, 20 and more parameters, some inside others."""
    return nn.Sequential(
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(2, 2))),
        nn.ModuleDict({"a": nn.Linear(5, 5), "list": nn.ModuleList([nn.Linear(2, 2), nn.Linear(4, 4)])}),
        nn.MultiheadAttention(4, 2),
        nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2), nn.Tanh()),
    )


SIZES = (1, 6, 7, 12, 20, 21, 40, 100, 10_000)


def policies() -> list[Any]:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsModuleWrapPolicy
    from torch.distributed.fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy

    by_size = {f"size {least}": partial(size_based_auto_wrap_policy, min_num_params=least) for least in SIZES}
    others = {
        "torch's classes": TorchsModuleWrapPolicy({nn.Linear, nn.MultiheadAttention}),
        "classes": ModuleWrapPolicy({nn.Linear, nn.MultiheadAttention}),
        "a container class": ModuleWrapPolicy([nn.Sequential]),
        "a function": lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 6,
        "always": always_wrap_policy,
    }
    return [pytest.param(policy, id=name) for name, policy in (by_size | others).items()]


@pytest.mark.parametrize("policy", policies())
def test_a_policy_wraps_what_it_wraps_in_torch(policy: Any) -> None:
    from torch.distributed.fsdp.wrap import _recursive_wrap

    theirs, ours = a_deep_model(), a_deep_model()
    _recursive_wrap(theirs, policy, Wrapper, set(), set(), only_wrap_children=True)
    wrap_children(ours, policy, Wrapper)

    def wrapped(model: nn.Module) -> list[str]:
        return [name for name, module in model.named_modules() if isinstance(module, Wrapper)]

    assert wrapped(ours) == wrapped(theirs)


@pytest.mark.parametrize("policy", ["Block", nn.Linear])
def test_what_is_no_policy_is_refused_in_words(policy):
    with pytest.raises(ValueError, match="is not a policy: give a set of module classes"):
        ModuleWrapPolicy(policy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"process_group": 3}, "process_group=3: give a torch.distributed.ProcessGroup"),
        ({"auto_wrap_policy": 3}, "3 is not a policy: give a set of module classes"),
    ],
)
def test_an_argument_of_another_kind_is_named(options, words):
    def wrap():
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            FullyShardedDataParallel(nn.Linear(2, 2), **options)

    launch(wrap, 1)


def test_a_copy_is_refused_in_words():
    def wrap():
        model = FullyShardedDataParallel(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match=r"\(Linear\) cannot be copied, .*: copy the module before it is"):
            copy.deepcopy(model)

    launch(wrap, 1)


def test_what_is_no_strategy_is_refused_in_words():
    def wrap():
        with pytest.raises(ValueError, match="sharding_strategy='FULL_SHARD': give a ShardingStrategy"):
            FullyShardedDataParallel(nn.Linear(2, 2), None, "FULL_SHARD")
        with pytest.raises(ValueError, match="is not a policy"):
            FullyShardedDataParallel(nn.Linear(2, 2), auto_wrap_policy=nn.Linear)

    launch(wrap, 1)
