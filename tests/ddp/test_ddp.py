"""DDP in three rungs and as a drop-in: equal to torch and to one process, messages, order, bytes, errors."""

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from minifsdp import comm, device
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP, OverlappedDDP
from minifsdp.instruments.launch import launch
from minifsdp.instruments.watch.ledger import Ledger

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CAP = 200  # bytes: several buckets even for these models
CAP_MB = CAP / 2**20
RUNGS: dict[str, Callable[..., nn.Module]] = {
    "naive": NaiveDDP,
    "bucketed": partial(BucketedDDP, bucket_cap_mb=CAP_MB),
    "overlapped": partial(OverlappedDDP, bucket_cap_mb=CAP_MB),
    "ddp": partial(DistributedDataParallel, bucket_cap_mb=CAP_MB),
    "ddp with views": partial(DistributedDataParallel, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=True),
}
DDPS = {name: rung for name, rung in RUNGS.items() if name.startswith("ddp")}
DURING = ["overlapped", *DDPS]  # reduce during backward


# The models


def chain(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them; widths that no number of ranks divides give buckets of uneven sizes."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])


class Tied(nn.Module):
    """The first and the last matrix are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.middle, self.outward = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 9)
        self.outward.weight = self.inward.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.middle(self.inward(x).tanh()))


class Twice(nn.Module):
    """One layer that is called twice, a scalar, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.block(x).tanh())) + self.scale * 3 + self.nothing.sum()


class Branches(nn.Module):
    """Layers of which a forward uses those that it is told to, in that order."""

    def __init__(self, branches: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.branches = nn.ModuleList(chain(5, width + 2, 5) for width in range(branches))

    def forward(self, x: Tensor, *which: int) -> Tensor:
        x = self.first(x)
        for index in which:
            x = self.branches[index](x).tanh()
        return self.last(x)


class Norm(nn.Module):
    """Batch statistics, in float32 buffers [7] and an int64 counter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Checkpointed(nn.Module):
    """Its last layers are in a backward of their own, which is over before the first layers' gradients are made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = chain(6, 11, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net[2:], self.net[:2](x), use_reentrant=True)


class Mixed(nn.Module):
    """Two dtypes, and a matrix that is stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 5).double(), nn.Linear(5, 3)
        self.narrow.weight = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x.double()).float())


def frozen() -> nn.Module:
    model = chain(6, 5, 4, 3)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


# What ranks do with them


@contextmanager
def counting(function: str) -> Iterator[list[int]]:
    """The numel of the tensor of each call of `torch.distributed.<function>` inside the `with`, in order."""
    calls: list[int] = []
    real = getattr(dist, function)

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with patch.object(dist, function, counted):
        yield calls


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def sum_of_squares(outputs: Any) -> Tensor:
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(t.square().mean() for t in tensors)


def sync(model: nn.Module) -> None:
    """The training loop's part in rungs 1 and 2."""
    if isinstance(model, NaiveDDP):
        model.sync_gradients()


def step_once(model: nn.Module, *args: Any) -> None:
    sum_of_squares(model(*args)).backward()
    sync(model)


def my_batch() -> Tensor:
    return batch(0, dist.get_rank())


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error's type and text; "none" without one."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@dataclass
class Case:
    """A model and how it is trained.

    Attributes:
        steps: for each optimizer step, for each backward in it, whether gradients are synchronized.
        args: what forward gets besides its batch, by step and rank.
    """

    build: Callable[[], nn.Module]
    steps: list[list[bool]] = field(default_factory=lambda: [[True]] * 3)
    args: Callable[[int, int], tuple[Any, ...]] = lambda step, rank: ()
    options: dict[str, Any] = field(default_factory=dict)
    set_to_none: bool = True
    one_process: bool = True  # whether one process with the whole batch computes the same


CASES = {
    "uneven": Case(partial(chain, 6, 11, 5, 3)),
    "tied": Case(Tied),
    "frozen": Case(frozen),
    "twice": Case(Twice),
    "mixed": Case(Mixed),
    "zeroed": Case(partial(chain, 6, 11, 5, 3), set_to_none=False),
    "accumulated": Case(partial(chain, 6, 11, 5, 3), [[True], [False, False, True], [True, True], [True]]),
    "accumulated and zeroed": Case(Tied, [[False, True], [True, True], [False, True]], set_to_none=False),
    "norm": Case(Norm, [[True], [False, False, True], [True]], one_process=False),
    # Rank r uses branch r in step 0, the next in step 1 and so on; no rank uses the fourth.
    "unused": Case(partial(Branches, 4), args=lambda step, rank: ((step + rank) % 3,)),
}
UNUSED = {"find_unused_parameters": True}


class Result(NamedTuple):
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Tensor]


