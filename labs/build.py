"""labs/labNN/labNN_*.py (py:percent) -> labs/*.ipynb with outputs: `python labs/build.py [--force] [--check] [NN ...]`.

The cell of an exercise imports the answer from the exercise's file, and becomes the stub. A notebook is built again if
its source, an exercise or the package has changed since (labs/.built.json, not in git). The tables in labs/README.md
follow. `--check` builds nothing: it fails if a notebook's cells are not its source's, if one was never run, or if the
tables are stale.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
import tables
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

import minifsdp
from minifsdp.course.workshop.catalogue import EXERCISE, SETUP, lab_of_file

LABS = Path(__file__).parent
PACKAGE = Path(minifsdp.__file__).parent
BUILT = LABS / ".built.json"
CELL_SECONDS = 120
LONGEST_SHOWN = 8  # lines
FOLDED = "hide-input"  # the tag that folds a cell on the site; JupyterLab has metadata of its own
AS_UNDER_NBVAL = "PYTEST_CURRENT_TEST"  # where this is set, a kernel leaves file descriptor 1 alone


class BuildError(Exception):
    """A cell failed; says which one of which lab, and how."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labs", nargs="*", help="such as 04; default: all")
    parser.add_argument("--force", action="store_true", help="build even what has not changed")
    parser.add_argument("--check", action="store_true", help="build nothing, fail if something is stale")
    args = parser.parse_args()
    sources = [s for s in all_sources() if not args.labs or lab_of_file(s.name) in args.labs]
    if unknown := set(args.labs) - {lab_of_file(source.name) for source in sources}:
        parser.error(f"there is no lab {', '.join(sorted(unknown))} in {LABS}")
    if args.check:
        problems = [problem for source in sources for problem in stale(source)]
        problems += [] if args.labs else unsourced() + tables.problems(LABS)
        sys.exit("\n".join(problems) or None)
    failures = [failure for source in sources if (failure := refresh(source, args.force))]
    tables.write(LABS)
    sys.exit("\n".join(failures) or None)


def refresh(source: Path, force: bool) -> str | None:
    """Build a notebook unless it is what it would become; returns what went wrong."""
    built = json.loads(BUILT.read_text()) if BUILT.exists() else {}
    fingerprint = digest(source)
    if not force and not stale(source) and built.get(source.stem) == fingerprint:
        print(f"{notebook_of(source).name}: unchanged")
        return None
    try:
        build(source)
    except BuildError as error:
        return str(error)
    BUILT.write_text(json.dumps({**built, source.stem: fingerprint}, indent=1) + "\n")
    print(f"{notebook_of(source).name}: built")
    return None


def all_sources() -> list[Path]:
    return sorted(LABS.glob("lab*/lab*.py"))


def notebook_of(source: Path) -> Path:
    return LABS / f"{source.stem}.ipynb"


def convert(source: Path) -> NotebookNode:
    """The notebook without outputs; its cells are numbered, so that equal sources give equal files."""
    parsed = jupytext.read(source)
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
        "minifsdp": parsed.metadata.get("minifsdp", {}),
    }
    notebook = nbformat.v4.new_notebook(metadata=metadata)
    for number, cell in enumerate(parsed.cells):
        new = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        tags = cell.metadata.get("tags", [])
        metadata = {"tags": tags} if tags else {}
        exercise = next((tag.removeprefix(EXERCISE) for tag in tags if tag.startswith(EXERCISE)), None)
        text = stub(exercise, imported(cell.source, source)) if exercise else cell.source
        if cell.cell_type == "code" and is_folded(text, tags):
            metadata = {"jupyter": {"source_hidden": True}, "tags": [*tags, FOLDED]}
        notebook.cells.append(new(text, metadata=metadata, id=f"cell-{number:03d}"))
    return notebook


def imported(cell: str, source: Path) -> Path:
    """The exercise's file, from which its cell imports the answer."""
    (statement,) = ast.parse(cell).body
    assert isinstance(statement, ast.ImportFrom), f"{source.name}, {cell}: an exercise's cell imports its answer"
    return source.with_name(f"{statement.module}.py")


