"""A check in a fresh process: the lab's set-up cell, the exercise's cell, then the exercise's one pytest node.

The notebook, the command line and the instructor's marking all come through here with the same two pieces of text, so
they cannot come to different verdicts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from minifsdp.course.workshop.checking import Submission

State = Literal["passed", "failed", "timeout", "crash"]
SECONDS = 90.0  # what a check may take, start-up included


class Verdict(NamedTuple):
    """What came of a check.

    Attributes:
        state: "crash" is a process that ended without a result.
        text: what the check says when it has passed; else what is wrong, a fact to a line.
    """

    state: State
    text: str


def run_check(submission: Submission, seconds: float = SECONDS, variant: Mapping[str, int] | None = None) -> Verdict:
    """Check an answer in a process of its own, which is gone afterwards with all that it has started.

    Args:
        submission: what to run.
        seconds: time limit.
        variant: fields of `checking.Variant` that differ from the check's own.
    """
    with tempfile.TemporaryDirectory(prefix="minifsdp-check-") as folder:
        task = {**submission._asdict(), "variant": dict(variant or {})}
        Path(folder, "task.json").write_text(json.dumps(task))
        with Path(folder, "output").open("wb") as output:
            # The pipe is a lifeline: the process ends when it closes, however this one ends.
            process = subprocess.Popen(
                [sys.executable, "-m", "minifsdp.course.workshop.child", folder],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return Verdict("timeout", f"no result after {seconds:.0f} s")
            finally:
                end_tree(process)
        return _verdict(Path(folder), process.returncode)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started, and close its lifeline."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def _verdict(folder: Path, code: int) -> Verdict:
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        last = (folder / "output").read_text(errors="replace").strip().splitlines()[-1:]
        return Verdict("crash", "\n".join([f"the process ended with code {code} and without a result", *last]))
    return Verdict(result["state"], result["text"])
