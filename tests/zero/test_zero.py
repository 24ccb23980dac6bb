"""ZeRO-1 and ZeRO-2: the training of a plain optimizer, with 1 / N of the state, in the promised bytes and calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from minifsdp import comm, device
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments.launch import launch
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer
from minifsdp.zero.bucket import Bucket

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STAGES = [Zero1Optimizer, Zero2Optimizer]
BATCH = 12  # divisible by 1, 2, 3, 4
CAP = 200 / 2**20  # MiB: a bucket of about 200 bytes, so that the small model has several


class Net(nn.Module):
    """Odd sizes, a scalar, an empty, a frozen and an unused parameter; float64, so that equality can be strict."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in [(5, 7), (7, 7), (7, 3), (3, 11), (11, 1)])
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(3, 3)
        self.layers[2].bias.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x * self.scale


class Ordered(Net):
    """Uses its layers in another order than that of their definition, so gradients come out of bucket order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in order).double()
        self.unused.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 2))
        for index in self.order:
            x = F.gelu(self.layers[index](x))
        return (x * self.scale).mean(1, keepdim=True)


def plain(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as usual: the two groups' gradients arrive interleaved."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "lr": 3e-2, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


class Case(NamedTuple):
    optimizer_class: type[torch.optim.Optimizer]
    defaults: dict[str, Any]
    groups: Callable[[nn.Module], list[dict[str, Any]]] = plain
    scheduled: bool = False


CASES = {
    "adamw": Case(AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": Case(AdamW, {"lr": 1e-2, "amsgrad": True}, two_groups),
    "sgd": Case(SGD, {"lr": 1e-2}),
    "momentum": Case(SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, two_groups, scheduled=True),
    "adagrad": Case(Adagrad, {"lr": 1e-2}, scheduled=True),
}


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=numbers, dtype=torch.float64)  # noqa: E731
    return [(draw(BATCH, 5), draw(BATCH, 1)) for _ in range(steps)]


def loss_on_rank(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss on this rank's part of the batch; the mean over the ranks is the loss on the whole."""
    x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    return F.mse_loss(model(x), y)


def schedule(optimizer: torch.optim.Optimizer, case: Case) -> LambdaLR | None:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step)) if case.scheduled else None


