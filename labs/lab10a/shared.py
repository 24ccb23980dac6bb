"""What several exercises of lab 10a share."""

from minifsdp.course.workshop.checking import AnswerError


def other_error(error):
    return AnswerError(
        f"values that are left unwritten: expected RuntimeError, got {type(error).__name__}: {error}\n"
        "likely slip: the docstring promises RuntimeError, and the caller catches nothing else"
    )
