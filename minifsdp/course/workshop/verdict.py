"""The verdict on an answer, from what its check's processes have left."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from minifsdp.course.workshop.child import STACK
from minifsdp.instruments.system.plain_files import read_plain
from minifsdp.instruments.warm.client import Process

State = Literal["passed", "failed", "timeout", "crash", "unchecked"]
LARGEST = 2**20  # bytes of a result


class Verdict(NamedTuple):
    """The outcome of a check.

    Attributes:
        state: "crash" if the process ended without a result, or was killed for exceeding a limit other than time;
            "unchecked" if there may be other reasons for that than the answer.
        text: the check's message if it passed; else the errors, one fact per line.
    """

    state: State
    text: str


def of_result(folder: Path, output: IO[bytes], secret: str, code: int) -> Verdict:
    """The verdict from the result file if it holds this check's secret, else a crash."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        result: dict[str, Any] = json.loads(read_plain(folder / "result.json", LARGEST))
        if result["secret"] == secret:
            if result["state"] not in ("passed", "failed"):
                return Verdict("crash", f"its result has an unknown state: {result['state']!r}")
            return Verdict(result["state"], str(result["text"]))
    ended = f"ended with code {code} and" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return Verdict("crash", "\n".join([f"its process {ended} without a result", *_last_line(output)]))


def of_ended_supervisor(supervisor: Process, output: IO[bytes]) -> Verdict:
    """The reason for a supervisor's end: killed, perhaps by an answer, or unable to start the check."""
    code = supervisor.wait(5.0)
    if code is not None and code < 0:
        return Verdict("crash", f"its supervisor was killed by {signal.Signals(-code).name}")
    return Verdict("crash", "\n".join([f"its supervisor ended with code {code}", *_last_line(output)]))


def stuck_in(folder: Path, cell: str) -> str:
    """The line of the answer in which the check was when its time was nearly up."""
    with suppress(OSError):
        found = re.search(r'"<cell of exercise [^>]*>", line (\d+) in ', read_plain(folder / STACK, LARGEST).decode())
        lines = cell.splitlines()
        if found and int(found[1]) <= len(lines):
            return f"; it was in line {found[1]}: {lines[int(found[1]) - 1].strip()}"
    return ""


def _last_line(output: IO[bytes]) -> list[str]:
    output.seek(max(0, output.seek(0, SEEK_END) - 2000))
    return output.read(2000).decode(errors="replace").strip().splitlines()[-1:]
