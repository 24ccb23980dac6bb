"""The course's GPT in stages."""

from __future__ import annotations

from minifsdp.gpt import GPT, GPTStage
from minifsdp.pipeline.balance import divide


def split_gpt(model: GPT, stages: int, stage: int, tied: bool = False) -> GPTStage:
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
