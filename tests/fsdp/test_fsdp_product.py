"""FSDP computes what torch's FSDP1 computes, whatever is combined.

Strategy, prefetch, precision, accumulation, offload, `use_orig_params`, optimizer.

`make test` and `make test-wide` take enough combinations to see every pair of settings together, the latter most of
those with hybrid sharding; the whole product is marked slow. What torch refuses on CPU is compared with one process.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import cache, partial
from itertools import combinations, product
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from minifsdp import device
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.unit import SHARDED
from minifsdp.instruments.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, ROWS, STEPS = 5, 4, 2


class Case(NamedTuple):
    """One combination. Its names are torch's, so that one case describes torch's wrapper and ours."""

    strategy: str
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    precision: str
    accumulation: str
    offload: bool
    use_orig_params: bool
    optimizer: str

    def __str__(self) -> str:
        flags = [name for name, value in self._asdict().items() if value is True]
        names = [str(value) for value in self if not isinstance(value, bool)]
        return "-".join([*names, *flags]).replace(" ", "_")


PRECISIONS = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "bf16 reduced in fp32": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, None),
}
ACCUMULATION = {
    "none": "s",
    "inside": "nns",
    "outside": "sss",
    "mixed": "nsns",
}  # a micro-batch each; n: inside no_sync
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.001, momentum=0.9),
    # a large eps: else the last bit of a gradient near zero decides the direction of an update as large as any
    "adamw": partial(torch.optim.AdamW, lr=0.003, eps=0.1),
}


def axes(*strategies: str) -> list[Sequence[Any]]:
    prefetch = ("BACKWARD_PRE", "BACKWARD_POST", None), (False, True), (True, False)
    return [strategies, *prefetch, [*PRECISIONS], [*ACCUMULATION], (False, True), (False, True), [*OPTIMIZERS]]


STRATEGIES = {2: ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), 4: ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")}


def pairs(row: Sequence[Any]) -> set[Any]:
    return set(combinations(enumerate(row), 2))


@cache
def pairwise(ranks: int) -> list[Case]:
    """Rows of the product in which every two values of two axes meet: always the row that adds most pairs."""
    rows = [Case(*row) for row in product(*axes(*STRATEGIES[ranks]))]
    missing = set().union(*(pairs(row) for row in rows))
    chosen = []
    while missing:
        # the one in seven that is looked at differs each time; all are, once the rest is few
        candidates = rows[len(chosen) % 7 :: 7] if len(missing) > 20 else rows
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


# The model: a weight used twice in its unit, odd sizes (there is padding), a buffer, an inner unit in a unit


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.weight
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight + self.bias)
        return self.again(x if self.inner is None else x + self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(Block()), Block())
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("mean", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x))) - self.mean


def is_a_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


# Who trains: each gives losses, and gradients and parameters whole, under the original names

Named = dict[str, Tensor]


class OneProcess:
    """The plain model, computing what every rank computes; the reference for what torch cannot do on CPU."""

    def __init__(self, case: Case, mesh: Any) -> None:
        self.mesh = mesh
        self.param_dtype, reduce_dtype = (dtype or torch.float32 for dtype in PRECISIONS[case.precision])
        self.reduce_dtype = reduce_dtype if PRECISIONS[case.precision][1] else self.param_dtype
        torch.manual_seed(3)
        self.model: Any = self.wrap(Net(), case)
        self.taken: dict[tuple[int, str], Tensor] = {}  # gradients by rank and name

    def wrap(self, net: Net, case: Case) -> nn.Module:
        return net

    def micro_batch(self, x: Tensor, sync: bool) -> Tensor:
        losses = []
        buffers = {name: buffer.to(self.param_dtype) for name, buffer in self.model.named_buffers()}
        for rank, rows in enumerate(x):
            low = {name: p.detach().to(self.param_dtype).requires_grad_() for name, p in self.model.named_parameters()}
            output = functional_call(self.model, {**low, **buffers}, rows.to(self.param_dtype))
            losses.append((output.float() - 3).square().mean())
            losses[-1].backward()
            for name, p in low.items():
                gradient = p.grad.to(self.reduce_dtype)
                self.taken[rank, name] = self.taken.get((rank, name), torch.zeros_like(gradient)) + gradient
        if sync:
            for name, p in self.model.named_parameters():
                mean = mean_in_pairs([self.taken[rank, name] for rank in range(len(x))]).float()
                p.grad = mean if p.grad is None else p.grad + mean
            self.taken.clear()
        return torch.stack(losses).mean().detach()

    def gradients(self) -> Named:
        return {name: p.grad.float().clone() for name, p in self.model.named_parameters()}

    def parameters(self) -> Named:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def check_nothing_left(self) -> None:
        """After a step."""


def mean_in_pairs(parts: list[Tensor]) -> Tensor:
    """Inside the pairs first, then of these: as hybrid sharding rounds."""
    while len(parts) > 1:
        parts = [(one + other) / 2 for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Ranks(OneProcess):
    """An FSDP wrapper: torch's, if `package` is `torch.distributed.fsdp`."""

    package: Any

    def wrap(self, net: Net, case: Case) -> nn.Module:
        fsdp = self.package
        param_dtype, reduce_dtype = PRECISIONS[case.precision]
        options: dict[str, Any] = {}
        if "HYBRID" in case.strategy:
            options["device_mesh"] = self.mesh
        if param_dtype is not None:
            options["mixed_precision"] = fsdp.MixedPrecision(param_dtype, reduce_dtype, buffer_dtype=param_dtype)
        return fsdp.FullyShardedDataParallel(
            net,
            sharding_strategy=fsdp.ShardingStrategy[case.strategy],
            cpu_offload=fsdp.CPUOffload(case.offload),
            auto_wrap_policy=is_a_unit,
            backward_prefetch=case.backward_prefetch and fsdp.BackwardPrefetch[case.backward_prefetch],
            forward_prefetch=case.forward_prefetch,
            limit_all_gathers=case.limit_all_gathers,
            use_orig_params=case.use_orig_params,
            device_id=torch.device("cpu"),
            **options,
        )

    def micro_batch(self, x: Tensor, sync: bool) -> Tensor:
        with contextlib.nullcontext() if sync else self.model.no_sync():
            loss = (self.model(x[dist.get_rank()]).float() - 3).square().mean()
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def gradients(self) -> Named:
        return self.exchanged(lambda p: p.grad)

    def parameters(self) -> Named:
        with self.package.FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {clean(name): p.detach().clone() for name, p in self.model.named_parameters()}

    def exchanged(self, pick: Any) -> Named:
        """Gradients whole: put where the parameters are for a moment, and read as those are."""
        shards = list(self.model.parameters())
        values = [p.detach().clone() for p in shards]
        picked = [pick(p) for p in shards]
        with torch.no_grad():
            for p, gradient in zip(shards, picked, strict=True):
                p.zero_() if gradient is None else p.copy_(gradient)
            found = self.parameters()
            for p, value in zip(shards, values, strict=True):
                p.copy_(value)
        return found


