"""Puts the labs and their pictures into the wheel, in `minifsdp/labs` and `minifsdp/slides`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LABS = Path("labs")


class BuildWithLabs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout uses its own folder labs/
            exercises = [path for path in LABS.glob("lab*/*.py") if not path.stem.startswith("lab")]
            exercises = [path for path in exercises if not path.stem.endswith(("wrong", "right"))]
            for source in [*LABS.glob("lab*.ipynb"), *exercises, *Path("slides/figures").glob("*.svg")]:
                target = Path(self.build_lib, "minifsdp", source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


setup(cmdclass={"build_py": BuildWithLabs})
