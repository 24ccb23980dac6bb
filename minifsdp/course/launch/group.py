"""The default process group of a rank: which backend, which device, how many threads."""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]


def join_group(
    store: Store,
    rank: int,
    world_size: int,
    timeout: float,
    backend: str | None,
    local_rank: int,
    local_world_size: int,
) -> None:
    """Initialise the default process group over `store`; with nccl, GPU `local_rank` becomes the current device.

    Args:
        timeout: seconds a collective may wait for its peers.
        backend: None chooses nccl if each of this machine's `local_world_size` ranks has a GPU, else gloo.
    """
    if backend is None:
        backend = "nccl" if _has_gpu_each(local_world_size) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def rank_device() -> torch.device:
    """Where this rank computes: as its process group communicates, so its own GPU with nccl and the CPU with gloo."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def use_loopback() -> None:
    """All ranks are on this machine: gloo need not ask what the host's name resolves to."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def check_gpus(backend: str | None, local_world_size: int) -> None:
    """Refuse nccl on a machine that has fewer GPUs than ranks.

    Raises:
        ValueError: in one line, with both numbers.
    """
    if backend == "nccl" and torch.cuda.device_count() < local_world_size:
        raise ValueError(
            f"nccl needs one GPU per rank: {local_world_size} rank(s) but {torch.cuda.device_count()} GPU(s) here;"
            " use backend='gloo'"
        )


def share_cores(world_size: int) -> None:
    """Give this rank its part of the machine's cores, or what OMP_NUM_THREADS says.

    torch was imported before the rank got its environment, so the variable has to be applied by hand.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    torch.set_num_threads(int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, cores // world_size))


def _has_gpu_each(local_world_size: int) -> bool:
    if os.environ.get("MINIFSDP_DEVICE") == "cpu":
        return False
    return dist.is_nccl_available() and torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
