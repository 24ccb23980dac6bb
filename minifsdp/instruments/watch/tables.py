"""Tables on the terminal, of bytes by tag and of whatever else is measured."""

from __future__ import annotations

from rich import box
from rich.table import Table

MIB = 2**20
COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "unsharded_peak": "unsharded\npeak",
    "gradients_peak": "gradients\npeak",
}


def plain_table(title: str, caption: str, first: str = "rung") -> Table:
    """A table without a frame, whose first column has the names."""
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, show_edge=False, pad_edge=False, padding=0)
    table.add_column(first, no_wrap=True)
    return table
