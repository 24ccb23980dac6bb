"""Records of GPUs: what is one, what docs/gpu.md and the labs say of those that there are, and of none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from minifsdp.course.bench.contestants import CONTESTANTS
from minifsdp.course.ladder.rungs import RUNGS
from minifsdp.instruments.watch import records
from minifsdp.instruments.watch.records import show_record
from tools.records import PARTS, Part, RecordError, find_records, parse_record, read_record
from tools.worlds_table import COLUMNS, NO_RECORDS, NOT_RUN, SHARED_TIMES, TORCHS, WORLDS, worlds_table
from tools.worlds_table import RUNGS as ROWS

ROOT = Path(__file__).parents[2]
SHARED = "2 ranks over NCCL, sharing cuda:0: 1 GPU here, shared as requested"
VERSIONS = {"python": "3", "torch": "2.stub", "cuda": "0", "nccl": "0.stub", "driver": None, "minifsdp": "0"}
NAME = "made-up-7-x1"


def part(results: dict[str, Any], **changed: Any) -> dict[str, Any]:
    when = "2000-01-02T03:04:05Z"
    sound = {"state": "passed", "reason": None, "seconds": 1.5, "when": when, "commit": "abc", "versions": VERSIONS}
    return {**sound, "command": "python -c 0", "results": results, "plots": [], **changed}


def step(world: str, model: float | None, **medians: float) -> dict[str, Any]:
    rows = [{"name": name.replace("_", "-"), "median": m, "model_seconds": model} for name, m in medians.items()]
    return {"world": world, "model_says": "the model says" if model else "no model of it", "contestants": rows}


def made_up() -> dict[str, Any]:
    """A sound record of a GPU that there is not."""
    outcomes = [{"name": "a", "outcome": "passed", "seconds": 1, "reason": None}]
    figures = {
        "test_overlap": {
            "world": "rank 0 alone, collectives carry nothing",
            "multigpu.overlap.compute_ms": 10,
            "overlap.communication_ms": 8,
            "overlap.both_ms": 12,
        },
        "test_limiter": {
            "world": "2 NCCL ranks on one GPU",
            "limiter.retries_without": 5,
            "limiter.retries_with": 0,
        },
    }
    rungs = [{"name": "fsdp-limit", "overlap": 0.625, "step_seconds": [0.03, 0.02, 0.04]}]
    bench = step(SHARED, None, torch_fsdp1=0.0123, fsdp_limit=0.011)
    alone = step("1 rank over NCCL, a GPU each: 1 GPU here", 0.0021, fsdp_limit=0.0029)
    return {
        "format": 1,
        "gpu": "Made-up 7",
        "count": 1,
        "versions": VERSIONS,
        "parts": {
            "doctor": part({}, state="failed", reason="exit code 1: the link is down"),
            "tests": part({"tests": outcomes, "figures": figures}),
            "ladder": part({"world": SHARED, "rungs": rungs}, plots=["ladder-timeline.png"]),
            "step": part({**bench, "alone": alone}),
            "labs": part({}, state="skipped", reason="not installed here: nbval"),
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the made-up record and its picture."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "ladder-timeline.png").write_bytes(b"\x89PNG")
    (tmp_path / f"{NAME}.json").write_text(json.dumps(made_up()))
    return tmp_path


# What a record is


def test_a_record_is_read_and_written_alike(folder: Path) -> None:
    (record,) = find_records(folder)
    assert (record.name, record.gpu, record.count, list(record.parts)) == (NAME, "Made-up 7", 1, list(PARTS))
    assert parse_record(record.dumps()) == record
    assert record.passed("doctor") is None
    assert record.passed("ladder").world == SHARED  # type: ignore[union-attr]


def test_no_folder_has_no_records(tmp_path: Path) -> None:
    assert find_records(tmp_path / "none") == []


def without(content: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != key}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: r.update(format=2), "format is 2"),
        (lambda r: r.update(count=0), "it names no GPU"),
        (lambda r: r.update(extra=1), "unknown field 'extra'"),
        (lambda r: r.pop("versions"), "no field 'versions'"),
        (lambda r: r["versions"].update(cuda=13), "versions.cuda is 13, neither text nor null"),
        (lambda r: r["parts"].update(stairs=part({})), "parts.stairs is none of doctor"),
        (lambda r: r["parts"].update(labs=[]), "parts.labs is no table"),
        (lambda r: r["parts"]["step"].update(state="ok"), "parts.step.state is 'ok'"),
        (lambda r: r["parts"]["step"].update(seconds="1"), "parts.step: seconds is '1'"),
        (lambda r: r["parts"]["step"].update(seconds=True), "parts.step: seconds is True"),
        (lambda r: r["parts"]["step"].update(when="yesterday"), "parts.step.when is 'yesterday'"),
        (lambda r: r["parts"]["step"].update(reason="a cold"), "parts.step.reason has to be null"),
        (lambda r: r["parts"]["labs"].update(reason=None), "parts.labs.reason has to be one line"),
        (lambda r: r["parts"]["labs"].update(reason="two\nlines"), "parts.labs.reason has to be one line"),
        (lambda r: r["parts"]["labs"].update(reason=""), "parts.labs.reason has to be one line"),
        (lambda r: r["parts"]["ladder"].update(plots=["../a.png"]), "no name of a PNG"),
        (lambda r: r["parts"]["ladder"].update(plots=["other.png"]), "picture made-up-7-x1/other.png is not there"),
        (lambda r: r["parts"]["step"]["results"].update(model_seconds=float("nan")), "a figure is NaN"),
        (lambda r: r["parts"]["tests"]["results"].update(tests=["a"]), "parts.tests.results.tests has to be a list"),
        (lambda r: r["parts"]["tests"]["results"]["tests"][0].update(x=1), "parts.tests.results.tests has to be"),
        (lambda r: r.update(gpu="Another"), "its name has to be another-x1.json"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(folder: Path, spoil: Any, says: str) -> None:
    content = made_up()
    content["versions"] = dict(VERSIONS)
    spoil(content)
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=re.escape(says)) as error:
        find_records(folder)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}'])
def test_files_that_are_something_else_are_refused(folder: Path, text: str) -> None:
    (folder / f"{NAME}.json").write_text(text)
    with pytest.raises(RecordError, match=NAME):
        read_record(folder / f"{NAME}.json")


@pytest.mark.parametrize("name", [field.name for field in fields(Part)])
def test_every_field_of_a_part_is_needed(folder: Path, name: str) -> None:
    content = made_up()
    content["parts"]["step"] = without(content["parts"]["step"], name)
    with pytest.raises(ValueError, match=f"parts.step has no field '{name}'"):
        parse_record(json.dumps(content))


@pytest.mark.parametrize("state", ["failed", "skipped"])
def test_figures_are_claimed_for_what_has_passed_only(state: str) -> None:
    content = made_up()
    for name in ("tests", "ladder", "step"):
        spoilt = deepcopy(content)
        spoilt["parts"][name] |= {"state": state, "reason": "it broke"}
        with pytest.raises(ValueError, match=f"parts.{name} has {state} and yet claims figures"):
            parse_record(json.dumps(spoilt))
        spoilt["parts"][name] |= {"results": {}, "plots": ["ladder-timeline.png"]}
        with pytest.raises(ValueError, match=f"parts.{name} has {state} and yet shows ladder-timeline.png"):
            parse_record(json.dumps(spoilt))
    outcomes = content["parts"]["tests"]["results"]["tests"]
    content["parts"]["tests"] |= {"state": "failed", "reason": "it broke", "results": {"tests": outcomes}}
    assert parse_record(json.dumps(content)).parts["tests"].results == {"tests": outcomes}


def test_a_part_has_not_passed_if_one_of_its_tests_failed() -> None:
    content = made_up()
    content["parts"]["tests"]["results"]["tests"][0]["outcome"] = "failed"
    with pytest.raises(ValueError, match="is called passed, but a has failed"):
        parse_record(json.dumps(content))


# The table of docs/gpu.md


def cells(markdown: str) -> list[list[str]]:
    """Rows of all tables, without their headings."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [index for index, row in enumerate(rows) if set(row) == {"---"}]
    return [row for index, row in enumerate(rows) if index not in rules and index + 1 not in rules]


