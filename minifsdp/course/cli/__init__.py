"""The command line: `minifsdp ladder`, `train`, `lab`, `doctor`, `bench`, `ps`, `clean`.

This module imports nothing slow, so that Ctrl-C is handled first.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module


def main(program: str = "minifsdp.course.cli.commands") -> None:
    """Run a command line; a bad request ends in one line on standard error and exit code 2.

    Args:
        program: the module that defines it, as `app`.
    """
    if sys.platform == "win32":
        sys.exit("minifsdp runs on Linux, macOS and WSL2, not on native Windows")
    from minifsdp.course.cli.output import going_on
    from minifsdp.course.cli.signals import end_when_interrupted

    end_when_interrupted()
    gc.set_threshold(100_000)  # or Python looks through what torch's import makes again and again: 0.3 seconds
    atexit.register(gc.freeze)  # and once more at the end: half a second
    with going_on():
        try:
            from minifsdp.course.cli.commands import run

            app = import_module(program).app
        except ModuleNotFoundError as error:  # run from a checkout, by a Python without its dependencies
            print(f"minifsdp: this Python lacks {error.name}: install it, or use another Python", file=sys.stderr)
            sys.exit(2)
        run(app)
