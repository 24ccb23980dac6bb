"""What the tests on GPUs make ranks do, as far as a CPU can do it; and that without a GPU they are skipped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.profiler import ProfilerActivity, profile, record_function

from minifsdp import comm, device
from minifsdp.fsdp import FullyShardedDataParallel, OverlapSchedule
from minifsdp.gpt import Block
from minifsdp.instruments.link import emulated as link

GPU = Path(__file__).parents[1] / "gpu"
sys.path.append(str(GPU))  # its files import one another, as pytest lets them

import test_allocated  # noqa: E402
import test_host_waits  # noqa: E402
import test_limiter  # noqa: E402
import test_numerics  # noqa: E402
import test_overlapped  # noqa: E402
import test_product  # noqa: E402
from on_gpu import GpuChecks, Way, reason_to_skip  # noqa: E402
from racing import BEFORE, FORGETTING, SCHEDULES, WitnessLink, find_races, forget, forget_none  # noqa: E402
from small_model import assert_same, make_model, sgd, train  # noqa: E402
from trace_counts import ITEM, host_waits  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GLOO = Way("gloo")


@pytest.fixture(scope="module", autouse=True)
def cpu() -> Iterator[None]:
    """Here they run on CPU, whatever this machine has."""
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("MINIFSDP_DEVICE", "cpu")
        yield


# The checks themselves, on gloo: a few of each in an ordinary run, so that no name in them is misspelt

FILES = (test_allocated, test_host_waits, test_limiter, test_numerics, test_overlapped, test_product)
FEW = re.compile(
    r"the_ledger_.*-(zero2|fsdp-limit)|a_step_has_no_wait.*-(zero2|fsdp-limit)|torch_reports.*-fsdp$|under_a_cap"
    r"|every_rung_.*-(ddp|zero1|fsdp-prefetch)$|bf16_is|(the_norm|accumulated|an_overflow).*-(defaults|offload-inside)"
    r"|a_step_takes_less.*-prefetch|in_the_sync|hybrid.*(HYBRID_SHARD-mesh|replicas)|a_state_.*FULL_SHARD-NO_SHARD"
    r"|a_sharded_.*False-FULL_SHARD|a_model|device_id"
)
ON_CUDA_ALONE = {"a_loss_that_is_looked_at_is_found"}  # no host waits for a CPU


def bodies(few: bool) -> GpuChecks:
    """All checks of all files, or those that are left out of an ordinary run."""
    made = GpuChecks(__name__)
    for file in FILES:
        for ranks, checks in file.check._checks.items():
            for name, fn in checks.items():
                if name not in ON_CUDA_ALONE and bool(FEW.match(name)) == few:
                    made._checks[ranks][name] = fn
                    made.params.append(pytest.param(ranks, name, id=f"{name}-{ranks}"))
    return made


QUICK, OTHERS = bodies(few=True), bodies(few=False)


@pytest.mark.parametrize(("ranks", "name"), QUICK.params)
def test_bodies(ranks: int, name: str) -> None:
    QUICK.assert_passed(ranks, name, GLOO)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), OTHERS.params)
def test_other_bodies(ranks: int, name: str) -> None:
    OTHERS.assert_passed(ranks, name, GLOO)


# Races: the sanitizer's reasoning, told of the streams and the memory of a CPU


@contextmanager
def sanitized() -> Iterator[None]:
    """torch's CUDA sanitizer on CPU tensors and `device.CpuStream`."""
    from torch.cuda import _sanitizer

    kept: list[Any] = []  # so that no address stands for two things
    cpu = torch.device("cpu")

    class Arguments(_sanitizer.ArgumentHandler):  # type: ignore[misc]
        def _handle_argument(
            self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
        ) -> None:
            if not isinstance(value, Tensor) or value.device != cpu:
                return
            storage = value.untyped_storage()
            kept.append(storage)
            pointer: Any = (storage._cdata, value.storage_offset())
            if is_write:
                self.dataptrs_written.add(pointer)
            elif not metadata_only:
                self.dataptrs_read.add(pointer)
            self.tensor_aliases.setdefault(pointer, []).append(str(name))
            if is_output:
                self.outputs.add(pointer)

    mode = _sanitizer.CUDASanitizerDispatchMode()
    handler = mode.event_handler
    resize = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, nbytes: int) -> Any:
        if not nbytes:
            freed: Any = (storage._cdata, 0)
            handler._handle_memory_deallocation(freed)
        return resize(storage, nbytes)

    def follow(command: device.Command) -> None:
        kept.append(command)
        event, stream = id(command.subject), id(command.stream)
        if command.verb == "record":
            handler._handle_event_record(event, stream)
        elif command.verb == "wait":
            handler._handle_event_wait(event, stream)
        elif command.verb == "synchronize":
            handler._handle_event_synchronization(event)

    device.command_observers.append(follow)
    current = lambda: SimpleNamespace(cuda_stream=id(device.current_stream(cpu)))  # noqa: E731
    with (
        patch.object(_sanitizer, "ArgumentHandler", Arguments),
        patch.object(_sanitizer.traceback.StackSummary, "extract", lambda *_, **__: StackSummary()),  # the slow part
        patch.object(torch.cuda, "current_stream", current),
        patch.object(UntypedStorage, "resize_", resize_),
        mode,
    ):
        try:
            yield
        finally:
            device.command_observers.remove(follow)