def train(model: nn.Module, case: Case, ranks: list[int]) -> Result:
    """Three or so steps of SGD on the mean loss of these ranks' batches; the gradients before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for number, backwards in enumerate(case.steps):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for index, synced in enumerate(backwards):
            with nullcontext() if synced or not hasattr(model, "no_sync") else model.no_sync():
                outputs = [model(batch(10 * number + index, rank), *case.args(number, rank)) for rank in ranks]
                (sum(map(sum_of_squares, outputs)) / len(ranks)).backward()
            if synced:
                sync(model)
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return Result(gradients, dict(model.state_dict()))


def assert_close(ours: Result, other: Result, tolerance: float, what: str) -> None:
    """Every tensor within `tolerance` of the other's largest element; None counts as zero."""
    pairs = [
        (f"step {step}, gradient of {name}", g, theirs[name])
        for step, (mine, theirs) in enumerate(zip(ours.gradients, other.gradients, strict=True))
        for name, g in mine.items()
    ]
    pairs += [(name, ours.state[name], other.state[name]) for name in other.state]
    for name, a, b in pairs:
        a, b = torch.zeros(1) if a is None else a, torch.zeros(1) if b is None else b
        error, scale = ((a - b).abs().max(), b.abs().max()) if b.numel() and a.numel() else (0, 0)
        assert error <= tolerance * scale, f"{what}: {name} differs by {error:.2e} of {scale:.2e}"


def assert_same_gradients(ddp: nn.Module, whole: nn.Module) -> None:
    """Of every parameter; None in one of them is None in the other."""
    for (name, p), q in zip(ddp.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6), name


def wrap_as_torch(model: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **options)


def compare_with_torch_and_one_process() -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, case in CASES.items():
        torch.manual_seed(1)
        reference = case.build()
        torch.manual_seed(rank + 1)  # rank 0's values must win
        model = case.build()
        options = UNUSED if name == "unused" else {}
        torchs = train(wrap_as_torch(copy.deepcopy(model), **options), case, [rank])
        whole = train(reference, case, list(range(world)))
        whole = Result(
            [{f"module.{n}": g for n, g in gradients.items()} for gradients in whole.gradients],
            {f"module.{n}": t for n, t in whole.state.items()},
        )
        for rung, wrap in RUNGS.items():
            ours = train(wrap(copy.deepcopy(model), **(options if rung in DDPS else {})), case, [rank])
            what = f"{rung}, {name}, {world} ranks"
            if rung in DDPS:
                assert_close(ours, torchs, 1e-6, f"{what}, against torch")
                nones = [[[n for n, g in step.items() if g is None] for step in r.gradients] for r in (ours, torchs)]
                assert nones[0] == nones[1], f"{what}: None in other places than in torch: {nones}"
            if case.one_process:
                assert_close(ours, whole, 1e-5, f"{what}, against one process")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_gradients_and_parameters_equal_torchs_and_one_processs(world: int) -> None:
    launch(compare_with_torch_and_one_process, world)


# Messages and their order


