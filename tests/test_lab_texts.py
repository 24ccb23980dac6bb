"""What the notebooks say, held to the numbers that are stored in them: sentences, figures and predictions.

A timed figure differs from run to run. These tests read the outputs as they are shipped, so a notebook that was built on
a busy machine and contradicts its own text fails here.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from minifsdp.course.workshop.catalogue import Cell, all_labs, read_cells, shipped_notebook, source_of

PREDICT = re.compile(r'^predict\("([^"]+)"', re.M)
OUTCOME = re.compile(r"prediction (\S+): (?:measured|computed|model) ([\d,]*\d(?:\.\d+)?)")
NUMBER = re.compile(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?")

# Answers that are above their question as the number of something else, and equal by arithmetic.
COINCIDE = {
    "0.3": "AMSGrad's three buffers have the bytes of parameters and two buffers",
    "3.5": "on two ranks a shard of the gradients is as large as what a rank sends to reduce them",
    "5.6": "all units whole are as large as the parameters of ZeRO-1, padding included",
}


@cache
def cells(lab: str) -> list[Cell]:
    return read_cells(shipped_notebook(lab))


def printed(cell: Cell) -> str:
    """What a cell has printed, pictures left out."""
    return "".join(text(each["text"]) for each in outputs(cell) if each["output_type"] == "stream")
