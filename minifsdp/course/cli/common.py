"""Set-up, failure and progress, shared by all commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from minifsdp.instruments.launch import RankError
    from minifsdp.instruments.system.whole_files import UndeliveredError

NARROWEST = 30  # columns

DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda; auto uses GPUs if there are enough.")]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", help="Number of ranks, N; default: torchrun's, otherwise 2.")
]
ShareOption = Annotated[
    bool | None,
    typer.Option("--share-gpu/--no-share-gpu", help="Run several NCCL ranks on a GPU if there are too few."),
]


Default = TypeVar("Default", int, None)


def ranks_asked_for(ranks: int | None, default: Default) -> int | Default:
    """The number from `RanksOption`, else torchrun's number of ranks, else the default."""
    started = os.environ.get("WORLD_SIZE", "")
    return (int(started) if started.isdecimal() else default) if ranks is None else ranks


def new_app(**options: Any) -> typer.Typer:
    """A typer application that reports errors in one line."""
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, **{"add_completion": False, **options})


def new_console(stderr: bool = False) -> Console:
    """A console for tables. A terminal too narrow for any table, such as one of width 0, counts as 80 columns."""
    console = Console(stderr=stderr)
    if console.width < NARROWEST:
        console.width = 80
    return console


def progress_bar(shown: bool = True) -> Progress:
    """A progress bar on standard error that disappears at its end."""
    columns: list[Any] = [TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    console = new_console(stderr=True)  # in a file or a pipe, the bar would leave an empty line
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_interactive))


def fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error."""
    print(f"minifsdp: {message}", file=sys.stderr)
    sys.exit(code)


def run_script(main: Callable[[], int]) -> NoReturn:
    """End with the exit code of a script's `main`, or with one line if it is interrupted."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        fail("interrupted, nothing was written", code=130)


def fail_of_results(error: UndeliveredError, table: Callable[[dict[str, Any]], Any], cure: str = "") -> NoReturn:
    """Show results that could not be written to --out, and end with the line that says where they are."""
    new_console().print(table(error.record))
    fail(f"{error}{cure}", code=1)


def fail_of_ranks(error: RankError, cure: str = "") -> NoReturn:
    """Print the traceback or stack of each rank that failed, and end with the line that names the cause."""
    print(*error.__notes__, sep="\n", file=sys.stderr)
    fail(f"{error}{cure}", code=1)
