"""DDP's whole interface beside torch's: static graphs, communication hooks, uneven batches, and what is refused."""

from __future__ import annotations

import copy
import inspect
import io
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from minifsdp.ddp import DistributedDataParallel
from minifsdp.ddp.bucketed import assign_buckets
from minifsdp.ddp.torch_api.arguments import bucket_caps, to_device

check = Checks(__name__)

Ddp = DistributedDataParallel
Torchs = nn.parallel.DistributedDataParallel
VIEWS = (False, True)
IS_LIKE_OURS = torch.__version__[:5] == "2.13."  # our names, defaults and warnings are those of this version
THEIRS = inspect.signature(Torchs).parameters
EACH = 1e-6  # MiB: below 2 bytes, so that every parameter has a bucket of its own, in torch too


# The models


class Crossed(nn.Module):
    """Registers its layers in one order and uses them in another; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = nn.Linear(5, 3, bias=False), nn.Linear(6, 5, bias=False)
        self.never, self.middle = nn.Linear(7, 7, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.middle(self.early(x).tanh()).tanh())


class CheckpointedTwice(nn.Module):
    """A layer in two reentrant checkpoints: it gets two gradients in a backward, with others between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 5), nn.Linear(5, 5)
        self.between, self.never = nn.Linear(5, 5), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.again, self.first(x), use_reentrant=True).tanh()
        return checkpoint(self.again, self.between(x), use_reentrant=True)


class Branches(nn.Module):
    """A forward uses the branches that it is told to."""

    def __init__(self, branches: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(branches))

    def forward(self, x: Tensor, *which: int) -> Tensor:
        for index in which:
            x = self.branches[index](x).tanh()
        return x


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


# What ranks do with them


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def step_once(model: nn.Module, *args: Any, step: int = 0) -> Tensor:
    loss = model(batch(step, dist.get_rank()), *args).square().mean()
    loss.backward()
    return loss.detach()


