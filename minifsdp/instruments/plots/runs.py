"""A simulated GPU's run as the spans of a timeline: device work, phases, and the host's phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from minifsdp.instruments.watch.timeline import Span
from minifsdp.instruments.watch.trace import PHASES

if TYPE_CHECKING:
    from minifsdp.instruments.machine.replay import Run


def step_of_run(run: Run) -> list[Span]:
    """The spans of the last step, from the end of all earlier work.

    The phases are the device's. A host that runs ahead may be in another phase, so it has a lane "host" with its own
    phases, which begin before the device's if it is ahead.
    """
    begin = run.done - run.seconds
    spans = run.last_step()
    marks = [mark for mark in run.marks if mark.name in PHASES]
    late = marks[-len(PHASES) :]
    moments = [*(max(0.0, mark.done - begin) for mark in late), run.done - begin]
    spans += [
        Span("phase", mark.name, start, end - start) for mark, (start, end) in zip(late, pairwise(moments), strict=True)
    ]
    if run.hardware.runs_ahead:
        spans += _host(begin, [mark.name for mark in late], [*(mark.host for mark in late), run.memory[-1].at])
    return spans


def _host(begin: float, names: Sequence[str], moments: Sequence[float]) -> list[Span]:
    """The host's phases, from the device's start of the step, or a remark if it had issued the whole step by then."""
    if moments[-1] <= begin:
        ahead = f"{(begin - moments[-1]) * 1e3:.0f} ms"
        return [Span("host", f"issued all of this step {ahead} before the device began it", 0.0, 0.0)]
    phases = zip(names, pairwise(at - begin for at in moments), strict=True)
    return [Span("host", f"issues {name}", start, end - start) for name, (start, end) in phases if start < end]


def on_paper(rows: Mapping[str, Sequence[Span] | Run]) -> str | None:
    """The subtitle's note on simulated rows: their hardware, and their names unless all rows are simulated."""
    runs = {name: row.hardware.name for name, row in rows.items() if not isinstance(row, Sequence)}
    named = ", ".join(dict.fromkeys(runs.values()))
    return f"{named} ({', '.join(runs)})" if runs and len(runs) < len(rows) else named or None
