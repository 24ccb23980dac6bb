"""Optimizer states under original names: against one process, since torch's FSDP gets some of them wrong on CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFsdp
from torch.distributed.fsdp import StateDictType as TorchsType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from minifsdp import checkpoint, comm
from minifsdp.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy
FULL, LOCAL, SHARDED = StateDictType
BY_NAME, BY_ID = OptimStateKeyType

Make = Callable[[Iterable[Any]], Optimizer]
adam: Make = partial(Adam, lr=0.1)
OPTIMIZERS: dict[str, Make] = {
    "adam": adam,
    "amsgrad": partial(AdamW, lr=0.1, weight_decay=0.1, amsgrad=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(Adagrad, lr=0.1),
    "no state": partial(SGD, lr=0.1),
}


class Net(nn.Module):
    """Odd sizes, so that shards cut parameters and are padded; at 3 ranks and more some ranks have nothing of some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 7, bias=False))
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


def plain(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(seed: int = 0, **options: Any) -> Fsdp:
    return Fsdp(plain(seed), auto_wrap_policy={nn.Sequential}, **options)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optim: Optimizer, steps: Iterable[int] = range(3)) -> None:
    """One model on all ranks' batches, or its part of them, if it is sharded."""
    ranks = [dist.get_rank()] if isinstance(model, Fsdp | TorchsFsdp) else range(dist.get_world_size())
    for step in steps:
        optim.zero_grad()
        for rank in ranks:
            (model(batch(step, rank)).float().square().mean() / len(ranks)).backward()
        optim.step()


def trained(make: Make = adam, **options: Any) -> tuple[Fsdp, Optimizer]:
    model = sharded(**options)
    optim = make(model.parameters())
    train(model, optim)
    return model, optim


def expected(make: Make = adam, frozen: Iterable[str] = ()) -> dict[str, Any]:
    """What one process has."""
    model = plain()
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    optim = make(model.parameters())
    train(model, optim)
    return Fsdp.rekey_optim_state_dict(optim.state_dict(), BY_NAME, model, optim=optim)


def same(state_dict: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert state_dict["state"].keys() == other["state"].keys()
    for name, state in other["state"].items():
        assert state_dict["state"][name].keys() == state.keys(), name
        for key, value in state.items():
            mine = state_dict["state"][name][key]
            if not isinstance(value, Tensor):
                assert mine == value, (name, key)
                continue
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype), (name, key)
            assert (mine - value).abs().max() <= tolerance, (name, key, mine, value)
    names = [
        sorted(name for group in dict_["param_groups"] for name in group["params"]) for dict_ in (state_dict, other)
    ]
    assert names[0] == names[1]


def settings(kind: StateDictType, model: nn.Module, **config: Any) -> Any:
    if kind is FULL:
        return Fsdp.state_dict_type(model, kind, FullStateDictConfig(), FullOptimStateDictConfig(**config))
    return Fsdp.state_dict_type(model, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig(**config))


def tensors(state_dict: dict[str, Any]) -> list[Tensor]:
    return [value for state in state_dict["state"].values() for value in state.values() if isinstance(value, Tensor)]


# Saving


@check(behaviour=42, make=list(OPTIMIZERS))
def states_are_those_of_one_process(make: str) -> None:
    """Names, shapes without padding, dtypes, values, and numbers once for each parameter."""
    for use_orig_params in (False, True):
        model, optim = trained(OPTIMIZERS[make], use_orig_params=use_orig_params)
        state_dict = Fsdp.optim_state_dict(model, optim)
        same(state_dict, expected(OPTIMIZERS[make]))
        for state in state_dict["state"].values():
            if "exp_avg_sq" in state:  # torch returns the one for the other
                assert not torch.equal(state["exp_avg"], state["exp_avg_sq"])
                assert state["step"].shape == ()


KINDS: dict[str, dict[str, Any]] = {
    "SHARD_GRAD_OP": {"sharding_strategy": SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(True)},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16)},
    "bf16, offload, NO_SHARD": {
        "mixed_precision": MixedPrecision(torch.bfloat16),
        "cpu_offload": CPUOffload(True),
        "sharding_strategy": NO_SHARD,
    },
}


@check(kind=list(KINDS))
def states_of_every_kind_of_unit(kind: str) -> None:
    for use_orig_params in (False, True):
        model, optim = trained(use_orig_params=use_orig_params, **KINDS[kind])
        saved = Fsdp.optim_state_dict(model, optim)
        same(saved, expected(), tolerance=0.01 if "bf16" in kind else 1e-6)
        other = sharded(use_orig_params=not use_orig_params)
        loaded = adam(other.parameters())
        Fsdp.optim_state_dict_to_load(other, loaded, saved, load_directly=True)
        same(Fsdp.optim_state_dict(other, loaded), saved, tolerance=0)


