"""Construction: from the user's module to units that hold shards, step by step and in bytes."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import comm
from minifsdp.flat_param import FlatParameter, Place, find_parameters
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from minifsdp.fsdp.torch_api.construct import find_device
from minifsdp.fsdp.torch_api.ignored import Ignored
from minifsdp.fsdp.torch_api.policies import CustomPolicy
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.layout import Layout
from minifsdp.unwritten import is_unwritten, mark_unwritten

check = Checks(__name__)

Fsdp = FullyShardedDataParallel
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings inside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught]


def refused(text: str, kind: type[Exception] = ValueError) -> Any:
    return pytest.raises(kind, match=re.escape(text))


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in other.items():
        assert one[name].dtype == value.dtype, name
        assert torch.equal(one[name], value), name


def same_on_all_ranks(value: Tensor) -> bool:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return all(torch.equal(value, other) for other in every)


def units(model: nn.Module) -> list[tuple[str, list[str], int]]:
    """Of each unit: where it is, what it holds, and how many elements."""
    found = []
    for name, m in model.named_modules():
        if isinstance(m, Fsdp) and m._unit is not None:
            found.append((name.replace("_fsdp_wrapped_module.", ""), m._unit.flat.names, m._unit.flat.numel))
    return found


class Net(nn.Module):
    """Three layers of different sizes, and a buffer."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, device=device)
        self.norm = nn.BatchNorm1d(7, device=device)
        self.last = nn.Linear(7, 3, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def net(seed: int = 0, device: str | None = None) -> Net:
    torch.manual_seed(seed)
    return Net(device)


def train(model: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


# The order of the steps, and what is left of the module


@check(behaviour=1)
def the_steps_come_in_torch_s_order() -> None:
    """Children before parents, and of each: memory, then rank 0's values, then flat and sharded."""
    seen = []

    class Layer(nn.Linear):
        def reset_parameters(self) -> None:
            seen.append(f"reset {self.out_features}")
            super().reset_parameters()

    model = nn.Sequential(
        nn.Sequential(Layer(2, 3, device="meta"), Layer(3, 4, device="meta")), Layer(4, 5, device="meta")
    )
    seen.clear()  # of what was tried on meta
    comm.observers.append(lambda call, phase: seen.append(call.op) or warnings.catch_warnings())
    try:
        model = Fsdp(model, auto_wrap_policy={nn.Sequential}, sync_module_states=True)
    finally:
        comm.observers.pop()
    ordered = [what for what, _ in itertools.groupby(seen)]
    assert ordered == ["reset 3", "reset 4", "broadcast", "reset 5", "broadcast"], ordered
    assert model._unit.flat.shard.numel() == 13  # of 4 * 5 + 5, padded


@check(behaviour=(2, 8))
def a_unit_has_what_no_inner_unit_has_and_autograd_sees_views_of_its_buffer() -> None:
    model = Fsdp(net(), auto_wrap_policy={nn.BatchNorm1d})
    assert units(model) == [("", ["first.weight", "first.bias", "last.weight"], 63), ("norm", ["weight", "bias"], 14)]
    for m in model.modules():
        assert {name for name, p in m._parameters.items() if p is not None} <= {"_flat_param"}
    seen = []
    model.first.register_forward_pre_hook(lambda m, _: seen.append((m.weight, m.bias)))
    model(torch.randn(4, 5))
    (weight, bias) = seen[0]
    assert weight.shape == (7, 5)
    assert weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    assert bias.storage_offset() == weight.numel()
    assert weight is model._unit.leaves[0]


@check(behaviour=6)
def sharding_frees_the_buffer_and_the_shard_owns_its_memory() -> None:
    model = Fsdp(net())
    flat, p = model._unit.flat, next(model.parameters())
    for _ in range(2):
        assert flat.full.untyped_storage().nbytes() == 0
        assert p is flat.shard
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        train(model)


@check()
def nothing_of_the_original_model_is_kept() -> None:
    model = net()
    originals = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    model = Fsdp(model, auto_wrap_policy={nn.Linear})
    gc.collect()
    assert not [ref for ref in originals if ref() is not None]


# Devices


def params_on(*devices: str) -> nn.Module:
    """A module whose parameters say that they are on these devices, which this machine may not have."""

    class Elsewhere(nn.Parameter):
        device = None
        is_meta = False

    module = nn.Module()
    for i, each in enumerate(devices):
        module._parameters[f"p{i}"] = torch.zeros(1).as_subclass(
            type("P", (Elsewhere,), {"device": torch.device(each)})
        )
    return module


def device_of(module: nn.Module, device_id: Any = None) -> torch.device:
    return find_device(device_id, module, Ignored(), comm.world())


@check()
def the_device_is_the_one_asked_for_or_the_module_s_or_the_group_s() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    assert device_of(nn.Linear(1, 1)) == cpu
    assert device_of(nn.Linear(1, 1, device="meta")) == cpu
    assert device_of(params_on("cuda:1")) == cuda
    with patch.object(torch.cuda, "device_count", lambda: 2), patch.object(torch.cuda, "current_device", lambda: 1):
        assert device_of(params_on("cpu"), 1) == device_of(params_on("cpu"), cuda) == cuda
        assert device_of(params_on("cpu", "cuda:1"), "cuda:1") == cuda
        for current in ("cuda", torch.device("cuda")):
            with pytest.warns(UserWarning, match="does not have an explicit index. FSDP will use the current device"):
                assert device_of(params_on("cpu"), current) == cuda
        with refused("FSDP only supports single device modules but got params on", RuntimeError) as error:
            device_of(params_on("cuda:0", "cuda:1"), 1)
        assert "p0 is on cuda:0, p1 is on cuda:1" in str(error.value)
        with refused(f"Inconsistent compute device and `device_id` on rank {dist.get_rank()}: cuda:1 vs cuda:0. p0"):
            device_of(params_on("cuda:1"), 0)
    with refused("To support a module with both CPU and GPU params, please pass in device_id argument", RuntimeError):
        device_of(params_on("cpu", "cuda:1"))
    for device_id in (cpu, "cpu"):
        model = Fsdp(net(), device_id=device_id, auto_wrap_policy={nn.Linear})
        assert {m.compute_device for m in Fsdp.fsdp_modules(model)} == {cpu}
    with patch.object(torch.cuda, "device_count", lambda: 0):
        for device_id in (0, cuda, "cuda"):
            with refused(f"device_id={device_id!r} is a CUDA device, and there is none here: leave device_id out"):
                Fsdp(net(), device_id=device_id)


# Meta


class Counted(nn.Linear):
    """Counts how often it is initialized, and has a buffer."""

    resets = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("scale", torch.ones(self.in_features, device=kwargs.get("device")))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.resets += 1
        if "scale" in self._buffers:
            self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def counted(device: str | None = None) -> nn.Module:
    """A layer beside a pair of layers beside a layer."""
    pair = nn.Sequential(Counted(5, 5, device=device), Counted(5, 5, device=device))
    return nn.Sequential(Counted(5, 5, device=device), pair, Counted(5, 5, device=device))


@check(behaviour=12)
def each_module_is_initialized_once_by_itself() -> None:
    """By `reset_parameters` or by `param_init_fn`, buffers too; never a child through its parent."""
    for policy in (None, {nn.Sequential}, {Counted}, {Counted, nn.Sequential}):
        seen: list[nn.Module] = []

        def init(module: nn.Module, seen: list[nn.Module] = seen) -> None:
            seen.append(module)
            if isinstance(module, Counted):
                module.to_empty(device="cpu", recurse=False)
                module.reset_parameters()

        for options in ({}, {"param_init_fn": init}):
            model = counted("meta")
            layers, every = [m for m in model.modules() if isinstance(m, Counted)], list(model.modules())
            model = Fsdp(model, auto_wrap_policy=policy, use_orig_params=bool(options), **options)
            assert [m.resets - 1 for m in layers] == [1] * 4, (policy, options)  # and once when it was built, on meta
            assert all((m.scale == 2).all() for m in layers)
            assert not [name for name, value in model.state_dict().items() if value.isnan().any()]
            train(model)
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(every)


@check(behaviour=12)
def values_from_meta_are_torch_s() -> None:
    """The same seed gives the same values: modules are initialized in the same order."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    for policy in (None, ModuleWrapPolicy({nn.Sequential}), ModuleWrapPolicy({Counted})):
        states = []
        for make in (Fsdp, Torchs):
            torch.manual_seed(3)
            states.append(whole(make(counted("meta"), device_id=torch.device("cpu"), auto_wrap_policy=policy)))
        assert_same(*states)


@check()
def what_has_values_keeps_them_beside_meta() -> None:
    """torch resets them: it initializes all of a unit if anything in it is on meta."""
    for use_orig_params in (False, True):
        model, expected = nn.Sequential(Counted(3, 3), Counted(3, 3, device="meta"), Counted(3, 3)), {}
        model[2].bias = nn.Parameter(torch.empty(3, device="meta"))
        for name, value in model.state_dict().items():
            if not value.is_meta:
                expected[name] = value.fill_(7.0).clone()
        state = whole(Fsdp(model, use_orig_params=use_orig_params))
        assert len(expected) == 5
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
        assert state["2.bias"].abs().max() < 1
        assert (state["1.scale"] == 2).all()


@check()
def rank_0_may_have_the_values_and_the_others_only_meta() -> None:
    """Also modules that cannot initialize themselves: nobody asks them to."""

    class Odd(nn.Module):
        def __init__(self, device: str | None) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.arange(5.0, device=device))
            self.register_buffer("mask", torch.tensor([True, False], device=device))
            self.register_buffer("wave", torch.tensor([1 + 2j], device=device))

    for options in ({}, {"param_init_fn": lambda m: m.to_empty(device="cpu", recurse=False)}):
        device = None if dist.get_rank() == 0 else "meta"
        model = nn.Sequential(net(1, device), Odd(device))
        state = whole(Fsdp(model, auto_wrap_policy={Odd, nn.BatchNorm1d}, sync_module_states=True, **options))
        assert_same(state, nn.Sequential(net(1), Odd(None)).state_dict())


@check()
def a_module_that_cannot_initialize_itself_is_an_error_with_the_cure() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.empty(3, device="meta"))

    text = "Unable to call `reset_parameters()` for module on meta device with error 'Odd' object has no attribute"
    with refused(text, RuntimeError) as error:
        Fsdp(nn.Sequential(Odd()))
    assert str(error.value).endswith("or pass param_init_fn.")
    with refused("Expected 3 to be callable but got <class 'int'>"):
        Fsdp(nn.Sequential(Odd()), param_init_fn=3)
    with refused("param_init_fn left on the meta device: 0.p.", RuntimeError):
        Fsdp(nn.Sequential(Odd()), param_init_fn=lambda module: None)
    for make in (Odd, lambda: Forgetful("weight")):
        model = make()  # a second try starts where the first one did
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"Unable to call|nothing has initialized"):
                Fsdp(model)
            assert all(t.is_meta for t in model.state_dict().values())


class Forgetful(nn.Module):
    """Initializes `forgets`-less."""

    def __init__(self, forgets: str) -> None:
        super().__init__()
        self.forgets = forgets
        self.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
        self.bias = nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("table", torch.empty(4, device="meta"))
        self.register_buffer("count", torch.empty((), dtype=torch.int64, device="meta"))
        self.register_buffer("mask", torch.empty(2, dtype=torch.bool, device="meta"))

    def reset_parameters(self) -> None:
        for name, tensor in itertools.chain(self._parameters.items(), self._buffers.items()):
            tensor.flatten()[1 if name == self.forgets and tensor.dim() else 0 :].fill_(1)
            if name == self.forgets == "count":
                mark_unwritten(tensor)


@check(behaviour=12)
def what_nobody_initialized_is_named() -> None:
    """A single element is enough; torch would train on whatever the memory held."""
    for name, said in {
        "weight": "inner.weight",
        "bias": "inner.bias",
        "table": "inner.table",
        "count": "inner.count",
        "mask": "inner.mask",
    }.items():
        for use_orig_params in (False, True):
            model = nn.ModuleDict({"inner": Forgetful(name), "fine": Forgetful("nothing")})
            with refused(f"nothing has initialized {said}: have each module's reset_par", RuntimeError) as error:
                Fsdp(model, use_orig_params=use_orig_params)
            assert "fine" not in str(error.value)
    Fsdp(nn.ModuleDict({"inner": Forgetful("nothing")}))


@check()
def a_reset_may_make_new_tensors() -> None:
    class Remade(Forgetful):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            self.weight = nn.Parameter(torch.full((2, 3), 5.0))
            self.table = torch.full((4,), 6.0)

    state = whole(Fsdp(Remade("weight")))
    assert (state["weight"] == 5).all()
    assert (state["table"] == 6).all()


@check()
def parameters_that_are_tied_on_meta_stay_one() -> None:
    """`Module.to_empty` gives each of the two names a Parameter of its own."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Linear(3, 3, bias=False, device="meta") for _ in range(2))
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    for options in ({}, {"param_init_fn": init}):
        for use_orig_params in (False, True):
            model = Fsdp(Tied(), use_orig_params=use_orig_params, **options)
            assert units(model)[0][1:] == (["one.weight"], 9 if not use_orig_params else model._unit.flat.numel)
            model(torch.ones(1, 3)).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            state = whole(model)
            assert torch.equal(state["one.weight"], state["two.weight"])


@check()
def buffers_get_their_values_in_a_unit_without_parameters() -> None:
    model = nn.Sequential(net(dist.get_rank()), nn.BatchNorm1d(3, affine=False))
    model[1].running_mean.fill_(dist.get_rank())
    model = Fsdp(model, auto_wrap_policy={Net}, sync_module_states=True)
    assert model._unit is None
    assert (model[1].running_mean == 0).all()
    model = Fsdp(nn.Sequential(nn.BatchNorm1d(3, affine=False, device="meta")))
    assert (model[0].running_var == 1).all()


@check(behaviour=12)
def param_init_fn_is_called_for_children_first() -> None:
    """As `Module.apply` does: one that sets its children's values, as T5's and GPT-2's do, has the last word."""

    def init(module: nn.Module, recurse: bool = False) -> None:
        module.to_empty(device="cpu", recurse=recurse)
        if isinstance(module, Counted):
            module.reset_parameters()
        elif not recurse:
            for child in module.children():
                nn.init.constant_(getattr(child, "weight", torch.empty(0)), len(list(module)))

    for policy, use_orig_params in itertools.product((None, {nn.Sequential}), (False, True)):
        options = {"auto_wrap_policy": policy, "use_orig_params": use_orig_params}
        state = whole(Fsdp(counted("meta"), param_init_fn=init, **options))
        assert [state[f"{name}.weight"].unique().tolist() for name in ("0", "1.0", "1.1", "2")] == [[3], [2], [2], [3]]
        assert all((state[f"{name}.scale"] == 2).all() for name in ("0", "1.0", "1.1", "2"))
        # a to_empty that goes on into the children takes nothing from them
        state = whole(Fsdp(counted("meta"), param_init_fn=lambda m: init(m, recurse=True), **options))
        assert all((state[f"{name}.scale"] == 2).all() for name in ("0", "1.0", "1.1", "2"))
        assert all(0 < state[f"{name}.weight"].abs().max() < 1 for name in ("0", "1.0", "1.1", "2"))


# Optimizers


@check()
def an_optimizer_that_was_built_before_wrapping_is_refused() -> None:
    """Its parameters are in the shards now, and get no gradients. Torch trains nothing, and says nothing."""
    for device in (None, "meta"):
        model = net(0, device)
        early = torch.optim.SGD([{"params": model.first.parameters()}, {"params": model.last.parameters()}], 0.1)
        model = Fsdp(model, auto_wrap_policy={nn.BatchNorm1d}, use_orig_params=device == "meta")
        model(torch.randn(4, 5)).sum().backward()
        with refused(
            "the optimizer was built before wrapping: it holds first.weight, first.bias, last.weight", RuntimeError
        ):
            early.step()
        torch.optim.SGD(model.parameters(), 0.1).step()
        early.param_groups.clear()
        early.add_param_group({"params": list(model.parameters())})
        early.step()


@check()
def optimizers_of_other_models_are_left_alone() -> None:
    """Also of one that shares a parameter with a wrapped one; and the note on a parameter keeps no model alive."""
    plain, shares, model = net(), nn.Linear(5, 7), net()
    shares.weight = model.first.weight
    early, gone = torch.optim.SGD(model.parameters(), 0.1), weakref.ref(model)
    model = Fsdp(model)
    torch.optim.SGD(plain.parameters(), 0.1).step()
    shares(torch.randn(2, 5)).sum().backward()
    before = shares.weight.detach().clone()
    torch.optim.SGD(shares.parameters(), 0.1).step()
    assert not torch.equal(shares.weight, before)
    with refused("it holds first.bias", RuntimeError):
        early.step()
    del model
    gc.collect()
    assert gone() is None
    early.step()


@check(behaviour=5)
def with_original_parameters_an_optimizer_from_before_goes_on() -> None:
    """It has the same Parameter objects."""
    for strategy in (FULL_SHARD, NO_SHARD):
        alone, model = net(), net()
        for each in (alone, model):
            optimizer = torch.optim.AdamW(each.parameters(), 0.1)
            each = each if each is alone else (model := Fsdp(each, None, strategy, use_orig_params=True))
            for step in range(2):
                optimizer.zero_grad()
                torch.manual_seed(step)
                each(torch.randn(4, 5)).square().sum().backward()
                optimizer.step()
        state = whole(model)
        for name, value in alone.state_dict().items():
            assert torch.allclose(state[name], value, atol=1e-6), name


# Bytes while constructing


SIZES = (20, 30, 25, 20, 31, 20, 25, 30, 25)


def peak_of(build: Callable[[], nn.Module], **options: Any) -> int:
    """Bytes at the most, of which none are there before."""
    with Ledger() as ledger:
        Fsdp(build(), auto_wrap_policy={nn.Linear}, **options)
        return ledger.peak.total


def layers(device: str | None = None) -> nn.Module:
    """Units of different sizes, with padding in some and nothing outside them."""
    return nn.Sequential(*(nn.Linear(a, b, device=device) for a, b in itertools.pairwise((7, *SIZES))))


def expected_peaks(ranks: int) -> dict[str, int]:
    numels = [a * b + b for a, b in itertools.pairwise((7, *SIZES))]
    padded = [numel + -numel % ranks for numel in numels]
    shards = [size // ranks for size in padded]
    so_far = list(itertools.accumulate(shards))
    return {
        "shards + one unit": 4 * max(held + full for held, full in zip(so_far, padded, strict=True)),
        "shards + two units": 4 * max(h + f + n for h, f, n in zip(so_far, padded, numels, strict=True)),
        "eager": 4 * max(h + f + sum(numels[i:]) for i, (h, f) in enumerate(zip(so_far, padded, strict=True))),
        "whole": 4 * sum(numels),
    }


def init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()


@check(behaviour=12)
def from_meta_the_peak_is_the_shards_and_one_unit_or_two() -> None:
    """To the byte: one unit if it is initialized in the buffer that is sharded, two with `param_init_fn`."""
    expected = expected_peaks(dist.get_world_size())
    assert peak_of(lambda: layers("meta")) == expected["shards + one unit"]
    assert peak_of(lambda: layers("meta"), sync_module_states=True) == expected["shards + one unit"]
    assert peak_of(lambda: layers("meta"), param_init_fn=init_linear) == expected["shards + two units"]
    assert peak_of(layers) == expected["eager"] > expected["whole"]
    assert expected["shards + one unit"] < expected["shards + two units"] < expected["whole"]


# Rank 0's values


@check(behaviour=11)
def rank_0_s_parameters_and_buffers_are_everyone_s_if_wanted() -> None:
    for use_orig_params in (False, True):
        for policy in (None, {nn.Linear}):
            model = net(dist.get_rank())
            for b in model.buffers():
                b.fill_(dist.get_rank())
            model.register_buffer("wide", torch.full((1,), float(dist.get_rank())).expand(3))
            ignored = model.last
            last = ignored.weight.detach().clone()
            model = Fsdp(
                model,
                auto_wrap_policy=policy,
                sync_module_states=True,
                ignored_modules=[ignored],
                use_orig_params=use_orig_params,
            )
            state = whole(model)
            assert torch.equal(state["first.weight"], net(0).first.weight)
            assert (state["norm.running_mean"] == 0).all()
            assert (state["norm.num_batches_tracked"] == 0).all()
            assert (state["wide"] == 0).all()
            assert torch.equal(state["last.weight"], last)  # ignored: each rank's own
            assert torch.equal(last, net(dist.get_rank()).last.weight)
    each = Fsdp(net(dist.get_rank()))
    assert not same_on_all_ranks(each.norm.running_mean + dist.get_rank())


@check(ranks=4, behaviour=11)
def rank_0_s_values_reach_all_groups_of_a_hybrid_model() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for device in (None, "meta"):
        model = net(dist.get_rank(), None if dist.get_rank() == 0 else device)
        model = Fsdp(
            model,
            sharding_strategy=HYBRID_SHARD,
            device_mesh=mesh,
            sync_module_states=True,
            auto_wrap_policy={nn.Linear},
        )
        assert_same(whole(model), net(0).state_dict())


# Ignored


@check(behaviour=2)
def ignored_states_are_left_alone() -> None:
    """Inside units too, by module or by parameter: not sharded, not cast, not initialized, not reduced."""
    for argument, pick in {
        "ignored_modules": lambda m: [m[1].norm],
        "ignored_states": lambda m: [m[1].norm],
        "ignored_states ": lambda m: list(m[1].norm.parameters()),
    }.items():
        for policy in (None, {Net}, {nn.Linear}):
            model = nn.Sequential(nn.Linear(5, 5), net())
            norm, theirs = model[1].norm, list(model[1].norm.parameters())
            options = {argument.strip(): pick(model)}
            model = Fsdp(
                model, auto_wrap_policy=policy, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), **options
            )
            assert list(norm.parameters()) == theirs
            assert {p for p in model.parameters() if p in set(theirs)} == set(theirs)
            assert not [name for _, names, _ in units(model) for name in names if "norm" in name]
            model._lazy_init()
            if argument != "ignored_states ":
                assert norm.running_mean.dtype == torch.float32, policy
    for policy in (None, {Net}):
        model = nn.Sequential(net())
        model[0].norm = nn.BatchNorm1d(7, device="meta")
        model = Fsdp(model, auto_wrap_policy=policy, ignored_modules=[model[0].norm])
        assert model[0].norm.weight.is_meta
        train_last = nn.Linear(3, 3)
        train_last.bias = nn.Parameter(torch.empty(3, device="meta"))
        weight = train_last.weight.detach().clone()
        Fsdp(nn.Sequential(train_last), auto_wrap_policy=policy, ignored_states=[train_last.weight])
        assert torch.equal(train_last.weight, weight)  # although `reset_parameters` of its module writes it
        assert model[0].norm.running_mean.is_meta


@check()
def what_an_inner_unit_ignores_the_outer_one_does_too() -> None:
    inner = net()
    tied = nn.Linear(5, 7, bias=False)
    tied.weight = inner.first.weight
    model = nn.ModuleDict(
        {"inner": Fsdp(inner, ignored_states=[inner.first.weight]), "tied": tied, "own": nn.Linear(2, 2)}
    )
    model = Fsdp(model)
    assert units(model)[0][1] == ["own.weight", "own.bias"]
    assert model["tied"].weight is inner.first.weight


@check()
def what_cannot_be_ignored_is_refused_in_torch_s_words() -> None:
    model, other = net(), nn.Linear(2, 2)
    with refused(
        "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
    ):
        Fsdp(model, ignored_modules=[model.first], ignored_states=[model.first])
    with refused(
        "ignored_modules expects nn.Module list elements but got types [<class 'torch.nn.parameter.Parameter'>]"
    ):
        Fsdp(model, ignored_modules=[model.first.weight])
    with refused("ignored_states expects all nn.Parameter or all nn.Module list elements but got types"):
        Fsdp(model, ignored_states=[model.first, model.last.weight])
    with refused("`ignored_modules` should be an iterable of `torch.nn.Module`s but got <class", TypeError):
        Fsdp(model, ignored_modules=model.first)
    with refused("`ignored_modules` should not include FSDP modules"):
        Fsdp(nn.Sequential(model, other), ignored_modules=[Fsdp(other)])
    with warned() as texts:
        Fsdp(net(), ignored_modules=[alone := nn.Linear(2, 2)])
        Fsdp(alone, ignored_modules=[alone])
    (text,) = [text for text in texts if "ignore" in text]
    assert text.startswith("Trying to ignore the top-level module passed into the FSDP constructor itself will result")


# Parameters that cannot be flattened together


@check(behaviour=3)
def parameters_of_two_kinds_are_refused_by_name() -> None:
    def with_odd(p: nn.Parameter) -> nn.Module:
        model = net()
        model.odd = p
        return model

    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    with refused(
        "Must flatten tensors with uniform dtype but got torch.float64 and torch.float32: odd is torch.float64"
    ):
        Fsdp(with_odd(nn.Parameter(torch.zeros(2).double())))
    with refused("Cannot flatten integer dtype tensors: odd is torch.int64"):
        Fsdp(with_odd(nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)))
    state = whole(Fsdp(with_odd(nn.Parameter(torch.tensor(3.0)))))  # torch refuses scalars
    assert torch.equal(state["odd"], torch.tensor(3.0))
    with refused("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`") as error:
        Fsdp(with_odd(frozen))
    assert "odd is frozen, first.weight is not" in str(error.value)
    assert str(error.value).endswith("(names inside Net)")
    with refused("Must flatten tensors with uniform dtype but got torch.float64 and torch.float32") as error:
        Fsdp(nn.Sequential(with_odd(nn.Parameter(torch.zeros(2).double()))), auto_wrap_policy={Net})
    assert str(error.value).endswith("(names inside Net) (at 0)")
    model = Fsdp(with_odd(frozen), use_orig_params=True)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["odd"]


# Shared


class Shares(nn.Module):
    """One weight under two names inside a block, or in two blocks."""

    def __init__(self, across: bool) -> None:
        super().__init__()
        self.one = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
        self.two = nn.ModuleDict({"c": nn.Linear(3, 3, bias=False)})
        (self.two["c"] if across else self.one["b"]).weight = self.one["a"].weight


@check(behaviour=4)
def a_parameter_shared_inside_a_unit_is_one_after_every_gather() -> None:
    for use_orig_params in (False, True):
        for strategy in (FULL_SHARD, NO_SHARD):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
            model[1].weight = model[0].weight
            alone = copy.deepcopy(model)
            model = Fsdp(model, None, strategy, use_orig_params=use_orig_params)
            seen: list[tuple[int, int]] = []
            model[1].register_forward_pre_hook(
                lambda m, _, model=model, seen=seen: seen.append((m.weight.data_ptr(), model[0].weight.data_ptr()))
            )
            for each in (model, alone):
                optimizer = torch.optim.SGD(each.parameters(), 0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    each(torch.ones(2, 3)).square().sum().backward()
                    optimizer.step()
            assert len(seen) == 3
            assert all(a == b for a, b in seen)
            state = whole(model)
            assert torch.equal(state["0.weight"], state["1.weight"])
            assert torch.allclose(state["0.weight"], alone[0].weight)


@check()
def a_parameter_tied_across_units_is_an_error_that_names_both() -> None:
    """By a policy and by hand, with original parameters or not, eager or from meta; torch trains two copies."""
    text = "one.a.weight and two.c.weight are one parameter, but they would be in two units."
    for use_orig_params in (False, True):
        for meta in (False, True):

            def make(meta: bool = meta) -> Shares:
                with torch.device("meta" if meta else "cpu"):
                    return Shares(across=True)

            with refused(text):
                Fsdp(make(), auto_wrap_policy={nn.ModuleDict}, use_orig_params=use_orig_params)
            model = make()
            model.one = Fsdp(model.one, use_orig_params=use_orig_params)
            with refused(text):
                Fsdp(model, use_orig_params=use_orig_params)
            model = make()  # what is ignored is in no unit
            if not meta:
                Fsdp(model, auto_wrap_policy={nn.ModuleDict}, ignored_states=[model.one["a"].weight])
    Fsdp(Shares(across=False), auto_wrap_policy={nn.ModuleDict})


@check()
def a_module_is_wrapped_once() -> None:
    for use_orig_params, device in itertools.product((False, True), ("cpu", "meta")):
        model = nn.Linear(2, 2, device=device)
        wrapped = Fsdp(model, use_orig_params=use_orig_params)
        with refused("FSDP has been applied to th"):
            Fsdp(model, use_orig_params=use_orig_params)
        outer = Fsdp(wrapped, use_orig_params=use_orig_params)  # the instance may be: there is nothing left to take
        assert outer._unit is None
        outer(torch.ones(1, 2)).sum().backward()
        assert list(outer.state_dict()) == ["weight", "bias"]
    for again in ({"use_orig_params": True}, {}):
        failed = nn.Linear(2, 2)
        failed.bias.requires_grad_(False)
        with refused("Must flatten"):
            Fsdp(failed)
        failed.bias.requires_grad_(bool(again) is False)
        Fsdp(failed, **again)  # a wrapping that failed has taken nothing


@check()
def a_parameter_of_a_wrapped_model_can_be_saved() -> None:
    model = Fsdp(net(), use_orig_params=True)
    for p in model.parameters():
        torch.save(p, io.BytesIO())


@check()
def modules_without_parameters_are_fine() -> None:
    model = Fsdp(nn.Sequential(nn.Tanh(), nn.Linear(5, 3), nn.Sequential()), auto_wrap_policy={nn.Tanh, nn.Linear})
    assert model.params == model[0].params == []
    assert model._unit is model[0]._unit is None
    train(model)
    model = Fsdp(nn.ReLU())
    assert list(model.state_dict()) == list(model.parameters()) == []
    assert (model(torch.ones(2)) == 1).all()


# Layout


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.t = nn.Parameter(torch.randn(3, 5).t())
        self.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x).sum((1, 2, 3))[:, None] * self.t.sum() * self.gaps.sum(0)).square().mean()


