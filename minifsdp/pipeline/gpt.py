"""The course's GPT in stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifsdp.pipeline.balance import divide


class GPTStage(nn.Module):
    """Consecutive blocks of a `minifsdp.course.ladder.model.GPT`, under their names in the whole model.

    Args:
        model: whole, perhaps on "meta".
        blocks: numbers.
        is_first: it also embeds the tokens.
        is_last: it also has the head.
    """

    def __init__(self, model: Any, blocks: Sequence[int], is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.embed, self.position = model.embed, model.position
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] in the first stage, else activations [b, s, h] -> activations; in the last logits [b, s, V]."""
        if self.is_first:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def split_gpt(model: Any, stages: int, stage: int, tied: bool = False) -> GPTStage:
    """One stage of a GPT; the number of blocks is the same in all, or one more in some.

    Args:
        model: whole, perhaps on "meta".
        stages: how many there are.
        stage: the one to make.
        tied: allow a head with the embedding's weight, which is then in two stages (tied.py).

    Raises:
        ValueError: there are more stages than blocks; or the weight is tied, and that was not expected.
    """
    if stages > 1 and model.head.weight is model.embed.weight and not tied:
        raise ValueError(
            "the head has the embedding's weight: pass tied=True and have the schedule add gradients: tie()"
        )
    blocks = divide([str(number) for number in range(len(model.blocks))], stages)[stage]
    return GPTStage(model, [int(number) for number in blocks], stage == 0, stage == stages - 1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of the last stage's logits [b, s, V] for targets [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