@check()
def a_frozen_parameter_has_no_state_and_keeps_its_group() -> None:
    def make(use_orig_params: bool, frozen: list[str]) -> None:
        module = plain()
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        model = Fsdp(module, auto_wrap_policy={nn.Sequential}, use_orig_params=use_orig_params)
        optim = adam(model.parameters())
        train(model, optim)
        state_dict = Fsdp.optim_state_dict(model, optim)
        assert not any(name in state_dict["state"] for name in frozen)
        same(state_dict, expected(frozen=frozen))
        other = sharded(use_orig_params=use_orig_params)
        loaded = adam(other.parameters())
        Fsdp.optim_state_dict_to_load(other, loaded, state_dict, load_directly=True)
        same(Fsdp.optim_state_dict(other, loaded), state_dict, tolerance=0)

    make(False, ["middle.0.weight", "middle.0.bias", "middle.2.weight"])
    make(True, ["first.bias", "middle.0.weight"])


class Image(nn.Module):
    """Parameters that lie in memory in another order, and one of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) * self.scale


@check()
def a_parameter_may_have_other_strides_or_no_dimension() -> None:
    def trained_on_images(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        optim = adam(model.parameters())
        for _ in range(2):
            model(torch.arange(54.0).view(2, 3, 3, 3)).square().sum().backward()
            optim.step()
        return model, optim

    def image() -> Image:
        torch.manual_seed(0)
        return Image()

    alone, optim = trained_on_images(image())
    by_name = Fsdp.rekey_optim_state_dict(optim.state_dict(), BY_NAME, alone, optim=optim)
    for options in ({}, {"use_orig_params": True}, {"sharding_strategy": NO_SHARD, "use_orig_params": True}):
        model, optim = trained_on_images(Fsdp(image(), **options))
        saved = Fsdp.optim_state_dict(model, optim)
        same(saved, by_name, tolerance=1e-2)  # of states of 1e6
        other = Fsdp(image(), use_orig_params="use_orig_params" not in options)
        loaded = adam(other.parameters())
        for cut in (saved, Fsdp.sharded_optim_state_dict(model, optim)):
            Fsdp.optim_state_dict_to_load(other, loaded, cut, load_directly=True)
            same(Fsdp.optim_state_dict(other, loaded), saved, tolerance=0)


@check()
def an_optimizer_that_has_not_begun_has_names_and_no_states() -> None:
    model = sharded()
    state_dict = Fsdp.optim_state_dict(model, adam(model.parameters()))
    assert state_dict["state"] == {}
    assert sorted(state_dict["param_groups"][0]["params"]) == sorted(name for name, _ in plain().named_parameters())


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups: matrices with weight decay, the others without."""
    matrices = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.2}]


@check()
def groups_are_matched_by_name() -> None:
    model = sharded(use_orig_params=True)
    optim = adam(decayed(model))
    train(model, optim)
    saved = Fsdp.optim_state_dict(model, optim)
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.1, 0.0]
    assert sorted(saved["param_groups"][1]["params"]) == ["first.bias", "last.bias", "middle.0.bias"]
    loaded = adam(list(reversed(decayed(model))))
    Fsdp.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert [(group["weight_decay"], group["lr"]) for group in loaded.param_groups] == [(0.0, 0.2), (0.1, 0.1)]
    same(Fsdp.optim_state_dict(model, loaded), saved, tolerance=0)
    flat = sharded()
    with pytest.raises(ValueError, match=r"first.weight and first.bias were in parameter groups that differ"):
        Fsdp.optim_state_dict_to_load(flat, adam(flat.parameters()), saved)


@check()
def an_optimizer_of_named_parameters_keeps_original_names() -> None:
    for use_orig_params in (False, True):
        model = sharded(use_orig_params=use_orig_params)
        optim = adam(list(model.named_parameters()))
        train(model, optim)
        saved = Fsdp.optim_state_dict(model, optim)
        (group,) = saved["param_groups"]
        assert group["param_names"] == group["params"]
        assert sorted(group["params"]) == sorted(expected()["param_groups"][0]["params"])
        before = list(optim.param_groups[0]["param_names"])
        Fsdp.optim_state_dict_to_load(model, optim, saved, load_directly=True)
        assert optim.param_groups[0]["param_names"] == before


@check()
def an_optimizer_may_call_its_parameters_by_name() -> None:
    """As torch's NamedOptimizer does, by the names of the wrapped model."""
    for use_orig_params in (False, True):
        model, optim = trained(use_orig_params=use_orig_params)
        names = [name for name, _ in model.named_parameters()]
        by_id = optim.state_dict()
        named = {
            "state": {names[i]: state for i, state in by_id["state"].items()},
            "param_groups": [group | {"params": names} for group in by_id["param_groups"]],
        }
        saved = Fsdp.optim_state_dict(model, optim, named)
        same(saved, expected())
        result = Fsdp.optim_state_dict_to_load(model, optim, saved, is_named_optimizer=True)
        same(result, named, tolerance=0)


