"""The open tasks of labs 08 and 14: try a schedule, draw it, and keep its result in a table of one's own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from minifsdp.course.workshop.store import Store

MOST = 1000  # entries that are kept
GIB = 2**30
UNIT = 0.01  # seconds of a time unit, in lab 14


class Board(NamedTuple):
    """A task, and what its table shows besides the seconds of a step.

    Attributes:
        lab: its number.
        task: the name of its records.
        key: of the other number in a record.
        heading: that number's.
        show: writes it.
    """

    lab: str
    task: str
    key: str
    heading: str
    show: Callable[[float], str]


SCHEDULE = Board("08", "schedule", "reserved", "GiB reserved", lambda nbytes: f"{nbytes / GIB:.2f}")
PIPELINE = Board("14", "pipeline", "held", "micro-batches held", lambda held: f"{held:.0f}")
BOARDS = (SCHEDULE, PIPELINE)


def enter(name: str, schedule: Any) -> Any:
    """Try a schedule on lab 08's simulated GPU, keep its result, and draw its last step next to torch's defaults.

    Args:
        name: the schedule's in the table; its best result is shown.
        schedule: makes it from the list of units: a subclass of one of minifsdp's schedules, or a `partial` of one.

    Returns:
        The picture.
    """
    from minifsdp.instruments import plots
    from minifsdp.instruments.machine.task import LIMIT, SHAPE, ours, try_schedule

    print("recording and replaying your schedule and torch's, which takes about half a minute", flush=True)
    result, references = try_schedule(schedule), ours()
    keep(SCHEDULE, name, result.seconds, result.reserved, result.problem)
    torch_name = next(each for each in references if each.startswith("torch"))
    verdict = result.problem or f"{1e3 * result.seconds:.1f} ms in {result.reserved / GIB:.2f} GiB"
    print(f"{name}: {verdict}")
    for other, reached in references.items():
        note = f" (does not count: {reached.problem})" if reached.problem else ""
        print(f"    {other}: {1e3 * reached.seconds:.1f} ms in {reached.reserved / GIB:.2f} GiB{note}")
    print(f"    no schedule with the same messages is below {1e3 * result.bound:.1f} ms: the link is busy all the time")
    torchs = references[torch_name]
    longer = 1e3 * (result.seconds - torchs.seconds)
    compared = (
        f"{abs(longer):.1f} ms {'longer' if longer > 0 else 'shorter'} than" if abs(longer) >= 0.05 else "as with"
    )
    same = compared == "as with" and result.reserved == torchs.reserved  # one row shows both
    return plots.timeline(
        {**({} if same else {torch_name: torchs.run}), name: result.run},
        title=f"{name}: {verdict}" + ("" if result.problem else f", {compared} torch's defaults"),
        says=f"The last step of {SHAPE.name} on {SHAPE.ranks} GPUs, of which the allocator may reserve "
        f"{LIMIT / GIB:.0f} GiB each. Bars are numbered by block, in the encoder and again in the decoder. "
        "The command minifsdp lab score 08 shows your table.",
        lab="08",
    )


def enter_order(name: str, order: Any) -> Any:
    """Try a schedule for lab 14's pipeline: simulate it, run it on real ranks, keep its result, and draw it.

    Args:
        name: the schedule's in the table; its best result is shown.
        order: a function of the rank, the number of ranks and that of micro-batches, which returns the rank's actions.

    Returns:
        The picture; None if it cannot run.
    """
    from minifsdp.instruments import plots
    from minifsdp.instruments.machine import pipeline_task as task
    from minifsdp.instruments.machine.sleeping import run_asleep
    from minifsdp.pipeline.simulate import length_of

    try:
        result = task.try_order(order)
    except (ValueError, RuntimeError) as error:
        print(f"{name}: {error}")
        return None
    print("running your schedule on 4 ranks, once with gradients and then measured with sleeping stages", flush=True)
    plan = task.plan_of(order)
    far = task.far_from_one_process(plan)
    assert far < 1e-12, f"gradients differ from one process's by {far:.0e}"
    rows = run_asleep(plan, {kind: units * UNIT for kind, units in task.UNITS.items()})
    keep(PIPELINE, name, result.length * UNIT, result.held, result.problem)
    references = task.ours()
    for who, each in {name: result, **references}.items():
        note = f" (does not count: {each.problem})" if each.problem else ""
        held = f"{each.held} micro-batches held"
        print(f"{who:12} {_ms(each.length):4.0f} ms, {each.simulation.bubble:.1%} bubble, {held}{note}")
    print(f"no schedule is below {_ms(task.BOUND):.0f} ms: the last rank waits for its first input, then works")
    best = "ZB-H1"
    longer = _ms(result.length - references[best].length)
    compared = f"{abs(longer):.0f} ms {'longer' if longer > 0 else 'shorter'} than" if longer else "as long as"
    return plots.pipeline(
        {
            f"{best}, simulated": references[best].simulation,
            f"{name}, simulated": result.simulation,
            f"{name}, measured": rows,
        },
        title=f"{name}: {result.problem or f'{_ms(result.length):.0f} ms, {compared} {best}'}; "
        f"{1e3 * length_of(rows):.0f} ms measured",
        says="A unit of time is 10 ms: a forward or the input's backward takes two, the weights' backward takes one. "
        "Stages sleep instead of computing. The command minifsdp lab score 14 shows your table.",
        lab="14",
    )


def _ms(units: float) -> float:
    return 1e3 * UNIT * units


def boards_of(lab: str) -> list[Board]:
    """The boards of a lab's open tasks.

    Raises:
        ValueError: it has none.
    """
    found = [board for board in BOARDS if board.lab == lab]
    if not found:
        labs = " or ".join(board.lab for board in BOARDS)
        raise ValueError(f"lab {lab} has no open task: name {labs}, or no lab for all tables")
    return found


def keep(board: Board, name: str, seconds: float, other: float, problem: str | None) -> None:
    """Add a result to the records of this folder."""
    store = Store()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"name": name, "seconds": seconds, board.key: other, "problem": problem, "when": when}
    store.write("scores", board.task, [*_entries(store, board), entry][-MOST:])


def table(folder: Path, board: Board = SCHEDULE) -> Table | None:
    """The best result under each name, fastest first, and then those that do not count; None if there are none."""
    entries = _entries(Store(folder), board)
    best: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=_order, reverse=True):
        best[entry["name"]] = entry
    if not best:
        return None
    columns = ("", "schedule", "ms a step", board.heading, "tries", "")
    found = Table(*columns, box=box.SIMPLE_HEAD, title=f"Lab {board.lab}", title_justify="left")
    for place, entry in enumerate(sorted(best.values(), key=_order), 1):
        tries = sum(each["name"] == entry["name"] for each in entries)
        rank = "" if entry["problem"] else str(place)
        figures = (f"{1e3 * entry['seconds']:.1f}", board.show(entry[board.key]), str(tries))
        found.add_row(rank, entry["name"], *figures, entry["problem"] or "")
    return found


def _entries(store: Store, board: Board) -> list[dict[str, Any]]:
    entries = store.read("scores", board.task) or []
    return entries if all(board.key in entry for entry in entries) else []


def _order(entry: dict[str, Any]) -> tuple[bool, float]:
    return entry["problem"] is not None, entry["seconds"]
