"""`minifsdp train`: one model trained for as long as it takes, and over any number of restarts."""

from minifsdp.course.train.settings import Settings
from minifsdp.course.train.start import Plan, plan, run

__all__ = ["Plan", "Settings", "plan", "run"]