def messages() -> dict[str, list[int]]:
    """The numel of each all-reduce of a step, by rung."""
    counts = {}
    for rung, wrap in RUNGS.items():
        model = wrap(chain(6, 11, 5, 3))
        with counting("all_reduce") as counts[rung]:
            step_once(model, my_batch())
    return counts


def test_a_parameter_a_bucket_a_bucket_during_backward() -> None:
    sizes = [6 * 11, 11, 11 * 5, 5, 5 * 3, 3]
    buckets = [3 + 15 + 5 + 55, 11 + 66]  # backwards; each is closed once it has reached 200 bytes
    for counts in launch(messages, 2):
        assert counts == {"naive": sizes, "bucketed": buckets} | dict.fromkeys(DURING, buckets)


def issues_and_waits() -> dict[str, str]:
    """A step's collectives by rung: "i" where one is issued, "w" where it is waited for."""
    events: dict[str, str] = {}

    @contextmanager
    def watch(call: comm.Call, phase: str) -> Iterator[None]:
        events[rung] += phase[0]
        yield

    for rung, wrap in RUNGS.items():
        model = wrap(chain(6, 11, 5, 3))
        comm.observers.append(watch)
        events[rung] = ""
        step_once(model, my_batch())
        comm.observers.remove(watch)
    return events


def test_only_rung_3_has_more_than_one_reduction_under_way() -> None:
    for events in launch(issues_and_waits, 2):
        assert events == {"naive": "iw" * 6, "bucketed": "iw" * 2} | dict.fromkeys(DURING, "iiww")


def gradients_at_each_launch() -> dict[str, list[list[str]]]:
    """The parameters whose gradient is there when each reduction is launched."""
    seen: dict[str, list[list[str]]] = {}
    for rung, wrap in RUNGS.items():
        model = wrap(chain(6, 11, 5, 3))
        seen[rung] = []
        real = dist.all_reduce

        def reduce(*args: Any, **kwargs: Any) -> Any:
            names = [n for n, p in model.module.named_parameters() if p.grad is not None]  # noqa: B023
            seen[rung].append(names)  # noqa: B023
            return real(*args, **kwargs)  # noqa: B023

        with patch.object(dist, "all_reduce", reduce):
            step_once(model, my_batch())
    return seen


def test_reductions_begin_while_backward_runs_in_rung_3_and_only_there() -> None:
    everything = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    for seen in launch(gradients_at_each_launch, 2):
        assert seen["naive"] == [everything] * 6
        assert seen["bucketed"] == [everything] * 2
        for rung in DURING:
            first, last = seen[rung]
            assert set(first) == {"2.weight", "2.bias", "4.weight", "4.bias"}
            assert set(last) == set(everything)


