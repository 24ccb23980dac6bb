"""Launchers, each really run on a CPU: `python -m tools.launchers`, whose record is the table of docs/launchers.md.

    ways.py       how each of them starts `minifsdp train`
    running.py    a run: what the ranks were given, its last line, what signals do
    places.py     an environment with the extra `launchers`; hosts that are network namespaces; Slurm on one machine
    restarts.py   jobs of torchrun whose ranks are killed at random
    manifest.py   the manifest of Kubeflow Trainer and its published schema
    table.py      the table, from the record
    notes/        what each Python process of a run does first: it notes its variables if it becomes a rank

The commands are those of the page, unchanged, and each runs in network namespaces where the machine allows them.
"""
