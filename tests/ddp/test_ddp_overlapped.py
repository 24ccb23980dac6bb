"""Rung 3 of DDP: equal to torch and to one process, launched early, in one order on all ranks, in known bytes."""

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, pairwise
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp import comm, device
from minifsdp.ddp import OverlappedDDP
from minifsdp.ddp.bucketed import assign_buckets
from minifsdp.instruments.launch import launch
from minifsdp.instruments.watch.ledger import Ledger

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CAP_MB = 200 / 2**20  # MiB: several buckets even for these models


class Routed(nn.Module):
    """A layer, the experts that a forward is told to use, in that order and as often as they are named, and a head.

    The head's matrix is the first layer's; the experts are of two dtypes.
    """

    def __init__(self, experts: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        dtypes = [torch.float64 if index % 3 == 2 else torch.float32 for index in range(experts)]
        self.experts = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for dtype in dtypes)
        self.head = nn.Linear(5, 6)
        self.again = nn.Linear(6, 5)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        x = self.first(x).tanh()
        for index in route:
            expert = self.experts[index]
            x = x + expert(x.to(expert.weight.dtype)).tanh().to(x.dtype)
        return self.again(self.head(x))


class Refusal(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of backward")


class MayRefuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.refuses = nn.Linear(6, 9), nn.Linear(9, 6), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(x).tanh()
        return self.late(Refusal.apply(x) if self.refuses else x)


class Maybe(nn.Linear):
    """Uses its parameters if it is told to."""

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return super().forward(x) if use else x * 2


class Checkpointed(nn.Linear):
    """Each of two reentrant checkpoints makes a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True)
        return x


class OneOf(nn.Module):
    """Two layers of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index](x)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def routes(seed: int, steps: int, ranks: int) -> list[list[list[int]]]:
    """For each step and rank the experts in use: none, some, some of them twice."""
    chance = random.Random(seed)
    return [[chance.choices(range(5), k=chance.randrange(6)) for _ in range(ranks)] for _ in range(steps)]


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def assert_same(ours: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(gradients(ours), gradients(other), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@contextmanager
def calls_seen() -> Iterator[list[tuple[str, int]]]:
    """Each issue and wait inside the `with`, by a watcher of `comm`, with its payload in bytes."""
    events: list[tuple[str, int]] = []

    @contextmanager
    def watch(call: comm.Call, phase: str) -> Iterator[None]:
        events.append((phase, call.payload))
        yield

    comm.observers.append(watch)
    try:
        yield events
    finally:
        comm.observers.remove(watch)


# Equal to torch and to one process


def compare_with_torch_and_one_process(seed: int) -> list[list[tuple[str, int]]]:
    """Steps of one to three backwards, all but the last under no_sync, each rank on routes of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    whole = Routed()
    torch.manual_seed(seed + rank)  # rank 0's values must win
    model = Routed()
    torchs = nn.parallel.DistributedDataParallel(
        copy.deepcopy(model), bucket_cap_mb=CAP_MB, find_unused_parameters=True
    )
    ours = OverlappedDDP(model, bucket_cap_mb=CAP_MB)
    log = []
    for step, backwards in enumerate((1, 3, 2)):
        for each in (ours, torchs, whole):
            each.zero_grad()
        ways = routes(10 * seed + step, backwards, world)
        for index, way in enumerate(ways):
            last = index == backwards - 1
            for ddp in (ours, torchs):
                with calls_seen() as events, nullcontext() if last else ddp.no_sync():
                    ddp(rows(index, rank), way[rank]).square().mean().backward()
                if ddp is ours:
                    log.append(events)
                    assert last or not events
            (sum(whole(rows(index, r), way[r]).square().mean() for r in range(world)) / world).backward()
        assert_same(ours, torchs)
        assert_same(ours, whole)
    return log


def compare_on_several_routes() -> list[list[list[tuple[str, int]]]]:
    return [compare_with_torch_and_one_process(seed) for seed in range(3)]


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 3, 4))])
def test_random_routes_equal_torch_and_one_process_in_one_order_of_buckets(world: int) -> None:
    sizes = [sum(p.nbytes for p in bucket) for bucket in assign_buckets(Routed().parameters(), 200)]
    assert len(set(sizes)) > 2, "equal buckets would not show an order"
    for log in chain.from_iterable(launch(compare_on_several_routes, world)):
        assert any(log)
        for events in filter(None, log):
            assert [size for phase, size in events if phase == "issue"] == sizes
            assert [size for phase, size in events if phase == "wait"] == sizes


def two_forwards_and_two_losses() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = OverlappedDDP(Routed(), bucket_cap_mb=CAP_MB)
    whole = copy.deepcopy(ddp.module)
    pairs = [[whole(rows(s, r), [s]).square().mean() for s in (0, 1)] for r in range(world)]
    (sum(map(sum, pairs)) / world).backward()
    first, second = (ddp(rows(s, rank), [s]).square().mean() for s in (0, 1))
    (first + second).backward()  # one backward over two forwards
    assert_same(ddp, whole)
    ddp.zero_grad()
    for loss in [ddp(rows(s, rank), [s]).square().mean() for s in (0, 1)]:
        loss.backward()  # two, after both forwards
    assert_same(ddp, whole)


def each_bucket_once_in_a_backward_over_two_forwards() -> int:
    """The second forward's layer has been reduced when backward comes to the outputs of the first."""
    ddp = OverlappedDDP(OneOf(), bucket_cap_mb=100 / 2**20)
    loss = sum(ddp(rows(0, 0), index).square().mean() for index in (0, 1))
    with calls_seen() as events:
        loss.backward()
    assert [phase for phase, _ in events] == ["issue", "issue", "wait", "wait"]
    return len(ddp.buckets)


def test_a_model_called_twice() -> None:
    launch(two_forwards_and_two_losses, 2)
    assert launch(each_bucket_once_in_a_backward_over_two_forwards, 2) == [2, 2]


# During backward


def steps_of_backward() -> tuple[list[str], list[int]]:
    """`g`: a gradient has been made, `i` a reduction issued, `w` waited for, `|` backward has returned."""
    widths = (6, 11, 5, 3, 7)
    ddp = OverlappedDDP(nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)]), bucket_cap_mb=CAP_MB)
    events: list[str] = []

    @contextmanager
    def watch(call: comm.Call, phase: str) -> Iterator[None]:
        events.append(phase[0])
        yield

    loss = ddp(rows(0, dist.get_rank())).square().mean()
    for p in ddp.parameters():
        p.register_hook(lambda grad: events.append("g"))  # before it is accumulated, and so before its launch
    comm.observers.append(watch)
    loss.backward()
    comm.observers.remove(watch)
    return [*events, "|"], [len(params) for params in ddp.buckets]


