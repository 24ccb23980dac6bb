"""minifsdp.checkpoint: one form of state for FSDP, DDP and plain modules, that torch.distributed.checkpoint saves."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import Checks, shared_folder
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy
from torch.optim import SGD, Adam, Optimizer

import minifsdp.checkpoint
from minifsdp import DistributedDataParallel, Zero1Optimizer, Zero2Optimizer, comm
from minifsdp.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp import MixedPrecision, OptimStateKeyType, ShardingStrategy
from minifsdp.instruments.launch import launch

check = Checks(__name__)

FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 7, bias=False))
        self.last = nn.Linear(7, 1)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))) * self.scale


def plain(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def inside_a_plain_module(seed: int) -> nn.Module:
    net = plain(seed)
    net.middle = Fsdp(net.middle)
    return net


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "plain": plain,
    "DDP": lambda seed: DistributedDataParallel(plain(seed)),
    "torch's DDP": lambda seed: nn.parallel.DistributedDataParallel(plain(seed)),
    "DDP of compiled": lambda seed: DistributedDataParallel(torch.compile(plain(seed), backend="eager")),  # never run
    "FSDP": lambda seed: Fsdp(plain(seed), auto_wrap_policy={nn.Sequential}),
    "FSDP, original": lambda seed: Fsdp(plain(seed), auto_wrap_policy={nn.Sequential}, use_orig_params=True),
    "NO_SHARD": lambda seed: Fsdp(plain(seed), None, ShardingStrategy.NO_SHARD),
    "FSDP of checkpointed": lambda seed: Fsdp(checkpoint_wrapper(plain(seed))),
    "inside a plain module": inside_a_plain_module,
}


def adam(model: nn.Module, lr: float = 0.1) -> Adam:
    return Adam(model.parameters(), lr=lr)


def step(model: nn.Module, optim: Optimizer, number: int) -> None:
    """The same on every rank, so that it makes no difference how many there are, or whether they know one another."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    optim.zero_grad()
    model(x).square().sum().backward()
    optim.step()


def trained(kind: str, seed: int = 0) -> tuple[nn.Module, Adam]:
    model = MODELS[kind](seed)
    optim = adam(model)
    for number in range(2) if "compiled" not in kind else ():
        step(model, optim, number)
    return model, optim


def same(state: Any, other: Any, tolerance: float = 1e-6) -> None:
    if isinstance(other, tuple) and isinstance(state, tuple):
        for one, another in zip(state, other, strict=True):
            same(one, another, tolerance)
        return
    if isinstance(other, dict):
        assert state.keys() == other.keys()
        for key in other:
            same(state[key], other[key], tolerance)
    elif isinstance(other, Tensor):
        assert (state.shape, state.dtype) == (other.shape, other.dtype)
        assert torch.allclose(state, other, rtol=tolerance, atol=tolerance), (state, other)
    else:
        assert state == other


def full_state(model: nn.Module, optim: Optimizer) -> tuple[Any, Any]:
    model_state, optim_state = get_state_dict(model, optim, options=FULL)
    return model_state, optim_state["state"]


# The checks


@check(kind=list(MODELS))
def every_model_has_the_same_form(kind: str) -> None:
    model, optim = trained(kind)
    model_state, optim_state = full_state(model, optim)
    if "compiled" in kind:
        same(model_state, plain().state_dict())
        assert optim_state.keys() == dict(plain().named_parameters()).keys()
    else:
        alone, alone_optim = trained("plain")
        same(model_state, alone.state_dict())
        by_name = OptimStateKeyType.PARAM_NAME
        named = Fsdp.rekey_optim_state_dict(alone_optim.state_dict(), by_name, alone, optim=alone_optim)
        same(optim_state, named["state"], 1e-5)
    other = MODELS[kind](1)
    loaded = adam(other, lr=0.5)
    result = set_state_dict(
        other,
        loaded,
        model_state_dict=model_state,
        optim_state_dict=get_optimizer_state_dict(model, optim),
        options=FULL,
    )
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    same(full_state(other, loaded)[0], model_state, 0)
    assert loaded.param_groups[0]["lr"] == 0.1
    if loaded.state:
        same(full_state(other, loaded)[1], optim_state, 0)


