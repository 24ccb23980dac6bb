"""Buffers that one stream allocates and another reads last: two ways to release them.

The caching allocator gives a freed block to the next request on the stream that allocated it. With `record_stream`, it
first waits for the reader, by means of an event that it checks at the next request for memory. A host that runs ahead
finds the block still in use, takes new memory, and needs a limiter (fsdp/schedules/rate_limit.py). The other way is to
keep a reference until the owning stream waits for the reader, and to free the buffer then. The next work on that stream
comes later in its queue, so the block can be reused at once, however far the host is ahead
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `AllGatherState` and `ReduceScatterState`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifsdp import device


class Recorded:
    """Freed at once, with `record_stream`."""

    def keep(self, buffer: Tensor) -> None:
        """The current stream has queued the last reader of `buffer`."""
        device.free(buffer)

    def give_back(self, on: torch.device) -> None:
        """The current stream, which owns these buffers, is about to allocate another."""

    def clear(self) -> None:
        """No other will be allocated for the time being."""


class Held:
    """Kept by reference until the stream that owns them waits for their last reader."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Any]] = []
        self._owner: Any = None

    def keep(self, buffer: Tensor) -> None:
        """The current stream has queued the last reader of `buffer`."""
        if device.runs_behind(buffer.device):
            self._kept.append((buffer, device.current_stream(buffer.device).record_event()))
        else:
            device.free(buffer)

    def give_back(self, on: torch.device) -> None:
        """The current stream, which owns these buffers, is about to allocate another."""
        self._owner = device.current_stream(on)
        self.clear()

    def clear(self) -> None:
        """No other will be allocated for the time being."""
        for buffer, read in self._kept:
            self._owner.wait_event(read)
            buffer.untyped_storage().resize_(0)
        self._kept.clear()