def stub(exercise: str, file: Path) -> str:
    """What a learner gets of an exercise's answer: its signature and its docstring."""
    text = file.read_text()
    answer = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and any("reference" in ast.unparse(each) for each in node.decorator_list)
    )
    head = text.splitlines()[answer.lineno - 1 : answer.body[0].end_lineno]
    return "\n".join([f'@exercise("{exercise}")', *head, "    ..."])


def is_folded(source: str, tags: list[str]) -> bool:
    """True for set-up and measuring code, which stands in the reader's way; one click shows it.

    Shown are short cells, exercises, predictions, and what the lab's text asks to read (tagged "shown").
    """
    if any(tag.startswith(EXERCISE) or tag == "shown" for tag in tags) or "\npredict(" in f"\n{source}":
        return False
    return SETUP in tags or sum(bool(line.strip()) for line in source.splitlines()) > LONGEST_SHOWN


def build(source: Path) -> None:
    """Run the notebook from its first cell to its last, in an empty folder, and save it with its outputs.

    Raises:
        BuildError: a cell raised, took too long, or ended its kernel. The notebook is left without outputs.
    """
    notebook = convert(source)
    save(notebook, notebook_of(source))  # what the exercises are compared with while it runs
    with tempfile.TemporaryDirectory(prefix="minifsdp-build-") as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": folder}},
        )
        running = list[NotebookNode]()
        client.on_cell_start = lambda cell, cell_index: running.append(cell)
        try:
            client.execute(env={**os.environ, AS_UNDER_NBVAL: "labs/build.py", "IPYTHONDIR": f"{folder}/.ipython"})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise BuildError(f"{source.name}, {running[-1].id} ({first_line(running[-1])}): {reason(error)}") from error
    notebook.metadata.language_info = {"name": "python"}
    save(notebook, notebook_of(source))


def save(notebook: NotebookNode, path: Path) -> None:
    """Replace a file whole, so that nobody reads half of one."""
    part = path.with_suffix(".part")
    nbformat.write(notebook, part)
    part.replace(path)


def first_line(cell: NotebookNode) -> str:
    return next((line.strip() for line in cell.source.splitlines() if line.strip()), "empty")


def reason(error: Exception) -> str:
    match error:
        case CellExecutionError():
            return f"{error.ename}: {error.evalue}"
        case CellTimeoutError():
            return f"still running after {CELL_SECONDS} s"
    return "its kernel died"


def stale(source: Path) -> list[str]:
    """What is wrong with the notebook of a source."""
    path, cure = notebook_of(source), f"run python labs/build.py {lab_of_file(source.name)}"
    if not path.exists():
        return [f"{path.name} is missing: {cure}"]
    notebook = nbformat.read(path, as_version=4)
    problems = []
    if inputs(notebook) != inputs(convert(source)):
        problems.append(f"{path.name} is not what {source.name} says: {cure}")
    never = [cell.id for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count is None]
    if never:
        problems.append(f"{path.name} has cells that were never run ({', '.join(never)}): {cure}")
    return problems


def unsourced() -> list[str]:
    """Notebooks that nothing builds."""
    built = {path.stem for path in all_sources()}
    return [
        f"{path.name} has no source in a folder of labs/"
        for path in sorted(LABS.glob("*.ipynb"))
        if path.stem not in built
    ]


def inputs(notebook: NotebookNode) -> list[object]:
    cells = [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]
    return [notebook.metadata.get("minifsdp"), *cells]


def digest(source: Path) -> str:
    """Changes with any file of the lab or of the package, and with how a notebook is built."""
    lab = [path for path in sorted(source.parent.glob("*.py")) if not path.stem.endswith(("wrong", "right"))]
    files = [*lab, Path(__file__), *sorted(PACKAGE.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


if __name__ == "__main__":
    main()
