"""The open task: what counts, what does not, and the table of what was tried."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minifsdp.course.workshop import scores
from minifsdp.course.workshop.catalogue import folder_of
from minifsdp.course.workshop.store import Store
from minifsdp.fsdp import OverlapSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.unit import Unit
from minifsdp.instruments.machine import task
from minifsdp.instruments.machine.task import LIMIT, SHAPE, ours, try_schedule

TORCH, AHEAD = "torch's defaults: k = 2, one ahead", "k = 3, two ahead"


class NeverGathers(SyncSchedule):
    def gather(self, unit: Unit) -> None: ...


class NeverReduces(SyncSchedule):
    def reduce(self, unit: Unit) -> None: ...


class ForgetsABlock(SyncSchedule):
    def reduce(self, unit: Unit) -> None:
        if unit is not self.units[2]:
            super().reduce(unit)


def test_the_references_are_in_the_order_that_the_lab_teaches() -> None:
    reached = ours()
    assert reached["one thing at a time"].seconds > 1.5 * reached[TORCH].seconds
    assert reached[AHEAD].seconds < reached[TORCH].seconds
    assert [each.problem is None for each in reached.values()] == [True, True, False]
    assert "9.23 GiB of 8" in (reached[AHEAD].problem or "")
    for each in reached.values():
        assert each.bound < each.seconds
        assert each.bound == pytest.approx(reached[TORCH].bound), "what is sent is the same"
        assert each.run.hazards == []
    assert reached[TORCH].reserved < LIMIT


def test_the_lab_s_figures_are_those_of_today() -> None:
    text = (folder_of("08") / "lab08_rate_limit.py").read_text()
    said = text[text.index("# With torch's defaults, a step takes") :].split("# ## ")[0].replace("\n# ", " ")
    reached = ours()
    figures = [float(each) for each in re.findall(r"\d+\.\d+", said)]
    assert figures == [
        round(1e3 * reached[TORCH].seconds, 1),
        round(reached[TORCH].reserved / 2**30, 2),
        round(1e3 * reached[AHEAD].seconds, 1),
        round(reached[AHEAD].reserved / 2**30, 2),
        round(1e3 * reached[TORCH].bound, 1),
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two units and the root."""
    monkeypatch.setattr(task, "SHAPE", replace(SHAPE, recorded=1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("schedule", "says"), [(NeverReduces, "not reduced"), (ForgetsABlock, "not reduced")])
def test_a_program_that_would_not_train_does_not_count(schedule: Any, says: str) -> None:
    assert says in (try_schedule(schedule).problem or "")


@pytest.mark.usefixtures("small")
def test_a_schedule_that_does_not_run_raises_as_it_would_in_training() -> None:
    with pytest.raises(RuntimeError, match="is sharded"):
        try_schedule(NeverGathers)


def test_too_much_memory_does_not_count() -> None:
    assert "GiB of 8" in (try_schedule(OverlapSchedule).problem or "")


def rows(folder: Path) -> list[str]:
    table = scores.table(folder)
    assert table is not None
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return [" ".join(line.split()) for line in console.export_text().splitlines()[4:] if line.strip()]


def test_the_table_has_the_best_of_each_name_and_last_what_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert scores.table(tmp_path) is None
    picture = scores.enter("limited", RateLimitedSchedule)
    assert picture.title.startswith("limited: ")
    assert picture.title.endswith(" torch's defaults")
    said = capsys.readouterr().out
    assert all(name in said for name in (TORCH, AHEAD, "no schedule with the same messages is below"))
    scores.keep(scores.SCHEDULE, "limited", 0.5, 2**30, None)
    scores.keep(scores.SCHEDULE, "fast", 0.01, 2**30, "3 hazards")
    scores.keep(scores.SCHEDULE, "quick", 0.02, 2**30, None)
    assert [row.split()[:2] for row in rows(tmp_path)] == [["1", "quick"], ["2", "limited"], ["fast", "10.0"]]
    assert " 2" in rows(tmp_path)[1], "two tries"


@pytest.mark.parametrize("text", ["{", "7", '[{"name": 3}]', '[{"name": "a", "seconds": "b", "reserved": 1}]', "[[]]"])
def test_a_damaged_table_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".minifsdp" / "scores").mkdir(parents=True)
    (tmp_path / ".minifsdp" / "scores" / "schedule.json").write_text(text)
    assert Store(tmp_path).read("scores", "schedule") is None
    assert scores.table(tmp_path) is None


def test_entries_are_json_of_plain_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scores.keep(scores.SCHEDULE, "a", 0.1, 5, None)
    (entry,) = json.loads((tmp_path / ".minifsdp" / "scores" / "schedule.json").read_text())
    assert {key: entry[key] for key in ("name", "seconds", "reserved", "problem")} == {
        "name": "a", "seconds": 0.1, "reserved": 5, "problem": None
    }  # fmt: skip
