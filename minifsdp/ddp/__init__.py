"""Distributed data parallelism in three rungs, and torch's class made of them, which is imported on first use."""

from typing import TYPE_CHECKING

from minifsdp.ddp.bucketed import BucketedDDP
from minifsdp.ddp.naive import NaiveDDP
from minifsdp.ddp.overlapped import OverlappedDDP
from minifsdp.on_first_use import on_first_use

if TYPE_CHECKING:
    from minifsdp.ddp.torch_api.api import DistributedDataParallel

__all__ = ["BucketedDDP", "DistributedDataParallel", "NaiveDDP", "OverlappedDDP"]

__getattr__ = on_first_use(__name__, __all__, ".torch_api.api")