@check()
def parameters_that_no_unit_manages_are_saved_and_loaded_whole() -> None:
    def make(seed: int = 0) -> tuple[nn.Module, Optimizer]:
        module = plain(seed)
        model = nn.ModuleDict({"in": Fsdp(module, ignored_states=[module.last]), "out": nn.Linear(5, 1)})
        return model, adam(model.parameters())

    model, optim = make()
    for step in range(2):
        model["out"](model["in"](batch(step, 0))).sum().backward()
        optim.step()
    saved = Fsdp.optim_state_dict(model, optim)
    for name in ("in.last.weight", "out.bias"):
        module, _, attribute = name.rpartition(".")
        inside = model["in"].module.last if "last" in module else model["out"]
        assert torch.equal(saved["state"][name]["exp_avg"], optim.state[getattr(inside, attribute)]["exp_avg"])
    other, loaded = make(1)
    Fsdp.optim_state_dict_to_load(other, loaded, saved, load_directly=True)
    same(Fsdp.optim_state_dict(other, loaded), saved, tolerance=0)


class Odd(SGD):
    """States of all sorts: a word, a number, None, a tensor of another dtype; and one of no parameter."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p] = {
                "mode": "fast",
                "count": self.state[p].get("count", 0) + 1,
                "nothing": None,
                "half": torch.full_like(p, 0.5, dtype=torch.float16),
                "flags": torch.ones_like(p, dtype=torch.bool),
            }
        self.state["everyone's"] = 7  # type: ignore[index]


@check()
def states_need_not_be_tensors() -> None:
    for use_orig_params in (False, True):
        model, optim = trained(partial(Odd, lr=0.1), use_orig_params=use_orig_params)
        with pytest.warns(UserWarning, match="Found a optim state, everyone's, that FSDP cannot process"):
            saved = Fsdp.optim_state_dict(model, optim)
        assert saved["state"].pop("everyone's") == 7
        for name, p in plain().named_parameters():
            state = saved["state"][name]
            assert (state["mode"], state["count"], state["nothing"]) == ("fast", 3, None)
            assert torch.equal(state["half"], torch.full_like(p, 0.5, dtype=torch.float16))
            assert torch.equal(state["flags"], torch.ones_like(p, dtype=torch.bool))
        other = sharded(use_orig_params=not use_orig_params)
        loaded = Odd(other.parameters(), lr=0.1)
        result = Fsdp.optim_state_dict_to_load(other, loaded, saved | {"state": saved["state"] | {"everyone's": 8}})
        assert result["state"]["everyone's"] == 8
        assert {state["count"] for state in result["state"].values() if isinstance(state, dict)} == {3}


@check()
def rank_0_only_leaves_the_others_empty_and_the_default_is_host_memory() -> None:
    model, optim = trained()
    with settings(FULL, model, rank0_only=True):
        saved = Fsdp.optim_state_dict(model, optim)
    same(saved, expected()) if dist.get_rank() == 0 else None
    assert dist.get_rank() == 0 or saved == {}
    assert (Fsdp.full_optim_state_dict(model, optim) == {}) == (dist.get_rank() > 0)
    same(Fsdp.full_optim_state_dict(model, optim, rank0_only=False), expected())


@check(use_orig_params=[False, True])
def inside_summon_full_params_original_parameters_have_no_states(use_orig_params: bool) -> None:
    """Theirs are of slices, and what the optimizer has for a slice does not fit the whole."""
    model, optim = trained(use_orig_params=use_orig_params)
    saved = Fsdp.optim_state_dict(model, optim)
    refused = partial(pytest.raises, AssertionError, match=r"whole inside summon_full_params, .* call .* outside")
    with Fsdp.summon_full_params(model, writeback=False), comm.record() as log:
        for call in (Fsdp.optim_state_dict, partial(Fsdp.optim_state_dict_to_load, optim_state_dict=saved)):
            with refused() if use_orig_params else nullcontext():
                call(model, optim)
    assert not use_orig_params or log == []
    same(Fsdp.optim_state_dict(model, optim), saved)


@check(kind=["FULL", "FULL, left on the device", "SHARDED", "plain"])
def what_is_returned_is_no_alias(kind: str) -> None:
    """Of the optimizer's state, of one another's or of more memory than their own; torch's `.cpu()` is no copy here."""
    model, optim = trained(sharding_strategy=NO_SHARD if kind == "plain" else FULL_SHARD)
    with settings(SHARDED if kind == "SHARDED" else FULL, model, offload_to_cpu="device" not in kind):
        saved = Fsdp.optim_state_dict(model, optim)
    before = copy.deepcopy(optim.state_dict()["state"])
    storages = set()
    for value in tensors(saved):
        local = value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
        storages.add(local.untyped_storage().data_ptr())
        local.fill_(9)
    assert len(storages) == len(tensors(saved))
    after = optim.state_dict()["state"]
    assert all(torch.equal(before[i][key], after[i][key]) for i in before for key in before[i])


