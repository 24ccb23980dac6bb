"""The subtitle of a lab's plots, from the program that knows whose answers they show."""

from __future__ import annotations

from collections.abc import Callable

of_lab: Callable[[str], str] = "lab {}".format
"""Takes a lab, such as "05"; the labs' workshop sets it."""
