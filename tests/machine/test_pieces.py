"""Tensor parallelism's products in pieces, on paper: by hand, and its bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from minifsdp.instruments.machine.hardware import GB, Hardware
from minifsdp.instruments.machine.pieces import NETWORK, NVLINK, Product, products_of_block, spans_of_block
from minifsdp.instruments.watch.timeline import overlap

# 1e12 operations and 1e12 bytes a second, all of them reached; a link of 1 GB/s without latency.
PLAIN = Hardware("plain", {2: 1e12}, 1e12, 2**40, 0.0, 1 * GB, efficiency=1.0)


def test_by_hand() -> None:
    product = Product(tokens=1000, features_in=1000, features_out=4000, travels=1000, ranks=4)
    assert product.compute(PLAIN) == pytest.approx(2 * 1000 * 1000 * 4000 / 4 / 1e12)  # 2 ms
    assert product.message(PLAIN) == pytest.approx(2 * 1000 * 1000 * 3 / 4 / 1e9)  # 1.5 ms
    assert product.one_after_the_other(PLAIN) == pytest.approx(3.5e-3)
    # Four products of 0.5 ms, three messages of 0.5 ms: all are hidden.
    assert product.in_pieces(PLAIN) == pytest.approx(2e-3)
    # A link of half the speed: a product, and then three messages of 1 ms.
    assert product.in_pieces(replace(PLAIN, bandwidth=GB / 2)) == pytest.approx(3.5e-3)


@pytest.mark.parametrize("hardware", [NVLINK, NETWORK], ids=lambda each: each.name)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_pieces_are_never_faster_than_the_slower_part(hardware: Hardware, ranks: int) -> None:
    for product in products_of_block(8192, 8192, ranks).values():
        pieces = product.in_pieces(hardware)
        assert pieces >= max(product.compute(hardware), product.message(hardware)) * (1 - 1e-6)
        assert pieces <= product.one_after_the_other(hardware) + max(ranks - 2, 0) * hardware.latency + 1e-12


@pytest.mark.parametrize("hardware", [NVLINK, NETWORK], ids=lambda each: each.name)
@pytest.mark.parametrize("pieces", [False, True])
def test_a_timeline_takes_as_long_and_overlaps_in_pieces(hardware: Hardware, pieces: bool) -> None:
    spans = spans_of_block(8192, 8192, 4, hardware, pieces=pieces)
    products = products_of_block(8192, 8192, 4).values()
    lengths = [each.in_pieces(hardware) if pieces else each.one_after_the_other(hardware) for each in products]
    assert max(span.end for span in spans) == pytest.approx(sum(lengths))
    assert len(spans) == 4 * (4 + 3 if pieces else 2)
    assert bool(overlap(spans)) == pieces
    for lane in ("compute", "communication"):
        mine = sorted((span for span in spans if span.lane == lane), key=lambda span: span.start)
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(mine))


def test_a_message_for_each_product_costs_its_latency() -> None:
    short = Product(tokens=64, features_in=64, features_out=64, travels=64, ranks=8)
    assert short.in_pieces(NETWORK) > 3 * short.one_after_the_other(NETWORK)


def test_what_travels() -> None:
    found = {name: (p.features_in, p.features_out, p.travels) for name, p in products_of_block(8, 1, 2).items()}
    assert found == {"qkv": (8, 24, 8), "out": (8, 8, 8), "up": (8, 32, 8), "down": (32, 8, 8)}
