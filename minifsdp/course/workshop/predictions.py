"""Predict a number, then compare the prediction with the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Literal

from minifsdp.course.workshop import notebook
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.course.workshop.store import Store


def predict(name: str, value: float | EllipsisType, what: str = "") -> None:
    """Record a prediction; `...` keeps the one already recorded in this folder, if any.

    Args:
        name: the prediction's id: that of its exercise, such as "5.2", or one of its own.
        value: the number.
        what: the quantity, with its unit.

    Raises:
        TypeError: the value is not a number.
    """
    of = f" ({what})" if what else ""
    if value is ...:
        before = Store().read("predictions", name)
        print_wrapped(f"prediction {name}{of}: {'none yet' if before is None else f'{before:,}, as before'}")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"predict({name!r}, ...): replace the dots with a number, not {value!r}")
    Store().write("predictions", name, value)
    print_wrapped(f"prediction {name}{of}: {value:,}")


def outcome(
    name: str,
    measured: float,
    *,
    how: Literal["measured", "computed", "model"] = "measured",
    ranks: int = 1,
    itemsize: int = 4,
    slips: Mapping[str, float] | None = None,
) -> None:
    """Print the measurement next to the prediction, and the likely slip if they differ.

    Args:
        name: as given to `predict`.
        measured: the number.
        how: the source of the number; a model's result is never called measured.
        ranks: N, to recognize (N - 1) / N and 1 / N.
        itemsize: bytes per element, to recognize elements confused with bytes.
        slips: the numbers that this question's common mistakes give, by their explanation. An exact match is
            explained, and so are a near prediction whose error is mostly due to a slip, and a prediction near a slip's
            ratio: one that is no whole number, and that one may have rounded.
    """
    said = Store().read("predictions", name)
    line = f"prediction {name}: {how} {measured:,}"
    if notebook.has_failed(name):
        print(f"{line}, with an answer that failed its check: fix it to compare your prediction")
        return
    if said is None:
        print(f"{line}, nothing was predicted")
    elif abs(said - measured) <= 1e-9 * abs(measured):
        print(f"{line}, as you predicted")
    else:
        slip = likely_slip(said, measured, ranks, itemsize, slips or {})
        slip = slip or near_miss(said, measured, slips or {}) or near_slip(said, slips or {})
        print(f"{line}, you said {said:,}" + (f": {slip}" if slip else ""))


def likely_slip(said: float, true: float, ranks: int, itemsize: int, slips: Mapping[str, float]) -> str | None:
    """The mistake that leads from `true` to `said`, in words; None if no common one does."""
    usual = {
        **slips,
        f"elements against bytes, an element has {itemsize} bytes": true / itemsize,
        f"bytes against elements, an element has {itemsize} bytes": true * itemsize,
        "MiB against bytes": true / 2**20,
        f"the whole against one rank's part: there are {ranks} ranks": true * ranks,
        f"one rank's part against the whole: there are {ranks} ranks": true / ranks,
        "N against N - 1: a rank need not send to itself": true * ranks / max(1, ranks - 1),
        "N - 1 against N: all ranks take part": true * (ranks - 1) / ranks,
        "twice too much: is something counted there and back?": true * 2,
        "half of it: something goes there and back": true / 2,
    }
    for text, wrong in usual.items():
        if wrong != true and abs(said - wrong) <= 1e-6 * abs(wrong):
            return text
    if ranks > 1 and 0 < abs(said - true) < ranks * itemsize:
        return "off by less than one element per rank: the padding"
    return None


def near_miss(said: float, true: float, slips: Mapping[str, float]) -> str | None:
    """The error of a prediction within 5 %, with the slip behind at least three quarters of it, if any; else None."""
    off = said - true
    if abs(off) > 0.05 * abs(true):
        return None
    counts = isinstance(said, int) and isinstance(true, int) and abs(off) < 10
    share = 100 * abs(off / true)
    far = f"{abs(off)}" if counts else f"{share:.1f} %" if share >= 0.1 else "less than 0.1 %"
    missed = [text for text, wrong in slips.items() if abs(said - wrong) <= abs(true - wrong) / 4]
    return ": ".join([f"{far} too {'low' if off < 0 else 'high'}", *missed[:1]])


def near_slip(said: float, slips: Mapping[str, float]) -> str | None:
    """The slip whose number, a fraction, is within 5 % of a prediction and nearest to it; None if there is none."""
    off = {text: abs(said - wrong) for text, wrong in slips.items() if wrong != int(wrong)}
    near = [text for text in off if off[text] <= 0.05 * abs(slips[text])]
    return min(near, key=lambda text: off[text], default=None)
