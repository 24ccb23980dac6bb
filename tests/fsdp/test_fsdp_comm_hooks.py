"""`register_comm_hook`: as torch's, with torch's hooks and ours; the reduction is an argument of a unit."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFsdp
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from minifsdp import comm
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp.fsdp.torch_api import comm_hooks
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Layer(nn.Linear): ...


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), Layer(7, 7), Layer(7, 7), nn.Linear(7, 1))


def ours(strategy: str, **options: Any) -> Any:
    return Fsdp(net(), None, ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy({Layer}), **options)


def torchs(strategy: str) -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as Policy

    cpu = torch.device("cpu")
    return TorchFsdp(net(), None, TorchStrategy[strategy], auto_wrap_policy=Policy({Layer}), device_id=cpu)


def step(model: Any, batch: int = 0) -> None:
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * batch + dist.get_rank()))
    model(rows).square().sum().backward()


def gradients(model: Any) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


class Counting:
    """A hook that scales: what a compressing or gossiping one would do is no concern of the unit."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, state: Any, gradient: Tensor, result: Tensor | None = None) -> None:
        self.calls.append((gradient.numel(), *([] if result is None else [result.numel()])))
        if result is None:
            dist.all_reduce(gradient)
            gradient.mul_(state)
        else:
            comm.reduce_scatter(result, gradient, comm.world()).wait()
            result.mul_(state)


@check(strategy=STRATEGIES)
def a_hook_reduces_as_in_torch(strategy: str) -> None:
    mine, theirs = Counting(), Counting()
    model, expected = ours(strategy), torchs(strategy)
    model.register_comm_hook(0.25, mine)
    expected.register_comm_hook(0.25, theirs)
    for batch in range(2):
        step(model, batch)
        step(expected, batch)
        if strategy == "NO_SHARD" and batch == 0:  # torch's hook gets what has accumulated, and reduces it again
            model.zero_grad()
            expected.zero_grad()
    assert mine.calls == theirs.calls
    assert len(mine.calls) == 6
    for p, q in zip(gradients(model), gradients(expected), strict=True):
        torch.testing.assert_close(p, q)


@check(strategy=STRATEGIES, name=("fp16_compress_hook", "bf16_compress_hook", "default"))
def our_hooks_are_torchs(strategy: str, name: str) -> None:
    found = []
    for make, hooks in ((ours, comm_hooks), (torchs, torchs_hooks), (ours, torchs_hooks)):
        model: Any = make(strategy)
        default = "allreduce_hook" if strategy == "NO_SHARD" else "reduce_scatter_hook"
        state = hooks.LowPrecisionState(dist.group.WORLD)  # type: ignore[attr-defined]
        model.register_comm_hook(state, getattr(hooks, default if name == "default" else name))
        with patch.object(Tensor, "record_stream", lambda *_: None):  # torch's ask for a CPU stream, and die of it
            step(model)
        found.append(gradients(model))
    for p, q, r in zip(*found, strict=True):
        assert p.dtype == q.dtype == torch.float32
        assert torch.equal(p, q)
        assert torch.equal(p, r)


@check(strategy=STRATEGIES, orig=(False, True))
def a_hook_that_compresses_leaves_no_memory_behind(strategy: str, orig: bool) -> None:
    """It has replaced the tensors that it was given by others: the unit frees its own."""
    with Ledger() as ledger:
        model = ours(strategy, use_orig_params=orig)
        step(model)
        plain = ledger.mark("without")
        model.zero_grad()
        model.register_comm_hook(comm_hooks.LowPrecisionState(comm.world()), comm_hooks.bf16_compress_hook)
        for batch in range(3):
            model.zero_grad()
            step(model, batch)
        hooked = ledger.mark("with")
    assert plain["unsharded"] == hooked["unsharded"] == 0
    assert hooked["gradients"] <= plain["gradients"]
    assert sum(hooked.values()) <= sum(plain.values())


@check(strategy=STRATEGIES)
def half_the_bytes_go_out(strategy: str) -> None:
    payloads = []
    for hook in (None, comm_hooks.fp16_compress_hook):
        model = ours(strategy)
        if hook is not None:
            model.register_comm_hook(comm_hooks.LowPrecisionState(comm.world()), hook)
        with comm.record() as calls:
            step(model)
        payloads.append(sum(call.payload for call in calls if call.op in ("reduce_scatter", "all_reduce")))
    assert payloads[0] == 2 * payloads[1] > 0


@check()
def a_hook_is_given_reduce_dtype_and_its_result_is_cast_back() -> None:
    seen: list[torch.dtype] = []

    def hook(state: None, gradient: Tensor, result: Tensor) -> None:
        seen.append(gradient.dtype)
        comm.reduce_scatter(result, gradient, comm.world(), comm.MEAN).wait()

    low = MixedPrecision(torch.bfloat16, torch.float32)
    model, expected = ours("FULL_SHARD", mixed_precision=low), ours("FULL_SHARD", mixed_precision=low)
    model.register_comm_hook(None, hook)
    step(model)
    step(expected)
    assert set(seen) == {torch.float32}
    for p, q in zip(gradients(model), gradients(expected), strict=True):
        assert torch.equal(p, q)


@check()
def refusals_are_torchs() -> None:
    inner = ours("FULL_SHARD")
    step(inner)
    with pytest.raises(AssertionError, match=r"^register_comm_hook can only be called on a root instance\.$"):
        inner.module[1].register_comm_hook(None, print)
    with pytest.raises(ValueError, match=r"^The communication hook must be callable but got 3$"):
        inner.register_comm_hook(None, 3)
    inner.register_comm_hook(None, print)
    with pytest.raises(AssertionError, match=r"^A communication hook is already registered$"):
        inner.register_comm_hook(None, print)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    hybrid = Fsdp(net(), (alone, comm.world()), ShardingStrategy.HYBRID_SHARD)
    text = r"^Communication hook is not supported for hybrid strategies: ShardingStrategy.HYBRID_SHARD$"
    if dist.get_world_size() > 1 and hybrid.sharding_strategy is ShardingStrategy.HYBRID_SHARD:
        with pytest.raises(AssertionError, match=text):
            hybrid.register_comm_hook(None, print)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
