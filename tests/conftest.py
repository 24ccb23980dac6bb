"""How `pytest -n` shares out the tests: a file's stay together, for they share launches; notebooks go one by one."""

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return nodeid if file.endswith("test_notebooks.py") else file

    return ByFile(config, log)
