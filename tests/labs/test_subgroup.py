"""The harness of the checks: an answer has a part of the world for its group, and asks the world for all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp import comm
from minifsdp.course.workshop import comparing
from minifsdp.course.workshop.catalogue import all_labs
from minifsdp.course.workshop.cells import define
from minifsdp.course.workshop.checking import AnswerError, _has_group, checking, expect, on_ranks
from minifsdp.course.workshop.references import find_reference, lab_references
from minifsdp.course.workshop.subgroup import as_in_the_group, has_room
from minifsdp.instruments.launch import RankError

SETUP = "import torch.distributed as dist\nfrom minifsdp import comm\nfrom minifsdp.course.workshop import exercise\n"
WITH_A_GROUP = ["1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7", "1.8", "2.1", "2.3", "3.3", "3.4", "3.5", "5.2", "5.4"]
WITH_A_GROUP += ["6.3", "7.5", "9.1", "9.4", "9.7", "10b.1", "10b.4", "13.1", "13.2", "13.4", "13.5", "15.7", "15.8"]


def cell(body: str) -> Callable[..., Any]:
    """An answer to 1.1 as a learner's cell defines it."""
    return define(SETUP, f'@exercise("1.1")\ndef my_rows(batch, group):\n    {body}\n', "1.1")


def observe(answer: Callable[..., Any]) -> Any:
    """What a check sees, and what the answer returns."""
    group = comm.world()
    check = (group.rank(), group.size(), dist.get_rank(), dist.get_world_size(), dist.get_global_rank(group, 0))
    found = answer(torch.zeros(1), group)
    return check, found() if callable(found) else found


def test_it_is_for_every_exercise_with_a_group() -> None:
    found = []
    for ref in (ref for lab in all_labs() for ref in lab_references(lab)):
        with checking(ref.id):  # under which the function itself has another signature
            found += [ref.id] if _has_group(find_reference(ref.id)) else []
    assert found == WITH_A_GROUP


@pytest.mark.parametrize(
    "body",
    [
        "return comm.world().rank(), comm.world().size(), dist.get_rank(), dist.get_world_size()",
        "return lambda: (comm.world().rank(), comm.world().size(), dist.get_rank(), dist.get_world_size())",
    ],
    ids=["in the call", "in a function that it returns"],
)
def test_a_check_sees_its_ranks_and_a_cell_the_world(body: str) -> None:
    with checking("1.1"):
        seen = on_ranks(2, observe, cell(body))
        assert seen == [((rank, 2, rank, 2, 0), (rank + 1, 3, rank + 1, 3)) for rank in range(2)]
        with pytest.raises(AnswerError, match=r"`comm.world\(\)` is about the world"):
            expect("a value", 1, 2, slips={"another slip": 1})
    assert comparing.overriding is None


def test_the_ranks_of_the_group_may_be_asked_for() -> None:
    body = "return dist.get_rank(group), dist.get_world_size(group), comm.world(group) is group"
    with checking("1.1"):
        assert [found for _, found in on_ranks(2, observe, cell(body))] == [(0, 2, True), (1, 2, True)]
        assert comparing.overriding is None


def test_a_collective_of_the_world_is_refused_at_once() -> None:
    with checking("1.1"), pytest.raises(AnswerError) as refused:
        on_ranks(2, observe, cell("comm.all_reduce(batch, comm.world()).wait()"))
    lines = str(refused.value).splitlines()
    assert lines[0] == "rank 0 failed: the group of the all_reduce: expected `group`, got the world"
    assert lines[1].startswith("likely slip: `group` need not be the world")


def test_without_a_group_the_ranks_are_the_world() -> None:
    with checking("2.6"):
        assert on_ranks(2, observe, cell("return comm.world().size()")) == [((r, 2, r, 2, 0), 2) for r in range(2)]


def test_ranks_are_numbered_as_in_the_group() -> None:
    late = RankError("no answer from rank(s) 1, 3 within 8 s; finished: 0, 2", {1: "a", 3: "b"})
    assert str(as_in_the_group(late)) == "no answer from rank(s) 0, 2 within 8 s; finished: 1"
    assert as_in_the_group(late).failures == {0: "a", 2: "b"}
    all_late = RankError("no answer from rank(s) 1, 2 within 8 s; finished: 0", {1: "a", 2: "b"})
    assert str(as_in_the_group(all_late)) == "no answer from rank(s) 0, 1 within 8 s; finished: none"
    failed = RankError("rank 2 failed: ValueError: rank 2 of rank(s)", {2: "a"})
    assert str(as_in_the_group(failed)).startswith("rank 1 failed: ValueError: rank 2")


def test_one_rank_more_must_run_in_the_same_world(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_room(2, None)
    assert not has_room(64, None), "gloo serves 64 ranks on a machine"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert not has_room(2, None), "with two GPUs the check would move to the CPU"
    assert has_room(2, "gloo")
