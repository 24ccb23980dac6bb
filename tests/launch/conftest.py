"""What the tests that start processes share."""

import uuid
from collections.abc import Iterator

import pytest
from marked import marked, within


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable that all processes of this test carry; none of them may outlive it."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("MARKER", word)
    yield word
    try:
        within(3, lambda: not marked(word))
    finally:
        for process in marked(word):
            process.kill()