@check()
def what_is_loaded_is_no_alias() -> None:
    """Optimizers work in place: a checkpoint kept in memory must survive the steps after it was loaded."""
    for options in ({}, {"sharding_strategy": NO_SHARD}, {"use_orig_params": True}):
        saved = expected()
        kept = copy.deepcopy(saved)
        model = sharded(**options)
        optim = adam(model.parameters())
        Fsdp.optim_state_dict_to_load(model, optim, saved, load_directly=True)
        train(model, optim)
        same(saved, kept, tolerance=0)


@check(behaviour=42)
def sharded_states_are_cut_along_dimension_0() -> None:
    whole = expected()
    for use_orig_params in (False, True):
        model, optim = trained(use_orig_params=use_orig_params)
        with settings(SHARDED, model):
            saved = Fsdp.optim_state_dict(model, optim)
            local = Fsdp.state_dict_type(model, LOCAL)
        with local:  # torch has no LOCAL form of optimizer states either
            again = Fsdp.optim_state_dict(model, optim)
        assert saved["state"].keys() == whole["state"].keys() == again["state"].keys()
        assert isinstance(again["state"]["first.weight"]["exp_avg"], ShardedTensor)
        value = saved["state"]["first.weight"]["exp_avg"]  # [7, 5]: 4 rows and 3
        (shard,) = value.local_shards()
        low = 4 * dist.get_rank()
        assert value.size() == (7, 5)
        assert torch.allclose(shard.tensor, whole["state"]["first.weight"]["exp_avg"][low : low + 4], atol=1e-6)
        assert saved["state"]["first.weight"]["step"] == 3
        other = sharded(use_orig_params=not use_orig_params)
        loaded = adam(other.parameters())
        with settings(SHARDED, other):
            loaded.load_state_dict(Fsdp.optim_state_dict_to_load(other, loaded, saved))
        same(Fsdp.optim_state_dict(other, loaded), whole)


# Loading


@check(behaviour=42)
def training_goes_on_as_if_nothing_had_happened() -> None:
    for use_orig_params in (False, True):
        model, optim = trained(use_orig_params=use_orig_params)
        state, saved = model.state_dict(), Fsdp.optim_state_dict(model, optim)
        train(model, optim, range(3, 5))
        other = sharded(1, use_orig_params=use_orig_params)
        resumed = partial(Adam, lr=0.9)(other.parameters())
        other.load_state_dict(state)
        resumed.load_state_dict(Fsdp.optim_state_dict_to_load(other, resumed, saved))
        train(other, resumed, range(3, 5))
        for (name, value), there in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(value, there), name


@check()
def rank_0_can_send_what_it_has() -> None:
    saved = expected()
    mine = saved if dist.get_rank() == 0 else {}
    for use_orig_params in (False, True):
        model = sharded(use_orig_params=use_orig_params)
        for way in ("settings", "scatter"):
            optim = adam(model.parameters())
            if way == "settings":
                with settings(FULL, model, rank0_only=True):
                    result = Fsdp.optim_state_dict_to_load(model, optim, mine)
            else:
                result = Fsdp.scatter_full_optim_state_dict(mine or None, model, optim=optim)
            optim.load_state_dict(result)
            same(Fsdp.optim_state_dict(model, optim), saved, tolerance=0)


@check()
def a_plain_model_can_take_it_and_give_it_back() -> None:
    model, optim = trained()
    saved = Fsdp.optim_state_dict(model, optim)
    module = plain()
    module.load_state_dict(model.state_dict())
    for how in ({"optim": None}, {"optim_input": list(module.parameters())}, {}):
        alone = adam(module.parameters())
        by_id = Fsdp.rekey_optim_state_dict(saved, BY_ID, module, **({"optim": alone} | how))
        assert by_id["param_groups"][0]["params"] == list(range(7))
        alone.load_state_dict(by_id)
        for name, p in module.named_parameters():
            assert torch.equal(alone.state[p]["exp_avg"], saved["state"][name]["exp_avg"]), name
    by_name = Fsdp.rekey_optim_state_dict(alone.state_dict(), BY_NAME, module, optim=alone)
    same(by_name, saved, tolerance=0)
    assert Fsdp.rekey_optim_state_dict(by_name, BY_NAME, module, optim=alone) is by_name
    with pytest.raises(RuntimeError, match="Each parameter should only map to one parameter name but got 4"):
        Fsdp.rekey_optim_state_dict(saved, BY_ID, model, optim=optim)
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        Fsdp.rekey_optim_state_dict({"state": {0: {}, "a": {}}, "param_groups": []}, BY_ID, module)


