"""What only maintainers run, from the checkout's root: `python -m tools.NAME`. None of it is in the wheel.

    gpu_check         all that the course claims of GPUs, run and put on record (`make gpu-check`)
    records.py        what a record of a GPU is: read, checked, written
    worlds_table.py   the table of worlds in docs/gpu.md, from the records
    gpu_table.py      writes that table into the page
    launchers         each launcher, really run on a CPU, and the table of docs/launchers.md
    benchmark.py      what the scripts in benchmarks/ have in common
    cpu_records.py    records of what benchmarks measured on a CPU
    test_versions.py  the suite on other versions of torch (`make test-versions`)

Nothing in minifsdp imports it.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The checkout."""
