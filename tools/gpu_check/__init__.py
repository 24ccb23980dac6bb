"""`python -m tools.gpu_check`: what the course claims of GPUs, run on one, and put on record part by part.

    machine.py   which GPUs there are, with which versions; the commit
    parts.py     the parts: what each needs, its command, what it leaves to be read
    junit.py     outcomes and figures of tests, from pytest's XML
    process.py   one command with a time limit, gone afterwards with all that it started
    check.py     runs the parts and puts each on record as soon as it is done
    summary.py   the table at the end
    command.py   the command line

Each part is a command that one can give oneself, in a process of its own: what crashes or hangs takes nothing with it.
"""
