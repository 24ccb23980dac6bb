"""`python -m minifsdp`, also under torchrun."""

import sys

try:
    from minifsdp.course.cli import main
except ModuleNotFoundError as error:  # run from a checkout, by a Python that has not what it needs
    print(f"minifsdp: this Python has no {error.name}: install it, or use another Python", file=sys.stderr)
    sys.exit(2)

main()