def as_torch(model: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Torchs(model, **options)


def twins(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's around equal models."""
    torch.manual_seed(1)
    model = build()
    return Ddp(copy.deepcopy(model), **options), as_torch(model, **options)


@contextmanager
def reductions() -> Iterator[list[int]]:
    """The numel of each all-reduce inside the `with`, in order."""
    calls: list[int] = []
    real = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", counted):
        yield calls


def assert_close(ours: Tensor | None, theirs: Tensor | None, what: str = "", tolerance: float = 1e-5) -> None:
    assert (ours is None) == (theirs is None), what
    if ours is not None and ours.numel():
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max(), f"{what}: {ours} is not {theirs}"


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(p.grad, q.grad, name, tolerance)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error's type and text; "none" without one."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def assert_starts(text: str, start: str) -> None:
    assert text.startswith(start), text


def warnings_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[type, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [(each.category, str(each.message)) for each in caught]


# Static graphs


@check()
def the_second_iteration_reduces_in_the_order_of_the_first_backward() -> None:
    for views in VIEWS:
        ddp = Ddp(Crossed(), bucket_cap_mb=0, static_graph=True, gradient_as_bucket_view=views)
        with reductions() as first:
            step_once(ddp)
        assert first == [25, 49, 30, 15, 2 * 4], "the order of registration reversed, and what the ranks have learnt"
        with reductions() as second:
            step_once(ddp)
            step_once(ddp)
        assert second == [15, 25, 30] * 2, "the order of backward, and nothing for what is unused"
        assert ddp.module.never.weight.grad is None


@check()
def buckets_that_are_the_gradients_are_built_again_and_the_first_are_freed() -> None:
    for set_to_none in (True, False):
        ddp = Ddp(Crossed(), bucket_cap_mb=0, static_graph=True, gradient_as_bucket_view=True)
        firsts = [weakref.ref(bucket.flat) for bucket in ddp.reducer.buckets]
        for _ in range(2):
            step_once(ddp)
            ddp.zero_grad(set_to_none=set_to_none)
        step_once(ddp)
        for p, bucket in ddp.reducer.bucket_of.items():
            assert p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        assert [first() for first in firsts] == [None] * 4


@check()
def the_first_iteration_reduces_when_backward_has_ended_and_the_others_during_it() -> None:
    ddp = Ddp(Crossed(), bucket_cap_mb=0, static_graph=True)
    there: list[int] = []

    def note(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        there.append(sum(p.grad is not None for p in ddp.parameters()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, note)
    for _ in range(2):
        ddp.zero_grad()
        step_once(ddp)
    assert there == [3, 3, 3, 3, 1, 2, 3]


@check(ranks=(2, 3))
def a_static_graph_equals_torchs_and_one_process() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for build in (Crossed, CheckpointedTwice, norm):
        for views in VIEWS:
            ours, theirs = twins(build, static_graph=True, gradient_as_bucket_view=views, bucket_cap_mb=EACH)
            whole = copy.deepcopy(ours.module)
            for step, unsynced in enumerate((False, False, True, False, False)):
                for model in (ours, theirs):
                    with model.no_sync() if unsynced else nullcontext():
                        model(batch(step, rank).requires_grad_()).square().mean().backward()
                for r in range(world):
                    (whole(batch(step, r).requires_grad_()).square().mean() / world).backward()
                if not unsynced:
                    assert_same_gradients(ours, theirs)
                    if build is not norm:
                        assert_same_gradients(ours, whole)
                if step != 2:
                    for model in (ours, theirs, whole):
                        model.zero_grad(set_to_none=step != 1)


@check()
def a_static_graph_may_begin_without_synchronization() -> None:
    """Where torch's ends in an internal assertion."""
    ddp = Ddp(Crossed(), static_graph=True)
    whole = copy.deepcopy(ddp.module)
    with ddp.no_sync():
        step_once(ddp)
    step_once(ddp, step=1)
    for step in range(2):
        for rank in range(2):
            (whole(batch(step, rank)).square().mean() / 2).backward()
    assert_same_gradients(ddp, whole)


@check(ranks=(2, 3))
def ranks_may_have_static_graphs_of_their_own() -> None:
    """Each rank leaves out what another uses, from the first iteration to the last."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for views in VIEWS:
        torch.manual_seed(0)
        ddp = Ddp(Branches(world + 2), bucket_cap_mb=0, static_graph=True, gradient_as_bucket_view=views)
        whole = copy.deepcopy(ddp.module)
        for step in range(3):
            with reductions() as sizes:
                step_once(ddp, rank, world, step=step)
            for r in range(world):
                (whole(batch(step, r), r, world).square().mean() / world).backward()
            assert_same_gradients(ddp, whole)
            assert len(sizes) == (2 * (world + 2) + 1 if step == 0 else 2 * (world + 1))


@check()
def a_graph_that_has_changed_is_named() -> None:
    more = Ddp(Branches(), static_graph=True)
    step_once(more, 0, 1)
    grown = error_of(step_once, more, 0, 1, 2)
    assert_starts(grown, "RuntimeError: Your training graph has changed in this iteration, e.g., one parameter is unus")
    assert "It is parameter branches.2." in grown
    less = Ddp(Branches(), static_graph=True)
    step_once(less, 0, 1)
    step_once(less, 1)
    error = error_of(step_once, less, 1)
    assert_starts(
        error,
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
        "error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
        "iteration, but then got unused in the second iteration.",
    )
    assert error.endswith(": branches.0.bias, branches.0.weight")


@check()
def a_static_graph_may_be_set_later() -> None:
    ddp = Ddp(Crossed(), bucket_cap_mb=0)
    assert not ddp.static_graph
    ddp._set_static_graph()
    assert ddp.static_graph
    step_once(ddp)
    with reductions() as sizes:
        step_once(ddp)
    assert sizes == [15, 25, 30]
    assert "no need to set it again" in warnings_of(ddp._set_static_graph)[0][1]
    ours, theirs = twins(Crossed, find_unused_parameters=True)
    (category, text), *_ = warnings_of(ours._set_static_graph)
    assert [(category, text[:100])] == [(c, t[:100]) for c, t in warnings_of(theirs._set_static_graph)]


# Communication hooks


def torchs_hooks() -> dict[str, Callable[..., Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

    return {
        "allreduce": hooks.allreduce_hook,
        "fp16": hooks.fp16_compress_hook,
        "bf16": hooks.bf16_compress_hook,
        "wrapped fp16": hooks.fp16_compress_wrapper(hooks.allreduce_hook),
        "wrapped bf16": hooks.bf16_compress_wrapper(hooks.allreduce_hook),
    }


@check()
def hooks_written_for_torch_give_what_they_give_there() -> None:
    for name, hook in torchs_hooks().items():
        for views in VIEWS:
            options = {"bucket_cap_mb": EACH, "gradient_as_bucket_view": views}
            ours, theirs = twins(norm, **options)
            ours.register_comm_hook(None, hook)
            if "bf16" not in name:  # which torch does not allow on CPU: there the plain mean is the reference
                theirs.register_comm_hook(None, hook)
            for step in range(2):
                for model in (ours, theirs):
                    step_once(model, step=step)
                assert_same_gradients(ours, theirs, 2**-6 if "bf16" in name else 1e-6)
                dtype = torch.float16 if "fp16" in name else torch.bfloat16
                grad = ours.module[0].weight.grad
                assert torch.equal(grad.to(dtype).float(), grad) == (name != "allreduce"), "what was sent"


@check()
def power_sgd_works() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    ours, theirs = twins(lambda: nn.Linear(6, 20))
    for model in (ours, theirs):
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook)
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            step_once(model, step=step)
        assert_same_gradients(ours, theirs, 1e-4)


@check()
def a_hook_sees_each_bucket_in_order_with_undivided_gradients() -> None:
    for views in VIEWS:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        alone = copy.deepcopy(model)
        ddp = Ddp(model, bucket_cap_mb=50 / 2**20, gradient_as_bucket_view=views)
        alone.load_state_dict(model.state_dict())
        step_once(alone)
        seen, names = [], {p: name for name, p in model.named_parameters()}

        def hook(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            params, gradients = bucket.parameters(), bucket.gradients()
            for p, gradient in zip(params, gradients, strict=True):
                assert_close(gradient, alone.get_parameter(names[p]).grad, "not divided, not summed over ranks")  # noqa: B023
                assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
            there = sum(p.grad is not None for p in names)  # noqa: B023
            state.append((bucket.index(), bucket.is_last(), [names[p] for p in params], there))  # noqa: B023
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(torch.full_like(bucket.buffer(), bucket.index() + 1))
            return future

        ddp.register_comm_hook(seen, hook)
        step_once(ddp)
        (zero, _, last, after_two), (one, _, first, after_four) = seen
        assert (zero, one, [is_last for _, is_last, *_ in seen]) == (0, 1, [False, True])
        assert (last, first) == (["1.bias", "1.weight"], ["0.bias", "0.weight"])
        assert (after_two, after_four) == (2, 4), "called during backward"
        assert [p.grad.unique().tolist() for p in model.parameters()] == [[2], [2], [1], [1]], "its result is used"


@check()
def a_hook_may_return_the_future_of_a_collective() -> None:
    ddp = Ddp(nn.Linear(6, 3))
    plain = Ddp(copy.deepcopy(ddp.module))
    ddp.register_comm_hook(None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    for model in (ddp, plain):
        step_once(model)
    assert_close(ddp.module.weight.grad, plain.module.weight.grad * dist.get_world_size())


@check()
def hooks_that_are_none_are_refused() -> None:
    def annotated(state: Any, bucket: int) -> Any: ...

    def returning(state: Any, bucket) -> int: ...

    ddp = Ddp(nn.Linear(6, 3))
    assert error_of(ddp.register_comm_hook, None, 3) == "TypeError: Communication hook must be callable."
    assert_starts(error_of(ddp.register_comm_hook, None, annotated), "ValueError: Communication hook: bucket annot")
    assert_starts(error_of(ddp.register_comm_hook, None, returning), "ValueError: Communication hook: return annot")
    ddp.register_comm_hook(None, lambda state, bucket: 3)
    text = "RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once."
    assert error_of(ddp.register_comm_hook, None, lambda state, bucket: 3) == text
    assert "callback must return a torch.futures.Future object, but got int" in error_of(step_once, ddp)


# Uneven numbers of batches

COUNTS = [4, 1, 3]


def in_uneven_steps(model: nn.Module, counts: list[int], how: dict[str, Any], *args: Any) -> list[Tensor]:
    """Train on this rank's number of batches; the losses.

    A step has two backwards, the first of them unsynchronized, but that torch's static graph cannot begin with one.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with model.join(**how):
        for number in range(counts[dist.get_rank()]):
            if not model.static_graph:
                with model.no_sync():
                    step_once(model, *args, step=2 * number)
            losses.append(step_once(model, *args, step=2 * number + 1))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def join_as_torch(counts: list[int], **how: Any) -> None:
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any], tuple[int, ...]]] = [
        (norm, {}, ()),
        *[(norm, {"gradient_as_bucket_view": True, "forward_sync_buffers": False}, ())]
        * ("forward_sync_buffers" in THEIRS),
        (Branches, {"find_unused_parameters": True}, (0, 2)),
        (Crossed, {"static_graph": True}, ()),
    ]
    for build, options, args in cases:
        ours, theirs = twins(build, bucket_cap_mb=EACH, **options)
        losses = [in_uneven_steps(model, counts, how, *args) for model in (ours, theirs)]
        assert torch.allclose(*map(torch.tensor, losses), rtol=1e-5, atol=0), (build, options, how, losses)
        for (name, value), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            if "running" not in name or options.get("forward_sync_buffers", True):
                assert_close(value.float(), other.float(), f"{build}, {options}, {how}: {name}")


@check(ranks=(2, 3))
def by_default_buckets_and_means_are_torchs_bit_for_bit() -> None:
    """Its buckets after its first step; and gradients are divided on their way in, by a factor that 3 ranks round."""
    ours, theirs = twins(lambda: nn.Sequential(*(nn.Linear(400, 400) for _ in range(5))))  # 642 kB each
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            torch.manual_seed(10 * step + dist.get_rank())
            with reductions() as calls:
                model(torch.randn(2, 400)).square().mean().backward()
            if model is ours:
                sizes = [4 * numel for numel in calls]
    assert ", ".join(map(str, sizes)) == theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    for p, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad)


@check(
    ranks=(2, 3),
    wide="combinations",
    counts={"first runs longest": COUNTS, "first ends first": COUNTS[1:] + COUNTS[:1]},
    divisor={"all ranks": {}, "running ranks": {"divide_by_initial_world_size": False}},
)
def uneven_batches_give_the_losses_and_parameters_of_torchs_join(counts: list[int], divisor: dict[str, Any]) -> None:
    join_as_torch(counts, **divisor)


@check(ranks=(2, 3))
def a_rank_may_have_no_batch_at_all() -> None:
    """Also before a static graph has been learnt; afterwards it trains with the others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}):
        torch.manual_seed(0)
        ddp = Ddp(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), bucket_cap_mb=0, **options)
        whole = copy.deepcopy(ddp.module)
        in_uneven_steps(ddp, [0, 2, 1], {})
        ours = torch.cat([p.detach().flatten() for p in ddp.parameters()])
        everyones = [torch.empty_like(ours) for _ in range(world)]
        dist.all_gather(everyones, ours)
        assert all(torch.equal(ours, other) for other in everyones)
        whole.load_state_dict(ddp.module.state_dict())
        for step in range(2):
            step_once(ddp, step=step)
            for r in range(world):
                (whole(batch(step, r)).square().mean() / world).backward()
        assert rank < world
        assert_same_gradients(ddp, whole)


@check(ranks=(2, 3))
def a_rank_that_has_finished_calls_the_communication_hook_too() -> None:
    for name in ("allreduce", "fp16"):
        ours, theirs = twins(norm, bucket_cap_mb=EACH)
        for model in (ours, theirs):
            model.register_comm_hook(None, torchs_hooks()[name])
        losses = [in_uneven_steps(model, COUNTS, {"divide_by_initial_world_size": False}) for model in (ours, theirs)]
        assert torch.allclose(*map(torch.tensor, losses), rtol=1e-3, atol=0), losses


@check()
def a_rank_that_has_finished_keeps_its_gradients() -> None:
    for views in VIEWS:
        ddp = Ddp(nn.Linear(6, 3), gradient_as_bucket_view=views)
        rank = dist.get_rank()
        with ddp.join():
            for number in range(1 + 2 * rank):
                ddp.zero_grad()
                step_once(ddp, step=number)
                before = [p.grad.clone() for p in ddp.parameters()]
        for p, gradient in zip(ddp.parameters(), before, strict=True):
            assert torch.equal(p.grad, gradient)


@check()
def buffers_come_from_a_rank_that_is_running() -> None:
    rank = dist.get_rank()
    ddp = Ddp(norm())
    means = []
    with ddp.join():
        for number in range(1 + 2 * rank):
            step_once(ddp, step=number)
            means.append(ddp.module[1].running_mean.clone())
    assert torch.equal(ddp.module[1].running_mean, means[-1]) == (rank == 1)
    assert int(ddp.module[1].num_batches_tracked) == 3


@check()
def forwards_without_gradients_may_be_uneven_too() -> None:
    ddp = Ddp(norm())
    for _ in range(2):
        with ddp.join():
            for number in range(2 + 2 * dist.get_rank()):
                step_once(ddp, step=number)
                with torch.no_grad():
                    ddp(batch(number, 0))


@check()
def early_termination_ends_all_ranks() -> None:
    rank = dist.get_rank()
    for model in twins(norm):
        error = error_of(in_uneven_steps, model, [1, 3], {"throw_on_early_termination": True})
        if rank == 0:
            assert error == "RuntimeError: Rank 0 exhausted all inputs."
        else:
            assert_starts(error, "RuntimeError: Detected at least one rank that exhausted inputs. Throwing across all")
    ours, _ = twins(norm)
    assert error_of(in_uneven_steps, ours, [2, 2], {"throw_on_early_termination": True}) == "none"
    step_once(ours)  # the ranks are in step


@check()
def after_join_and_without_it_nothing_more_is_communicated() -> None:
    ddp = Ddp(nn.Linear(6, 3), bucket_cap_mb=0)
    with reductions() as sizes:
        in_uneven_steps(ddp, [2, 2], {"enable": False})
    assert sizes == [3, 18] * 2
    in_uneven_steps(ddp, [1, 2], {})
    with pytest.raises(ZeroDivisionError), ddp.join():
        _ = 1 / 0
    if dist.get_rank() == 0:
        with torch.no_grad():
            ddp(batch(0, 0))  # alone: a count of the ranks would not end
    with reductions() as sizes:
        step_once(ddp)
    assert sizes == [3, 18]


@check()
def a_step_in_join_adds_a_count_and_an_agreement() -> None:
    ddp = Ddp(nn.Linear(6, 3), bucket_cap_mb=0)
    with reductions() as sizes, ddp.join():
        step_once(ddp)
        inside = list(sizes)
    assert inside == [1, 3, 3, 18]
    assert sizes == [*inside, 1, 1], "nobody is running; whose parameters all take"


@check()
def two_forwards_before_a_backward_are_refused_in_join() -> None:
    ddp = Ddp(nn.Linear(6, 3))
    with pytest.raises(RuntimeError, match="must be followed by that backward"), ddp.join():
        [ddp(batch(0, 0)) for _ in range(2)]


@check(ranks=(2, 3))
def torchs_join_takes_ours_beside_an_optimizer() -> None:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = []
    for model in twins(norm):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer], divide_by_initial_world_size=False):
            for number in range(COUNTS[dist.get_rank()]):
                step_once(model, step=number)
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.state_dict())
    for (name, value), other in zip(results[0].items(), results[1].values(), strict=True):
        assert_close(value.float(), other.float(), name)


# Arguments and attributes


def test_the_arguments_are_torchs_in_torchs_order_with_torchs_defaults() -> None:
    """Those of torch 2.13; others have fewer or more."""
    ours, theirs = (inspect.signature(cls).parameters for cls in (Ddp, Torchs))
    assert [name for name in ours if name in theirs] == [name for name in theirs if name in ours]
    if IS_LIKE_OURS:
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]
    for name in ("join", "join_hook", "register_comm_hook", "no_sync"):
        ours, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (Ddp, Torchs))
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


ABSENT = {
    "batched_grad_copy",
    "broadcast_bucket_size",
    "bucket_bytes_cap",
    "bucket_bytes_cap_default",
    "gather",
    "logger",
    "mixed_precision",
    "named_module_buffers",
    "scatter",
    "skip_all_reduce_unused_params",
    "to_kwargs",
    "use_side_stream_for_tensor_copies",
}
"""Public names of torch's class that ours has not; docs/parity.md says why."""


@check()
def the_public_names_are_torchs() -> None:
    ours, theirs = twins(lambda: nn.Linear(2, 2))
    absent = {name for name in dir(theirs) if name[0] != "_" and not hasattr(ours, name)}
    assert absent == ABSENT if IS_LIKE_OURS else not hasattr(ours, "scatter")
    for name in ("device", "device_type", "is_multi_device_module", "device_ids", "output_device", "dim"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ABSENT | {"weight"}:  # nor are the module's own attributes forwarded
        assert error_of(getattr, ours, name) == (
            f"AttributeError: 'DistributedDataParallel' object has no attribute '{name}'"
        )
    assert ours.will_sync_module_buffers() is theirs.will_sync_module_buffers() is False
    assert ours.broadcast_buffers
    ours.broadcast_buffers = False
    assert not ours.forward_sync_buffers
    assert not ours.eval().module.training
    assert ours.train().module.training


@check()
def arguments_that_are_refused_say_why() -> None:
    model = nn.Linear(2, 2)
    for arguments in (
        {"delay_all_reduce_named_params": [("weight", model.weight)], "param_to_hook_all_reduce": model.bias},
        {"param_to_hook_all_reduce": model.bias},
        {"mixed_precision": object()},
        {"skip_all_reduce_unused_params": True},
        {"batched_grad_copy": True},
    ):
        with reductions() as sizes:
            error = error_of(Ddp, model, **arguments)
        assert_starts(error, f"NotImplementedError: DistributedDataParallel does not support {next(iter(arguments))}: ")
        assert not sizes
    Ddp(model, skip_all_reduce_unused_params=True, static_graph=True)


@check()
def models_that_would_go_wrong_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.distributed.tensor import distribute_tensor

    model = nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6))
    assert_starts(error_of(Ddp, model), "ValueError: SyncBatchNorm layers only work with GPU modules")
    model = nn.Linear(6, 6)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    assert "weight has an optimizer that steps inside backward" in error_of(Ddp(model), batch(0, 0))
    model = nn.Linear(6, 6)
    model.weight = nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (2,))))
    assert "weight is a DTensor on ranks [0, 1], among which it would be averaged" in error_of(Ddp, model)