@check()
def the_default_is_sharded_and_a_copy() -> None:
    model, optim = trained("FSDP")
    model_state, optim_state = get_state_dict(model, optim)
    values = [model_state["first.weight"], optim_state["state"]["first.weight"]["exp_avg"]]
    before = full_state(model, optim)
    for value in values:
        assert isinstance(value, ShardedTensor)
        value.local_shards()[0].tensor.fill_(9)
    same(full_state(model, optim)[0], before[0], 0)
    same(full_state(model, optim)[1], before[1], 0)


@check()
def host_memory_and_rank_0() -> None:
    for kind in ("FSDP", "DDP", "plain"):
        model, optim = trained(kind)
        states = get_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() > 0:
            assert states == ({}, {})
        else:
            kept = copy.deepcopy(states)
            for p in model.parameters():
                p.data.fill_(9)
            same(states[0], kept[0], 0)  # on CPU `.cpu()` would be no copy
        sharded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
        assert isinstance(sharded["first.weight"], ShardedTensor) == (kind == "FSDP")


@check(kind=["FSDP", "FSDP, original", "DDP", "plain"])
def rank_0_can_send_what_it_has(kind: str) -> None:
    model, optim = trained(kind)
    states = get_state_dict(model, optim, options=FULL)
    mine = states if dist.get_rank() == 0 else ({}, {})
    other = MODELS[kind](1)
    loaded = adam(other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(other, loaded, model_state_dict=mine[0], optim_state_dict=mine[1], options=options)
    same(full_state(other, loaded)[0], states[0], 0)
    same(full_state(other, loaded)[1], states[1]["state"], 0)


@check()
def frozen_parameters_can_be_left_out() -> None:
    for use_orig_params in (False, True):
        net = plain()
        net.middle.requires_grad_(False)
        model = Fsdp(net, auto_wrap_policy={nn.Sequential}, use_orig_params=use_orig_params)
        state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        assert not [name for name in state if name.startswith("middle")]
        assert "first.weight" in state
        assert "scale" in state
        result = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
        assert "middle.0.weight" in result.missing_keys


@check()
def what_is_missing_counts_if_strict() -> None:
    model, optim = trained("FSDP, original")
    model_state, optim_state = get_state_dict(model, optim, options=FULL)
    del model_state["first.bias"], optim_state["state"]["first.bias"]
    loose = StateDictOptions(full_state_dict=True, strict=False)
    with pytest.raises(RuntimeError, match=r'Missing key.*"first.bias"'):
        set_model_state_dict(model, dict(model_state), options=FULL)
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'first.bias' in checkpoint"):
        set_optimizer_state_dict(model, optim, optim_state, options=FULL)
    assert set_model_state_dict(model, dict(model_state), options=loose).missing_keys == ["first.bias"]
    set_optimizer_state_dict(model, optim, optim_state, options=loose)
    assert "first.bias" not in full_state(model, optim)[1]
    for call, args in ((set_model_state_dict, ({},)), (set_optimizer_state_dict, (optim, {}))):
        with pytest.raises(RuntimeError, match=r"^The option indicates that model state_dict is required.*rank 0"):
            call(model, *args)


@check(kind=["FSDP", "FSDP, original", "DDP"])
def an_optimizer_state_can_be_flat(kind: str) -> None:
    model, optim = trained(kind)
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optim, options=flat)
    assert state["param_groups.middle.0.weight.lr"] == 0.1
    assert state["state.middle.0.weight.exp_avg"].shape == (3, 7)
    assert not any(isinstance(value, dict) for value in state.values())
    other = MODELS[kind](1)
    loaded = adam(other, lr=0.5)
    set_optimizer_state_dict(other, loaded, state, options=flat)
    same(full_state(other, loaded)[1], full_state(model, optim)[1], 0)
    assert loaded.param_groups[0]["lr"] == 0.1
    assert loaded.param_groups[0]["betas"] == (0.9, 0.999)
    state["param_groups.middle.0.weight.lr"] = 0.3
    with pytest.raises(
        RuntimeError, match=r"^All the parameters in the same parameter group should have the same saved"
    ):
        set_optimizer_state_dict(other, loaded, state, options=flat)


