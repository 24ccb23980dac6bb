"""Ranks that take different paths end, with both orders by name, where without the check they hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import comm
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from minifsdp.instruments.launch import RankError, launch
from minifsdp.order import Order, order_of
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy
Fsdp = FullyShardedDataParallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1)) -> Tensor:
        for i in order:
            x = self.blocks[i](x)
        return self.head(x)


def wrapped(strategy: ShardingStrategy = FULL_SHARD, **options: Any) -> Fsdp:
    torch.manual_seed(0)
    return Fsdp(Net(), None, strategy, auto_wrap_policy={Block}, **options)


def step(model: nn.Module, order: tuple[int, ...] = (0, 1)) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x, order).sum().backward()


@pytest.fixture
def detail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug level as a user sets it."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")


@pytest.fixture
def impatient(detail: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out for those who wait for it."""
    monkeypatch.setenv("MINIFSDP_ORDER_TIMEOUT", "2")


class Impatient:
    """A store whose time-outs are over at once: a file's waits for a second at least."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def wait(self, keys: list[str], timeout: Any) -> None:
        if not self.store.check(keys):
            raise RuntimeError("wait timeout")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def rank_1_is_silent_from_here() -> None:
    """On both ranks. What rank 0 waits for afterwards never comes, so it need not wait by the clock."""
    order = order_of(comm.world())
    assert order.timeout == 2, "as the environment says"
    dist.barrier()
    if dist.get_rank() == 0:
        order.store = Impatient(order.store)


def failures(fn: Callable[..., Any], ranks: int = 2, *args: Any) -> tuple[str, dict[int, str]]:
    with pytest.raises(RankError) as error:
        launch(fn, ranks, *args, timeout=30)
    return str(error.value), error.value.failures


# All is well


def gradients(strategy: ShardingStrategy, **options: Any) -> list[Tensor]:
    model = wrapped(strategy, **options)
    step(model, (1, 0))
    with model.no_sync():
        step(model, (1,))
    step(model)
    model.state_dict()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def all_kinds() -> list[Tensor]:
    precision = MixedPrecision(torch.bfloat16)
    return [
        *gradients(FULL_SHARD, use_orig_params=True),
        *gradients(SHARD_GRAD_OP, mixed_precision=precision, cpu_offload=CPUOffload(True)),
        *gradients(NO_SHARD),
    ]


def test_it_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = launch(all_kinds, 2)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for checked, plain in zip(launch(all_kinds, 2), expected, strict=True):
        assert len(checked) == len(plain) > 6
        assert all(torch.equal(a, b) for a, b in zip(checked, plain, strict=True))


@contextmanager
def announcements() -> Iterator[list[str]]:
    """The collectives that ranks compare inside the `with`."""
    said: list[str] = []
    announce = Order.announce
    with patch.object(Order, "announce", lambda self, what: (said.append(what), announce(self, what))):
        yield said


def keys_after_steps() -> tuple[list[int], int]:
    model, counts = wrapped(), []
    store: Any = order_of(comm.world()).store
    with announcements() as said:
        for _ in range(4):
            step(model)
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
    return counts, len(said)


@pytest.mark.usefixtures("detail")
@pytest.mark.behaviour(32)
def test_the_store_does_not_grow() -> None:
    for counts, compared in launch(keys_after_steps, 2):
        assert len(set(counts[1:])) == 1, counts
        assert compared == 4 * 8  # three units: five gathers, three reductions


class Choice(nn.Module):
    """Two experts, of which a rank's data may use one, both or none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor, used: int) -> Tensor:
        return x + sum((expert(x) for expert in self.experts[:used]), torch.zeros_like(x))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Choice(), Choice()

    def forward(self, x: Tensor, used: tuple[int, int]) -> Tensor:
        return self.second(self.first(x, used[0]), used[1])


def trained_on_different_experts(strategy: ShardingStrategy) -> list[str]:
    model = Fsdp(Pair(), None, strategy, auto_wrap_policy={Choice})
    with announcements() as said:
        for used in ((2, 2), (2, 1 + dist.get_rank()), (2 * dist.get_rank(), 1), (2, 2 * dist.get_rank())):
            model(torch.ones(2, 5, requires_grad=True), used).sum().backward()
    return said


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.behaviour(32)
def test_ranks_that_use_different_parameters_of_a_unit_are_no_mismatch(strategy: ShardingStrategy) -> None:
    """As in torch, as long as all of them run it."""
    first, second = launch(trained_on_different_experts, 2, strategy)
    assert first == second != []


def two_lives() -> None:
    for life in range(2):
        order = Order(comm.world(), timeout=5)
        for i in range(3):
            order.announce(f"number {i} of life {life}")


@pytest.mark.usefixtures("detail")
def test_a_store_that_outlasts_its_process_group_does_not_mislead() -> None:
    """What the ranks wrote last is still there when the next group begins to count."""
    launch(two_lives, 2)


def watchers_of_a_step() -> list[Any]:
    step(wrapped())
    return comm.observers


