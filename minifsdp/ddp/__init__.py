"""Distributed data parallelism in three rungs."""

from minifsdp.ddp.bucketed import BucketedDDP
from minifsdp.ddp.distributed import DistributedDataParallel
from minifsdp.ddp.naive import NaiveDDP

__all__ = ["BucketedDDP", "DistributedDataParallel", "NaiveDDP"]
