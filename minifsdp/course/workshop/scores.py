"""The open task of lab 08: try a schedule, draw it, and keep its result in a table of one's own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from minifsdp.course.workshop.store import Store

TASK = "schedule"
MOST = 1000  # entries that are kept
GIB = 2**30


def enter(name: str, schedule: Any) -> Any:
    """Try a schedule on the task's paper GPU, keep its result, and draw its last step next to torch's defaults.

    Args:
        name: the schedule's in the table; its best result is shown.
        schedule: makes it from the list of units: a subclass of one of minifsdp's schedules, or a `partial` of one.

    Returns:
        The picture.
    """
    from minifsdp.course import plots
    from minifsdp.course.machine.task import LIMIT, SHAPE, ours, try_schedule

    print("recording and replaying your schedule and torch's, which takes about half a minute", flush=True)
    result, references = try_schedule(schedule), ours()
    keep(name, result.seconds, result.reserved, result.problem)
    torch_name = next(each for each in references if each.startswith("torch"))
    verdict = result.problem or f"{1e3 * result.seconds:.1f} ms in {result.reserved / GIB:.2f} GiB"
    print(f"{name}: {verdict}")
    for other, reached in references.items():
        note = f" (does not count: {reached.problem})" if reached.problem else ""
        print(f"    {other}: {1e3 * reached.seconds:.1f} ms in {reached.reserved / GIB:.2f} GiB{note}")
    print(f"    no schedule is below {1e3 * result.bound:.1f} ms: the link is busy all the time")
    torchs = references[torch_name]
    longer = 1e3 * (result.seconds - torchs.seconds)
    compared = (
        f"{abs(longer):.1f} ms {'longer' if longer > 0 else 'shorter'} than" if abs(longer) >= 0.05 else "as with"
    )
    same = compared == "as with" and result.reserved == torchs.reserved  # one row shows both
    return plots.timeline(
        {**({} if same else {torch_name: torchs.run.last_step()}), name: result.run.last_step()},
        title=f"{name}: {verdict}" + ("" if result.problem else f", {compared} torch's defaults"),
        says=f"The last step of {SHAPE.name} on {SHAPE.ranks} GPUs, of which the allocator may reserve "
        f"{LIMIT / GIB:.0f} GiB each. Bars are numbered by block, in the encoder and again in the decoder. "
        "`minifsdp lab score` shows your table.",
        lab="08",
        model=SHAPE.device.name,
    )


def keep(name: str, seconds: float, reserved: int, problem: str | None) -> None:
    """Add a result to the records of this folder."""
    store = Store()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"name": name, "seconds": seconds, "reserved": reserved, "problem": problem, "when": when}
    store.write("scores", TASK, [*(store.read("scores", TASK) or []), entry][-MOST:])


def table(folder: Path) -> Table | None:
    """The best result under each name, fastest first, and then those that do not count; None if there are none."""
    entries = Store(folder).read("scores", TASK) or []
    best: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=_order, reverse=True):
        best[entry["name"]] = entry
    if not best:
        return None
    found = Table("", "schedule", "ms a step", "GiB reserved", "tries", "", box=box.SIMPLE_HEAD)
    for place, entry in enumerate(sorted(best.values(), key=_order), 1):
        tries = sum(each["name"] == entry["name"] for each in entries)
        rank = "" if entry["problem"] else str(place)
        figures = (f"{1e3 * entry['seconds']:.1f}", f"{entry['reserved'] / GIB:.2f}", str(tries))
        found.add_row(rank, entry["name"], *figures, entry["problem"] or "")
    return found


def _order(entry: dict[str, Any]) -> tuple[bool, float]:
    return entry["problem"] is not None, entry["seconds"]
