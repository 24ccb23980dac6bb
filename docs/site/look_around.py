"""Open every page of a site in Chromium, at phone and screen width, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote_plus

from chromium import watched_page
from playwright.sync_api import ViewportSize

PHONE: ViewportSize = {"width": 390, "height": 844}
LAPTOP: ViewportSize = {"width": 1366, "height": 768}
SCREEN: ViewportSize = {"width": 1440, "height": 900}
PICTURED = ("index", "lectures", "explorer", "labs/README", "labs/lab05_fsdp", "docs/parity", "minifsdp/fsdp/index")
PLOTS = (
    "() => [...document.querySelectorAll('.cell_output img')].filter(each => each.naturalWidth && each.width).length"
)
WIDER = "() => document.documentElement.scrollWidth - window.innerWidth"
CUT = (  # code, and in labs what it has printed
    "() => [...document.querySelectorAll('pre')].filter(each => each.scrollWidth > each.clientWidth).length"
)
EXCERPT = "() => document.querySelector('#search-results li p.context')?.textContent ?? ''"
FIRST = "() => document.querySelector('#search-results li a')?.getAttribute('href')"
LOST = "() => [...document.images].filter(each => !each.naturalWidth).map(each => each.src)"


def look_around(site: Path, plots: Mapping[str, int], terms: Mapping[str, str], pictures: Path) -> list[str]:
    """List the faults of the pages.

    Args:
        site: the folder with `index.html`.
        plots: the number of plots on each page made from a notebook.
        terms: for each, the file of code that a search has to find first.
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
            if name.startswith(("minifsdp/", "labs/")):
                page.set_viewport_size(LAPTOP)
                if cut := page.evaluate(CUT):
                    found.append(f"{cut} blocks of code or output are wider than their place at {LAPTOP['width']}")
                page.set_viewport_size(PHONE)
            found[before:] = [f"{name}: {problem}" for problem in found[before:]]
        for term, file in terms.items():
            page.goto(f"{(site / 'search.html').as_uri()}?q={quote_plus(term)}", wait_until="load")
            page.wait_for_selector("#search-results li a")
            if not (first := page.evaluate(FIRST)).startswith(f"{file}.html"):
                found.append(f"a search for {term!r} finds {first} before {file}")
            if len(page.evaluate(EXCERPT)) < 40:
                found.append(f"a search for {term!r} shows no excerpt")
        for name in PICTURED:
            page.goto((site / f"{name}.html").as_uri(), wait_until="load")
            for where, size in (("phone", PHONE), ("screen", SCREEN)):
                page.set_viewport_size(size)
                for light in ("light", "dark"):
                    page.emulate_media(color_scheme=light)
                    page.screenshot(path=pictures / f"{name.replace('/', '-')}-{where}-{light}.png")
    return found