@check()
def warnings_are_torchs() -> None:
    for options in (
        {"broadcast_buffers": True},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"check_reduction": True},
        {"static_graph": True, "find_unused_parameters": True},
        {},
    ):
        if not IS_LIKE_OURS and "broadcast_buffers" in options:
            continue
        ours, theirs = (warnings_of(cls, nn.Linear(2, 2), **options) for cls in (Ddp, Torchs))
        assert [(category, text[:50]) for category, text in ours] == [(c, text[:50]) for c, text in theirs], options


@check()
def buffers_are_shared_when_they_are_to_be() -> None:
    rank = dist.get_rank()
    for options, at_init, at_forward in (
        ({}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
    ):
        for wrap in (Ddp, as_torch) if options.keys() <= THEIRS.keys() else (Ddp,):
            model = norm()
            model[1].running_mean.fill_(rank)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ddp = wrap(model, **options)
            assert (model[1].running_mean == (0 if at_init else rank)).all()
            model[1].running_mean.fill_(rank + 1)
            model.eval()
            step_once(ddp)
            assert (model[1].running_mean == (1 if at_forward else rank + 1)).all()


@check()
def a_mesh_stands_for_its_group() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "other"))
    ours, theirs = twins(lambda: nn.Linear(6, 3))
    ours = Ddp(ours.module, device_mesh=mesh["replicas"])
    for model in (ours, theirs):
        step_once(model)
    assert_same_gradients(ours, theirs)
    for options in ({"device_mesh": mesh}, {"device_mesh": mesh["other"], "process_group": dist.group.WORLD}):
        error = error_of(Ddp, nn.Linear(2, 2), **options)
        assert_starts(error, error_of(Torchs, nn.Linear(2, 2), **options))


