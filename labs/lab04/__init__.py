"""The reference answers of lab 04, The flat parameter."""

from .ex1_pad_and_chunk import pad_and_chunk
from .ex2_flatten_parameters import flatten_parameters
from .ex3_shard_bounds import shard_bounds
from .ex4_place_views import place_views
from .ex5_assign_units import assign_units

__all__ = ["assign_units", "flatten_parameters", "pad_and_chunk", "place_views", "shard_bounds"]
