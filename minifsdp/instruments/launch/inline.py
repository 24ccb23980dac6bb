"""One rank in the caller's own process: slow-motion debugging with `breakpoint()` over a real process group."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from minifsdp.instruments.launch.group import join_group, use_loopback
from minifsdp.instruments.launch.inside import call_user
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.system.scratch import scratch_folder

T = TypeVar("T")


def run_inline(
    fn: Callable[..., T],
    world: World,
    args: tuple[Any, ...],
    timeout: float,
    on_report: Callable[[int, Any], None] | None,
) -> list[T]:
    """Return `[fn(*args)]`, run in this process, inside a one-rank process group that is destroyed afterwards.

    Exceptions pass through unchanged, so that a post-mortem debugger finds their frames.

    Raises:
        ValueError: a process group is initialized already.
    """
    if dist.is_initialized():
        raise ValueError("inline needs this process to itself: call torch.distributed.destroy_process_group() first")
    use_loopback()
    with scratch_folder() as directory:
        join_group(FileStore(os.path.join(directory, "store"), 1), 0, 0, world, timeout)
        try:
            return [call_user(fn, args, lambda obj: on_report(0, obj) if on_report else None)]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
