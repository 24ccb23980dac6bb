"""No schedule of minifsdp's has a hazard on the GPU on paper, and each of its waits is there for one that it avoids.

The programs are recorded with real tensors on a link that carries nothing: what is in them does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from minifsdp import comm, process_groups
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    ShardingStrategy,
    SyncSchedule,
)
from minifsdp.fsdp.schedules.prefetch import POST, PRE
from minifsdp.fsdp.torch_api.groups import Groups
from minifsdp.gpt import GPT, Block
from minifsdp.instruments.machine import A100, Program, record_steps, replay
from minifsdp.instruments.machine.paper import PaperGroup
from minifsdp.instruments.machine.program import (
    COMPUTE,
    STEP,
    Instruction,
    Issue,
    Mark,
    RecordStream,
    Synchronize,
    Wait,
    WaitEvent,
)
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer
from minifsdp.zero import parameters as zero_parameters

SCHEDULES: dict[str, Any] = {"sync": SyncSchedule, "overlap": OverlapSchedule} | {
    f"{name}-{backward.name[9:]}-{depth}": partial(make, backward=backward, depth=depth)
    for name, make in (("prefetch", PrefetchSchedule), ("limit", RateLimitedSchedule))
    for backward in (PRE, POST)
    for depth in (1, None)
}
COMBINED = ("prefetch-PRE-None", "prefetch-POST-1", "limit-PRE-1", "limit-POST-None")  # the others have all options
BF16 = MixedPrecision(torch.bfloat16, torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "hybrid": {"strategy": ShardingStrategy.HYBRID_SHARD},
    "offload": {"cpu_offload": CPUOffload(True)},
    "not sharded, bf16": {"strategy": ShardingStrategy.NO_SHARD, "mixed_precision": BF16},
    "hybrid, bf16, original parameters, clipping, accumulation": {
        "strategy": ShardingStrategy.HYBRID_SHARD,
        "mixed_precision": BF16,
        "use_orig_params": True,
        "with_all": True,
    },
}


def _zero(stage: Any, model: GPT) -> Trainer:
    optimizer = stage(model.parameters(), AdamW, PaperGroup(2), bucket_cap_mb=0.05, foreach=False)
    return Trainer(model, optimizer, [lambda: optimizer.clip_grad_norm_(1.0)])


def _ddp(model: GPT, **options: Any) -> Trainer:
    group: Any = PaperGroup(2)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.05, init_sync=False, **options)
    return Trainer(ddp, AdamW(ddp.parameters(), foreach=False))


RUNGS: dict[str, Callable[..., Trainer]] = {
    "DDP": _ddp,
    "DDP, buckets are gradients": partial(_ddp, gradient_as_bucket_view=True),
    "ZeRO-1": partial(_zero, Zero1Optimizer),
    "ZeRO-2": partial(_zero, Zero2Optimizer),
}
GATHERS, REDUCTIONS = 1, 2  # the streams, in the order in which an OverlapSchedule makes them


class Nowhere:
    """A link that carries nothing, at once."""

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> Nowhere:
        return self

    def wait(self) -> None: ...


@pytest.fixture(autouse=True)
def no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "link", Nowhere())


@pytest.fixture(params=[pytest.param(each, marks=[pytest.mark.wide] * (each in COMBINED)) for each in SCHEDULES])
def name(request: pytest.FixtureRequest) -> str:
    schedule: str = request.param
    return schedule


class Small(nn.Module):
    """As many units as a GPT, with as few operators as will do: a schedule sees units only."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(48, 48)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(257, 48), nn.Linear(48, 257)
        self.blocks = nn.ModuleList(Small.Block() for _ in range(4))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def gpt() -> GPT:
    return GPT(width=48, layers=4, context=8)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Accumulating(nn.Module):
    """Two micro-batches in a step, the first without communication of gradients."""

    def __init__(self, model: FullyShardedDataParallel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        with self.model.no_sync():
            self.model(tokens, targets).backward()
        return self.model(tokens, targets)


def build(
    name: str,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    with_all: bool = False,
    make: Callable[[], Any] = Small,
    **options: Any,
) -> Trainer:
    whole = make()
    if with_all:
        whole.blocks[1] = Checkpointed(whole.blocks[1])  # a checkpoint around a unit
    model = FullyShardedDataParallel(
        whole,
        Groups(PaperGroup(2), PaperGroup(2) if strategy.is_hybrid else None),  # type: ignore[arg-type]
        strategy,
        auto_wrap_policy={Block, Small.Block},
        schedule=SCHEDULES[name],
        **options,
    )
    if with_all:
        model.module.blocks[2].module.forward = _inside(model.module.blocks[2].module)  # and one within
    optimizer = AdamW(model.parameters(), foreach=False)
    if not with_all:
        return Trainer(model, optimizer)
    return Trainer(Accumulating(model), optimizer, [lambda: model.clip_grad_norm_(1.0)])


def _inside(block: nn.Module) -> Callable[[Tensor], Any]:
    forward = type(block).forward
    return lambda x: checkpoint(partial(forward, block), x, use_reentrant=False)


@cache
def three_steps(name: str) -> Program:
    """The first has no order to follow yet."""
    return record(name, steps=3)


def record(name: str, steps: int = 2, **kwargs: Any) -> Program:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return record_steps(partial(build, name, **kwargs), (tokens, tokens), steps)


def hazards(program: Program, without: Callable[[Instruction], bool] = lambda each: False) -> set[str]:
    """Kinds of hazards of the program, less some of its instructions."""
    kept = [each for each in program.instructions if not without(each)]
    return {hazard.kind for hazard in replay(Program(kept, program.buffers), A100).hazards}


def test_no_schedule_has_a_hazard_with_all_that_a_step_may_have(name: str) -> None:
    """Accumulation, checkpoints around and inside a unit, clipping."""
    assert replay(record(name, with_all=True), A100).hazards == []


@pytest.mark.parametrize("name", ["overlap", "prefetch-PRE-None", "limit-PRE-None"])
def test_nor_with_parameters_that_stay_from_forward_to_backward(name: str) -> None:
    program = record(name, 3, strategy=ShardingStrategy.SHARD_GRAD_OP, make=gpt)
    assert hazards(program) == set()
    grads = hazards(program, lambda each: isinstance(each, RecordStream) and is_a(program, each, "gradients"))
    assert grads == ({"reused too early"} if name != "prefetch-PRE-None" else set())


@pytest.mark.parametrize("name", ["overlap", "limit-PRE-None"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nor_with_any_option(monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]) -> None:
    monkeypatch.setattr(process_groups, "global_ranks", lambda group: [0, 1])  # groups of paper have none
    program = record(name, make=gpt, **options)
    assert hazards(program) == set()

    def is_needed(each: Instruction) -> bool:
        if options.get("strategy") is ShardingStrategy.HYBRID_SHARD:
            return isinstance(each, Wait) and each.call.op == "all_reduce"
        return isinstance(each, WaitEvent) and each.stream == (GATHERS if "cpu_offload" in options else COMPUTE)

    assert "missing wait" in hazards(program, is_needed)


@pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
def test_nor_have_the_rungs_before(monkeypatch: pytest.MonkeyPatch, rung: Callable[..., Trainer]) -> None:
    monkeypatch.setattr(zero_parameters, "check_same_on_all_ranks", lambda *_: None)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    program = record_steps(partial(rung, gpt()), (tokens, tokens), steps=2)
    assert hazards(program) == set()
    assert "missing wait" in hazards(program, lambda each: isinstance(each, Wait))


def is_a(program: Program, each: RecordStream, tag: str) -> bool:
    return program.buffers[each.buffer].tag == tag


def test_every_kind_of_wait_is_needed(name: str) -> None:
    program = three_steps(name)
    assert hazards(program) == set()

    def without(kind: type, holds: Callable[[Any], bool]) -> set[str]:
        removed = [each for each in program.instructions if isinstance(each, kind) and holds(each)]
        assert removed
        return hazards(program, lambda each: isinstance(each, kind) and holds(each))

    missing, early = "missing wait", "reused too early"
    assert missing in without(Wait, lambda each: each.call.op == "all_gather")
    assert without(Wait, lambda each: each.call.op == "reduce_scatter") == {missing, early}
    parameters = without(RecordStream, lambda each: is_a(program, each, "unsharded"))
    gradients = without(RecordStream, lambda each: is_a(program, each, "gradients"))
    if name == "sync":
        assert parameters == gradients == set(), "one stream"
        return
    assert without(WaitEvent, lambda each: each.stream == GATHERS) == {missing}, "the optimizer's writes come first"
    assert without(WaitEvent, lambda each: each.stream == REDUCTIONS) == {missing}, "the gradient is computed first"
    assert without(WaitEvent, lambda each: each.stream == COMPUTE) == {missing}, "the optimizer reads gradients"
    assert parameters == {early}
    # Elsewhere a gradient's memory goes back to a compute stream that has waited for a later gather, or for the
    # reductions; and one communicator keeps its messages in order.
    assert gradients == ({early} if name in ("limit-PRE-None", "limit-POST-None") else set())


def test_a_limiter_is_for_memory_not_for_order() -> None:
    program = three_steps("limit-PRE-None")
    assert hazards(program, lambda each: isinstance(each, Synchronize)) == set()


def test_each_wait_of_a_step_by_itself() -> None:
    """The middle one of three steps of an OverlapSchedule, with what goes wrong where one instruction is missing."""
    program = three_steps("overlap")
    instructions = program.instructions
    begin, end = [at for at, each in enumerate(instructions) if each == Mark(STEP)][1:]
    redundant = []
    for at in range(begin, end):
        each = instructions[at]
        if isinstance(each, Wait | WaitEvent | RecordStream) and not hazards(program, lambda other: other is each):  # noqa: B023
            redundant.append(_words(program, each))
    assert redundant == [
        # Backward's computation has waited for a gather that is behind the reduction on the link, before it is given
        # the memory of that reduction's gradient.
        "wait reduce_scatter blocks.3",
        "record_stream gradients of blocks.3",
        "wait reduce_scatter blocks.2",
        "record_stream gradients of blocks.2",
        # The next gathers begin in the next forward, behind its wait for the compute stream.
        "record_stream blocks.0 parameters",
        "record_stream root parameters",
        # What follows is behind the wait for the root's reduction, the last, or for the reduction stream.
        "wait reduce_scatter blocks.1",
        "record_stream gradients of blocks.1",
        "wait reduce_scatter blocks.0",
        "record_stream gradients of blocks.0",
        "wait_event stream 2",  # the last two reductions are issued together
        "record_stream gradients of root",
    ]


def _words(program: Program, each: Wait | WaitEvent | RecordStream) -> str:
    if isinstance(each, RecordStream):
        return f"record_stream {program.buffers[each.buffer].name}"
    if isinstance(each, WaitEvent):
        return f"wait_event stream {each.stream}"
    units = {issued.call: issued.unit for issued in program.instructions if isinstance(issued, Issue)}
    return f"wait {each.call.op} {units[each.call]}"
