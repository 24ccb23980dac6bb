"""ZeRO and parameters without a gradient: frozen, never used, used by some ranks, used now and then; as torch.optim."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam

from minifsdp import comm
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

check = Checks(__name__)

STAGES = [Zero1Optimizer, Zero2Optimizer]
CAP = 400 / 2**20  # MiB: two or three parameters to a bucket
SETTINGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (Adagrad, {"lr": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    "NAdam": (NAdam, {"lr": 0.1}),
}


class Experts(nn.Module):
    """Which experts compute is up to the caller. Two share a weight, one more is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.experts[3].weight = self.experts[0].weight
        self.never = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        x = self.stem(x)
        for index in route:
            x = x + self.experts[index](x).tanh()
        return (x * self.scale).square().mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05}]


def gradients_of_all(model: Experts, batches: list[tuple[Tensor, list[int]]]) -> dict[Tensor, Tensor]:
    """The mean over the ranks, of what any of them uses."""
    means: dict[Tensor, Tensor] = {}
    for x, route in batches:
        params = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(model(x, route), params, allow_unused=True)
        for p, grad in zip(params, grads, strict=True):
            if grad is not None:
                means[p] = means.get(p, 0) + grad / len(batches)
    return means


def accumulate(means: dict[Tensor, Tensor]) -> None:
    for p, grad in means.items():
        p.grad = grad if p.grad is None else p.grad + grad


def assert_same_training(ours: tuple[Experts, Any], theirs: tuple[Experts, torch.optim.Optimizer], when: str) -> None:
    for (name, p), q in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{when}, {name}: {text}")
    torch.testing.assert_close(ours[1].state_dict(), theirs[1].state_dict(), rtol=1e-9, atol=1e-11)


@check(ranks=(2, 3), stage=STAGES, setting=SETTINGS, wide="combinations")
def training_is_that_of_torch_optim(stage: Any, setting: tuple[Any, dict[str, Any]]) -> None:
    """Ranks route at random; parts are frozen and thawed; gradients are dropped, zeroed and accumulated."""
    optimizer_class, defaults = setting
    chance = random.Random(dist.get_world_size())  # the same on all ranks
    numbers = torch.Generator().manual_seed(0)
    plain = Experts()
    model = deepcopy(plain)
    theirs = optimizer_class(groups(plain), **defaults)
    make = lambda: stage(groups(model), optimizer_class, bucket_cap_mb=CAP, **defaults)  # noqa: E731
    ours = make()
    for step in range(10):
        frozen = chance.sample(["stem", "experts.0", "experts.1", "experts.2"], chance.choice([0, 0, 1, 3]))
        for each in (plain, model):
            for name, p in each.named_parameters():
                p.requires_grad_(not any(name.startswith(f"{part}.") for part in frozen))
        to_none = chance.random() < 0.7
        for optimizer in (theirs, ours):
            optimizer.zero_grad(to_none)
        for _ in range(chance.choice([1, 1, 2])):
            draw = lambda: torch.randn(2, 3, generator=numbers, dtype=torch.float64)  # noqa: E731
            batches = [(draw(), chance.sample(range(4), chance.randrange(4))) for _ in range(dist.get_world_size())]
            accumulate(gradients_of_all(plain, batches))
            model(*batches[dist.get_rank()]).backward()
        theirs.step()
        ours.step()
        assert_same_training((model, ours), (plain, theirs), f"step {step}")
        if step == 5:  # both go on from the state of a plain optimizer, some of whose parameters have none
            state = theirs.state_dict()
            for each in (plain, model):
                each.requires_grad_(True)
            theirs, ours = optimizer_class(groups(plain), **defaults), make()
            theirs.load_state_dict(deepcopy(state))
            ours.load_state_dict(deepcopy(state))


@check(ranks=2, stage=STAGES)
def equal_counts_of_steps_are_put_together_again(stage: Any) -> None:
    """A bucket whose parameters have had the same number of steps is updated in one, and a loaded state decides."""
    model = Experts()
    optimizer = stage(model.parameters(), Adam, bucket_cap_mb=1)
    fresh = optimizer.state_dict()
    model(torch.ones(2, 3, dtype=torch.float64), [0, 1]).backward()
    optimizer.step()
    (bucket,) = optimizer.buckets
    assert len(bucket.shards) == len(bucket.params)
    assert len(optimizer.state_dict()["state"]) == len(bucket.params) - 5  # expert 2, the bias of 3, never
    optimizer.load_state_dict(fresh)
    assert len(bucket.shards) == 1
    assert not optimizer.inner.state


