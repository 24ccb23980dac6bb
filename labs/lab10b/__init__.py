"""The reference answers of lab 10b, Checkpoints, frozen parameters, recomputation."""

from .ex1_whole_values import whole_values
from .ex2_my_rows import my_rows
from .ex3_fill_rows import fill_rows
from .ex4_whole_states import whole_states
from .ex5_commit import commit
from .ex6_units_for import units_for

__all__ = ["commit", "fill_rows", "my_rows", "units_for", "whole_states", "whole_values"]
