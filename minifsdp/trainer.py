"""A model in training: a step is the same call whatever is inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from minifsdp.context_parallel.cut import SequencePart
from minifsdp.losses import Loss

Tell: TypeAlias = Callable[[str], Any]
"""Hears the name of each phase of a step as it begins."""

Passes: TypeAlias = Callable[[Tensor, Tensor, Tell, Loss | None], Tensor]
"""Forward and backward of tokens and targets, int64 [rows, tokens] each; returns the loss, a scalar."""


@dataclass
class Trainer:
    """A model in training.

    Attributes:
        model: what this rank has of it. Without `passes` it takes tokens and targets, and a loss if there is
            `loss_of`, and returns the loss.
        optimizer: of its parameters.
        ends: called when backward is over, as a part of it.
        passes: forward and backward, with their own ends, where they are not one after the other; they leave gradients.
        part: which tokens of each sequence are this rank's; None: all.
        loss_of: the loss of a step whose targets on this rank are given; called on all ranks. None: the mean over this
            rank's tokens, which is right if all ranks and micro-batches have as many.
    """

    model: nn.Module
    optimizer: Optimizer
    ends: Sequence[Callable[[], Any]] = ()
    passes: Passes | None = None
    part: SequencePart | None = None
    loss_of: Callable[[Tensor], Loss] | None = None

    def step(self, tokens: Tensor, targets: Tensor, tell: Tell = lambda name: None) -> Tensor:
        """Forward, backward, optimizer; the loss, a scalar without gradient.

        The mean over the ranks of what they return is the loss of the whole batch, a mean over its tokens.

        Args:
            tokens, targets: this rank's rows, int64 [rows, context], on its device: the same ones for all ranks of a
                replica; in a pipeline, a multiple of the micro-batches. Targets that are `IGNORED` (losses.py) count
                nowhere, and ranks may have different numbers of them.
            tell: hears "forward", "backward" and "optimizer", a pipeline's actions, such as "0F1", and "rest" before
                `zero_grad`.

        Raises:
            ValueError: see `share`.
        """
        loss = self.backward(*self.share(tokens, targets), tell)
        with phase("optimizer", tell):
            self.optimizer.step()
            tell("rest")
            self.optimizer.zero_grad()
        return loss

    def share(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Loss | None]:
        """Of this rank's rows its part of each sequence, and the loss of these targets.

        Raises:
            ValueError: there are no rows, or not as many of both.
        """
        if len(tokens) != len(targets):
            raise ValueError(f"{len(tokens)} rows of tokens with {len(targets)} of targets: give as many of both")
        if not tokens.numel():
            raise ValueError(f"tokens {[*tokens.shape]}: the mean over no tokens is nan; give every rank a row or more")
        if self.part is not None:
            tokens, targets = self.part.take(tokens), self.part.take(targets)
        return tokens, targets, None if self.loss_of is None else self.loss_of(targets)

    def backward(
        self, tokens: Tensor, targets: Tensor, loss: Loss | None, tell: Tell = lambda name: None, is_last: bool = True
    ) -> Tensor:
        """Forward and backward, which adds to gradients; the loss, a scalar without gradient.

        Args:
            tokens, targets, loss: as `share` returns them, or some of its rows: then other calls follow with the rest.
            tell: see `step`.
            is_last: no other call follows before the optimizer's step.
        """
        if self.passes is not None:
            return self.passes(tokens, targets, tell, loss).detach()
        with phase("forward", tell):
            of_rows: Tensor = self.model(tokens, targets, *([loss] if loss else []))
        with phase("backward", tell):
            of_rows.backward()
            if is_last:
                self.after_backward()
        return of_rows.detach()

    def after_backward(self) -> None:
        """Call `ends`, when backward is over."""
        for end in self.ends:
            end()


@contextmanager
def phase(name: str, tell: Tell) -> Iterator[None]:
    """A part of a step, by its name in a trace, too."""
    tell(name)
    with record_function(name):
        yield