@contextmanager
def count(op: str) -> Iterator[list[comm.Call]]:
    calls: list[comm.Call] = []
    with comm.record() as log:
        yield calls
    calls += [call for call in log if call.op == op]


@check(ranks=2, stage=STAGES)
def a_bucket_without_gradients_is_left_alone(stage: Any) -> None:
    """Neither updated nor gathered, nor reduced by stage 1, and its gradient's memory is given back."""
    with Ledger() as ledger:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = stage(model.parameters(), AdamW, bucket_cap_mb=0)
        ledger.watch(model, optimizer)
        model[1].requires_grad_(False)
        loss = model(torch.ones(2, 4)).sum()
        with count("reduce_scatter") as reductions:
            loss.backward()
            optimizer.reduce_gradients()
        with count("all_gather") as gathers:
            optimizer.step()
        assert len(reductions) == (2 if stage is Zero1Optimizer else 4)
        assert len(gathers) == 2
        shards = 4 * (16 + 4) // 2
        assert ledger.mark("step")["optimizer"] == 2 * shards + 2 * 4
        assert ledger.live()["gradients"] == (2 * shards if stage is Zero1Optimizer else shards)
        optimizer.zero_grad()
        assert ledger.live()["gradients"] == 0


@check(ranks=2)
def what_is_frozen_keeps_no_bucket_waiting() -> None:
    """Stage 2 reduces a frozen last layer's bucket, and those before it, while backward goes on."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    optimizer = Zero2Optimizer(model.parameters(), AdamW, bucket_cap_mb=0)
    model[3].requires_grad_(False)
    seen: list[int] = []
    with comm.record() as log:
        model[0].weight.register_hook(lambda _: seen.append(sum(call.op == "reduce_scatter" for call in log)))
        model(torch.ones(2, 4)).sum().backward()
    assert seen == [3]  # the frozen one's, and two more
    optimizer.step()


@check(ranks=2, stage=STAGES)
def scaling_and_clipping_see_the_parts_of_a_split_bucket(stage: Any) -> None:
    plain = Experts()
    model = deepcopy(plain)
    theirs, ours = AdamW(plain.parameters(), lr=0.1), stage(model.parameters(), AdamW, bucket_cap_mb=1, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    for number in range(3):
        batches = [(torch.full((2, 3), 1.0 + rank, dtype=torch.float64), [rank, number]) for rank in range(2)]
        accumulate(gradients_of_all(plain, batches))
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()
        scaler.scale(model(*batches[dist.get_rank()])).backward()
        scaler.unscale_(ours)
        with count("all_reduce") as norms:
            torch.testing.assert_close(ours.clip_grad_norm_(0.05), expected)
            scaler.step(ours)
        assert len(norms) == 1, "the ranks have agreed once what is used, when the gradients were unscaled"
        scaler.update()
        ours.zero_grad()
        assert_same_training((model, ours), (plain, theirs), f"step {number}")


class Counting(SGD):
    """Writes a number of its own to its groups, and wants to be given another."""

    def step(self, closure: Any = None, *, weight: float) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + weight
        super().step()


@check(ranks=2, stage=STAGES)
def the_inner_optimizer_gets_arguments_and_its_groups_keys_are_seen(stage: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = stage(model.parameters(), Counting, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step(weight=2.0)
    optimizer.step(lambda: 1.5, weight=1.0)
    assert optimizer.param_groups[0]["seen"] == 5.0
    assert optimizer.state_dict()["param_groups"][0]["seen"] == 5.0
    with pytest.raises(TypeError, match="weight"):
        optimizer.step()


@check(ranks=2, stage=STAGES)
def what_is_sparse_is_named(stage: Any) -> None:
    sparse = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="parameter 1 of group 0 is sparse"):
        stage([nn.Parameter(torch.ones(2)), sparse], SGD, lr=0.1)
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    optimizer = stage(model.named_parameters(), SGD, lr=0.1)

    def backward_and_step() -> None:
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"parameter 0\.weight has a sparse gradient.*sparse=False"):
        backward_and_step()


@check(ranks=2, stage=STAGES)
def a_loss_of_none_of_the_parameters_moves_nothing(stage: Any) -> None:
    """Without gradients a step is a step of nothing; with all parameters frozen too."""
    model = nn.Linear(4, 4)
    before = deepcopy(model.state_dict())
    stage(model.parameters(), AdamW, weight_decay=0.1).step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    stage(model.requires_grad_(False).parameters(), AdamW, weight_decay=0.1).step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
