"""Parameters under `fully_shard`: without elements, of another unit; their gradients, hooks and optimizers."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_torch import ours, whole
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from minifsdp import comm
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from minifsdp.fsdp2.hooks import state_of
from minifsdp.grad_scaler import ShardedGradScaler

check = Checks(__name__)


def rows(step: int = 0, rank: int | None = None) -> Tensor:
    """Another input on each rank."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def in_one_process(model: nn.Module, step: int = 0) -> None:
    """Add the mean gradient of all ranks' inputs."""
    ranks = dist.get_world_size()
    for rank in range(ranks):
        (model(rows(step, rank)).pow(2).sum() / ranks).backward()


# Without elements


class WithEmpty(nn.Module):
    """A layer, and a parameter that adds nothing where `uses` says so."""

    def __init__(self, shape: tuple[int, ...], uses: Any, layer: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8) if layer else nn.Identity()
        self.empty = nn.Parameter(torch.zeros(shape))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * 1
        return y + self.empty.sum() if self.uses(dist.get_rank()) else y


USES = {"all": lambda rank: True, "no": lambda rank: False, "one": lambda rank: rank == 1}


@check(shape={"no rows": (0, 3), "nothing": (0,), "no columns": (3, 0)}, used=USES, layer=(True, False))
def a_parameter_without_elements_trains_as_in_one_process(shape: tuple[int, ...], used: Any, layer: bool) -> None:
    """It has a gradient if any rank has used it."""
    for options in ({}, {"mp_policy": ours.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}):
        model, expected = WithEmpty(shape, used, layer), WithEmpty(shape, used, layer)
        expected.load_state_dict(model.state_dict())
        ours.fully_shard(model, **options)
        for step in range(2):
            x = rows(step).requires_grad_()
            model(x).float().pow(2).sum().backward()
        grad = model.empty.grad
        assert (grad is not None and grad.shape == shape) if any(map(used, range(dist.get_world_size()))) else not grad
        assert not layer or model.layer.weight.grad is not None


@check()
def columns_without_rows() -> None:
    """Of which `Shard(1)` is what each rank has a part of."""
    model = WithEmpty((0, 4), USES["all"])
    ours.fully_shard(model, shard_placement_fn=lambda p: Shard(1) if not p.numel() else None)
    expected = WithEmpty((0, 4), USES["all"])
    expected.load_state_dict({name: whole(p) for name, p in model.named_parameters()})
    model(rows()).pow(2).sum().backward()
    in_one_process(expected)
    assert torch.allclose(whole(model.layer.weight.grad), expected.layer.weight.grad)
    assert model.empty.grad.shape == (0, 4)


# One unit


class Two(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def meshes() -> dict[str, Any]:
    return {
        "none": lambda: {},
        "without a name": lambda: {"mesh": init_device_mesh("cpu", (2,))},
        "with a name": lambda: {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))},
        "of replicas": lambda: {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))},
    }


@check(mesh=meshes(), run=(False, True))
def what_a_unit_has_is_refused_to_another(mesh: Any, run: bool) -> None:
    """Also if it is unsharded at that moment."""
    base, kwargs = nn.Linear(8, 8), mesh()
    first, second = Two(base), Two(base)
    ours.fully_shard(first, **kwargs)
    if run:
        first(rows())
    for module in (base, second):
        name = "weight" if module is base else "base.weight"
        with pytest.raises(ValueError, match=rf"^{name} is base\.weight of .*Two.*, which was sharded before: "):
            ours.fully_shard(module, **kwargs)
    second.base = nn.Linear(8, 8)
    ours.fully_shard(second, **kwargs)
    (first(rows()) + second(rows())).sum().backward()
    assert all(p.grad is not None for p in (*first.parameters(), *second.parameters()))


@check()
def a_shard_that_is_tied_afterwards_is_refused() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    ours.fully_shard(first)
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"^weight is weight of Linear, which was sharded before"):
        ours.fully_shard(second)


