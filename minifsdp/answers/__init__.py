"""The reference answers to the labs' exercises: `from minifsdp.answers.lab05 import gather`.

A lab's answers are in the folder `labs/lab05`, a file for each exercise: in a checkout next to the package, and inside
the package where it is installed.
"""

from pathlib import Path

_package = Path(__file__).parents[1]
_inside = _package / "labs"
__path__ = [str(_inside if _inside.is_dir() else _package.parent / "labs")]
