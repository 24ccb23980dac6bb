"""The site's sources, before Sphinx: every link leads to a page. `make site` builds and looks at it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from os.path import normpath
from pathlib import Path
from types import ModuleType

import pytest

from minifsdp.course.ladder.rungs import RUNGS
from minifsdp.course.workshop.catalogue import all_labs

SITE = Path(__file__).parents[2] / "docs" / "site"


@pytest.fixture(scope="module")
def stage() -> ModuleType:
    sys.path.insert(0, str(SITE.parents[1] / "slides"))
    spec = importlib.util.spec_from_file_location("stage", SITE / "stage.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["stage"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sources(stage: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    notebooks = stage.stage(folder)
    assert len(notebooks) == len(all_labs())
    return folder


def test_every_link_leads_to_a_file_of_the_site(stage: ModuleType, sources: Path) -> None:
    seen = 0
    for path in [*sources.glob("*.md"), *sources.glob("docs/*.md"), *sources.glob("labs/*.*")]:
        for found in stage.LINK.finditer(stage.prose(path.name, path.read_text())):
            seen += 1
            there = Path(normpath(path.parent / found[1])) if found[1] else path
            assert there.is_file(), f"{path.relative_to(sources)} leads to {found[1]}"
            assert there.is_relative_to(sources)
    assert seen > 150


def test_every_page_can_be_reached(sources: Path) -> None:
    """From the front page, through the lists of pages and the folders of code."""
    reached, ahead = set(), [sources / "index.md"]
    while ahead:
        path = ahead.pop()
        if path in reached or path.suffix not in (".md", ".ipynb"):
            continue
        reached.add(path)
        text = path.read_text()
        listed = re.findall(
            r"([^\s<>]+)>?$", "".join(re.findall(r"```\{toctree\}(.*?)```", text, re.DOTALL)), re.MULTILINE
        )
        names = [
            *re.findall(r"\]\(([^)#:\s]+)", text),
            *(f"{each}{kind}" for each in listed for kind in (".md", ".ipynb")),
        ]
        ahead += [there for name in names if (there := Path(normpath(path.parent / name))).is_file()]
    pages = {path for path in sources.rglob("*") if path.suffix in (".md", ".ipynb")}
    assert pages - reached == set()


def test_code_stands_on_its_page_as_it_is(sources: Path) -> None:
    name = "minifsdp/fsdp/engine.py"
    page = (sources / f"{name}.md").read_text()
    assert (SITE.parents[1] / name).read_text() in page
    listing = (sources / "minifsdp" / "fsdp" / "index.md").read_text()
    assert "| [`engine.py`](engine.py.md) | From autograd's hooks to the schedule's events. |" in listing
    assert "| [`schedules/`](schedules/index.md) | Schedules of gathers, frees and reductions" in listing


def test_each_folder_says_what_it_holds(sources: Path) -> None:
    pages = [path.read_text() for path in sources.rglob("index.md")]
    folders = [row for page in pages for row in re.findall(r"^\| \[`.*/index\.md\).*", page, re.MULTILINE)]
    assert len(folders) > 20
    assert [row for row in folders if not re.search(r"\| \S.{10,} \|$", row)] == []


def test_the_sidebar_has_the_ladder_and_the_code(sources: Path) -> None:
    text = (sources / "index.md").read_text()
    further = ["tp", "tp-sp", "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "1f1b-ddp"]  # of the other ladders
    assert re.findall(r"^([\w-]+) <minifsdp/", text, re.MULTILINE) == [*RUNGS, *further]
    assert ":caption: Code\n\nminifsdp/index\n" in text
    assert ":caption: For maintainers\n\nCONTRIBUTING\ndocs/speed\n" in text


def test_search_reads_pages_labs_and_the_package_but_no_copies_of_them(sources: Path) -> None:
    unsearched = [path for path in sources.rglob("*.md") if "\nnosearch: true\n" in path.read_text()]
    assert {path.relative_to(sources).parts[0] for path in unsearched} >= {"benchmarks", "labs", "slides"}
    assert not any(path.is_relative_to(sources / "minifsdp") for path in unsearched)


def test_an_excerpt_is_the_text_of_the_article() -> None:
    spec = importlib.util.spec_from_file_location("excerpts", SITE / "excerpts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = """<p>menu</p><article role="main"><h1>Limit</h1><h2>The limiter<a class="headerlink">#</a></h2><br/>
    <p>waits<script>not()</script></p></article><p>footer</p>"""
    assert module.article(page) == "The limiter waits"


def test_a_term_leads_to_a_file_that_is_there(stage: ModuleType, sources: Path) -> None:
    """`make site` searches for each in Chromium."""
    for term, file in stage.TERMS.items():
        assert f"single: {term}\n" in (sources / f"{file}.md").read_text()
    assert stage.TERMS["limiter"] == "minifsdp/fsdp/schedules/rate_limit.py"


def test_a_lab_in_two_sessions_is_one_page_with_one_title(sources: Path) -> None:
    cells = json.loads((sources / "labs" / "lab01_collectives.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert len(re.findall("^# ", text, re.MULTILINE)) == 1
    assert re.search("^## .*Session two", text, re.MULTILINE)


def test_headings_of_notebooks_are_found_by_githubs_names(sources: Path) -> None:
    text = (sources / "labs" / "README.md").read_text()
    fragments = re.findall(r"\.ipynb#([^)]*)\)", text)
    assert fragments
    assert all(re.fullmatch(r"[\w-]+", each) and each == each.lower() for each in fragments)


def test_each_lecture_has_its_card(stage: ModuleType, sources: Path) -> None:
    """With a figure of the deck, and what it is about."""
    text = (sources / "lectures.md").read_text()
    figures = re.findall(r'src="slides/(figures/[^"]*)"', text)
    assert len(figures) == len(stage.DECKS)
    for deck, figure in zip(stage.DECKS, figures, strict=True):
        assert f'slides/{deck}.html"><img src="slides/{figure}"' in text
        assert (
            figure.removeprefix("figures/").removesuffix(".svg")
            in (SITE.parents[1] / "slides" / f"{deck}.md").read_text()
        )
    assert min(map(len, re.findall(r"<br/>\n?([A-Z].{40,}) 50 minutes\.", text))) > 40
