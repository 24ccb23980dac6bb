"""Buckets that compare notes: does every rank reduce the same ones? (order.py)"""

from __future__ import annotations

from typing import Any

from minifsdp.ddp.buckets import Bucket
from minifsdp.ddp.reducer import Reducer
from minifsdp.order import announce, next_on


class CheckedReducer(Reducer):
    """A reducer that announces each bucket before it is reduced, under the names of its first and last parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whose = f"model {next_on(self.group)} of the group"

    def launch(self, bucket: Bucket, index: int) -> None:
        first, last = self.names[bucket.params[0]], self.names[bucket.params[-1]]
        announce("all-reduce", f"bucket {index} ({first} to {last})", bucket.flat, self.group, self._whose)
        super().launch(bucket, index)