@check()
def what_is_ignored_stays_each_ranks_own() -> None:
    rank = dist.get_rank()
    for cls in (Ddp, Torchs):
        model = norm()
        own = ("3.bias", "1.running_mean")
        cls._set_params_and_buffers_to_ignore_for_model(model, own)
        with torch.no_grad():
            model[3].bias.fill_(rank)
        model[1].running_mean.fill_(rank)
        ddp = Ddp(model)
        assert (model[3].bias == rank).all()
        alone = copy.deepcopy(model)
        step_once(alone)
        model[1].running_mean.fill_(rank)
        step_once(ddp)
        assert torch.equal(model[1].running_mean, alone[1].running_mean)
        assert_close(model[3].bias.grad, alone[3].bias.grad)
        assert not torch.equal(model[0].weight.grad, alone[0].weight.grad)


@check()
def keyword_arguments_reach_the_module() -> None:
    class Keywords(nn.Linear):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
            return {"out": super().forward(x) * scale}

    ddp = Ddp(Keywords(6, 3))
    x = batch(0, 0)
    assert torch.equal(ddp(x=x, scale=2.0)["out"], 2 * ddp(x)["out"])


@check()
def checkpoints_go_to_torchs_and_back() -> None:
    ours, theirs = twins(norm)
    step_once(theirs)
    with torch.no_grad():
        theirs.module[0].weight.mul_(2)
    for source, target in ((theirs, ours), (ours, theirs)):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        assert next(iter(source.state_dict())) == "module.0.weight"
        target.load_state_dict(torch.load(file))
        assert all(map(torch.equal, source.state_dict().values(), target.state_dict().values()))
    plain = ours.state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(plain, "module.")
    norm().load_state_dict(plain)


