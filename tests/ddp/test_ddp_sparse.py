"""DDP with sparse gradients, and what it says of itself: beside torch's on gloo."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Theirs

from minifsdp import comm
from minifsdp.ddp import DistributedDataParallel as Ours
from minifsdp.ddp import NaiveDDP
from minifsdp.instruments.launch import launch

check = Checks(__name__)


class Words(nn.Module):
    """Two sparse embeddings, of which a batch may leave one out, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.words = nn.Embedding(7, 3, sparse=True)
        self.bags = nn.EmbeddingBag(5, 3, mode="sum", sparse=True)
        self.last = nn.Linear(4, 2)
        self.double()

    def forward(self, words: Tensor, bags: Tensor | None) -> Tensor:
        x = self.words(words)
        if bags is not None:
            x = x + self.bags(bags)
        return self.last(self.first(x).tanh())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Ranks have rows in common, several times, and rows of their own."""
    return torch.tensor([rank, rank + 1, 1, (step + 3 * rank) % 7]), torch.tensor([[step % 5, rank]] * 4)


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert p.grad.layout == q.grad.layout, name
            torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), rtol=1e-9, atol=1e-12)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 1e-5},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
HOOKS: dict[str, Callable[..., Any] | None] = {"no hook": None, "allreduce": default_hooks.allreduce_hook}


@check(ranks=(2, 3), options=SETTINGS, hook=HOOKS)
def sparse_gradients_are_torchs(options: dict[str, Any], hook: Callable[..., Any] | None) -> None:
    """Steps, accumulation on a mean, and inside no_sync."""
    model, rank = Words(), dist.get_rank()
    ours, theirs = Ours(model, **options), Theirs(deepcopy(model), **options)
    if hook is not None:
        ours.register_comm_hook(None, hook)
        theirs.register_comm_hook(None, hook)
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for ddp in (ours, theirs)]
    for step in range(5):
        for ddp in (ours, theirs):
            if step == 3:
                with ddp.no_sync():
                    ddp(*batch(7, rank)).square().sum().backward()
            ddp(*batch(step, rank)).square().sum().backward()
        assert_same_gradients(ours.module, theirs.module)
        assert ours.module.words.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
            if step != 1:
                optimizer.zero_grad(set_to_none=step != 2)


@check(ranks=(2, 3), options=[{"find_unused_parameters": True}, {"static_graph": True}])
def an_embedding_may_be_left_out_by_some_ranks_or_all(options: dict[str, Any]) -> None:
    """Where torch raises. One process is the measure."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for users in ([0], []):
        plain = Words()
        ours = Ours(deepcopy(plain), **options)
        for step in range(2):
            for each in range(ranks):
                words, bags = batch(step, each)
                (plain(words, bags if each in users else None).sum() / ranks).backward()
            words, bags = batch(step, rank)
            ours(words, bags if rank in users else None).sum().backward()
            assert_same_gradients(ours.module, plain)


@check(ranks=2, divided_by=[1, 2])
def ranks_may_run_out_of_batches(divided_by: int) -> None:
    """The gradient is divided by the ranks that still run or by all of them. (Torch's own `join` raises.)"""
    rank, plain = dist.get_rank(), Words()
    ours = Ours(deepcopy(plain))
    (plain(*batch(1, 1)).sum() / divided_by).backward()
    with ours.join(divide_by_initial_world_size=divided_by == 2):
        for step in range(1 + rank):
            ours.zero_grad()
            ours(*batch(step, rank)).sum().backward()
    if rank == 1:
        assert_same_gradients(ours.module, plain)


@check(ranks=2)
def only_the_rows_that_are_used_travel() -> None:
    ddp = Ours(nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Linear(4, 1, bias=False)))
    with comm.record() as log:
        ddp(torch.arange(3 - dist.get_rank())).sum().backward()
    gathers = [call.payload for call in log if call.op == "all_gather"]
    assert gathers == [2 * 8, 2 * 3 * 8, 2 * 3 * 4 * 4]  # the numbers of rows, 3 indices, 3 rows of 4
    assert [call.payload for call in log if call.op == "all_reduce"] == [4 * 4]


