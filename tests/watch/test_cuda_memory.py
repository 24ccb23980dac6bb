"""What torch's allocator held, from snapshots of a made-up one; on a GPU, from torch's own."""

import json
import pickle
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minifsdp.course.ladder import data
from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.measure import Settings
from minifsdp.instruments import plots
from minifsdp.instruments.plots.palette import BLOCK_COLOURS
from minifsdp.instruments.watch.cuda_memory import MemoryHistory, curve, given_back, held
from minifsdp.instruments.watch.ledger import Ledger

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
MIB = 2**20


class MadeUp:
    """An allocator that writes its history as torch's does, GPU 1 of two; blocks are rounded up to 512 bytes.

    `sizes` is what torch has as `requested_bytes` less what waits, `requested_bytes`, and `reserved_bytes`.
    """

    def __init__(self) -> None:
        self.clock = 1_000
        self.segments: dict[int, int] = {}  # size by address
        self.blocks: dict[int, tuple[int, str]] = {}  # requested size and state by address
        self.trace: list[dict[str, Any]] = []
        self.retries = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        allocated = sum(size for size, state in self.blocks.values() if state == "active_allocated")
        return allocated, sum(size for size, _ in self.blocks.values()), sum(self.segments.values())

    def alloc(self, size: int) -> int:
        """In a segment of its own, so that any order of frees is possible; returns the block's address."""
        address = max([0, *self.segments]) + 2**30
        self.segments[address] = 2 * MIB * -(-size // (2 * MIB))
        self._enter("segment_alloc", address, self.segments[address])
        return self.reuse(address, size)

    def reuse(self, address: int, size: int) -> int:
        self.blocks[address] = (size, "active_allocated")
        self._enter("alloc", address, size)
        return address

    def free(self, address: int, *, waits: bool = False) -> None:
        size, _ = self.blocks[address]
        self._enter("free_requested", address, size)
        self.blocks[address] = (size, "active_pending_free")
        if waits:
            self.clock += 5
        else:
            self.complete(address)

    def complete(self, address: int) -> None:
        size, _ = self.blocks.pop(address)
        self._enter("free_completed", address, size)

    def give_back(self, retry: bool = False) -> None:
        self.retries += retry
        for address in [address for address in self.segments if address not in self.blocks]:
            self._enter("segment_free", address, self.segments.pop(address))

    def snapshot(self) -> dict[str, Any]:
        other = {
            "device": 0,
            "total_size": 7,
            "blocks": [{"requested_size": 5, "size": 7, "state": "active_allocated"}],
        }
        mine = []
        for address, total in self.segments.items():
            inactive = {"requested_size": 99, "size": total, "state": "inactive"}  # what it was once asked for stays
            size, state = self.blocks.get(address, (0, ""))
            used = {"requested_size": size, "size": 512 * -(-size // 512), "state": state}
            mine.append({"device": 1, "total_size": total, "blocks": [used, inactive] if state else [inactive]})
        others = [{"action": "alloc", "addr": 1, "size": 5, "time_us": 1}]
        return {"segments": [other, *mine], "device_traces": [others, list(self.trace)]}

    def _enter(self, action: str, address: int, size: int) -> None:
        self.clock += 1
        self.trace.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.clock})


def a_step(allocator: MadeUp) -> list[int]:
    """Allocates, frees at once and later, gives the cache back; returns the times of the phases."""
    kept, gathered = allocator.alloc(30 * MIB), allocator.alloc(20 * MIB)
    marks = [allocator.clock]
    for _ in range(3):
        allocator.free(gathered, waits=True)
        activations = allocator.alloc(5 * MIB)
        allocator.complete(gathered)
        allocator.reuse(gathered, 16 * MIB)
    marks.append(allocator.clock)
    allocator.free(activations)
    allocator.free(gathered)
    allocator.give_back(retry=True)
    allocator.alloc(40 * MIB)
    marks.append(allocator.clock)
    allocator.free(kept)
    return marks


actions = st.lists(st.tuples(st.sampled_from(["alloc", "reuse", "free", "wait", "complete", "give back"]), st.data()))


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(0, 20), st.integers(0, 20))
def test_history_leads_back_to_every_state(steps: list[Any], late: int, lost: int) -> None:
    allocator = MadeUp()
    states = [(allocator.clock, allocator.sizes)]
    for action, choice in steps:
        in_use = [at for at, (_, state) in allocator.blocks.items() if state == "active_allocated"]
        waiting = [at for at in allocator.blocks if at not in in_use]
        free = [at for at in allocator.segments if at not in allocator.blocks]
        if action == "alloc":
            allocator.alloc(choice.draw(st.integers(1, 5 * MIB)))
        elif action == "reuse" and free:
            address = choice.draw(st.sampled_from(free))
            allocator.reuse(address, choice.draw(st.integers(1, allocator.segments[address])))
        elif action in ("free", "wait") and in_use:
            allocator.free(choice.draw(st.sampled_from(in_use)), waits=action == "wait")
        elif action == "complete" and waiting:
            allocator.complete(choice.draw(st.sampled_from(waiting)))
        elif action == "give back":
            allocator.give_back()
        states.append((allocator.clock, allocator.sizes))
    snapshot = allocator.snapshot()
    forgotten = allocator.trace[:lost]  # recording began later, or its buffer was full
    del snapshot["device_traces"][1][:lost]
    samples = held(snapshot, 1)
    assert samples[-1][1:] == allocator.sizes
    for sample in samples:
        assert sample.reserved >= sample.active >= sample.allocated >= 0
    for at, sizes in states:
        if not forgotten or at >= forgotten[-1]["time_us"]:
            assert [sample for sample in samples if sample.at <= at][-1][1:] == sizes
    began = states[0][0] + late
    drawn = curve(snapshot, 1, began, allocator.clock + 100)
    assert drawn["us"] == sorted(drawn["us"])
    assert drawn["us"][0] == 0
    assert drawn["us"][-1] >= 100 + allocator.clock - began


