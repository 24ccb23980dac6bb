"""The course's model without its values: its shapes and its number of elements, however large it is."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import nn

from minifsdp.gpt import GPT


def outline(**sizes: int | None) -> GPT:
    """A GPT of these sizes on the meta device, where nothing is allocated.

    `normal_` is skipped: on this device, torch would import its compiler for it, which takes half a second.

    Raises:
        ValueError: see `GPT`.
    """
    with torch.device("meta"), patch.object(nn.init, "normal_", lambda tensor, *_, **__: tensor):
        return GPT(**sizes)  # type: ignore[arg-type]


def count_elements(layers: int, **sizes: int | None) -> int:
    """Elements of all parameters of a GPT of these sizes; one with many layers is not built."""
    first, both = (sum(p.numel() for p in outline(layers=number, **sizes).parameters()) for number in (1, 2))
    return first + (layers - 1) * (both - first)
