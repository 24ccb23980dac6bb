"""What a check is written with: ranks to run the answer on, and comparisons whose failure explains itself.

A check is a pytest function that takes two fixtures (labs/checks/conftest.py):

    @pytest.mark.exercise(id="5.2")
    def test_gather(answer, variant):
        \"\"\"One all-gather; every rank holds all shards in rank order.\"\"\"        # what is said when it passes
        seen = on_ranks(variant.ranks, observe_gather, answer, variant.seed)
        for rank, found in enumerate(seen):
            expect("the gathered buffer", found.buffer, wanted, rank=rank, slips={"rank order": reversed_order})

The function given to `on_ranks` runs the answer and returns what it saw: values, bytes, the collective log. Comparing
is done here, in one place and in rank order, so that a wrong answer on one rank leaves nobody waiting for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifsdp.course.launch import RankError, launch
from minifsdp.course.workshop.references import Reference, find_reference, forbidden
from minifsdp.course.world import Backend

RANKS_SECONDS = 20.0  # what the ranks of a check may take before they count as stuck
ON_GPUS = 4  # times as long: fresh processes load kernels and libraries, and NCCL connects each new group


@dataclass(frozen=True)
class Variant:
    """The setting of a check; an instructor's own variants differ in it.

    Attributes:
        ranks: number of ranks, N.
        seed: of the data.
        size: what the check makes large or small, such as a number of elements.
    """

    ranks: int = 2
    seed: int = 0
    size: int = 7


class AnswerError(AssertionError):
    """An answer is wrong, and this is how: one fact to a line."""


_under_check: Reference | None = None


@contextmanager
def checking(exercise: str) -> Iterator[None]:
    """While an exercise is checked its reference raises, here and on the ranks of `on_ranks`."""
    global _under_check
    before, _under_check = _under_check, find_reference(exercise)
    try:
        with forbidden(_under_check):
            yield
    finally:
        _under_check = before


def on_ranks(
    ranks: int,
    observe: Callable[..., Any],
    *args: Any,
    timeout: float = RANKS_SECONDS,
    slip: str | None = None,
    backend: Backend | None = None,
) -> list[Any]:
    """`observe(*args)` on each of N ranks; what they returned, in rank order.

    Args:
        ranks: N.
        observe: runs the answer inside a rank; a function of the check's module.
        *args: its arguments.
        timeout: seconds after which the ranks count as stuck; `ON_GPUS` times as many on a machine with GPUs.
        slip: what the ranks are stuck for most likely, if they are.
        backend: as in `launch`; a check with a `Recorder` needs "gloo", which is where it can record.

    Raises:
        AnswerError: a rank raised, died, or did not come back.
    """
    exercise = _under_check.id if _under_check is not None else None
    limit = timeout * (ON_GPUS if torch.cuda.device_count() else 1)
    try:
        return launch(_observed, ranks, exercise, observe, args, timeout=limit, backend=backend)
    except RankError as error:
        raise AnswerError(_explained(error, slip)) from error


def _explained(error: RankError, slip: str | None) -> str:
    """What the ranks failed with, and at which line of the learner's cell."""
    lines = [re.sub(r" \([^()]*:\d+\)$", "", str(error)).replace("AnswerError: ", "")]  # the place may be one of ours
    first = next(iter(error.failures.values()), "")
    lines += first.partition("AnswerError: ")[2].splitlines()[1:]  # what `expect` says in a rank below: the slip
    stuck = any("stuck here" in text for text in error.failures.values())
    for rank, text in sorted(error.failures.items()) if stuck else list(error.failures.items())[:1]:
        frames = re.findall(r'File "<cell.*?", line (\d+),.*\n +(.*)', text)
        for line, source in frames[:1] if stuck else frames[-1:]:
            lines.append(f"rank {rank} {'waits' if stuck else 'is'} in line {line} of your cell: {source}")
    if slip and stuck:
        lines.append(f"likely slip: {slip}")
    return "\n".join(lines)


