"""How `pytest -n` shares out the tests: a file's stay together, for they share launches; notebooks go one by one."""

from typing import Any

import pytest

# Each of these takes a minute or more. They go first, so that no worker begins one when the others are done.
LONGEST = ("labs", "ladder", "train", "launch", "marking", "fsdp_parity", "batch", "doctor")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem.removeprefix("test_"), len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return nodeid if file.endswith("test_notebooks.py") else file

    config.option.loadscopereorder = False  # by the number of tests: thousands that share a launch are no work
    return ByFile(config, log)
