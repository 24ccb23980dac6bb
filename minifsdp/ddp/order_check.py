"""Buckets that compare notes: does every rank reduce the same ones? (order.py)"""

from __future__ import annotations

from torch import nn

from minifsdp.comm import Group
from minifsdp.ddp.buckets import Bucket
from minifsdp.order import announce, next_on


class BucketOrder:
    """Announces each bucket before it is reduced, under the names of its first and last parameter.

    Args:
        names: of all parameters.
        group: the ranks that reduce.
    """

    def __init__(self, names: dict[nn.Parameter, str], group: Group) -> None:
        self.names, self.group = names, group
        self.whose = f"model {next_on(group)} of the group"

    def announce(self, bucket: Bucket, index: int) -> None:
        """Compare with the other ranks; raises as `Order.announce`."""
        first, last = self.names[bucket.params[0]], self.names[bucket.params[-1]]
        announce("all-reduce", f"bucket {index} ({first} to {last})", bucket.flat, self.group, self.whose)