def _observed(exercise: str | None, observe: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if exercise is None:
        return observe(*args)
    with forbidden(find_reference(exercise)):
        return observe(*args)


def expect(
    what: str,
    got: Any,
    wanted: Any,
    *,
    rank: int | None = None,
    slips: Mapping[str, Any] | None = None,
    slip: str | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Reject the answer unless it `got` what was `wanted`.

    Args:
        what: names the quantity, with its unit.
        got: number, text, bool, None, tensor, or a list, tuple or dict of them.
        wanted: the same, right.
        rank: whose it is.
        slips: what a usual mistake would have given, by the words that explain it.
        slip: words for any other mistake.
        tolerance: how far floating point may be off, relative to the largest value wanted.
    """
    if same(got, wanted, tolerance):
        return
    usual = next((text for text, wrong in (slips or {}).items() if same(got, wrong, tolerance)), slip)
    where = "" if rank is None else f"rank {rank}, "
    lines = [f"{where}{what}: expected {describe(wanted)}, got {describe(got)}{_first_difference(got, wanted)}"]
    if usual:
        lines.append(f"likely slip: {usual}")
    raise AnswerError("\n".join(lines))


def same(got: Any, wanted: Any, tolerance: float = 0.0) -> bool:
    """Whether two values are equal: shape, dtype and type exactly, floating point within `tolerance`."""
    match wanted:
        case Tensor():
            return isinstance(got, Tensor) and _same_tensor(got, wanted, tolerance)
        case dict():
            return (
                isinstance(got, dict)
                and got.keys() == wanted.keys()
                and same([got[key] for key in wanted], list(wanted.values()), tolerance)
            )
        case list() | tuple():
            return (
                isinstance(got, list | tuple)
                and len(got) == len(wanted)
                and all(same(a, b, tolerance) for a, b in zip(got, wanted, strict=True))
            )
        case float():
            return type(got) in (int, float) and abs(got - wanted) <= tolerance * max(abs(wanted), 1e-30)
    return type(got) is type(wanted) and bool(got == wanted)


def _same_tensor(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    got, wanted = got.detach().cpu(), wanted.detach().cpu()
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(got, wanted)
    return torch.allclose(got, wanted, rtol=0.0, atol=tolerance * max(float(wanted.abs().max()), 1e-30))


def describe(value: Any) -> str:
    """A value in a few words."""
    match value:
        case Tensor() if value.numel() <= 6:
            return f"{_rounded(value.detach().tolist())} ({_kind(value)})"
        case Tensor():
            return f"a tensor {_kind(value)}"
        case bool() | None:
            return repr(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case str():
            return value
        case dict():
            return "{" + ", ".join(f"{key}: {describe(each)}" for key, each in value.items()) + "}"
        case list() | tuple():
            shown = [describe(each) for each in value[:8]]
            return f"[{', '.join(shown)}{', ...' if len(value) > 8 else ''}]"
    return f"an object of type {type(value).__name__}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _first_difference(got: Any, wanted: Any) -> str:
    """Where two tensors of one shape, or two lists, first differ."""
    if isinstance(wanted, Tensor) and isinstance(got, Tensor) and got.shape == wanted.shape and wanted.numel() > 6:
        a, b = got.detach().flatten().double().cpu(), wanted.detach().flatten().double().cpu()
        far = ~((a - b).abs() <= 1e-6 * b.abs().max())
        if bool(far.any()):
            i = int(far.nonzero()[0])
            return f": element {i} is {float(a[i]):.4g} instead of {float(b[i]):.4g}, {int(far.sum())} differ"
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple) and max(len(got), len(wanted)) > 8:
        for at, (a, b) in enumerate(zip(got, wanted, strict=False)):
            if not same(a, b, 1e-6):
                return f": number {at} is {describe(a)} instead of {describe(b)}"
        if len(got) != len(wanted):
            return f": alike as far as both go, {len(got)} in place of {len(wanted)}"
    return ""


_submitted: tuple[Callable[..., Any], Variant] | None = None


def submit(answer: Callable[..., Any], variant: Variant) -> None:
    """Let the pytest node of this process check `answer`; without a submission it checks a copy of the reference."""
    global _submitted
    _submitted = answer, variant


def submitted(exercise: str) -> tuple[Callable[..., Any], Variant]:
    """What the node of `exercise` is to check, and in which setting."""
    if _submitted is not None:
        return _submitted
    from minifsdp.course.workshop.catalogue import setup_of
    from minifsdp.course.workshop.child import define
    from minifsdp.course.workshop.references import lab_of

    cell = f'@exercise("{exercise}")\n{find_reference(exercise).source}'
    return define(setup_of(lab_of(exercise)), cell, exercise), Variant()
