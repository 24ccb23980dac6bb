"""Reference answers of lab 04, the flat parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from minifsdp.course.workshop.references import reference


@reference(
    "4.1",
    hints=(
        "`-numel % ranks` is how many elements are missing to the next multiple of `ranks`.",
        "Make a zero tensor of the padded length, copy the elements in, then `chunk(ranks)`.",
    ),
)
def pad_and_chunk(flat: Tensor, ranks: int) -> list[Tensor]:
    """Cut `flat` [numel] into one equal shard per rank, the last ones filled up with zeros."""
    padded = torch.zeros(flat.numel() + -flat.numel() % ranks, dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    return list(padded.chunk(ranks))