@check(behaviour=7)
def strides_survive_sharding() -> None:
    """Gathered, in gradients, summoned, saved and loaded; and what is computed is the same."""
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    for use_orig_params, strategy in itertools.product((False, True), (FULL_SHARD, NO_SHARD)):
        alone, model = Conv(), Fsdp(Conv(), None, strategy, use_orig_params=use_orig_params)
        seen: list[tuple[int, ...]] = []
        model.module.conv.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight.stride()))
        for _ in range(2):
            for each in (alone, model):
                optimizer = torch.optim.Adam(each.parameters(), 0.01)
                each(x).backward()
                optimizer.step()
        assert seen == [alone.conv.weight.stride()] * 2
        assert seen[0] != torch.empty(4, 3, 2, 2).stride()
        state = whole(model)
        for name, p in alone.state_dict().items():
            assert torch.allclose(state[name], p, atol=1e-6), (name, use_orig_params, strategy)
        with Fsdp.summon_full_params(model):
            got = dict(model.named_parameters())
            assert got["conv.weight"].stride() == alone.conv.weight.stride()
            assert got["t"].stride() == alone.t.stride()
            assert got["gaps"].is_contiguous()  # a hole is nothing to keep
        other = Fsdp(Conv(), None, strategy, use_orig_params=use_orig_params)
        other.load_state_dict(state)
        assert_same(whole(other), state)


