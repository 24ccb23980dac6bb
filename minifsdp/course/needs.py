"""Modules that the server imports before it forks, besides the instruments' own."""

from __future__ import annotations

from minifsdp.instruments.warm import needs

RANKS_USE = (*needs.RANKS_USE, *(f"minifsdp.course.ladder.{name}" for name in ("rungs", "measure")))
CHECKS_NEED = ("minifsdp.course.workshop.checking",)
PICTURES_NEED = (  # of the ladder
    "minifsdp.course.ladder.pictures",
    *(f"minifsdp.instruments.plots.{name}" for name in ("ladder", "steps", "schedules")),
)
