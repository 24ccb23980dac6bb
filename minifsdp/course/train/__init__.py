"""`minifsdp train`: train one model to the end, across any number of restarts."""

from minifsdp.course.train.settings import TrainSettings
from minifsdp.course.train.start import Request, check, run

__all__ = ["Request", "TrainSettings", "check", "run"]
