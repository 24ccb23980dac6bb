"""What the checks are given: an answer, and the setting to check it in."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minifsdp.course.workshop import checking


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exercise(id): the check of this exercise")


@pytest.fixture(autouse=True)
def _exercise(request: pytest.FixtureRequest) -> Iterator[None]:
    with checking.checking(_id(request)):
        yield


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The submitted function; without a submission, a copy of the reference."""
    return checking.submitted(_id(request))[0]


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> checking.Variant:
    return checking.submitted(_id(request))[1]


def _id(request: pytest.FixtureRequest) -> str:
    marker = request.node.get_closest_marker("exercise")
    return str(marker.kwargs["id"])
