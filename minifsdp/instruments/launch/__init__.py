"""Run a function on N ranks, from a notebook cell, a script, a test, or under torchrun.

    results = launch(fn, world_size, *args)        # one result per rank, in rank order

The function runs inside an initialized process group in one of three ways:

* `local`: N processes forked from a server that has torch imported already (0.1 s per launch after the first);
* `spmd`: RANK and WORLD_SIZE are set (torchrun, srun), or a process group is initialized (Lightning Fabric): this
  process *is* a rank, nothing is started;
* `inline`: one rank in this process, for `breakpoint()`.
"""

import inspect
import operator
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from minifsdp.instruments.launch.errors import RankError
from minifsdp.instruments.launch.group import rank_device
from minifsdp.instruments.launch.inside import inside_rank, report
from minifsdp.instruments.launch.job import adopt_group
from minifsdp.instruments.launch.world import Backend, choose_world, tell_if_chosen

__all__ = ["RankError", "launch", "rank_device", "report"]

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    inline: bool = False,
    backend: Backend | None = None,
    share_gpu: bool | None = None,
    on_report: Callable[[int, Any], None] | None = None,
) -> list[T]:
    """Call `fn(*args)` on `world_size` ranks and return their results in rank order.

    Every rank has an initialized default process group, as `world.py` chooses: nccl with one rank per GPU if there are
    enough GPUs, else gloo. If there was a choice, the first launch prints it. `fn`, `args` and the results travel by
    cloudpickle, so `fn` may be defined in a notebook cell; under torchrun the results must be data that
    `torch.load(weights_only=True)` reads. Ranks see `os.environ`, `sys.path` and the source of notebook cells as of
    the call; variables that torch reads when it is imported must be set before the first launch. The ranks' output is
    shown as `[rank r] ...` in rank order once they have ended.

    Args:
        fn: the function every rank runs.
        world_size: number of ranks. Under torchrun with more processes than that, the first `world_size` run `fn`
            in a process group of their own and all processes return the list.
        *args: arguments of `fn`, the same on every rank.
        timeout: seconds that the ranks may take once all of them are ready; no collective waits longer either, under
            torchrun at most ten minutes.
        inline: run the one rank in this process, so that `breakpoint()` and `pdb` work.
        backend: `"gloo"` or `"nccl"` instead of the automatic choice. `"fake"` starts rank 0 alone, as one of
            `world_size`, with collectives that return at once and carry nothing: for memory and order, not for values.
        share_gpu: let several nccl ranks share one GPU if there are too few; None: as `MINIFSDP_SHARE_GPU` says.
        on_report: called as `on_report(rank, obj)` in this process, while the ranks run, for each `report(obj)`
            of a rank (under torchrun: for those of rank 0, on rank 0).

    Raises:
        RankError: a rank raised, died, or did not answer in time. `.failures` maps ranks to tracebacks or stacks.
        TypeError: `fn` cannot be called with `args`, or cannot be sent to another process.
        ValueError: `world_size`, `timeout` or `backend` is impossible, at all or on this machine.
        RuntimeError: on native Windows, or inside a rank of another launch.
    """
    if sys.platform == "win32":
        raise RuntimeError("launch needs Linux, macOS or WSL2: native Windows cannot run the ranks")
    if inside_rank():
        raise RuntimeError("launch was called inside a rank of another launch: call fn directly there")
    world_size = _check(fn, args, world_size, timeout, backend)
    if inline and world_size != 1:
        raise ValueError(f"inline runs one rank, not {world_size}: use launch(fn, 1, inline=True)")
    adopt_group()
    if not inline and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from minifsdp.instruments.launch.spmd import run_spmd

        return run_spmd(fn, world_size, args, timeout, backend, share_gpu, on_report)
    world = choose_world(world_size, share_gpu=share_gpu, backend=backend, here=world_size)
    tell_if_chosen(world)
    if inline:
        from minifsdp.instruments.launch.inline import run_inline

        return run_inline(fn, world, args, timeout, on_report)
    from minifsdp.instruments.launch.local import run_local

    return run_local(fn, world, args, timeout, on_report)


def _check(fn: Callable[..., T], args: tuple[Any, ...], world_size: int, timeout: float, backend: str | None) -> int:
    """Refuse impossible arguments, in one line, before anything starts; return `world_size` as a plain int."""
    if not callable(fn):
        raise TypeError(f"launch(fn, world_size, *args): fn must be a function, not {fn!r}")
    try:
        ranks = 0 if isinstance(world_size, bool) else operator.index(world_size)
    except TypeError:
        ranks = 0
    if ranks < 1:
        raise ValueError(
            f"launch(fn, world_size, *args): world_size must be a whole number from 1 up, not {world_size!r}"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 1e6:
        raise ValueError(f"timeout must be a number of seconds above 0 and up to 1e6, not {timeout!r}")
    if backend not in (None, "gloo", "nccl", "fake"):
        raise ValueError(f"backend must be 'gloo', 'nccl', 'fake' or None (automatic), not {backend!r}")
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(f"launch cannot call {name} with {len(args)} argument(s): {error}") from None
    except ValueError:  # some builtins have no signature to check against
        pass
    return ranks
