"""The world of the ranks: the backend that carries their collectives, and the GPU of each rank.

    gloo    on CPU: any machine
    nccl    a GPU for each rank; or several ranks on one, if asked for
    fake    rank 0 of any number, alone: collectives return at once and carry nothing

MINIFSDP_DEVICE=cpu forces gloo, MINIFSDP_SHARE_GPU=1 asks for shared GPUs. Everything here is decided by this
machine's hardware and by variables, before anything starts: CUDA is not initialized, so ranks may be forked.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from minifsdp import gloo

Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["gloo", "nccl", "fake"]

MOST_GLOO_RANKS = 64  # processes on one machine; a limit of patience, not of gloo
MOST_RANKS_PER_GPU = 8  # the same for one GPU, on which every rank has a CUDA context of its own

FORCES, SHARES = "MINIFSDP_DEVICE", "MINIFSDP_SHARE_GPU"

_told = False


@dataclass(frozen=True)
class World:
    """The chosen world. As a string it is one line: the choice and its reason.

    Attributes:
        ranks: N.
        backend: "gloo", "nccl" or "fake".
        gpus: index of the GPU of each of this machine's ranks, in that rank's numbering; empty on CPU.
        shares_gpu: whether several ranks share one.
        why: the reason for this choice.
    """

    ranks: int
    backend: Backend
    gpus: tuple[int, ...]
    shares_gpu: bool
    why: str

    @property
    def processes(self) -> int:
        """The number of ranks that really run."""
        return 1 if self.backend == "fake" else self.ranks

    @property
    def device(self) -> str:
        """The ranks' device: "cpu" or "cuda"."""
        return "cuda" if self.gpus else "cpu"

    @property
    def choice(self) -> str:
        """The line without the reason, such as "2 ranks over gloo on CPU"."""
        ranks = in_words(self.ranks)
        if self.backend == "fake":
            return f"rank 0 of {self.ranks} on {self.device}, alone"
        if self.shares_gpu:
            names = ", ".join(f"cuda:{index}" for index in sorted(set(self.gpus)))
            return f"{ranks} over NCCL, sharing {names}"
        return f"{ranks} over {'NCCL, a GPU each' if self.gpus else 'gloo on CPU'}"

    def __str__(self) -> str:
        return f"{self.choice}: {self.why}"


def in_words(ranks: int) -> str:
    """A number of ranks, as in "1 rank" and "2 ranks"."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def choose_world(
    ranks: int,
    device: Device = "auto",
    share_gpu: bool | None = None,
    *,
    backend: Backend | None = None,
    here: int | None = None,
) -> World:
    """Choose NCCL if there is a GPU for each rank, or GPUs are to be shared; gloo otherwise.

    Args:
        ranks: N, over all machines.
        device: "cpu" or "cuda" instead of the automatic choice.
        share_gpu: whether ranks may share a GPU if there are not enough; None: as MINIFSDP_SHARE_GPU says.
        backend: the same choice by backend: "gloo" is the CPU, "nccl" is CUDA.
        here: number of ranks on this machine; None: as torchrun or srun say, or all.

    Raises:
        ValueError: the request is impossible; one line with the cure.
    """
    if here is None:
        _check_job(ranks)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: choose auto, cpu or cuda")
    forced = forced_device()
    gpus = torch.cuda.device_count()
    if backend == "fake":
        return World(ranks, "fake", (0,) if gpus and forced != "cpu" else (), False, "collectives carry nothing")
    here = min(ranks, here or local_ranks(ranks))
    wish = {"gloo": "cpu", "nccl": "cuda", None: device}[backend]
    if wish == "cuda" and forced == "cpu":
        raise ValueError(f"CUDA was requested, but {FORCES}=cpu forces the CPU: unset it, or request the CPU")
    if wish == "cpu" or (wish == "auto" and forced == "cpu"):
        if share_gpu:
            raise ValueError("--share-gpu requests a GPU, but the CPU was requested, too: leave one of them out")
        return _on_cpu(ranks, here, "as requested" if wish == "cpu" else f"{FORCES}=cpu forces it")
    return _on_gpus(ranks, here, gpus, share_gpu, must="cuda" in (wish, forced))


def forced_device() -> str:
    """The value of MINIFSDP_DEVICE; "auto" if it is not set.

    Raises:
        ValueError: it or another variable of minifsdp has an invalid value, even one that would have no effect.
    """
    may_share()
    gloo.choice_in(os.environ)
    forced = os.environ.get(FORCES) or "auto"
    if forced not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{FORCES}={forced}: choose auto, cpu or cuda, or unset it")
    return forced


def _on_cpu(ranks: int, here: int, why: str) -> World:
    if here > MOST_GLOO_RANKS:
        raise ValueError(f"--ranks {ranks}: gloo serves at most {MOST_GLOO_RANKS} ranks on one machine")
    return World(ranks, "gloo", (), False, why)


def _on_gpus(ranks: int, here: int, gpus: int, share_gpu: bool | None, must: bool) -> World:
    """Choose CUDA if there are GPUs for it; else the CPU, unless it `must` be CUDA.

    Raises:
        ValueError: CUDA or sharing is required but impossible; or a job has some GPUs, but too few.
    """
    share = may_share() if share_gpu is None else share_gpu
    found = "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    if gpus and not dist.is_nccl_available():
        if must or share:
            raise ValueError(f"{found} here, but this torch {torch.__version__} has no NCCL: install a CUDA build")
        return _on_cpu(ranks, here, f"{found} here, but this torch {torch.__version__} has no NCCL")
    # with this option srun shows each rank its own GPUs only, numbered from 0
    if gpus and "RANK" in os.environ and _gpus_per_task() == gpus:
        return World(ranks, "nccl", (0,) * here, False, f"{found} for each task of this Slurm step")
    if gpus >= here:
        return World(ranks, "nccl", tuple(range(here)), False, f"{found} here")
    if share and gpus:
        return _shared(ranks, here, gpus, found)
    if share:
        raise ValueError(f"--share-gpu or {SHARES}=1: this machine has no GPU to share; leave it out")
    if must:
        raise ValueError(
            f"CUDA was requested, but there {'are' if gpus > 1 else 'is'} {found} for {here} ranks: "
            + ("use the CPU" if gpus == 0 else "use --share-gpu (launch: share_gpu=True), the CPU, or fewer ranks")
        )
    if gpus and {"RANK", "MASTER_ADDR"} <= os.environ.keys():  # a job: hours on the CPU would be noticed too late
        cures = "ask for --share-gpu, for the CPU (--device cpu, MINIFSDP_DEVICE=cpu), or for fewer ranks"
        raise ValueError(f"this job has {found} for {here} ranks on this machine: {cures}")
    return _on_cpu(ranks, here, "no GPU here" if gpus == 0 else f"{found} for {here} ranks, and no --share-gpu")


def _gpus_per_task() -> int:
    """The number in srun's --gpus-per-task, given as "2", "h100:2", or "h100:1,a100:1"; 0 if it is not set."""
    counts = [part.rpartition(":")[2] for part in os.environ.get("SLURM_GPUS_PER_TASK", "").split(",")]
    return sum(map(int, counts)) if all(count.isdecimal() for count in counts) else 0


