"""The reference answers of lab 07, Prefetch."""

from .ex1_record import record
from .ex2_pre_forward import pre_forward
from .ex3_pre_backward import pre_backward
from .ex4_post_backward import post_backward
from .ex5_check_order import check_order

__all__ = ["check_order", "post_backward", "pre_backward", "pre_forward", "record"]