def all_races() -> dict[str, list[tuple[str, str]]]:
    kept = {name: find_races(schedule, forget_none, sanitized) for name, schedule in SCHEDULES.items()}
    return kept | {wait: find_races(OverlapSchedule, forgetting, sanitized) for wait, forgetting in FORGETTING.items()}


@pytest.fixture(scope="module")
def races() -> dict[str, list[tuple[str, str]]]:
    """In the same world as on a GPU: rank 0, alone."""
    (found,) = Way("fake").start(all_races, 2)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_race_in_a_step(races: dict[str, list[tuple[str, str]]], schedule: str) -> None:
    assert races[schedule] == []


@pytest.mark.parametrize("wait", FORGETTING)
def test_a_forgotten_wait_is_found(races: dict[str, list[tuple[str, str]]], wait: str) -> None:
    assert [before for _, before in races[wait]] == [BEFORE[wait]]


def forget_what_is_not_there() -> None:
    with pytest.raises(AssertionError, match="no wait was forgotten"):
        find_races(OverlapSchedule, lambda schedule: forget(schedule, lambda stream, other: False), nullcontext)


def test_a_wait_that_a_schedule_has_no_longer_is_no_wait_forgotten() -> None:
    """Else the sanitizer would be told to find what nobody removed."""
    Way("fake").start(forget_what_is_not_there, 2)


def train_on_a_witness_link(schedule: Any) -> None:
    comm.link = WitnessLink()
    try:
        fsdp = FullyShardedDataParallel(make_model(), auto_wrap_policy={Block}, schedule=schedule)
        course = train(sgd(fsdp))
    finally:
        comm.link = None
    assert_same(course, train(sgd(make_model()), alone=True), 1e-5, 1e-3)


def train_on_witness_links() -> None:
    for schedule in SCHEDULES.values():
        train_on_a_witness_link(schedule)


def test_a_witness_link_changes_no_values() -> None:
    GLOO.start(train_on_witness_links, 2)


# Timing and its counts, on made-up figures


def span(name: str, start: float, duration: float, cat: str = "cuda_runtime", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration, "tid": thread, "pid": 1}


TRACE: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    span("cudaDeviceSynchronize", 90, 8),  # before the step
    span("the step", 100, 100, "user_annotation"),
    span("the step", 100, 100, "gpu_user_annotation", 7),
    span("cudaLaunchKernel", 101, 1),
    span("cudaMemcpyAsync", 102, 1),
    span("cudaStreamSynchronize", 104, 2),
    span("cudaEventSynchronize", 110, 5, thread=2),  # on autograd's thread
    span("cudaEventSynchronize", 120, 5, thread=2),
    span("aten::item", 130, 9, "cpu_op"),
    span(ITEM, 131, 7, "cpu_op"),
    span("cudaStreamSynchronize", 133, 2),
    span(ITEM, 150, 3, "cpu_op"),  # of a tensor in host memory
    span("cudaLaunchKernel", 151, 1, thread=2),  # of another thread meanwhile
    span("cudaEventSynchronize", 199, 5),  # ends after the step
    {"ph": "i", "name": "cudaStreamSynchronize", "cat": "cuda_runtime", "ts": 150, "tid": 1, "pid": 1},
]


