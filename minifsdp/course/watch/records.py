"""Show recorded GPU results in a lab's notebook.

Records are in `benchmarks/records` of a checkout, written and checked by `make gpu-check`.
"""

from __future__ import annotations

import json
from pathlib import Path

import minifsdp

_SHOWN = {"06": "timeline", "07": "timeline", "08": "allocator"}  # lab -> name of the ladder's plot


def records_folder() -> Path:
    """`benchmarks/records` beside the package; an installed package has none."""
    return Path(minifsdp.__file__).parent.parent / "benchmarks" / "records"


def show_record(lab: str, says: str) -> None:
    """Display the latest recorded plot of a ladder run on a GPU, or print that there is none.

    Args:
        lab: "06", "07" or "08".
        says: how to read it.
    """
    plot = f"ladder-{_SHOWN[lab]}.png"
    found = []
    for path in records_folder().glob("*.json"):
        record = json.loads(path.read_text())
        ladder = record["parts"].get("ladder", {"plots": []})
        if plot in ladder["plots"]:  # a part has plots only if it passed
            gpus = f"{record['gpu']} x {record['count']}"
            world, when = ladder["results"].get("world", ""), ladder["when"]
            found.append((when, path.with_suffix("") / plot, f"{gpus}, {world}, {when[:10]}:"))
    if not found:
        print("there is no record of a run on a GPU to show here")
        return
    from IPython.display import Image, Markdown, display

    _, picture, sentence = max(found)
    display(Markdown(f"### On a GPU\n\n{says.strip()}\n\n{sentence}"))  # type: ignore[no-untyped-call]
    display(Image(filename=str(picture), width=900))  # type: ignore[no-untyped-call]
