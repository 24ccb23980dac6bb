"""The checks of lab 04."""

import pytest
import torch

from minifsdp.course.workshop.checking import AnswerError, expect


@pytest.mark.exercise(id="4.1")
def test_pad_and_chunk(answer, variant):
    """Equal shards, every element once and in order, zeros behind them."""
    for ranks in (variant.ranks, 4, 16):
        flat = torch.arange(1.0, variant.size + 1)
        shards = answer(flat.clone(), ranks)
        if not isinstance(shards, (list, tuple)) or len(shards) != ranks:
            raise AnswerError(f"over {ranks} ranks: expected a list of {ranks} tensors, got {shards!r}")
        length = -(-variant.size // ranks)
        for rank, shard in enumerate(shards):
            wanted = torch.cat([flat, torch.zeros(ranks * length - variant.size)])[rank * length :][:length]
            expect(f"shard over {ranks} ranks", shard, wanted, rank=rank)
