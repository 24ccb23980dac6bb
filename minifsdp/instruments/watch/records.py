"""Show recorded GPU results in a lab's notebook.

Records are in `benchmarks/records` of a checkout, written and checked by `make gpu-check`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import minifsdp


class _Shown(NamedTuple):
    """The part of the ladder that a lab shows: its subject, the plot, and the plot's rows to compare."""

    heading: str
    plot: str
    rungs: tuple[str, str]


_SHOWN = {
    "06": _Shown("a step without and with overlap", "timeline", ("fsdp", "fsdp-overlap")),
    "07": _Shown("a step without and with prefetch", "timeline", ("fsdp-overlap", "fsdp-prefetch")),
    "08": _Shown("memory without and with a rate limit", "allocator", ("fsdp-prefetch", "fsdp-limit")),
}


def records_folder() -> Path:
    """`benchmarks/records` beside the package; an installed package has none."""
    return Path(minifsdp.__file__).parent.parent / "benchmarks" / "records"


def show_record(lab: str, says: str) -> None:
    """Display the latest recorded plot of a ladder run on a GPU, or print that there is none.

    Args:
        lab: "06", "07" or "08".
        says: how to read it.
    """
    heading, name, rungs = _SHOWN[lab]
    plot = f"ladder-{name}.png"
    found = []
    for path in records_folder().glob("*.json"):
        record = json.loads(path.read_text())
        ladder = record["parts"].get("ladder", {"plots": []})
        if plot in ladder["plots"]:  # a part has plots only if it passed
            gpus = f"{record['gpu']} x {record['count']}"
            world, when = ladder["results"].get("world", ""), ladder["when"]
            found.append((when, path.with_suffix("") / plot, f"{gpus}, {world}, {when[:10]}"))
    if not found:
        print("there is no record of a run on a GPU to show here")
        return
    from IPython.display import Image, Markdown, display

    _, picture, where = max(found)
    text = f"### On a GPU: {heading}\n\n{says.strip()}\n\nThe ladder on {where}; compare `{rungs[0]}` and `{rungs[1]}`:"
    display(Markdown(text))  # type: ignore[no-untyped-call]
    display(Image(filename=str(picture), width=900))  # type: ignore[no-untyped-call]