def launches_where_each_rank_has_its_own_order() -> dict[str, list[int]]:
    """Rank 0 calls the branches in order, the others in reverse, so backward reaches them in different orders."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    orders = [(0, 1, 2), (2, 1, 0), (2, 1, 0)][:world]
    found = {}
    for rung, view in (("ddp", False), ("ddp with views", True)):
        ddp = DistributedDataParallel(Branches(), bucket_cap_mb=0, gradient_as_bucket_view=view)
        whole = copy.deepcopy(ddp.module)
        (sum(sum_of_squares(whole(batch(0, r), *orders[r])) for r in range(world)) / world).backward()
        with counting("all_reduce") as sizes:
            step_once(ddp, my_batch(), *orders[rank])
        assert_same_gradients(ddp, whole)
        found[rung] = sizes
    return found


def test_a_bucket_that_is_full_early_waits_for_its_turn() -> None:
    in_bucket_order = [p.numel() for p in reversed(list(Branches().parameters()))]
    for found in launch(launches_where_each_rank_has_its_own_order, 3):
        assert found == dict.fromkeys(DDPS, in_bucket_order)


# Bytes


@contextmanager
def buffers(*roles: device.Role) -> Iterator[list[Tensor]]:
    """The buffers of these roles that are handed out inside the `with`, in order."""
    found: list[Tensor] = []

    def note(buffer: Tensor, role: device.Role) -> None:
        if role in roles:
            found.append(buffer)

    device.buffer_observers.append(note)
    try:
        yield found
    finally:
        device.buffer_observers.remove(note)


def live_numel(found: list[Tensor]) -> list[int]:
    return [buffer.numel() for buffer in found if device.is_allocated(buffer)]


def staging_of_rung_2() -> dict[str, Any]:
    model = BucketedDDP(chain(6, 11, 5, 3), bucket_cap_mb=CAP_MB)
    sum_of_squares(model(my_batch())).backward()
    alive = []
    real = dist.all_reduce

    def reduce(*args: Any, **kwargs: Any) -> Any:
        alive.append(live_numel(found))
        return real(*args, **kwargs)

    with buffers("communication", "gradients") as found, patch.object(dist, "all_reduce", reduce):
        model.sync_gradients()
    return {"at each reduction": alive, "after": live_numel(found)}


def test_rung_2_has_one_staging_buffer_alive_at_a_time() -> None:
    assert launch(staging_of_rung_2, 2) == [{"at each reduction": [[78], [77]], "after": []}] * 2


def staging_of_rung_3() -> dict[str, Any]:
    """Bytes of staging and of gradients before each gradient enters its bucket, and after each of three backwards."""
    found: dict[str, Any] = {}
    with Ledger() as ledger:
        ddp = DistributedDataParallel(chain(6, 11, 5, 3), bucket_cap_mb=CAP_MB)
        ledger.watch(ddp)
        params = list(ddp.parameters())

        def note(moment: str) -> None:
            found.setdefault(moment, []).append((ledger.live()["communication"], ledger.live()["gradients"]))

        note("built")
        step_once(ddp, my_batch())
        ddp.zero_grad()
        patience = time.monotonic() + 10  # gloo's threads let go of what they have reduced a moment later
        while ledger.live()["gradients"] and time.monotonic() < patience:
            time.sleep(0.01)
        note("dropped")
        for p in params:
            p.register_post_accumulate_grad_hook(lambda p: note(moment))
        memory: list[int] = []
        for moment in ("backward", "no_sync", "again"):
            with ddp.no_sync() if moment == "no_sync" else nullcontext():
                step_once(ddp, my_batch())
            note(f"after {moment}")
            before, memory = memory, [p.grad.data_ptr() for p in params]
            if before:
                found[f"moved in {moment}"] = memory != before
        ddp.zero_grad()
        note("zeroed")
    return found


def test_rung_3_has_a_bucket_from_its_first_gradient_and_lets_the_gradients_have_it() -> None:
    first, both = 4 * 78, 4 * (78 + 77)
    for found in launch(staging_of_rung_3, 2):
        assert found == {
            "built": [(0, 0)],
            "dropped": [(0, 0)],
            # Each gradient enters the bucket, its own memory is gone: nothing is there twice.
            "backward": [(0, 0)] + [(0, first)] * 4 + [(0, both)],
            "after backward": [(0, both)],
            "no_sync": [(0, both)] * 6,
            "after no_sync": [(0, both)],
            "moved in no_sync": False,  # accumulated in place
            "again": [(0, both)] + [(first, both)] * 4 + [(both, both)],
            "after again": [(0, both)],
            "moved in again": False,  # in the first bucket's memory already: the means are copied
            "zeroed": [(0, 0)],
        }


def gradients_in_memory_of_the_users() -> None:
    """As with apex: every `.grad` is a view of one flat tensor, and the optimizer reads that."""
    model = chain(6, 11, 5, 3)
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view(p.shape)
    expected = copy.deepcopy(model)
    step_once(DistributedDataParallel(model, bucket_cap_mb=CAP_MB), my_batch())
    step_once(DistributedDataParallel(expected, bucket_cap_mb=CAP_MB), my_batch())
    assert torch.equal(flat, torch.cat([p.grad.flatten() for p in expected.parameters()]))


def test_gradients_in_a_flat_tensor_of_the_users_stay_there() -> None:
    launch(gradients_in_memory_of_the_users, 2)


def gradients_that_are_buckets() -> dict[str, Any]:
    model = chain(6, 11, 5, 3)
    in_buckets = {}
    with buffers("gradients") as buckets, buffers("communication") as staging:
        ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=True)
        construction = len(staging)

        def note(moment: str) -> None:
            memory = [bucket.untyped_storage().data_ptr() for bucket in buckets]
            where = [memory.index(p.grad.untyped_storage().data_ptr()) for p in model.parameters()]
            in_buckets[moment] = where, live_numel(buckets), len(staging) - construction

        for moment, set_to_none in (("None", True), ("zero", False), ("None again", True)):
            ddp.zero_grad(set_to_none=set_to_none)
            with ddp.no_sync():
                step_once(ddp, my_batch())
            note(f"{moment}, accumulated")
            before = {n: p.grad for n, p in model.named_parameters()}
            step_once(ddp, my_batch())
            note(f"{moment}, reduced")
            assert all(p.grad is before[n] for n, p in model.named_parameters()), "autograd must accumulate in place"
        return in_buckets


def test_with_views_the_gradients_are_the_buckets() -> None:
    for found in launch(gradients_that_are_buckets, 2):
        assert len(found) == 6
        for moment, value in found.items():
            assert value == ([1, 1, 0, 0, 0, 0], [78, 77], 0), moment


# Unused parameters


@dataclass
class Two:
    """What a forward may return."""

    left: Tensor
    right: Tensor


class TwoHeads(nn.Module):
    """A body, and two heads whose outputs come in any container; a rank may be told to use nothing at all."""

    def __init__(self, contain: Callable[[Tensor, Tensor], Any] = lambda left, right: (left, right)) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(5, 3)
        self.contain = contain

    def forward(self, x: Tensor, use: bool = True) -> Any:
        if not use:
            return self.contain(x * 1, x * 1)
        x = self.body(x).tanh()
        return self.contain(self.left(x), self.right(x))


def unused_on_all_ranks(wrap: Callable[..., nn.Module]) -> None:
    ddp = wrap(Branches(), **UNUSED)
    bias = ddp.module.branches[2][2].bias
    step_once(ddp, my_batch(), 0, 1)
    assert bias.grad is None
    bias.grad = torch.full_like(bias, 7.0 + dist.get_rank())  # of this rank only, and not a view
    step_once(ddp, my_batch(), 0, 1)
    assert (bias.grad == 7 + dist.get_rank()).all()
    ddp.zero_grad()
    step_once(ddp, my_batch(), 2)
    before = bias.grad.clone()
    with counting("all_reduce") as sizes:
        step_once(ddp, my_batch(), 0, 1)
    assert torch.allclose(bias.grad, before, rtol=1e-6, atol=0)  # a view is reduced: (g + g + g) / 3 need not be g
    assert sizes[-1] == len(list(ddp.parameters())), "one count per parameter, after the buckets"
    assert sum(sizes[:-1]) == sum(p.numel() for p in ddp.parameters())


def used_under_no_sync_only(wrap: Callable[..., nn.Module]) -> None:
    """Each rank uses a branch of its own under no_sync, and another one in the step that is reduced."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = wrap(Branches(world + 1), **UNUSED)
    whole = copy.deepcopy(ddp.module)
    with ddp.no_sync():
        step_once(ddp, batch(0, rank), rank)
    step_once(ddp, batch(1, rank), world)
    losses = [sum_of_squares(whole(batch(s, r), b)) for r in range(world) for s, b in ((0, r), (1, world))]
    (sum(losses) / world).backward()
    assert_same_gradients(ddp, whole)