@check()
def strides_survive_meta_and_rank_0_s_values() -> None:
    class Meta(nn.Conv2d):
        pass

    device = None if dist.get_rank() == 0 else "meta"
    torch.manual_seed(0)
    conv = Meta(3, 4, 2, device=device).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    expected = Meta(3, 4, 2)
    model = Fsdp(conv, sync_module_states=True)
    assert_same(whole(model), expected.state_dict())
    with Fsdp.summon_full_params(model):
        assert model.module.weight.stride() == conv.weight.stride() != expected.weight.stride()


@check(behaviour=5)
def a_replaced_parameter_keeps_its_place_in_memory_order() -> None:
    """`.data` of original parameters, set whole and not row by row."""
    for strategy in (FULL_SHARD, SHARD_GRAD_OP):
        model = Fsdp(Conv(), None, strategy, use_orig_params=True)
        new = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
        model.module.t.data = new.clone()
        model(torch.zeros(1, 3, 4, 4))
        assert torch.equal(whole(model)["t"], new)


# Groups


@check(ranks=4, behaviour=10)
def hybrid_models_take_two_groups_a_mesh_or_a_policy() -> None:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for strategy in (HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        for options in (
            {"process_group": (rows[rank // 2], columns[rank % 2])},
            {"device_mesh": init_device_mesh("cpu", (2, 2))},
            {"auto_wrap_policy": {nn.Linear}},
        ):
            model = Fsdp(net(), sharding_strategy=strategy, **options)
            assert dist.get_process_group_ranks(model.process_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert (model.rank, model.world_size) == (rank % 2, 2)
            assert {m.process_group for m in Fsdp.fsdp_modules(model)} == {model.process_group}
            assert model._unit.flat.layout.ranks == 2
            assert dist.get_process_group_ranks(model._unit.plan.across) == [rank % 2, rank % 2 + 2]
            train(model)
        with refused(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        ):
            Fsdp(net(), sharding_strategy=strategy)
        for wrong in (rows[rank // 2], (rows[rank // 2],), (2, 2)):
            with refused("Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.Pro"):
                Fsdp(net(), wrong, strategy)
        with refused("Expected device_mesh to have ndim=2 but got 1"):
            Fsdp(net(), sharding_strategy=strategy, device_mesh=init_device_mesh("cpu", (4,)))
    with refused("Expected device_mesh to have ndim=1 but got 2"):
        Fsdp(net(), device_mesh=init_device_mesh("cpu", (2, 2)))
    with refused("Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."):
        Fsdp(net(), rows[rank // 2], device_mesh=init_device_mesh("cpu", (4,)))
    with refused("process_group is a tuple"):
        Fsdp(net(), (rows[rank // 2], columns[rank % 2]))
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with refused("4 ranks do not make hosts of LOCAL_WORLD_SIZE=3"):
        Fsdp(net(), sharding_strategy=HYBRID_SHARD, auto_wrap_policy={nn.Linear})
    os.environ["LOCAL_WORLD_SIZE"] = "4"


@check(ranks=4, behaviour=10)
def the_units_of_a_hybrid_model_have_the_same_groups() -> None:
    mesh, other = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4, 1))
    for inner, fits in ((mesh, True), (other, False)):
        model = net()
        model.first = Fsdp(model.first, sharding_strategy=HYBRID_SHARD, device_mesh=inner)
        model = Fsdp(model, sharding_strategy=HYBRID_SHARD, device_mesh=mesh)
        if fits:
            train(model)
        else:
            with refused("Expects one homogeneous pair of process groups for all units with a hybrid strategy"):
                train(model)


@check(ranks=4)
def gradients_are_clipped_by_the_norm_over_the_groups_of_each_unit() -> None:
    """Units sharded over groups of their own, by hand; torch takes the root's for all."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for norm_type in (2.0, float("inf")):
        alone, model = net(), net()
        model.first = Fsdp(model.first, pairs[dist.get_rank() // 2])
        model.last = Fsdp(model.last, None, NO_SHARD)
        model = Fsdp(model)
        for each in (alone, model):
            torch.manual_seed(0)
            each(torch.randn(4, 5)).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 1.0, norm_type)
        assert torch.allclose(model.clip_grad_norm_(1.0, norm_type), expected)
        torch.optim.SGD(alone.parameters(), 0.1).step()
        torch.optim.SGD(model.parameters(), 0.1).step()
        state = whole(model)
        assert all(torch.allclose(state[name], p, atol=1e-6) for name, p in alone.named_parameters())


@check(ranks=4, behaviour=9)
def a_hybrid_model_with_one_rank_to_shard_over_is_replicated() -> None:
    mesh = init_device_mesh("cpu", (4, 1))
    with warned() as texts:
        model = Fsdp(net(), sharding_strategy=HYBRID_SHARD, device_mesh=mesh, auto_wrap_policy={nn.Linear})
    assert len([text for text in texts if text.startswith("FSDP is switching to use `NO_SHARD`")]) == 1
    assert {m.sharding_strategy for m in Fsdp.fsdp_modules(model)} == {NO_SHARD}
    train(model, seed=dist.get_rank())
    assert same_on_all_ranks(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


@check(ranks=4)
def a_unit_of_a_hybrid_model_may_have_another_strategy() -> None:
    """It then shards over the same ranks; what cannot be is refused."""
    mesh = init_device_mesh("cpu", (2, 2))

    def build(strategy: ShardingStrategy, of_unit: ShardingStrategy, **options: Any) -> Fsdp:
        model = net()
        policy = CustomPolicy(lambda m: {"sharding_strategy": of_unit} if m is model.first else False)
        return Fsdp(model, sharding_strategy=strategy, auto_wrap_policy=policy, **options)

    model = build(HYBRID_SHARD, SHARD_GRAD_OP, device_mesh=mesh)
    train(model, seed=dist.get_rank())
    assert model.first._unit.flat.layout.ranks == 2
    assert same_on_all_ranks(whole(model)["first.weight"])
    with refused(f"Manual wrapping with {HYBRID_SHARD} requires explicit"):
        build(FULL_SHARD, HYBRID_SHARD)
    with refused(f"a unit with {NO_SHARD} in a hybrid model is replicated over all its ranks"):
        build(HYBRID_SHARD, NO_SHARD, device_mesh=mesh)


@check()
def units_that_do_not_agree_are_refused_when_the_model_runs() -> None:
    for attribute, name in (("use_orig_params", "_use_orig_params"), ("limit_all_gathers", "limit_all_gathers")):
        model = net()
        model.first = Fsdp(model.first, **{attribute: False})
        model = Fsdp(model, **{attribute: True})
        with refused(f"Expects one homogeneous value for {name} but got {{False, True}}"):
            train(model)
    model = net()  # torch allows strategies and precisions of their own, and so do we
    model.first = Fsdp(model.first, None, SHARD_GRAD_OP)
    train(Fsdp(model, cpu_offload=CPUOffload(True)))


@check(ranks=1, behaviour=9)
def a_world_of_one_is_replicated_with_a_warning() -> None:
    for strategy, count in ((None, 1), (SHARD_GRAD_OP, 1), (NO_SHARD, 0)):
        with warned() as texts:
            model = Fsdp(net(), sharding_strategy=strategy, auto_wrap_policy={nn.Linear})
        said = f"FSDP is switching to use `NO_SHARD` instead of {strategy or FULL_SHARD} since the world size is 1."
        assert texts == [said] * count
        assert {m.sharding_strategy for m in Fsdp.fsdp_modules(model)} == {NO_SHARD}
        alone = net()
        train(model)
        train(alone)
        assert_same(whole(model), alone.state_dict())


@check()
def everything_combines_with_meta() -> None:
    """Deferred initialization reaches each kind of unit."""
    kinds = itertools.product((FULL_SHARD, NO_SHARD), (None, torch.bfloat16), (False, True), (False, True))
    for strategy, dtype, offload, use_orig_params in kinds:
        options = {
            "mixed_precision": MixedPrecision(param_dtype=dtype, buffer_dtype=dtype),
            "cpu_offload": CPUOffload(offload),
            "use_orig_params": use_orig_params,
            "auto_wrap_policy": {Counted},
            "sharding_strategy": strategy,
        }
        torch.manual_seed(5)
        model = Fsdp(counted("meta"), **options)
        torch.manual_seed(5)
        expected = Fsdp(counted("meta"))
        state = whole(model)
        assert not [name for name, value in state.items() if value.isnan().any()]
        if strategy is FULL_SHARD and not (dtype or offload or use_orig_params):
            assert list(state) == list(expected.state_dict())
        assert all(p.dtype == torch.float32 and not p.is_meta for p in model.parameters())
        train(model)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


# Without ranks


@pytest.mark.behaviour(5)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("gathered_in", [None, torch.bfloat16, torch.float64])
def test_original_parameters_begin_at_16_bytes_of_the_gathered_buffer(ranks: int, gathered_in: Any) -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(numel)) for numel in (1, 8, 3, 5, 4)])
    params = find_parameters(module)
    size = (gathered_in or torch.float32).itemsize
    step = 16 // size
    lay_out = partial(Layout.of, alignment=step)
    flats = [FlatParameter(params, rank, ranks, lay_out=lay_out) for rank in range(ranks)]
    flat = flats[0]
    assert [view.storage_offset() * size % 16 for view in flat.views] == [0] * 5
    gaps = sum(-numel % step for numel in (1, 8, 3, 5))  # behind the last one there is only padding
    assert flat.numel == 21 + gaps
    assert flat.padding == -flat.numel % ranks
    together = torch.cat([flat.shard for flat in flats])
    for view, p in zip(flat.unflatten(together), params, strict=True):
        assert torch.equal(view, p)
    rest = together.detach().clone()
    for view in flat.unflatten(rest):
        view.zero_()
    assert not rest.any()


@pytest.mark.behaviour(5)
def test_without_original_parameters_there_is_trailing_padding_only() -> None:
    """Fewer than N elements, so that the last rank's shard may be all padding."""
    params = find_parameters(nn.Linear(1, 1, bias=False))
    flats = [FlatParameter(params, rank, 4) for rank in range(4)]
    assert [(flat.numel, flat.padding, flat.shard.numel()) for flat in flats] == [(1, 3, 1)] * 4
    assert [flat.layout.bounds(0, rank) for rank, flat in enumerate(flats)] == [(0, 1), (0, 0), (0, 0), (0, 0)]
    assert not any(flat.shard.any() for flat in flats[1:])


@pytest.mark.behaviour(7)
@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (1, 3, 1, 5), (2, 1), (6,), (0, 3)])
def test_parts_of_a_strided_parameter_are_in_memory_order(shape: tuple[int, ...]) -> None:
    for dims in itertools.permutations(range(len(shape))):
        inverse = [dims.index(d) for d in range(len(shape))]
        p = nn.Parameter(torch.randn([shape[d] for d in dims]).permute(inverse))
        lay_out = partial(Layout.of, keeps_strides=True)
        flats = [FlatParameter({p: [Place(nn.Module(), "p", "p")]}, rank, 3, lay_out=lay_out) for rank in range(3)]
        layout = flats[0].layout
        assert layout.strides == [p.stride()]
        parts = torch.cat([layout.part(0, p.detach().contiguous(), rank) for rank in range(3)])
        assert torch.equal(parts, torch.cat([flat.shard.detach() for flat in flats])[: p.numel()])
        assert torch.equal(layout.shaped(0, parts), p)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int32]
)
def test_one_element_that_nobody_wrote_is_found(dtype: torch.dtype) -> None:
    tensor = mark_unwritten(torch.empty(3, 4, dtype=dtype))
    assert is_unwritten(tensor)
    tensor.fill_(1)
    assert not is_unwritten(tensor)
    mark_unwritten(tensor[1, 2:3])
    assert is_unwritten(tensor)
    extremes = SimpleNamespace(values=[float("inf"), -float("inf"), 0.0] if dtype.is_floating_point else [0, 0, 0])
    assert not is_unwritten(torch.tensor(extremes.values, dtype=dtype))
    assert not is_unwritten(mark_unwritten(torch.empty(0, dtype=dtype)))
