"""The picture of `minifsdp doctor`: bus bandwidth over message size, against the link's peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import NullLocator

from minifsdp.instruments.plots.picture import Picture
from minifsdp.instruments.plots.quantities import lines

_GB = 1e9


def bandwidth_picture(record: Mapping[str, Any]) -> Picture:
    """Plot the bus bandwidth of each operation, and the peak if known.

    Args:
        record: "world", one line; "bandwidth", rows with "bytes" and "bus" (bytes per second) by operation; "peak",
            with "rate" (bytes per second, or None) and "says".
    """
    rows = {operation.replace("_", "-"): each for operation, each in record["bandwidth"].items() if each}
    series = {name: ([row["bytes"] for row in each], [row["bus"] / _GB for row in each]) for name, each in rows.items()}
    sizes = sorted({size for xs, _ in series.values() for size in xs})
    rate, says = record["peak"]["rate"], record["peak"]["says"]
    best, name = max((y, name) for name, (_, ys) in series.items() for y in ys)
    share = f", {best / (rate / _GB):.0%} of the peak" if rate else ""
    peak = {f"peak: {says}": ((sizes[0], sizes[-1]), (rate / _GB, rate / _GB))} if rate else None
    picture = lines(
        series,
        xlabel="size of the whole tensor",
        ylabel="bus bandwidth, GB/s",
        title=f"At most {best:.3g} GB/s, with {name}{share}",
        says=f"{record['world']}. What a rank sends by a ring, over the time that the slowest rank takes."
        + ("" if rate else f" No peak: {says}."),
        expected=peak,
        logx=True,
        logy=True,
    )
    for axes in picture.figure.axes:
        axes.set_xticks(sizes, [size_name(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
    return picture


def size_name(nbytes: int) -> str:
    """A size in words, such as 64 KiB or 1 MiB, to three digits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes > 0.99 * size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
