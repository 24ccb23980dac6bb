"""Open every page of a site in Chromium, at phone and screen width, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from chromium import watched_page
from playwright.sync_api import ViewportSize

PHONE: ViewportSize = {"width": 390, "height": 844}
SCREEN: ViewportSize = {"width": 1440, "height": 900}
PICTURED = ("index", "lectures", "labs/README", "labs/lab05_fsdp", "docs/parity", "minifsdp/fsdp/index")
PLOTS = (
    "() => [...document.querySelectorAll('.cell_output img')].filter(each => each.naturalWidth && each.width).length"
)
WIDER = "() => document.documentElement.scrollWidth - window.innerWidth"
LOST = "() => [...document.images].filter(each => !each.naturalWidth).map(each => each.src)"


def look_around(site: Path, plots: Mapping[str, int], pictures: Path) -> list[str]:
    """List the faults of the pages.

    Args:
        site: the folder with `index.html`.
        plots: the number of plots on each page made from a notebook.
        pictures: a folder for screenshots of some pages, in light and dark.
    """
    shutil.rmtree(pictures, ignore_errors=True)
    found: list[str] = []
    with watched_page(PHONE, found) as page:
        for path in sorted(site.rglob("*.html")):
            name = path.relative_to(site).as_posix()
            before = len(found)
            page.goto(path.as_uri(), wait_until="load")
            found += [f"{each} did not load" for each in page.evaluate(LOST)]
            if (shown := page.evaluate(PLOTS)) != plots.get(name, 0):
                found.append(f"{shown} of {plots.get(name, 0)} plots are visible")
            for size in (SCREEN, PHONE) if not name.startswith("slides/") else ():
                page.set_viewport_size(size)
                if (wider := page.evaluate(WIDER)) > 0:
                    found.append(f"{wider} pixels wider than {size['width']}")
            found[before:] = [f"{name}: {problem}" for problem in found[before:]]
        for name in PICTURED:
            page.goto((site / f"{name}.html").as_uri(), wait_until="load")
            for where, size in (("phone", PHONE), ("screen", SCREEN)):
                page.set_viewport_size(size)
                for light in ("light", "dark"):
                    page.emulate_media(color_scheme=light)
                    page.screenshot(path=pictures / f"{name.replace('/', '-')}-{where}-{light}.png")
    return found
