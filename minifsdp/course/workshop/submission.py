"""An answer as text, the input of a check."""

from typing import NamedTuple


class Submission(NamedTuple):
    """An answer as text: the lab's set-up cell and the exercise's cell."""

    exercise: str
    setup: str
    cell: str
