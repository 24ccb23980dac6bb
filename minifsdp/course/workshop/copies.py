"""A learner's copies of the notebooks: create one, find it, and extract its answers."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from pathlib import Path

from minifsdp.course.workshop.catalogue import (
    EXERCISE,
    SETUP,
    Cell,
    Notebook,
    as_named,
    cells_with,
    edition_of,
    facts_of,
    lab_of_file,
    labs_folder,
    read_cells,
    read_notebook,
    shipped_notebook,
    source_of,
)
from minifsdp.course.workshop.submission import Submission
from minifsdp.instruments.system import whole_files


def start(lab: str, folder: Path) -> Path:
    """Copy a lab's notebook into `folder` without its outputs, which would give away the predictions.

    Raises:
        ValueError: there is no such lab, or the folder has a copy already.
        OSError: the folder cannot be written to.
    """
    target = folder / shipped_notebook(lab).name
    if found := copies(lab, folder):
        raise ValueError(f"{found[0]} already exists: continue with it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_new(target, fresh(lab))
    return target


def fresh(lab: str) -> Notebook:
    """A lab's notebook as learners receive it: no outputs, and its edition in the metadata."""
    notebook = read_notebook(shipped_notebook(lab))
    notebook["metadata"]["minifsdp"] = {**facts_of(notebook), "lab": lab, "edition": edition_of(notebook)}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
        else:
            _attach_pictures(cell)
    return notebook


def _attach_pictures(cell: Cell) -> None:
    """Put the pictures of a Markdown cell into the notebook, which may lie anywhere from now on."""
    text, attached = source_of(cell), {}
    for link in re.findall(r"(?<=\]\()\.\./[\w/-]+\.svg(?=\))", text):
        path = labs_folder() / link
        attached[path.name] = {"image/svg+xml": b64encode(path.read_bytes()).decode()}
        text = text.replace(f"]({link})", f"](attachment:{path.name})")
    if attached:
        cell.update(source=text, attachments=attached)


def copies(lab: str, folder: Path) -> list[Path]:
    """The notebooks of a lab in a folder."""
    return [path for path in sorted(folder.glob("*.ipynb")) if lab_of_copy(path) == lab]


def lab_of_copy(path: Path) -> str | None:
    """The lab that a notebook belongs to, from its metadata or else its file name."""
    try:
        lab = facts_of(read_notebook(path)).get("lab")
    except (ValueError, OSError):
        lab = None
    return str(lab) if lab else lab_of_file(path.name)


def find_copy(lab: str, folder: Path) -> Path:
    """The copy of a lab in a folder; of several, the latest made by `start` or `update`.

    Raises:
        ValueError: there is no copy, or the choice is ambiguous.
    """
    stem = shipped_notebook(lab).stem  # raises first if the lab is unknown
    found = copies(lab, folder)
    ours = {path: named for path in found if (named := re.fullmatch(rf"{stem}(?:_(\d+))?", path.stem))}
    if ours:
        return max(ours, key=lambda path: int(ours[path][1] or 1))
    if len(found) == 1:
        return found[0]
    if not found:
        where = "this folder" if folder == Path() else str(folder)
        raise ValueError(f"no notebook of lab {lab} in {where}: minifsdp lab start {lab}, or name the notebook")
    raise ValueError(f"several notebooks of lab {lab}, name one: {', '.join(path.name for path in found)}")


def lab_and_copy(said: str, notebook: Path | None) -> tuple[str, Path | None]:
    """The lab and the notebook that a command names: either, such as "05" or "lab05_fsdp.ipynb", or both.

    Raises:
        ValueError: the notebook does not say which lab it belongs to.
    """
    if notebook is not None or not said.endswith(".ipynb"):
        return as_named(said), notebook
    if (lab := lab_of_copy(Path(said))) is None:
        read_notebook(Path(said))  # raises if there is none
        raise ValueError(f"{said} does not say which lab it is: name the lab's number first, such as 05 {said}")
    return lab, Path(said)


def answer_in(path: Path, exercise: str) -> Submission:
    """The set-up cells and the exercise's cell of a saved notebook, with any content.

    Raises:
        ValueError: there is not exactly one cell of that exercise.
        OSError: the file cannot be read.
    """
    cells = read_cells(path)
    found = cells_with(cells, EXERCISE + exercise)
    if len(found) != 1:
        many = "no cell" if not found else f"{len(found)} cells"
        raise ValueError(f"{path} has {many} with the tag {EXERCISE}{exercise}: there must be one")
    setup = "\n\n".join(source_of(cell) for cell in cells_with(cells, SETUP))
    return Submission(exercise, setup, source_of(found[0]))


def write_new(path: Path, notebook: Notebook) -> None:
    """Write a notebook to a path that does not exist yet.

    Raises:
        ValueError: the path exists.
        OSError: the folder cannot be written to.
    """
    try:
        whole_files.write_new(
            path, (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        )
    except FileExistsError:
        raise ValueError(f"{path} already exists: nothing was written") from None
