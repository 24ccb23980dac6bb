"""Note the variables of each process that imports minifsdp's launch, into the folder LAUNCHER_NOTES.

Python imports this file at its start. The commands that are run are those of docs/launchers.md, unchanged.
"""

import json
import os
import sys
from typing import Any


def note(event: str, args: tuple[Any, ...]) -> None:
    """Write the note when the module that checks a job's variables is about to be imported, before it changes any."""
    if event != "import" or args[0] != "minifsdp.instruments.launch.job":
        return
    about = {"pid": os.getpid(), "variables": dict(os.environ), "folder": os.getcwd(), "python": sys.executable}
    about["argv"] = sys.orig_argv
    path = os.path.join(os.environ["LAUNCHER_NOTES"], f"{os.getpid()}.json")
    with open(f"{path}.new", "w") as file:
        json.dump(about, file)
    os.replace(f"{path}.new", path)


if "LAUNCHER_NOTES" in os.environ:
    sys.addaudithook(note)
