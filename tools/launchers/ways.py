"""The launchers, and how each starts `minifsdp train` on two ranks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRAIN = "train --tp 2 --sequence --layers 2 --width 8 --context 8 --batch 12 --no-ledger --device cpu"
"""What is trained, but for its steps and its output folder."""


@dataclass(frozen=True)
class Way:
    """A launcher.

    Attributes:
        name: in the table.
        package: whose version is its own.
        command: a line of bash in the checkout. OUT is the output folder, an absolute path; MINIFSDP the path of the
            command; FIRST and OWN the addresses of the first host and of this one; IS_FIRST whether they are the same.
        signals: whether Ctrl-C and SIGTERM are tried.
        hosts: how many hosts have to run the command.
        cluster: whether it needs Slurm.
    """

    name: str
    package: str
    command: str
    signals: bool = True
    hosts: int = 1
    cluster: bool = False

    def line(self, out: Path, minifsdp: Path, addresses: Sequence[str], host: int, options: str) -> str:
        """The command for a host."""
        where = {"IS_FIRST": str(host == 0).lower(), "FIRST": addresses[0], "OWN": addresses[host]}
        line = self.command.replace("TRAIN", f"{TRAIN} {options} --out OUT")
        for name, value in ({"OUT": shlex.quote(str(out)), "MINIFSDP": str(minifsdp)} | where).items():
            line = line.replace(name, value)
        return line


WAYS = (
    Way("`minifsdp`", "minifsdp", "minifsdp TRAIN --ranks 2"),
    Way("torchrun", "torch", "torchrun --standalone --nproc-per-node 2 -m minifsdp TRAIN"),
    Way(
        "torchrun, two hosts",
        "torch",
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint FIRST:29400"
        " --rdzv-conf is_host=IS_FIRST --local-addr OWN -m minifsdp TRAIN",
        signals=False,
        hosts=2,
    ),
    Way("accelerate", "accelerate", "accelerate launch --multi_gpu --num_processes 2 -m minifsdp TRAIN"),
    Way("accelerate `--cpu`", "accelerate", "accelerate launch --cpu --num_processes 2 -m minifsdp TRAIN"),
    Way("deepspeed", "deepspeed", "deepspeed --num_gpus 2 --no_local_rank --module minifsdp TRAIN"),
    Way(
        "fabric run",
        "lightning-fabric",
        "fabric run --accelerator cpu --devices 2 --strategy ddp MINIFSDP TRAIN",
    ),
    Way("Fabric in a script", "lightning-fabric", "python scripts/fabric.py TRAIN"),
    Way("Ray Train", "ray", "python scripts/ray_train.py OUT", signals=False),
    Way(
        "Slurm",
        "slurm",
        "sbatch --wait --gpus-per-node=0 --ntasks-per-node=2 --cpus-per-task=1 --output=OUT/job.txt"
        " scripts/ladder.sbatch --device cpu --rungs ddp --steps 2 --layers 2 --width 32 --out OUT",
        signals=False,
        cluster=True,
    ),
)
