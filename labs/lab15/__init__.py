"""The reference answers of lab 15, Three axes at once."""

from .ex1_position import position
from .ex2_pairs import pairs
from .ex3_reduce_gradients import reduce_gradients
from .ex4_step import step
from .ex5_bytes_sent import bytes_sent
from .ex6_seconds import seconds
from .ex7_token_losses import token_losses
from .ex8_ring_attention import ring_attention
from .ex9_reads import reads

__all__ = [
    "bytes_sent",
    "pairs",
    "position",
    "reads",
    "reduce_gradients",
    "ring_attention",
    "seconds",
    "step",
    "token_losses",
]
