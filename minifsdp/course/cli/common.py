"""What all commands share: how they are set up, how they fail, how they show that they work."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda; auto takes GPUs if there are enough.")]
ShareOption = Annotated[
    bool | None,
    typer.Option("--share-gpu/--no-share-gpu", help="Several NCCL ranks on one GPU, if there are too few."),
]


def new_app(**options: Any) -> typer.Typer:
    """A typer application that says what is wrong in one line."""
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, **{"add_completion": False, **options})


def progress_bar(shown: bool = True) -> Progress:
    """On standard error, gone when it is done."""
    columns: list[Any] = [TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)


def fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error."""
    print(f"minifsdp: {message}", file=sys.stderr)
    sys.exit(code)
