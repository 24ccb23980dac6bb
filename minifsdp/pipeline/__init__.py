"""Pipelines: stages of a model on different ranks, with the names of torch.distributed.pipelining.

Read in this order: actions, schedules (naive, gpipe, one_f_one_b, interleaved, zero_bubble), simulate; then stage,
weights, boundary, channels, executor; failures, data_parallel and tied; last schedule, which puts them together.
A model becomes stages by balance, split and materialize; gpt does so with the course's. torch_api has the schedules
under torch's names, which are imported on first use.
"""

from typing import TYPE_CHECKING

from minifsdp.on_first_use import on_first_use
from minifsdp.pipeline.balance import divide, parameters_of, seconds_of
from minifsdp.pipeline.failures import PipelineError
from minifsdp.pipeline.gpt import split_gpt
from minifsdp.pipeline.materialize import materialize, parameters_on_meta
from minifsdp.pipeline.micro_batches import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from minifsdp.pipeline.schedule import Schedule
from minifsdp.pipeline.split import keep_stage, keep_transformers_stage
from minifsdp.pipeline.stage import PipelineStage

if TYPE_CHECKING:
    from minifsdp.pipeline.torch_api.api import (
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
    )
    from minifsdp.pipeline.torch_api.csv_files import from_csv

__all__ = [
    "PipelineError",
    "PipelineStage",
    "Schedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "divide",
    "from_csv",
    "keep_stage",
    "keep_transformers_stage",
    "materialize",
    "merge_chunks",
    "parameters_of",
    "parameters_on_meta",
    "seconds_of",
    "split_args_kwargs_into_chunks",
    "split_gpt",
]

__getattr__ = on_first_use(__name__, __all__, ".torch_api.api", ".torch_api.csv_files")
