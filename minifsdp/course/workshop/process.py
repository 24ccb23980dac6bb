"""A check in a fresh process: the lab's set-up cell, the exercise's cell, then the exercise's check.

A supervisor sits between that process and this one: an answer that kills or stops its parent hits the supervisor.

The notebook, the command line and the instructor's marking all use this module with the same two pieces of text, so
that they cannot reach different verdicts.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from minifsdp.course.needs import CHECKS_NEED, RANKS_USE
from minifsdp.course.workshop.child import needs_ranks
from minifsdp.course.workshop.outside import kills_so_far, unless_from_outside
from minifsdp.course.workshop.submission import Submission
from minifsdp.course.workshop.supervisor import supervise
from minifsdp.course.workshop.tree import children, end_members, is_stopped
from minifsdp.course.workshop.verdict import Verdict, of_ended_supervisor, of_result, stuck_in
from minifsdp.instruments.system.housekeeping import TREE
from minifsdp.instruments.system.lifeline import is_readable
from minifsdp.instruments.system.plain_files import files_below
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.warm.client import LONGEST_START, Process, server
from minifsdp.instruments.warm.needs import RANKS_NEED

POLL_SECONDS = 0.1
PATIENCE = 5.0  # seconds
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Resource limits of a check, including all the processes that it starts.

    Attributes:
        seconds: from the start, for which torch may have to be imported first, to the result.
        memory: resident bytes; None for no limit. Shared pages count once per process.
        output: bytes printed or written to temporary files.
        processes: largest number at once; counted only if memory is limited.
    """

    seconds: float = 60.0
    memory: int | None = None
    output: int = 64 * MIB
    processes: int = 100


LEARNER = Limits()


def run_check(
    submission: Submission,
    limits: Limits = LEARNER,
    variant: Mapping[str, int] | None = None,
    alive: Callable[[str], None] = lambda doing: None,
) -> Verdict:
    """Check an answer in a fresh process; afterwards the process and everything that it started are gone.

    Args:
        submission: the answer and its set-up cell.
        limits: the process is killed if it exceeds them.
        variant: fields of `checking.Variant` that differ from the check's own.
        alive: called with what the check is doing, at first and after each further second.
    """
    kills = kills_so_far()
    try:
        try:
            found = _run_once(submission, limits, variant, alive)
        except ConnectionError:  # the server was killed before the check started: the next one is new
            found = _run_once(submission, limits, variant, alive)
    except ConnectionError:
        return Verdict("unchecked", "its server was ended twice: free some memory, see `ulimit -a`, and check again")
    except OSError as error:
        return Verdict("unchecked", f"the check did not start: {error}")
    return unless_from_outside(found, submission.cell, kills)


def _run_once(
    submission: Submission, limits: Limits, variant: Mapping[str, int] | None, alive: Callable[[str], None]
) -> Verdict:
    """Raises ConnectionError if the server ends before the check has started."""
    with (
        scratch_folder() as folder,
        tempfile.TemporaryFile(dir=folder) as output,  # unnamed, so that the answer cannot replace it
    ):
        secret = secrets.token_hex(16)
        settings = {"variant": dict(variant or {}), "secret": secret, "file_size": 2 * limits.output}
        settings["seconds"] = limits.seconds
        (folder / "task.json").write_text(json.dumps({**submission._asdict(), **settings}))
        with _asked(folder, output, submission.exercise, secret) as check:
            ended = _watch(check, folder, output, limits, alive)
            if isinstance(ended, Verdict) and ended.state == "timeout":
                ended = ended._replace(text=ended.text + stuck_in(folder, submission.cell))
        if needs_ranks(submission.exercise):
            with suppress(OSError):
                server.prepare((*RANKS_NEED, *RANKS_USE))  # for the next
        return ended if isinstance(ended, Verdict) else of_result(folder, output, secret, ended)


@dataclass(frozen=True)
class _Check:
    """A check's supervisor, the lifeline that ends the check when it closes, and where its exit code comes from.

    `is_first`: of its server, which has to import torch for it.
    """

    is_first: bool
    supervisor: Process
    lifeline: int
    report: int


