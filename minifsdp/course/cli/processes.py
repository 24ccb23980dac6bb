"""`minifsdp ps` and `minifsdp clean`: show and end your own ranks, servers and checks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from minifsdp.course.cli.common import fail, new_app, new_console
from minifsdp.instruments.system.housekeeping import Found, end_processes, find_processes

MIB = 2**20
ps_app, clean_app = new_app(), new_app()
APPS = {"ps": ps_app, "clean": clean_app}


@ps_app.command()
def ps() -> None:
    """List your own processes of the course: ranks, the servers that fork them, and checks.

    Example: minifsdp ps
    """
    found = find_processes()
    if not found:
        print("you have no minifsdp processes")
        return
    table = Table("pid", "what", "started by", "age", "memory", box=box.SIMPLE_HEAD)
    for each in found:
        by = f"{each.starter} ({each.starter_pid}{'' if each.in_use else ', gone'})"
        table.add_row(str(each.process.pid), each.what, by, _age(each.age), f"{each.memory / MIB:.0f} MiB")
    new_console().print(table)


@clean_app.command()
def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Also end processes that are in use, without asking.")] = False,
) -> None:
    """End your own processes of the course; the notebooks and scripts that started them keep running.

    A process is in use while the program that started it is running. The command asks before it ends such processes.

    Example: minifsdp clean
    """
    found = find_processes()
    used = [each for each in found if each.in_use]
    if used and not yes:
        for each in used:
            print(f"{_line(each)}, which is still running")
        yes = sys.stdin.isatty() and typer.confirm(f"end {'it' if len(used) == 1 else 'them'} too?")
    found = [each for each in found if yes or not each.in_use]
    left = end_processes(found)
    for each in found:
        if each not in left:
            print(f"ended {_line(each)}")
    if left:
        fail(f"still running: {', '.join(str(each.process.pid) for each in left)}", code=1)
    if not found:
        print(f"nothing was ended{': minifsdp clean --yes also ends processes in use' if used else ''}")


def _line(each: Found) -> str:
    return f"{each.process.pid} {each.what}, started by {each.starter} ({each.starter_pid})"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
