"""Memory of torch's caching allocator on a GPU over a step, from the allocator's own history.

    with MemoryHistory(where, "snapshot.pickle") as history:  # opens in pytorch.org/memory_viz
        history.mark("forward")
        ...
    history.curve  # {"us": [0, 12, ...], "allocated": [...], ...}; None on CPU

Three sizes, each including the one before:

    allocated    memory of live tensors
    active       and memory freed while another stream may still be using it (`record_stream`)
    reserved     and cached memory: everything that the allocator has taken from CUDA

The first two are bytes as requested, which the history records for each allocation and the ledger counts. The allocator
rounds every block up to a multiple of 512 bytes, and leaves up to 1 MiB more unsplit;
`torch.cuda.memory_allocated` counts these blocks (`alloc_found_block`, `free`, `free_block`, `round_size` and
`should_split` in torch's c10/cuda/CUDACachingAllocator.cpp). Segments are counted whole.
"""

from __future__ import annotations

import gc
import pickle
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from minifsdp import device
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.private import memory_snapshot, record_memory_history

_CHANGES = {  # signs of an entry's size in allocated, active and reserved
    "alloc": (1, 1, 0),
    "free_requested": (-1, 0, 0),
    "free_completed": (0, -1, 0),
    "segment_alloc": (0, 0, 1),
    "segment_map": (0, 0, 1),  # of an expandable segment
    "segment_free": (0, 0, -1),
    "segment_unmap": (0, 0, -1),
}
_GIVEN_BACK = ("segment_free", "segment_unmap")

Snapshot = Mapping[str, Any]
"""The return value of `torch.cuda.memory._snapshot`, whose docstring has the format."""


class Held(NamedTuple):
    """Bytes from time `at` on, in microseconds since 1970."""

    at: int
    allocated: int
    active: int
    reserved: int


class MemoryHistory:
    """Record the allocator of one GPU in this process inside the `with`; on CPU, do nothing.

    Torch records the whole process, so only one history can run at a time.

    Attributes:
        began: start of the `with`, in microseconds since 1970.
        curve: the allocator's sizes over time, ready for JSON, after the `with`: "us", microseconds since `began`;
            "allocated", "active" and "reserved", bytes from each of these times on; "marks", [[us, name], ...];
            "given_back", the times at which the allocator freed cached segments, as before a retry. None on CPU, with
            an allocator other than torch's native one, and if the block raised.
        alloc_retries: number of times that memory ran out and the cache was flushed (`num_alloc_retries`).
        peaks: peak bytes: "allocated", in rounded blocks, and "reserved".
    """

    def __init__(self, where: torch.device, snapshot: str | Path | None = None) -> None:
        """Record the device `where`; write `snapshot`, if given, as a file for torch's memory viewer."""
        self._where, self._snapshot = where, snapshot
        self._records = where.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
        self._marks: list[tuple[int, str]] = []
        self._retries = 0
        self.began = 0
        self.curve: dict[str, Any] | None = None
        self.alloc_retries = 0
        self.peaks: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._records:
            torch.cuda.synchronize(self._where)  # so that no memory freed earlier is still in use
            torch.cuda.reset_peak_memory_stats(self._where)
            self._retries = device.memory_stats(self._where)["alloc_retries"]
            record_memory_history(True)
        self.began = _now()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if not self._records:
            return
        try:
            if kind is None:
                self._read(_now())
        finally:
            record_memory_history(False)  # also discards the recording

    def mark(self, name: str) -> None:
        """Mark the start of a phase."""
        self._marks.append((_now(), name))

    def beside(self, ledger: Ledger) -> dict[str, Any] | None:
        """The recording beside a ledger's count of the same step; None without a recording.

        Args:
            ledger: a ledger last reset just before the `with`.

        Returns:
            "curve", "alloc_retries" and "peaks", as the attributes; "ledger": the total bytes of all tags, as "us" and
            "bytes".
        """
        if self.curve is None:
            return None
        levels = zip(*ledger.curve()["tags"].values(), strict=True)
        at = [0, *(max(0, event.at - self.began) for event in ledger.events)]
        line = {"us": at, "bytes": [sum(level) for level in levels]}
        return {"curve": self.curve, "ledger": line, "alloc_retries": self.alloc_retries, "peaks": self.peaks}

    def _read(self, ended: int) -> None:
        snapshot = memory_snapshot()
        stats = device.memory_stats(self._where)
        self.alloc_retries = stats["alloc_retries"] - self._retries
        self.peaks = {"allocated": stats["allocated_peak"], "reserved": stats["reserved_peak"]}
        index = torch.cuda.current_device() if self._where.index is None else self._where.index
        self.curve = curve(snapshot, index, self.began, ended, self._marks)
        if self._snapshot is not None:
            with Path(self._snapshot).open("wb") as file:  # as torch.cuda.memory._dump_snapshot does
                pickle.dump(snapshot, file)


