"""Optimizers that need whole tensors: recognized by what they do, and refused where their tensors are not whole."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks, mesh_of
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial, Replicate

from minifsdp import DistributedDataParallel, Zero1Optimizer, Zero2Optimizer
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp import RateLimitedSchedule, ShardingStrategy
from minifsdp.fsdp.shard import shard
from minifsdp.fsdp2 import fully_shard
from minifsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from minifsdp.whole_tensors import ELEMENTWISE, NEEDS, try_out

check = Checks(__name__)


class Own(optim.Optimizer):
    """A user's own optimizer, by the update of one parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p), alpha=-group["lr"])

    def update(self, p: Tensor) -> Tensor:
        raise NotImplementedError


class Sign(Own):
    def update(self, p: Tensor) -> Tensor:
        return p.grad.sign()  # type: ignore[union-attr]


class Lars(Own):
    def update(self, p: Tensor) -> Tensor:
        return p.grad * (p.norm() / p.grad.norm())  # type: ignore[operator, union-attr]


class LarsOfMatrices(Lars):
    def update(self, p: Tensor) -> Tensor:
        return super().update(p) if p.ndim > 1 else p.grad  # type: ignore[return-value]


class Lamb(Own):
    def update(self, p: Tensor) -> Tensor:
        update = p.grad / (p.grad.abs() + 1e-6)  # type: ignore[operator, union-attr]
        return update * (p.norm() / update.norm())


class Shampoo(Own):
    def update(self, p: Tensor) -> Tensor:
        g: Any = p.grad if p.ndim == 2 else p.grad[:, None]  # type: ignore[index]
        return (torch.linalg.inv(g @ g.T + torch.eye(len(g), dtype=g.dtype)) @ g).view_as(p)


class Centred(Own):
    def update(self, p: Tensor) -> Tensor:
        return p.grad - p.grad.mean(-1, keepdim=True)  # type: ignore[operator, union-attr]


class ByShape(Own):
    def update(self, p: Tensor) -> Tensor:
        return p.grad + (0.1 * p if p.ndim > 1 else 0)  # type: ignore[operator]


class Clipping(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class MyAdam(optim.Adam):
    pass


class MyLbfgs(optim.LBFGS):
    pass


class Noisy(Own):
    def update(self, p: Tensor) -> Tensor:
        return p.grad + torch.randn_like(p)  # type: ignore[operator]


class Exchanging(Own):
    """As a lesson on whole matrices would write it: it asks the other ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(g.square().sum() for g in gradients) + torch.zeros(())
        dist.all_reduce(total)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / total.sqrt())


class OtherArguments(Lars):
    def __init__(self, params: Any, width: int, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.params, self.width = [*params], width


class OtherSign(Sign):
    def __init__(self, params: Any, width: int, lr: float = 0.1) -> None:
        super().__init__(params, lr)


class OwnState(Own):
    """Allocates in the default dtype."""

    def update(self, p: Tensor) -> Tensor:
        g: Any = p.grad
        if g.ndim == 2:
            factor = self.state[p].setdefault("factor", torch.eye(len(g)))
            factor.add_(g @ g.T)
            return torch.linalg.solve(factor, g)
        return g  # type: ignore[no-any-return]


class OwnSign(Sign):
    def update(self, p: Tensor) -> Tensor:
        g: Any = p.grad
        return torch.dot(torch.ones(1), g.flatten()[:1]) * 0 + g.sign()  # type: ignore[no-any-return]


class Idle(Own):
    def update(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)


class NeedsAModel(Lars):
    """Cannot be tried: it keeps a table of its own parameters."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        params = [*params]
        super().__init__(params)
        self.sizes = {p.numel() for p in params}

    def update(self, p: Tensor) -> Tensor:
        if p.numel() not in self.sizes:
            raise LookupError("no such parameter")
        return super().update(p)


ALONE = [*ELEMENTWISE, Sign, MyAdam, OwnSign]
TOGETHER = [Lars, LarsOfMatrices, Lamb, Shampoo, Centred, ByShape, Clipping, MyLbfgs, optim.Adafactor, OwnState]
UNKNOWN = {Noisy: "random", Idle: "change nothing", OtherArguments: "width", Exchanging: ""}


@check(ranks=2)
def optimizers_are_told_apart_by_what_they_do() -> None:
    before = torch.get_rng_state()
    found = {kind: try_out(kind, {"lr": 0.0}) for kind in (*ALONE, *TOGETHER, *UNKNOWN)}
    assert {kind for kind, finding in found.items() if finding.alone} == {*ALONE}
    assert {kind for kind, finding in found.items() if finding.alone is None} == UNKNOWN.keys()
    for kind, text in UNKNOWN.items():
        assert text in found[kind].doubt
        assert bool(text) == bool(found[kind].doubt)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_with_arguments_of_its_own_is_copied() -> None:
    p = nn.Parameter(torch.ones(5))
    for kind, alone in ((OtherArguments, False), (OtherSign, True)):
        live = kind([p], 3)
        live.register_step_post_hook(print)
        live.state[p]["steps"] = torch.tensor(7)
        torch.optim.lr_scheduler.StepLR(live, 1)
        assert try_out(kind, {"lr": 0.1}, live).alone is alone
        assert live.param_groups[0]["params"] == [p]
        assert live.state == {p: {"steps": torch.tensor(7)}}
        assert torch.equal(p, torch.ones(5))


def test_every_optimizer_of_torch_is_in_one_list() -> None:
    kinds = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert kinds - {optim.Optimizer} == ELEMENTWISE | NEEDS.keys()
    assert not ELEMENTWISE & NEEDS.keys()


# On ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def by_hand(model: nn.Module) -> list[nn.Parameter]:
    return shard(model, lambda module: isinstance(module, nn.Linear), dist.group.WORLD, RateLimitedSchedule)  # type: ignore[arg-type]


def fsdp(**options: Any) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    def wrapped(model: nn.Module) -> tuple[nn.Module, Any]:
        model = Fsdp(model, auto_wrap_policy={nn.Linear}, **options)
        return model, [*model.parameters()]

    return wrapped


FLAT: dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]] = {
    "flat": fsdp(),
    "original": fsdp(use_orig_params=True),
    "replicated, flat": fsdp(sharding_strategy=ShardingStrategy.NO_SHARD),
    "by hand": lambda model: (model, by_hand(model)),
}


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().sum()
        loss.backward()
        return loss

    closure()
    optimizer.step(*[closure] if isinstance(optimizer, optim.LBFGS) else [])


