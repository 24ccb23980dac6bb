"""Forward and backward of a batch by a pipeline's stages, as one call on every rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from minifsdp.losses import Loss
from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.schedule import Schedule
from minifsdp.trainer import Tell, phase


class InTurns:
    """The passes of a model in stages (trainer.py).

    Args:
        schedule: with this rank's stages.
        ends: called after backward, as a part of it.
    """

    def __init__(self, schedule: Schedule, *ends: Any) -> None:
        self.schedule, self.ends = schedule, ends

    def __call__(self, tokens: Tensor, targets: Tensor, tell: Tell, loss: Loss | None = None) -> Tensor:
        """The mean of the micro-batches' losses, on every rank; `loss`, if given, is each one's.

        "backward" begins with this rank's first one. All ranks of a pipeline are given the same rows.

        Raises:
            ValueError: the rows cannot be cut into micro-batches.
        """
        rows, micros = len(tokens), self.schedule.n_microbatches
        if rows % micros:
            raise ValueError(f"{rows} rows make no {micros} equal micro-batches: give a multiple of {micros}")
        executor, stages = self.schedule.executor, self.schedule.stages
        losses: list[Tensor] = []
        with ExitStack() as part:
            part.enter_context(phase("forward", tell))
            forwards = {action for action in executor.actions if action.kind == "F"}

            def before(action: Action) -> None:
                if action not in forwards and forwards:
                    forwards.clear()
                    part.close()
                    part.enter_context(phase("backward", tell))
                tell(str(action))

            executor.observers[:] = [before]
            target = targets if any(stage.is_last for stage in stages) else None
            given = [tokens] if any(stage.is_first for stage in stages) else []
            named = {} if loss is None else {"loss": loss}
            self.schedule.step(*given, target=target, losses=losses, return_outputs=False, loss_kwargs=named)
            for end in self.ends:
                end()
        return self.schedule.share_losses(losses).mean()
