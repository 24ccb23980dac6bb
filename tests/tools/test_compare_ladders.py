"""The comparison of ladders sees a changed bit, byte or order, and nothing else."""

import copy
import math

from tools.compare_ladders import compared, differences

RUNG = {"name": "ddp", "losses": [3.25, 3.0], "bytes": [{"peak": 8}, {"peak": 8}], "step_seconds": [0.1, 0.2]}
RECORD = {"ranks": 2, "rungs": [RUNG]}


def changed(change):
    record = copy.deepcopy(RECORD)
    change(record["rungs"][0])
    return list(differences(RECORD, record))


def test_a_difference_is_named_by_its_place():
    assert changed(lambda rung: None) == []
    assert changed(lambda rung: rung["bytes"][1].update(peak=9)) == ["rungs[0].bytes[1].peak: 8, now 9"]
    assert len(changed(lambda rung: rung["losses"].reverse())) == 2
    assert len(changed(lambda rung: rung.update(losses=[3.25, math.nextafter(3.0, 4.0)]))) == 1
    assert len(changed(lambda rung: rung["losses"].pop())) == 1
    assert len(changed(lambda rung: rung.pop("losses"))) == 1


def test_times_and_what_is_new_are_no_difference():
    assert changed(lambda rung: rung.update(step_seconds=[9.0], sent=[1])) == []


def test_both_refuse_or_both_climb():
    assert compared("too few ranks", "two ranks at least") == (["refused", "", "", ""], [])
    assert compared(RECORD, "too few ranks")[1]
    row, found = compared(RECORD, RECORD)
    assert (row, found) == (["1", "2", "2", "0"], [])
