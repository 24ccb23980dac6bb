"""Comparisons with self-explanatory failures: the expected value, the actual value, and the likely slip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class AnswerError(AssertionError):
    """A wrong answer; the message explains it, one fact per line."""


overriding: str | None = None  # a slip known to have been made; it explains every later difference
race: str | None = None  # one that explains every later difference in a tensor


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
        what: the quantity, with its unit.
        got: the answer's value: number, text, bool, None, tensor, or a list, tuple or dict of them.
        wanted: the correct value, of the same kind.
        rank: the rank that `got` is from.
        slips: the values that common mistakes give, keyed by their explanation.
        slip: the explanation of any other mistake.
        tolerance: largest floating-point error, relative to the largest value wanted.
    """
    if same(got, wanted, tolerance):
        return
    known = overriding or (race if isinstance(wanted, Tensor) else None)
    usual = known or next((text for text, wrong in (slips or {}).items() if same(got, wrong, tolerance)), None)
    usual = usual or slip or dtype_slip(got, wanted)
    where = "" if rank is None else f"rank {rank}, "
    lines = [f"{where}{what}: {_contrast(got, wanted, tolerance)}"]
    if usual:
        lines.append(f"likely slip: {usual}")
    raise AnswerError("\n".join(lines))


def _contrast(got: Any, wanted: Any, tolerance: float) -> str:
    """Both values; where these look the same, with all their digits or by what differs in them."""
    shown, expected, where = describe(got), describe(wanted), _first_difference(got, wanted)
    if shown == expected and isinstance(wanted, bool | int | float | str | None):
        shown, expected = f"{got!r} ({type(got).__name__})", f"{wanted!r} ({type(wanted).__name__})"
    elif shown == expected and not where and isinstance(wanted, dict | list | tuple):
        items = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
        key, each = next((key, each) for key, each in items if not same(got[key], each, tolerance))
        return f"{key}: {_contrast(got[key], each, tolerance)}"
    return f"expected {expected}, got {shown}{where}"


def same(got: Any, wanted: Any, tolerance: float = 0.0) -> bool:
    """True if two values are equal: shape, dtype and type exactly, floating point within `tolerance`."""
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
    largest = float(wanted[wanted.isfinite()].abs().max()) if wanted.isfinite().any() else 0.0
    return torch.allclose(got, wanted, rtol=0.0, atol=tolerance * max(largest, 1e-30))


def dtype_slip(got: Any, wanted: Any) -> str | None:
    """The explanation for values that are right as far as another dtype's digits go."""
    if not (isinstance(got, Tensor) and isinstance(wanted, Tensor) and got.shape == wanted.shape and wanted.numel()):
        return None
    if not same(got.detach().double(), wanted.detach().double(), 1e-2 if got.dtype.itemsize == 2 else 1e-6):
        return None
    if got.dtype != wanted.dtype:
        return f"the values are right but their dtype is {_dtype(got)}: it has to be {_dtype(wanted)}"
    if wanted.dtype == torch.float64:
        return "the values are right to 6 digits only: something was computed in, or cast to, a narrower dtype"
    return None


def describe(value: Any) -> str:
    """A short description of a value."""
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
    return f"{list(tensor.shape)} {_dtype(tensor)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_difference(got: Any, wanted: Any) -> str:
    """The first difference between two tensors of one shape, or between two lists, in words."""
    if isinstance(wanted, Tensor) and isinstance(got, Tensor) and got.shape == wanted.shape:
        a, b = got.detach().flatten().double().cpu(), wanted.detach().flatten().double().cpu()
        far = ~((a - b).abs() <= 1e-6 * b.abs().max()) if b.numel() else a != b
        if bool(far.any()) and (wanted.numel() > 6 or describe(got) == describe(wanted)):
            i = int(far.nonzero()[0])
            digits = 4 if f"{a[i]:.4g}" != f"{b[i]:.4g}" else 9
            return f": element {i} is {a[i]:.{digits}g} instead of {b[i]:.{digits}g}, {int(far.sum())} differ"
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple) and max(len(got), len(wanted)) > 8:
        for at, (a, b) in enumerate(zip(got, wanted, strict=False)):
            if not same(a, b, 1e-6):
                return f": number {at} is {describe(a)} instead of {describe(b)}"
        if len(got) != len(wanted):
            return f": equal as far as both go, {len(got)} values instead of {len(wanted)}"
    return ""
