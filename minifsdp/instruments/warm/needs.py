"""Modules that the server imports before it forks. None of them may start a thread or initialize CUDA's driver."""

from __future__ import annotations

RANKS_NEED = ("minifsdp.instruments.launch.rank", "torch._dynamo")  # an optimizer's first step imports _dynamo
RANKS_USE = (  # most of them at least one; imported when the first launch is on its way
    *(f"minifsdp.{name}.torch_api.api" for name in ("ddp", "fsdp", "fsdp2", "pipeline")),
    *(f"minifsdp.{name}" for name in ("zero", "tensor_parallel", "checkpoint")),
    *(f"minifsdp.instruments.{name}" for name in ("watch.ledger", "explore.log")),
)
