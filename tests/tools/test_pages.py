"""The pages that are read outside a browser: their links lead somewhere, and what they say of the labs is so."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

from minifsdp.fsdp.shard import shard

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "labs" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
ROW = re.compile(r"^\| \[(\w+) [^]]+\]\(labs/(\S+)\) \| (\d+) \| .+ \|$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, fragment in LINK.findall(text):
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        if fragment and there.suffix == ".md":
            assert fragment[1:] in {slug(line) for line in there.read_text().splitlines()}, fragment


NAMED = re.compile(r"((?:`\w+`(?:, | or | and )*)+) in \[[^]]+\]\(([^)#]+\.py)\)")


def names_in(path: Path) -> set[str]:
    """What a file defines: functions, classes, variables, attributes of classes, and parameters."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    found = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found | {node.arg for node in nodes if isinstance(node, ast.arg)}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/code.md", "docs/where.md"])
def test_what_a_page_names_is_in_the_file(page: str) -> None:
    text = (ROOT / page).read_text()
    named = [(name, path) for names, path in NAMED.findall(text) for name in re.findall(r"`(\w+)`", names)]
    gone = [at for at in named if at[0] not in names_in((ROOT / page).parent / at[1])]
    assert not gone


def test_a_change_is_in_three_files_and_has_a_test() -> None:
    """The rows of docs/where.md. A link to an example stands for the new file."""
    text = (ROOT / "docs" / "where.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) == 20
    for what, edit, run in rows:
        assert 1 <= len(set(LINK.findall(edit))) <= 3, what
        assert "](../tests/" in run, what


def slug(line: str) -> str | None:
    """The fragment that leads to a heading."""
    heading = re.fullmatch(r"#+ (.+)", line)
    return re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-") if heading else None


def test_the_front_page_has_each_lab_with_its_minutes() -> None:
    rows = ROW.findall((ROOT / "README.md").read_text())
    assert [file for _, file, _ in rows] == [path.name for path in sorted((ROOT / "labs").glob("lab*.ipynb"))]
    for lab, file, minutes in rows:
        about = json.loads((ROOT / "labs" / file).read_text())["metadata"]["minifsdp"]
        assert (lab, int(minutes)) == (about["lab"], about["minutes"])


def test_the_front_page_shows_the_function_as_it_is() -> None:
    source, page = (inspect.getsource(shard), (ROOT / "README.md").read_text())
    signature, _, body = source.split('"""')
    assert f"```python\n{signature.rstrip()}{body}```\n" in page


def test_the_front_page_is_short_and_has_no_private_numbers() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert not re.search(r"\bC\d+\b|not run", text)