@check()
def copies_and_pickles_train_on() -> None:
    hook = torchs_hooks()["fp16"]
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}):
        ddp = Ddp(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), bucket_cap_mb=0, **options)
        ddp.register_comm_hook(None, hook)
        step_once(ddp)
        ddp.zero_grad()
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        copies = [copy.deepcopy(ddp), torch.load(file, weights_only=False)]
        step_once(ddp)
        for each in copies:
            with reductions() as sizes:
                step_once(each)
            assert sizes[:4] == [3, 15, 5, 30]
            assert_same_gradients(each, ddp, 1e-6)
            assert all(p is not q for p, q in zip(each.parameters(), ddp.parameters(), strict=True))
            assert error_of(each.register_comm_hook, None, hook) != "none", "it has its hook"
    ours, theirs = (cls(nn.Linear(2, 2), process_group=dist.new_group([0, 1])) for cls in (Ddp, Torchs))
    assert_starts(error_of(copy.deepcopy, ours), error_of(copy.deepcopy, theirs))


def test_inputs_are_moved_in_any_container() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    tree = ([torch.ones(1), 2, {"a": (torch.ones(1), "b")}], {"packed": packed})
    (first, two, inner), keywords = to_device(tree, torch.device("meta"))
    assert (first.device.type, two, inner["a"][0].device.type, inner["a"][1]) == ("meta", 2, "meta", "b")
    assert keywords["packed"].data.device.type == "meta"
    assert keywords["packed"].batch_sizes.device.type == "cpu"


