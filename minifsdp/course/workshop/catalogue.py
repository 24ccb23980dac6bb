"""The shipped labs: their notebooks, set-up cells, exercises and checks. Nothing here imports torch."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from minifsdp import answers
from minifsdp.instruments.system.plain_files import read_plain

SETUP = "setup"  # the tag of a lab's set-up cell
EXERCISE = "exercise-"  # prefix of an exercise cell's tag; the exercise's id follows
HEADING = re.compile(
    r"^#+ (?P<id>\d+[a-z]?\.\d+) (?P<title>.+)$"
    r"(?:\n\n\*(?P<minutes>\d+) minutes, (?P<difficulty>easy|medium|hard)\*$)?",
    re.MULTILINE,
)
"""The heading of an exercise, and the line below it."""

LARGEST = 64 * 2**20  # bytes of a notebook

Notebook = dict[str, Any]
Cell = dict[str, Any]


class Stub(NamedTuple):
    """An exercise as shipped.

    Attributes:
        id: such as "5.2".
        name: the function's.
        source: the cell's text.
        title: its heading's, without the id.
        minutes: an estimate for somebody who does the lab for the first time; None: the lab has none.
        difficulty: "easy", "medium" or "hard".
    """

    id: str
    name: str
    source: str
    title: str = ""
    minutes: int | None = None
    difficulty: str = ""


def labs_folder() -> Path:
    """The folder `labs`: inside an installed package, next to the package in a checkout."""
    return Path(answers.__path__[0])


def exercise_file(exercise: str) -> Path:
    """The file with an exercise's text, answer, hints and check: `labs/lab05/ex2_gather.py` of 5.2.

    Raises:
        ValueError: there is no such exercise; the message lists those of its lab.
    """
    lab = lab_of(exercise)
    files = exercise_files(lab)
    if exercise not in files:
        raise ValueError(f"there is no exercise {exercise!r}: lab {lab} has {', '.join(files) or 'none'}")
    return files[exercise]


def exercise_files(lab: str) -> dict[str, Path]:
    """The files of a lab's exercises by id, in the order of the exercises; none if there is no such lab."""
    paths = [path for path in folder_of(lab).glob("ex*_*.py") if not path.stem.endswith("_wrong")]
    numbered = {int(path.stem[2:].partition("_")[0]): path for path in paths}
    return {f"{lab.lstrip('0') or '0'}.{number}": numbered[number] for number in sorted(numbered)}


def folder_of(lab: str) -> Path:
    """The folder of a lab: its notebook's source, its exercises, and what checks share."""
    return labs_folder() / f"lab{lab}"


def lab_of(exercise: str) -> str:
    """The lab of an exercise: "05" for "5.2", "10a" for "10a.1".

    Raises:
        ValueError: not an exercise's name.
    """
    named = re.fullmatch(r"(\d{1,2}[a-z]?)\.\d{1,2}", exercise)
    if not named:
        raise ValueError(f"{exercise!r} is not an exercise: give lab and number, such as 5.2")
    return as_named(named[1])


def all_labs() -> list[str]:
    """The numbers of all labs, such as "00", "01", "10a"."""
    return sorted(lab for path in labs_folder().glob("lab*.ipynb") if (lab := lab_of_file(path.name)))


def as_named(lab: str) -> str:
    """A lab's number as in file names: "05" for "5", "10a" for "10a"."""
    return lab and lab.zfill(3 if lab[-1:].isalpha() else 2)


def lab_of_file(name: str) -> str | None:
    """The lab in a file's name: "10a" for "lab10a_wrapping.ipynb"; None if there is none."""
    named = re.match(r"lab(\d\d[a-z]?)_", name)
    return named[1] if named else None


def shipped_notebook(lab: str) -> Path:
    """The notebook of a lab ("05").

    Raises:
        ValueError: there is no such lab; the message lists the labs.
    """
    found = sorted(labs_folder().glob(f"lab{lab}_*.ipynb")) if lab in all_labs() else []
    if not found:
        raise ValueError(f"there is no lab {lab!r}: choose from {', '.join(all_labs()) or 'none'}")
    return found[0]


def setup_of(lab: str) -> str:
    """The set-up cell of a lab, as text."""
    return source_of(cells_with(read_cells(shipped_notebook(lab)), SETUP)[0])


def about(lab: str) -> dict[str, Any]:
    """The metadata of a lab's notebook: "title", "minutes", "ranks"."""
    return facts_of(read_notebook(shipped_notebook(lab)))


def stubs_of(lab: str) -> dict[str, Stub]:
    """The exercises of a lab by id, in notebook order."""
    found: dict[str, Stub] = {}
    headings: dict[str, tuple[str, int | None, str]] = {}
    for cell in read_cells(shipped_notebook(lab)):
        if cell.get("cell_type") == "markdown":
            for match in HEADING.finditer(source_of(cell)):
                minutes = int(match["minutes"]) if match["minutes"] else None
                headings[match["id"]] = match["title"].replace("`", ""), minutes, match["difficulty"] or ""
        for tag in tags_of(cell):
            if tag.startswith(EXERCISE):
                source, exercise = source_of(cell), tag.removeprefix(EXERCISE)
                name = next(node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
                found[exercise] = Stub(exercise, name, source, *headings.get(exercise, (name,)))
    return found


def all_exercises() -> list[str]:
    """The ids of all labs' exercises."""
    return [exercise for lab in all_labs() for exercise in stubs_of(lab)]


def edition_of(notebook: Notebook) -> str:
    """A digest of the types, text and tags of all cells; outputs do not count."""
    cells = [(cell.get("cell_type"), source_of(cell), tags_of(cell)) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:12]


def read_notebook(path: Path, limit: int = LARGEST, *, links: bool = True) -> Notebook:
    """Read a saved notebook and verify that every cell has source text and well-formed tags.

    Args:
        path: the file.
        limit: largest size in bytes.
        links: accept a symbolic link to the file.

    Raises:
        ValueError: the file is missing, too large or not a notebook.
        OSError: it cannot be read.
    """
    try:
        content = read_plain(path, limit, links=links)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    try:
        notebook = json.loads(content)
        for cell in notebook["cells"]:
            source_of(cell)
            tags_of(cell)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a notebook: give a saved .ipynb file") from None
    return dict(notebook)


def read_cells(path: Path) -> list[Cell]:
    """The cells of a saved notebook; raises as `read_notebook`."""
    return list(read_notebook(path)["cells"])


def facts_of(notebook: Notebook) -> dict[str, Any]:
    """The lab's entries in a notebook's metadata: "lab", "title", "minutes", "ranks", "edition"."""
    metadata = notebook.get("metadata")
    facts = metadata.get("minifsdp") if isinstance(metadata, dict) else None
    return dict(facts) if isinstance(facts, dict) else {}


def cells_with(cells: list[Cell], tag: str) -> list[Cell]:
    """The cells with a given tag."""
    return [cell for cell in cells if tag in tags_of(cell)]


def tags_of(cell: Cell) -> list[str]:
    """A cell's tags."""
    tags = (cell.get("metadata") or {}).get("tags") or []
    return [tag for tag in tags if isinstance(tag, str)]


def source_of(cell: Cell) -> str:
    """A cell's text; in the file it may be a list of lines."""
    return "".join(cell["source"])
