"""The reference answers of lab 00, Memory."""

from .ex1_training_bytes import training_bytes
from .ex2_zero_stages import zero_stages
from .ex3_adam_step import adam_step
from .ex4_saved_bytes import saved_bytes

__all__ = ["adam_step", "saved_bytes", "training_bytes", "zero_stages"]
