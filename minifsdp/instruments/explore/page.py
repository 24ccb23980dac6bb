"""The explorer's page: one HTML file with everything in it, which asks for nothing outside itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from minifsdp.instruments.explore.log import on_one_clock
from minifsdp.instruments.plots.palette import BLACK, INK, LANE_COLOURS, LINE, PALE, REDUCE, SOFT, TAG_COLOURS, WHITE

_NEUTRAL = {"white": WHITE, "black": BLACK, "ink": INK, "soft": SOFT, "line": LINE, "pale": PALE}
_NOTE = "Each rank has its own memory; the lanes are rank 0's."

Step = Sequence[Mapping[str, Any]]
"""By rank, what `ladder.measure.log_step` returns."""


def explored(name: str, steps: Mapping[str, Step], own: str, adds: str = "", varies: str = "") -> dict[str, Any]:
    """An entry of the page: a rung, with its variants.

    Args:
        name: the rung's.
        steps: by variant.
        own: the variant that is shown first.
        adds: a few words on the rung.
        varies: the name of what the variants differ in.
    """
    variants = []
    for label, step in steps.items():
        traced = step[0]["traced"]
        variants.append({"label": label} | on_one_clock([rank["log"] for rank in step], traced.moments, traced.spans))
    return {"name": name, "adds": adds, "varies": varies, "own": list(steps).index(own), "variants": variants}


def page(
    title: str, about: str, rungs: Sequence[Mapping[str, Any]], choice: str = "Rung", first: str | None = None
) -> str:
    """The page.

    Args:
        title: its heading.
        about: a sentence on the model and the machine.
        rungs: from `explored`.
        choice: what they are, in one word.
        first: the name of the one that is shown first; the last one if there is none of this name.
    """
    names = [rung["name"] for rung in rungs]
    data = {
        "about": f"{about} {_NOTE}",
        "ranks": len(rungs[0]["variants"][0]["ranks"]),
        "rungs": rungs,
        "choice": choice,
        "first": names.index(first) if first in names else len(names) - 1,
        "tags": list(TAG_COLOURS),
        "colours": {**TAG_COLOURS, **_NEUTRAL, "reduction": REDUCE},
        "lanes": LANE_COLOURS,
    }
    colours = "".join(f"--{name}: {colour}; " for name, colour in _NEUTRAL.items())
    folder = files("minifsdp.instruments.explore")
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return Template(folder.joinpath("page.html").read_text()).substitute(
        title=escape(title),
        style=f":root {{ {colours}}}\n" + folder.joinpath("page.css").read_text(),
        data=text,
        script=folder.joinpath("page.js").read_text(),
    )


@dataclass(frozen=True)
class Frame:
    """A page in a notebook's cell: a frame as high as the page needs.

    (`IPython.display.HTML` warns of every frame, and of this machine's paths with it.)
    """

    title: str
    page: str = field(repr=False)
    height: int
    """In pixels, where the output's scripts do not run."""

    def _repr_html_(self) -> str:
        fit = "this.style.height = this.contentDocument.documentElement.offsetHeight + 8 + 'px'"
        style = f"width: 100%; height: {self.height}px; border: 0"
        about = f'style="{style}" title="{escape(self.title)}" onload="{fit}"'
        return f'<iframe srcdoc="{escape(self.page)}" {about}></iframe>'


def show(title: str, about: str, steps: Mapping[str, Step]) -> Frame:
    """The page in a frame, for the cell of a notebook.

    Args:
        title, about: as for `page`.
        steps: by name; the last one is shown first.
    """
    text = page(title, about, [explored(name, {"": step}, "") for name, step in steps.items()], "Schedule")
    rows = max(len(step[0]["log"].units) for step in steps.values())
    return Frame(title, text, 760 + 56 * rows)
