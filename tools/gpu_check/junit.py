"""Outcomes and figures of tests, from the XML that `pytest --junitxml` writes.

The format: https://docs.pytest.org/en/stable/how-to/output.html#creating-junitxml-format-files; `record_property` puts
a `<property>` into its test's `<testcase>`.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_REASON = 300  # characters kept of a reason


def parse_junit(text: str) -> dict[str, Any]:
    """Read the report of one run.

    Args:
        text: the XML.

    Returns:
        "tests": of each its name (`test_gpu.py::test_name[case]` without folders), "outcome" ("passed", "failed" or
        "skipped"), "seconds", and as "reason" the first line of why it was skipped or failed, else None. "figures":
        {name of a passed test: {property: value}}, values read as JSON where they are JSON.

    Raises:
        ValueError: the text is no such report.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"pytest's report is no XML: {error}") from error
    tests: list[dict[str, Any]] = []
    figures: dict[str, dict[str, Any]] = {}
    for case in root.iterfind(".//testcase[@name]"):  # one that was interrupted has no name, and no outcome
        outcome, reason = _outcome(case)
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name', '')}"
        seconds = float(case.get("time", 0))
        tests.append({"name": name, "outcome": outcome, "seconds": round(seconds, 3), "reason": reason})
        found = {p.get("name", ""): _value(p.get("value", "")) for p in case.iterfind("properties/property")}
        if found and outcome == "passed":
            figures[name] = found
    return {"tests": tests, "figures": figures}


def _outcome(case: Element) -> tuple[str, str | None]:
    """The worst that is said of a test: one that passes may still fail when it is taken down."""
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            lines = (found.get("message") or found.text or "").strip().splitlines()
            return outcome, lines[0][:_REASON] if lines else None
    return "passed", None


def _value(text: str) -> Any:
    """A property as what it was: pytest has written str() of it. What JSON cannot hold stays text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text), parse_constant=str)
    except ValueError:
        return text


def count(tests: list[dict[str, Any]]) -> dict[str, int]:
    """How many passed, failed and were skipped."""
    found = Counter(test["outcome"] for test in tests)
    return {outcome: found[outcome] for outcome in ("passed", "failed", "skipped")}
