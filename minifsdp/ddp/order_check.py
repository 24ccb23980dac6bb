"""Buckets that compare notes: does every rank reduce the same ones? (order.py)"""

from __future__ import annotations

from minifsdp.ddp.buckets import Bucket
from minifsdp.ddp.reducer import Reducer
from minifsdp.order import announce


class CheckedReducer(Reducer):
    """A reducer that announces each bucket before it is reduced, under the names of its first and last parameter."""

    def launch(self, bucket: Bucket, index: int) -> None:
        first, last = self.names[bucket.params[0]], self.names[bucket.params[-1]]
        announce("all-reduce", f"bucket {index} ({first} to {last})", bucket.flat, self.group)
        super().launch(bucket, index)
