"""The process that `process.run_check` starts: `python -m minifsdp.course.workshop.child FOLDER`."""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Run the task in `folder` and leave the result there."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = json.loads((folder / "task.json").read_text())
    (folder / "task.json").unlink()
    from minifsdp.course.launch import prepare

    prepare()  # the ranks' server imports torch while this process does
    part = folder / "result.part"
    part.write_text(json.dumps(judge(task)))
    part.rename(folder / "result.json")


def judge(task: dict[str, Any]) -> dict[str, str]:
    """The verdict on an answer; the learner's own error is one."""
    from minifsdp.course.workshop import checking
    from minifsdp.course.workshop.references import find_reference

    ref = find_reference(task["exercise"])
    try:
        answer = define(task["setup"], task["cell"], task["exercise"])
    except BaseException as error:  # whatever a learner's cell may raise, SystemExit included
        return {"state": "failed", "text": "the cell itself raises: " + last_lines(error)}
    checking.submit(answer, checking.Variant(**task["variant"]))
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
            exec(compile(source, filename, "exec"), namespace)
    if exercise not in answers:
        raise ValueError(f'the cell has no function under @exercise("{exercise}")')
    return answers[exercise]


def run_node(exercise: str) -> dict[str, str]:
    """Run the exercise's pytest node in this process."""
    import pytest

    from minifsdp.course.workshop.catalogue import checks_of
    from minifsdp.course.workshop.references import lab_of

    listener = _Listener()
    file = checks_of(lab_of(exercise))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:nbval", "--rootdir", str(file.parent)]
    pytest.main([*options, "-m", f"exercise(id={exercise!r})", str(file)], plugins=[listener])
    return listener.result or {"state": "failed", "text": f"there is no check for {exercise}"}


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
    """What was raised, and the line of the learner's cell that did it."""
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<")]
    where = f" (line {frames[-1].lineno} of the {frames[-1].filename[1:-1]}: {frames[-1].line})" if frames else ""
    return said + where


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
