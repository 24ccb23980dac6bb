"""The reference answers of lab 01, Collectives."""

from .ex1_my_rows import my_rows
from .ex2_exchange import exchange
from .ex3_reduce_while import reduce_while
from .ex4_broadcast import broadcast
from .ex5_reduce import reduce
from .ex6_reduce_scatter import reduce_scatter
from .ex7_all_gather import all_gather
from .ex8_all_reduce import all_reduce

__all__ = ["all_gather", "all_reduce", "broadcast", "exchange", "my_rows", "reduce", "reduce_scatter", "reduce_while"]
