"""The suite on other versions of torch: `python -m tools.test_versions 2.11 2.15` (`make test-versions`).

Each version has an environment of its own in build/torch-VERSION, where everything but torch is what constraints.txt
says, and gets what CI runs but for the notebooks, and every wrong answer. Results go to tests/versions.json. Exit code
1 if a test fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools import ROOT

RECORD = ROOT / "tests" / "versions.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=["2.11", "2.15"], help="default: the oldest and the newest")
    results = [run(version) for version in parser.parse_args().versions]
    for result in results:
        print(f"torch {result['torch']}: {result['passed']} passed, {len(result['failed'])} failed", *result["failed"])
    return int(any(result["failed"] for result in results))


def run(version: str) -> dict[str, Any]:
    """Test with one version and write the result into the record, in the place of an older one."""
    python = environment(version)
    outcomes = list(tested(python))
    counts = Counter(kind for kind, _ in outcomes)
    result = {
        "torch": said(python, "-c", "import torch; print(torch.__version__)"),
        "python": said(python, "-c", "import platform; print(platform.python_version(), platform.system())"),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": said("git", "describe", "--always", "--dirty"),
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "failed": [name for kind, name in outcomes if kind == "failed"],
    }
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(dict(sorted({**record, version: result}.items())), indent=1) + "\n")
    return result


def environment(version: str) -> Path:
    """The Python of an environment that has this version of torch."""
    folder = ROOT / "build" / f"torch-{version}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        others = [
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("\n".join([*others, f"torch=={version}.*", ""]))
            constraints.flush()
            install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints.name]
            subprocess.run([python, *install, "--editable", ".[dev]"], cwd=ROOT, check=True)
        ready.touch()
    return python


def tested(python: Path) -> Iterator[tuple[str, str]]:
    """What became of each test: "passed", "skipped" or "failed", and its name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "not slow", "-n", "3", "--ignore", "tests/labs/test_notebooks.py", f"--junitxml={report}"]
        subprocess.run([python, "-m", "pytest", "-q", *options], cwd=ROOT, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            yield kind, f"{case.get('classname')}.{case.get('name')}"


def said(*command: str | Path) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
