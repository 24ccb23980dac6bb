"""An exercise's stub and hints, read from the texts of its lab and its file: nothing here imports torch."""

from __future__ import annotations

import ast
from functools import cache

from minifsdp.course.workshop.catalogue import Stub, exercise_file, lab_of, stubs_of
from minifsdp.course.workshop.store import Store


@cache
def stub_of(exercise: str) -> Stub:
    """An exercise as shipped.

    Raises:
        ValueError: there is no such exercise; the message lists those of its lab.
    """
    lab = lab_of(exercise)
    stubs = stubs_of(lab)
    if exercise not in stubs:
        raise ValueError(f"there is no exercise {exercise!r}: lab {lab} has {', '.join(stubs) or 'none'}")
    return stubs[exercise]


def next_hint(exercise: str, store: Store) -> str:
    """The first hint not yet requested; once both have been, the second again.

    Raises:
        ValueError: there is no such exercise.
    """
    hints = hints_of(exercise)
    number = min(store.read("hints", exercise) or 0, len(hints) - 1)
    return f"hint {number + 1} of {len(hints)}: {hints[number]}"


def count_hint(exercise: str, store: Store) -> None:
    """Record that the hint from `next_hint` was seen."""
    given = store.read("hints", exercise) or 0
    store.write("hints", exercise, min(given + 1, len(hints_of(exercise))))


@cache
def hints_of(exercise: str) -> tuple[str, str]:
    """The `hints` of the decorator of an exercise's reference; raises as `next_hint`."""
    stub = stub_of(exercise)
    file = exercise_file(exercise)
    for function in ast.parse(file.read_text()).body:
        if isinstance(function, ast.FunctionDef) and function.name == stub.name:
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call):
                    said = {each.arg: each.value for each in decorator.keywords}
                    first, second = ast.literal_eval(said["hints"])
                    return str(first), str(second)
    raise AssertionError(f"{file} has no reference {stub.name}")
