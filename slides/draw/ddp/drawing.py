"""What the figures of deck 2 are drawn with: four ranks, and the colours of ways to do a thing."""

from __future__ import annotations

from minifsdp.instruments.plots.palette import SERIES_COLOURS

GOOD, BAD, OTHER = SERIES_COLOURS[:3]
FOUR = range(4)  # ranks, and chunks
