"""Figures and numbers of deck 2: collectives, and data parallelism made of them."""

from __future__ import annotations

from typing import Any

from draw.canvas import KIB, MIB, Draw, in_units
from draw.ddp.buckets import draw_buckets, draw_caps, draw_timeline
from draw.ddp.collectives import draw_primitives, draw_ring, draw_turns
from draw.ddp.gradients import MICRO, counted, draw_extra, draw_gradients, draw_join, draw_longer, extra_memory
from draw.ddp.links import LINKS, draw_links, draw_messages
from draw.ddp.runs import CAP, PAPER, all_reduce, bucket_sizes, exposed, parameters, rung
from draw.ddp.traffic import draw_busiest, draw_gather, gather_then_broadcast, ring_all_gather, sent_bytes
from draw.ddp.unused import draw_unused
from draw.ddp.waiting import draw_waiting
from draw.ladders import draw_first


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
    sizes, buckets = [p.nbytes for p in parameters().values()], bucket_sizes(CAP)
    small = [size for size in sizes if size < 64 * KIB]
    return {
        "mib": in_units("MiB", MIB, 0),
        "ms": in_units("ms", 1e-3, 1),
        "gradients": sum(sizes),
        "tensors": len(sizes),
        "fewer": len(sizes) - len(buckets),
        "small": len(small),
        "small_share": sum(small) / sum(sizes),
        "embedding": max(sizes),
        "buckets": buckets,
        "torchs_first": bucket_sizes(1, CAP)[0],
        "one_each": sum(map(all_reduce, sizes)),
        "in_buckets": sum(map(all_reduce, buckets)),
        "latency": PAPER.latency,
        "overlap": rung("ddp").overlap,
        "exposed": exposed,
        "counted": counted(2),
        "extra": extra_memory(),
        "micro": MICRO,
        "sent": {"ring": sent_bytes(ring_all_gather, 4), "gather": sent_bytes(gather_then_broadcast, 4)},
        "half": {name: latency * bandwidth for name, (latency, bandwidth) in LINKS.items()},
    }


FIGURES: dict[str, Draw] = {
    "ddp-ladder": draw_first,
    "ddp-primitives": draw_primitives,
    "ddp-reduce-scatter": lambda: draw_ring("reduce-scatter"),
    "ddp-all-gather": lambda: draw_ring("all-gather"),
    "ddp-busiest": draw_busiest,
    "ddp-gather": draw_gather,
    "ddp-links": draw_links,
    "ddp-messages": draw_messages,
    "ddp-gradients": draw_gradients,
    "ddp-buckets": draw_buckets,
    "ddp-timeline": draw_timeline,
    "ddp-caps": draw_caps,
    "ddp-turns": draw_turns,
    "ddp-join": draw_join,
    "ddp-extra": draw_extra,
    "ddp-longer": draw_longer,
    "ddp-waiting": draw_waiting,
    "ddp-unused": draw_unused,
}
