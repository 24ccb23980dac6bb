"""The reference answers of lab 05, FSDP."""

from .ex1_watch import watch
from .ex2_gather import gather
from .ex3_free import free
from .ex4_reduce_gradient import reduce_gradient
from .ex5_attach import attach
from .ex6_attach_grad_op import attach_grad_op

__all__ = ["attach", "attach_grad_op", "free", "gather", "reduce_gradient", "watch"]
