"""What the tests of the ladders of other axes share: a run, what it leaves, and what holds on every axis."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.tables import ladder_table


def climb(settings: Settings, out: Path) -> ladder.Request:
    """A run on the CPU that leaves its files in `out`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIFSDP_DEVICE", "cpu")
        request = ladder.check(settings, "cpu", out)
        ladder.run(request, lambda *_: None)
    return request


def record_in(out: Path) -> dict[str, Any]:
    return json.loads((out / "ladder.json").read_text())  # type: ignore[no-any-return]


def explorer_in(out: Path) -> dict[str, Any]:
    """The data of `explore.html`."""
    text = (out / "explore.html").read_text()
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index,no-any-return]


def assert_climbed(request: ladder.Request, out: Path, there: list[str], left_out: list[str], lanes: str) -> None:
    """The run has these rungs, names the others as left out, and leaves its files, the picture `lanes` among them."""
    assert [rung["name"] for rung in record_in(out)["rungs"]] == there
    assert list(request.left_out) == left_out
    names = {"ladder.json", "memory.png", "memory.gif", lanes, "explore.html"}
    assert {path.name for path in out.iterdir()} == names | {f"trace-{name}.json" for name in there}


def assert_losses_equal_one_process(record: dict[str, Any]) -> None:
    for rung in record["rungs"]:
        assert rung["losses"] == pytest.approx(record["reference_losses"], rel=1e-5), rung["name"]


def assert_bytes_are_as_predicted_on_every_rank(record: dict[str, Any]) -> None:
    for rung in record["rungs"]:
        for measured, predicted in zip(rung["bytes"], rung["predicted"], strict=True):
            assert {key: measured[key] for key in predicted} == predicted, rung["name"]
            assert measured["peak"] > measured["parameters"] + measured["activations"]


def assert_peaks_are_bounded_on_every_rank(record: dict[str, Any]) -> None:
    """The peak of all memory is at most its bound, which is at most a tenth above it."""
    for rung in record["rungs"]:
        for rank, (measured, bound) in enumerate(zip(rung["bytes"], rung["peak_at_most"], strict=True)):
            assert measured["peak"] <= bound <= 1.1 * measured["peak"], (rung["name"], rank)


def assert_the_table_fits_and_ticks(record: dict[str, Any]) -> None:
    """As measured, and on a machine that takes 12 seconds for a step."""
    slow = [{**rung, "step_seconds": [12.345]} for rung in record["rungs"]]
    for each in (record, {**record, "rungs": slow}):
        _assert_it_fits_and_ticks(each)


def _begins(line: str, name: str) -> bool:
    """True of the row with this name, or with its beginning, if a recipe is on several lines."""
    first = (line.split() or [""])[0]
    return first == name or (first.endswith(",") and name.startswith(first))


def _assert_it_fits_and_ticks(record: dict[str, Any]) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(ladder_table(record))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for rung in record["rungs"]:
        row = next(line for line in lines if _begins(line, rung["name"]))
        assert row.rstrip().endswith("\N{CHECK MARK}")