def output_outside_the_loss(wrap: Callable[..., nn.Module]) -> None:
    containers = [
        (lambda *t: t, lambda outputs: outputs[0]),
        (lambda *t: {"a": t[0], "b": [t[1]]}, lambda outputs: outputs["a"]),
        (lambda *t: [Two(*t)], lambda outputs: outputs[0].left),
    ]
    for contain, left in containers:
        ddp = wrap(TwoHeads(contain), **UNUSED)
        for _ in range(2):
            sum_of_squares(left(ddp(my_batch()))).backward()
        assert ddp.module.right.weight.grad is None
        gathered = [torch.empty_like(ddp.module.left.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, ddp.module.left.weight.grad)
        assert all(torch.equal(gathered[0], other) for other in gathered)


def a_rank_that_uses_nothing(wrap: Callable[..., nn.Module]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = wrap(TwoHeads(), **UNUSED)
    whole = copy.deepcopy(ddp.module)
    sum_of_squares(ddp(my_batch().requires_grad_(), rank == 0)).backward()
    (sum_of_squares(whole(batch(0, 0))) / world).backward()
    assert_same_gradients(ddp, whole)


def two_forwards_before_backward(wrap: Callable[..., nn.Module]) -> None:
    """What the first of them used is not unused because the second left it out."""
    ddp = wrap(Branches(), **UNUSED)
    whole = copy.deepcopy(ddp.module)
    loss = sum_of_squares(ddp(batch(0, 0), 0)) + sum_of_squares(ddp(batch(1, 0), 1))
    loss.backward()
    (sum_of_squares(whole(batch(0, 0), 0)) + sum_of_squares(whole(batch(1, 0), 1))).backward()
    assert ddp.module.branches[2][0].weight.grad is None
    assert_same_gradients(ddp, whole)


def unused_parameters() -> None:
    torch.manual_seed(0)
    for wrap in DDPS.values():
        unused_on_all_ranks(wrap)
        used_under_no_sync_only(wrap)
        output_outside_the_loss(wrap)
        a_rank_that_uses_nothing(wrap)
        two_forwards_before_backward(wrap)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_unused_parameters_that_are_looked_for(world: int) -> None:
    launch(unused_parameters, world)


def unused_without_looking() -> list[str]:
    errors = []
    for wrap in DDPS.values():
        ddp = wrap(Branches())
        step_once(ddp, my_batch(), 0, 2)
        errors += [error_of(ddp, my_batch(), 0, 1, 2) for _ in range(2)]
        with torch.no_grad():
            ddp(my_batch(), 0)  # evaluating is still possible
    return errors


def test_an_unused_parameter_is_named_with_the_cure_each_time() -> None:
    for rank, errors in enumerate(launch(unused_without_looking, 2)):
        assert len(errors) == 4
        for error in errors:
            assert error.startswith(
                "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."
            )
            assert "find_unused_parameters=True" in error
            names = ", ".join(f"branches.1.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
            assert error.endswith(f"for rank {rank}: {names}")


def unused_on_one_rank() -> None:
    ddp = DistributedDataParallel(Branches())
    for _ in range(2):
        step_once(ddp, my_batch(), *((0, 1, 2) if dist.get_rank() == 0 else (0, 2)))


def test_a_parameter_that_one_rank_leaves_out_ends_the_run_with_its_name() -> None:
    """The other rank waits for a reduction that will not come, and must not be what is reported."""
    with pytest.raises(
        Exception, match=r"rank 1 failed: RuntimeError: Expected to have finished.*branches\.1\.0\.weight"
    ):
        launch(unused_on_one_rank, 2, timeout=30)


# Hooks, buffers, versions


class Pass(TorchDispatchMode):
    """Changes nothing; but some in-place operations count as changes only without it, or only with it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would first import it, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def with_and_without_a_dispatch_mode() -> None:
    """Two forwards, each of which broadcasts the buffers, share a backward; twice, with accumulated gradients."""
    for rung, wrap in RUNGS.items():
        results = []
        for mode in (nullcontext(), Pass()):
            torch.manual_seed(0)
            model = wrap(Norm())
            with mode, counting("broadcast") as broadcasts:
                for step in range(2):
                    (sum_of_squares(model(batch(step, 0))) + sum_of_squares(model(batch(step, 1)))).backward()
                    sync(model)
            assert broadcasts == ([7 * 4 * 2 + 8] * 4 if rung in DDPS else [])
            results.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *results)), rung


def buffers_come_from_rank_0() -> None:
    rank = dist.get_rank()
    for wrap in DDPS.values():
        for on in (True, False):
            model = Norm()
            mean = model.net[1].running_mean
            mean.fill_(rank)
            ddp = wrap(model, broadcast_buffers=on)
            assert (mean == (0 if on else rank)).all()
            with counting("broadcast") as broadcasts:
                step_once(ddp, my_batch())
                mean.fill_(rank)
                with ddp.no_sync():
                    step_once(ddp, my_batch())  # follows a reduced backward
                assert len(broadcasts) == 2 * on
                ddp.eval()
                ddp(my_batch())  # follows one under no_sync
                with torch.no_grad():
                    ddp(my_batch())
                    ddp(my_batch())
            assert len(broadcasts) == 3 * on


def a_model_wrapped_again() -> None:
    """The first wrapper's hooks are gone with it: nothing is reduced twice, `.grad` is in the new buckets."""
    model = chain(6, 11, 5, 3)
    for wrap in DDPS.values():
        step_once(wrap(model), my_batch())
    ddp = RUNGS["ddp with views"](model)
    with counting("all_reduce") as sizes:
        step_once(ddp, my_batch())
    assert len(sizes) == 2


def a_reentrant_checkpoint() -> None:
    """Its parameters get their gradients in a backward inside backward, which must not end the reduction."""
    for wrap in DDPS.values():
        ddp = wrap(Checkpointed())
        plain = copy.deepcopy(ddp.module.net)
        step_once(ddp, batch(0, 0).requires_grad_())
        step_once(plain, batch(0, 0))
        assert_same_gradients(ddp, plain)


def hooks_and_buffers() -> None:
    torch.manual_seed(0)
    with_and_without_a_dispatch_mode()
    buffers_come_from_rank_0()
    a_model_wrapped_again()
    a_reentrant_checkpoint()


def test_hooks_and_buffers() -> None:
    launch(hooks_and_buffers, 2)


# Errors


def models_that_differ() -> dict[str, list[str]]:
    """The error of each rung where rank 1's model is another than that of the other ranks."""
    odd = dist.get_rank() == 1
    models = {
        "shape": chain(6, 4 if odd else 5, 3),
        "dtype": chain(6, 5).double() if odd else chain(6, 5),
        "number": chain(6, 5, 3) if odd else chain(6, 5),
        "frozen": frozen() if odd else chain(6, 5, 4, 3),
        "buffer": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=not odd)),
        "layout": nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last if odd else torch.contiguous_format),
    }
    errors = {name: [error_of(wrap, model) for wrap in RUNGS.values()] for name, model in models.items()}
    step_once(NaiveDDP(chain(6, 5, 3)), my_batch())  # the ranks are still in step
    return errors


