"""What messages cost: latency, bandwidth, how many there are, and uneven shards."""

from __future__ import annotations

from draw.canvas import MIB, canvas
from draw.ddp.drawing import BAD, GOOD
from matplotlib.figure import Figure

from minifsdp.comm import Call
from minifsdp.course.doctor.peak import NVLINK, PCIE
from minifsdp.instruments.link.emulated import EmulatedLink
from minifsdp.instruments.plots.palette import SERIES_COLOURS, SOFT, as_text

LINKS = {  # lab 01's, in seconds and bytes per second: 18 links of an H100, 16 lanes, 400 and 25 Gbit/s
    "NVLink 4": (3.4e-6, NVLINK[9, 0][0] * NVLINK[9, 0][1] * 1e9),
    "PCIe 5.0 x16": (5.7e-6, 16 * PCIE[5] * 1e9),
    "InfiniBand NDR": (14e-6, 400e9 / 8),
    "Ethernet 25G": (30e-6, 25e9 / 8),
}
PLACES = {"inside a host": SERIES_COLOURS[3], "between hosts": SERIES_COLOURS[6]}
SLOW = EmulatedLink(latency=2e-3, bandwidth=100e6)  # lab 01's
SHARES = (0.4, 0.3, 0.2, 0.1)  # of uneven shards


def milliseconds(op: str, *sizes: float) -> float:
    """Of collectives on four ranks, one after the other, on lab 01's link."""
    return 1e3 * sum(SLOW.seconds(Call(op, "", "", 0, round(size), 4)) for size in sizes)


def draw_links() -> Figure:
    """Seconds of a message over its size, on four links; where half of it is latency."""
    figure = canvas(4.7)
    axes = figure.subplots()
    sizes = [10 ** (exponent / 10) for exponent in range(30, 91)]
    for number, (name, (latency, bandwidth)) in enumerate(LINKS.items()):
        colour, line = PLACES["between hosts" if number > 1 else "inside a host"], ("-", "--")[number % 2]
        axes.plot(sizes, [latency + size / bandwidth for size in sizes], color=colour, linestyle=line)
        axes.plot(latency * bandwidth, 2 * latency, "o", color=colour, markersize=14, markeredgecolor="white")
        nudge = {"PCIe 5.0 x16": 0.5, "InfiniBand NDR": 2.0, "NVLink 4": 0.7}.get(name, 1.0)
        axes.text(1.3e9, nudge * (latency + 1e9 / bandwidth), name, va="center", color=as_text(colour))
    axes.text(1.2e3, 0.4, "time = α + n / β; α: latency, β: bandwidth", va="center", fontweight="bold")
    axes.text(1.2e3, 0.07, "dots: n = α β, half of the time is latency", va="center")
    axes.text(1.2e3, 0.0125, "modelled, not measured", color=SOFT, va="center")
    for number, (place, colour) in enumerate(PLACES.items()):
        axes.text(1.3e9, (4e-5, 1.2e-5)[number], place, va="center", color=as_text(colour), fontweight="bold")
    axes.set(xscale="log", yscale="log", xlim=(1e3, 6e10), ylabel="time of a message", xlabel="n: size of a message")
    axes.set_xticks([1e3, 1e6, 1e9], ["1 kB", "1 MB", "1 GB"])
    axes.set_yticks([1e-5, 1e-3, 1e-1], ["10 µs", "1 ms", "100 ms"])
    axes.minorticks_off()
    axes.spines["bottom"].set_bounds(1e3, 1e9)
    return figure


def draw_messages() -> Figure:
    """The same bytes in more messages, and in uneven shards, by the model that lab 01 measures."""
    figure = canvas(4.2)
    whole = 4 * MIB
    left = {f"{n}": milliseconds("all_gather", *[whole / n] * n) for n in (1, 4, 16, 64)}
    right = {
        "even": milliseconds("all_gather", whole),
        "uneven,\npadded": milliseconds("all_gather", 4 * max(SHARES) * whole),
        "uneven, 4\nbroadcasts": milliseconds("broadcast", *(share * whole for share in SHARES)),
    }
    uneven = " / ".join(f"{100 * share:.0f}" for share in SHARES)
    titles = "number of collectives", f"shards: even, or {uneven} %"
    panels = figure.subplots(1, 2, sharey=True)
    for axes, cases, title in zip(panels, (left, right), titles, strict=True):
        colours = [BAD if number else GOOD for number in range(len(cases))]
        axes.bar(range(len(cases)), list(cases.values()), 0.7, color=colours)
        for place, took in enumerate(cases.values()):
            axes.text(place, took + 3, f"{took:.0f} ms", ha="center")
        axes.set_xticks(range(len(cases)), list(cases))
        axes.set_title(title, loc="center")
        axes.tick_params(length=0)
        axes.set(ylim=(0, 1.12 * max(left.values())), yticks=[])
        axes.spines["left"].set_visible(False)
    panels[0].set_ylabel("time to gather 4 MiB\non 4 ranks")
    return figure
