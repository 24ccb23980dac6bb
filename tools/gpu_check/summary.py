"""The table at the end of a GPU check."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from rich import box
from rich.markup import escape
from rich.table import Table

from tools.gpu_check.parts import PARTS
from tools.records import Part

_COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow"}


def summary_table(done: Mapping[str, Part], title: str) -> Table:
    """A row per part: its state, how long it took, and its key figures or why it has not passed."""
    table = Table("part", "state", box=box.SIMPLE_HEAD, title=title)
    table.add_column("seconds", justify="right")
    table.add_column("key figures, or why not", overflow="fold")
    for name, part in done.items():
        state = f"[{_COLOURS[part.state]}]{part.state}[/]"
        table.add_row(name, state, f"{part.seconds:.1f}", escape(part.reason or figures(name, part)))
    return table


def figures(name: str, part: Part) -> str:
    """The key figures of a part that has passed, in a few words; "" if its results have another form than expected."""
    with suppress(KeyError, IndexError, TypeError, ValueError, AttributeError):
        return PARTS[name].figures(part.results)
    return ""


def exit_code(done: Mapping[str, Part]) -> int:
    """0 if a part has passed and none failed. What was skipped has not failed; nothing but that is no success."""
    states = {part.state for part in done.values()}
    return 0 if "passed" in states and "failed" not in states else 1
