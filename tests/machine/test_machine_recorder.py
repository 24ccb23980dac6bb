"""The recorder: a program says what the run did, and leaves the run as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from minifsdp import comm, device, gloo
from minifsdp.comm import Call
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings, take_step
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.fsdp import (
    FullyShardedDataParallel,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    SyncSchedule,
)
from minifsdp.gpt import Block
from minifsdp.instruments.launch import launch
from minifsdp.instruments.machine import A100, Program, Recorder, record_on_paper, record_steps, replay
from minifsdp.instruments.machine.program import (
    COMPUTE,
    Allocate,
    Free,
    Issue,
    Kernel,
    Mark,
    Record,
    RecordStream,
    Synchronize,
    WaitEvent,
)
from minifsdp.instruments.watch.ledger import Ledger, Peak

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")


def program_of(work: Callable[..., Any], *tensors: Tensor) -> Program:
    """What is recorded of `work`, its tensors made in the recorder's sight."""
    with Recorder() as recorder:
        copies = [t.clone().requires_grad_(t.requires_grad) for t in tensors]
        recorder.reset_peaks()
        kept = work(*copies)
        program = recorder.program()
        del kept
    return program


def kernels(program: Program) -> list[Kernel]:
    return [each for each in program.instructions if isinstance(each, Kernel)]


def only(program: Program) -> Kernel:
    (kernel,) = kernels(program)
    return kernel


# Kernels

A, B = torch.arange(4.0), torch.ones(4)


@pytest.mark.parametrize(
    ("work", "reads", "writes", "nbytes"),
    [
        (lambda a, b: a + b, (0, 1), (2,), 48),
        (lambda a, b: a.add_(b), (0, 1), (0,), 48),
        (lambda a, b: a[:2].mul_(2), (0,), (0,), 16),
        (lambda a, b: torch.add(a, a, out=b), (0,), (1,), 48),
        (lambda a, b: a.copy_(b), (1,), (0,), 32),
        (lambda a, b: a.zero_(), (), (0,), 16),
        (lambda a, b: torch.zeros_like(a), (), (2,), 16),
        (lambda a, b: a.clone(), (0,), (2,), 32),
        (lambda a, b: a.expand(3, 4) * 1, (0,), (2,), 16 + 48),
        (lambda a, b: torch._foreach_add_([a, b], 1.0), (0, 1), (0, 1), 64),
        (lambda a, b: torch._foreach_mul_([a], [b]), (0, 1), (0,), 48),
        (lambda a, b: torch._foreach_mul([a], [b]), (0, 1), (2,), 48),
    ],
)
def test_what_a_kernel_reads_and_writes(work: Any, reads: Any, writes: Any, nbytes: int) -> None:
    kernel = only(program_of(work, A, B))
    assert (set(kernel.reads), kernel.writes, kernel.nbytes) == (set(reads), writes, nbytes)
    assert kernel.seconds > 0


def test_views_and_memory_without_content_are_no_kernels() -> None:
    def work(a: Tensor, b: Tensor) -> Any:
        a.detach_().t_()
        return a.view(2, 2).t(), a[1:], a.split(2), a.detach(), torch.empty(3), torch.empty_like(a), a.new_empty(2)

    program = program_of(work, A, B)
    assert kernels(program) == []
    assert sum(isinstance(each, Allocate) for each in program.instructions) == 2 + 3


def test_memory_is_allocated_before_the_kernel_that_writes_it_and_freed_when_nothing_holds_it() -> None:
    def work(a: Tensor) -> Tensor:
        return (a + 1) * 2

    a, one, two = range(3)
    shape = [
        each if not isinstance(each, Kernel) else (each.reads, each.writes) for each in program_of(work, A).instructions
    ]
    stream = COMPUTE
    assert shape == [
        Allocate(a, stream),
        Allocate(one, stream),
        ((a,), (one,)),
        Allocate(two, stream),
        ((one,), (two,)),
        Free(one),
    ]


def test_a_buffer_is_memory_from_one_allocation_to_its_free() -> None:
    def work() -> Tensor:
        buffer = device.empty(10, torch.float32, "unsharded", CPU)
        device.free(buffer)
        device.allocate(buffer)
        return buffer

    program = program_of(work)
    assert program.instructions == [Allocate(0, 0), RecordStream(0, 0), Free(0), Allocate(1, 0)]
    assert [(buffer.nbytes, buffer.tag) for buffer in program.buffers.values()] == [(40, "unsharded")] * 2


def test_operations_of_a_linear_layer_and_of_attention() -> None:
    layer = program_of(
        lambda x, w: F.linear(x, w).sum().backward(), torch.ones(2, 3), torch.ones(5, 3, requires_grad=True)
    )
    assert [kernel.flops for kernel in kernels(layer) if kernel.flops] == [2 * 2 * 3 * 5] * 2
    q = torch.ones(1, 2, 8, 4, dtype=torch.bfloat16, requires_grad=True)  # [batch, heads, context, width / heads]
    attention = program_of(lambda q: F.scaled_dot_product_attention(q, q, q).sum().backward(), q)
    product = 2 * 2 * 8 * 8 * 4  # of two matrices, in both heads
    found = [kernel for kernel in kernels(attention) if kernel.flops]
    assert [kernel.flops for kernel in found] == [2 * product, 5 * product]
    assert [kernel.dtype_size for kernel in found] == [2, 2], "its statistics are float32, its products are not"


