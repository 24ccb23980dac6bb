"""Schedules as lists: equal to torch's, complete, free of deadlock; bubbles and activations by their formulas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from minifsdp.pipeline.actions import Action, Plan, check_complete
from minifsdp.pipeline.messages import check_order
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.naive import naive
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import simulate
from minifsdp.pipeline.torch_api.csv_files import parse, read_csv, write_csv
from minifsdp.pipeline.torch_api.dualpipe_v import dualpipe_v
from minifsdp.pipeline.torch_api.looped_bfs import looped_bfs
from minifsdp.pipeline.torch_api.zbv import zbv

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
LOOPED = {"interleaved": interleaved, "looped_bfs": looped_bfs, "zero_bubble": zero_bubble}
ORDERS: dict[str, tuple[Any, str, tuple[int, ...]]] = {  # ours, torch's class, stages on each rank
    "gpipe": (gpipe, "ScheduleGPipe", (1,)),
    "one_f_one_b": (one_f_one_b, "Schedule1F1B", (1,)),
    "looped_bfs": (looped_bfs, "ScheduleLoopedBFS", (1, 2, 3)),
    "interleaved": (interleaved, "ScheduleInterleaved1F1B", (1, 2, 3)),
    "zero_bubble": (zero_bubble, "ScheduleInterleavedZeroBubble", (1, 2, 3)),
    "zbv": (zbv, "ScheduleZBVZeroBubble", (2,)),
    "dualpipe_v": (dualpipe_v, "ScheduleDualPipeV", (2,)),
}
SMALL = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 6, 7, 8, 10, 16)]
MEDIUM = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (31, 32, 64)]
MEDIUM += [(16, m) for m in (1, 2, 3, 4, 6, 7, 8, 10, 16, 31, 32, 64)]
SIZES = [pytest.param(SMALL, id="small"), pytest.param(MEDIUM, id="medium", marks=pytest.mark.wide)]


def plan_of(name: str, ranks: int, micros: int, per_rank: int = 1) -> Plan:
    order = ORDERS[name][0]
    more = (per_rank,) if name in LOOPED else ()
    return [list(order(rank, ranks, micros, *more)) for rank in range(ranks)]


def torchs_plan(name: str, ranks: int, micros: int, per_rank: int) -> list[list[Action]]:
    """What torch's class makes, without its idle slots and its reductions; nothing runs."""
    kind = getattr(theirs, ORDERS[name][1])
    stages = [
        SimpleNamespace(
            stage_index=stage * ranks,
            num_stages=ranks * per_rank,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=False,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for stage in range(per_rank)
    ]
    schedule = kind(stages[0] if name in ("gpipe", "one_f_one_b") else stages, micros)
    return [
        [action for cell in schedule.pipeline_order[rank] if cell is not None for action in parse(str(cell))]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_lists_are_torchs(name: str, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_, **__: None)
    compared = 0
    for ranks, micros in sizes:
        for per_rank in ORDERS[name][2]:
            if name == "one_f_one_b" and (ranks == 1 or micros < ranks):
                continue
            try:
                expected = torchs_plan(name, ranks, micros, per_rank)
            except ValueError:
                with pytest.raises(ValueError, match="micro-batches"):
                    plan_of(name, ranks, micros, per_rank)
                continue
            correct = ranks - (
                name == "one_f_one_b"
            )  # in torch's list, which torch does not run, the last rank starts at 1
            assert plan_of(name, ranks, micros, per_rank)[:correct] == expected[:correct], (ranks, micros, per_rank)
            compared += 1
    assert compared > len(sizes) // 3


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("sizes", [*SIZES, pytest.param([(64, 128)], id="large", marks=pytest.mark.slow)])
def test_plans_are_complete_and_end(name: str, sizes: list[tuple[int, int]]) -> None:
    for ranks, micros in sizes:
        for per_rank in ORDERS[name][2][-2:]:
            try:
                plan = plan_of(name, ranks, micros, per_rank)
            except ValueError:
                continue
            check_complete(plan, ranks * per_rank, micros)
            check_order(plan)
            simulate(plan, UNITS)


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_bubbles(ranks: int, micros: int) -> None:
    p, m = ranks, micros
    assert simulate([list(naive(rank, p)) for rank in range(p)], UNITS).bubble == pytest.approx((p - 1) / p)
    for name in ("gpipe", "one_f_one_b"):
        assert simulate(plan_of(name, p, m), UNITS).bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p)
    for v in (2, 4):
        short = simulate(plan_of("interleaved", p, m, v), UNITS).bubble
        assert short == pytest.approx((p - 1) / (v * m + p - 1))
    zero = simulate(plan_of("zero_bubble", p, m), UNITS)  # (p - 1)(F + I - W) of 3 m + (p - 1) units
    assert zero.length == 3 * m + p - 1
    assert zero.bubbles == pytest.approx([(p - 1) / (3 * m + p - 1)] * p)
    assert simulate(plan_of("zbv", p, m), UNITS).bubble < zero.bubble


def test_activations_held() -> None:
    assert simulate(plan_of("gpipe", 4, 8), UNITS).held == [8, 8, 8, 8]
    assert simulate(plan_of("one_f_one_b", 4, 8), UNITS).held == [4, 3, 2, 1]
    assert max(simulate(plan_of("zero_bubble", 4, 8), UNITS).held) == 4
    assert max(simulate(plan_of("zbv", 4, 8), UNITS).held) <= 2 * 4  # stages half as large as 1F1B's


def test_a_latency_lengthens_the_bubble() -> None:
    plan = plan_of("gpipe", 3, 4)
    assert simulate(plan, UNITS, latency=0.5).length == simulate(plan, UNITS).length + 2 * 2 * 0.5


def test_a_deadlock_is_found_and_named() -> None:
    plan = [list(actions) for actions in plan_of("one_f_one_b", 2, 2)]
    plan[1] = [Action(1, "F", 1), Action(1, "B", 1), Action(1, "F", 0), Action(1, "B", 0)]
    plan[0] = [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)]
    with pytest.raises(RuntimeError, match="rank 0 cannot begin 0B0, which needs 1B0; rank 1 cannot begin 1F1, which"):
        simulate(plan, UNITS)


