"""The text of every page, for the excerpts in search results: a page that is opened from disk may not fetch another."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

UNREAD = ("h1", "script", "style", "svg", "math")  # a result shows the page's title anyway
VOID = ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
SCRIPT = """
window.fetch = (url) => Promise.resolve({ text: () => TEXTS[new URL(url, location).href.slice(SITE.length)] });
Search.htmlToText = (text) => text;
const shown = new Set(); // a page is found by its index entry and by its title: show it once
new MutationObserver((changes) => {
  for (const item of changes.flatMap((each) => [...each.addedNodes]).filter((each) => each.tagName === "LI")) {
    const { pathname, textContent } = item.querySelector("a");
    if (shown.has(pathname + textContent)) item.remove();
    shown.add(pathname + textContent);
  }
}).observe(document.querySelector("#search-results"), { childList: true, subtree: true });
"""


def write_texts(site: Path) -> None:
    """Write `_static/texts.js`, which the search page reads instead of the pages themselves."""
    texts = {page.relative_to(site).as_posix(): article(page.read_text()) for page in sorted(site.rglob("*.html"))}
    known = json.dumps({name: text for name, text in texts.items() if text}, ensure_ascii=False)
    here = 'const SITE = new URL(".", location).href;'
    (site / "_static" / "texts.js").write_text(f"{here}\nconst TEXTS = {known};{SCRIPT}")


def article(html: str) -> str:
    """The text of a page's article, without what stands around it."""
    reader = _Article()
    reader.feed(html)
    return " ".join("".join(reader.parts).split()).removeprefix('"""')


class _Article(HTMLParser):
    """Collects the text in `<article role="main">`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._open: list[str] = []  # the elements from the article down to the place reached

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID and (self._open or ("role", "main") in attrs):
            self._open.append("skipped" if ("class", "headerlink") in attrs else tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag not in VOID:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and not {"skipped", *UNREAD} & {*self._open}:
            self.parts.append(data)
