"""The timeline: what a trace is reduced to, the overlap that follows, and real traces of two gloo ranks."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from minifsdp import comm
from minifsdp.instruments.launch import launch
from minifsdp.instruments.link.emulated import EmulatedLink
from minifsdp.instruments.watch.intervals import length, meets, subtract, union
from minifsdp.instruments.watch.timeline import Span, overlap, read_trace
from minifsdp.instruments.watch.trace import record_trace

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MAIN, GLOO = 100, 200  # threads


def event(category: str, name: str, thread: int, start: float, end: float, **args: Any) -> dict[str, Any]:
    """One of a Chrome trace; times in milliseconds."""
    times = {"ts": 1e12 + start * 1e3, "dur": (end - start) * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": args}


def op(name: str, start: float, end: float) -> dict[str, Any]:
    return event("cpu_op", name, MAIN, start, end)


def note(name: str, start: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, thread, start, end)


def spans_of(events: list[dict[str, Any]], folder: Path) -> dict[str, list[tuple[str, float, float]]]:
    """By lane: name, start and end in milliseconds."""
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for span in read_trace(path):
        lanes.setdefault(span.lane, []).append((span.name, round(span.start * 1e3, 3), round(span.end * 1e3, 3)))
    return lanes


# A gather under way for 10 ms, of which the host computes 6 and waits 3; then a reduce-scatter, waited for at once.
STEP = [
    op("aten::ones", 0, 5),  # before the step
    note("forward", 10, 25),
    note("issue all_gather 0#4 2097152 B", 10, 11),
    op("c10d::_allgather_base_", 10.1, 10.9),
    op("aten::linear", 11, 14),
    op("aten::addmm", 11.1, 13.9),  # inside linear
    op("aten::gelu", 14.1, 17),  # 0.1 ms later: still computing
    note("wait all_gather 0#4 2097152 B", 18, 21),
    op("aten::copy_", 20.5, 20.9),  # inside the wait
    op("aten::mm", 22, 25),
    note("backward", 25, 40),
    op("autograd::engine::evaluate_function: MmBackward0", 25, 39),  # computes, then a hook reduces
    op("MmBackward0", 25, 30),
    note("issue reduce_scatter 0#5 1048576 B", 31, 32),
    op("c10d::_reduce_scatter_base_", 31.1, 31.9),
    note("wait reduce_scatter 0#5 1048576 B", 32.05, 38),
    op("aten::ones", 50, 60),  # after the step
]
GLOO_RANGES = [note("gloo:barrier", 8, 12, GLOO), note("gloo:all_gather", 10.5, 20.5, GLOO)]


def test_compute_is_what_the_main_thread_does_outside_of_collectives(tmp_path: Path) -> None:
    lanes = spans_of(STEP, tmp_path)
    assert lanes["compute"] == [("linear", 1, 7), ("mm", 12, 15), ("MmBackward0", 15, 20)]
    assert lanes["wait"] == [("all_gather 2.0 MiB", 8, 11), ("reduce_scatter 1.0 MiB", 22.05, 28)]
    assert lanes["phase"] == [("forward", 0, 15), ("backward", 15, 30)]


def test_gloo_ranges_are_the_communication_under_the_name_of_the_call(tmp_path: Path) -> None:
    ranges = [*GLOO_RANGES, note("gloo:all_reduce", 31.5, 37.5, GLOO)]  # how gloo's own reduce-scatter goes
    lanes = spans_of(STEP + ranges, tmp_path)
    assert lanes["communication"] == [("all_gather 2.0 MiB", 0.5, 10.5), ("reduce_scatter 1.0 MiB", 21.5, 27.5)]


def test_a_collective_without_a_range_lasts_from_issue_to_the_end_of_its_wait(tmp_path: Path) -> None:
    lanes = spans_of(STEP + GLOO_RANGES, tmp_path)
    assert lanes["communication"] == [("all_gather 2.0 MiB", 0.5, 10.5), ("reduce_scatter 1.0 MiB", 21, 28)]


def test_a_collective_of_several_messages_is_one_span(tmp_path: Path) -> None:
    """Only those on the first of two connections are operators of torch's, but all have a range of gloo's."""
    issued = [op("c10d::broadcast_", 10.1, 10.4), op("c10d::send", 31.2, 31.8)]
    step = [each for each in STEP if "base_" not in each["name"]] + issued
    broadcasts = [note("gloo:broadcast", start, end, GLOO) for start, end in [(10.5, 14), (14, 17), (39, 45)]]
    exchange = [note("gloo:recv", 31.3, 37, GLOO), note("gloo:send", 31.9, 36)]
    lanes = spans_of([*step, *broadcasts, *exchange], tmp_path)
    assert lanes["communication"] == [
        ("all_gather 2.0 MiB", 0.5, 7),
        ("reduce_scatter 1.0 MiB", 21.3, 27),
        ("broadcast", 29, 30),  # another program's, cut where the step ends
    ]


def test_gathers_under_way_at_the_same_time_share_the_messages_in_order(tmp_path: Path) -> None:
    step = [
        note("issue all_gather 0#1 1048576 B", 0, 1),
        note("issue all_gather 0#2 1048576 B", 1, 2),
        *(note("gloo:broadcast", start, start + 2, GLOO) for start in (0.5, 1.5, 3, 5)),
        note("wait all_gather 0#1 1048576 B", 8, 9),
        note("wait all_gather 0#2 1048576 B", 9, 10),
    ]
    lanes = spans_of([note("forward", 0, 10), *step], tmp_path)
    assert lanes["communication"] == [("all_gather 1.0 MiB", 0.5, 3.5), ("all_gather 1.0 MiB", 3, 7)]


def test_collectives_that_others_issued_count_too(tmp_path: Path) -> None:
    """Those of torch's own FSDP, say, do not go through `comm`."""
    lanes = spans_of([op("aten::mm", 0, 5), note("gloo:all_gather", 1, 3, GLOO)], tmp_path)
    assert lanes == {"compute": [("mm", 0, 5)], "communication": [("all_gather", 1, 3)]}


