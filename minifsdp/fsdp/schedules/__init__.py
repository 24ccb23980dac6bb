"""Schedules of gathers, frees and reductions; each adds one idea to the previous one."""
