"""A step of training to scrub through: who holds what on every rank, the lanes at that moment, and bytes by tag.

`holdings.py` looks at a trainer, `log.py` keeps what it saw during a step, `page.py` makes one file of it that a
browser opens from disk.
"""