def test_it_is_there_only_on_request() -> None:
    assert launch(watchers_of_a_step, 2)[0] == []


# A rank takes another path


def other_path_in_the_third_step(strategy: ShardingStrategy) -> None:
    model = wrapped(strategy, limit_all_gathers=False)  # whose forward gathers what it uses, when it does
    for turn in range(4):
        step(model, (1, 0) if dist.get_rank() == 1 and turn == 2 else (0, 1))


@pytest.mark.usefixtures("detail")
@pytest.mark.behaviour(32)
def test_another_path_ends_all_ranks_with_both_orders() -> None:
    headline, tracebacks = failures(other_path_in_the_third_step, 2, FULL_SHARD)
    assert "Detected mismatch between collectives on ranks" in headline
    assert "rank 0: all-gather of blocks.0 (Block), 30 x float32, unit 1 of the group; rank 1: all-gather" in headline
    assert set(tracebacks) == {0, 1}
    for text in tracebacks.values():  # the same on all: what they did alike, and what they are about to do
        before = r"reduce-scatter of blocks\.0 \(Block\) \| .*all-gather of root \(Net\) \| "
        assert re.search(rf"  rank 0: .*{before}all-gather of blocks\.0 \(Block\)", text)
        assert re.search(rf"  rank 1: .*{before}all-gather of blocks\.1 \(Block\)", text)
        assert "look for a condition on the rank or its data" in text


def backwards_of_one_rank() -> None:
    model = wrapped(NO_SHARD)
    step(model)
    step(model, (0,) if dist.get_rank() else (0, 1))


@pytest.mark.usefixtures("detail")
def test_reductions_are_compared_too() -> None:
    headline, _ = failures(backwards_of_one_rank)
    assert "rank 0: all-reduce of blocks.1 (Block), 30 x float32, unit 2 of the group; rank 1: all-reduce" in headline


def one_of_two_models(make: Callable[[nn.Module], nn.Module]) -> None:
    """Two models of one name and size, and a rank whose loss depends on one of them."""
    models = [make(nn.Linear(3, 3)) for _ in range(2)]
    first, second = (model(torch.ones(2, 3)).square().sum() for model in models)
    (first if dist.get_rank() else first + second).backward()
    dist.barrier()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("make", "first"), [(Fsdp, "reduce-scatter of root (Linear)"), (DistributedDataParallel, "all-reduce of bucket 0")]
)
def test_models_of_one_name_are_told_apart(make: Callable[[nn.Module], nn.Module], first: str) -> None:
    headline, _ = failures(one_of_two_models, 2, make)
    said = re.escape(first) + r".*, 12 x float32, (unit|model)"
    assert re.search(rf"rank 0: {said} 2 of the group; rank 1: {said} 1 of the group", headline)


