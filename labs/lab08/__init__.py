"""The reference answers of lab 08, Rate limit."""

from .ex1_malloc import malloc
from .ex2_put_back import put_back
from .ex3_release import release
from .ex4_collect import collect
from .ex5_malloc_or_retry import malloc_or_retry
from .ex6_rate_limit import rate_limit
from .ex7_prefetch_within import prefetch_within
from .ex8_largest_limit import largest_limit

__all__ = [
    "collect",
    "largest_limit",
    "malloc",
    "malloc_or_retry",
    "prefetch_within",
    "put_back",
    "rate_limit",
    "release",
]
