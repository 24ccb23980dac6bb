"""Which stream waits for which: what only a device with queues would miss, on streams that take notes."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minifsdp import comm, device, process_groups
from minifsdp.fsdp import OverlapSchedule, PrefetchSchedule, RateLimitedSchedule
from minifsdp.fsdp.schedules import overlap, rate_limit
from minifsdp.fsdp.unit import Unit
from minifsdp.fsdp.view import View


class Notes:
    """A device whose host runs ahead: everything is written down, with the stream it was issued on."""

    def __init__(self):
        self.log = []
        self.streams = [Stream("compute", self)]

    @contextmanager
    def on_stream(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    def note(self, what):
        self.log.append((self.streams[-1].name, what))


class Stream:
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def wait_stream(self, other):
        self.notes.log.append((self.name, f"waits for {other.name}"))

    def record_event(self):
        return SimpleNamespace(synchronize=lambda: None)


class NotedUnit(Unit):
    def __init__(self, name, notes):
        super().__init__(name)
        self.notes, self.leaves, self.shards, self.device = notes, [], [], torch.device("cpu")
        self.view, self.taken = View([], []), False

    def _gather(self):
        self.notes.note(f"gather {self.name}")
        return SimpleNamespace(wait=lambda: self.notes.note(f"gathered {self.name}"))

    def _release(self):
        self.notes.note(f"free {self.name}")

    def take_gradient(self, index):
        self.taken = True
        self.notes.note(f"gradient {self.name}")

    @property
    def has_gradient(self):
        return self.taken

    def _reduce(self):
        self.taken = False
        self.notes.note(f"reduce {self.name}")
        return SimpleNamespace(wait=lambda: self.notes.note(f"reduced {self.name}"))

    def _accumulate(self): ...

    def store(self): ...


@pytest.fixture(params=[OverlapSchedule, PrefetchSchedule, RateLimitedSchedule, partial(PrefetchSchedule, depth=None)])
def log(request, monkeypatch):
    """Notes of the second of two steps of a root and three units."""
    notes = Notes()
    names = iter(("gathers", "reductions"))
    monkeypatch.setattr(overlap, "new_stream", lambda *_, **__: Stream(next(names), notes))
    monkeypatch.setattr(overlap, "on_stream", notes.on_stream)
    for module in (overlap, rate_limit):
        monkeypatch.setattr(module, "current_stream", lambda _: notes.streams[-1])
    root, *blocks = units = [NotedUnit(name, notes) for name in "R012"]
    root.is_root = True
    schedule = request.param(units)
    for _ in range(2):
        notes.log.clear()
        notes.note("optimizer")
        schedule.begin_forward()
        schedule.pre_forward(root)
        for unit in blocks:
            schedule.pre_forward(unit)
            notes.note(f"compute {unit.name}")
            schedule.post_forward(unit, True)
        schedule.post_forward(root, True)
        schedule.begin_backward([*blocks, root])
        schedule.pre_backward(root)
        for unit in reversed(blocks):
            schedule.pre_backward(unit)
            unit.take_gradient(0)
            schedule.post_backward(unit)
        root.take_gradient(0)
        schedule.post_backward(root)
        schedule.end_backward()
        notes.note("optimizer again")
    return notes.log


def test_communication_has_streams_of_its_own_that_go_before_compute(monkeypatch):
    asked = []
    monkeypatch.setattr(overlap, "new_stream", lambda where, priority=0: asked.append(priority))
    OverlapSchedule([NotedUnit("0", Notes())])
    assert asked == [-1, -1]


def at(log, entry):
    return [i for i, noted in enumerate(log) if noted == entry]


@pytest.mark.behaviour(14, 15)
def test_gathers_wait_for_the_optimizer_and_nothing_else(log):
    (wait,) = at(log, ("gathers", "waits for compute"))
    assert at(log, ("compute", "optimizer"))[0] < wait < min(i for i, (_, what) in enumerate(log) if "gather " in what)
    assert {stream for stream, what in log if what.startswith("gather ")} == {"gathers"}


@pytest.mark.behaviour(14, 16)
def test_compute_waits_for_its_gather_and_frees_what_it_has_read(log):
    for name in "012":
        gathered = at(log, ("compute", f"gathered {name}"))
        frees = at(log, ("compute", f"free {name}"))
        assert len(gathered) == len(frees) == 2
        assert gathered[0] < at(log, ("compute", f"compute {name}"))[0] < frees[0]
        assert gathered[1] < at(log, ("compute", f"gradient {name}"))[0] < frees[1]


@pytest.mark.behaviour(14, 22)
def test_a_reduction_waits_for_the_gradient_it_reads(log):
    waits = at(log, ("reductions", "waits for compute"))
    for name in "R012":
        (gradient,), (reduction,) = at(log, ("compute", f"gradient {name}")), at(log, ("reductions", f"reduce {name}"))
        assert any(gradient < wait < reduction for wait in waits)
        assert at(log, ("reductions", f"reduced {name}"))  # its own stream waits, not the host's


@pytest.mark.behaviour(25)
def test_the_optimizer_waits_for_all_reductions(log):
    last = max(i for i, (_, what) in enumerate(log) if what.startswith("reduced"))
    (wait,) = at(log, ("compute", "waits for reductions"))
    assert last < wait < at(log, ("compute", "optimizer again"))[0]


@pytest.mark.behaviour(22, 31)
def test_freed_memory_is_held_until_the_stream_that_reads_it_is_done(monkeypatch):
    """`record_stream` before the storage goes; the allocator would hand it out under a running kernel otherwise."""
    done = []
    storage = SimpleNamespace(nbytes=lambda: 8, resize_=lambda size: done.append(f"resize {size}"))
    buffer = SimpleNamespace(
        is_cuda=True,
        device="cuda:0",
        untyped_storage=lambda: storage,
        record_stream=lambda stream: done.append(f"record {stream}"),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the current one")
    device.free(buffer)
    assert done == ["record the current one", "resize 0"]


def test_new_groups_on_nccl_have_a_stream_of_high_priority_each(monkeypatch):
    made = []
    options = SimpleNamespace(Options=lambda **kwargs: SimpleNamespace(**kwargs))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(
        dist, "new_subgroups_by_enumeration", lambda ranks, pg_options: made.append((ranks, pg_options)) or (ranks, [])
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert process_groups.host_groups() == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert all(given.is_high_priority_stream for _, given in made)
    assert made[0][1] is not made[1][1], "torch writes the group's name and ranks into them"


def test_a_tensor_where_the_group_cannot_communicate_is_refused_before_anything_is_issued():
    class Gpus:
        group_name = "gpus"
        _device_types = (torch.device("cuda"),)

        def size(self) -> int:
            return 2

        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")

    group = Gpus()
    with (
        comm.record() as calls,
        pytest.raises(ValueError, match=r"all_reduce of a tensor on cpu: .* serves \['cuda'\]"),
    ):
        comm.all_reduce(torch.ones(1), group)  # type: ignore[arg-type]
    assert calls == []
