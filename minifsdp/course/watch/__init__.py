"""Counting: every live byte by what it is for, every collective, every microsecond of a step."""