def _shared(ranks: int, here: int, gpus: int, found: str) -> World:
    if here > gpus * MOST_RANKS_PER_GPU:
        raise ValueError(f"--share-gpu: at most {MOST_RANKS_PER_GPU} ranks per GPU, not {here} on {found}")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":  # each waits for its peers inside its launch
        raise ValueError("--share-gpu: ranks on one GPU block each other with CUDA_LAUNCH_BLOCKING=1: unset it")
    why = f"{found} here, shared as requested{' under MPS' * mps_runs()}"
    return World(ranks, "nccl", tuple(rank % gpus for rank in range(here)), True, why)


def mps_runs() -> bool:
    """True if NVIDIA's MPS runs here: kernels of processes that share a GPU run together instead of taking turns."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def _check_job(ranks: int) -> None:
    """Refuse more ranks than torchrun or srun started, and variables of theirs that are not numbers."""
    if "RANK" not in os.environ:
        return
    for name in ("RANK", "WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise ValueError(f"{name}={os.environ[name]} is not a number of ranks: leave it to torchrun, or unset it")
    started = int(os.environ.get("WORLD_SIZE", ranks))
    if ranks > started:
        raise ValueError(f"--ranks {ranks}, but this job was started with {started}: choose at most {started}")


def may_share() -> bool:
    """True if MINIFSDP_SHARE_GPU asks for it."""
    wish = os.environ.get(SHARES, "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"{SHARES}={wish}: choose 1 or 0, or unset it")
    return wish == "1"


def local_ranks(ranks: int) -> int:
    """The number of `ranks` on this machine, according to torchrun, deepspeed or srun; all of them without these."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    said = next(filter(None, map(os.environ.get, names)), "")
    return int(said) if said.isdecimal() and "RANK" in os.environ else ranks


def is_first() -> bool:
    """True if this process speaks for the run; under torchrun the others keep silent."""
    return os.environ.get("RANK", "0") == "0"


def _lone_tasks() -> str:
    """A hint if srun started several tasks without making them ranks, so that each is a run; "" otherwise."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "RANK" in os.environ or os.environ.get("SLURM_PROCID") != "0":
        return ""
    return f"srun started {tasks} tasks, but RANK is not set: each is a run of its own; see scripts/ladder.sbatch"


def tell(world: World) -> None:
    """Print the choice, on rank 0 and once per process, not for later launches."""
    global _told
    if not _told and is_first():
        with suppress(OSError):  # a failed print must not fail a run
            print(world, file=sys.stderr)
            if several := _lone_tasks():
                print(several, file=sys.stderr)
    _told = True


def tell_if_chosen(world: World) -> None:
    """Print the choice if there was one: not on a machine without GPUs."""
    if torch.cuda.device_count():
        tell(world)
