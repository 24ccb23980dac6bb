"""minifsdp.checkpoint, however ranks share a model: what they are given is loaded, or all raise the same error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import Checks, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Adam
from torch.optim.optimizer import register_optimizer_step_post_hook

from minifsdp import checkpoint as ours
from minifsdp.checkpoint import StateDictOptions
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp2 import fully_shard
from minifsdp.tensor_parallel import ColwiseParallel, parallelize_module

check = Checks(__name__)


class Net(nn.Module):
    """5 columns and 7 rows are not divisible; `tied` has the weight of `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(3, 2))
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).tanh())
        return (self.last(y) + self.tied(y)) * self.p.sum()


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def by_parameter(seed: int) -> nn.Module:
    model = net(seed)
    fully_shard(model.first)
    return fully_shard(model)


def tensor_parallel(seed: int, group: Any = None) -> nn.Module:
    model = net(seed)
    model.tied = nn.Linear(7, 5)
    return parallelize_module(model, group or mesh(dist.get_world_size()), {"first": ColwiseParallel()})


def partly(seed: int) -> nn.Module:
    model = net(seed)
    fully_shard(model.norm)
    return model


def flat_and_by_parameter(seed: int) -> nn.Module:
    model = net(seed)
    fully_shard(model.norm)
    model.first = Fsdp(model.first)
    return model


def hybrid(seed: int) -> nn.Module:
    return fully_shard(net(seed), mesh=mesh(2, dist.get_world_size() // 2))


def two_dimensions(seed: int) -> nn.Module:
    both = mesh(2, dist.get_world_size() // 2)
    return fully_shard(tensor_parallel(seed, both["tp"]), mesh=both["dp"])


def replicated_parts(seed: int) -> nn.Module:
    both = mesh(2, dist.get_world_size() // 2)
    return DistributedDataParallel(tensor_parallel(seed, both["tp"]), device_mesh=both["dp"])


SHARED: dict[str, Callable[[int], nn.Module]] = {
    "FSDP2": by_parameter,
    "TP": tensor_parallel,
    "partly": partly,
    "flat and FSDP2": flat_and_by_parameter,
}
OTHERS: dict[str, Callable[[int], nn.Module]] = {
    "flat": lambda seed: Fsdp(net(seed), auto_wrap_policy={nn.BatchNorm1d}),
    "flat, original": lambda seed: Fsdp(net(seed), auto_wrap_policy={nn.BatchNorm1d}, use_orig_params=True),
    "DDP": lambda seed: DistributedDataParallel(net(seed)),
    "plain": net,
}
MESHES = {"hybrid": hybrid, "2-D": two_dimensions, "DDP of TP": replicated_parts}


def trained(make: Callable[[int], nn.Module], seed: int = 0) -> tuple[nn.Module, Adam]:
    """Every parameter has a state, of values that all ranks know."""
    model = make(seed)
    optimizer = Adam(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p) * p.detach()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy(ours.get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, tuple) and any(isinstance(each, dict) for each in expected):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, path)
    elif isinstance(expected, dict):
        assert sorted(found) == sorted(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, Tensor):
        assert type(found) is type(expected), path
        parts = [t.to_local() if isinstance(t, DTensor) else t for t in (found, expected)]
        torch.testing.assert_close(*parts, rtol=0, atol=0, msg=path)
    else:
        assert found == expected, path


def same_on_all_ranks(value: Any) -> Any:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert found == [found[0]] * len(found)
    return value


# Loading


def a_state_comes_back(make: Callable[[int], nn.Module], form: str) -> None:
    """Also of parameters that were frozen after training, into a model in which they are."""
    model, optimizer = trained(make)
    for name, p in model.named_parameters():
        p.requires_grad_("first" not in name and not name.endswith("p"))
    expected = whole(model, optimizer)
    options = StateDictOptions(full_state_dict=form != "sharded", broadcast_from_rank0=form == "from rank 0")
    given = ours.get_state_dict(model, optimizer) if form == "sharded" else expected
    if form == "from rank 0" and dist.get_rank():
        given = ({}, {})
    other = make(1)
    for name, p in other.named_parameters():
        p.requires_grad_("first" not in name and not name.endswith("p"))
    loaded = Adam(other.parameters(), lr=0.5)
    result = ours.set_state_dict(other, loaded, model_state_dict=given[0], optim_state_dict=given[1], options=options)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same(whole(other, loaded), expected)


FORMS = ("sharded", "whole", "from rank 0")
LATER = {"flat": OTHERS["flat, original"], "DDP": OTHERS["DDP"]}


@check(make=SHARED | LATER, form=FORMS, wide="combinations")
def the_state_of_frozen_parameters_is_loaded(make: Callable[[int], nn.Module], form: str) -> None:
    a_state_comes_back(make, form)


@check(ranks=4, make=MESHES, form=FORMS[:1])
@check(ranks=4, make=MESHES, form=FORMS[1:], wide=True)
def on_a_mesh_too(make: Callable[[int], nn.Module], form: str) -> None:
    a_state_comes_back(make, form)


REPORTING = ("partly", "flat", "TP")
PAIRS = [(True, True, False), (True, False, True), (False, True, True), (False, False, False)]
"""Every two of three options in each of their four combinations."""


@check(make={name: (SHARED | OTHERS)[name] for name in REPORTING})
@check(make={name: make for name, make in (SHARED | OTHERS).items() if name not in REPORTING}, wide=True)
def all_ranks_report_the_same(make: Callable[[int], nn.Module]) -> None:
    """Under the names of a checkpoint, with every option that bears on it."""
    source = whole(make(7), [])[0]
    cases = {
        "nothing wrong": ([], [], {}),
        "missing": (["first.weight", "p", "norm.running_mean"], [], {}),
        "unexpected": ([], ["zzz.weight", "q"], {}),
        "both": (["first.weight"], ["q"], {}),
        "shape": ([], [], {"first.weight": torch.randn(4, 5)}),
    }
    for (name, (less, more, other)), (strict, send, to_cpu) in product(cases.items(), PAIRS):
        state = {key: value for key, value in source.items() if key not in less}
        state |= {key: torch.randn(2, 2) for key in more} | other
        if send and dist.get_rank():
            state = {}
        options = StateDictOptions(full_state_dict=True, strict=strict, broadcast_from_rank0=send, cpu_offload=to_cpu)
        model = make(dist.get_rank() + 1)
        try:
            result: Any = ours.set_model_state_dict(model, state, options=options)
            result = (sorted(result.missing_keys), sorted(result.unexpected_keys))
        except RuntimeError as error:
            result = str(error)
        same_on_all_ranks(result)
        if name == "shape":
            assert "size mismatch for first.weight: copying a param with shape torch.Size([4, 5])" in result
        elif strict and name != "nothing wrong":
            assert all(f'"{key}"' in result for key in [*less, *more]), result
        else:
            assert result == (sorted(less), sorted(more))
            loaded, given = whole(model, [])[0], [key for key in source if key not in less]
            assert_same({key: loaded[key] for key in given}, {key: source[key] for key in given})


@check(make=SHARED | {"flat": OTHERS["flat"]})
def ranks_that_are_given_different_values_are_refused_together(make: Callable[[int], nn.Module]) -> None:
    model, optimizer = trained(make)
    states, rank = whole(model, optimizer), dist.get_rank()
    some = {name: value for name, value in states[0].items() if not rank or not name.startswith("norm")}
    optim = {name: value for name, value in states[1]["state"].items() if not rank or not name.startswith("norm")}
    cut = {name: value[: 7 - rank] if name.startswith("norm.w") else value for name, value in states[0].items()}
    is_shared = any(isinstance(p, DTensor) for name, p in model.named_parameters() if name.startswith("norm"))
    for state in (some, {} if rank else states[0], cut):
        with pytest.raises(RuntimeError) as raised:
            ours.set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        text = same_on_all_ranks(str(raised.value))
        assert "rank" in text or not is_shared
    with pytest.raises(RuntimeError) as raised:
        ours.set_optimizer_state_dict(model, optimizer, states[1] | {"state": optim})
    assert "norm" in same_on_all_ranks(str(raised.value))
    assert_same(whole(model, optimizer)[1], states[1])


@check(make=SHARED | LATER)
def what_only_one_rank_has_is_refused_on_all(make: Callable[[int], nn.Module]) -> None:
    """Also of values that each rank has whole, and without `strict`."""
    model, optimizer = trained(make)
    before, rank = whole(model, optimizer), dist.get_rank()
    options = StateDictOptions(full_state_dict=True, strict=False)

    def refusal(part: int, given: Any) -> str:
        args = (optimizer, before[1] | given) if part else (given,)
        load: Any = ours.set_optimizer_state_dict if part else ours.set_model_state_dict
        with pytest.raises(RuntimeError, match=r"^ranks have been given different states: ") as raised:
            load(model, *args, options=options)
        return same_on_all_ranks(str(raised.value)).split(": ", 1)[1]

    def without_p(state: Any) -> Any:
        return {name: value for name, value in state.items() if name != "p" or not rank}

    groups = copy.deepcopy(before[1]["param_groups"])
    groups[0]["lr"] += rank
    assert refusal(0, without_p(before[0])).endswith(" on rank 0, missing on rank 1. " + CURE)
    assert refusal(0, before[0] | ({"q": torch.ones(2)} if rank else {})).startswith("q is missing on rank 0, given on")
    assert refusal(1, {"state": without_p(before[1]["state"])}).startswith("p is {'exp_avg': ")
    assert refusal(1, {"state": {} if rank else before[1]["state"]}).startswith("first.bias is {'exp_avg': ")
    assert refusal(1, {"param_groups": groups}).startswith("the parameter group of first.bias is {")
    assert_same(whole(model, optimizer), before)


CURE = (
    "Pass the same on all ranks, or the whole state on rank 0 with full_state_dict=True and broadcast_from_rank0=True"
)


@check()
def each_rank_may_have_values_of_its_own() -> None:
    """As with experts: one per rank, by its number, among what all ranks share."""

    def make(seed: int) -> nn.Module:
        model = net(seed)
        fully_shard(model)
        model.add_module(f"expert{dist.get_rank()}", nn.Linear(2, 2))
        return model

    (model, optimizer), (other, loaded) = trained(make), trained(make, 1)
    states = whole(model, optimizer)
    ours.set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1])
    assert_same(whole(other, loaded), states)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, states[0])
    both = every[0] | every[1]
    result = ours.set_model_state_dict(make(2), both, options=StateDictOptions(full_state_dict=True, strict=False))
    assert result.unexpected_keys == [f"expert{1 - dist.get_rank()}.{name}" for name in ("weight", "bias")]


class Chain(nn.Module):
    """Three layers of one shape, so that the states of two can be confused."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = (nn.Linear(4, 4, bias=False) for _ in "acd")

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.a(x)))  # type: ignore[no-any-return]


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "FSDP2": lambda: fully_shard(Chain()),
    "TP": lambda: parallelize_module(Chain(), mesh(2), dict.fromkeys("acd", ColwiseParallel())),
    "DDP": lambda: DistributedDataParallel(Chain()),
    "flat, original": lambda: Fsdp(Chain(), auto_wrap_policy={nn.Linear}, use_orig_params=True),
}
FORMS = [
    StateDictOptions(full_state_dict=True),
    StateDictOptions(full_state_dict=True, cpu_offload=True),
    StateDictOptions(flatten_optimizer_state_dict=True),
]


@check(make=CHAINS)
def states_of_other_parameters_on_each_rank_are_refused(make: Callable[[], nn.Module]) -> None:
    """Gathered one after another, they would be mixed, or a rank would wait for ever."""
    model, rank = make(), dist.get_rank()
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    a, c, d = (named[f"{name}.weight"] for name in "acd")

    def stepped(*params: Any, without: Any = ()) -> Adam:
        optimizer = Adam(params)
        for p in params:
            p.grad = torch.ones_like(p)
        for p in without:
            p.grad = None
        optimizer.step()
        return optimizer

    def refused(optimizers: Any, text: str) -> None:
        for options in FORMS:
            with pytest.raises(RuntimeError, match=r"^ranks have different optimizer states of .* Give the ") as raised:
                ours.get_optimizer_state_dict(model, optimizers, options=options)
            assert text in same_on_all_ranks(str(raised.value))

    has = "exp_avg float32, exp_avg_sq float32, step 1.0"
    refused(
        stepped(a, (c, d)[rank]),
        f": c.weight: {has} on rank 0; in no optimizer on rank 1 | "
        f"d.weight: in no optimizer on rank 0; {has} on rank 1. ",
    )
    refused(stepped(*(a, c, d)[: 3 - rank]), f": d.weight: {has} on rank 0; in no optimizer on rank 1. ")
    refused(
        stepped(a, c, d, without=[(c, d)[rank]]),
        f": c.weight: without a state on rank 0; {has} on rank 1 | d.weight: {has} on rank 0; without a state on",
    )
    refused([Adam([a]), Adam([c, d])] if rank else Adam([a, c, d]), "; in optimizer 2 of 2, ")
    optimizer = stepped(a, c, d)
    optimizer.state[c]["step"] += rank
    refused(optimizer, f": c.weight: {has} on rank 0; {has.replace('1', '2')} on rank 1. ")
    optimizer.state[c]["step"] -= rank
    if rank:
        del optimizer.state[c]["exp_avg_sq"]
    refused(optimizer, f": c.weight: {has} on rank 0; exp_avg float32, step 1.0 on rank 1. ")
    if rank:
        optimizer.state.clear()
    refused(optimizer, f": a.weight: {has} on rank 0; {has.replace('1', '0')}, before a first step on rank 1 | ")


@check(make=CHAINS)
def optimizers_and_frozen_parameters_that_differ_by_rank_are_refused(make: Callable[[], nn.Module]) -> None:
    model, rank = make(), dist.get_rank()
    a, c, d = model.parameters()
    state = ours.get_optimizer_state_dict(model, Adam([a, c, d]))
    for options in (StateDictOptions(strict=False), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        with pytest.raises(RuntimeError, match=r": c.weight: in optimizer 1 on rank 0; in no optimizer on rank 1 \| d"):
            ours.set_optimizer_state_dict(model, Adam([a, d if rank else c]), state, options=options)
    (d if rank else c).requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r": c.weight: frozen on rank 0; trained on rank 1 \| d.weight: trained on r"
    ):
        ours.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))


@check(make=CHAINS)
def ranks_agree_on_states_in_any_order(make: Callable[[], nn.Module]) -> None:
    model, rank = make(), dist.get_rank()
    params = list(model.parameters())[:: -1 if rank else 1]
    optimizer = Adam(params, lr=0.0)
    for p in model.parameters():
        p.grad = p.detach().clone()
    list(model.parameters())[1].grad = None
    optimizer.step()
    for p, state in optimizer.state.items() if rank else ():
        optimizer.state[p] = dict(reversed(state.items()))
    found = ours.get_optimizer_state_dict(model, optimizer, options=FORMS[0])["state"]
    values = ours.get_model_state_dict(model, options=FORMS[0])
    assert list(found) == ["a.weight", "d.weight"]
    for name, state in found.items():
        torch.testing.assert_close(state["exp_avg"], 0.1 * values[name])


@check()
def a_rank_without_elements_needs_no_state() -> None:
    """It takes part in the gathering; its optimizer stays as it is."""
    model, rank = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4)), dist.get_rank()
    fully_shard(model)
    first, *others = model.parameters()
    first.grad = None if rank else first.detach().clone()
    for p in others:
        p.grad = p.detach().clone()
    optimizer = Adam(model.parameters(), lr=0.0)
    optimizer.step()
    found = ours.get_optimizer_state_dict(model, optimizer, options=FORMS[0])["state"]
    values = ours.get_model_state_dict(model, options=FORMS[0])
    assert list(found) == ["0.weight", "1.weight", "1.bias"]
    for name, state in found.items():
        torch.testing.assert_close(state["exp_avg"], 0.1 * values[name])
        assert state["step"] == 1
    assert not optimizer.state.get(first) if rank else optimizer.state[first]
    sharded = ours.get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]["exp_avg"]
    assert len(sharded.to_local()) == 1 - rank


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "flat": lambda model: Fsdp(model, use_orig_params=True),
    "FSDP2": lambda model: model.append(fully_shard(nn.Linear(3, 3))),
}


@check(wrap=WRAPPERS)
def rank_0_sends_values_of_any_strides(wrap: Callable[[Any], nn.Module]) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 3)).to(memory_format=torch.channels_last)
        inner[2].weight = nn.Parameter(torch.randn(8, 3).t())
        inner.register_buffer("turned", torch.randn(3, 4).t())
        return wrap(inner)

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = trained(make)
    expected = whole(model, optimizer)
    other, loaded = trained(make, 1)
    given = ({}, {}) if dist.get_rank() else expected
    ours.set_state_dict(other, loaded, model_state_dict=given[0], optim_state_dict=given[1], options=options)
    assert_same(whole(other, loaded), expected)


@check()
def what_rank_0_cannot_send_is_refused_on_all() -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = {} if dist.get_rank() else net(0).state_dict() | {"p": torch.eye(3, 2).to_sparse()}
    with pytest.raises(ValueError, match=r"^rank 0 sends dense values, but one is torch.sparse_coo"):
        ours.set_model_state_dict(by_parameter(1), state, options=options)


@check(make=SHARED)
def rank_0_sends_whole_values_only(make: Callable[[int], nn.Module]) -> None:
    model, optimizer = trained(make)
    states = ours.get_state_dict(model, optimizer)
    mine = ({}, {}) if dist.get_rank() else states
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    text = r"^rank 0 sends whole values, but some are sharded: .*full_state_dict=True"
    for call, args in ((ours.set_model_state_dict, mine[:1]), (ours.set_optimizer_state_dict, (optimizer, mine[1]))):
        with pytest.raises(ValueError, match=text):
            call(model, *args, options=options)


ON_META = {"FSDP2": by_parameter, "partly": partly, "plain": net}


@check(make=ON_META, form=FORMS[1:], to_cpu=(False, True), wide="combinations")
def what_is_on_meta_gets_its_values(make: Callable[[int], nn.Module], form: str, to_cpu: bool) -> None:
    source = net(7).state_dict()
    with torch.device("meta"):
        model = make(1)
    state = {} if form == "from rank 0" and dist.get_rank() else dict(source)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=form == "from rank 0", cpu_offload=to_cpu)
    with pytest.raises(RuntimeError, match=r"^p, .*norm.running_mean.*: on the meta device, without values"):
        ours.set_model_state_dict(model, ours.get_model_state_dict(model))
    assert str(ours.set_model_state_dict(model, state, options=options)) == "<All keys matched successfully>"
    assert_same(whole(model, [])[0], source)
    assert model.tied.weight is model.last.weight
    optimizer = Adam(model.parameters())
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()


@check(make=ON_META)
def a_buffer_on_meta_that_no_checkpoint_has_is_named(make: Callable[[int], nn.Module]) -> None:
    """Those that have been computed are not, nor those in the checkpoint."""
    with torch.device("meta"):
        model = make(1)
        model.first.register_buffer("table", torch.ones(3), persistent=False)
        model.norm.register_buffer("angles", torch.ones(3), persistent=False)
    model.last.register_buffer("known", torch.ones(3), persistent=False)
    options = StateDictOptions(full_state_dict=True)
    with pytest.warns(
        UserWarning, match=r"^first.table, norm.angles: on the meta device, and in no checkpoint"
    ) as found:
        ours.set_model_state_dict(model, net(7).state_dict(), options=options)
    assert len(found) == 1
    assert found[0].filename == __file__
    model.first.table = model.norm.angles = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.set_model_state_dict(model, net(7).state_dict(), options=options)


@check()
def an_optimizer_s_own_state_dict_is_loaded_by_number() -> None:
    for make in (by_parameter, partly, net):
        model, optimizer = trained(make)
        other = make(1)
        loaded = Adam(other.parameters())
        ours.set_optimizer_state_dict(other, loaded, copy.deepcopy(optimizer.state_dict()))
        assert_same(whole(other, loaded)[1], whole(model, optimizer)[1])


@check(make=SHARED | OTHERS)
def a_checkpoint_without_moments_draws_a_warning(make: Callable[[int], nn.Module]) -> None:
    model, optimizer = trained(make)
    states = whole(model, optimizer)[1] | {"state": {}}
    for each, warns in ((Adam, True), (torch.optim.SGD, False)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ours.set_optimizer_state_dict(model, each(model.parameters(), lr=0.1), copy.deepcopy(states))
        assert any("has no state for Adam, which starts anew" in str(w.message) for w in found) == warns
    fresh = ours.get_optimizer_state_dict(model, Adam(model.parameters()))
    assert {"exp_avg", "exp_avg_sq", "step"} == {key for state in fresh["state"].values() for key in state}


@check(make=SHARED | OTHERS)
def what_a_first_step_would_leave_is_described_without_one(make: Callable[[int], nn.Module]) -> None:
    """Nobody hears of a step: hooks of an optimizer or of all, nor a scheduler."""
    model, heard = make(0), []
    optimizer = Adam(model.parameters())
    handles = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
        register_optimizer_step_post_hook(lambda *_: heard.append("any")),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(whole(model, [])[0])
    state = ours.get_optimizer_state_dict(model, optimizer)["state"]
    assert state["first.weight"]["exp_avg"] is not None
    assert heard == []
    assert not optimizer.state
    assert_same(whole(model, [])[0], before)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    for handle in handles:
        handle.remove()


class RowMeans(torch.optim.Optimizer):
    """Its state has one value per row, and a dict."""

    def step(self) -> None:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            state = self.state[p]
            mean = p.grad.square().mean(-1, keepdim=True)
            state["mean"] = state["mean"] * 0.9 + mean if state else mean
            state["norms"] = {"last": p.grad.detach().norm(dim=-1)}
            p.data -= self.param_groups[0]["lr"] * p.grad / (state["mean"] + 1).sqrt()


@check(make=SHARED | LATER, form=FORMS[1:], wide="combinations")
def a_state_of_another_shape_than_its_parameter_is_refused(make: Callable[[int], nn.Module], form: str) -> None:
    """On all ranks, before anything is loaded."""
    model, optimizer = trained(make)
    before = whole(model, optimizer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=form == "from rank 0")
    for name, wrong in product(("first.weight", "norm.bias", "p"), (torch.ones(3), torch.ones(2, 7, 5), torch.ones(1))):
        states = before[1]["state"]
        given = before[1] | {"state": states | {name: states[name] | {"exp_avg_sq": wrong}}}
        if form == "from rank 0" and dist.get_rank():
            given = {}
        with pytest.raises(
            ValueError, match=f"not have same shape as its parameter: .*: exp_avg_sq of {name}$"
        ) as raised:
            ours.set_optimizer_state_dict(model, optimizer, given, options=options)
        same_on_all_ranks(str(raised.value))
    assert_same(whole(model, optimizer), before)


@check()
def a_state_with_a_value_per_row_is_loaded() -> None:
    def steps(count: int, model: Any, optimizer: Any) -> Any:
        for _ in range(count):
            model(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model, optimizer)

    model, other = (fully_shard(nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))) for _ in "12")
    optimizer, loaded = (RowMeans(each.parameters(), {"lr": 0.1}) for each in (model, other))
    states = steps(2, model, optimizer)
    assert states[1]["state"]["0.weight"]["mean"].shape == (7, 1)
    assert states[1]["state"]["0.weight"]["norms"]["last"].shape == (7,)
    ours.set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1])
    assert_same(steps(2, other, loaded), steps(2, model, optimizer))


@check(ranks=4)
def stages_take_their_part_of_what_rank_0_sends() -> None:
    """Two stages, each sharded over two ranks; rank 0 has the state of both."""
    model, optimizer = trained(lambda seed: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)))
    expected = whole(model, optimizer)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = dist.get_rank() // 2
    part = nn.Sequential()
    part.add_module(str(stage), fully_shard(nn.Linear(*((5, 7), (7, 5))[stage]), mesh=both["dp"]))
    loaded = Adam(part.parameters())
    given = ({}, {}) if dist.get_rank() else copy.deepcopy(expected)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for flat in (False, True):
        options.flatten_optimizer_state_dict = flat
        if flat and not dist.get_rank():
            how = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
            given = (given[0], ours.get_optimizer_state_dict(model, optimizer, options=how))
        result = ours.set_state_dict(
            part, loaded, model_state_dict=given[0], optim_state_dict=given[1], options=options
        )
        assert (result.missing_keys, len(result.unexpected_keys)) == ([], 2)
        found = whole(part, loaded)
        assert_same(found[0], {name: expected[0][name] for name in found[0]})
        assert_same(found[1]["state"], {name: expected[1]["state"][name] for name in found[0]})
        loaded = Adam(part.parameters())


# Torch's functions

FIELDS = ("full_state_dict", "cpu_offload", "ignore_frozen_params", "flatten_optimizer_state_dict")
SETTINGS = [dict(zip(FIELDS, on, strict=True)) for on in product((False, True), repeat=4)]


@check(make={"partly": partly})
@check(make={"FSDP2": by_parameter, "TP": tensor_parallel}, wide=True)
def states_are_torchs_with_every_option(make: Callable[[int], nn.Module]) -> None:
    for fields in SETTINGS:
        model, optimizer = trained(make)
        model.first.requires_grad_(False)
        found = ours.get_state_dict(model, optimizer, options=StateDictOptions(**fields))
        before = copy.deepcopy(found)
        expected = torchs.get_state_dict(model, optimizer, options=torchs.StateDictOptions(**fields))
        assert_same(found, expected)
        optimizer.state[model.p]["exp_avg"].add_(1)
        assert_same(found[1], before[1])
        if fields["cpu_offload"]:
            with torch.no_grad():
                model.p.add_(1)
            assert_same(found[0], before[0])  # on CPU `.cpu()` would be no copy


@check(make={"FSDP2": by_parameter, "TP": tensor_parallel, "partly": partly}, full=(False, True), wide="combinations")
def torchs_functions_load_ours_and_ours_torchs(make: Callable[[int], nn.Module], full: bool) -> None:
    pair = trained(make)
    expected = whole(*pair)
    for saver, loader in ((ours, torchs), (torchs, ours)):
        options = torchs.StateDictOptions(full_state_dict=full)
        states = copy.deepcopy(saver.get_state_dict(*pair, options=options))
        other = make(1)
        loaded = Adam(other.parameters())
        loader.set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1], options=options)
        found = whole(other, loaded)
        assert_same((found[0], found[1]["state"]), (expected[0], expected[1]["state"]))
        assert list(loaded.param_groups[0]["betas"]) == [0.9, 0.999]  # torch makes a list of them


BY_DCP = {name: make for name, make in (SHARED | OTHERS).items() if name != "TP"}
"""Models whose `tied` has the weight of `last`."""


@check(source={"flat and FSDP2": BY_DCP["flat and FSDP2"]})
@check(source={name: BY_DCP[name] for name in ("FSDP2", "partly", "plain")}, wide=True)
def dcp_saves_and_loads_any(source: Callable[[int], nn.Module]) -> None:
    model, optimizer = trained(source)
    expected = whole(model, optimizer)
    with shared_folder() as folder:
        states = ours.get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optim"), states, strict=True)), checkpoint_id=folder)
        for make in BY_DCP.values():
            other = make(1)
            loaded = Adam(other.parameters(), lr=0.5)
            state = dict(zip(("model", "optim"), ours.get_state_dict(other, loaded), strict=True))
            dcp.load(state, checkpoint_id=folder)
            ours.set_state_dict(other, loaded, model_state_dict=state["model"], optim_state_dict=state["optim"])
            found = whole(other, loaded)
            assert_same(found[0], expected[0])
            assert_same(found[1]["state"], expected[1]["state"])
            assert loaded.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
