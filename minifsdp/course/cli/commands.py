"""All commands: their names, modules and exit codes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from minifsdp.course.cli.common import fail, new_app
from minifsdp.course.cli.signals import INTERRUPTED
from minifsdp.instruments.warm.client import server
from minifsdp.instruments.warm.needs import RANKS_NEED


class Command(NamedTuple):
    """A command.

    Attributes:
        module: defines it.
        says: its line in the list of commands.
        ranks_need: modules that its ranks import; empty: it has none.
    """

    module: str
    says: str
    ranks_need: tuple[str, ...] = ()


COMMANDS = {
    "ladder": Command("ladder", "train one model on every rung; show memory, time and traffic", ("ladder.measure",)),
    "lab": Command("lab", "start a lab, check an answer, get a hint, mark"),
    "train": Command("train", "train with any strategy, precision and schedule, with checkpoints", ("train.loop",)),
    "mesh": Command("mesh", "draw who is where, and what is sent along each axis"),
    "bench": Command("bench", "compare our step with torch's, in seconds and bytes", ("bench.compete",)),
    "doctor": Command("doctor", "check this machine: hardware, ranks, bandwidth"),
    "ps": Command("processes", "list your own ranks and servers"),
    "clean": Command("processes", "end leftover ranks and servers"),
}
START = {
    "minifsdp ladder": "tables, pictures and traces (half a minute)",
    "minifsdp lab start 00": "copy the first notebook to this folder",
    "minifsdp COMMAND --help": "show options and an example",
    "minifsdp --install-completion": "set up Tab completion in your shell",
}


class _Commands(TyperGroup):
    """A group that imports a command's module on demand: the ladder needs torch, which takes a second."""

    _completing = False  # completion needs only names, and no module

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._completing = True
        return super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, rows in (("Commands", {name: each.says for name, each in COMMANDS.items()}), ("Start here", START)):
            with formatter.section(title):
                formatter.write_dl(list(rows.items()))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._completing:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].says)
        _prepare_ranks(COMMANDS[cmd_name])
        apps = import_module(f"{__package__}.{COMMANDS[cmd_name].module}").APPS
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
    """Make this a program of several commands."""


def _prepare_ranks(command: Command) -> None:
    """Make the server import what the ranks will need while this process imports what the command needs."""
    if command.ranks_need and "--help" not in sys.argv and "RANK" not in os.environ:
        with suppress(OSError):  # a launch will say that there is none
            server.prepare((*RANKS_NEED, *(f"minifsdp.course.{module}" for module in command.ranks_need)))


def run(app: typer.Typer) -> NoReturn:
    """Run the command in `sys.argv`, and end with its exit code."""
    _refuse_empty(sys.argv[1:])
    if "torch" in sys.modules:  # a script called this, perhaps one whose launcher has set no RANK
        import_module("minifsdp.instruments.launch.job").adopt_group()
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        code = app(standalone_mode=False) or 0
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # from typer's own copy of click, which has no public name
            print(error.format_message())
            sys.exit()
        fail(error.format_message(), code=2)
    except typer.Abort:
        code = INTERRUPTED
    if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        fail("interrupted", code)
    sys.exit(code)


def _refuse_empty(words: list[str]) -> None:
    """Refuse empty words, which come from unset shell variables; as a path they would mean the current folder."""
    for before, word in zip(["", *words], words, strict=False):
        option, _, value = word.partition("=")
        if not word:
            fail(f"{before if before.startswith('--') else 'an argument'} is empty: give it a value", code=2)
        if word.startswith("--") and "=" in word and not value:
            fail(f"{option} is empty: give it a value", code=2)
