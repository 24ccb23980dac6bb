"""The launchers: what docs/launchers.md says of them is what the record says, and the record has all of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from minifsdp.course import cli
from tools import ROOT
from tools.gpu_table import filled
from tools.launchers.manifest import MANIFEST
from tools.launchers.table import PAGE, RECORD, launchers_table
from tools.launchers.ways import TRAIN, WAYS

Refused = Any


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [*json.loads(RECORD.read_text())["launchers"]]


def test_the_tables_of_the_page_are_those_of_the_record() -> None:
    """`python -m tools.launchers.table` writes them."""
    page = PAGE.read_text()
    assert page == filled(page, launchers_table(json.loads(RECORD.read_text())), "launchers")


def test_each_launcher_has_run_as_the_tool_runs_it_today(rows: list[dict[str, Any]]) -> None:
    """Or has the reason why not. Those that have run trained the same model."""
    found = {row["name"]: row for row in rows}
    assert [way.name for way in WAYS] == [name for name in found if name in {way.name for way in WAYS}]
    assert all(found[way.name]["command"] == way.command for way in WAYS)
    assert all(row["reason"] for row in rows if row["state"] == "not run")
    ran = [row for row in rows if row["state"] == "ran"]
    assert len(ran) >= 8
    losses = [row["losses"] for row in ran if row.get("losses")]
    assert len(losses) >= 8
    assert all(each == pytest.approx(losses[0], rel=1e-6) for each in losses)


def test_restarted_jobs_ended_with_the_bits_of_one_that_was_not(rows: list[dict[str, Any]]) -> None:
    (row,) = [row for row in rows if "kills" in row]
    assert row["bits_equal"] is True
    assert row["kills"] >= 10
    assert any(0 < step < row["steps"] for step in row["begun_at"]), "some began at a checkpoint"


def test_a_row_that_was_not_run_says_so(rows: list[dict[str, Any]]) -> None:
    lost = {**rows[0], "state": "not run", "reason": "it was not here"}
    table = launchers_table({"launchers": [lost, *rows[1:]]})
    assert f"* {lost['name']}: not run, it was not here." in table
    assert not re.search(rf"^\| {re.escape(lost['name'])} \|", table, re.MULTILINE)


def test_the_page_has_the_words_of_the_tool() -> None:
    assert " ".join(TRAIN.split()) in " ".join(PAGE.read_text().split())
    for path in re.findall(r"`(findings/\w+\.sh)`", PAGE.read_text()):
        assert (ROOT / path).is_file()


def test_the_manifest_asks_for_what_train_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its command line gets as far as the check of what there is: here, no rank of torchrun."""
    trainer = yaml.safe_load(MANIFEST.read_text())["spec"]["trainer"]
    assert trainer["command"][0] == "torchrun"
    module, *words = trainer["args"][1:]
    words = [word.replace("/runs", str(tmp_path)) for word in words]
    assert module == "minifsdp"
    monkeypatch.setattr("sys.argv", ["minifsdp", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    ranks = trainer["numNodes"] * trainer["numProcPerNode"]
    for name, value in {"RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.main()
    assert "MASTER_PORT=0 is not a port" in capsys.readouterr().err, shlex.join(words)
