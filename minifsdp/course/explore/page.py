"""The explorer's page: one HTML file with everything in it, which asks for nothing outside itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from minifsdp.course.plots.palette import BLACK, INK, LANE_COLOURS, LINE, PALE, REDUCE, SOFT, TAG_COLOURS, WHITE

_NEUTRAL = {"white": WHITE, "black": BLACK, "ink": INK, "soft": SOFT, "line": LINE, "pale": PALE}


def page(title: str, about: str, ranks: int, rungs: Sequence[Mapping[str, Any]]) -> str:
    """The page.

    Args:
        title: its heading.
        about: a sentence on the model, the machine and the emulated link.
        ranks: their number.
        rungs: each with "name"; "adds", what it adds to the one before; "varies", the name of what its variants differ
            in, or ""; "variants": `on_one_clock`'s steps, with "label" and "sharded", whether a parameter that is whole
            has been gathered; and "own", the place of the run's own among them.
    """
    data = {
        "about": about,
        "ranks": ranks,
        "rungs": rungs,
        "tags": list(TAG_COLOURS),
        "colours": {**TAG_COLOURS, **_NEUTRAL, "reduction": REDUCE},
        "lanes": LANE_COLOURS,
    }
    colours = "".join(f"--{name}: {colour}; " for name, colour in _NEUTRAL.items())
    folder = files("minifsdp.course.explore")
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return Template(folder.joinpath("page.html").read_text()).substitute(
        title=escape(title),
        style=f":root {{ {colours}}}\n" + folder.joinpath("page.css").read_text(),
        data=text,
        script=folder.joinpath("page.js").read_text(),
    )
