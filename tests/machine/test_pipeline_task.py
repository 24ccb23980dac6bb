"""The open task of lab 14, and stages that sleep: what counts, what does not, and what the clock shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from minifsdp.course.workshop import scores
from minifsdp.course.workshop.catalogue import folder_of
from minifsdp.instruments.machine.pipeline_task import (
    BOUND,
    MICROS,
    RANKS,
    far_from_one_process,
    ours,
    plan_of,
    try_order,
)
from minifsdp.instruments.machine.sleeping import run_asleep
from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import bubble_of, length_of

BEST = """
F0 F1 F2 F3 F4 I0 F5 W0 I1 F6 I2 W1 W2 F7 I3 I4 W3 W4 I5 I6 W5 W6 I7 W7
F0 F1 F2 F3 I0 W0 F4 I1 F5 I2 F6 I3 W1 W2 W3 F7 I4 W4 I5 I6 W5 I7 W6 W7
F0 F1 F2 I0 W0 F3 I1 F4 I2 W1 I3 F5 W2 F6 I4 F7 I5 I6 W3 W4 I7 W5 W6 W7
F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 F4 I4 F5 F6 I5 I6 F7 I7 W2 W3 W4 W5 W6 W7
"""


def best(rank: int, ranks: int, micros: int) -> list[Action]:
    """47 time units with 6 micro-batches held, found by a search."""
    return [Action(rank, each[0], int(each[1])) for each in BEST.strip().splitlines()[rank].split()]  # type: ignore[arg-type]


def forward_only(rank: int, ranks: int, micros: int) -> Iterable[Action]:
    return (Action(rank, "F", micro) for micro in range(micros))


def stuck(rank: int, ranks: int, micros: int) -> list[Action]:
    return [Action(rank, kind, micro) for kind in ("B", "F") for micro in range(micros)]


def turned(rank: int, ranks: int, micros: int) -> list[Action]:
    order = range(micros) if rank % 2 else reversed(range(micros))
    return [*(Action(rank, "F", micro) for micro in order), *(Action(rank, "B", micro) for micro in range(micros))]


def test_the_lab_s_figures_are_those_of_today() -> None:
    text = (folder_of("14") / "lab14_pipelines.py").read_text()
    said = text[text.index("# GPipe and 1F1B take 550 ms") :].split("# ## ")[0].replace("\n# ", " ")
    reached = ours()
    lengths = [10 * reached[name].length for name in ("1F1B", "ZB-H1")] + [10 * BOUND, 10 * try_order(best).length]
    assert [float(each) for each in re.findall(r"(\d+) ms", said)] == lengths
    assert reached["GPipe"].length == reached["1F1B"].length
    assert re.findall(r"holds (\d) micro-batches", said) == [str(reached["ZB-H1"].held)]


def test_what_counts() -> None:
    reached = ours()
    assert [each.problem for each in reached.values()] == ["holds 8 micro-batches of 6", None, None]
    found = try_order(best)
    assert (found.length, found.held, found.problem) == (47, 6, None)
    assert BOUND < found.length < reached["ZB-H1"].length


@pytest.mark.parametrize(
    ("order", "error", "says"),
    [
        (forward_only, ValueError, "it has to do F and B"),
        (stuck, RuntimeError, "deadlock"),
        (turned, ValueError, "a channel keeps its order"),
    ],
)
def test_what_cannot_run(
    order: object, error: type[Exception], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        try_order(order)  # type: ignore[arg-type]
    assert scores.enter_order("mine", order) is None
    assert says in capsys.readouterr().out
    assert scores.table(tmp_path, scores.PIPELINE) is None


def test_a_schedule_that_counts_is_kept_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture = scores.enter_order("mine", best)
    assert picture.title.startswith("mine: 470 ms, 20 ms shorter than ZB-H1; ")
    assert {name: drawn["length"] for name, drawn in picture.data.items()} == {
        "ZB-H1, simulated": 49,
        "mine, simulated": 47,
    }
    table = scores.table(tmp_path, scores.PIPELINE)
    assert table is not None
    assert [list(column.cells) for column in table.columns[:4]] == [["1"], ["mine"], ["470.0"], ["6"]]


def test_the_best_trains_as_one_process() -> None:
    assert 0 < far_from_one_process(plan_of(best)) < 1e-12


def test_by_the_clock() -> None:
    """Every action of every rank, in the order of the lists, for as long as it should sleep, after its inputs."""
    seconds = {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01}
    for plan in (plan_of(zero_bubble), [list(interleaved(rank, 2, 4, 2)) for rank in range(2)]):
        rows = run_asleep(plan, seconds, steps=1)
        assert [[did.action for did in row] for row in rows] == [list(actions) for actions in plan]
        ends = {did.action: did.end for row in rows for did in row}
        for row in rows:
            for did in row:
                assert did.end - did.start >= seconds[did.action.kind]
                before = Action(did.action.stage - 1, "F", did.action.micro)
                if did.action.kind == "F" and before in ends:
                    assert did.start >= ends[before]
        assert 0 < bubble_of(rows) < 1
        assert length_of(rows) >= sum(seconds[action.kind] for action in plan[0])


def test_the_clock_s_bubble_is_at_least_the_formula_s() -> None:
    rows = run_asleep(plan_of(one_f_one_b), {"F": 0.02, "B": 0.04}, steps=2)
    formula = (RANKS - 1) / (MICROS + RANKS - 1)
    assert formula - 0.01 < bubble_of(rows) < formula + 0.15, "within 0.03 on a quiet machine"