@check(ranks=2, kind=(optim.LBFGS, optim.Adafactor, Lars, Shampoo, Clipping, OwnState), shards=list(FLAT))
def flat_shards_are_refused_before_anything_changes(kind: Any, shards: str) -> None:
    model, params = FLAT[shards](net())
    optimizer = kind(params, lr=0.1)
    before = [p.detach().clone() for p in params]
    if shards == "replicated, flat" and issubclass(kind, optim.LBFGS):
        step(model, optimizer)  # it has all elements, and needs no shapes
        return
    with pytest.raises(ValueError, match=f"{kind.__name__} .*flat shards of parameters: take an optimizer .* AdamW"):
        step(model, optimizer)
    assert all(map(torch.equal, before, params))
    optimizer.zero_grad()
    step(model, optim.AdamW(params))


@check(ranks=2)
def an_optimizer_that_cannot_be_tried_is_named_once() -> None:
    model, params = fsdp(use_orig_params=True)(net())
    optimizer = NeedsAModel(params, model)
    with pytest.warns(UserWarning, match=r"NeedsAModel has flat shards .*\(a trial of it raised LookupError: no such"):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)


@check(ranks=2, kind=(optim.Adam, MyAdam, Sign, Noisy, Exchanging))
def other_optimizers_step(kind: Any) -> None:
    model, params = fsdp(use_orig_params=True)(net())
    before = [p.detach().clone() for p in params]
    step(model, kind(params, lr=0.1))
    assert not all(map(torch.equal, before, params))


@check(ranks=2, kind=(optim.Adafactor, Lamb, Shampoo))
def parameters_with_their_shapes_are_right(kind: Any) -> None:
    alone, ddp = net(), DistributedDataParallel(net())
    replicated, params = fsdp(sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)(net())
    for model in (ddp, replicated):
        step(model, kind(model.parameters(), lr=0.1))
    for p in alone.parameters():
        p.grad = torch.zeros_like(p)
    for rank in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        (alone(x).square().sum() / 2).backward()
    kind(alone.parameters(), lr=0.1).step()
    for p, one, other in zip(alone.parameters(), ddp.parameters(), params, strict=True):
        torch.testing.assert_close(one, p)
        torch.testing.assert_close(other, p)


@check(ranks=2, stage=(Zero1Optimizer, Zero2Optimizer))
def zero_refuses_the_same(stage: Any) -> None:
    for kind in (optim.LBFGS, optim.Adafactor, optim.SparseAdam, optim.Muon, Lars, Shampoo, OwnState):
        with pytest.raises(ValueError, match=f"{kind.__name__} .*but ZeRO gives it flat shards"):
            stage(net().parameters(), kind, lr=0.1)
    stage(net().parameters(), MyAdam, lr=0.1)


