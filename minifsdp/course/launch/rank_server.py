"""The server from which ranks are forked: it has already imported torch, so a rank starts in 0.1 s."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker

from minifsdp.course.system.housekeeping import SERVER, labelled

# Imported by the server once, for all ranks. None of it may initialize CUDA's driver, which does not survive a fork.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "cloudpickle",
)  # a first optimizer or Ledger needs _dynamo
_PER_RANK = "TORCH_DISTRIBUTED_DEBUG"  # torch reads it when it is imported; each rank sets the level of its caller
_BY_NVML = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TRITON_NVML_BASED_CUDA_CHECK")  # or torch and Triton call cuInit
_starting = threading.Lock()


def start_server(preload: Sequence[str] = PRELOAD) -> None:
    """Start the server, without waiting for it, if this platform uses one and it does not run yet."""
    if start_method() == "forkserver":
        resource_tracker.ensure_running()  # its start unblocks Ctrl-C: so it comes before the block below
        with undisturbed(SERVER):
            multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
            forkserver.ensure_running()


def start_method() -> str:
    """The start method: macOS spawns ranks (each imports torch), since Apple's frameworks do not survive a fork."""
    return "spawn" if sys.platform == "darwin" else "forkserver"


@contextlib.contextmanager
def undisturbed(what: str) -> Iterator[None]:
    """Start one process at a time, labelled `what`, without the caller's main script and without Ctrl-C."""
    with _starting, _without_main(), _without_interrupt(), labelled(what), _neutral():
        yield


@contextlib.contextmanager
def _neutral() -> Iterator[None]:
    """Let the server find GPUs without initializing the driver, and know no debug level; ranks have the caller's."""
    missing, level = [name for name in _BY_NVML if name not in os.environ], os.environ.pop(_PER_RANK, None)
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
        if level is not None:
            os.environ[_PER_RANK] = level


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's main script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """Block Ctrl-C, so that it neither ends the fork server nor hits a half-started rank."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
