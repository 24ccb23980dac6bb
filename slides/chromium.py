"""The browser that looks at what was built, with the network cut."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HERE = ("file:", "data:", "blob:")


def program() -> str:
    """Where Chromium is; ends with what to do if it is not here."""
    found = os.environ.get("CHROME_PATH") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    return found or sys.exit("Chromium is not here: apt install chromium, or say where it is in CHROME_PATH")


@contextmanager
def watched_page(size: ViewportSize, found: list[str]) -> Iterator[Page]:
    """A page in a browser without a network.

    Args:
        size: "width" and "height" of what is seen, in pixels.
        found: gets a line for each error on the page's console, each request that fails, and each for anything that is
            not a file here.
    """
    from playwright.sync_api import sync_playwright  # the checks that need no browser need no playwright either

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-background-networking"]
        engine = playwright.chromium.launch(executable_path=program(), args=flags)
        page = engine.new_page(viewport=size, offline=True)
        page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: found.append(str(error)))
        page.on("requestfailed", lambda request: found.append(f"{request.url} was not to be had"))
        page.on("request", lambda each: None if each.url.startswith(HERE) else found.append(f"it asks for {each.url}"))
        yield page
        engine.close()
