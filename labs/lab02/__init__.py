"""The reference answers of lab 02, Distributed data parallelism."""

from .ex1_average_gradient import average_gradient
from .ex2_assign_buckets import assign_buckets
from .ex3_start_bucket import start_bucket
from .ex4_finish_bucket import finish_bucket
from .ex5_on_gradient import on_gradient
from .ex6_accumulate import accumulate

__all__ = ["accumulate", "assign_buckets", "average_gradient", "finish_bucket", "on_gradient", "start_bucket"]
