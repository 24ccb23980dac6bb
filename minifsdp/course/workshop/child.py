"""The process in which `process.run_check` lets an answer run: `python -m minifsdp.course.workshop.child FOLDER`."""

from __future__ import annotations
import __future__

import contextlib
import fcntl
import json
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from minifsdp.course.launch.rank_server import start_server
from minifsdp.course.workshop.catalogue import checks_of
from minifsdp.course.workshop.references import lab_of

RANKS_NEED = ("torch", "torch._dynamo", "cloudpickle", "minifsdp.course.workshop.checking")  # but not torch's FSDP
LAZY_ANNOTATIONS = __future__.annotations.compiler_flag  # a signature may name what only the notebook defines
LONGEST_TEXT = 10_000  # characters of what is said of an answer, which may raise an error of any length
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
    checking.submit(answer, variant)
    return run_node(ref.id)


def define(setup: str, cell: str, exercise: str) -> Callable[..., Any]:
    """Run the two cells as a notebook would, and return the exercise's function.

    Raises:
        ValueError: the cell does not define it under `@exercise`.
    """
    from minifsdp.course.workshop import notebook

    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with notebook.collecting() as answers:
        for name, source in (("set-up cell", setup), (f"cell of exercise {exercise}", cell)):
            filename = f"<{name}>"
            linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
            exec(compile(source, filename, "exec", LAZY_ANNOTATIONS, dont_inherit=True), namespace)
    if exercise not in answers:
        raise ValueError(f'the cell has no function under @exercise("{exercise}")')
    return answers[exercise]


def run_node(exercise: str) -> dict[str, str]:
    """Run the exercise's pytest node in this process."""
    import pytest

    listener = _Listener()
    file = checks_of(lab_of(exercise))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # this node needs none of those installed, some take a second
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(file.parent)]
    options += ["--tb=native"]  # others show arguments, and to show a tensor whose memory was freed ends the process
    code = pytest.main([*options, "-m", f"exercise(id={exercise!r})", str(file)], plugins=[listener])
    ended = "it ends the check: KeyboardInterrupt, or pytest.exit"
    text = ended if code == pytest.ExitCode.INTERRUPTED else f"there is no check for {exercise}"
    return listener.result or {"state": "failed", "text": text}


class _Listener:
    """Hears from pytest what came of the one node."""

    result: dict[str, str] | None = None

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        from minifsdp.course.workshop.checking import AnswerError

        if call.excinfo is not None:
            error = call.excinfo.value
            text = str(error) if isinstance(error, AnswerError) else "it raises: " + last_lines(error)
            self.result = {"state": "failed", "text": text}
        elif call.when == "call":
            self.result = {"state": "passed", "text": " ".join((item.function.__doc__ or "").split())}


def last_lines(error: BaseException) -> str:
    """The exception, and the line of the learner's cell that raised it."""
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError):
        line = (error.text or "").strip()
        advice = "; a check runs plain Python: leave out lines that begin with % or !" if line[:1] in "%!" else ""
        return f"{said} (line {error.lineno} of the {(error.filename or '')[1:-1]}: {line}){advice}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<")]
    where = f" (line {frames[-1].lineno} of the {frames[-1].filename[1:-1]}: {frames[-1].line})" if frames else ""
    return said + where


if __name__ == "__main__":
    main(Path(sys.argv[1]))