def torchs(use_orig_params: bool) -> TorchsFsdp:
    policy = TorchsPolicy({nn.Sequential})
    on_cpu = torch.device("cpu")
    return TorchsFsdp(plain(), auto_wrap_policy=policy, device_id=on_cpu, use_orig_params=use_orig_params)


@check()
def torchs_fsdp_can_take_it() -> None:
    """And trains on as ours does."""
    model, optim = trained()
    saved = Fsdp.optim_state_dict(model, optim)
    for use_orig_params in (False, True):
        ours, theirs = sharded(use_orig_params=use_orig_params), torchs(use_orig_params)
        optims = adam(ours.parameters()), adam(theirs.parameters())
        Fsdp.optim_state_dict_to_load(ours, optims[0], saved, load_directly=True)
        with TorchsFsdp.state_dict_type(theirs, TorchsType.FULL_STATE_DICT):
            copied = copy.deepcopy(saved)
            optims[1].load_state_dict(TorchsFsdp.optim_state_dict_to_load(theirs, optims[1], copied))
        train(ours, optims[0])
        train(theirs, optims[1])
        with TorchsFsdp.state_dict_type(theirs, TorchsType.FULL_STATE_DICT):
            expected_state = theirs.state_dict()
        for name, value in ours.state_dict().items():
            assert torch.allclose(value, expected_state[name], atol=1e-6), name


@check()
def torchs_fsdp_can_give_it() -> None:
    theirs = torchs(use_orig_params=False)
    their_optim = adam(theirs.parameters())
    train(theirs, their_optim)
    for form in (TorchsType.FULL_STATE_DICT, TorchsType.SHARDED_STATE_DICT):
        with TorchsFsdp.state_dict_type(theirs, form):
            saved = TorchsFsdp.optim_state_dict(theirs, their_optim)
        for use_orig_params in (False, True):
            model = sharded(use_orig_params=use_orig_params)
            optim = adam(model.parameters())
            Fsdp.optim_state_dict_to_load(model, optim, saved, load_directly=True)
            same(Fsdp.optim_state_dict(model, optim), expected())


# What it costs


@check()
def one_all_gather_per_unit_and_state_and_none_to_load() -> None:
    for use_orig_params in (False, True):
        model, optim = trained(use_orig_params=use_orig_params)
        with comm.record() as calls:
            saved = Fsdp.optim_state_dict(model, optim)
        assert [call.op for call in calls] == ["all_gather"] * 4  # two units, exp_avg and exp_avg_sq
        with comm.record() as calls:
            Fsdp.optim_state_dict_to_load(model, optim, saved)
        assert calls == []


LAYER = 100 * 101 * 4  # bytes of a unit's state for one key
LAYERS = 3


def peak_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The most bytes that a call has at once, its result included; above what there was before, in whole LAYERs.

    The least of three: gloo's threads may let go of a buffer late, when the next one is there already.
    """
    peaks = []
    for _ in range(3):
        with Ledger() as ledger:
            kept = fn(*args, **kwargs)
            peaks.append(ledger.peak.total)
            del kept
    return min(peaks) // LAYER


@check()
def never_more_whole_than_one_state_of_one_unit() -> None:
    """Beside the result, in saving and in loading."""
    for use_orig_params in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(LAYERS)))
        model = Fsdp(module, auto_wrap_policy={nn.Linear}, use_orig_params=use_orig_params)
        optim = adam(model.parameters())
        model(torch.ones(1, 100)).sum().backward()
        optim.step()
        saved = Fsdp.optim_state_dict(model, optim)
        cut = Fsdp.sharded_optim_state_dict(model, optim)
        save, load = partial(Fsdp.optim_state_dict, model, optim), partial(Fsdp.optim_state_dict_to_load, model, optim)
        is_first = dist.get_rank() == 0
        peaks = {"save": peak_of(save), "load": peak_of(load, saved)}
        with settings(FULL, model, rank0_only=True):
            peaks |= {"save on rank 0": peak_of(save), "load from rank 0": peak_of(load, saved if is_first else {})}
        with settings(SHARDED, model):
            peaks |= {"save shards": peak_of(save), "load shards": peak_of(load, cut)}
        whole, shards = 2 * LAYERS, LAYERS  # exp_avg and exp_avg_sq
        assert peaks == {
            "save": whole + 1,
            "load": shards,
            "save on rank 0": whole + 1 if is_first else 1,
            "load from rank 0": shards if is_first else shards + 1,
            "save shards": shards + 1,
            "load shards": shards + 1,
        }, peaks


# A parameter without elements


class WithEmpty(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


@check(use_orig_params=(False, True))
def an_empty_parameter_has_the_state_of_one_process(use_orig_params: bool) -> None:
    def stepped(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        optim = torch.optim.AdamW(model.parameters(), 0.1)
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        return model, optim

    alone = checkpoint.get_optimizer_state_dict(*stepped(WithEmpty()))
    model, optim = stepped(Fsdp(WithEmpty(), use_orig_params=use_orig_params))
    options = checkpoint.StateDictOptions(full_state_dict=True)
    saved = checkpoint.get_optimizer_state_dict(model, optim, options=options)
    assert saved["state"].keys() == alone["state"].keys()
    for key, value in alone["state"]["empty"].items():
        assert saved["state"]["empty"][key].shape == value.shape
    for state in (saved, alone):
        checkpoint.set_optimizer_state_dict(model, optim, state, options=options)
    model(torch.ones(2, 4)).sum().backward()
    optim.step()


# Optimizers that list the parameters in another order on each rank


class Beside(nn.Module):
    """Two units, and two parameters of one shape that no unit manages."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.inner = nn.Sequential(*(Fsdp(nn.Linear(4, 4, bias=False), **options) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x)).sum() + self.after(x).square().sum()