@check(ranks=2)
def a_weight_that_is_also_used_densely_is_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    ddp = Ours(model)
    loss = ddp(torch.tensor([1])).sum()
    with pytest.raises(RuntimeError, match=r"Expected variable to have sparse gradient. The weight \[4, 3\] of an emb"):
        loss.backward()
    with pytest.raises(ValueError, match=r"^0 makes sparse gradients: use sparse=False, or DistributedDataParallel"):
        NaiveDDP(model)


# --- what a model says of itself --------------------------------------------------------------------------------------

BY_THE_CLOCK = ("_time", "time_")
OF_THE_ENVIRONMENT = ("gloo_", "nccl_", "master_", "cuda_", "torch_distributed_debug")
OF_REBUILDING = ("prev_iteration_grad_ready_order_indices", "rebuilt_", "has_rebuilt")  # torch's default does it


def said_by(ddp: nn.Module) -> dict[str, Any]:
    left_out = (*BY_THE_CLOCK, *OF_THE_ENVIRONMENT, *OF_REBUILDING)
    return {k: v for k, v in ddp._get_ddp_logging_data().items() if not any(word in k for word in left_out)}


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).sum()


LOGGED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "default": (lambda: nn.Linear(3, 2).double(), {}),
    "buffers": (lambda: nn.BatchNorm1d(3), {"broadcast_buffers": False}),
    "unused": (Half, {"find_unused_parameters": True, "bucket_cap_mb": 7}),
    "static": (Half, {"static_graph": True, "gradient_as_bucket_view": True}),
}


@check(ranks=2, case=LOGGED)
def logging_data_are_torchs(case: tuple[Callable[[], nn.Module], dict[str, Any]]) -> None:
    build, options = case
    model = build()
    ours, theirs = Ours(model, **options), Theirs(deepcopy(model), **options)
    x = torch.ones(2, 3, dtype=next(model.parameters()).dtype)
    assert said_by(ours) == said_by(theirs)
    for _ in range(4):
        for ddp in (ours, theirs):
            ddp(x).sum().backward()
    assert said_by(ours) == said_by(theirs)
    for ddp in (ours, theirs):
        with ddp.join():
            ddp(x).sum().backward()
    assert said_by(ours) == said_by(theirs)
    assert said_by(ours)["join_uneven_inputs"] == 1


@check(ranks=2)
def a_static_graph_says_how_its_buckets_were_built_again() -> None:
    options = {"static_graph": True, "bucket_cap_mb": 1e-6}
    ours, theirs = Ours(Half(), **options), Theirs(Half(), **options)
    for _ in range(4):
        for ddp in (ours, theirs):
            ddp(torch.ones(2, 3)).backward()
    mine, torchs = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    assert mine["has_rebuilt_buckets"] == torchs["has_rebuilt_buckets"] == 1
    assert mine["rebuilt_bucket_sizes"] == "8, 24"  # those that are used
    ours, theirs = Ours(Half(), **options), Theirs(Half(), **options)
    for ddp in (ours, theirs):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    assert ours._get_ddp_logging_data()["comm_hook"] == theirs._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


def with_a_hook(hook: str) -> str:
    ddp = Ours(Words().float())
    match hook:
        case "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "powerSGD":
            ddp.register_comm_hook(
                powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
            )
    try:
        for step in range(3):
            ddp(*batch(step, dist.get_rank())).square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "it works"


@pytest.mark.parametrize("hook", ["fp16", "powerSGD"])
def test_a_hook_that_cannot_do_with_sparse_gradients_is_named(hook: str) -> None:
    """Torch fails as well, in the words of the operator that the hook calls."""
    name = rf"{hook}_\w+ has failed on the sparse gradient of a weight \[[57], 3\]"
    for said in launch(with_a_hook, 2, hook):
        assert re.match(f"the communication hook {name}", said)
