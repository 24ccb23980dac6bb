"""Some rows of a ladder's picture, large enough for a notebook."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_WHITE, _BLACK = 250, 60  # levels of grey
_AXIS = 0.8  # of the picture's width: only a horizontal axis has so many black pixels in a line
_TICK = 9  # pixels below an axis
_MARGIN = 14  # pixels


def excerpt(picture: Path, rows: Sequence[int]) -> bytes:
    """A PNG of some rows of a picture, with its axis and legend, without its title and the empty part on the right.

    Args:
        picture: a PNG with equally high rows on one horizontal axis, from `allocator_figure` or `timeline_figure`.
        rows: from the top, counted from 0.
    """
    image = Image.open(picture).convert("RGB")
    grey = np.asarray(image.convert("L"))
    black = np.count_nonzero(grey < _BLACK, axis=1)
    axes = [bottom for _, bottom in _runs(black > _AXIS * image.width)]
    height = axes[1] - axes[0]
    strips = [(axes[row] + _TICK - height, axes[row] + _TICK) for row in rows]
    drawn = np.concatenate([grey[top : bottom - _TICK - 3] for top, bottom in strips])
    right = min(image.width, _extent(drawn)[1] + _MARGIN)
    foot = axes[-1] + _TICK
    numbers, *words = [(foot + top, foot + bottom) for top, bottom in _runs((grey[foot:] < _WHITE).any(axis=1))]
    parts = [image.crop((0, top, right, bottom)) for top, bottom in (*strips, numbers)]
    for top, bottom in words:
        start, end = _extent(grey[top:bottom])
        parts.append(image.crop((start, top, end, bottom)))
    return _stacked(parts, right)


def _runs(lines: Any) -> list[tuple[int, int]]:
    """The start and end of every run of True in a line of them."""
    edges = np.flatnonzero(np.diff(lines.astype(int), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _extent(grey: NDArray[np.uint8]) -> tuple[int, int]:
    """The first and last columns that are not white, the last one exclusive."""
    columns = np.flatnonzero((grey < _WHITE).any(axis=0))
    return int(columns[0]), int(columns[-1]) + 1


def _stacked(parts: Sequence[Image.Image], width: int) -> bytes:
    """Pictures from top to bottom, the narrower ones centred."""
    tops = list(accumulate((part.height + _MARGIN // 2 for part in parts), initial=0))
    whole = Image.new("RGB", (width, tops[-1]), "white")
    for part, top in zip(parts, tops, strict=False):
        whole.paste(part, ((width - part.width) // 2, top))
    png = io.BytesIO()
    whole.save(png, "PNG", optimize=True)
    return png.getvalue()