def test_host_waits_are_counted_inside_the_step_on_all_threads() -> None:
    assert host_waits(TRACE, "the step") == {"cudaStreamSynchronize": 2, "cudaEventSynchronize": 2, ITEM: 1}
    assert not host_waits([span("the step", 0, 9, "user_annotation"), span("cudaLaunchKernel", 1, 1)], "the step")


def test_the_step_is_found_in_a_trace_of_the_profiler_s(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("the step"):
        assert torch.ones(1).item() == 1
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["name"] == ITEM and event["cat"] == "cpu_op" for event in events if event["ph"] == "X")
    assert not host_waits(events, "the step")  # not of a tensor in host memory


@pytest.mark.parametrize("events", [[], TRACE + TRACE])
def test_a_trace_without_just_one_such_step_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="there has to be one"):
        host_waits(events, "the step")


def test_sizes_are_rounded_as_by_the_allocator() -> None:
    assert [test_allocated.rounded(nbytes) for nbytes in (0, 1, 512, 513, 2**20)] == [0, 512, 512, 1024, 2**20]


# How checks are run, and when not


def passes() -> dict[str, float]:
    return {"rank": float(dist.get_rank()), "process": float(os.getpid())}


def fails_on_rank_1() -> None:
    assert dist.get_rank() == 0, "rank 1 is not rank 0"


def fails_inside_pytest() -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        pass


def test_a_failed_check_ends_its_launch_and_those_after_it_get_another() -> None:
    checks = GpuChecks(__name__, seconds=60)
    for fn in (passes, fails_on_rank_1, fails_inside_pytest):
        checks()(fn)
    checks._checks[2]["passes again"] = passes
    told: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in ("passes", "passes again"):
        checks.assert_passed(2, name, GLOO, told[name].__setitem__)
    assert told["passes"]["rank"] == told["passes again"]["rank"] == 0
    assert told["passes"]["world"] == "2 ranks over gloo on CPU: as requested"
    assert told["passes"]["process"] != told["passes again"]["process"]
    with pytest.raises(pytest.fail.Exception, match="rank 1 is not rank 0"):
        checks.assert_passed(2, "fails_on_rank_1", GLOO)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        checks.assert_passed(2, "fails_inside_pytest", GLOO)


@pytest.mark.slow
def test_without_a_gpu_all_are_skipped_with_the_reason() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MINIFSDP_DEVICE"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", str(GPU), "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, summary = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ skipped in .*", summary)
    (reason,) = (line for line in done.stdout.splitlines() if line.startswith("SKIPPED"))
    assert reason.endswith("no NVIDIA GPU that torch can use")


@pytest.mark.parametrize(
    ("forced", "gpus", "several", "reason"),
    [
        ("cpu", 8, False, "MINIFSDP_DEVICE=cpu"),
        ("", 0, True, "no NVIDIA GPU that torch can use"),
        ("", 1, True, "one GPU only"),
        ("", 1, False, None),
        ("cuda", 2, True, None),
    ],
)
def test_the_reason_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, forced: str, gpus: int, several: bool, reason: str | None
) -> None:
    monkeypatch.setenv("MINIFSDP_DEVICE", forced)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert reason_to_skip(several) == reason


@pytest.mark.parametrize(
    ("way", "ranks", "gpus", "world"),
    [
        (Way("nccl"), 2, 1, "2 ranks over NCCL, sharing cuda:0: "),
        (Way("nccl"), 2, 8, "2 ranks over NCCL, a GPU each: "),
        (Way("nccl"), 4, 2, "4 ranks over NCCL, sharing cuda:0, cuda:1: "),
        (Way("fake", "no socket"), 2, 1, "rank 0 of 2 on cuda, alone: no socket"),
    ],
)
def test_the_record_names_the_world(
    monkeypatch: pytest.MonkeyPatch, way: Way, ranks: int, gpus: int, world: str
) -> None:
    monkeypatch.delenv("MINIFSDP_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert str(way.world(ranks)).startswith(world)


def test_a_link_delays_on_a_stream_where_ranks_compute_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `fake` on CUDA."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for where, carrier in (("cuda", "StreamCarrier"), ("cpu", "ThreadCarrier")):
        monkeypatch.setattr(link, "rank_device", lambda where=where: torch.device(where))
        monkeypatch.setattr(link, carrier, lambda *_, made=carrier: SimpleNamespace(made=made, close=lambda _: None))
        with link.EmulatedLink(0.0, 1.0) as opened:
            assert opened._carrier.made == carrier  # type: ignore[union-attr]
