"""Versions of Python, torch and the rest, for records: a measurement means little without them.

`torch.utils.collect_env` has no field for NCCL or for this package, and runs compilers and pip to fill its own.
"""

from __future__ import annotations

import platform
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import minifsdp

Versions = dict[str, str | None]


def versions(driver: str | None = None) -> Versions:
    """Versions of Python, torch, CUDA, NCCL, the driver and minifsdp; None if there is none, or it is unknown.

    No GPU is needed: NCCL's version comes from its library, if torch was built with it.
    """
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": driver,
        "minifsdp": _own(),
    }


def _own() -> str | None:
    try:
        return version("minifsdp")
    except PackageNotFoundError:  # a checkout on the path that is not installed
        project = Path(minifsdp.__file__).parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text())["project"]["version"]) if project.is_file() else None