@check()
def a_module_that_a_list_names_twice_is_sharded_once() -> None:
    layer, expected = nn.Linear(8, 8), nn.Linear(8, 8)
    expected.load_state_dict(layer.state_dict())
    ours.fully_shard([layer, layer])
    layer(rows()).pow(2).sum().backward()
    in_one_process(expected)
    assert torch.allclose(whole(layer.weight.grad), expected.weight.grad)


@check()
def a_sharded_module_in_two_models_is_named() -> None:
    base = ours.fully_shard(nn.Linear(8, 8))
    first, second = ours.fully_shard(Two(base)), ours.fully_shard(Two(base))
    first(rows()).sum().backward()
    with pytest.raises(RuntimeError, match="lazily initialized for FSDPLinear: it belongs to another model"):
        second(rows())


# An optimizer that steps


def optimizer_built(when: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, unsharded in part at the moment when the optimizer got its parameters."""
    torch.manual_seed(0)
    model = Two(nn.Linear(8, 8))
    plain = list(model.parameters())
    ours.fully_shard(model.base)
    ours.fully_shard(model)
    if when == "kept after backward":
        model.set_reshard_after_backward(False)
    if when == "unsharded by hand":
        model(rows()).sum().backward()
        model.unshard()
    elif when != "before wrapping":
        loss = model(rows()).sum()
        if when == "kept after backward":
            model.set_requires_gradient_sync(False)
            loss.backward()
            model.set_requires_gradient_sync(True)
    optimizer = torch.optim.AdamW(plain if when == "before wrapping" else model.parameters(), 0.1)
    model.zero_grad()
    return model, optimizer


@check(when=("after a forward", "unsharded by hand", "kept after backward"))
def an_optimizer_without_shards_is_refused(when: str) -> None:
    model, optimizer = optimizer_built(when)
    model(rows()).sum().backward()
    with pytest.raises(RuntimeError, match=r"^the optimizer was built while parameters were unsharded: it holds "):
        optimizer.step()
    model.base.reshard()
    model.reshard()
    right = torch.optim.AdamW(model.parameters(), 0.1)
    before = whole(model.head.weight)
    right.step()
    assert not torch.equal(whole(model.head.weight), before)


@check()
def an_optimizer_built_before_wrapping_is_refused() -> None:
    model, optimizer = optimizer_built("before wrapping")
    model(rows()).sum().backward()
    with pytest.raises(RuntimeError, match=r"^the optimizer was built before wrapping: it holds weight, bias"):
        optimizer.step()


@check(kept=(None, False))
def parameters_are_shards_between_micro_batches(kept: bool | None) -> None:
    """As many gathers as torch has: all units again in each forward, and in each backward those freed after forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer in model[1:]:
        ours.fully_shard(layer, reshard_after_forward=layer is not model[3] or kept)
    ours.fully_shard(model)
    gathers = []
    for micro in range(4):
        model.set_requires_gradient_sync(micro == 3)
        with comm.record() as log:
            model(rows(micro)).sum().backward()
        gathers.append(sum(call.op == "all_gather" for call in log))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        if not micro:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert gathers == [7 if kept is None else 6] * 4
    before = [whole(p) for p in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(whole(p), was) for p, was in zip(model.parameters(), before, strict=True))


# Gradients that have not been reduced


def accumulated(defer: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    """A model after one backward that is not reduced, or not over the replicas; and the one without sharding."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3, bias=False))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = ours.fully_shard(copy.deepcopy(reference), mesh=mesh, **options)
    getattr(model, defer)(False)
    model(rows()).pow(2).sum().backward()
    return model, torch.optim.SGD(model.parameters(), 0.1), reference


DEFERS = {"sync": "set_requires_gradient_sync", "all-reduce": "set_requires_all_reduce"}
PRECISIONS = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


@check(defer=DEFERS, to_none=(True, False), options=PRECISIONS)
def zero_grad_drops_what_was_not_reduced(defer: str, to_none: bool, options: dict[str, Any]) -> None:
    model, optimizer, reference = accumulated(defer, **options)
    optimizer.zero_grad(set_to_none=to_none)
    getattr(model, defer)(True)
    model(rows(1)).pow(2).sum().backward()
    in_one_process(reference, 1)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0.05, atol=0.05)


@check(defer=DEFERS)
def a_step_with_gradients_that_were_not_reduced_is_refused(defer: str) -> None:
    """On every rank, also on one that has none; not one of other parameters; and training goes on."""
    model, optimizer, reference = accumulated(defer)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    other.step()
    with pytest.raises(RuntimeError, match="without gradient sync have not been reduced"):
        optimizer.step()
    getattr(model, defer)(True)
    model(rows(1)).pow(2).sum().backward()
    for step in range(2):
        in_one_process(reference, step)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    optimizer.step()


@check(micros=(1, 2), to_none=(True, False))
def zero_grad_drops_reduced_and_unreduced_gradients(micros: int, to_none: bool) -> None:
    """A reduced mean, one that waits, and only some of the parameters zeroed."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3, bias=False))
    model = ours.fully_shard(copy.deepcopy(reference))
    model(rows()).pow(2).sum().backward()
    model.set_requires_gradient_sync(False)
    for _ in range(micros):
        model(rows()).pow(2).sum().backward()
    model[0].zero_grad(set_to_none=to_none)
    model.set_requires_gradient_sync(True)
    for step in (0,) * (micros + 1):
        in_one_process(reference, step)
    reference[0].zero_grad()
    model(rows(1)).pow(2).sum().backward()
    in_one_process(reference, 1)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


# Gradients while parameters are unsharded


def set_by_hand(model: Any, to: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = to(p.grad)


CHANGES = {
    "zero_grad": lambda m, o: m.zero_grad(),
    "zero_grad to zero": lambda m, o: m.zero_grad(set_to_none=False),
    "zero_grad of a layer": lambda m, o: m.head.zero_grad(),
    "zero_grad of the optimizer": lambda m, o: o.zero_grad(),
    "None": lambda m, o: set_by_hand(m, lambda grad: None),
    "half": lambda m, o: set_by_hand(m, lambda grad: grad / 2),
    "clipped": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
}


def all_rows(step: int) -> Tensor:
    return torch.cat([rows(step, rank) for rank in range(dist.get_world_size())])


def trained_with_changes(model: Any, x: Any, change: Any, when: str) -> list[Tensor | None]:
    """Parameters and gradients after three steps with inputs `x`, each with a change of the gradients so far."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if when == "in forward":
        model.base.register_forward_hook(lambda *_: (change(model, optimizer), None)[1])
    for step in range(3):
        loss = model(x(step)).float().pow(2).mean()
        if when == "before backward":
            change(model, optimizer)
        loss.backward()
        optimizer.step()
        if when == "by hand" and isinstance(model, ours.FSDPModule):
            model.unshard()
        if when in ("after backward", "by hand"):
            change(model, optimizer)
    for module in (model.base, model) if isinstance(model, ours.FSDPModule) else ():
        module.reshard()
    return [whole(t) for p in model.parameters() for t in (p, p.grad)]


WHEN = ("before backward", "in forward", "after backward", "by hand")
LOW_OR_ON_HOST = {name: PRECISIONS[name] for name in ("bf16", "offload")}
KEPT = {"kept": {"reshard_after_forward": False}}


@check(change=CHANGES, when=WHEN, options={"fp32": PRECISIONS["fp32"]})
@check(change=CHANGES, when=WHEN, options={**LOW_OR_ON_HOST, **KEPT}, wide=True)
def gradients_of_unsharded_parameters_are_those_of_their_shards(
    change: Any, when: str, options: dict[str, Any]
) -> None:
    """The user may read, change, replace and drop them: in a hook, before backward, and afterwards."""
    torch.manual_seed(0)
    reference = Two(nn.Linear(8, 8))
    model = copy.deepcopy(reference)
    ours.fully_shard(model.base, **options)
    ours.fully_shard(model, **options)
    model.set_reshard_after_backward(when != "after backward")
    expected = trained_with_changes(copy.deepcopy(reference), all_rows, change, when)
    found = trained_with_changes(model, rows, change, when)
    tolerance = 0.05 if "mp_policy" in options else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


READS = {
    "clip_grad_norm_": lambda params: ours.clip_grad_norm_(params, 1.0),
    "torch's": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "a norm": lambda params: params[0].grad.norm(),
    "full_tensor": lambda params: params[0].grad.full_tensor(),
    "a product": lambda params: params[0].grad.mul_(2),
    "a copy": lambda params: copy.deepcopy(params[0].grad),
    "a file": lambda params: pickle.dumps(params[0].grad),
    "a scaler": lambda params: scaler().unscale_(torch.optim.SGD(params, 0.1)),
}


def scaler() -> ShardedGradScaler:
    made = ShardedGradScaler(device="cpu")
    made.scale(torch.ones(()))
    return made


@check(read=READS, earlier=(False, True))
def gradients_that_were_not_reduced_are_not_read(read: Any, earlier: bool) -> None:
    """Also if those of an earlier backward were; `.grad` is there, and can be printed and dropped."""
    torch.manual_seed(0)
    model = ours.fully_shard(Two(nn.Linear(8, 8)))
    if earlier:
        model(rows()).sum().backward()
    model.set_requires_gradient_sync(False)
    model(rows()).sum().backward()
    params = list(model.parameters())
    assert "have not been reduced" in repr(params[0].grad)
    assert params[0].grad.shape == (8, 8)
    with pytest.raises(RuntimeError, match="without gradient sync have not been reduced: before clipping or step"):
        read(params)
    model.set_requires_gradient_sync(True)
    model(rows()).sum().backward()
    ours.clip_grad_norm_(params, 1.0)


@check()
def a_gradient_that_no_output_announces_is_added_to_the_earlier_one() -> None:
    """The parameter is in no forward; its shard's gradient is its own, until autograd has another."""
    torch.manual_seed(0)
    reference = WithEmpty((8,), USES["no"])
    model = ours.fully_shard(copy.deepcopy(reference))
    for module in (model, reference):
        for step in range(3):
            loss = module(all_rows(step)).pow(2).sum()
            if step == 1:
                module.zero_grad()
            ((module.empty - 1).pow(2).sum() + (loss if step < 2 else 0)).backward()
    model.reshard()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


@check()
def gradients_in_host_memory_can_be_dropped_and_zeroed() -> None:
    """Those of unsharded parameters on another device: a stand-in shows them."""
    model = ours.fully_shard(nn.Linear(4, 2))
    model(torch.ones(2, 4)).sum().backward()
    view = state_of(model).unit.view
    weight, bias = view._leaves = [nn.Parameter(torch.empty(p.shape, device="meta")) for p in view.shards]
    expected = whole(view.shards[0].grad)
    view.share_gradients()
    with pytest.raises(RuntimeError, match=r"is in host memory, with its shard: call reshard\(\) to use it"):
        weight.grad.norm()
    view.hide()
    assert torch.equal(whole(view.shards[0].grad), expected)
    view.share_gradients()
    weight.grad.zero_()
    bias.grad = None
    view.hide()
    assert not whole(view.shards[0].grad).any()
    assert view.shards[1].grad is None
    assert weight.grad is None


@check()
def clipping_of_unsharded_parameters_is_refused() -> None:
    """Before backward, and of a list from before it, or from before wrapping."""
    base = Two(nn.Linear(8, 8))
    lists = [list(base.parameters())]
    model = ours.fully_shard(base)
    loss = model(rows()).sum()
    lists.append(list(model.parameters()))
    for late in (False, True):
        if late:
            loss.backward()
        for params in lists:
            with pytest.raises(RuntimeError, match=r"^clip_grad_norm_ has parameters that were taken .*: base.weight"):
                ours.clip_grad_norm_(params, 1.0)
    assert ours.clip_grad_norm_(model.parameters(), 1.0)


def write(p: Tensor) -> None:
    with torch.no_grad():
        p.add_(1)


def other_memory(p: Tensor) -> None:
    p.data = torch.ones_like(p)


WRITES = {"in place": write, "nn.init": nn.init.ones_, "detached": lambda p: p.detach().zero_(), "data": other_memory}


def forward_and_backward(model: Any, write: Any, when: str) -> None:
    """A step, a write to an unsharded parameter, and what follows it."""
    if when == "in forward":
        model.base.register_forward_pre_hook(lambda *_: write(model.base.weight))
    loss = model(rows()).sum()
    if when == "before backward":
        write(model.head.weight)
    loss.backward()
    if when == "by hand":
        model.unshard()
    if when in ("by hand", "after backward"):
        write(model.head.weight)
    model.reshard()
    model(rows())


@check(write=WRITES, when=("before backward", "in forward", "by hand", "after backward"), precision=("fp32", "bf16"))
def writes_to_unsharded_parameters_are_refused(write: Any, when: str, precision: str) -> None:
    """They would be lost with the unsharded memory, and other memory would never be filled again; training goes on."""
    torch.manual_seed(0)
    model: Any = Two(nn.Linear(8, 8))
    ours.fully_shard(model.base, **PRECISIONS[precision])
    ours.fully_shard(model, **PRECISIONS[precision])
    expected = [whole(p) for p in model.parameters()]
    model.set_reshard_after_backward(when != "after backward")
    with pytest.raises(RuntimeError, match=r"while (they were )?unsharded, .*and the shards have not changed: write"):
        forward_and_backward(model, write, when)
    if when == "in forward":
        model.base._forward_pre_hooks.popitem()
    model.base.reshard()
    model.reshard()
    assert all(torch.equal(whole(p), was) for p, was in zip(model.parameters(), expected, strict=True))
    model.zero_grad()
    model(rows()).sum().backward()


@check(max_norm=(None, 1.0))
def an_embedding_that_writes_in_forward_is_refused(max_norm: float | None) -> None:
    for make in (ours.fully_shard, FullyShardedDataParallel):
        model = make(nn.Embedding(8, 4, max_norm=max_norm))
        with (
            contextlib.nullcontext() if max_norm is None else pytest.raises(RuntimeError, match="with max_norm writes")
        ):
            model(torch.arange(8)).sum().backward()


class OneOfTwo(nn.Module):
    """Each rank uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[dist.get_rank()](x)


@check()
def accumulated_gradients_of_one_rank() -> None:
    torch.manual_seed(0)
    model = ours.fully_shard(OneOfTwo())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.set_requires_gradient_sync(False)
    model(rows()).sum().backward()
    with pytest.raises(RuntimeError, match="have not been reduced"):
        optimizer.step()
    model.reduce_accumulated()
    model.set_requires_gradient_sync(True)
    model.reduce_accumulated()
    assert all(p.grad.full_tensor().any() for p in model.parameters())
    optimizer.step()


@check(kept=(True, False))
def an_own_update_counts_though_a_forward_has_gathered(kept: bool) -> None:
    """Without an optimizer, after a forward that no backward followed."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3, bias=False))
    model = ours.fully_shard(copy.deepcopy(reference), reshard_after_forward=not kept)
    mine, expected = list(model.parameters()), list(reference.parameters())
    model(rows()).pow(2).sum().backward()
    in_one_process(reference)
    model(rows())
    for p in (*mine, *expected):
        with torch.no_grad():
            p -= 0.1 * p.grad
    torch.testing.assert_close(model(rows()), reference(rows()))


@check()
def the_first_forward_may_be_in_inference_mode() -> None:
    model = ours.fully_shard(nn.Linear(8, 3))
    with torch.inference_mode():
        first = model(rows())
    output = model(rows())
    assert torch.equal(first, output)
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# Hooks


def hooked(when: str, meta: bool = False, **options: Any) -> tuple[nn.Module, dict[str, list[Any]], list[Any]]:
    """A model whose gradients are halved by hooks from before or after `fully_shard`; their calls and their handles."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(when == "after")
    called: dict[str, list[Any]] = {}
    handles = []

    def hook() -> None:
        for name, p in model.named_parameters():
            if p.requires_grad:
                calls = called.setdefault(name, [])
                handles.append(p.register_hook(lambda g, calls=calls: calls.append(g.clone()) or g / 2))
                accumulated = lambda p, calls=calls: calls.append(p.grad.clone())  # noqa: E731
                handles.append(p.register_post_accumulate_grad_hook(accumulated))

    if when == "before":
        hook()
    ours.fully_shard(model[1], **options)
    ours.fully_shard(model, **options)
    if when == "after":
        hook()
    if meta:
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
    return model, called, handles


KINDS: dict[str, Any] = {
    "plain": {},
    "offloaded": {"offload_policy": ours.CPUOffloadPolicy(pin_memory=False)},
    "freed": {"reshard_after_forward": True},
    "from meta": {"meta": True},
}


@check(when=("before", "after"), kind=KINDS, micros=(1, 3))
def hooks_get_reduced_gradients_once_a_reduction(when: str, kind: dict[str, Any], micros: int) -> None:
    model, called, handles = hooked(when, **kind)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    expected[2].weight = expected[0].weight
    expected.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    expected[1].bias.requires_grad_(model[1].bias.requires_grad)
    for micro in range(micros):
        model.set_requires_gradient_sync(micro == micros - 1)
        model(rows(micro)).pow(2).sum().backward()
        in_one_process(expected, micro)
    for name, p in expected.named_parameters():
        got = model.get_parameter(name).grad
        assert (got is None) == (p.grad is None)
        if got is not None:
            first, second = map(whole, called[name])
            assert torch.allclose(first, p.grad, rtol=1e-4), name
            assert torch.equal(second, first / 2), name
            assert torch.equal(whole(got), second)
    assert "1.bias" in called or when == "before"
    for handle in handles:
        handle.remove()
    model(rows()).sum().backward()
    assert all(len(calls) == 2 for calls in called.values())


@check()
def hooks_of_parameters_without_a_gradient_are_not_called() -> None:
    model = Two(nn.Linear(8, 8))
    ours.fully_shard(model)
    called = []
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: called.append(name))
    model.head.bias.requires_grad_(False)
    model.base.weight.requires_grad_(False)
    model.forward = lambda x: x @ model.head.weight
    model(rows()).sum().backward()
    assert called == ["head.weight"]


@check()
def a_hook_may_remove_itself_and_has_to_return_a_gradient() -> None:
    model = ours.fully_shard(nn.Linear(8, 8))
    called: list[Any] = []
    handles = [model.weight.register_hook(lambda g: (called.append(g), handles[0].remove())[0])]
    more = model.weight.register_post_accumulate_grad_hook(lambda p: (called.append(p), more.remove())[0])
    for step in range(2):
        model(rows(step)).sum().backward()
    assert len(called) == 2
    model.weight.register_hook(lambda g: g.full_tensor())
    with pytest.raises(
        RuntimeError, match=r"got a DTensor \(8, 8\) and returned a Tensor \(8, 8\): return one of the same"
    ):
        model(rows()).sum().backward()


def first_rows(gradient: Tensor) -> None:
    gradient[:2] = 0


DTENSOR_HOOKS = {
    "rows": first_rows,
    "rows by numbers": lambda g: g.index_put((torch.tensor([0, 2]),), torch.zeros(())),
    "a plain mask": lambda g: g * torch.ones(8, 1),
}


@check(hook=DTENSOR_HOOKS)
def what_a_hook_cannot_do_with_a_dtensor_has_a_name_and_a_cure(hook: Any) -> None:
    model = ours.fully_shard(nn.Linear(8, 8))
    model.weight.register_hook(hook)
    with pytest.raises(RuntimeError, match=r"a hook of register_hook on weight raised .*return g \* mask") as error:
        model(rows()).sum().backward()
    assert "\n" not in str(error.value)


@check()
def a_mask_that_is_a_dtensor_freezes_rows() -> None:
    model, alone = ours.fully_shard(nn.Linear(8, 8)), nn.Linear(8, 8)
    mask = torch.ones(8, 1).index_fill_(0, torch.tensor([0, 5]), 0)
    cut = distribute_tensor(mask, model.weight.device_mesh, model.weight.placements)
    model.weight.register_hook(lambda g: g * cut)
    for each in (model, alone):
        each(torch.eye(8)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), alone.weight.grad * mask)


@check(when=("before", "after"))
def an_optimizer_that_steps_in_backward_is_refused(when: str) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Linear(8, 8)
    if when == "after":
        ours.fully_shard(model)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match=r"^the optimizer of weight is to step in backward"):
        model(rows()) if when == "after" else ours.fully_shard(model)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
