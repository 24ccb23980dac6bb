"""`python -m minifsdp`, also under torchrun."""

from minifsdp.course.cli import main

main()