# The host


def test_reading_a_value_makes_the_host_wait() -> None:
    assert program_of(lambda a: a.sum().item(), A).instructions[-2:] == [Synchronize(None), Free(1)]


def test_adams_counts_of_steps_are_the_hosts_own() -> None:
    def train(w: Tensor) -> None:
        p = nn.Parameter(w)
        optimizer = AdamW([p], foreach=False)
        for _ in range(2):
            p.grad = torch.ones(4)
            optimizer.step()

    program = program_of(train, A)
    assert not [each for each in program.instructions if isinstance(each, Synchronize)]
    assert min(kernel.nbytes for kernel in kernels(program)) >= 16


def test_streams_and_events() -> None:
    def work(a: Tensor, b: Tensor) -> Any:
        side = device.new_stream(CPU)
        side.wait_stream(device.current_stream(CPU))
        with device.on_stream(side):
            c = a + b
            device.record_stream(a)
            event = side.record_event()
        c += 1
        event.wait()
        event.synchronize()
        return c

    shape: list[Any] = program_of(work, A, B).instructions[2:]
    streams = [each.stream if isinstance(each, Kernel) else each for each in shape]
    assert streams == [
        Record(0, 0),
        WaitEvent(0, 1),
        Allocate(2, 1),
        1,
        RecordStream(0, 1),
        Record(1, 1),
        0,
        WaitEvent(1, 0),
        Synchronize(1),
    ]


def test_the_program_begins_at_the_last_reset() -> None:
    with Recorder() as recorder:
        dead, side = torch.ones(3), device.new_stream(CPU)
        with device.on_stream(side):
            old = torch.ones(2)
        del dead
        recorder.reset_peaks()
        recorder.mark("here")
        new = old + 1
        program = recorder.program()
    number = len(program.buffers) - 1
    first, mark, *rest = program.instructions
    assert (first, mark) == (Allocate(1, 1), Mark("here"))
    assert rest[0] == Allocate(number, 0)
    assert program.buffers[number].nbytes == new.nbytes
    assert [(name, len(part)) for name, part in program.marked()] == [("here", 2)]


# On and off


class Carrier:
    def submit(self, call: Call, collective: Callable[[], Any]) -> Any: ...


@pytest.mark.parametrize("carrier", [None, Carrier()])
def test_leaves_no_trace(carrier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "link", carrier)

    def fail() -> None:
        with Recorder():
            assert comm.link is not carrier
            assert len(device.command_observers) == 1
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert comm.link is carrier
    assert device.command_observers == device.buffer_observers == comm.observers == []


def test_one_at_a_time() -> None:
    with Recorder() as recorder:
        for other in (Ledger, Recorder):
            with pytest.raises(RuntimeError, match="counting already"), other():
                pass
        assert device.command_observers == [recorder._books.command]
        x = torch.zeros(1)
        assert recorder.live()["activations"] == 4
        assert x is not None
    assert recorder.program().instructions[0] == Allocate(0, 0)


# On real ranks

SCHEDULES = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "prefetch": partial(PrefetchSchedule, depth=None),
    "limit": partial(RateLimitedSchedule, depth=None),
}
SETTINGS = Settings(layers=3, width=35, context=16, batch=4)
STEPS = 3


class Seen(NamedTuple):
    """What a rank saw of some steps."""

    losses: list[float]
    marks: list[dict[str, int]]
    peak: Peak
    calls: list[Call]
    program: Program | None


def build(group: Any, schedule: Any) -> Trainer:
    model = FullyShardedDataParallel(SETTINGS.model(), group, auto_wrap_policy={Block}, schedule=schedule)
    return Trainer(model, AdamW(model.parameters(), foreach=False))


def watched(make_ledger: type[Ledger], schedule: Any, batch: data.Batch) -> Seen:
    with make_ledger() as ledger:
        trainer = build(None, schedule)
        ledger.watch(trainer.model, trainer.optimizer)
        ledger.reset_peaks()
        losses, marks = [], []
        with comm.record() as calls:
            for _ in range(STEPS):
                marks.append(ledger.mark("step"))
                loss = take_step(trainer, batch, CPU, lambda phase: marks.append(ledger.mark(phase)))
                losses.append(loss)
        program = ledger.program() if isinstance(ledger, Recorder) else None
        return Seen([float(loss) for loss in losses], marks, ledger.peak, calls, program)


def train(schedule: Any, batch: data.Batch) -> list[float]:
    trainer = build(None, schedule)
    return [float(take_step(trainer, batch, CPU)) for _ in range(STEPS)]