def rows(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, mesh_of((3,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def columns(model: nn.Module) -> nn.Module:
    return parallelize_module(model, mesh_of((4,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


@check(ranks=3, sharded={"rows": rows, "tensor parallel": tensor_parallel})
def dtensors_are_refused_where_torch_cannot(sharded: Any) -> None:
    for kind, text in (
        (optim.Adafactor, "Adafactor cannot step .*no DTensor operators"),
        (optim.Rprop, "Rprop cannot step .*no DTensor operators"),
        (optim.LBFGS, r"LBFGS cannot step .*sharded unevenly \(8 over 3 ranks\)"),
        (optim.Muon, r"Muon cannot step .*nothing of its matrix \[2, 8\] \(2 over 3 ranks\)"),
    ):
        model = net()
        model[2] = nn.Linear(8, 2 if kind is optim.Muon and sharded is rows else 4)
        model = sharded(model)
        params = [p for p in model.parameters() if p.ndim == 2 or kind is not optim.Muon]
        if kind is optim.Muon and sharded is tensor_parallel:
            continue
        with pytest.raises(ValueError, match=text):
            step(model, kind(params, lr=0.1))


class Scaled(Own):
    """Scales gradients by a number that it takes from them, from its third step on."""

    def __init__(self, params: Any, number: Callable[[Any], Any]) -> None:
        super().__init__(params)
        self.number, self.steps = number, 0

    def update(self, p: Tensor) -> Tensor:
        self.steps += 1
        return p.grad * self.number(p.grad) if self.steps > 4 else torch.zeros_like(p)  # type: ignore[operator]


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda g: g.norm().item(),
    "float": lambda g: float(torch.linalg.vector_norm(g)),
    "int": lambda g: int(g.count_nonzero()),
    "bool": lambda g: 1 if g.sum() else 2,
    "math": lambda g: math.sqrt(g.square().sum()),
    "maximum": lambda g: g.abs().max().item(),
    "alpha": lambda g: torch.zeros_like(g).add(g, alpha=g.norm()),
    "foreach": lambda g: sum(norm.item() for norm in torch._foreach_norm([g])),
    "foreach, alpha": lambda g: torch._foreach_add([g], g.norm())[0],
    "on the host": lambda g: g.detach().norm().cpu().item(),
}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "full tensor": lambda g: whole(g.norm()).item(),
    "quotient": lambda g: (g.norm() / g.abs().sum()).item(),
    "comparison": lambda g: 1 if g.norm() > 1e9 else 2,
    "DTensor": lambda g: g.norm(),
    "part that is meant": lambda g: 0 * float(g.to_local().norm() if isinstance(g, DTensor) else g.norm()),
}


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def hybrid(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh_of((2, 2), "replicate", "shard"))


def weights(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.ndim == 2]


@check(
    ranks=4,
    wide="combinations",
    name=[*READS, *WHOLE],
    sharded={"rows": rows, "hybrid": hybrid, "tensor parallel": columns},
)
def an_optimizer_that_reads_a_part_is_refused(name: str, sharded: Any) -> None:
    """Of a number that is pending, in any of its steps; a number that is whole, it can read."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    model, alone = sharded(net()), net()
    optimizers = [Scaled(weights(each), (READS | WHOLE)[name]) for each in (model, alone)]
    for step in range(3):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            refused = pytest.raises(
                ValueError, match=r"^a method or hook of Scaled reads a number .* only this rank's part: write p\."
            )
            with refused if step == 2 and name in READS and each is model else contextlib.nullcontext():
                optimizer.step()
    if name in WHOLE:
        for p, q in zip(weights(model), weights(alone), strict=True):
            torch.testing.assert_close(whole(p), q)
    assert isinstance(weights(model)[0].grad.norm().item(), float)  # outside of optimizers, as in torch


@check(ranks=4)
def pending_gradients_are_parts_and_replicated_ones_are_not() -> None:
    mesh = mesh_of((4,))
    columns(net())
    for placement in (Partial(), Replicate()):
        p = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
        p.grad = DTensor.from_local(torch.ones(2, 2), mesh, [placement])
        optimizer = Scaled([p], lambda g: g.sum().item())
        optimizer.steps = 4
        with pytest.raises(ValueError, match="of Scaled reads") if placement == Partial() else contextlib.nullcontext():
            optimizer.step()


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
