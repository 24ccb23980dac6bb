"""The command line: `minifsdp ladder`, `train`, `lab`, `doctor`, `bench`, `gpu-check`, `ps`, `clean`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from minifsdp.course.cli.common import fail, new_app

COMMANDS = {  # name -> module
    "ladder": "ladder",
    "train": "train",
    "lab": "lab",
    "doctor": "doctor",
    "bench": "bench",
    "gpu-check": "gpu_check",
    "ps": "processes",
    "clean": "processes",
}


class _Commands(TyperGroup):
    """Imports a command's module when it is asked for: the ladder needs torch, which takes a second."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        apps = import_module(f"{__name__}.{COMMANDS[cmd_name]}").APPS
        return typer.main.get_command(apps[cmd_name])


app = new_app(
    name="minifsdp",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    help="Build DDP, ZeRO and FSDP one small step at a time, with every byte measured.",
)


@app.callback()
def _commands() -> None:
    """Makes this a program of several commands."""


def main() -> None:
    """Run the command line; what is wrong with a request ends in one line on standard error and exit code 2."""
    if sys.platform == "win32":
        sys.exit("minifsdp runs on Linux, macOS and WSL2, not on native Windows")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))  # ranks and temporary files go on the way out
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except usage_error as error:
        fail(error.format_message(), code=2)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", code=130)
