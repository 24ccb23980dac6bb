"""What the scripts in benchmarks/ have in common: options, tables, and a run from its checks to its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from minifsdp.instruments.system import resources
from tools.cpu_records import about, cpu_records_folder, write_record

Result = tuple[dict[str, Any], Iterable[Table], Sequence[str]]
"""A record without what `about` says, its tables, and a line for each limit that is exceeded."""


def options(doc: str, record: str) -> argparse.ArgumentParser:
    """The options that all have: --runs and --out.

    Args:
        doc: the script's docstring, whose first line is the description.
        record: the name of the record.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--runs", type=at_least(1), default=3, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=cpu_records_folder() / record, help="the record")
    return parser


def add_steps(parser: argparse.ArgumentParser, default: int | None, says: str = "%(default)s") -> None:
    """The option --steps; `says`: words for the default."""
    parser.add_argument("--steps", type=at_least(1), default=default, help=f"of each in a run; default: {says}")


def at_least(least: int) -> Callable[[str], int]:
    """An argument's type: whole numbers."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: give a whole number from {least} up")
        return int(text)

    return number


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], **look: Any) -> Table:
    """As the terminal shows it: names, then numbers."""
    shown = Table(**{"title": title, "box": box.SIMPLE_HEAD, "pad_edge": False, **look})
    for heading in headings:
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def run(benchmark: str, path: Path, measure: Callable[[], Result], check: Callable[[], Any] = lambda: None) -> int:
    """Check, measure, write the record and show it.

    Args:
        benchmark: its name.
        path: the record's.
        check: raises a ValueError for what cannot be measured.

    Returns:
        The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be.
    """
    try:
        check()
        resources.check_writable_file(path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    record, tables, lines = measure()
    write_record({**about(benchmark), **record}, path)
    for each in tables:
        Console().print(each)
    for line in lines:
        print(line, file=sys.stderr)
    return int(bool(lines))