def in_own_order(model: nn.Module) -> list[nn.Parameter]:
    params = list(model.parameters())
    return params[:: -1 if dist.get_rank() else 1]


def loaded_by(door: str, model: nn.Module, optim: Optimizer, optim_to_load: Optimizer) -> dict[str, Any]:
    if door == "scatter":
        full = Fsdp.full_optim_state_dict(model, optim)
        return Fsdp.scatter_full_optim_state_dict(full or None, model, optim=optim_to_load)
    kind, config = (FULL, {"rank0_only": True}) if door == "rank 0 alone" else (SHARDED, {})
    with settings(kind, model, **config):
        saved = Fsdp.optim_state_dict(model, optim)
        return Fsdp.optim_state_dict_to_load(model, optim_to_load, saved)


@check(ranks=2, use_orig_params=(False, True), door=("scatter", "rank 0 alone", "sharded"))
def optimizers_may_list_parameters_in_another_order_on_each_rank(use_orig_params: bool, door: str) -> None:
    model = Beside(use_orig_params=use_orig_params)
    optim = adam(in_own_order(model))
    for step in range(2):
        optim.zero_grad()
        model(torch.full((2, 4), step + 1.0)).backward()
        optim.step()
    other = adam(in_own_order(model))
    other.load_state_dict(loaded_by(door, model, optim, other))
    for p in model.parameters():
        assert optim.state[p].keys() == other.state[p].keys()
        assert all(torch.equal(value, other.state[p][key]) for key, value in optim.state[p].items())
    with settings(SHARDED, model):
        orders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders, [*Fsdp.optim_state_dict(model, optim)["state"]])
    assert orders[0] == orders[1]


# Errors


def refuses(kind: type[Exception], text: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=text):
        fn(*args, **kwargs)


@check()
def what_cannot_be_assembled_is_refused_on_every_rank() -> None:
    model = sharded()
    refuses(
        ValueError,
        "LBFGS multiplies whole gradients",
        Fsdp.optim_state_dict,
        model,
        torch.optim.LBFGS(model.parameters()),
    )
    for use_orig_params in (False, True):
        model, optim = trained(use_orig_params=use_orig_params)
        p = next(p for p in optim.state if p.numel())
        optim.state[p]["rows"] = torch.ones(1 + dist.get_rank(), 2)
        text = "Tensor optimizer state does not have same shape as its parameter: .*rows of first.weight"
        refuses(ValueError, text, Fsdp.optim_state_dict, model, optim)


@check()
def a_state_that_only_some_ranks_have_is_refused_on_every_rank() -> None:
    for use_orig_params in (False, True):
        model, optim = trained(use_orig_params=use_orig_params)
        if dist.get_rank() == 1:
            optim.state.clear()
        text = r"(?s)FSDP currently requires each rank to have .*Rank 1 is missing states for the parameters: \['"
        refuses(RuntimeError, text, Fsdp.optim_state_dict, model, optim)


@check()
def an_optimizer_of_other_parameters_is_refused() -> None:
    module = plain()
    early = adam(module.parameters())
    model = Fsdp(module)
    text = r"parameter \(7, 5\), first.weight, that the model has not: .*after wrapping"
    refuses(ValueError, text, Fsdp.optim_state_dict, model, early)
    refuses(ValueError, text, Fsdp.optim_state_dict_to_load, model, early, expected())