def test_without_a_record_there_is_a_sentence_and_no_table() -> None:
    assert worlds_table([]) == NO_RECORDS


def test_a_record_fills_what_it_has_measured_and_nothing_else(folder: Path) -> None:
    table = worlds_table(find_records(folder))
    rows = {row[0].strip("`"): row[1:] for row in cells(table)}
    own, shared, fake = (rows[world] for world in WORLDS)
    assert own == [NOT_RUN] * 6
    assert shared == ["Made-up 7 × 1", "2", "2.stub", "0.stub", NOT_RUN, "5, 0"]
    assert fake == ["Made-up 7 × 1", "rank 0", "2.stub", "0.stub", "75%", NOT_RUN]  # (10 + 8 - 12) of 8
    assert rows["fsdp-limit"] == ["11", "2.9", "2.1", "30", "62%"]
    assert rows["torch-fsdp1"] == ["12.3", *[NOT_RUN] * 4]
    assert "torch-ddp" not in rows  # nothing has trained so
    notes = [line for line in table.splitlines() if line.startswith("* ")]
    assert notes == [
        "* A: `minifsdp bench`, Made-up 7 × 1, 2 ranks over NCCL, sharing cuda:0; model: no model of it.",
        "* B: `minifsdp bench`, Made-up 7 × 1, 1 rank over NCCL, a GPU each; model: the model says.",
        "* C: `minifsdp ladder`, Made-up 7 × 1, 2 ranks over NCCL, sharing cuda:0.",
        f"* {COLUMNS}",
        f"* {SHARED_TIMES}",
        "* Made-up 7 × 1: `doctor` failed: exit code 1: the link is down.",
        "* Made-up 7 × 1: `labs` skipped: not installed here: nbval.",
    ]


