"""The reference answers of lab 03, ZeRO-1 and ZeRO-2."""

from .ex1_partition import partition
from .ex2_shard_optimizer import shard_optimizer
from .ex3_reduce_bucket import reduce_bucket
from .ex4_update_and_gather import update_and_gather
from .ex5_reduce_in_backward import reduce_in_backward

__all__ = ["partition", "reduce_bucket", "reduce_in_backward", "shard_optimizer", "update_and_gather"]