def test_sizes_by_hand() -> None:
    allocator = MadeUp()
    marks = a_step(allocator)
    snapshot = allocator.snapshot()
    samples = [tuple(size / MIB for size in sample[1:]) for sample in held(snapshot, 1)]
    assert samples[:5] == [(0, 0, 0), (0, 0, 30), (30, 30, 30), (30, 30, 50), (50, 50, 50)]
    assert samples[5:8] == [(30, 50, 50), (30, 50, 56), (35, 55, 56)], "freed, and in use on another stream"
    assert samples[-6:] == [(40, 40, 68), (40, 40, 48), (40, 40, 42), (40, 40, 82), (80, 80, 82), (50, 50, 82)]
    (at,) = given_back(snapshot, 1)
    assert marks[1] < at < marks[2], "two segments, one after the other, are one time"


def test_a_free_without_waiting_is_one_change() -> None:
    allocator = MadeUp()
    allocator.free(allocator.alloc(MIB))
    assert [sample[1:] for sample in held(allocator.snapshot(), 1)][-2:] == [(MIB, MIB, 2 * MIB), (0, 0, 2 * MIB)]


def test_an_expandable_segment_grows_and_shrinks() -> None:
    entries = [("segment_map", 4), ("alloc", 3), ("segment_map", 2), ("snapshot", 9), ("segment_unmap", 2), ("oom", 9)]
    trace = [{"action": action, "addr": 8, "size": size, "time_us": at} for at, (action, size) in enumerate(entries, 1)]
    block = {"requested_size": 3, "size": 4, "state": "active_allocated"}
    segments = [{"device": 0, "total_size": 4, "blocks": [block]}]
    samples = held({"segments": segments, "device_traces": [trace]}, 0)
    assert [sample[1:] for sample in samples] == [(0, 0, 0), (0, 0, 4), (3, 3, 4), (3, 3, 6), (3, 3, 4)]


def test_without_entries_there_is_the_state() -> None:
    snapshot = {"segments": [{"device": 0, "total_size": 4, "blocks": []}], "device_traces": [[]]}
    assert curve(snapshot, 0, 10, 30)["reserved"] == [4, 4]
    assert curve(snapshot, 0, 10, 30)["us"] == [0, 20]


def test_on_cpu_there_is_no_curve(tmp_path: Path) -> None:
    with Ledger() as ledger, MemoryHistory(CPU, tmp_path / "snapshot.pickle") as history:
        history.mark("forward")
    assert history.curve is None
    assert history.beside(ledger) is None
    assert not list(tmp_path.iterdir())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """`torch.cuda` as far as MemoryHistory uses it, with the made-up allocator; its clock is the machine's."""
    allocator = MadeUp()
    allocator.switched = []  # type: ignore[attr-defined]

    def switch(enabled: str | None = "all", context: str | None = "all", stacks: str = "all", **options: Any) -> None:
        allocator.switched.append(enabled)  # type: ignore[attr-defined]
        allocator.trace.clear()

    def stats(where: torch.device) -> dict[str, int]:
        assert where == CUDA
        names = ("allocated", "allocated_peak", "active", "reserved", "reserved_peak")
        return {**dict.fromkeys(names, 7), "alloc_retries": allocator.retries}

    monkeypatch.setattr("minifsdp.instruments.watch.cuda_memory._now", lambda: allocator.clock)
    monkeypatch.setattr("minifsdp.device.memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda where: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", switch)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator.snapshot)
    return allocator


def record(gpu: MadeUp, snapshot: Path | None = None) -> dict[str, Any]:
    """A made-up step, beside a ledger that has counted tensors on CPU."""
    gpu.alloc(10 * MIB)
    gpu.retries = 3
    with Ledger() as ledger:
        with MemoryHistory(CUDA, snapshot) as history:
            history.mark("forward")
            batch = torch.zeros(MIB)
            a_step(gpu)
            history.mark("backward")
            del batch
            gpu.clock += 4000
        recorded = history.beside(ledger)
    assert recorded is not None
    return recorded


