"""The reference answers of lab 09, Precision, accumulation, offload."""

from .ex1_gather_low import gather_low
from .ex2_deliver import deliver
from .ex3_divisors import divisors
from .ex4_step_together import step_together
from .ex5_accumulate import accumulate
from .ex6_offload_gradient import offload_gradient
from .ex7_accumulate_tokens import accumulate_tokens

__all__ = [
    "accumulate",
    "accumulate_tokens",
    "deliver",
    "divisors",
    "gather_low",
    "offload_gradient",
    "step_together",
]