def test_models_that_differ_are_one_error_on_all_ranks() -> None:
    start = "RuntimeError: DDP expects same model across all ranks, but finds "
    expected = {
        "shape": "parameter 0.weight (float32 [5, 6]) on ranks 0, 2; parameter 0.weight (float32 [4, 6]) on rank 1.",
        "dtype": "parameter 0.weight (float32 [5, 6]) on ranks 0, 2; parameter 0.weight (float64 [5, 6]) on rank 1.",
        "number": "nothing on ranks 0, 2; parameter 2.weight (float32 [3, 5]) on rank 1.",
        "frozen": "parameter 0.weight (float32 [5, 6]) on ranks 0, 2; "
        "parameter 0.weight (float32 [5, 6] frozen) on rank 1.",
        "buffer": "buffer 1.running_mean (float32 [5]) on ranks 0, 2; nothing on rank 1.",
        "layout": "parameter weight (float32 [2, 2, 2, 2]) on ranks 0, 2; "
        "parameter weight (float32 [2, 2, 2, 2] with strides [8, 1, 4, 2]) on rank 1.",
    }
    for errors in launch(models_that_differ, 3):
        assert errors == {name: [start + text] * len(RUNGS) for name, text in expected.items()}


def wrong_arguments() -> dict[str, str]:
    model, ddp = chain(6, 5, 3), DistributedDataParallel
    return {
        "nothing to train": error_of(ddp, chain(6, 5).requires_grad_(False)),
        "lazy": error_of(ddp, nn.LazyLinear(3)),
        "two devices": error_of(ddp, model, device_ids=[0, 1]),
        "a device on CPU": error_of(ddp, model, device_ids=[0]),
        "no list": error_of(ddp, model, device_ids=0),
        "two kinds of devices": error_of(ddp, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))),
    }


