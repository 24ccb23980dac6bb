"""labs/src/*.py (py:percent) -> labs/*.ipynb with outputs: `python labs/build.py [--force] [--check] [LAB ...]`.

A notebook is built again if its source or the package has changed since (labs/.built.json, not in git). `--check`
builds nothing: it fails if a notebook's cells are not its source's, or if one was never run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

LABS = Path(__file__).parent
PACKAGE = LABS.parent / "minifsdp"
BUILT = LABS / ".built.json"
CELL_SECONDS = 120

# Before the kernel starts: streams are captured as under pytest --nbval, and matplotlib draws without a display.
os.environ.setdefault("PYTEST_CURRENT_TEST", "labs/build.py")

import jupytext  # noqa: E402
import nbformat  # noqa: E402
from nbclient import NotebookClient  # noqa: E402
from nbformat import NotebookNode  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labs", nargs="*", help="such as 04; default: all")
    parser.add_argument("--force", action="store_true", help="build even what has not changed")
    parser.add_argument("--check", action="store_true", help="build nothing, fail if something is stale")
    args = parser.parse_args()
    sources = [s for s in sorted((LABS / "src").glob("lab*.py")) if not args.labs or s.name[3:5] in args.labs]
    if args.check:
        problems = [problem for source in sources for problem in stale(source)]
        sys.exit("\n".join(problems) or None)
    built = json.loads(BUILT.read_text()) if BUILT.exists() else {}
    for source in sources:
        fingerprint = digest(source)
        if args.force or stale(source) or built.get(source.stem) != fingerprint:
            build(source)
            built[source.stem] = fingerprint
            BUILT.write_text(json.dumps(built, indent=1))
        else:
            print(f"{notebook_of(source).name}: unchanged")


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
        tags = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        notebook.cells.append(new(cell.source, metadata=tags, id=f"cell-{number:03d}"))
    return notebook


def build(source: Path) -> None:
    """Run the notebook from its first cell to its last and save it with its outputs."""
    notebook = convert(source)
    nbformat.write(notebook, notebook_of(source))  # what the exercises are compared with while it runs
    NotebookClient(
        notebook, timeout=CELL_SECONDS, record_timing=False, resources={"metadata": {"path": str(LABS)}}
    ).execute()
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, notebook_of(source))
    print(f"{notebook_of(source).name}: built")


def stale(source: Path) -> list[str]:
    """What is wrong with the notebook of a source."""
    path = notebook_of(source)
    if not path.exists():
        return [f"{path.name} is missing: run make labs"]
    notebook = nbformat.read(path, as_version=4)
    problems = []
    if inputs(notebook) != inputs(convert(source)):
        problems.append(f"{path.name} is not what {source.name} says: run make labs")
    never = [cell.id for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count is None]
    if never:
        problems.append(f"{path.name} has cells that were never run ({', '.join(never)}): run make labs")
    return problems


def inputs(notebook: NotebookNode) -> list[object]:
    cells = [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]
    return [notebook.metadata.get("minifsdp"), *cells]


def digest(source: Path) -> str:
    """Changes with the lab's source and with any file of the package."""
    files = [source, *sorted(PACKAGE.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


if __name__ == "__main__":
    main()
