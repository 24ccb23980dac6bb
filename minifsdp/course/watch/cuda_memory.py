"""Memory of torch's caching allocator on a GPU over a step, from the history that it keeps itself.

    with MemoryHistory(where, "snapshot.pickle") as history:  # opens in pytorch.org/memory_viz
        history.mark("forward")
        ...
    history.curve  # {"us": [0, 12, ...], "allocated": [...], ...}; None on CPU

Three sizes, each of which contains the one before:

    allocated    what tensors have
    active       with it, what has been freed while another stream may still be using it (`record_stream`)
    reserved     with it, what is cached: all memory that the allocator has taken from CUDA

The first two are bytes as requested, which is what the history has of each allocation, and what the ledger counts. The
allocator rounds every block up, to a multiple of 512 bytes, and leaves it up to 1 MiB larger than that if what a split
would leave over were no more; `torch.cuda.memory_allocated` counts these (`alloc_found_block`, `free`, `free_block`,
`round_size` and `should_split` in torch's c10/cuda/CUDACachingAllocator.cpp). Segments are counted whole.
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
from minifsdp.course.watch.ledger import Ledger
from minifsdp.private import memory_snapshot, record_memory_history

_CHANGES = {  # by an entry's size, of allocated, active and reserved
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
"""What `torch.cuda.memory._snapshot` returns; its docstring has the format."""


class Held(NamedTuple):
    """Bytes from a moment on; `at` in microseconds since 1970."""

    at: int
    allocated: int
    active: int
    reserved: int


class MemoryHistory:
    """Records what the allocator of one GPU does in this process while its `with` runs; on CPU it does nothing.

    Torch records for the whole process: while one history runs there can be no other.

    Attributes:
        began: when the `with` was entered, in microseconds since 1970.
        curve: the allocator's sizes over time, ready for JSON, once the `with` is left: "us", microseconds since
            `began`; "allocated", "active" and "reserved", bytes from each of these on; "marks", [[us, name], ...];
            "given_back", when the allocator freed cached segments, as it does before it retries. None on CPU, with an
            allocator of another kind than torch's own, and if the block raised.
        alloc_retries: how often in that time memory had run out and the cache was given back (`num_alloc_retries`).
        peaks: the most bytes in that time: "allocated", in blocks as rounded up, and "reserved".
    """

    def __init__(self, where: torch.device, snapshot: str | Path | None = None) -> None:
        """`where`: the device; `snapshot`: a file to write for torch's memory viewer."""
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
            torch.cuda.synchronize(self._where)  # so that nothing of what was freed before is still in use
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
            record_memory_history(False)  # which also forgets what was recorded

    def mark(self, name: str) -> None:
        """A phase of this name begins."""
        self._marks.append((_now(), name))

    def beside(self, ledger: Ledger) -> dict[str, Any] | None:
        """The record beside a ledger's count of the same step; None where nothing was recorded.

        Args:
            ledger: its last reset was just before the `with`.

        Returns:
            "curve", "alloc_retries" and "peaks", as the attributes; "ledger": the bytes of all tags together, as "us"
            and "bytes".
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
    """Let the allocator give back what nothing uses, so that what it reserves from here on is for what comes."""
    if where.type == "cuda":
        gc.collect()  # a model that only its own hooks refer to has memory until then
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
    """The allocator's sizes on GPU `index`: first, with `at` 0, those before the history, then those after its entries.

    The snapshot's segments are the state at its end, and from there the history leads back to its beginning, as in
    torch's memory viewer (`simulate_memory` in torch/utils/viz/MemoryViz.js). So blocks that were there before the
    history count from its beginning, and where it has lost its first entries the rest is right. A free that needs no
    waiting is one change.
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
    """The times at which cached segments had been freed, one for each series of them; microseconds since 1970."""
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
    """True if a free did not have to wait: it is completed in the same call; others are, in some later `malloc`."""
    actions = (entry["action"], after["action"])
    at_once = actions == ("free_requested", "free_completed") and after["time_us"] - entry["time_us"] <= 1
    return at_once and entry["addr"] == after["addr"]


def _now() -> int:
    """Microseconds since 1970, as torch gives the times of its entries (`snapshot` in CUDACachingAllocator.cpp)."""
    return time.time_ns() // 1000