def one_of_two_optimizers(stage: type[Zero1Optimizer] | type[Zero2Optimizer]) -> None:
    """Two models, each with its optimizer, and a rank whose loss reaches one of them."""
    first, second = (nn.Linear(3, 3) for _ in range(2))
    optimizers = [stage(model.parameters(), torch.optim.SGD, lr=0.1) for model in (first, second)]
    x = first(torch.ones(2, 3))
    (x if dist.get_rank() else second(x)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.usefixtures("impatient")
def test_a_backward_that_does_not_reach_an_optimizer_of_stage_2_ends_in_words() -> None:
    launch(one_of_two_optimizers, 2, Zero1Optimizer)  # which takes the gradients in its step
    headline, _ = failures(one_of_two_optimizers, 2, Zero2Optimizer)
    said = "reduce-scatter of ZeRO's bucket"
    assert f"rank 0: {said} 2 (2 parameters), 12 x float32; rank 1: {said} 1 (2 parameters), 12 x float32" in headline


# A rank issues nothing


def run_out_of_batches(make: Callable[[], nn.Module]) -> str:
    model = make()
    for batch in range(2 if dist.get_rank() else 3):
        step(model)
        if batch == 1:
            rank_1_is_silent_from_here()
    return "ended"


@pytest.mark.usefixtures("impatient")
@pytest.mark.behaviour(32)
def test_uneven_batches_end_in_words() -> None:
    headline, tracebacks = failures(run_out_of_batches, 2, wrapped)
    assert headline.startswith("rank 0 failed: RuntimeError: Detected mismatch between collectives on ranks.")
    assert "rank 0: all-gather of root (Net), 18 x float32, unit 3 of the group; rank 1: nothing in 2 s." in headline
    assert "Has rank 1 run out of batches" in tracebacks[0]
    assert "MINIFSDP_ORDER_TIMEOUT=seconds waits longer" in tracebacks[0]


def saved_on_rank_0_only() -> None:
    model = wrapped()
    step(model)
    rank_1_is_silent_from_here()
    if dist.get_rank() == 0:
        model.state_dict()


@pytest.mark.usefixtures("impatient")
def test_a_state_dict_on_one_rank_only_ends_in_words() -> None:
    headline, _ = failures(saved_on_rank_0_only)
    assert re.search(r"rank 0: all-gather of .*; rank 1: nothing in 2 s", headline)


def clipped_on_rank_0_only() -> None:
    model = wrapped()
    step(model)
    if dist.get_rank() == 0:
        model.clip_grad_norm_(1.0)
    step(model)


@pytest.mark.usefixtures("detail")
def test_clipping_on_one_rank_only_ends_in_words() -> None:
    headline, _ = failures(clipped_on_rank_0_only)
    assert "rank 0: all-reduce of the gradients' norm (clip_grad_norm_), 1 x float32; rank 1: all-gather of" in headline


def late() -> str:
    model, rank = wrapped(), dist.get_rank()
    step(model)
    order = order_of(comm.world())
    dist.barrier()
    if rank == 0:
        order.timeout = 0.01  # of a store that is not impatient
        with pytest.raises(RuntimeError, match=r"rank 1: nothing in 0\.01 s"):
            step(model)
        order.store.set("rank 0 has given up", "")
        return "told"
    order.store.wait(["rank 0 has given up"])
    with pytest.raises(RuntimeError, match=r"rank 1: nothing in 0\.01 s"):
        step(model)
    return "told"


@pytest.mark.usefixtures("impatient")
def test_who_comes_when_the_others_have_given_up_hears_of_it() -> None:
    assert launch(late, 2, timeout=30) == ["told", "told"]


# Hybrid sharding: two kinds of group


def hybrid(ends: str) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = wrapped(HYBRID_SHARD, device_mesh=mesh, limit_all_gathers=False)
    for turn in range(3):
        step(model, (1, 0) if ends == "path" and dist.get_rank() == 2 and turn == 1 else (0, 1))
    return [order_of(mesh.get_group(dim)).issued for dim in (0, 1)]


@pytest.mark.usefixtures("detail")
@pytest.mark.behaviour(32)
def test_hybrid_sharding_is_checked_inside_and_across() -> None:
    across, inside = launch(hybrid, 4, "well", timeout=60)[0]
    assert across == 3 * 3  # an all-reduce for each unit
    assert inside == 3 * (5 + 3)
    headline, _ = failures(hybrid, 4, "path")
    assert "rank 2: all-gather of blocks.1 (Block), 30 x float32, unit 2 of the group; rank 3: all-gather" in headline


# DDP


def ddp_gradients(**options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0, **options)
    for _ in range(3):
        step(model)
    with model.join():
        for _ in range(1 + dist.get_rank()):
            step(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def ddp_of_all_kinds() -> tuple[list[Tensor], int]:
    found = [*ddp_gradients(), *ddp_gradients(find_unused_parameters=True), *ddp_gradients(static_graph=True)]
    return found, order_of(comm.world()).issued


def test_ddp_announces_every_bucket_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = launch(ddp_of_all_kinds, 2)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for (checked, announced), (plain, _) in zip(launch(ddp_of_all_kinds, 2), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(checked, plain, strict=True))
        assert len(plain) == 3 * 6
        buckets = 3 * 5 * 6  # ways, steps of the rank that has most, buckets of one parameter each
        assert announced == buckets + 5  # one way asks in each step which parameters have been used


def ddp() -> nn.Module:
    return DistributedDataParallel(Net())


@pytest.mark.usefixtures("impatient")
@pytest.mark.behaviour(32)
def test_uneven_batches_of_ddp_end_in_words() -> None:
    headline, _ = failures(run_out_of_batches, 2, ddp)
    assert "rank 0: all-reduce of bucket 0 (head.bias to blocks.0.linear.weight), 78 x float32" in headline
    assert "rank 1: nothing in 2 s." in headline


def second_backward_on_one_rank() -> None:
    model = DistributedDataParallel(Net())
    for _ in range(2):
        loss = model(torch.ones(4, 5)).sum()
        for _ in range(2 - dist.get_rank()):
            loss.backward(retain_graph=True)


@pytest.mark.usefixtures("impatient")
@pytest.mark.behaviour(32)
def test_a_backward_that_one_rank_repeats_is_told_from_the_next() -> None:
    headline, failed = failures(second_backward_on_one_rank)
    assert "rank 0: all-reduce of bucket 0 (head.bias to blocks.0.linear.weight) again, in a further" in headline
    assert "rank 1: all-reduce of bucket 0 (head.bias to blocks.0.linear.weight), 78 x float32" in headline
    assert failed.keys() == {0, 1}


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import torch.distributed as dist
from test_order_check import other_path_in_the_third_step, FULL_SHARD
dist.init_process_group("gloo")
other_path_in_the_third_step(FULL_SHARD)
"""


@pytest.mark.slow
def test_beside_torchs_own_checks_under_torchrun(tmp_path: Path) -> None:
    """There torch has read the debug level itself, and wraps the group in checks of its own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "rank 1: all-gather of blocks.1 (Block)" in done.stderr