def clear_cache(where: torch.device) -> None:
    """Free the allocator's cache, so that reserved memory from here on belongs to the following code."""
    if where.type == "cuda":
        gc.collect()  # a model in a reference cycle with its hooks holds memory until then
        torch.cuda.empty_cache()


def curve(
    snapshot: Snapshot, index: int, began: int, ended: int, marks: Sequence[tuple[int, str]] = ()
) -> dict[str, Any]:
    """The allocator's sizes from `began` to `ended`, as `MemoryHistory.curve`; all times in microseconds since 1970."""
    samples = held(snapshot, index)
    first = bisect_right(samples, began, key=lambda sample: sample.at) - 1
    last = samples[-1]
    shown = [*samples[first:], last._replace(at=max(ended, last.at))]
    released = [at for at in given_back(snapshot, index) if at >= began]
    return {
        "us": [max(0, sample.at - began) for sample in shown],
        **{kind: [getattr(sample, kind) for sample in shown] for kind in ("allocated", "active", "reserved")},
        "marks": [[at - began, name] for at, name in marks],
        "given_back": [at - began for at in released],
    }


def held(snapshot: Snapshot, index: int) -> list[Held]:
    """The allocator's sizes on GPU `index`: before the history, with `at` 0, then after each of its entries.

    The snapshot's segments are the final state, from which the history is traced backwards, as in torch's memory viewer
    (`simulate_memory` in torch/utils/viz/MemoryViz.js). Blocks older than the history therefore count from its start,
    and if its first entries are lost, the rest is still correct. A free that need not wait is one change.
    """
    trace = [entry for entry in snapshot["device_traces"][index] if entry["action"] in _CHANGES]
    changes = [[sign * entry["size"] for sign in _CHANGES[entry["action"]]] for entry in trace]
    sums = np.cumsum([[0, 0, 0], *changes], axis=0)
    states = (sums - sums[-1] + _state(snapshot, index)).tolist()
    times = [0, *(entry["time_us"] for entry in trace)]
    halves = {number for number, (one, other) in enumerate(pairwise(trace), start=1) if _is_one_free(one, other)}
    samples = [Held(at, *state) for at, state in zip(times, states, strict=True)]
    return [sample for number, sample in enumerate(samples) if number not in halves]


def given_back(snapshot: Snapshot, index: int) -> list[int]:
    """Times at which cached segments had been freed, one per run of frees, in microseconds since 1970."""
    trace = [*snapshot["device_traces"][index], {"action": "end"}]
    return [
        one["time_us"]
        for one, other in pairwise(trace)
        if one["action"] in _GIVEN_BACK and other["action"] not in _GIVEN_BACK
    ]


def _state(snapshot: Snapshot, index: int) -> tuple[int, int, int]:
    """Allocated, active and reserved bytes when the snapshot was taken."""
    segments = [segment for segment in snapshot["segments"] if segment["device"] == index]
    blocks = [block for segment in segments for block in segment["blocks"]]
    return (
        sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated"),
        sum(block["requested_size"] for block in blocks if block["state"] != "inactive"),
        sum(segment["total_size"] for segment in segments),
    )


def _is_one_free(entry: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """True for an immediate free, completed in the same call; a free that waits is completed in a later `malloc`."""
    actions = (entry["action"], after["action"])
    at_once = actions == ("free_requested", "free_completed") and after["time_us"] - entry["time_us"] <= 1
    return at_once and entry["addr"] == after["addr"]


def _now() -> int:
    """Microseconds since 1970, the clock of torch's entries (`snapshot` in CUDACachingAllocator.cpp)."""
    return time.time_ns() // 1000
