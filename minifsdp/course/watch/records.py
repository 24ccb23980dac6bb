"""Show recorded GPU results in a lab's notebook.

Records are in `benchmarks/records` of a checkout, written and checked by `make gpu-check`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import minifsdp


class _Shown(NamedTuple):
    """What a lab shows of the ladder: its heading, the plot, and two of the plot's rungs."""

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
    """Display the lab's rungs in the latest recorded plot of a ladder run on a GPU, or print that there is none.

    Args:
        lab: "06", "07" or "08".
        says: how to read it.
    """
    shown = _SHOWN[lab]
    plot = f"ladder-{shown.plot}.png"
    found = []
    for path in records_folder().glob("*.json"):
        record = json.loads(path.read_text())
        ladder = record["parts"].get("ladder", {"plots": []})
        names = _names(shown, ladder) if plot in ladder["plots"] else []  # a part has plots only if it passed
        if set(shown.rungs) <= set(names):
            gpus = f"{record['gpu']} x {record['count']}"
            world, when = ladder["results"].get("world", ""), ladder["when"]
            sentence = f"{gpus}, {world}, {when[:10]}; two of the ladder's rungs:"
            found.append((when, path.with_suffix("") / plot, [names.index(name) for name in shown.rungs], sentence))
    if not found:
        print("there is no record of a run on a GPU to show here")
        return
    from IPython.display import Image, Markdown, display

    from minifsdp.course.watch.excerpt import excerpt

    _, picture, rows, sentence = max(found)
    text = f"### On a GPU: {shown.heading}\n\n{says.strip()}\n\n{sentence}"
    display(Markdown(text))  # type: ignore[no-untyped-call]
    display(Image(data=excerpt(picture, rows), format="png", width=900))  # type: ignore[no-untyped-call]


def _names(shown: _Shown, ladder: dict[str, Any]) -> list[str]:
    """The names of the plot's rows; a timeline has only the rungs that shard everything."""
    names = [rung["name"] for rung in ladder["results"]["rungs"]]
    return [name for name in names if shown.plot != "timeline" or name.startswith("fsdp")]
