"""The default process group of a rank: its backend, device and number of threads."""

import datetime
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from minifsdp import private
from minifsdp.instruments.launch.world import World, choose_world, may_share


def join_group(store: Store, rank: int, local_rank: int, world: World, timeout: float) -> None:
    """Initialize the default process group over `store`; with nccl, this rank's GPU becomes the current device.

    Args:
        timeout: seconds a collective may wait for its peers.
    """
    # NCCL's options keep whole milliseconds, and torch warns if the group's time-out differs from theirs
    ranks, limit = world.ranks, datetime.timedelta(milliseconds=round(1000 * timeout))
    if world.backend == "fake":
        dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=ranks)
        return
    options = None
    if world.backend == "nccl":
        # Both are intended here; `device_id=` would silence the first, but put sends behind all collectives.
        for known in (r"barrier\(\): using the device under current context", "An unbatched P2P op"):
            warnings.filterwarnings("ignore", message=known)
        torch.cuda.set_device(world.gpus[local_rank])
        if world.shares_gpu:
            set_sharing(rank, len(world.gpus) == ranks)
        # Where kernels compete for the device, those that communicate go first.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        private.set_timeout(options, limit)  # or torch warns that the two differ
    dist.init_process_group(world.backend, store=store, rank=rank, world_size=ranks, timeout=limit, pg_options=options)
    if world.backend == "nccl":  # NCCL connects at the first collective: an unreachable rank is found here
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()


def set_sharing(rank: int, one_machine: bool) -> None:
    """Set the NCCL variables that let several ranks share one GPU; once, since NCCL reads many of them only once.

    NCCL refuses two ranks of one host on one GPU (init.cc), and takes a rank's host from NCCL_HOSTID (utils.cc). Ranks
    on seemingly different hosts talk by sockets: every transport of a shared host is switched off. One ring, one
    protocol and few blocks per collective, because the kernels of all ranks must fit on the device together if they run
    together (under MPS); if processes take turns, a collective takes several turns.

    Args:
        one_machine: whether all ranks of the job are on one machine.
    """
    host = f"minifsdp-{rank}"
    if os.environ.get("NCCL_HOSTID") == host:
        return
    off = dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_RAS_ENABLE"), "0")
    off |= dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1")
    few = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MAX_CTAS": "2", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    where = {"NCCL_SOCKET_IFNAME": _loopback()} if one_machine else {}
    os.environ.update({"NCCL_HOSTID": host, "NCCL_NET": "Socket", **off, **few, **where})


def prepare_to_share(rank: int, here: int, one_machine: bool, share_gpu: bool | None) -> None:
    """Set those variables before the first launch of an SPMD job, which may be of one rank.

    Args:
        here: how many ranks of the job are on this machine.
        one_machine: whether all are.
        share_gpu: as for `launch`.
    """
    share = may_share() if share_gpu is None else share_gpu
    if share and 0 < torch.cuda.device_count() < here:
        set_sharing(rank, one_machine)


def rank_device() -> torch.device:
    """The device on which this rank communicates: its GPU with nccl, the CPU with gloo."""
    on_gpu = dist.get_backend() == "nccl" or (dist.get_backend() == "fake" and choose_world(1, backend="fake").gpus)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def use_loopback() -> None:
    """Give gloo the loopback, since all ranks are on this machine: it need not resolve the host's name."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def share_cores(local_ranks: int, said: str = "") -> None:
    """Set this rank's number of threads: OMP_NUM_THREADS, else `said`, else its share of the machine's cores.

    torch was imported before the rank got its environment, so the variable has to be applied by hand.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", said).partition(",")[0]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    torch.set_num_threads(int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, cores // local_ranks))
