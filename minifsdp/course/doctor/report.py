"""The doctor's report on the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from minifsdp.course.doctor.labs import WORLDS
from minifsdp.course.doctor.peak import GB
from minifsdp.instruments.plots.bandwidth import size_name

GIB = 2**30


def summary(record: dict[str, Any]) -> Group:
    """The tables; `record` is the content of `doctor.json`."""
    parts: list[Any] = [_here(record)]
    if record["gpus"]:
        parts.append(_gpus(record["gpus"]))
    parts.append(_findings(record["findings"]))
    if any(record["bandwidth"].values()):
        parts.append(_bandwidth(record))
    return Group(*parts, _labs(record["labs"]))


def reasons(record: dict[str, Any]) -> list[str]:
    """The failed checks, a line each."""
    bad = [finding for finding in record["findings"] if not finding["ok"]]
    return [f"{each['name']}: {each['what']}{'; ' if each['cure'] else ''}{each['cure']}" for each in bad]


def _here(record: dict[str, Any]) -> Table:
    table = _table("This machine")
    machine, versions = record["machine"], record["versions"]
    table.add_row("versions", ", ".join(f"{name} {each or 'none'}" for name, each in versions.items()))
    table.add_row("machine", f"{machine['host']}: {machine['cores']} cores, {_gib(machine['memory_bytes'])} of memory")
    table.add_row("world", record["world"] or "none")
    table.show_header = False
    return table


def _gpus(gpus: list[dict[str, Any]]) -> Table:
    table = _table("GPUs: memory and links", "NV18: 18 NVLinks; PIX to SYS: PCIe, from near to far")
    for heading in ("name", "GiB", "free", "CUDA", *(str(index) for index in range(len(gpus)))):
        table.add_column(heading)
    for index, gpu in enumerate(gpus):
        free = "?" if gpu["free"] is None else f"{gpu['free'] / GIB:.1f}"
        capability = ".".join(str(part) for part in gpu["capability"])
        ways = [
            "" if peer is None else f"{link or '?'}{'' if peer else ', no peer access'}"
            for peer, link in zip(gpu["peers"], gpu["links"], strict=True)
        ]
        table.add_row(str(index), gpu["name"], f"{gpu['memory'] / GIB:.1f}", free, capability, *ways)
    return table


def _findings(findings: list[dict[str, Any]]) -> Table:
    table = _table("Checks")
    table.add_column("")
    table.add_column("seen")
    table.show_header = False
    for each in findings:
        state = Text("ok", "green") if each["ok"] else Text("broken", "red")
        table.add_row(each["name"], state, Text(f"{each['what']}{'; ' if each['cure'] else ''}{each['cure']}"))
    return table


def _bandwidth(record: dict[str, Any]) -> Table:
    rate = record["peak"]["rate"]
    table = _table(
        "Bandwidth, GB/s: algorithm (bus)",
        f"for S bytes in t seconds: S / t (bytes that a rank sends in a ring / t), as in nccl-tests\n"
        f"peak: {record['peak']['says']}",
        first="S",
    )
    for operation in record["bandwidth"]:
        table.add_column(operation.replace("_", "-"), justify="right")
    sizes = sorted({row["bytes"] for rows in record["bandwidth"].values() for row in rows})
    for size in sizes:
        rows = [[row for row in rows if row["bytes"] == size] for rows in record["bandwidth"].values()]
        cells = [f"{row[0]['algorithm'] / GB:,.2f} ({row[0]['bus'] / GB:,.2f})" if row else "" for row in rows]
        table.add_row(size_name(size), *cells)
    if rate:
        best = [max((row["bus"] for row in rows), default=0.0) / rate for rows in record["bandwidth"].values()]
        table.add_section()
        table.add_row("best", *(f"{share:.0%} of the peak" for share in best))
    return table


def _labs(labs: list[dict[str, Any]]) -> Table:
    table = _table(
        "Labs and worlds here", "whether this machine has room for a lab's ranks; nothing was run", first="lab"
    )
    table.add_column("ranks", justify="right")
    for world in WORLDS:
        table.add_column(world.replace(", ", ",\n").replace("emulated ", "emulated\n"))
    for lab in labs:
        table.add_row(lab["number"], str(lab["ranks"] or "none"), *(lab["worlds"][world] for world in WORLDS))
    return table


def _table(title: str, caption: str | None = None, first: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, pad_edge=False, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    table.add_column(first, no_wrap=True)
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.0f} GiB"