def test_a_list_of_caps_closes_bucket_after_bucket() -> None:
    params = [nn.Parameter(torch.zeros(numel)) for numel in (4, 4, 4, 4, 4, 4)]
    sizes = [len(bucket) for bucket in assign_buckets(params, [16, 48, 32])]
    assert sizes == [1, 3, 2]
    assert bucket_caps(None, None) == [2**20, 25 * 2**20]
    assert bucket_caps(3, [1, 2]) == [2**20, 2**21]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_of_several_dtypes_are_torchs(seed: int) -> None:
    """One open bucket per dtype and device, each with its turn of the caps, in the order of their beginnings."""
    draw = random.Random(seed)
    kinds = [(dtype, device) for dtype in (torch.float32, torch.bfloat16) for device in ("cpu", "meta")]
    params = []
    for _ in range(draw.randrange(1, 12)):
        dtype, device = draw.choice(kinds)
        params.append(nn.Parameter(torch.zeros(draw.randrange(1, 9), dtype=dtype, device=device)))
    caps = [draw.choice([1, 8, 16, 40, 10**9]) for _ in range(draw.randrange(1, 4))]
    backwards = params[::-1]
    indices, _ = dist._compute_bucket_assignment_by_size(backwards, caps)
    ours = [[next(i for i, q in enumerate(backwards) if q is p) for p in b] for b in assign_buckets(params, caps)]
    assert ours == indices


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
