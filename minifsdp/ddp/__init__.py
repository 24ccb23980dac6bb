"""Distributed data parallelism in three rungs, and torch's class made of them."""

from minifsdp.ddp.bucketed import BucketedDDP
from minifsdp.ddp.naive import NaiveDDP
from minifsdp.ddp.overlapped import OverlappedDDP
from minifsdp.ddp.torch_api.api import DistributedDataParallel

__all__ = ["BucketedDDP", "DistributedDataParallel", "NaiveDDP", "OverlappedDDP"]
