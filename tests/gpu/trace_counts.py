"""What the host waits for in a part of a Chrome trace of torch.profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

WAITS = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D"}
RUNTIME = {"cuda_runtime", "cuda_driver"}
ITEM = "aten::_local_scalar_dense"  # what `.item()`, `float(tensor)` and `if tensor:` come down to

Event = dict[str, Any]


def host_waits(events: Iterable[Event], name: str) -> Counter[str]:
    """Calls that block the host until the device has come to something, inside the range `name`, on any thread.

    Args:
        events: the `traceEvents` of a trace of CPU and CUDA activities.
        name: of a `torch.profiler.record_function`; what the profiler itself waits for is outside.

    Returns:
        how often each was called, those never called left out. Of `ITEM` those on CUDA tensors count: the others call
        nothing of CUDA's.

    Raises:
        ValueError: the range is not there, or more than once.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in spans if event["name"] == name and event["cat"] == "user_annotation"]
    if len(ranges) != 1:
        raise ValueError(f"{len(ranges)} ranges {name!r} in this trace: there has to be one")
    inside = [event for event in spans if _is_within(event, ranges[0])]
    calls = [event for event in inside if event["cat"] in RUNTIME]
    found = Counter(event["name"] for event in calls if event["name"] in WAITS)
    for item in (event for event in inside if event["name"] == ITEM and event["cat"] == "cpu_op"):
        found[ITEM] += any(call["tid"] == item["tid"] and _is_within(call, item) for call in calls)
    return +found  # zeros go


def _is_within(event: Event, other: Event) -> bool:
    return bool(other["ts"] <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"])
