"""Where torch's FSDP1 refuses, crashes or is silently wrong on CPU (2.13), and ours is not: seven traps, a test each.

The reference is one process.
"""

from __future__ import annotations

import inspect
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn

from minifsdp.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
)
from minifsdp.grad_scaler import ShardedGradScaler

check = Checks(__name__)

WIDTH = 5
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy
STRATEGIES = FULL_SHARD, SHARD_GRAD_OP, NO_SHARD
Fsdp = FullyShardedDataParallel


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def wrapped(seed: int = 0, **options: Any) -> Any:
    return Fsdp(plain(seed), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)


def batches(steps: int) -> Tensor:
    """[steps, ranks, rows, width]"""
    return torch.randn(steps, 2, 3, WIDTH, generator=torch.Generator().manual_seed(7))


def one_process(x: Tensor, model: nn.Module) -> Tensor:
    """The loss over all ranks' rows."""
    return torch.stack([(model(rows) - 1).square().sum() for rows in x]).mean()


def this_rank(x: Tensor, model: nn.Module) -> Tensor:
    return (model(x[dist.get_rank()]) - 1).square().sum()


def train(model: nn.Module, loss: Any, optimizer: Any, micro_batches: int = 1, set_to_none: bool = True) -> None:
    for x in batches(3 * micro_batches).split(micro_batches):
        for micro_batch in x:
            loss(micro_batch, model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=lambda text, name=name: f"{name}: {text}")


def trained_by_one_process(micro_batches: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=0.1)
    train(model, one_process, optimizer, micro_batches)
    return model, optimizer


@check(behaviour=1)
def trap_1_no_device_id() -> None:
    """torch looks for an accelerator to compute on, and refuses to construct if there is none."""
    model = wrapped()
    assert model.compute_device == torch.device("cpu")
    assert inspect.signature(Fsdp.__init__).parameters["device_id"].default is None
    assert_same(model.state_dict(), plain().state_dict())


@check(behaviour=11)
def trap_2_sync_module_states() -> None:
    """torch refuses: it would broadcast from an accelerator's memory only."""
    assert_same(wrapped(seed=dist.get_rank(), sync_module_states=True).state_dict(), plain(0).state_dict())


@check(behaviour=44)
def trap_3_cpu_offload() -> None:
    """torch crashes: it pins the host's memory, for which it needs an accelerator."""
    expected, _ = trained_by_one_process()
    for strategy, orig in product(STRATEGIES, (False, True)):
        model = wrapped(sharding_strategy=strategy, use_orig_params=orig, cpu_offload=CPUOffload(True))
        train(model, this_rank, torch.optim.AdamW(model.parameters(), 0.01, eps=0.1))
        assert_same(model.state_dict(), expected.state_dict())


@check(behaviour=39)
def trap_4_full_state_dict_offloaded_to_cpu() -> None:
    """torch crashes: on CPU its copy is none, and the memory is freed with the unit's."""
    for strategy, orig, rank0_only in product(STRATEGIES, (False, True), (False, True)):
        model = wrapped(sharding_strategy=strategy, use_orig_params=orig)
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        with Fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
        assert_same(state, plain().state_dict() if dist.get_rank() == 0 or not rank0_only else {})
        this_rank(batches(1)[0], model).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        if state:
            assert_same(state, plain().state_dict())  # copies: what comes later does not change them


@check(behaviour=42)
def trap_5_optim_state_dict_of_original_parameters() -> None:
    """torch returns exp_avg for exp_avg_sq, and says nothing."""
    expected, optimizer = trained_by_one_process()
    for strategy, orig in product(STRATEGIES, (False, True)):
        model = wrapped(sharding_strategy=strategy, use_orig_params=orig)
        ours = torch.optim.AdamW(model.parameters(), 0.01, eps=0.1)
        train(model, this_rank, ours)
        state = Fsdp.optim_state_dict(model, ours)["state"]
        for name, p in expected.named_parameters():
            assert not torch.equal(state[name]["exp_avg"], state[name]["exp_avg_sq"])
            assert_same(state[name], optimizer.state[p])


@check(behaviour=37)
def trap_6_sharded_grad_scaler() -> None:
    """torch warns that there is no CUDA, and scales nothing from there on."""
    for orig, offload in product((False, True), (False, True)):
        model = wrapped(use_orig_params=orig, cpu_offload=CPUOffload(offload))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler = ShardedGradScaler(init_scale=8.0)
        assert scaler.is_enabled()
        scaler.scale(this_rank(batches(1)[0], model)).backward()
        if dist.get_rank() == 0:
            next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert_same(model.state_dict(), plain().state_dict())


@check(behaviour=(26, 44))
def trap_7_accumulation_with_offload_and_original_parameters() -> None:
    """torch adds a stale gradient under FULL_SHARD."""
    for micro_batches in (2, 3):
        expected, _ = trained_by_one_process(micro_batches)
        for strategy, set_to_none in product(STRATEGIES, (False, True)):
            model = wrapped(sharding_strategy=strategy, use_orig_params=True, cpu_offload=CPUOffload(True))
            optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=0.1)
            train(model, this_rank, optimizer, micro_batches, set_to_none)
            assert_same(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_ours_is_right_where_torch_is_wrong_on_cpu(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