def test_wrong_arguments() -> None:
    errors = launch(wrong_arguments, 1)[0]
    starts = {
        "nothing to train": "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any param",
        "lazy": "RuntimeError: Modules with uninitialized parameters can't be used with `DistributedDataParallel`.",
        "two devices": "ValueError: device_ids can only be None or contain a single element.",
        "a device on CPU": "ValueError: DistributedDataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], output_device None, and "
        "module parameters {device(type='cpu')}: leave both out, "
        + ("or move the module to a GPU" if torch.cuda.is_available() else "there is no CUDA device here"),
        "no list": "ValueError: device_ids=0: give a list of one device, or leave it out",
        "two kinds of devices": "ValueError: DistributedDataParallel's input module must be on the same type",
    }
    for name, start in starts.items():
        assert errors[name].startswith(start), errors[name]


def test_without_a_process_group() -> None:
    for rung in RUNGS.values():
        assert error_of(rung, chain(6, 5)).startswith("RuntimeError: no process group: call torch.distributed.init")


def a_parameter_outside_forward() -> list[str]:
    errors = []
    for wrap in DDPS.values():
        ddp = wrap(Branches(), **UNUSED)
        outside = ddp.module.branches[1][0].weight.sum()  # made before the forward, so backward reaches it after
        errors.append(error_of((sum_of_squares(ddp(my_batch(), 0)) + outside).backward))
    return errors


