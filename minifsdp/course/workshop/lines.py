"""Printed lines that fit the page on which a notebook is published."""

from __future__ import annotations

import textwrap

WIDTH = 100  # characters


def wrapped(text: str, width: int = WIDTH) -> str:
    """Wrap each line of `text` that is longer than `width`; its continuation is indented by four more."""
    return "\n".join(_folded(line, width) for line in text.split("\n"))


def print_wrapped(text: str) -> None:
    """Print text whose length depends on names and values."""
    print(wrapped(text))


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
