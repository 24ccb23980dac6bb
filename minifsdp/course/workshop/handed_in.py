"""Collect the answers to be marked from the submissions in a folder.

Every file is read before the first answer runs, so that no answer can change another. Each file is read once, and only
if it is a regular file of bounded size.
"""

from __future__ import annotations

import ast
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from minifsdp.course.workshop.catalogue import (
    EXERCISE,
    all_labs,
    cells_with,
    edition_of,
    facts_of,
    lab_of_file,
    read_notebook,
    shipped_notebook,
    source_of,
    stubs_of,
)
from minifsdp.course.workshop.references import parse
from minifsdp.course.workshop.store import Store
from minifsdp.instruments.system.plain_files import files_below

_stubs = cache(stubs_of)  # looked up for every answer

LARGEST = 16 * 2**20  # bytes of a notebook; its Python objects may take 25 times as much
LONGEST_CELL = 200_000  # characters; a syntax tree takes about a hundred bytes per character


class Problem(NamedTuple):
    """The reason for a missing answer, or for an answer that cannot count."""

    state: Literal["missing", "altered"]
    remark: str


class Task(NamedTuple):
    """One exercise of one submission, to be marked.

    Attributes:
        submission: the name of its folder or notebook.
        lab: such as "04"; empty if the submission has no notebook of a lab.
        exercise: such as "4.1"; empty in the same case.
        answer: the text of its cell, or the problem with it.
        read: True if the submission's records show that the reference was revealed.
    """

    submission: str
    lab: str
    exercise: str
    answer: str | Problem
    read: bool = False


class _Notebook(NamedTuple):
    """A parsed notebook: the text of the cells by exercise, or None if the file cannot be read."""

    path: Path
    lab: str
    edition: str | None = None
    cells: dict[str, list[str]] | None = None


def find_tasks(folder: Path) -> list[Task]:
    """All tasks under `folder`; each subfolder, and each notebook directly in it, is a submission.

    Raises:
        ValueError: there are no submissions.
        OSError: the folder cannot be read.
    """
    tasks: list[Task] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not (path.is_dir() or path.suffix == ".ipynb"):
            continue
        labs: dict[str, list[_Notebook]] = {}
        for file in _files(path):
            notebook = _read(file)
            labs.setdefault(notebook.lab, []).append(notebook)
        found = [_task(path.name, lab, exercise, labs[lab]) for lab in sorted(labs) if lab for exercise in _stubs(lab)]
        if not found:
            names = ", ".join(_described(notebook.path) for notebook in labs.get("", ())) or "nothing"
            found = [Task(path.name, "", "", Problem("missing", f"no notebook of a lab, found {names}"))]
        tasks += found
    if not tasks:
        raise ValueError(f"{folder} has no submissions: give a folder with a subfolder for each learner")
    return tasks


def _described(path: Path) -> str:
    return path.name if stat.S_ISREG(path.lstat().st_mode) else f"{path.name}, which is not a plain file"


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in files_below(path):
        inside = file.relative_to(path)
        if file.suffix == ".ipynb" and not any(part.startswith(".") for part in inside.parts[:-1]):
            yield file


def _read(path: Path) -> _Notebook:
    """Parse a submitted notebook. Its lab comes from its metadata, else its file name; "" for any other notebook."""
    named = lab_of_file(path.name) or ""
    try:
        notebook = read_notebook(path, LARGEST, links=False)
    except (ValueError, OSError, MemoryError):
        plain = stat.S_ISREG(path.lstat().st_mode)  # a link may lead to another learner's notebook
        return _Notebook(path, named if plain and named in all_labs() else "")
    facts, labs = facts_of(notebook), all_labs()
    lab = str(facts.get("lab") or named)
    if lab not in labs:
        return _Notebook(path, "")
    cells = {
        exercise: [*map(source_of, cells_with(notebook["cells"], EXERCISE + exercise))] for exercise in _stubs(lab)
    }
    return _Notebook(path, lab, facts.get("edition"), cells)


def _task(submission: str, lab: str, exercise: str, notebooks: list[_Notebook]) -> Task:
    found = notebooks
    if len(found) > 1:  # prefer the current edition
        edition = edition_of(read_notebook(shipped_notebook(lab)))
        found = [notebook for notebook in notebooks if notebook.edition == edition]
    if len(found) != 1:
        names = ", ".join(notebook.path.name for notebook in notebooks)
        return Task(submission, lab, exercise, Problem("altered", f"several notebooks of lab {lab}: {names}"))
    read = Store(found[0].path.parent).read("reveals", exercise) is not None
    return Task(submission, lab, exercise, _answer(found[0], exercise), read)


def _answer(notebook: _Notebook, exercise: str) -> str | Problem:
    """The answer's text, if its only cell defines the exercise's function under `@exercise`; else the problem."""
    if notebook.cells is None:
        return Problem("altered", f"{notebook.path.name} cannot be read as a notebook")
    sources, stub = notebook.cells[exercise], _stubs(notebook.lab)[exercise]
    if not sources:
        return Problem("missing", f"no cell has the tag {EXERCISE}{exercise}")
    if len(sources) > 1:
        return Problem("altered", f"{len(sources)} cells have the tag {EXERCISE}{exercise}")
    if len(sources[0]) > LONGEST_CELL:
        return Problem("altered", f"the cell has more than {LONGEST_CELL:,} characters")
    try:
        functions = [node for node in parse(sources[0]).body if isinstance(node, ast.FunctionDef)]
        named = [function for function in functions if function.name == stub.name]
        if not named:
            return Problem("altered", f"the cell does not define {stub.name}")
        if not any(_decorates(function, exercise) for function in named):
            return Problem("altered", f'{stub.name} is not under @exercise("{exercise}")')
    except SyntaxError as error:
        return Problem("altered", f"the cell is not Python: {error.msg} (line {error.lineno})")
    except RecursionError:
        return Problem("altered", "the cell is too deep to read")
    return sources[0]


def _decorates(function: ast.FunctionDef, exercise: str) -> bool:
    return any(ast.unparse(decorator) == f"exercise({exercise!r})" for decorator in function.decorator_list)
