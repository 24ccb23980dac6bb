"""Collectives in a check run no earlier than at a wait: a missing wait, or one too late, is rejected each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, Variant, checking, examine, expect, on_ranks
from minifsdp.course.workshop.late import link_of


def gathered(way: str) -> Tensor:
    group = comm.world()
    mine, whole = torch.full((2,), group.rank() + 1.0), torch.zeros(4)
    handle = comm.all_gather(whole, mine, group)
    if way == "a wait too late":
        seen = whole.clone()
        handle.wait()
        return seen
    if way == "the input changed":
        mine.zero_()
    if way == "the input freed":
        device.free(mine)
    if way != "no wait":
        handle.wait()
    return whole.clone()


def reduced(way: str) -> Tensor:
    group = comm.world()
    total = torch.full((2,), group.rank() + 1.0)
    handle = comm.all_reduce(total, group)
    if way == "the input changed":
        total /= 2
    if way != "no wait":
        handle.wait()
    return total.clone()


def scattered(way: str) -> Tensor:
    group = comm.world()
    whole, mine = torch.ones(4), torch.zeros(2)
    handle = comm.reduce_scatter(mine, whole, group)
    if way == "the input changed":
        whole.zero_()
    if way != "no wait":
        handle.wait()
    return mine.clone()


def exchanged(way: str) -> Tensor:
    """Both ranks send before they receive, and the second receive is waited for first."""
    group = comm.world()
    other, there = 1 - group.rank(), [torch.zeros(1), torch.zeros(1)]
    handles = [comm.send(torch.tensor([n + 1.0]), other, group) for n in range(2)]
    handles += [comm.recv(each, other, group) for each in there]
    if way != "no wait":
        for handle in reversed(handles):
            handle.wait()
    return torch.cat(there)


WANTED = {gathered: [1.0, 1, 2, 2], reduced: [3.0, 3], scattered: [2.0, 2], exchanged: [1.0, 2]}
WRONG = [(each, "no wait") for each in WANTED] + [(each, "the input changed") for each in list(WANTED)[:3]]
WRONG += [(gathered, "a wait too late"), (gathered, "the input freed")]


def verdict(observe: Any, way: str) -> str | None:
    with checking("1.1"):
        try:
            for seen in on_ranks(2, observe, way):
                expect("the values", seen, torch.tensor(WANTED[observe]), slip="none")
        except AnswerError as error:
            return str(error)
    return None


@pytest.mark.parametrize("observe", WANTED)
def test_with_its_waits_it_is_right(observe: Any) -> None:
    assert verdict(observe, "right") is None


@pytest.mark.parametrize(("observe", "way"), WRONG)
def test_without_it_is_wrong_and_named(observe: Any, way: str) -> None:
    said = verdict(observe, way)
    assert said is not None
    slip = {"no wait": "only starts: until `.wait()`", "a wait too late": "likely slip: none"}
    assert slip.get(way, "it was changed or freed in between") in said


def later_of_two_groups() -> Tensor:
    """Rank 0 waits for a reduction in a second group first, which rank 1 issues after the first."""
    group, total, other = comm.world(), torch.ones(1), torch.ones(1)
    handles = [comm.all_reduce(total, group), comm.all_reduce(other, group)]
    for handle in handles if group.rank() else handles[::-1]:
        handle.wait()
    return total + other


def test_ranks_may_wait_in_any_order() -> None:
    with checking("1.1"):
        assert [seen.item() for seen in on_ranks(2, later_of_two_groups)] == [4.0, 4.0]


def observe_chance() -> None:
    comm.all_reduce(torch.ones(1), comm.world())
    with link_of(None):
        comm.all_reduce(torch.ones(1), comm.world()).wait()


def test_an_answer_without_a_wait_is_rejected_even_if_its_values_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifsdp.course.workshop.checking.find_check", lambda exercise: checked)
    with pytest.raises(AnswerError, match=r"`comm.all_reduce` only starts"):
        examine("1.1", print, Variant())


def checked(answer: Any, variant: Variant) -> None:
    on_ranks(2, observe_chance)
