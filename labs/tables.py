"""The two tables of labs/README.md: the labs, and which cell of which lab measures which statement.

They are made from the notebooks and labs/claims.toml, and stand between two comments in README.md. The numbers of
claims are tags of cells, and are not shown.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from minifsdp.course.workshop.catalogue import lab_of_file

BEGIN, END = "<!-- made by `make labs` from here -->", "<!-- to here -->"
CLAIMS = "## What the labs measure"
HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*")


class Place(NamedTuple):
    """A code cell and the heading it stands under."""

    tags: list[str]
    source: str
    heading: str


def write(labs: Path) -> None:
    """Bring README.md up to date."""
    readme = labs / "README.md"
    readme.write_text(updated(labs, readme.read_text()))


def problems(labs: Path) -> list[str]:
    """What is stale in README.md, and which statements no cell shows though their lab is there."""
    readme = (labs / "README.md").read_text()
    stale = ["labs/README.md has stale tables: run make labs"] if updated(labs, readme) != readme else []
    shown = {lab_of_file(name): {tag for place in found for tag in place.tags} for name, found in places(labs).items()}
    missing = [
        f"no cell of lab {lab} has the tag {claim}"
        for claim, row in claims(labs).items()
        for lab in row["labs"]
        if lab in shown and claim not in shown[lab]
    ]
    return stale + missing


def updated(labs: Path, readme: str) -> str:
    """The text of README.md with both tables as they should be."""
    before, rest = readme.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n\n{labs_table(labs)}\n\n{CLAIMS}\n\n{claims_table(labs)}\n\n{END}{after}"


def labs_table(labs: Path) -> str:
    rows = ["| lab | minutes | you build |", "|---|---|---|"]
    for name, found in places(labs).items():
        about = json.loads((labs / name).read_text())["metadata"]["minifsdp"]
        exercises = [place.heading for place in found if any(tag.startswith("exercise-") for tag in place.tags)]
        rows.append(f"| [{about['lab']} {about['title']}]({name}) | {about['minutes']} | {', '.join(exercises)} |")
    return "\n".join(rows)


def claims_table(labs: Path) -> str:
    """The claims in the order of the labs that measure them."""
    found = places(labs)
    rows = ["| statement | measured in |", "|---|---|"]
    for claim, row in sorted(claims(labs).items(), key=lambda item: item[1]["labs"][0]):
        cells = [
            f"[lab {lab_of_file(name)}, {place.heading}]({name}#{anchor(place.heading)})"
            for name, each in found.items()
            for place in each
            if claim in place.tags
        ]
        rows.append(f"| {row['says']} | {'<br>'.join(dict.fromkeys(cells))} |")
    return "\n".join(rows)


def claims(labs: Path) -> dict[str, Any]:
    return tomllib.loads((labs / "claims.toml").read_text())


def places(labs: Path) -> dict[str, list[Place]]:
    """By notebook, its code cells."""
    return {path.name: code_cells(path) for path in sorted(labs.glob("lab*.ipynb"))}


def code_cells(notebook: Path) -> list[Place]:
    """The code cells of a notebook in order."""
    heading, found = "", []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines = re.sub(r"```.*?```", "", source, flags=re.DOTALL).splitlines()
            heading = next((plain(match[1]) for line in reversed(lines) if (match := HEADING.fullmatch(line))), heading)
        else:
            found.append(Place(cell["metadata"].get("tags", []), source, heading))
    return found


def plain(heading: str) -> str:
    """A heading as it is shown, without code and emphasis marks."""
    return re.sub(r"[`*]", "", heading)


def anchor(heading: str) -> str:
    """The fragment by which JupyterLab and GitHub find a heading of a notebook."""
    return heading.replace(" ", "-")
