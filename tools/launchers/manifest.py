"""The manifest of Kubeflow Trainer against the schema that its project publishes, which is installed for the check."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tools import ROOT

NAME = "Kubeflow Trainer"
MANIFEST = ROOT / "scripts" / "trainjob.yaml"
SCHEMA = "kubeflow-trainer-api==2.3.0"  # models that are generated from the resource's definition
CHECK = """
import sys, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob

given = yaml.safe_load(open(sys.argv[1]))
known = TrainJob.from_dict(given).to_dict()
assert known == given, f"fields that the schema does not have: {given} is read as {known}"
"""


def compared(bin_folder: Path, folder: Path) -> dict[str, Any]:
    """The row of a launcher that is not run here."""
    words = ["--quiet", "--disable-pip-version-check", "--target", str(folder), SCHEMA, "pyyaml"]
    there = subprocess.run([bin_folder / "python", "-m", "pip", "install", *words], capture_output=True, text=True)
    row = {"name": NAME, "version": None, "command": "kubectl apply -f scripts/trainjob.yaml"}
    if there.returncode:
        return row | {"state": "not run", "reason": "there was no cluster, and its schema could not be installed"}
    done = subprocess.run(
        [bin_folder / "python", "-c", CHECK, MANIFEST],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return row | {"state": "not run", "reason": f"the manifest is wrong: {done.stderr.splitlines()[-1]}"}
    return row | {"state": "not run", "reason": f"there was no cluster; the manifest fits {SCHEMA}"}