@check()
def submodules_are_chosen_with_or_without_their_prefix() -> None:
    model, _ = trained("FSDP")
    inner = model.middle.module[0]
    for keep, name in ((True, "middle.0.weight"), (False, "weight")):
        options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keep)
        with pytest.warns(FutureWarning, match=r"^Getting submodules only model/optim state_dict is deprecated"):
            state = get_model_state_dict(model, submodules={inner}, options=options)
        assert list(state) == [name, name.replace("weight", "bias")]


@check()
def several_optimizers_share_a_state() -> None:
    for use_orig_params in (False, True):
        model = Fsdp(plain(), auto_wrap_policy={nn.Sequential}, use_orig_params=use_orig_params)
        inner = set(model.middle.parameters())

        def make(model: Any = model, inner: Any = inner) -> list[Optimizer]:
            outer = [p for p in model.parameters() if p not in inner]
            return [Adam(inner, lr=0.1), SGD(outer, lr=0.2, momentum=0.9)]

        optims = make()
        for number in range(2):
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))).sum().backward()
            for optim in optims:
                optim.step()
        saved = get_optimizer_state_dict(model, optims)
        assert list(saved["state"]["middle.0.bias"]) == ["step", "exp_avg", "exp_avg_sq"]
        assert list(saved["state"]["last.weight"]) == ["momentum_buffer"]
        loaded = make()
        set_optimizer_state_dict(model, loaded, saved)
        assert [optim.param_groups[0]["lr"] for optim in loaded] == [0.1, 0.2]
        same(
            get_optimizer_state_dict(model, loaded, options=FULL),
            get_optimizer_state_dict(model, optims, options=FULL),
            0,
        )


def begun(optim: Optimizer) -> list[Any]:
    return [optim.state_dict(), [p.grad for group in optim.param_groups for p in group["params"]]]


@check()
def an_optimizer_that_has_not_stepped_is_described_and_left_alone() -> None:
    """There must be something to load into; and what is saved then is what training starts with."""
    precise = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    for options in ({}, {"use_orig_params": True}, {"mixed_precision": precise}):
        model = Fsdp(plain(), auto_wrap_policy={nn.Sequential}, **options)
        for make in (
            lambda p: Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
            lambda p: Adam(p, lr=torch.tensor(0.1), weight_decay=0.1),
            lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
            lambda p: SGD(p, lr=0.1),
        ):
            optim = make(model.parameters())
            values = [p.detach().clone() for p in model.parameters()]
            model(torch.ones(4, 5)).sum().backward()
            before = copy.deepcopy(begun(optim))
            saved = get_optimizer_state_dict(model, optim, options=FULL)
            for state in saved["state"].values():
                assert all(not value.any() for value in state.values())
            assert bool(saved["state"]) == (not isinstance(optim, SGD) or bool(optim.defaults["momentum"]))
            assert begun(optim)[0] == before[0]
            for now, then in zip(begun(optim)[1], before[1], strict=True):
                assert (now is None) == (then is None)
                assert now is None or torch.equal(now, then)
            assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
            optim.zero_grad()


@check(kind=("plain", "FSDP, original", "inside a plain module"))
def optimizers_may_come_in_another_order_on_each_rank(kind: str) -> None:
    model, direction = MODELS[kind](0), -1 if dist.get_rank() else 1
    params = list(model.parameters())
    optimizers = [Adam(part[::direction], lr=0.1) for part in (params[:3], params[3:])[::direction]]
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    for optim in optimizers:
        optim.step()
    full = get_optimizer_state_dict(model, optimizers, options=FULL)
    others = [Adam(optim.param_groups[0]["params"], lr=0.1) for optim in optimizers]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, others, full if dist.get_rank() == 0 else {}, options=options)
    for optim, other in zip(optimizers, others, strict=True):
        for p, state in optim.state.items():
            assert p.numel() == 0 or torch.equal(state["exp_avg"], other.state[p]["exp_avg"])


