"""Which of a file's checks a launch on ranks runs, and in which tier each is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_ranks
import pytest
from on_ranks import Checks


def a_check(number: int = 0) -> None: ...


def test_of_several_numbers_of_ranks_the_first_that_is_quick_is_in_the_short_loop() -> None:
    check = Checks(__name__)
    check(ranks=(2, 3, 4))(a_check)
    check(ranks=(1, 2, 3), slow=(1,))(a_check)
    check(ranks=(6, 8))(a_check)
    check(ranks=2, wide=True)(a_check)
    marks = [(param.values[0], {mark.name for mark in param.marks}) for param in check.params]
    assert marks[:3] == [(2, set()), (3, {"wide"}), (4, {"wide"})]
    assert marks[3:6] == [(1, {"slow", "wide"}), (2, set()), (3, {"wide"})]
    assert marks[6:] == [(6, {"wide"}), (8, {"wide"}), (2, {"wide"})]


def test_the_short_loop_meets_every_value_of_every_argument() -> None:
    check = Checks(__name__)
    check(wide="combinations", one=(1, 2), two=("a", "b", "c"), three=(True, False))(a_check)
    short = [param.values[1].split("-")[1:] for param in check.params if not param.marks]
    assert len(check.params) == 12
    assert short == [["1", "a", "True"], ["1", "c", "True"], ["2", "b", "False"]]


def test_what_is_deselected_is_not_run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    ran: list[tuple[int, list[str]]] = []

    def run(checks: dict[str, Any], ranks: int) -> dict[str, list[str]]:
        ran.append((ranks, [*checks]))
        return {name: [] for name in checks}

    def item(ranks: int, name: str) -> Any:
        spec = SimpleNamespace(params={"ranks": ranks, "name": name})
        return SimpleNamespace(module=SimpleNamespace(check=check), callspec=spec)

    monkeypatch.setattr(on_ranks, "run", run)
    check = Checks(__name__)
    check(ranks=(2, 3), number=(1, 2, 3))(a_check)
    session = SimpleNamespace(items=[item(2, "a_check-1"), item(2, "a_check-3"), item(3, "a_check-2")])
    conftest: Any = request.config.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    conftest.pytest_collection_finish(session)
    for each in session.items:
        check.assert_passed(**each.callspec.params)
    assert ran == [(2, ["a_check-1", "a_check-3"]), (3, ["a_check-2"])]
