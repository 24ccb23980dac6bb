"""Peak bandwidth of the link between ranks, per GPU and direction: bus bandwidths are compared with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from minifsdp.course.doctor.gpus import Gpu
from minifsdp.instruments.link.emulated import parse_link

GB = 1e9

NVLINK = {
    (7, 0): (25.0, 6),
    (8, 0): (25.0, 12),
    (8, 6): (14.0625, 4),
    (9, 0): (25.0, 18),
    (10, 0): (50.0, 18),
    (10, 3): (50.0, 18),
}
"""GB/s of one NVLink in one direction, and the number of links that a GPU can have, by compute capability.

From NVIDIA's data sheets, which count all links and both directions: V100 300 GB/s, A100 600, A40 and RTX A6000
112.5, H100 and H200 900, B200 and B300 1800.
"""

PCIE = {3: 0.985, 4: 1.969, 5: 3.938}
"""GB/s of one lane in one direction by PCIe generation: 8, 16 and 32 GT/s in 128b/130b encoding."""


class Peak(NamedTuple):
    """A rate in bytes per second, or None; and its source, or the reason why there is none."""

    rate: float | None
    says: str


def asked(text: str) -> Peak:
    """The rate that `--peak` gives, such as "400GB/s".

    Raises:
        ValueError: it is not a rate.
    """
    try:
        rate = parse_link(f"latency=0,bandwidth={text}").bandwidth
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf") or not text.strip().endswith("/s"):
        raise ValueError(f"--peak {text!r} is not a rate: write it like 400GB/s")
    return Peak(rate, f"{rate / GB:,.4g} GB/s, as --peak says")


def of_gpus(gpus: Sequence[Gpu], chosen: Sequence[int]) -> Peak:
    """The lowest rate at which any of these GPUs can send to the others: by NVLink if all have it, else by PCIe.

    Behind a switch a GPU reaches each of the others over all its links; without one, it has some of its links to each.

    Args:
        gpus: of this machine.
        chosen: the index of each rank's GPU.
    """
    if len(set(chosen)) < len(chosen):  # srun shows each rank its own GPU only, as number 0
        return Peak(None, "each rank sees its own GPU only, and no link; give it with --peak")
    if not set(chosen) <= set(range(len(gpus))):
        return Peak(None, "the GPUs of the ranks are not known; give the rate with --peak")
    ways = {index: [gpus[index].links[other] for other in chosen if other != index] for index in chosen}
    if not all(way for each in ways.values() for way in each):
        return Peak(None, "the links are not known without nvidia-smi topo -m; give the rate with --peak")
    links = {index: sum(_nvlinks(way) for way in each if way) for index, each in ways.items()}
    if all(links.values()):
        return min((_by_nvlink(gpus[index], links[index]) for index in chosen), key=lambda peak: peak.rate or 0.0)
    return min((_by_pcie(gpus[index]) for index in chosen), key=lambda peak: peak.rate or 0.0)


def _nvlinks(way: str) -> int:
    match = re.fullmatch(r"NV(\d+)", way)
    return int(match[1]) if match else 0


def _by_nvlink(gpu: Gpu, links: int) -> Peak:
    if gpu.capability not in NVLINK:
        return Peak(None, f"the rate of {gpu.name}'s NVLinks is not known here; give it with --peak")
    one, most = NVLINK[gpu.capability]
    count = min(links, most)
    return Peak(count * one * GB, f"{count * one:,.4g} GB/s: {count} NVLinks of {gpu.name}, one direction")


def _by_pcie(gpu: Gpu) -> Peak:
    if gpu.pcie is None or gpu.pcie[0] not in PCIE:
        return Peak(None, f"the rate of {gpu.name}'s PCIe is not known here; give it with --peak")
    generation, lanes = gpu.pcie
    rate = lanes * PCIE[generation]
    return Peak(rate * GB, f"{rate:,.3g} GB/s: PCIe {generation}.0 x{lanes} of {gpu.name}, one direction")