@check()
def what_cannot_be_done_is_refused() -> None:
    model, optim = trained("FSDP")
    for options, text in (
        (
            StateDictOptions(broadcast_from_rank0=True),
            r"^full_state_dict must be True when broadcast_from_rank0 is True.",
        ),
        (StateDictOptions(dsd_fqn_modifiers="x"), "dsd_fqn_modifiers is not supported"),
    ):
        with pytest.raises(ValueError, match=text):
            get_state_dict(model, optim, options=options)
    with pytest.raises(RuntimeError, match=r"^Optimizers are not passed in"):
        get_optimizer_state_dict(model, [])
    assert get_state_dict(model, [])[1] == {}
    theirs = nn.Sequential(TorchsFsdp(plain(), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match=r"0 is torch's FullyShardedDataParallel: .*torch.distributed.checkpoint"):
        get_model_state_dict(theirs)
    with pytest.raises(ValueError, match=r"LBFGS multiplies whole gradients"):
        get_optimizer_state_dict(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"that the model has not"):
        set_optimizer_state_dict(model, adam(plain()), get_optimizer_state_dict(model, optim))


# Torch's options, torch's functions


class Frozen(nn.Linear):
    """A unit of its own, which is not trained."""


class Odd(nn.Module):
    """Nested units, one of them frozen, and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = Frozen(5, 3).requires_grad_(False)
        self.middle = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(torch.tanh(self.frozen(self.tied(torch.tanh(self.first(x))))))


OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
}


def odd(wrap: Any, make: str = "AdamW", seed: int = 0, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    """Two parameter groups, of the nested unit and of the others; each rank has rows of its own."""
    torch.manual_seed(seed)
    model = wrap(Odd())
    inner = list(model.middle.parameters())
    outer = [p for p in model.parameters() if p not in set(inner) and p.requires_grad]
    optim = OPTIMIZERS[make]([{"params": inner, "weight_decay": 0.1}, {"params": outer}])
    train_odd(model, optim, range(steps))
    return model, optim


def train_odd(model: nn.Module, optim: Optimizer, steps: Any) -> None:
    for number in steps:
        optim.zero_grad()
        rows = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model(torch.randn(4, 5, generator=rows)).square().mean().backward()
        optim.step()


def wrappers(orig: bool) -> list[Any]:
    """Ours and torch's."""
    theirs = {"auto_wrap_policy": TorchsPolicy({nn.Sequential, Frozen}), "device_id": torch.device("cpu")}
    mine = {"auto_wrap_policy": {nn.Sequential, Frozen}}
    return [partial(Fsdp, use_orig_params=orig, **mine), partial(TorchsFsdp, use_orig_params=orig, **theirs)]


def comparable(value: Any) -> Any:
    """Sharded values by what this rank has of them; a rank without rows has an empty shard here, none in torch."""
    if isinstance(value, dict):
        return {key: comparable(inner) for key, inner in value.items()}
    if isinstance(value, ShardedTensor):
        rows = [shard.tensor for shard in value.local_shards() if shard.tensor.numel()]
        return {"size": tuple(value.size()), **{f"shard {i}": rows[i] for i in range(len(rows))}}
    return value


HONOURED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "full": {"full_state_dict": True},
    "full, in host memory": {"full_state_dict": True, "cpu_offload": True},
    "in host memory": {"cpu_offload": True},
    "flat": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "without frozen": {"full_state_dict": True, "ignore_frozen_params": True},
    "not strict": {"strict": False},
}