def test_an_emulated_links_messages_are_the_communication_if_it_carried_any(tmp_path: Path) -> None:
    lanes = spans_of([*STEP, *GLOO_RANGES, event("link", "all_gather 2.0 MiB", 300, 12, 20)], tmp_path)
    assert lanes["communication"] == [("all_gather 2.0 MiB", 2, 10)]


def test_without_phases_the_step_is_everything(tmp_path: Path) -> None:
    lanes = spans_of([op("aten::mm", 3, 5), op("aten::mm", 7, 8)], tmp_path)
    assert lanes == {"compute": [("mm", 0, 2), ("mm", 4, 5)]}


def test_on_cuda_the_lanes_are_kernels_and_streams(tmp_path: Path) -> None:
    def kernel(name: str, stream: int, start: float, end: float, number: int = 0) -> dict[str, Any]:
        return event("kernel", name, stream, start, end, stream=stream, correlation=number)

    def launched(number: int, at: float, thread: int) -> dict[str, Any]:
        return event("cuda_runtime", "cudaLaunchKernel", thread, at, at + 0.1, correlation=number)

    autograd, main = 2, 1
    events = [
        op("aten::mm", 0, 1),
        event("user_annotation", "forward", main, 0, 1),
        event("user_annotation", "backward", main, 1, 2),
        event("gpu_user_annotation", "backward", 7, 6, 6.5),  # the profiler knows the main thread's kernels only
        launched(1, 0.2, main),
        launched(2, 0.3, main),
        launched(3, 1.2, autograd),
        launched(4, 1.4, autograd),
        kernel("void at::native::vectorized_elementwise_kernel<4, float>(int, float)", 7, 2, 4, 2),
        kernel("ampere_sgemm_128x64_tn", 7, 4, 8, 3),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 1, 5, 1),
        kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 24, 5, 6, 4),
    ]
    lanes = spans_of(events, tmp_path)
    assert lanes == {
        "compute": [("vectorized_elementwise_kernel", 1, 3), ("ampere_sgemm_128x64_tn", 3, 7)],
        "communication": [("ncclDevKernel_AllGather_RING_LL", 0, 4), ("link", 4, 5)],
        "phase": [("forward", 0, 4), ("backward", 3, 7)],
    }
    lanes = spans_of([*events, kernel("split_with_sizes_copy", 30, 2, 3)], tmp_path)
    assert set(lanes) == {"compute", "compute (stream 30)", "communication", "phase"}  # the busiest has the plain name