def train_plain(
    case: Case, steps: int, model: nn.Module | None = None, state: Any = None, skip: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What one process with a torch optimizer makes of the whole batches."""
    model = model or Net()
    optimizer = case.optimizer_class(case.groups(model), **case.defaults)
    if state is not None:
        optimizer.load_state_dict(state)
    scheduler = schedule(optimizer, case)
    for x, y in batches(steps)[skip:]:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return model, optimizer


def make(stage: Any, model: nn.Module, case: Case = CASES["adamw"]) -> Any:
    return stage(case.groups(model), case.optimizer_class, bucket_cap_mb=CAP, **case.defaults)


def train_sharded(
    stage: Any, case: Case, steps: int, model: nn.Module | None = None, state: Any = None, skip: int = 0
) -> tuple[nn.Module, Any]:
    model = model or Net()
    optimizer = make(stage, model, case)
    if state is not None:
        optimizer.load_state_dict(state)
    scheduler = schedule(optimizer, case)
    for batch in batches(steps)[skip:]:
        loss_on_rank(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return model, optimizer


def assert_same(ours: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


# --- equal to a plain optimizer, 1 / N of the state -------------------------------------------------------------------


class Quiet(TorchDispatchMode):
    """Sees every operation and changes none, as a byte counter does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def state_bytes(optimizer: Any) -> int:
    """Bytes of state that the optimizer keeps per element; scalars such as step counts come on top."""
    values = [value for state in optimizer.inner.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim() > 0)


def unused_by(model: Any) -> set[Tensor]:
    return {*model.unused.parameters(), model.nothing}


def elements_with_state(bucket: Bucket, has_state: set[Tensor], unused: set[Tensor]) -> int:
    """In this rank's shard; of a bucket with unused parameters the padding has none."""
    elements = torch.cat([torch.full((p.numel(),), p in has_state) for p in bucket.params])
    padding = torch.full((bucket.padded - len(elements),), unused.isdisjoint(bucket.params))
    return int(torch.cat([elements, padding]).chunk(dist.get_world_size())[dist.get_rank()].sum())


def check_equality() -> None:
    ranks = dist.get_world_size()
    for name, case in CASES.items():
        reference, _ = train_plain(case, 3)
        for stage in STAGES:
            model, optimizer = train_sharded(stage, case, 3, Net(seed=dist.get_rank()))
            assert_same(model, reference)
            assert len(optimizer.buckets) > 4
            assert all(bucket.padded % ranks == 0 for bucket in optimizer.buckets)
            # Adagrad's is there from the start, that of others begins with the first gradient.
            has_state = set(model.parameters()) - (set() if name == "adagrad" else unused_by(model))
            elements = sum(elements_with_state(b, has_state, unused_by(model)) for b in optimizer.buckets)
            per_element = {"adamw": 2, "amsgrad": 3, "sgd": 0, "momentum": 1, "adagrad": 1}[name]
            assert state_bytes(optimizer) == per_element * 8 * elements


def check_equality_under_a_dispatch_mode() -> None:
    reference, _ = train_plain(CASES["adamw"], 3)
    for stage in STAGES:
        with Quiet():
            model, _ = train_sharded(stage, CASES["adamw"], 3)
        assert_same(model, reference)


# --- memory and traffic -----------------------------------------------------------------------------------------------


class Buffers:
    """Watches every buffer that `device.empty` hands out: what is alive, and the high water at each allocation."""

    def __init__(self) -> None:
        self.all: list[tuple[Tensor, str]] = []
        self.peak = 0

    def __call__(self, buffer: Tensor, role: str) -> None:
        self.all.append((buffer, role))
        self.peak = max(self.peak, sum(b.untyped_storage().nbytes() for b, _ in self.all))

    def alive(self, role: str) -> list[Tensor]:
        return [b for b, kind in self.all if kind == role and b.untyped_storage().nbytes()]


@contextmanager
def watch_buffers() -> Iterator[Buffers]:
    buffers = Buffers()
    device.buffer_observers.append(buffers)
    try:
        yield buffers
    finally:
        device.buffer_observers.remove(buffers)


@contextmanager
def count_collectives() -> Iterator[list[tuple[str, int]]]:
    """(function, bytes of its largest tensor) of every call of a collective in torch.distributed."""
    calls: list[tuple[str, int]] = []

    def count(name: str) -> AbstractContextManager[Any]:
        real = getattr(dist, name)

        def call(*tensors: Any, **kwargs: Any) -> Any:
            calls.append((name, max(t.nbytes for t in tensors if isinstance(t, Tensor))))
            return real(*tensors, **kwargs)

        return mock.patch.object(dist, name, call)

    with ExitStack() as stack:
        native = (comm._ALL_GATHER, comm._REDUCE_SCATTER, "all_reduce", "all_gather", "reduce")
        for name in (*native, "broadcast", "isend", "irecv"):
            stack.enter_context(count(name))
        yield calls


def bucket_bytes(optimizer: Any) -> list[int]:
    return [bucket.flat.nbytes for bucket in optimizer.buckets]


def received(size: int) -> int:
    """Bytes beside a bucket while it is reduced: on gloo a rank receives the others' parts, and sums them."""
    return size - size // dist.get_world_size()


def check_memory_and_traffic() -> None:
    ranks = dist.get_world_size()
    for stage in STAGES:
        model = Net()
        optimizer = make(stage, model)
        used = [p for p in model.parameters() if p.requires_grad and p not in unused_by(model)]
        sizes = bucket_bytes(optimizer)
        shards = [sum(sizes[: b + 1]) // ranks for b in range(len(sizes))]
        reducing = [size + received(size) for size in sizes]
        for batch in batches(3):
            with watch_buffers() as buffers, count_collectives() as calls:
                loss_on_rank(model, batch).backward()
                unreduced = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
                optimizer.step()
            # Each bucket is reduce-scattered and all-gathered once, on gloo part by part (gloo.py): the bytes of one
            # all-reduce, padding included. What has a gradient takes 4 bytes per parameter.
            others = Counter(isend=ranks - 1, irecv=ranks - 1, broadcast=ranks)
            expected = Counter((name, size // ranks) for size in sizes for name in others.elements())
            if ranks == 1:
                expected.update((comm._REDUCE_SCATTER, size) for size in sizes)
            expected.update([("all_reduce", 4 * sum(len(bucket.params) for bucket in optimizer.buckets))])
            assert Counter(calls) == expected
            assert not buffers.alive("communication")
            if stage is Zero1Optimizer:
                assert buffers.peak == max(shards[b] + reducing[b] for b in range(len(sizes)))
                assert not buffers.alive("gradients")
                assert [p for p in model.parameters() if p.grad is not None] == list(unreduced) == used
                assert all(torch.equal(p.grad, g) for p, g in unreduced.items())
            else:
                assert buffers.peak == max(
                    shards[b] + reducing[b] + sum(sizes[b + 1 : b + 2]) for b in range(len(sizes))
                )
                assert sum(b.nbytes for b in buffers.alive("gradients")) == shards[-1]
                assert not unreduced
            optimizer.zero_grad()
            assert all(bucket.shard.grad is None for bucket in optimizer.buckets)


def check_parameter_memory() -> None:
    """The model's parameters, the buckets and the shards are one and the same memory."""
    model = Net()
    optimizer = make(Zero1Optimizer, model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    storages = {p.untyped_storage()._cdata for p in trainable if p.numel()}
    assert storages == {bucket.flat.untyped_storage()._cdata for bucket in optimizer.buckets}
    assert storages == {bucket.shard.untyped_storage()._cdata for bucket in optimizer.buckets}
    assert sum(bucket.padded - sum(p.numel() for p in bucket.params) for bucket in optimizer.buckets) < (
        len(optimizer.buckets) * dist.get_world_size()
    )


def check_all() -> None:
    check_equality()
    check_equality_under_a_dispatch_mode()
    check_parameter_memory()
    check_memory_and_traffic()


@pytest.mark.parametrize("ranks", [1, 2, *(pytest.param(n, marks=pytest.mark.wide) for n in (3, 4))])
def test_plain_training_in_one_nth_of_the_state_and_exactly_the_promised_bytes(ranks: int) -> None:
    launch(check_all, ranks)


# --- stage 2's backward -----------------------------------------------------------------------------------------------


@contextmanager
def watch_buckets() -> Iterator[list[Tensor]]:
    """The flat buffers of whole buckets' gradients, as they are allocated; never more than two may be alive."""
    flats: list[Tensor] = []
    real = Bucket.new_gradients

    def new_gradients(bucket: Bucket, role: Any) -> Tensor:
        assert len([flat for flat in flats if flat.untyped_storage().nbytes()]) <= 1
        flats.append(real(bucket, role))
        return flats[-1]

    with mock.patch.object(Bucket, "new_gradients", new_gradients):
        yield flats


@contextmanager
def watch_reductions() -> Iterator[list[str]]:
    """ "issue" and "wait" of every reduce-scatter, in order."""
    log: list[str] = []

    def watch(call: comm.Call, phase: str) -> AbstractContextManager[Any]:
        if call.op == "reduce_scatter":
            log.append(phase)
        return nullcontext()

    comm.observers.append(watch)
    try:
        yield log
    finally:
        comm.observers.remove(watch)


def check_backward_of_stage2() -> None:
    ranks = dist.get_world_size()
    orders = [[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4], [2, 0, 1, 5, 3, 4], [5, 4, 3, 2, 1, 0]]
    for model in (Net(), *map(Ordered, orders)):
        reference, _ = train_plain(CASES["adamw"], 1, deepcopy(model))
        optimizer = make(Zero2Optimizer, model)
        sizes = bucket_bytes(optimizer)
        with watch_buffers() as buffers, watch_buckets() as flats, watch_reductions() as log:
            loss_on_rank(model, batches(1)[0]).backward()
        # However late a bucket is complete, memory stays within the bound, and every bucket is reduced once.
        shards = [sum(sizes[: b + 1]) // ranks for b in range(len(sizes))]
        assert buffers.peak == max(shards[b] + sum(sizes[b : b + 2]) + received(sizes[b]) for b in range(len(sizes)))
        assert [flat.numel() for flat in flats] == [bucket.padded for bucket in optimizer.buckets]
        assert not any(flat.untyped_storage().nbytes() for flat in flats)
        assert all(p.grad is None for p in model.parameters())
        # One reduction in flight: each is waited for before the next is issued.
        assert log == ["issue", "wait"] * len(sizes)
        optimizer.step()
        assert_same(model, reference)


def check_overlap_of_stage2() -> None:
    """With gradients in the expected order, reductions are issued while backward still makes gradients."""
    model = Net()
    model.unused.requires_grad_(False)
    optimizer = make(Zero2Optimizer, model)
    with watch_reductions() as log:
        for layer in model.layers:
            layer.weight.register_post_accumulate_grad_hook(lambda _: log.append("gradient"))
        loss_on_rank(model, batches(1)[0]).backward()
    first, last = log.index("issue"), len(log) - 1 - log[::-1].index("gradient")
    assert first < last
    assert "wait" not in log[first + 1 : log.index("gradient", first)], "a reduction is not waited for at once"
    assert log.count("issue") == len(optimizer.buckets)


def check_stage2() -> None:
    check_backward_of_stage2()
    check_overlap_of_stage2()


def test_stage2_reduces_during_backward_within_two_buffers() -> None:
    launch(check_stage2, 2)


# --- what training loops do -------------------------------------------------------------------------------------------


def check_accumulation() -> None:
    case = CASES["adamw"]
    one, two = batches(2)
    reference = Net()
    optimizer = AdamW(reference.parameters(), **case.defaults)
    for _ in range(2):
        for x, y in (one, two):
            F.mse_loss(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        model = Net()
        optimizer = make(stage, model)
        for _ in range(2):
            for batch in (one, two):
                with watch_buffers() as buffers:
                    loss_on_rank(model, batch).backward()
            if stage is Zero2Optimizer:  # the second backward's own shards are freed once they are added
                assert not buffers.alive("gradients")
            optimizer.step()
            optimizer.zero_grad()
        assert_same(model, reference)


class Forked(Net):
    """Rank 0 uses one branch, the others another."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        branch = self.layers[1](hidden) if dist.get_rank() == 0 else hidden
        return self.layers[4](self.layers[3](self.layers[2](branch)))


def check_branches_that_differ_by_rank() -> None:
    for stage in STAGES:
        model, reference = Forked(), Forked()
        optimizer = make(stage, model, CASES["momentum"])
        plain_optimizer = SGD(two_groups(reference), **CASES["momentum"].defaults)
        for batch in batches(3):
            loss_on_rank(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_on_rank(reference, batch).backward()
            for layer in reference.layers:
                for p in layer.parameters():
                    if p.requires_grad and p.grad is None:
                        p.grad = torch.zeros_like(p)
            for p in [p for p in reference.parameters() if p.grad is not None]:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert_same(model, reference)


def check_closure() -> None:
    reference, _ = train_plain(CASES["adamw"], 2)
    for stage in STAGES:
        model = Net()
        optimizer = make(stage, model)
        for batch in batches(2):

            def closure(batch: Any = batch, model: Any = model, optimizer: Any = optimizer) -> float:
                optimizer.zero_grad()
                loss = loss_on_rank(model, batch)
                loss.backward()
                return loss.item()

            expected = loss_on_rank(model, batch).item()
            assert optimizer.step(closure) == expected
        assert_same(model, reference)


def check_recovery() -> None:
    """A backward that raises half-way leaves nothing behind once the gradients are cleared."""
    reference, _ = train_plain(CASES["adamw"], 2)
    for stage in STAGES:
        model = Net()
        optimizer = make(stage, model)

        def fail(_: Tensor) -> None:
            raise ArithmeticError("no luck")

        with watch_buckets() as flats:
            hook = model.layers[1].weight.register_post_accumulate_grad_hook(fail)
            with pytest.raises(ArithmeticError):
                loss_on_rank(model, batches(1)[0]).backward()
            hook.remove()
            optimizer.zero_grad()
            assert not any(flat.untyped_storage().nbytes() for flat in flats)
        for batch in batches(2):
            loss_on_rank(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert_same(model, reference)


class Checkpointed(Net):
    """A shared layer in two segments that a nested backward recomputes, so its gradient comes twice."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        for _ in range(2):
            hidden = checkpoint(self.layers[1], hidden, use_reentrant=self.reentrant)
        return self.layers[4](self.layers[3](self.layers[2](hidden))) * self.scale


def check_activation_checkpointing() -> None:
    for reentrant in (True, False):
        reference = Checkpointed()
        reference.reentrant = reentrant
        train_plain(CASES["adamw"], 2, reference)
        for stage in STAGES:
            model = Checkpointed()
            model.reentrant = reentrant
            if reentrant and stage is Zero2Optimizer:
                with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
                    train_sharded(stage, CASES["adamw"], 2, model)
            else:
                train_sharded(stage, CASES["adamw"], 2, model)
                assert_same(model, reference)


def check_named_parameters() -> None:
    model = Net()
    ours = Zero1Optimizer(model.named_parameters(), AdamW, lr=0.1)
    assert ours.state_dict()["param_groups"] == AdamW(model.named_parameters(), lr=0.1).state_dict()["param_groups"]
    assert ours.defaults == AdamW(model.parameters(), lr=0.1).defaults


def check_clipping() -> None:
    """The norm is that of all ranks' mean gradients, and a step after it reduces nothing a second time."""
    for p in (1.0, 2.0, float("inf")):
        reference, theirs = Net(), Net()
        expected = AdamW([q for q in reference.parameters() if q.requires_grad], **CASES["adamw"].defaults)
        for x, y in batches(2):
            F.mse_loss(reference(x), y).backward()
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, p)
            expected.step()
            expected.zero_grad()
        for stage in STAGES:
            theirs = Net()
            optimizer = make(stage, theirs)
            for batch in batches(2):
                loss_on_rank(theirs, batch).backward()
                found = optimizer.clip_grad_norm_(0.01, p)
                with comm.record() as log:
                    optimizer.step()
                assert not [call for call in log if call.op == "reduce_scatter"]
                optimizer.zero_grad()
            torch.testing.assert_close(found, norm)
            assert_same(theirs, reference)
            loss_on_rank(theirs, batches(1)[0]).backward()
            optimizer.clip_grad_norm_(0.01, p)
            optimizer.zero_grad()
            assert all(bucket.shard.grad is None for bucket in optimizer.buckets)


def check_loops() -> None:
    check_clipping()
    check_accumulation()
    check_branches_that_differ_by_rank()
    check_closure()
    check_recovery()
    check_activation_checkpointing()
    check_named_parameters()


def test_accumulation_branches_closures_and_checkpointing() -> None:
    launch(check_loops, 2)


# --- state dicts ------------------------------------------------------------------------------------------------------


UNSCHEDULED = {name: case._replace(scheduled=False) for name, case in CASES.items() if name != "adamw"}


def save_all() -> dict[tuple[str, str], Any]:
    saved: dict[tuple[str, str], Any] = {}
    for stage in STAGES:
        for name, case in UNSCHEDULED.items():
            model, optimizer = train_sharded(stage, case, 3)
            saved[stage.__name__, name] = (model.state_dict(), optimizer.state_dict())
    return saved


def check_resumed(saved: dict[tuple[str, str], Any]) -> None:
    goals = {name: train_plain(case, 5)[0] for name, case in UNSCHEDULED.items()}
    for (_, name), (weights, state) in saved.items():
        for stage in STAGES:
            model = Net(seed=1)
            model.load_state_dict(weights)
            train_sharded(stage, UNSCHEDULED[name], 5, model, state, skip=3)
            assert_same(model, goals[name])


def assert_same_state(state: Any, reference: torch.optim.Optimizer) -> None:
    expected = reference.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    params = [p for group in reference.param_groups for p in group["params"]]
    assert state["state"].keys() == {index for index in expected["state"] if params[index].requires_grad}
    for index, values in state["state"].items():
        torch.testing.assert_close(values, expected["state"][index])


def test_state_is_saved_on_two_ranks_and_resumed_on_three_or_by_a_plain_optimizer() -> None:
    saved, other = launch(save_all, 2)
    for name, case in UNSCHEDULED.items():
        model, optimizer = train_plain(case, 3)
        goal, _ = train_plain(case, 5)
        for stage in STAGES:
            weights, state = saved[stage.__name__, name]
            assert_same_state(state, optimizer)
            assert_same_state(other[stage.__name__, name][1], optimizer)
            resumed = Net(seed=1)
            resumed.load_state_dict(weights)
            train_plain(case, 5, resumed, deepcopy(state), skip=3)  # a plain optimizer updates in place what it loads
            assert_same(resumed, goal)
        saved["plain", name] = (model.state_dict(), optimizer.state_dict())
    launch(check_resumed, 3, saved)


# --- errors -----------------------------------------------------------------------------------------------------------


def check_errors() -> None:
    for stage in STAGES:
        with pytest.raises(ValueError, match="empty parameter list"):
            stage([], AdamW)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            stage(Net().parameters(), AdamW, lr=-1.0)
        with pytest.raises(ValueError, match=r"LBFGS multiplies whole gradients .*, but ZeRO"):
            stage(Net().parameters(), torch.optim.LBFGS)
        with pytest.raises(ValueError, match=r"parameter 0 of group 0 is on meta, the process group serves .*'cpu'"):
            stage(Net().to("meta").parameters(), AdamW)
        with pytest.raises(ValueError, match="no parameter"):
            stage([{"params": []}], AdamW)
        with pytest.raises(
            RuntimeError, match=r"parameter 0 of group 0 .*\[5, 7\]\) on rank 0; .*\[6, 7\]\) on rank 1"
        ):
            stage(nn.Linear(7, 5 + dist.get_rank()).parameters(), AdamW)
        torch.manual_seed(0)
        square = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        with pytest.raises(RuntimeError, match=r"rank 1 lists the parameters in another order .*from parameter 0 on"):
            stage([*square.parameters()][:: -1 if dist.get_rank() else 1], AdamW)

        model = Net()
        optimizer = make(stage, model)
        with pytest.raises(ValueError, match="make a new optimizer"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        state = optimizer.state_dict()
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})

        x, y = batches(1)[0]
        stale = F.mse_loss(model(x), y)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
        optimizer.zero_grad()

        state = optimizer.state_dict()
        state["state"][0]["exp_avg"] = torch.zeros(2)
        with pytest.raises(ValueError, match=r"same shape as its parameter: .*\[2\].*\[\].*: exp_avg of parameter"):
            optimizer.load_state_dict(state)

        model.layers[2].bias.requires_grad_(True)
        with pytest.raises(RuntimeError, match="unfrozen after the optimizer was made"):
            optimizer.step()
        model.layers[2].bias.requires_grad_(False)
        model.float()  # replaces the parameters' memory
        with pytest.raises(RuntimeError, match="then make the optimizer"):
            optimizer.step()


def test_wrong_use_is_refused_with_the_cure() -> None:
    launch(check_errors, 2)


def scaled_steps(stage: type[Zero1Optimizer] | type[Zero2Optimizer]) -> tuple[list[bool], bool]:
    """Whether each step has changed the parameters: the first overflows on rank 0, the second nowhere."""
    model = nn.Linear(5, 3)
    optimizer = stage(model.parameters(), SGD, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    expected = deepcopy(model)
    plain = stage(expected.parameters(), SGD, lr=0.1)
    stepped = []
    for overflows in (True, False):
        before = model.weight.detach().clone()
        x = torch.full((2, 5), float("inf") if overflows and dist.get_rank() == 0 else 0.5 + dist.get_rank())
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepped.append(not torch.equal(before, model.weight))
    expected(x).sum().backward()
    plain.step()
    return stepped, torch.equal(model.weight, expected.weight) and scaler.get_scale() == 2.0


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_scaler_skips_a_step_on_all_ranks(stage: type[Zero1Optimizer] | type[Zero2Optimizer]) -> None:
    for stepped, is_right in launch(scaled_steps, 2, stage):
        assert stepped == [False, True]
        assert is_right