@check(orig=(False,), make=list(OPTIMIZERS), fields=HONOURED, wide="combinations")
@check(orig=(True,), make=list(OPTIMIZERS), fields=HONOURED, wide=True)
def torchs_options_give_what_they_give_in_torch(orig: bool, make: str, fields: dict[str, Any]) -> None:
    options = torchs.StateDictOptions(**fields)
    mine, theirs = wrappers(orig)
    model, optim = odd(mine, make)
    states = get_state_dict(model, optim, options=options)
    on_rank_0 = options.full_state_dict and options.cpu_offload
    if on_rank_0:  # an error in torch on CPU, where the memory that it frees is what it has offloaded
        options = torchs.StateDictOptions(full_state_dict=True)
    expected = torchs.get_state_dict(*odd(theirs, make), options=options)
    if on_rank_0 and dist.get_rank() > 0:
        expected = ({}, {})
    for state, other in zip(states, expected, strict=True):
        same(comparable(state), comparable(other), 1e-5)


@check(orig=(False, True), make=list(OPTIMIZERS), wide="combinations")
def a_round_trip_with_torchs_options_goes_on_as_if_uninterrupted(orig: bool, make: str) -> None:
    """The recipe of torch's documentation, with the functions of ours."""
    options = torchs.StateDictOptions(cpu_offload=True)
    wrap, _ = wrappers(orig)
    model, optim = odd(wrap, make)
    again, loaded = odd(wrap, make, seed=1, steps=0)
    with shared_folder() as folder:
        model_state, optim_state = get_state_dict(model, optim, options=options)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=str(folder))
        model_state, optim_state = get_state_dict(again, loaded, options=options)
        dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=str(folder))
    set_state_dict(again, loaded, model_state_dict=model_state, optim_state_dict=optim_state, options=options)
    for each in ((model, optim), (again, loaded)):
        train_odd(*each, range(5, 8))
    same(full_state(again, loaded), full_state(model, optim), 0)


@check()
def what_torchs_options_ask_of_loading_is_honoured_or_refused() -> None:
    model, optim = trained("FSDP, original")
    states = get_state_dict(model, optim, options=FULL)
    other = MODELS["FSDP"](1)
    loaded = adam(other)
    first = states if dist.get_rank() == 0 else ({}, {})
    sent = torchs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(other, loaded, model_state_dict=first[0], optim_state_dict=first[1], options=sent)
    same(full_state(other, loaded), (states[0], states[1]["state"]), 0)
    inner = model.middle.module[0]
    with pytest.warns(FutureWarning, match="^Getting submodules only"):
        state = get_model_state_dict(
            model, submodules={inner}, options=torchs.StateDictOptions(keep_submodule_prefixes=False)
        )
    assert list(state) == ["weight", "bias"]
    less = {name: value for name, value in states[0].items() if name != "first.bias"}
    with pytest.raises(RuntimeError, match=r"first\.bias"):
        set_model_state_dict(other, dict(less), options=torchs.StateDictOptions(full_state_dict=True))
    set_model_state_dict(other, dict(less), options=torchs.StateDictOptions(full_state_dict=True, strict=False))

    of_another_torch = make_dataclass("StateDictOptions", [("new", int, 0)], bases=(torchs.StateDictOptions,))
    assert get_model_state_dict(model, options=of_another_torch()).keys() == states[0].keys()
    for options, text in (
        (torchs.StateDictOptions(dsd_fqn_modifiers="x"), "^dsd_fqn_modifiers is not supported: rename what"),
        (torchs.StateDictOptions(broadcast_from_rank0=True), "^full_state_dict must be True when broadcast_from_rank0"),
        (of_another_torch(new=1), "^StateDictOptions.new is not supported: leave it out$"),
        ({"full_state_dict": True}, "^options={'full_state_dict': True}: give a StateDictOptions$"),
    ):
        with pytest.raises(ValueError, match=text):
            get_state_dict(model, optim, options=options)


@check(kind=["FSDP", "FSDP, original", "NO_SHARD", "FSDP of checkpointed", "inside a plain module"])
def torchs_own_functions_are_refused_before_anything_is_done(kind: str) -> None:
    """They would take a rank's shard for the whole, in silence."""
    model, optim = trained(kind)
    states = get_state_dict(model, optim, options=FULL)
    text = "^torch.distributed.checkpoint.state_dict knows no FSDP but torch's, .* from minifsdp.checkpoint$"
    with comm.record() as calls:
        for refused in (
            lambda: torchs.get_state_dict(model, optim),
            lambda: torchs.get_model_state_dict(model),
            lambda: torchs.get_optimizer_state_dict(model, optim),
            lambda: torchs.set_state_dict(model, optim, model_state_dict=states[0], optim_state_dict=states[1]),
            lambda: torchs.set_model_state_dict(model, states[0]),
            lambda: torchs.set_optimizer_state_dict(model, optim, states[1]),
        ):
            with pytest.raises(RuntimeError, match=text):
                refused()
    assert calls == []
    same(full_state(model, optim), (states[0], states[1]["state"]), 0)


