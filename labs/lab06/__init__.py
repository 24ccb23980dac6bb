"""The reference answers of lab 06, Overlap."""

from .ex1_finish_times import finish_times
from .ex2_order_streams import order_streams
from .ex3_gather import gather
from .ex4_missing_waits import missing_waits
from .ex5_free import free
from .ex6_start_reduction import start_reduction

__all__ = ["finish_times", "free", "gather", "missing_waits", "order_streams", "start_reduction"]
