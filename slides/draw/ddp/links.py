"""What messages cost: latency, bandwidth, how many there are, and uneven shards."""

from __future__ import annotations

from draw.canvas import MIB, canvas
from draw.ddp.drawing import BAD, GOOD
from matplotlib.figure import Figure

from minifsdp.comm import Call
from minifsdp.course.doctor.peak import NVLINK, PCIE
from minifsdp.course.link.emulated import EmulatedLink
from minifsdp.course.plots.palette import SERIES_COLOURS, SOFT, as_text, ink_on

LINKS = {  # lab 01's, in seconds and bytes per second: 18 links of an H100, 16 lanes, 400 and 25 Gbit/s
    "NVLink 4": (3.4e-6, NVLINK[9, 0][0] * NVLINK[9, 0][1] * 1e9),
    "PCIe 5.0 x16": (5.7e-6, 16 * PCIE[5] * 1e9),
    "InfiniBand NDR": (14e-6, 400e9 / 8),
    "Ethernet 25G": (30e-6, 25e9 / 8),
}
SLOW = EmulatedLink(latency=2e-3, bandwidth=100e6)  # lab 01's
PIECES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (104_858, 78_643, 52_429, 26_214)  # elements of uneven shards, 1 MiB together


def gathered_in(pieces: int) -> float:
    """Seconds for 4 MiB on two ranks in so many messages."""
    return pieces * SLOW.seconds(Call("all_gather", "", "", 0, 4 * MIB // pieces, 2))


def draw_links() -> Figure:
    """Seconds of a message over its size, on four links; where half of it is latency."""
    figure = canvas(4.8)
    axes = figure.subplots()
    sizes = [10 ** (exponent / 10) for exponent in range(30, 91)]
    for (name, (latency, bandwidth)), colour in zip(LINKS.items(), SERIES_COLOURS, strict=False):
        axes.plot(sizes, [latency + size / bandwidth for size in sizes], color=colour)
        axes.plot(latency * bandwidth, 2 * latency, "o", color=colour, markersize=10, markeredgecolor="white")
        nudge = {"PCIe 5.0 x16": 0.6, "InfiniBand NDR": 1.5}.get(name, 1.0)
        axes.text(1.3e9, nudge * (latency + 1e9 / bandwidth), name, va="center", color=as_text(colour))
    axes.text(1.2e3, 0.4, "dots: n = α β, half of the time is latency", color=SOFT, va="center")
    axes.text(1.2e3, 0.12, "model, not measured", color=SOFT, va="center")
    axes.set(xscale="log", yscale="log", xlim=(1e3, 4e10))
    axes.set_xticks([1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9], ["1 kB", "10", "100", "1 MB", "10", "100", "1 GB"])
    axes.set_yticks([1e-5, 1e-3, 1e-1], ["10 µs", "1 ms", "100 ms"])
    axes.minorticks_off()
    axes.spines["bottom"].set_bounds(1e3, 1e9)
    return figure


def draw_messages() -> Figure:
    """The same bytes in more messages, and in uneven shards, by the model that lab 01 measures."""
    figure = canvas(4.8)
    left, right = figure.subplots(1, 2)
    times = [1e3 * gathered_in(pieces) for pieces in PIECES]
    left.plot(PIECES, times, "o-", color=GOOD)
    left.text(PIECES[0], times[0] + 7, f"{times[0]:.0f} ms", color=GOOD)
    left.text(PIECES[-1], times[-1] + 7, f"{times[-1]:.0f} ms", ha="right", color=GOOD)
    left.set_xscale("log", base=2)
    left.set_xticks(PIECES, PIECES)
    left.set(ylim=(0, 175), xlabel="messages", ylabel="ms")
    left.set_title("4 MiB, gathered on 2 ranks", fontweight="normal")
    cases = {
        "even": [("all_gather", 4 * sum(SHARES))],
        "uneven,\npadded": [("all_gather", 4 * 4 * max(SHARES))],
        "uneven,\nbroadcasts": [("broadcast", 4 * share) for share in SHARES],
    }
    for place, (name, calls) in enumerate(cases.items()):
        logged = [Call(op, "", "", 0, nbytes, 4) for op, nbytes in calls]
        took, wire = 1e3 * sum(map(SLOW.seconds, logged)), sum(call.wire for call in logged)
        colour = BAD if place else GOOD
        right.barh(-place, took, 0.76, color=colour)
        says = f"{took:.1f} ms, {wire / MIB:.2f} MiB\n{len(calls)} message{'s' * (len(calls) > 1)}"
        right.text(0.4, -place, says, va="center", color=ink_on(colour))
        right.text(-0.5, -place, name, va="center", ha="right")
    right.set_title("1 MiB in shards, on 4 ranks", fontweight="normal")
    right.axis("off")
    return figure
