"""What a command needs of this machine, checked before anything starts: a GPU for each rank or none, a folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import torch

MOST_GLOO_RANKS = 64  # processes on one machine; a limit of patience, not of gloo

Device = Literal["auto", "cpu", "cuda"]


def choose_device(device: Device, ranks: int) -> str:
    """NCCL with a GPU per rank where there are enough, gloo otherwise: "cuda" or "cpu".

    Raises:
        ValueError: there is no such device, there are too few, or there are too many ranks.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and gpus < here:
        raise ValueError(
            f"--device cuda: {here} ranks need a GPU each, and there are {gpus}; use --device cpu or fewer ranks"
        )
    if device == "cuda" or (device == "auto" and gpus >= here and os.environ.get("MINIFSDP_DEVICE") != "cpu"):
        return "cuda"
    if ranks > MOST_GLOO_RANKS:
        raise ValueError(f"--ranks {ranks}: gloo serves at most {MOST_GLOO_RANKS} ranks here")
    return "cpu"


def check_writable(folder: Path, option: str = "--out") -> None:
    """Make the folder that `option` names.

    Raises:
        ValueError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {folder} cannot be written ({error.strerror}): name a folder that you may write to"
        ) from error