@check()
def a_state_dict_that_does_not_fit_is_refused() -> None:
    model = sharded()
    optim = adam(model.parameters())
    load = partial(Fsdp.optim_state_dict_to_load, model, optim)
    refuses(ValueError, '`optim_state_dict` must have the keys "state"', load, {})
    refuses(ValueError, "numbers for keys", load, {"state": {0: {}}, "param_groups": []})
    saved = expected()
    renamed = copy.deepcopy(saved)
    renamed["param_groups"][0]["params"][0] = "module.first.weight"
    refuses(KeyError, "module.first.weight", load, renamed)
    apart = copy.deepcopy(saved)
    apart["state"]["first.bias"]["step"] += 1
    text = r"^All unflattened parameters .* got values 3\.0 \(first.weight\) and 4\.0 \(first.bias\) for state step"
    refuses(ValueError, text, load, apart)
    del apart["state"]["first.bias"]
    refuses(ValueError, r"3\.0 \(first.weight\) and None \(first.bias\)", load, apart)
    shaped = copy.deepcopy(saved)
    shaped["state"]["first.bias"]["exp_avg"] = torch.zeros(3)
    refuses(ValueError, r"does not have same shape as its parameter: .*exp_avg of first\.bias", load, shaped)
    mixed = copy.deepcopy(saved)
    mixed["state"]["first.bias"]["exp_avg"] = mixed["state"]["first.bias"]["exp_avg"].double()
    assert {state["exp_avg"].dtype for state in load(mixed)["state"].values()} == {torch.float32, torch.float64}
    other = sharded(use_orig_params=True)
    loaded = adam(other.parameters())
    Fsdp.optim_state_dict_to_load(other, loaded, apart, load_directly=True)  # its states are apart there, too
    same(Fsdp.optim_state_dict(other, loaded), apart, tolerance=0)


@check()
def the_older_names_warn_as_torch_does() -> None:
    model, optim = trained()
    sharded_state = Fsdp.sharded_optim_state_dict(model, optim)
    full = Fsdp.full_optim_state_dict(model, optim, rank0_only=False)
    ways = {
        "sharded_optim_state_dict": (model, optim),
        "full_optim_state_dict": (model, optim),
        "shard_full_optim_state_dict": (full, model, None, optim),
        "scatter_full_optim_state_dict": (full, model, None, optim),
        "flatten_sharded_optim_state_dict": (sharded_state, model, optim),
    }
    for name, args in ways.items():
        with pytest.warns(FutureWarning, match=f"^``FullyShardedDataParallel.{name}``is being deprecated") as caught:
            result = getattr(Fsdp, name)(*args)
        assert caught[0].filename == __file__
        if "flatten" in name or "shard_full" in name or "scatter" in name:
            optim.load_state_dict(result)
            same(Fsdp.optim_state_dict(model, optim), full, tolerance=0)
    with pytest.warns(FutureWarning, match="^The `optim_input` argument is deprecated"):
        Fsdp.shard_full_optim_state_dict(full, model, list(model.parameters()))