def test_every_rung_and_rival_of_the_benchmark_has_a_row() -> None:
    assert tuple(RUNGS) == ROWS
    assert {*TORCHS, *ROWS} <= CONTESTANTS.keys()


def test_two_records_stand_side_by_side(folder: Path) -> None:
    (record,) = find_records(folder)
    rows = cells(worlds_table([record, replace(record, gpu="Made-up 8")]))
    assert [row[0] for row in rows].count("NCCL, several ranks on one GPU") == 2
    assert {len(row) for row in rows[len(WORLDS) + 2 :]} == {
        1 + 2 * (1 + 2 + 2)
    }  # the model has no time for ranks that share a GPU


def test_what_no_part_has_measured_has_no_column(folder: Path) -> None:
    (record,) = find_records(folder)
    climbed = replace(record, parts={"ladder": record.parts["ladder"]})
    assert {len(row) for row in cells(worlds_table([climbed]))[len(WORLDS) :]} == {3}
    untimed = replace(record, parts={"tests": record.parts["tests"]})
    assert len(cells(worlds_table([untimed]))) == len(WORLDS)


def gpu_table(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.gpu_table", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_the_page_says_what_the_records_say() -> None:
    done = gpu_table("--check")
    assert done.returncode == 0, done.stderr


def test_the_command_writes_between_the_markers_and_tells_what_is_stale(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = ("--page", str(page), "--records", str(folder))
    page.write_text("before\n<!-- worlds:begin -->\nold\n<!-- worlds:end -->\nafter\n")
    assert gpu_table("--check", *words).returncode == 1
    assert "old" in page.read_text()
    assert gpu_table(*words).returncode == 0
    assert page.read_text() == (
        f"before\n<!-- worlds:begin -->\n{worlds_table(find_records(folder))}\n<!-- worlds:end -->\nafter\n"
    )
    assert gpu_table("--check", *words).returncode == 0
    page.write_text("no markers")
    done = gpu_table(*words)
    assert (done.returncode, page.read_text()) == (2, "no markers")
    assert "there is no one place between" in done.stderr


# In the labs


@pytest.mark.parametrize("lab", ["06", "07", "08"])
def test_without_a_record_a_lab_says_so(
    lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "records_folder", lambda: tmp_path)
    monkeypatch.setattr("IPython.display.display", lambda *_: pytest.fail("there is no record to show"))
    show_record(lab, says="how to read it")
    assert capsys.readouterr().out == "there is no record of a run on a GPU to show here\n"


def test_a_lab_shows_the_latest_picture_on_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = {**made_up(), "count": 2}
    older["parts"]["ladder"]["when"] = "1999-01-02T03:04:05Z"
    (folder / f"{NAME[:-1]}2.json").write_text(json.dumps(older))
    (folder / f"{NAME[:-1]}2").mkdir()
    (folder / f"{NAME[:-1]}2" / "ladder-timeline.png").write_bytes(b"\x89PNG older")
    monkeypatch.setattr(records, "records_folder", lambda: folder)
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    for lab, heading, rungs in (
        ("06", "a step without and with overlap", "`fsdp` and `fsdp-overlap`"),
        ("07", "a step without and with prefetch", "`fsdp-overlap` and `fsdp-prefetch`"),
    ):
        show_record(lab, says="\nhow to read it\n")
        assert shown.pop().data == b"\x89PNG"
        source = f"The ladder on Made-up 7 x 1, {SHARED}, 2000-01-02; compare {rungs}:"
        assert shown.pop().data == f"### On a GPU: {heading}\n\nhow to read it\n\n{source}"
    show_record("08", says="")  # the ladder has left no picture of the allocator
    assert not shown