class Torchs(Ranks):
    @property
    def package(self) -> Any:
        import torch.distributed.fsdp as package  # where it is used: that takes seconds

        return package


class Ours(Ranks):
    @property
    def package(self) -> Any:
        import minifsdp.fsdp as package

        return package

    def wrap(self, net: Net, case: Case) -> nn.Module:
        self.buffers: list[Any] = []
        device.buffer_observers.append(lambda buffer, role: self.buffers.append((buffer.untyped_storage(), role)))
        self.sharded = case.strategy != "NO_SHARD"
        return super().wrap(net, case)

    def check_nothing_left(self) -> None:
        """No unit is gathered and no gathered memory alive."""
        if self.sharded:
            units = [m._unit for m in FullyShardedDataParallel.fsdp_modules(self.model)]
            assert all(unit.state is SHARDED and not unit.has_gradient for unit in units)
            assert not any(storage.nbytes() for storage, role in self.buffers if role == "unsharded")


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def train(kind: type[OneProcess], case: Case, mesh: Any) -> Named:
    """The losses and gradients of every step, and how far each parameter has moved at the end."""
    before = device.buffer_observers[:]
    ranks = dist.get_world_size()
    trainer = kind(case, mesh)
    optimizer = OPTIMIZERS[case.optimizer](trainer.model.parameters())
    start = trainer.parameters()
    numbers = torch.Generator().manual_seed(5)
    record: Named = {}
    for step in range(STEPS):
        for i, letter in enumerate(ACCUMULATION[case.accumulation]):
            x = torch.randn(ranks, ROWS, WIDTH, generator=numbers)
            record[f"step {step}, loss {i}"] = trainer.micro_batch(x, letter == "s")
        for name, gradient in trainer.gradients().items():
            record[f"step {step}, gradient of {name}"] = gradient
        optimizer.step()
        optimizer.zero_grad()
        trainer.check_nothing_left()
    for name, value in trainer.parameters().items():
        record[f"change of {name}"] = value - start[name]
    device.buffer_observers[:] = before
    return record


