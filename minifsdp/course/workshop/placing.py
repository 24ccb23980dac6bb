"""For checks of several labs: where tensors are made, and what their memory holds before anybody writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minifsdp.private import tree_leaves


@contextmanager
def garbage() -> Iterator[None]:
    """Uninitialized memory holds nan, instead of zeros on a lucky day."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Homes(TorchFunctionMode):
    """Knows the tensors that would be in the host's memory whatever the device: made, and never put anywhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.homeless = device, list[Tensor]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        placed = any(self.is_named(each) for each in given)
        placed |= any(isinstance(each, Tensor) and not self.lacks(each) for each in given)
        if isinstance(made, Tensor):
            self.homeless = [each for each in self.homeless if each is not made]  # `to` may return what it was given
            if not placed:
                self.homeless.append(made)
        return made

    def lacks(self, tensor: Tensor) -> bool:
        return any(each is tensor for each in self.homeless)

    def is_named(self, argument: object) -> bool:
        try:
            return isinstance(argument, str | torch.device) and torch.device(argument) == self.device
        except RuntimeError:  # any other text
            return False