def test_on_cuda_copies_count_as_compute_on_the_device_and_apart_between_it_and_the_host(tmp_path: Path) -> None:
    """A `copy_` of one dtype is a memcpy, `zero_` a memset: gradients move into FSDP's and ZeRO's buffers so."""

    def queued(category: str, name: str, stream: int, start: float, end: float, number: int) -> list[dict[str, Any]]:
        runtime = event("cuda_runtime", f"cuda{category}", MAIN, number, number + 0.1, correlation=number)
        return [runtime, event(category, name, stream, start, end, stream=stream, correlation=number)]

    events = [
        note("forward", 0, 2),
        note("backward", 2, 7),
        *queued("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, 9, 10, 0),
        *queued("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 20, 10, 11, 2),
        *queued("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 10, 10.8, 3),
        *queued("gpu_memset", "Memset (Device)", 7, 10.8, 10.9, 4),
        *queued("kernel", "ampere_sgemm_128x64_tn", 7, 10.9, 11, 5),
        *queued("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 11, 13, 6),
    ]
    assert spans_of(events, tmp_path) == {
        "copy": [("Memcpy HtoD", 0, 1), ("Memcpy DtoH", 2, 4)],
        "compute": [("Memcpy DtoD", 1, 1.8), ("Memset", 1.8, 1.9), ("ampere_sgemm_128x64_tn", 1.9, 2)],
        "communication": [("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 1, 2)],
        "phase": [("forward", 0, 1), ("backward", 1, 4)],
    }
    assert overlap(read_trace(tmp_path / "trace.json")) == 1
    assert set(spans_of(events[2:4], tmp_path)) == {"copy"}  # a trace of the device, though without a kernel


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"name": "x"}]}', '{"traceEvents": 3}'])
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"notes\.json is not a Chrome trace"):
        read_trace(path)


def test_an_empty_trace_has_no_spans(tmp_path: Path) -> None:
    assert spans_of([], tmp_path) == {}


def test_overlap_is_communication_under_compute_per_communication() -> None:
    compute = [Span("compute", "", 0, 4), Span("compute", "", 6, 4), Span("compute (stream 9)", "", 9, 2)]
    wait = Span("wait", "", 4, 2)
    assert overlap([*compute, wait]) is None
    assert overlap([*compute, wait, Span("communication", "", 4, 2)]) == 0
    assert overlap([*compute, wait, Span("communication", "", 1, 2)]) == 1
    assert overlap([*compute, wait, Span("communication", "", 3, 4)]) == 0.5
    assert overlap([*compute, wait, Span("communication", "", 3, 4), Span("communication", "", 5, 2)]) == 0.5
    assert overlap([*compute, wait, Span("communication", "", 10, 4)]) == 0.25


def test_intervals_agree_with_sets_of_instants() -> None:
    generator = torch.Generator().manual_seed(0)

    def some() -> list[tuple[float, float]]:
        ends = torch.randint(0, 30, (5, 2), generator=generator).sort(dim=1).values.tolist()
        return union((start, end + 1) for start, end in ends)

    def instants(intervals: list[tuple[float, float]]) -> set[int]:
        return {at for start, end in intervals for at in range(int(start), int(end))}

    for _ in range(300):
        these, those = some(), some()
        assert instants(subtract(these, those)) == instants(these) - instants(those)
        assert length(these) == len(instants(these))
        for start, end in those:
            assert meets(these, start, end) == bool(instants(these) & instants([(start, end)]))


# Real traces


def compute(seconds: float) -> None:
    matrix, start = torch.randn(128, 128), time.perf_counter()
    while time.perf_counter() < start + seconds:
        matrix @ matrix


def step(at_once: bool) -> None:
    """A gather and a reduce-scatter, each around 60 ms of compute or waited for at once."""
    group, numel = comm.world(), 4096
    shard, full = torch.ones(numel), torch.ones(2 * numel)
    dist.barrier()
    for phase, start in (
        ("forward", lambda: comm.all_gather(full, shard, group)),
        ("backward", lambda: comm.reduce_scatter(shard, full, group)),
    ):
        with record_function(phase):
            if dist.get_rank() == 1:
                time.sleep(0.03)  # so that on rank 0 the collective is under way for that long, whatever carries it
            handle = start()
            if at_once:
                handle.wait()
            compute(0.06)
            handle.wait()


def recover(path: Path) -> bool:
    """Whether an error in the step leaves as it entered, and nobody watching."""
    try:
        with record_trace(path):
            raise KeyError("in the step")
    except KeyError:
        return comm.observers == []


def trace_on_a_rank(folder: str) -> dict[str, Any]:
    """The four traces of this rank: with and without a link, overlapped and at once."""
    spans = {}
    for carrier in ("gloo", "link"):
        with EmulatedLink(latency=0.03, bandwidth=1e12) if carrier == "link" else nullcontext() as link:
            for at_once in (False, True):
                name = f"{carrier} {'at once' if at_once else 'overlapped'}"
                path = Path(folder, f"{name} {dist.get_rank()}.json")
                with record_trace(path, link):
                    step(at_once)
                spans[name] = read_trace(path)
    return {"spans": spans, "after an error": recover(Path(folder, "error.json"))}


@pytest.fixture(scope="module")
def traces() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = launch(trace_on_a_rank, 2, folder)
        files = {path.name: json.loads(path.read_text()) for path in Path(folder).iterdir()}
    return {"ranks": ranks, "spans": [rank["spans"] for rank in ranks], "files": files}


@pytest.mark.parametrize("carrier", ["gloo", "link"])
def test_communication_hides_behind_compute_exactly_if_compute_comes_before_the_wait(
    carrier: str, traces: dict[str, Any]
) -> None:
    for rank, spans in enumerate(traces["spans"]):
        # The matrix products alone, without the operators that a message begins and ends with.
        overlapped, at_once = (
            overlap(span for span in spans[f"{carrier} {way}"] if span.lane == "communication" or "matmul" in span.name)
            for way in ("overlapped", "at once")
        )
        assert overlapped is not None
        assert at_once == 0
        if rank == 0:
            assert 0.05 < overlapped <= 1


@pytest.mark.parametrize("carrier", ["gloo", "link"])
def test_each_collective_is_one_span_under_its_own_name(carrier: str, traces: dict[str, Any]) -> None:
    for spans in traces["spans"]:
        for way in ("overlapped", "at once"):
            names = Counter((span.lane, span.name.split()[0]) for span in spans[f"{carrier} {way}"])
            carried = {name: count for (lane, name), count in names.items() if lane == "communication"}
            assert carried == {"all_gather": 1, "reduce_scatter": 1}
            assert names["wait", "all_gather"] == 1 + (way == "at once")  # the second wait finds it over
            assert names["phase", "forward"] == names["phase", "backward"] == 1


def test_compute_and_waiting_never_meet(traces: dict[str, Any]) -> None:
    for spans in traces["spans"]:
        for lanes in spans.values():
            computing = union((span.start, span.end) for span in lanes if span.lane == "compute")
            waiting = union((span.start, span.end) for span in lanes if span.lane == "wait")
            assert length(computing) > 0
            assert length(subtract(computing, waiting)) == pytest.approx(length(computing))


def test_messages_of_the_link_lie_between_issue_and_end_of_wait_on_the_traces_clock(traces: dict[str, Any]) -> None:
    """So the clock of the link and the profiler's agree, to half a millisecond."""
    events = [e for e in traces["files"]["link at once 0.json"]["traceEvents"] if e["ph"] == "X"]
    messages = [e for e in events if e["cat"] == "link"]
    assert [message["name"].split()[0] for message in messages] == ["all_gather", "reduce_scatter"]
    for message in messages:
        mine = [e for e in events if message["name"].split()[0] in e["name"].split()[1:2]]
        issue = next(e for e in mine if e["name"].startswith("issue"))
        wait = next(e for e in mine if e["name"].startswith("wait"))
        assert issue["ts"] - 500 <= message["ts"]
        assert message["ts"] + message["dur"] <= wait["ts"] + wait["dur"] + 500
        assert message["dur"] >= 29_999


def test_a_trace_opens_in_perfetto(traces: dict[str, Any]) -> None:
    """Whole JSON in the Chrome format, the link's lane named."""
    assert len(traces["files"]) == 8  # and none half-written beside them
    for name, trace in traces["files"].items():
        lanes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
        assert ("emulated link" in lanes) == name.startswith("link")
        assert all({"name", "ts", "dur", "pid", "tid"} <= e.keys() for e in trace["traceEvents"] if e["ph"] == "X")


def test_a_trace_costs_no_python_object_per_event_and_no_warning(tmp_path: Path) -> None:
    """The profiler can make objects of all events when it stops, which takes longer than the step."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr("torch.profiler.profiler._WARNINGS_SHOWN", set(), raising=False)  # each is shown once a process
        patch.setattr("torch.autograd.profiler.EventList", lambda *_, **__: pytest.fail("events were made"))
        with record_trace(tmp_path / "trace.json"), record_function("forward"):
            torch.ones(2).add_(1)
    assert {span.lane for span in read_trace(tmp_path / "trace.json")} == {"compute", "phase"}


def test_a_step_that_raises_leaves_no_file_and_no_watcher(traces: dict[str, Any]) -> None:
    assert [rank["after an error"] for rank in traces["ranks"]] == [True, True]
    assert not any("error" in name for name in traces["files"])
