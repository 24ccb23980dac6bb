"""What is to be marked: the submissions in a folder, and one answer's cell in them."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from minifsdp.course.workshop.catalogue import (
    EXERCISE,
    all_labs,
    cells_with,
    edition_of,
    facts_of,
    read_notebook,
    shipped_notebook,
    source_of,
    stubs_of,
)
from minifsdp.course.workshop.copies import lab_of_copy
from minifsdp.course.workshop.references import parse


class Task(NamedTuple):
    """What is to be marked: an exercise in one of the notebooks handed in; no notebook or exercise if there is none."""

    submission: str
    lab: str
    exercise: str
    notebooks: tuple[Path, ...]


class AlteredError(Exception):
    """A notebook or cell is not what was handed out."""


def find_tasks(folder: Path) -> list[Task]:
    """All that is to be marked under `folder`: its subfolders, and notebooks that lie in it, are the submissions.

    Raises:
        ValueError: there is nothing of the kind.
        OSError: the folder cannot be read.
    """
    tasks: list[Task] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not (path.is_dir() or path.suffix == ".ipynb"):
            continue
        labs: dict[str, list[Path]] = {}
        for notebook in _notebooks(path):
            labs.setdefault(_lab_of(notebook), []).append(notebook)
        found = [
            Task(path.name, lab, exercise, tuple(labs[lab]))
            for lab in sorted(labs)
            if lab
            for exercise in stubs_of(lab)
        ]
        tasks += found or [Task(path.name, "", "", tuple(labs.get("", ())))]
    if not tasks:
        raise ValueError(f"{folder} has no submissions: give a folder with a subfolder for each learner")
    return tasks


def _notebooks(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
    for root, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(files) if name.endswith(".ipynb"))


def _lab_of(notebook: Path) -> str:
    """The lab of a notebook that was handed in, "" if it is none of ours."""
    lab = lab_of_copy(notebook) if _is_plain(notebook) else None
    return lab if lab in all_labs() else ""


def _is_plain(path: Path) -> bool:
    """Not a link to somebody else's file, nor a pipe that would be waited on."""
    return stat.S_ISREG(path.lstat().st_mode)


def only_notebook(task: Task) -> Path:
    """The submission's notebook of the lab; of several, the one of the current edition.

    Raises:
        AlteredError: it is not clear which.
    """
    found = list(task.notebooks)
    if len(found) > 1:
        edition = edition_of(read_notebook(shipped_notebook(task.lab)))
        found = [path for path in found if _edition(path) == edition]
    if len(found) != 1:
        names = ", ".join(path.name for path in task.notebooks)
        raise AlteredError(f"several notebooks of lab {task.lab}: {names}")
    return found[0]


def _edition(path: Path) -> str | None:
    try:
        return facts_of(read_notebook(path)).get("edition")
    except (ValueError, OSError):
        return None


def cell_in(notebook: Path, task: Task) -> str | None:
    """The answer's text, None if there is none.

    Raises:
        AlteredError: it is not one function of the exercise's name under `@exercise`.
    """
    stub = stubs_of(task.lab)[task.exercise]
    try:
        cells = cells_with(read_notebook(notebook)["cells"], EXERCISE + task.exercise)
    except (ValueError, OSError):
        raise AlteredError(f"{notebook.name} cannot be read as a notebook") from None
    if not cells:
        return None
    if len(cells) > 1:
        raise AlteredError(f"{len(cells)} cells have the tag {EXERCISE}{task.exercise}")
    source = source_of(cells[0])
    try:
        functions = [node for node in parse(source).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError as error:
        raise AlteredError(f"the cell is not Python: {error.msg} (line {error.lineno})") from None
    if stub.name not in (function.name for function in functions):
        raise AlteredError(f"the cell does not define {stub.name}")
    if not any(_decorates(function, task.exercise) for function in functions if function.name == stub.name):
        raise AlteredError(f'{stub.name} is not under @exercise("{task.exercise}")')
    return source


def _decorates(function: ast.FunctionDef, exercise: str) -> bool:
    return any(ast.unparse(decorator) == f"exercise({exercise!r})" for decorator in function.decorator_list)
