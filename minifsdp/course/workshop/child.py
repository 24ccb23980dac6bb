"""The process in which `process.run_check` lets an answer run: `python -m minifsdp.course.workshop.child FOLDER`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from minifsdp.course.launch.rank_server import start_server
from minifsdp.course.workshop.catalogue import checks_of
from minifsdp.course.workshop.cells import define, last_lines
from minifsdp.course.workshop.references import lab_of

RANKS_NEED = ("torch", "torch._dynamo", "cloudpickle", "minifsdp.course.workshop.checking")  # but not torch's FSDP
LONGEST_TEXT = 10_000  # characters of a check's message; an answer may raise an error of any length
F_SETSIG = 10  # fcntl(2), Linux: which signal announces that a file descriptor became readable


def main(folder: Path) -> None:
    """Run the task in `folder` and leave the result there, with the secret that proves whose it is."""
    end_with_parent()
    task = json.loads((folder / "task.json").read_text())
    (folder / "task.json").unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (task["file_size"], task["file_size"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Linux: should the machine run out of memory, this is what it ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if "on_ranks" in checks_of(lab_of(task["exercise"])).read_text():
        start_server(RANKS_NEED)  # it imports torch while this process does
    part, result = folder / "result.part", judge(task)
    result["text"] = result["text"][:LONGEST_TEXT]
    part.write_text(json.dumps({**result, "secret": task["secret"]}))
    part.rename(folder / "result.json")
    os._exit(0)  # nothing that the answer has left behind may delay the end or change it


def end_with_parent() -> None:
    """Kill this process and its group when the parent, which holds the other end of stdin, is gone; empty stdin.

    A waiting thread does it, unless C code holds the GIL; on Linux the kernel sends the signal and needs no thread.
    """
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def wait_and_end() -> None:
        os.read(lifeline, 1)  # nothing is ever written, so this returns when the other end closes
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_and_end, daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may know nothing of it
            fcntl.fcntl(lifeline, F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
