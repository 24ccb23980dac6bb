"""The pages that are read outside a browser: their links lead somewhere, and what they say of the labs is so."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from minifsdp.fsdp.shard import shard

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "labs" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
