"""The process in which `process.run_check` lets an answer run."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

from minifsdp.course.workshop.catalogue import exercise_file
from minifsdp.course.workshop.cells import define, last_lines
from minifsdp.instruments.system.lifeline import end_by_signal, wait_for_end
from minifsdp.instruments.warm.client import server

STACK = "stack"  # in the task's folder, the stacks of a check whose time is nearly up
LONGEST_TEXT = 10_000  # characters of a check's message; an answer may raise an error of any length


def main(folder: Path) -> None:
    """Run the task in `folder` and leave the result there, with the secret that proves whose it is."""
    task = json.loads((folder / "task.json").read_text())
    (folder / "task.json").unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, at_most(resource.RLIMIT_FSIZE, task["file_size"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Linux: should the machine run out of memory, this is what it ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if needs_ranks(task["exercise"]):
        server.fork_here()  # now, while there is one thread
    end_with_parent()
    faulthandler.dump_traceback_later(0.9 * task["seconds"], file=(folder / STACK).open("w"))
    part, result = folder / "result.part", judge(task)
    result["text"] = result["text"][:LONGEST_TEXT]
    part.write_text(json.dumps({**result, "secret": task["secret"]}))
    part.rename(folder / "result.json")
    os._exit(0)  # nothing that the answer has left behind may delay the end or change it


def at_most(number: int, limit: int) -> tuple[int, int]:
    """This limit, soft and hard, or the shell's hard one if that is lower: it cannot be raised."""
    hard = resource.getrlimit(number)[1]
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    return lower, lower


def needs_ranks(exercise: str) -> bool:
    """True if its check starts ranks, or others with which it shares code do."""
    file = exercise_file(exercise)
    return any("on_ranks" in path.read_text() for path in (file, file.with_name("shared.py")) if path.exists())


def end_with_parent() -> None:
    """Kill this process and its group when the parent, which holds the other end of stdin, is gone; empty stdin."""
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    wait_for_end(lifeline)
    end_by_signal(lifeline)


def judge(task: dict[str, Any]) -> dict[str, str]:
    """The verdict on an answer; the learner's own error is one."""
    from minifsdp.course.workshop import checking
    from minifsdp.course.workshop.references import find_reference

    ref = find_reference(task["exercise"])
    try:
        answer = define(task["setup"], task["cell"], task["exercise"])
    except BaseException as error:  # whatever a learner's cell may raise, SystemExit included
        return {"state": "failed", "text": "the cell itself raises: " + last_lines(error)}
    variant = checking.Variant(**task["variant"])
    variant = replace(variant, seed=variant.seed % 2**32)  # checks multiply it, and 64 bits have to hold that too
    try:
        checking.examine(ref.id, answer, variant)
    except checking.AnswerError as error:
        return {"state": "failed", "text": str(error)}
    except KeyboardInterrupt:
        return {"state": "failed", "text": "it ends the check: KeyboardInterrupt"}
    except BaseException as error:
        return {"state": "failed", "text": "it raises: " + last_lines(error)}
    return {"state": "passed", "text": " ".join((checking.find_check(ref.id).__doc__ or "").split())}
