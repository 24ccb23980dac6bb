"""Chromium looks at every slide of a deck, as a viewer would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chromium import watched_page

_MEASURE = """section => {
    const frame = section.getBoundingClientRect(), style = getComputedStyle(section), found = [];
    const low = frame.bottom - parseFloat(style.paddingBottom) + 2;
    const right = frame.right - parseFloat(style.paddingRight) + 2;
    const seen = [...section.querySelectorAll('*')].filter(each => !each.closest('.claim') && !each.closest('svg svg'));
    for (const each of seen) {
        const box = each.getBoundingClientRect();
        if (box.width && box.height && (box.bottom > low || box.right > right || box.top < frame.top)) {
            found.push(`overflows: ${each.tagName.toLowerCase()} "${(each.innerText || each.alt || '').slice(0, 40)}"`);
        }
    }
    const pictures = [...section.querySelectorAll('img')];
    found.push(...pictures.filter(each => !each.naturalWidth).map(each => `${each.getAttribute('src')} is not shown`));
    for (const each of pictures.filter(each => each.naturalWidth)) {
        const box = each.getBoundingClientRect();
        const shown = Math.min(box.width / each.naturalWidth, box.height / each.naturalHeight);
        const percent = Math.round(100 * shown);
        if (percent < 98) found.push(`shrinks ${each.getAttribute('src')}, and its type, to ${percent} %`);
    }
    const heading = section.querySelector('h1');
    const said = section.innerText.length - (heading ? heading.innerText.length : 0);
    if (!pictures.length && said < 20 && !section.classList.contains('title')) found.push('is empty');
    return found;
}"""


def look(page_file: Path, pictures: Path) -> list[str]:
    """A picture of each slide, `pictures`/01.png and so on; returns what is wrong with them.

    Args:
        page_file: the deck in Marp's bare template, one slide under the other.
        pictures: the folder.
    """
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob("*.png"):
        old.unlink()
    found: list[str] = []
    with watched_page({"width": 1280, "height": 720}, found) as page:
        page.goto(page_file.as_uri(), wait_until="load")
        for number, section in enumerate(page.locator("section").all(), 1):
            section.scroll_into_view_if_needed()
            section.screenshot(path=pictures / f"{number:02}.png")
            wrong: list[Any] = section.evaluate(_MEASURE)
            found += [f"slide {number} {each}" for each in wrong]
    return found
