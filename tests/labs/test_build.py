"""labs/build.py: what it builds, skips, and refuses; and the tables in labs/README.md."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from minifsdp.course.workshop.catalogue import all_labs, folder_of, labs_folder, shipped_notebook, tags_of


def load() -> ModuleType:
    """labs/build.py, which finds its neighbour as a script does."""
    sys.path.insert(0, str(labs_folder()))
    try:
        return importlib.import_module("build")
    finally:
        sys.path.remove(str(labs_folder()))


build = load()

SOURCE = """\
# ---
# jupyter:
#   minifsdp:
#     lab: "77"
#     title: A lab
#     minutes: 5
# ---

# %% [markdown]
# # Lab 77
#
# ```
# # no heading
# ```

# %% tags=["setup"]
# set-up
import os
import sys

exercise = lambda name: lambda function: print(name, function(1))

# %% [markdown]
# ## 7.1 Add `one`

# %% tags=["exercise-77.1"]
from .ex1_add import add

# %% tags=["C1"]
print(os.path.basename(os.getcwd()).split("-")[:2])
print("error", file=sys.stderr)
print(2)

# %% tags=["nbval-ignore-output"]
os.getpid()
"""
EXERCISE = '''\
"""Exercise 77.1: add one."""

from minifsdp.course.workshop.references import reference

ONE = 1


@reference("77.1", hints=("Plus.", "`+ 1`."))
def add(
    number: int,
) -> int | None:
    """Add one.

    Args:
        number: any.
    """
    return number + ONE


def check_add(answer, variant):
    """It adds."""
'''
STUB = '''\
@exercise("77.1")
def add(
    number: int,
) -> int | None:
    """Add one.

    Args:
        number: any.
    """
    ...'''
README = "Before\n\n<!-- made by `make labs` from here -->\n\n<!-- to here -->\n\nAfter\n"
CLAIMS = '[C1]\nsays = "One and one are two"\nlabs = ["77"]\n'


class Done(NamedTuple):
    out: str
    problems: list[str]


class Labs:
    """A folder like labs/ with one small lab, and build.py at work in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def build(self, *options: str) -> Done:
        sys.argv = ["build.py", *options]
        problems = ""
        try:
            build.main()
        except SystemExit as end:
            problems = str(end.code or "")
        out, err = self.capsys.readouterr()
        return Done(out, (err + problems).splitlines())


@pytest.fixture
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labs:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(build, "LABS", tmp_path)
    monkeypatch.setattr(build, "BUILT", tmp_path / ".built.json")
    write_lab(tmp_path, "lab77_small", SOURCE)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "claims.toml").write_text(CLAIMS)
    return Labs(tmp_path, capsys)


def write_lab(folder: Path, name: str, source: str) -> None:
    lab = folder / name.partition("_")[0]
    lab.mkdir(exist_ok=True)
    (lab / f"{name}.py").write_text(source)
    (lab / "ex1_add.py").write_text(EXERCISE)


def without_ignored(notebook: Path) -> dict[str, Any]:
    """A notebook without the outputs that nobody compares."""
    content: dict[str, Any] = json.loads(notebook.read_text())
    for cell in content["cells"]:
        if "nbval-ignore-output" in tags_of(cell):
            cell["outputs"] = []
    return content


class TestSmallLab:
    def test_it_builds_skips_what_is_unchanged_and_rebuilds_to_the_same_bytes(self, labs: Labs) -> None:
        assert labs.build() == ("lab77_small.ipynb: built\n", [])
        notebook = labs.folder / "lab77_small.ipynb"
        before = without_ignored(notebook)
        code = [cell for cell in before["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == [1, 2, 3, 4]
        assert "".join(code[1]["source"]) == STUB
        assert code[1]["outputs"][0]["text"] == ["77.1 None\n"], "what runs is the stub"
        assert [(each["name"], "".join(each["text"])) for each in code[2]["outputs"]] == [
            ("stdout", "['minifsdp', 'build']\n2\n"),
            ("stderr", "error\n"),
        ]
        assert before["metadata"]["minifsdp"] == {"lab": "77", "title": "A lab", "minutes": 5}
        assert labs.build() == ("lab77_small.ipynb: unchanged\n", [])
        assert labs.build("--force", "77") == ("lab77_small.ipynb: built\n", [])
        assert without_ignored(notebook) == before

        assert labs.build("--check") == ("", [])
        readme = (labs.folder / "README.md").read_text()
        assert "| [77 A lab](lab77_small.ipynb) | 5 | 7.1 Add one |" in readme
        link = "[lab 77, 7.1 Add one](lab77_small.ipynb#7.1-Add-one)"
        head = "## What the labs measure\n\n| statement | measured in |\n|---|---|\n"
        assert f"{head}| One and one are two | {link} |" in readme
        assert readme.startswith("Before\n")
        assert readme.endswith("After\n")

    def test_check_finds_what_is_stale(self, labs: Labs) -> None:
        labs.build()
        notebook, readme = labs.folder / "lab77_small.ipynb", labs.folder / "README.md"
        readme.write_text(readme.read_text().replace("One and", "Two and"))
        (labs.folder / "claims.toml").write_text(CLAIMS + '[C2]\nsays = "More"\nlabs = ["77", "78"]\n')
        content = json.loads(notebook.read_text())
        content["cells"][1]["execution_count"] = None
        notebook.write_text(json.dumps(content))
        shutil.copy(notebook, labs.folder / "lab78_other.ipynb")
        write_lab(labs.folder, "lab79_new", SOURCE)
        assert labs.build("--check").problems == [
            "lab77_small.ipynb has cells that were never run (cell-001): run python labs/build.py 77",
            "lab79_new.ipynb is missing: run python labs/build.py 79",
            "lab78_other.ipynb has no source in a folder of labs/",
            "labs/README.md has stale tables: run make labs",
            "no cell of lab 77 has the tag C2",
            "no cell of lab 78 has the tag C2",
        ]
        write_lab(labs.folder, "lab77_small", SOURCE.replace("print(2)", "print(3)"))
        problems = labs.build("--check", "77").problems
        assert problems[0] == "lab77_small.ipynb is not what lab77_small.py says: run python labs/build.py 77"

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("1 / 0", "ZeroDivisionError: division by zero"),
            ("os._exit(3)", "its kernel died"),
            ("def f(:", "SyntaxError: invalid syntax"),
        ],
    )
    def test_a_failing_cell_is_named_in_one_line(self, labs: Labs, line: str, said: str) -> None:
        write_lab(labs.folder, "lab77_small", SOURCE.replace("print(2)", line))
        _, [told] = labs.build()
        assert told.startswith("lab77_small.py, cell-004 (print(os.path.basename(os.getcwd())")
        assert f"): {said}" in told
        assert labs.build("--check").problems[0].startswith("lab77_small.ipynb has cells that were never run")

    def test_an_unknown_lab_is_refused(self, labs: Labs) -> None:
        assert "there is no lab 99" in labs.build("99").problems[-2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lab", all_labs())
def test_a_forced_rebuild_differs_only_where_it_may(lab: str, labs: Labs) -> None:
    shutil.rmtree(labs.folder / "lab77")
    (labs.folder / "claims.toml").write_text("")
    shutil.copytree(folder_of(lab), labs.folder / f"lab{lab}")
    notebook = labs.folder / shipped_notebook(lab).name
    assert labs.build("--force").problems == []
    first = without_ignored(notebook)
    assert labs.build("--force").problems == []
    assert without_ignored(notebook) == first