@check()
def torchs_own_functions_save_ddp_under_its_own_names() -> None:
    """Whole and right, but with `module.` before each name."""
    model, optim = trained("DDP")
    states = torchs.get_state_dict(model, optim)
    other = MODELS["DDP"](1)
    loaded = adam(other)
    torchs.set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1])
    same(full_state(other, loaded), full_state(model, optim), 0)
    assert all(name.startswith("module.") for state in (states[0], states[1]["state"]) for name in state)


@check(kind=[Zero1Optimizer, Zero2Optimizer])
def a_partitioned_optimizer_is_saved_as_it_is(kind: Any) -> None:
    """It keeps no state where torch.optim has it, which is not to say that it has not stepped."""
    model = plain()
    optim = kind(model.parameters(), Adam, lr=0.1)
    for number in range(2):
        step(model, optim, number)
    optim.zero_grad()
    before = copy.deepcopy(optim.state_dict()["state"])
    saved = get_optimizer_state_dict(model, optim)
    same(optim.state_dict()["state"], before, 0)
    same(dict(enumerate(saved["state"].values())), before, 0)
    loaded = kind(model.parameters(), Adam, lr=0.1)
    described = get_optimizer_state_dict(model, loaded)["state"]
    assert {name: [*state] for name, state in described.items()} == {n: [*s] for n, s in saved["state"].items()}
    assert not loaded.inner.state
    assert not any(p.grad is not None for p in model.parameters())
    set_optimizer_state_dict(model, loaded, saved)
    same(loaded.state_dict()["state"], before, 0)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


# From one number of ranks to another

SAVED = ("FSDP", "FSDP, original", "DDP")


def save(path: str) -> None:
    warnings.simplefilter("ignore")
    for kind in SAVED:
        model, optim = trained(kind)
        model_state, optim_state = get_state_dict(model, optim)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=f"{path}/{kind}")
        torch.save(full_state(model, optim), f"{path}/{kind}.{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("checkpoints"))
    launch(save, 2, path, timeout=100)
    return path


def load_on_other_ranks(path: str) -> None:
    warnings.simplefilter("ignore")
    for kind in SAVED:
        expected = torch.load(f"{path}/{kind}.0.pt")
        for other in ("FSDP", "FSDP, original", "DDP", "plain", "NO_SHARD"):
            model = MODELS[other](1)
            optim = adam(model, lr=0.5)
            model_state, optim_state = get_state_dict(model, optim)
            dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=f"{path}/{kind}")
            set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state)
            loaded = full_state(model, optim)
            same(loaded[0], expected[0], 0)
            same(loaded[1], expected[1], 0)
            assert optim.param_groups[0]["lr"] == 0.1
            step(model, optim, 2)


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.behaviour(40, 42)
def test_what_two_ranks_have_saved_others_can_load(saved: str, ranks: int) -> None:
    """Through torch.distributed.checkpoint: into FSDP of both kinds, DDP and a plain module."""
    launch(load_on_other_ranks, ranks, saved, timeout=100)


def test_without_a_process_group_there_are_only_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optim = adam(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(model, optim, options=options)
    assert list(optim_state["state"]) == list(model_state) == ["0.weight", "0.bias"]
    set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state, options=options)
    assert len(optim.state) == 2


@pytest.mark.parametrize("name", [name for name in minifsdp.checkpoint.__all__ if "trainer" not in name])
def test_signatures_are_torchs(name: str) -> None:
    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (minifsdp.checkpoint, torchs))
    assert [(p.name, p.kind, p.default) for p in mine.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