def test_a_channel_keeps_its_order() -> None:
    plan = [list(actions) for actions in plan_of("gpipe", 2, 2)]
    plan[1][0], plan[1][1] = plan[1][1], plan[1][0]
    with pytest.raises(ValueError, match="rank 0 sends F0 of stage 0 where rank 1 expects F1"):
        check_order(plan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan[0].pop(), "rank 0 does F for micro-batch 1 of stage 0"),
        (lambda plan: plan[0].append(plan[0][0]), "rank 0 does 0F0 twice"),
        (lambda plan: plan[1].append(Action(1, "F", 7)), "1F7 of a micro-batch that is not one of 2"),
        (lambda plan: plan[1].append(Action(0, "W", 0)), "stage 0 is on rank 0 and on rank 1"),
        (lambda plan: plan.pop(), r"the plan has stages \[0\], the model has 2"),
        (lambda plan: plan[0].append(Action(0, "W", 0)), "does FBW for micro-batch 0"),
    ],
)
def test_an_incomplete_plan_is_refused(change: Any, words: str) -> None:
    plan = [list(actions) for actions in plan_of("gpipe", 2, 2)]
    change(plan)
    with pytest.raises(ValueError, match=words):
        check_complete(plan, 2, 2)


def test_a_table_is_read_as_it_was_written_and_by_torch(tmp_path: Path) -> None:
    plan = plan_of("zbv", 4, 8)
    write_csv(simulate(plan, UNITS).slots(), tmp_path / "plan.csv")
    assert read_csv(tmp_path / "plan.csv") == plan
    cells = [row.split(",") for row in (tmp_path / "plan.csv").read_text().splitlines()]
    parsed = [[theirs._Action.from_str(cell) for cell in row] for row in cells]
    assert [[str(each) for each in row if each] for row in parsed] == [[str(a) for a in row] for row in plan]


def test_what_torch_writes_besides_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "theirs.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,,0RECV_B0,(0F1;0B0)OVERLAP_F_B,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    )
    assert read_csv(path) == [[Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0)]]
    path.write_text("0F0,0X0\n")
    with pytest.raises(ValueError, match=r"theirs\.csv, rank 0, slot 1: '0X0' is no action"):
        read_csv(path)


def test_micro_batches_that_do_not_go_round_are_refused_with_the_next_that_do() -> None:
    with pytest.raises(ValueError, match="11 micro-batches on 4 ranks make no 2 equal rounds: take 10 or 12"):
        list(interleaved(0, 4, 11, 2))