@contextmanager
def _asked(folder: Path, output: IO[bytes], exercise: str, secret: str) -> Iterator[_Check]:
    """Ask for the check's processes; afterwards none of them is left."""
    their_lifeline, lifeline = os.pipe()
    report, their_report = os.pipe()
    environ = os.environ | {TREE: _tree(secret), "TMPDIR": str(folder)}
    if "PYTHONPATH" in environ:
        parts = environ["PYTHONPATH"].split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    supervisor, is_first = None, not server.has_served
    try:
        try:
            supervisor = server.ask(
                f"check {exercise}",
                supervise,
                str(folder),
                stdio=(their_lifeline, their_report, output.fileno()),
                environ=environ,
                folder=str(folder),
                needs=(*CHECKS_NEED, *RANKS_NEED) if needs_ranks(exercise) else CHECKS_NEED,
            )
        finally:
            os.close(their_lifeline)
            os.close(their_report)
        yield _Check(is_first, supervisor, lifeline, report)
    finally:
        if supervisor is not None and supervisor.pid:
            end_members(supervisor.pid if supervisor.poll() is None else None, _tree(secret))
        os.close(lifeline)  # the supervisor goes last: it kills the orphans that remain
        os.close(report)
        if supervisor is not None:
            supervisor.wait(PATIENCE)  # in vain if it is stopped (SIGSTOP)
            supervisor.kill()
            supervisor.close()


def _tree(secret: str) -> str:
    """The label of a check's process tree; the full secret must not appear in its environment."""
    return secret[:8]


def _watch(
    check: _Check, folder: Path, output: IO[bytes], limits: Limits, alive: Callable[[str], None]
) -> Verdict | int:
    """Wait for the check; returns its exit code, or a verdict if it exceeded a limit or lost its supervisor."""
    began, shown, said, supervisor = time.monotonic(), -1, b"", None
    while (seconds := time.monotonic() - began) < (LONGEST_START if supervisor is None else limits.seconds):
        started = check.supervisor.started(POLL_SECONDS)
        if started and supervisor is None:
            supervisor = psutil.Process(check.supervisor.pid)
            began, seconds, shown = time.monotonic(), 0.0, -1
        if int(seconds) > shown:
            shown = int(seconds)
            alive(_doing(check, started, shown, limits))
        if supervisor is None:
            continue
        if is_readable(check.report, POLL_SECONDS):
            said = os.read(check.report, 16)
            if not said:
                return of_ended_supervisor(check.supervisor, output)
        if _bytes_in(folder) + os.fstat(output.fileno()).st_size > limits.output:
            return Verdict("crash", f"it wrote more than {limits.output / MIB:.0f} MiB")
        if said:
            return int(said)
        if is_stopped(supervisor):
            return Verdict("crash", "its supervisor was stopped")
        if limits.memory is not None:
            sizes = _sizes(supervisor)
            if sum(sizes) > limits.memory:
                return Verdict("crash", f"it used more than {limits.memory / MIB:.0f} MiB of memory")
            if len(sizes) > limits.processes:
                return Verdict("crash", f"it started more than {limits.processes} processes")
    if supervisor is None:
        server.end()
        return Verdict("unchecked", f"the check did not start within {LONGEST_START:.0f} s: check again")
    stopped = ": one of its processes was stopped" if any(map(is_stopped, children(supervisor))) else ""
    return Verdict("timeout", f"no result after {limits.seconds:.0f} s{stopped}")


def _doing(check: _Check, started: bool, seconds: int, limits: Limits) -> str:
    """A line for the learner: the reason to wait, the seconds so far and the most."""
    if started:
        return f"checking ... {seconds} s of at most {limits.seconds:.0f} s" if seconds else "checking ..."
    once = f" torch, once per {'notebook' if 'ipykernel' in sys.modules else 'command'}" if check.is_first else ""
    return f"starting{once} ... {seconds} s" if seconds else f"starting{once} ..."


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in files_below(folder):
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _sizes(supervisor: psutil.Process) -> list[int]:
    """Resident bytes of each process under the supervisor."""
    sizes = []
    for member in children(supervisor):
        with suppress(psutil.Error):
            sizes.append(member.memory_info().rss)
    return sizes
