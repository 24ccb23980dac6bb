"""`minifsdp train`: one model trained for as long as it takes, and over any number of restarts."""

from minifsdp.course.train.plan import Plan, plan, run
from minifsdp.course.train.settings import Settings

__all__ = ["Plan", "Settings", "plan", "run"]
