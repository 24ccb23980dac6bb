"""What a lab's notebook works with: exercises and their checks, predictions, hints, and answers kept from earlier labs.

@exercise("5.2")
def gather(flat, group):
    ...                         # blank: the reference stands in; written: checked at once, and used from here on
"""

from minifsdp.course.workshop.notebook import check, earlier, exercise, hint, yours
from minifsdp.course.workshop.predictions import outcome, predict

__all__ = ["check", "earlier", "exercise", "hint", "outcome", "predict", "yours"]