class Mixed(nn.Module):
    """Two units, and with `more` parameters that no instance manages, as where other ranks hold other layers."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], more: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = wrap(nn.Linear(5, 7)), wrap(nn.Linear(7, 5))
        if more:
            self.own = nn.Parameter(torch.ones(5))
            self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        return self.out(x * self.own) if hasattr(self, "out") else x


def mixed(which: str, more: bool, wrap: Any = Fsdp, saves: bool = False) -> tuple[nn.Module, Adam]:
    """Its parameters in one group, or by the first letter of their names in groups whose settings differ."""
    model = Mixed(wrap, more)
    named = list(model.named_parameters())
    letters = dict.fromkeys(name[0] for name, _ in named)
    apart = [{"params": [p for n, p in named if n[0] == letter], "lr": ord(letter) / 100} for letter in letters]
    optim = Adam([{"params": [p for _, p in named], "lr": 0.1}] if which == "together" else apart)
    for group in optim.param_groups if saves else ():
        group["lr"] /= 2
    for number in range(2) if saves else ():
        optim.zero_grad()
        model(batch(number, 0)).square().mean().backward()
        optim.step()
    return model, optim


def loaded_by_older_names(full: Any, cut: Any, model: nn.Module, optim: Optimizer) -> dict[str, dict[str, Any]]:
    first = full if dist.get_rank() == 0 else None
    return {
        "shard": Fsdp.shard_full_optim_state_dict(full, model, optim=optim),
        "shard, by its input": Fsdp.shard_full_optim_state_dict(full, model, optim.param_groups),
        "scatter": Fsdp.scatter_full_optim_state_dict(first, model, optim=optim),
        "scatter, by its input": Fsdp.scatter_full_optim_state_dict(first, model, optim.param_groups),
        "flatten": Fsdp.flatten_sharded_optim_state_dict(cut, model, optim),
    }


def names_in_groups(model: nn.Module, optim: Optimizer) -> list[list[str]]:
    named = {p: name for name, p in model.named_parameters()}
    return [[named[p] for p in group["params"]] for group in optim.param_groups]


@check(which=("together", "apart"))
def the_older_names_change_nothing_of_the_users(which: str) -> None:
    model, optim = mixed(which, more=True, saves=True)
    alone, plain_optim = mixed(which, more=True, wrap=lambda module: module)
    full = Fsdp.full_optim_state_dict(model, optim, optim.param_groups, rank0_only=False)
    cut = Fsdp.sharded_optim_state_dict(model, optim)
    live = [optim.param_groups, optim.state, full, plain_optim.param_groups]
    before, names = repr(live), names_in_groups(model, optim)
    loaded_by_older_names(full, cut, model, optim)
    Fsdp.rekey_optim_state_dict(full, BY_ID, alone, plain_optim.param_groups)
    assert repr(live) == before  # keys, settings and values
    assert names_in_groups(model, optim) == names


@check(which=("together", "apart"), orig=(False, True), more=(False, True))
def what_no_instance_manages_stays_in_its_group(which: str, orig: bool, more: bool) -> None:
    """With state and settings, if those were saved; if not, without state, and with the settings of its group."""
    model, optim = mixed(which, more, saves=True)
    full = Fsdp.full_optim_state_dict(model, optim, rank0_only=False)
    cut = Fsdp.sharded_optim_state_dict(model, optim)
    halved = {name[0] for group in full["param_groups"] for name in group["params"]}
    model, unloaded = mixed(which, more=True, wrap=partial(Fsdp, use_orig_params=orig))
    for way, result in loaded_by_older_names(full, cut, model, unloaded).items():
        loaded = Adam([dict(group) for group in unloaded.param_groups])
        loaded.load_state_dict(result)
        for group, before, names in zip(
            loaded.param_groups, unloaded.param_groups, names_in_groups(model, loaded), strict=True
        ):
            assert group["params"] == before["params"], way
            assert group["lr"] == before["lr"] / (2 if {name[0] for name in names} & halved else 1), (way, names)
        assert (model.own in loaded.state) == more, way
        if more:
            same(Fsdp.full_optim_state_dict(model, loaded, rank0_only=False), full, tolerance=0)


@check()
def without_an_optimizer_the_groups_are_those_that_were_saved() -> None:
    """Numbered in the order of the model's parameters, as by torch's."""
    model, optim = mixed("apart", more=True, saves=True)
    full = Fsdp.full_optim_state_dict(model, optim, rank0_only=False)
    result = Fsdp.shard_full_optim_state_dict(full, model)
    order = [name for name, _ in model.named_parameters()]
    assert [[order[i] for i in group["params"]] for group in result["param_groups"]] == names_in_groups(model, optim)
    assert [group["lr"] for group in result["param_groups"]] == [group["lr"] for group in optim.param_groups]
    for number, p in enumerate(model.parameters()):
        assert torch.equal(result["state"][number]["exp_avg"], optim.state[p]["exp_avg"])
    alone, _ = mixed("apart", more=True, wrap=lambda module: module)
    by_id = Fsdp.rekey_optim_state_dict(full, BY_ID, alone)
    order = [name for name, _ in alone.named_parameters()]
    assert [[order[i] for i in group["params"]] for group in by_id["param_groups"]] == [
        sorted(group["params"], key=order.index) for group in full["param_groups"]
    ]


# Replicated groups, and other numbers of ranks


@check(ranks=4, behaviour=42)
def replicas_have_the_same_states() -> None:
    for use_orig_params in (False, True):
        mesh = init_device_mesh("cpu", (2, 2))
        options = {"sharding_strategy": HYBRID_SHARD, "device_mesh": mesh, "use_orig_params": use_orig_params}
        model, optim = trained(**options)
        saved = Fsdp.optim_state_dict(model, optim)
        same(saved, expected())
        with settings(FULL, model, rank0_only=True):
            assert (Fsdp.optim_state_dict(model, optim) == {}) == (dist.get_rank() > 0)
        other = sharded(**options)
        loaded = adam(other.parameters())
        mine = saved if dist.get_rank() == 0 else {}
        with settings(FULL, other, rank0_only=True):
            Fsdp.optim_state_dict_to_load(other, loaded, mine, load_directly=True)
        same(Fsdp.optim_state_dict(other, loaded), saved, tolerance=0)
        with settings(SHARDED, model):
            cut = Fsdp.optim_state_dict(model, optim)
        assert isinstance(cut["state"]["first.weight"]["exp_avg"], DTensor)
        Fsdp.optim_state_dict_to_load(other, loaded, cut, load_directly=True)
        same(Fsdp.optim_state_dict(other, loaded), saved, tolerance=0)


@check(ranks=4)
def states_fit_another_number_of_ranks() -> None:
    """On 4 ranks some have nothing of some parameters, and no state of them."""
    saved = expected()
    for options in ({}, {"use_orig_params": True}, {"use_orig_params": True, "sharding_strategy": SHARD_GRAD_OP}):
        model = sharded(**options)
        optim = adam(model.parameters())
        Fsdp.optim_state_dict_to_load(model, optim, saved, load_directly=True)
        assert all(p.numel() for p in optim.state)
        same(Fsdp.optim_state_dict(model, optim), saved, tolerance=0)
        train(model, optim)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
