"""Which of the wrong answers run: all where what decides of them has changed, or one of every exercise."""

from __future__ import annotations

from pathlib import Path

import all_ran
import pytest


def test_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for seconds in range(13):
        monkeypatch.setattr(all_ran, "commit_seconds", lambda seconds=seconds: seconds)
        drawn.append(all_ran.draw("5.2", 13))
    assert sorted(drawn) == list(range(13))


def test_all_run_again_when_a_file_has_changed_that_their_check_imports_from(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {lab: all_ran.digest(lab) for lab in ("01", "14")}  # ring.py defines what the checks of lab 01 call
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(path) + "#" * (path == all_ran.PACKAGE / "ring.py"))
    after = {lab: all_ran.digest(lab) for lab in before}
    assert after["01"]["called"] != before["01"]["called"]
    assert after["01"]["lab"] == before["01"]["lab"]
    assert after["14"] == before["14"]


def test_what_a_package_hands_on_counts_where_it_is_defined() -> None:
    text = "from minifsdp import comm\nfrom minifsdp.course.launch import launch\nfrom torch import nn"
    found = [str(path.relative_to(all_ran.PACKAGE)) for path in all_ran.imported(text)]
    assert found == ["comm.py", "course/launch/" + found[1].rpartition("/")[2]]
    assert "def launch(" in (all_ran.PACKAGE / found[1]).read_text()