def on_a_rank() -> dict[str, tuple[list[float], Seen, Seen, Program]]:
    gloo.wanted = lambda: "native"  # type: ignore[assignment]  # as it is while a recorder is open
    batch = data.shard(next(SETTINGS.batches()), dist.get_rank(), 2)
    return {
        name: (
            train(schedule, batch),
            watched(Ledger, schedule, batch),
            watched(Recorder, schedule, batch),
            record_steps(partial(build, None, schedule), batch, STEPS),
        )
        for name, schedule in SCHEDULES.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[list[float], Seen, Seen, Program]]]:
    return launch(on_a_rank, 2)


@pytest.fixture(params=SCHEDULES)
def schedule(request: Any) -> str:
    name: str = request.param
    return name


def live_at_marks(program: Program) -> list[dict[Any, int]]:
    return [mark.live for mark in replay(program, A100).marks]


def shape(program: Program) -> list[Any]:
    """Without what differs: seconds, names of process groups and what they call, their counts, numbers of buffers."""
    numbers: dict[int, int] = {}
    anonymous: list[Any] = []
    for each in program.instructions:
        fields = each._asdict()
        for name, value in fields.items():
            if name == "seconds":
                fields[name] = 0.0
            elif name == "call":
                fields[name] = value._replace(function="", group="", order=0)
            elif name == "buffer":
                fields[name] = (numbers.setdefault(value, len(numbers)), program.buffers[value])
            elif name in ("reads", "writes"):
                fields[name] = [numbers[buffer] for buffer in value]
        anonymous.append((type(each).__name__, fields))
    return anonymous


def test_a_recorder_changes_nothing(ranks: Any, schedule: str) -> None:
    for rank in ranks:
        losses, ledger, recorder, _ = rank[schedule]
        assert losses == ledger.losses == recorder.losses
        assert ledger.marks == recorder.marks
        assert ledger.peak == recorder.peak


def test_the_program_issues_what_the_run_issued(ranks: Any, schedule: str) -> None:
    for rank in ranks:
        _, _, recorder, program = rank[schedule]
        assert recorder.program.calls() == recorder.calls
        assert [call._replace(order=0) for call in recorder.calls] == [c._replace(order=0) for c in program.calls()]


def test_the_model_holds_what_the_ledger_counted(ranks: Any, schedule: str) -> None:
    for rank in ranks:
        _, ledger, recorder, _ = rank[schedule]
        ran = replay(recorder.program, A100)
        assert [mark.live for mark in ran.marks] == ledger.marks
        assert ran.peak("requested") == ledger.peak.total
        assert ran.peak("allocated") >= ran.peak("requested")


def test_on_paper_it_is_the_same_program(ranks: Any, schedule: str) -> None:
    def batch() -> data.Batch:
        tokens = torch.zeros(SETTINGS.batch // 2, SETTINGS.context, dtype=torch.int64)
        return tokens, tokens

    paper = record_on_paper(partial(build, schedule=SCHEDULES[schedule]), batch, 2, STEPS)
    real = ranks[0][schedule][3]
    assert shape(paper) == shape(real)
    assert live_at_marks(paper) == live_at_marks(real)


def test_whose_work_and_whose_memory_it_is(ranks: Any, schedule: str) -> None:
    program = ranks[0][schedule][3]
    last = dict(program.marked())
    for phase, order in (("forward", [0, 1, 2]), ("backward", [2, 1, 0])):
        units = [each.unit for each in last[phase] if isinstance(each, Kernel) and each.flops]
        blocks = list(dict.fromkeys(unit for unit in units if unit != "root"))
        assert blocks == [f"blocks.{index}" for index in order]
    for each in program.instructions:
        if isinstance(each, Issue):
            names = {program.buffers[buffer].unit for buffer in each.reads + each.writes}
            assert names == {each.unit}, each
    messages = [each.unit for each in last["backward"] if isinstance(each, Issue) and each.call.op == "reduce_scatter"]
    assert messages == ["blocks.2", "blocks.1", "blocks.0", "root"]
    names = {buffer.name for buffer in program.buffers.values() if buffer.tag == "unsharded"}
    assert {"blocks.0 parameters", "root parameters"} <= names
    gradients = {buffer.name for buffer in program.buffers.values() if buffer.tag == "gradients"}
    assert gradients == {f"gradients of {unit}" for unit in ("root", "blocks.0", "blocks.1", "blocks.2")}


def test_an_optimizer_that_reads_no_unit_is_not_the_last_units_work() -> None:
    with Recorder() as recorder:
        whole, shard = torch.ones(4), torch.ones(2)
        recorder.name_unit("blocks.0", SimpleNamespace(buffers={"parameters": whole}))  # type: ignore[arg-type]
        recorder.reset_peaks()
        whole.mul_(2)
        recorder.mark("optimizer")
        shard.mul_(2)
        program = recorder.program()
    assert [kernel.unit for kernel in kernels(program)] == ["blocks.0", "optimizer"]


def test_it_records_on_cpu_only() -> None:
    with Recorder() as recorder, pytest.raises(RuntimeError, match='backend="gloo"'):
        recorder.watch(nn.Linear(2, 2, device="meta"))
