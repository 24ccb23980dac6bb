"""Throughput of a GPU over their number: by the machine model, and as the FSDP paper measured it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from draw.canvas import canvas
from draw.fsdp.drawing import say
from matplotlib.figure import Figure

from minifsdp.course.doctor.peak import NVLINK
from minifsdp.instruments.machine.shapes import HOSTS, SHAPES, flops, seconds, with_limiter
from minifsdp.instruments.plots.palette import SERIES_COLOURS, SOFT, as_text

MEASURED = {8: 149.8, 16: 149.3, 32: 148.9, 64: 148.7, 128: 148.2, 256: 145.8, 512: 141.0}
"""TFLOPS per A100 of T5-11B, 8 sequences of 512 tokens each: read off figure 7c of arXiv 2304.11277, to about 0.2."""

BATCH, PER_HOST = 8, 8
MODELLED = 8, 16, 64, 512
INSIDE = NVLINK[8, 0][0] * NVLINK[8, 0][1] * 1e9  # bytes per second that a GPU sends to others of its host
SLOWER = 20  # 100 Gb/s for a host instead of 2 Tb/s


@cache
def operations() -> float:
    """Floating-point operations of a step of one GPU: the same for any number of them."""
    shape = replace(SHAPES["T5-11B-like"], batch=BATCH)
    return shape.in_full(with_limiter(), lambda program, _: flops(program))


@cache
def modelled(gpus: int, slower: int = 1) -> float:
    """TFLOPS per GPU; memory is taken to be enough."""
    bandwidth = INSIDE if gpus <= PER_HOST else HOSTS.bandwidth / slower
    device = replace(HOSTS, capacity=2**62, bandwidth=bandwidth)
    shape = replace(SHAPES["T5-11B-like"], ranks=gpus, batch=BATCH, device=device, room=None)
    return operations() / shape.in_full(with_limiter(), lambda _, run: seconds(run)) / 1e12


def draw_scaling() -> Figure:
    """TFLOPS per GPU from one host to 64 of them: two networks by the model, one as measured."""
    figure = canvas(4.7)
    axes = figure.subplots()
    model, paper = SERIES_COLOURS[0], SERIES_COLOURS[1]
    fast, slow = [modelled(n) for n in MODELLED], [modelled(n, SLOWER) for n in MODELLED]
    axes.plot(MODELLED, fast, color=model, linewidth=4)
    axes.plot(MODELLED, slow, color=model, linewidth=4, linestyle=(0, (3, 2)))
    axes.plot(list(MEASURED), list(MEASURED.values()), "o", color=paper, markersize=12)
    say(axes, 512, fast[-1] + 12, "2 Tb/s per host: modelled", ha="right", color=model)
    say(axes, 512, MEASURED[512] - 18, "2 Tb/s per host: FSDP paper, measured", ha="right", color=as_text(paper))
    say(axes, 512, slow[-1] + 14, "100 Gb/s per host: modelled", ha="right", color=model)
    say(axes, 8, 8, "T5-11B, full sharding, bf16, 8 sequences of 512 per A100", ha="left", color=SOFT)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(MEASURED), [str(n) for n in MEASURED])
    axes.minorticks_off()
    axes.set(xlim=(7.4, 560), ylim=(0, 200), yticks=[0, 50, 100, 150], xlabel="GPUs, in hosts of 8")
    axes.set_ylabel("TFLOPS per GPU")
    return figure