def differences(record: Named, reference: Named, tolerance: float) -> list[str]:
    """What differs by more than `tolerance` times the tensor's greatest element."""
    assert list(record) == list(reference)
    found = []
    for name, expected in reference.items():
        value = record[name]
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
        difference, scale = (value - expected).abs().max().item(), expected.abs().max().item()
        assert scale > 0, name
        rounding = 2**-22 if name.startswith("change") else 0.0  # of the parameter itself, in fp32
        if not difference <= tolerance * scale + rounding:
            found.append(f"{name} differs by {difference:.1e} of {scale:.1e}")
    return found


def torch_can(case: Case) -> bool:
    """On CPU torch's offload fails at `pin_memory`.

    And NO_SHARD cannot accumulate in low precision: with `use_orig_params` torch fails on the dtype of the gradients
    that `no_sync` has left, and else it rounds what it accumulates more than once.
    """
    low_and_replicated = case.strategy == "NO_SHARD" and case.precision != "fp32"
    return not case.offload and not (low_and_replicated and case.accumulation != "none")


def tolerance(case: Case) -> float:
    return {"fp32": 1e-5, "fp16": 2**-9}.get(case.precision, 2**-7)


def compare_all(cases: list[Case], share_references: bool = False) -> list[str | None]:
    """What is wrong with each case; None if nothing is.

    Args:
        share_references: train torch's once for all prefetches: when it gathers makes no difference to the result.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None
    shared = cache(partial(train, mesh=mesh))

    def compare(case: Case) -> str | None:
        prefetch = {"backward_prefetch": None, "forward_prefetch": False, "limit_all_gathers": True}
        same = case._replace(**prefetch) if share_references else case
        try:
            record = train(Ours, case, mesh)
            reference = shared(Torchs if torch_can(case) else OneProcess, same)
            return "\n".join(differences(record, reference, tolerance(case))[:4]) or None
        except Exception:
            return traceback.format_exc(limit=-5)

    return [compare(case) for case in cases]


@cache
def verdicts(ranks: int, first: int, end: int | None) -> dict[Case, list[str]]:
    """What any rank finds wrong with each of these cases: one launch."""
    cases = pairwise(ranks)[first:end]
    said = zip(*launch(compare_all, ranks, cases, timeout=160), strict=True)
    lines = [[f"rank {rank}: {line}" for rank, line in enumerate(each) if line] for each in said]
    return dict(zip(cases, lines, strict=True))


# The first cases have the most pairs.
PARTS = {(2, 0, None): (), (4, 0, 5): (), (4, 5, None): (pytest.mark.wide,)}


@pytest.mark.behaviour(23, 24, 26, 30, 31, 33, 44)
@pytest.mark.parametrize(
    ("part", "case"),
    [
        pytest.param(part, case, id=str(case), marks=marks)
        for part, marks in PARTS.items()
        for case in pairwise(part[0])[slice(*part[1:])]
    ],
)
def test_a_combination_trains_as_torch_s_does(part: tuple[int, int, int | None], case: Case) -> None:
    found = verdicts(*part)[case]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(ranks, strategy) for ranks in STRATEGIES for strategy in STRATEGIES[ranks]]
)
def test_every_combination_trains_as_torch_s_does(ranks: int, strategy: str, precision: str) -> None:
    cases = [case for row in product(*axes(strategy)) if (case := Case(*row)).precision == precision]
    said = launch(compare_all, ranks, cases, True, timeout=1700)
    wrong = {str(case): lines for case, *lines in zip(cases, *said, strict=True) if any(lines)}
    assert not wrong, "\n".join(f"{case}: {lines}" for case, lines in [*wrong.items()][:5])


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_the_chosen_combinations_have_every_pair(ranks: int) -> None:
    everything = set().union(*(pairs(row) for row in product(*axes(*STRATEGIES[ranks]))))
    assert set().union(*map(pairs, pairwise(ranks))) == everything
    assert len(pairwise(ranks)) < 40