def test_each_bucket_leaves_with_its_last_gradient_and_all_are_waited_for_at_the_end() -> None:
    for events, sizes in launch(steps_of_backward, 2):
        assert len(sizes) > 1
        assert "".join(events) == "".join("g" * size + "i" for size in sizes) + "w" * len(sizes) + "|"


# Unused parameters


def what_is_not_used() -> None:
    """One that no rank uses is zero; one that this rank used under `no_sync` only keeps its part in the mean."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = OverlappedDDP(Routed(), bucket_cap_mb=CAP_MB)
    whole = copy.deepcopy(ddp.module)
    with ddp.no_sync():
        ddp(rows(0, rank), [rank]).square().mean().backward()
    ddp(rows(1, rank), [3]).square().mean().backward()
    losses = [whole(rows(s, r), [e]).square().mean() for r in range(world) for s, e in ((0, r), (1, 3))]
    (sum(losses) / world).backward()
    assert_same(ddp, whole)
    assert whole.experts[4].weight.grad is None
    assert (ddp.module.experts[4].weight.grad == 0).all()


def test_an_unused_parameter_takes_part_with_what_it_has() -> None:
    launch(what_is_not_used, 3)


def a_rank_that_uses_none() -> None:
    """Its outputs have a backward, which reaches no parameter."""
    rank, world = dist.get_rank(), dist.get_world_size()

    ddp = OverlappedDDP(Maybe(6, 6))
    whole = copy.deepcopy(ddp.module)
    ddp(rows(0, rank).requires_grad_(), rank == 0).square().mean().backward()
    (whole(rows(0, 0)).square().mean() / world).backward()
    assert_same(ddp, whole)


def test_a_rank_that_uses_none() -> None:
    launch(a_rank_that_uses_none, 2)


# Backwards that do not end as planned


def after_a_backward_that_raised() -> dict[str, int]:
    """It raised when the last bucket had left and the first had not; then no_sync, then a step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    with Ledger() as ledger:
        ddp = OverlappedDDP(MayRefuse(), bucket_cap_mb=CAP_MB)
        whole = copy.deepcopy(ddp.module)
        ddp.module.refuses = True
        with calls_seen() as events, pytest.raises(ArithmeticError):
            ddp(rows(0, rank)).square().mean().backward()
        assert [phase for phase, _ in events] == ["issue"]
        ddp.module.refuses = False
        ddp.zero_grad()
        with calls_seen() as events, ddp.no_sync():
            ddp(rows(1, rank)).square().mean().backward()
        assert [phase for phase, _ in events] == ["wait"], "what has left is waited for, nothing new leaves"
        ddp(rows(2, rank)).square().mean().backward()
        losses = [whole(rows(s, r)).square().mean() for s in (1, 2) for r in range(2)]
        (sum(losses) / 2).backward()
        assert_same(ddp, whole)
        return dict(ledger.live())


