"""A model in training: a step is the same call whatever is inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

Tell: TypeAlias = Callable[[str], Any]
"""Hears the name of each phase of a step as it begins."""

Passes: TypeAlias = Callable[[Tensor, Tensor, Tell], Tensor]
"""Forward and backward of tokens and targets, int64 [rows, context] each; returns the loss, a scalar."""


@dataclass
class Trainer:
    """A model in training.

    Attributes:
        model: what this rank has of it. Without `passes` it takes tokens and targets, and returns the loss.
        optimizer: of its parameters.
        ends: called when backward is over, as a part of it.
        passes: forward and backward, with their own ends, where they are not one after the other; they leave gradients.
    """

    model: nn.Module
    optimizer: Optimizer
    ends: Sequence[Callable[[], Any]] = ()
    passes: Passes | None = None

    def step(self, tokens: Tensor, targets: Tensor, tell: Tell = lambda name: None) -> Tensor:
        """Forward, backward, optimizer; the loss, a scalar without gradient.

        Args:
            tokens, targets: this rank's rows, int64 [rows, context], on its device: the same ones for all ranks of a
                replica, and as many for each replica, since means of replicas count alike, as do those of a
                pipeline's micro-batches; in a pipeline, a multiple of the micro-batches. Targets that the loss ignores
                (-100) are left out of these means, which then have different numbers of tokens.
            tell: hears "forward", "backward" and "optimizer", a pipeline's actions, such as "0F1", and "rest" before
                `zero_grad`.

        Raises:
            ValueError: there are no rows, or not as many of both.
        """
        if len(tokens) != len(targets):
            raise ValueError(f"{len(tokens)} rows of tokens with {len(targets)} of targets: give as many of both")
        if not tokens.numel():
            raise ValueError(f"tokens {[*tokens.shape]}: the mean over no tokens is nan; give every rank a row or more")
        loss = (self.passes or self._one_after_the_other)(tokens, targets, tell)
        with phase("optimizer", tell):
            self.optimizer.step()
            tell("rest")
            self.optimizer.zero_grad()
        return loss.detach()

    def _one_after_the_other(self, tokens: Tensor, targets: Tensor, tell: Tell) -> Tensor:
        with phase("forward", tell):
            loss: Tensor = self.model(tokens, targets)
        with phase("backward", tell):
            loss.backward()
            self.after_backward()
        return loss

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
