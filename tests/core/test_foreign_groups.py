"""Process groups that torch does not make itself: threads of a test suite, backends that users have registered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from minifsdp import DistributedDataParallel, Zero1Optimizer, Zero2Optimizer
from minifsdp.checkpoint import StateDictOptions, get_state_dict
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp import ShardingStrategy

check = Checks(__name__)

RANKS = 2
STEPS = 3


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def rows(rank: int) -> Tensor:
    """One rank's rows of each step [STEPS, 5, 4]."""
    return torch.randn(STEPS, 5, 4, generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, optim: Optimizer, x: Tensor) -> None:
    for batch in x:
        optim.zero_grad()
        model(batch).square().mean().backward()
        optim.step()


def alone() -> dict[str, Tensor]:
    """What one process has after the rows of all ranks."""
    model = plain()
    train(model, AdamW(model.parameters(), lr=0.1), torch.cat([rows(rank) for rank in range(RANKS)], dim=1))
    return model.state_dict()


def adam(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, AdamW(model.parameters(), lr=0.1)


def sharded(model: nn.Module, **options: Any) -> tuple[nn.Module, Optimizer]:
    return adam(Fsdp(model, auto_wrap_policy={nn.Linear}, **options))


CLASSES: dict[str, Callable[[nn.Module], tuple[nn.Module, Optimizer]]] = {
    "FSDP": sharded,
    "FSDP, original": lambda model: sharded(model, use_orig_params=True),
    "NO_SHARD": lambda model: sharded(model, sharding_strategy=ShardingStrategy.NO_SHARD),
    "DDP": lambda model: adam(DistributedDataParallel(model)),
    "ZeRO-1": lambda model: (model, Zero1Optimizer(model.parameters(), AdamW, lr=0.1)),
    "ZeRO-2": lambda model: (model, Zero2Optimizer(model.parameters(), AdamW, lr=0.1)),
}


def trained(make: Callable[[nn.Module], tuple[nn.Module, Optimizer]], model: nn.Module) -> dict[str, Tensor]:
    model, optim = make(model)
    train(model, optim, rows(dist.get_rank()))
    if isinstance(optim, AdamW):
        state, _ = get_state_dict(model, optim, options=StateDictOptions(full_state_dict=True))
        return state
    return model.state_dict()


# Ranks that are threads


@contextmanager
def isolated_threads() -> Iterator[None]:
    """What torch.testing._internal.common_distributed.MultiThreadedTestCase sets up."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def on_threads(fn: Callable[[int], Any]) -> list[Any]:
    """What `fn` returns on each rank; the first error, if one raises."""
    results: list[Any] = [None] * RANKS
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            results[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    with isolated_threads():
        ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
    for error in results:
        if isinstance(error, BaseException):
            raise error
    return results


@pytest.mark.parametrize("kind", CLASSES)
def test_threads_train_as_one_process(kind: str) -> None:
    models = [plain() for _ in range(RANKS)]
    for state in on_threads(lambda rank: trained(CLASSES[kind], models[rank])):
        torch.testing.assert_close(state, alone())


# Backends that users register


def registered(name: str, make: Callable[..., Any], devices: list[str] | None) -> dist.ProcessGroup:
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, make, devices=devices)
    return dist.new_group(backend=name)


def gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def in_python(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """It lists no device, and hands its collectives to the default group."""

    class InPython(dist.ProcessGroup):  # made on the rank: torch 2.11's classes cannot be derived from by cloudpickle
        def __getattribute__(self, name: str) -> Any:
            is_collective = name.lstrip("_").startswith(("all", "reduce", "broadcast"))
            return getattr(dist.group.WORLD, name) if is_collective else super().__getattribute__(name)

    return InPython(rank, size)


BACKENDS = {"its own": gloo, "in Python": in_python}


@check(backend=list(BACKENDS), devices={"listed": ["cpu"], "unlisted": None}, kind=["FSDP", "DDP"])
def a_registered_backend_carries_all(backend: str, devices: list[str] | None, kind: str) -> None:
    name = f"{backend} {'listed' if devices else 'unlisted'}".replace(" ", "_").lower()
    group = registered(name, BACKENDS[backend], devices)
    wrap: Any = {"FSDP": Fsdp, "DDP": DistributedDataParallel}[kind]
    state = trained(lambda model: adam(wrap(model, process_group=group)), plain())
    torch.testing.assert_close(state, alone())


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