def test_a_backward_that_raised_does_not_poison_the_next() -> None:
    for live in launch(after_a_backward_that_raised, 2):
        assert live["communication"] == 0


def a_second_gradient() -> None:
    ddp = OverlappedDDP(Checkpointed(6, 6))
    with pytest.raises(RuntimeError, match=r"parameter \[6\] got a second gradient|parameter \[6, 6\] got a second"):
        ddp(rows(0, 0).requires_grad_()).square().mean().backward()
    ddp = OverlappedDDP(nn.Linear(6, 6))  # and where the backward inside backward is of the whole model
    x = rows(0, 0).requires_grad_()
    with pytest.raises(RuntimeError, match=r"got a second gradient"):
        (checkpoint(ddp, x, use_reentrant=True) + ddp(x)).square().mean().backward()


def test_a_second_gradient_in_one_backward_is_an_error() -> None:
    launch(a_second_gradient, 2)


# Bytes


def bytes_of_a_step() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Ledger() as ledger:
        ddp = OverlappedDDP(MayRefuse(), bucket_cap_mb=CAP_MB)
        ledger.watch(ddp)
        psi = sum(p.nbytes for p in ddp.parameters())
        found["built"] = ledger.live()["communication"]
        loss = ddp(rows(0, dist.get_rank())).square().mean()
        found["after forward"] = ledger.live()["communication"]
        staged: list[int] = []

        @contextmanager
        def watch(call: comm.Call, phase: str) -> Iterator[None]:
            staged.append(ledger.live()["communication"])
            yield

        comm.observers.append(watch)
        loss.backward()
        comm.observers.remove(watch)
        found["staged"] = staged
        found["after backward"] = ledger.live()["communication"]
        found["gradients"] = ledger.live()["gradients"] == psi
    found["buckets"] = [sum(p.nbytes for p in params) for params in ddp.buckets]
    return found


def test_all_buckets_are_staged_at_the_end_of_backward_and_none_after_it() -> None:
    for found in launch(bytes_of_a_step, 2):
        first, second = found.pop("buckets")
        assert found == {
            "built": 0,
            "after forward": 0,
            "staged": [first, first + second, first + second, second],  # at two issues, then two waits
            "after backward": 0,
            "gradients": True,
        }


def test_no_buffer_outlives_its_use() -> None:
    """Roles of all that the lesson allocates in a step: staging, and nothing else."""

    def roles() -> list[str]:
        ddp = OverlappedDDP(MayRefuse(), bucket_cap_mb=CAP_MB)
        seen: list[str] = []
        device.buffer_observers.append(lambda buffer, role: seen.append(role))
        ddp(rows(0, 0)).square().mean().backward()
        device.buffer_observers.pop()
        return seen

    assert launch(roles, 2) == [["communication"] * 2] * 2
