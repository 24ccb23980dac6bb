"""All layouts of a number of ranks."""

from __future__ import annotations

from itertools import product
from math import prod


def every_layout(ranks: int) -> list[str]:
    """Over four axes; with ZeRO-1 and with FSDP2, where there is something to shard."""
    sizes = [each for each in product((1, 2, 4, 8), repeat=4) if prod(each) == ranks]
    words = [
        ",".join(f"{axis}={size}" for axis, size in zip(("pp", "dp", "cp", "tp"), each, strict=True) if size > 1)
        for each in sizes
    ]
    shards = [(",zero=1", ",zero=3") if "dp" in word or "cp" in word else ("",) for word in words]
    return [word + zero for word, either in zip(words, shards, strict=True) for zero in either]