def test_a_step_is_recorded(gpu: MadeUp, tmp_path: Path) -> None:
    recorded = record(gpu, tmp_path / "snapshot.pickle")
    assert recorded["alloc_retries"] == 1, "those of the step"
    assert recorded["peaks"] == {"allocated": 7, "reserved": 7}
    drawn = recorded["curve"]
    assert [drawn[kind][0] for kind in ("allocated", "active", "reserved")] == [10 * MIB] * 3
    assert tuple(drawn[kind][-1] for kind in ("allocated", "active", "reserved")) == gpu.sizes
    assert [name for _, name in drawn["marks"]] == ["forward", "backward"]
    assert len(drawn["given_back"]) == 1
    assert max(recorded["ledger"]["bytes"]) == 4 * MIB
    assert len(recorded["ledger"]["us"]) == len(recorded["ledger"]["bytes"])
    assert gpu.switched == ["all", None]  # type: ignore[attr-defined]
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert snapshot["device_traces"][1][0]["action"] == "segment_alloc"


def test_a_step_that_fails_ends_the_recording(gpu: MadeUp, tmp_path: Path) -> None:
    history = MemoryHistory(CUDA, tmp_path / "snapshot.pickle")
    with pytest.raises(RuntimeError, match="of the step"), history:
        raise RuntimeError("of the step")
    assert gpu.switched == ["all", None]  # type: ignore[attr-defined]
    assert history.curve is None
    assert not list(tmp_path.iterdir())


def test_another_allocator_than_torchs_own_has_no_history(gpu: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with MemoryHistory(CUDA) as history:
        pass
    assert history.curve is None
    assert gpu.switched == []  # type: ignore[attr-defined]


def test_the_picture_shows_what_was_held_beside_the_ledger(gpu: MadeUp, tmp_path: Path) -> None:
    recorded = record(gpu)
    rungs = [{"name": name, "cuda": recorded} for name in ("fsdp", "fsdp-limit")]
    figure = plots.allocator_figure(rungs, tmp_path / "allocator.png")
    assert len({row.get_ylim() for row in figure.axes}) == len({row.get_xlim() for row in figure.axes}) == 1
    row = figure.axes[0]
    for area, kind in zip(row.collections, ("allocated", "active", "reserved"), strict=True):
        assert area.get_paths()[0].vertices[:, 1].max() == max(recorded["curve"][kind]) / MIB
    reserved, ledger = row.lines[:2]
    assert max(reserved.get_ydata()) == max(recorded["curve"]["reserved"]) / MIB
    assert max(ledger.get_ydata()) == 4
    assert [line for line in row.lines if line.get_marker() == "v"]
    assert "1 retry" in row.get_title(loc="left")
    assert matplotlib.image.imread(tmp_path / "allocator.png").shape[1] > 1000
    first = (tmp_path / "allocator.png").read_bytes()
    plots.allocator_figure(rungs, tmp_path / "allocator.png")
    assert (tmp_path / "allocator.png").read_bytes() == first


def test_measured_and_modelled_memory_look_the_same(gpu: MadeUp) -> None:
    picture = plots.allocator_memory({"fsdp": record(gpu)}, title="T", says="S.")
    assert repr(picture) == "T\nS.", "what is measured is not in the text"
    colours = [matplotlib.colors.to_hex(area.get_facecolor()[0]).upper() for area in picture.figure.axes[0].collections]
    assert colours == list(BLOCK_COLOURS.values())
    legend = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert legend[0] == "cache given back"
    assert legend[-1] == "in the ledger"


def test_a_batch_that_is_there_is_not_copied() -> None:
    batch = torch.zeros(2, 3), torch.ones(2, 3)
    assert all(one is other for one, other in zip(data.to_device(batch, CPU), batch, strict=True))


def test_the_ladder_keeps_what_ranks_have_recorded(
    gpu: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, climb = record(gpu), ladder.launch

    def on_a_gpu(run: Any, ranks: int, settings: Settings, *staging: Path, **options: Any) -> Any:
        results = climb(run, ranks, settings, *staging, **options)
        if staging:
            assert [result["fsdp"]["cuda"] for result in results] == [None, None], "this ran on CPU"
            results[0]["fsdp"]["cuda"] = recorded
            (staging[0] / "snapshot-fsdp.pickle").write_bytes(b"of this run")
        return results

    monkeypatch.setattr(ladder, "launch", on_a_gpu)
    small = Settings(ranks=2, rungs=("fsdp",), steps=1, batch=2, layers=1, width=35, context=8)
    made = ladder.run(ladder.check(small, "cpu", tmp_path), lambda *_: None)
    assert made is not None
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"][0]["cuda"] == recorded
    assert (tmp_path / "snapshot-fsdp.pickle").read_bytes() == b"of this run"
    assert (tmp_path / "allocator.png").read_bytes().startswith(b"\x89PNG")
