"""Pipelines: stages of a model on different ranks, with the names of torch.distributed.pipelining.

Read in this order: actions, schedules (naive, gpipe, one_f_one_b, interleaved, looped_bfs, zero_bubble, zbv), simulate;
then stage, weights, boundary, channels, executor; failures, data_parallel and tied; schedule, which puts them together,
and api, its names in torch.
A model becomes stages by balance, split and materialize; gpt does so with the course's.
"""

from minifsdp.pipeline.api import Schedule1F1B as Schedule1F1B
from minifsdp.pipeline.api import ScheduleDualPipeV as ScheduleDualPipeV
from minifsdp.pipeline.api import ScheduleGPipe as ScheduleGPipe
from minifsdp.pipeline.api import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
from minifsdp.pipeline.api import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
from minifsdp.pipeline.api import ScheduleLoopedBFS as ScheduleLoopedBFS
from minifsdp.pipeline.api import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
from minifsdp.pipeline.api import from_csv as from_csv
from minifsdp.pipeline.balance import divide as divide
from minifsdp.pipeline.balance import parameters_of as parameters_of
from minifsdp.pipeline.balance import seconds_of as seconds_of
from minifsdp.pipeline.failures import PipelineError as PipelineError
from minifsdp.pipeline.gpt import split_gpt as split_gpt
from minifsdp.pipeline.materialize import materialize as materialize
from minifsdp.pipeline.materialize import parameters_on_meta as parameters_on_meta
from minifsdp.pipeline.micro_batches import TensorChunkSpec as TensorChunkSpec
from minifsdp.pipeline.micro_batches import merge_chunks as merge_chunks
from minifsdp.pipeline.micro_batches import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
from minifsdp.pipeline.schedule import Schedule as Schedule
from minifsdp.pipeline.split import keep_stage as keep_stage
from minifsdp.pipeline.split import keep_transformers_stage as keep_transformers_stage
from minifsdp.pipeline.stage import PipelineStage as PipelineStage
