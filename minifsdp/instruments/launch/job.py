"""Check the variables that torchrun or srun sets for each rank, before any rank waits for the others."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

UNSET = "use torchrun, or unset RANK"


def adopt_group() -> None:
    """Set RANK and WORLD_SIZE as in the process group that a script has initialized: Lightning Fabric sets no RANK.

    Without it, each process of such a script would start ranks of its own, which all write the same files.
    """
    if "RANK" not in os.environ and dist.is_initialized() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}


def check_job() -> None:
    """Check the variables if RANK is set; without it, this process starts its ranks itself.

    Raises:
        ValueError: a variable is missing or invalid; one line that names it and the cure.
    """
    said = os.environ
    if "RANK" not in said:
        return
    if "WORLD_SIZE" not in said:
        raise ValueError(f"RANK is set, but WORLD_SIZE is not: {UNSET}")
    for name in ("RANK", "WORLD_SIZE"):
        if not said[name].isdecimal():
            raise ValueError(f"{name}={said[name]} is not a number of ranks: leave it to torchrun, or unset it")
    rank, size = int(said["RANK"]), int(said["WORLD_SIZE"])
    if rank >= size:
        there = f"ranks count from 0 to {size - 1}" if size else "there are no ranks"
        raise ValueError(f"RANK={rank} with WORLD_SIZE={size}: {there}; {UNSET}")
    if not {"MASTER_ADDR", "MASTER_PORT"} <= said.keys():
        raise ValueError(f"RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not: {UNSET}")
    _check_address(said["MASTER_ADDR"], said["MASTER_PORT"])


def _check_address(host: str, port: str) -> None:
    """Check the rendezvous address: torch would try for five minutes to reach a host that does not exist."""
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"MASTER_PORT={port} is not a port: set it to a number from 1 to 65535, as torchrun does")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise ValueError(f"MASTER_ADDR={host} is not found ({why}): name the host of rank 0") from error