def test_a_parameter_used_outside_forward_is_named() -> None:
    for errors in launch(a_parameter_outside_forward, 2):
        for error in errors:
            assert error.startswith(
                "RuntimeError: Expected to mark a variable ready only once. Parameter branches.1.0.w"
            )


# As a drop-in


def names_and_groups() -> None:
    torch.manual_seed(0)
    model = Norm()
    for wrap in RUNGS.values():
        ddp = wrap(copy.deepcopy(model))
        assert list(ddp.state_dict()) == [f"module.{name}" for name in model.state_dict()]
        assert [n for n, _ in ddp.named_parameters()] == [f"module.{n}" for n, _ in model.named_parameters()]
        ddp.module.load_state_dict(model.state_dict())
    model = chain(6, 5, 3)
    pair = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank < 2:
        for wrap in RUNGS.values():
            ddp = wrap(copy.deepcopy(model), process_group=pair)
            step_once(ddp, my_batch())
            grad = ddp.module[0].weight.grad
            total = grad.clone()
            dist.all_reduce(total, group=pair)
            assert torch.equal(total, 2 * grad)
    dist.barrier()
    model = chain(6, 5, 3)
    values = [p + rank for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)
    with counting("broadcast") as broadcasts, counting("all_reduce") as reductions:
        DistributedDataParallel(model, init_sync=False)
    assert broadcasts == reductions == []
    assert all(map(torch.equal, model.parameters(), values))


def test_as_a_drop_in() -> None:
    launch(names_and_groups, 3)
