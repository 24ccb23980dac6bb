"""A unit: parameters that are gathered, freed and reduced together.

A unit implements a handful of operations and the state between them. The schedule decides when they run.

    SHARDED --start_gather--> GATHERING --wait_gather--> UNSHARDED --free--> SHARDED
    take_gradient, for each leaf --> start_reduce --> wait_reduce --> the shards' `.grad`

Autograd sees the *leaves*: one Parameter per original parameter. It is the same object for the life of the model, and a
view of memory that is allocated only while the unit is unsharded. Leaves are in their module's `__dict__`, not among
its parameters, so that an optimizer sees only the shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from minifsdp.comm import Done, Group, Handle
from minifsdp.fsdp.view import View
from minifsdp.fsdp.written import written_error
from minifsdp.order import label_of_unit


class State(Enum):
    SHARDED = 0
    GATHERING = 1
    UNSHARDED = 2


SHARDED, GATHERING, UNSHARDED = State


class Unit(ABC):
    """Base of all kinds of unit.

    Attributes:
        name: its name in plots.
        label: the subject of its collectives, which begins with `title`.
        leaves: the Parameters that the computation uses, which have values while the unit is UNSHARDED.
        trained: the leaves that need a gradient.
        unsharded: the memory of the leaves, which counts the `writes` to it, other than by gathers.
        view: the tensors that modules and the optimizer see.
        shards: the Parameters that the optimizer updates, 1/N of the leaves' elements.
        device: the device of the computation.
        reshard_after_forward: free the leaves after forward and gather them again for backward.
        reduces: the next backward reduces the gradients; otherwise they stay unsharded, and later ones add to them.
        reshard_after_backward: free the leaves after backward. None: yes, unless `reshard_after_forward` and `reduces`
            are False and more micro-batches follow. One that stays unsharded is not gathered again until it is stale.
        keeps_values_when_freed: keep the memory and its values, because a backward may read them without notice.
        is_root: True for the outermost unit, which stays unsharded from its forward to the end of its backward.
    """

    leaves: list[nn.Parameter]
    trained: list[int]
    view: View
    shards: list[nn.Parameter]
    unsharded: Any = SimpleNamespace(writes=0)
    device: torch.device

    reshard_after_backward: bool | None = None

    def __init__(self, name: str, reshard_after_forward: bool = True, group: Group | None = None) -> None:
        self.name, self.label, self.state = name, label_of_unit(name, group), SHARDED
        self.reshard_after_forward, self.reduces = reshard_after_forward, True
        self.is_root = self.keeps_values_when_freed = False
        self._gathering: Handle | Done | None = None
        self._reducing: Handle | None = None

    def __repr__(self) -> str:
        """Such as `<blocks.1 (Block): sharded; 35 elements, 140 bytes on this rank>`."""
        elements = sum(p.numel() for p in self.shards)
        nbytes = sum(p.nbytes for p in self.shards)
        return f"<{self.title}: {self.state.name.lower()}; {elements:,} elements, {nbytes:,} bytes on this rank>"

    @property
    def title(self) -> str:
        """The unit's name in messages: its place in the model, once the outermost unit is known."""
        return self.label.what

    @title.setter
    def title(self, value: str) -> None:
        self.label = self.label._replace(what=value)

    @property
    def freed_after_forward(self) -> bool:
        return self.reshard_after_forward and not self.is_root

    @property
    def freed_after_backward(self) -> bool:
        if self.reshard_after_backward is None:
            return self.reshard_after_forward or self.reduces
        return self.reshard_after_backward

    # The verbs

    def start_gather(self) -> None:
        """Allocate the unsharded memory and start to fill it; nothing if that was done already."""
        if self.state is SHARDED:
            self._gathering = self._gather()
            self.state = GATHERING

    def wait_gather(self) -> None:
        """After this the module computes with unsharded parameters; on CUDA the current stream waits, not the host."""
        if self.state is GATHERING:
            assert self._gathering is not None, "the gather has returned no handle"
            self._gathering.wait()
            self._gathering = None
            self._arrived()
            self._writes: int = self.unsharded.writes
            self.view.show()
            self.state = UNSHARDED

    def free(self) -> None:
        """Give the unsharded memory back, which kernels queued on the current stream may still be reading."""
        if self.state is GATHERING:  # prefetched and never used
            self.wait_gather()
        if self.state is UNSHARDED:
            self.view.hide()
            if not self.keeps_values_when_freed:
                self._release()
            self.state = SHARDED
            self._check_not_written()

    def _check_not_written(self) -> None:
        if self._writes != (now := self.unsharded.writes):
            self._writes = now
            raise written_error(self.title)

    @abstractmethod
    def take_gradient(self, index: int) -> None:
        """Add the gradient of leaf `index` to the unit's unsharded gradient; the leaf's `.grad` becomes None."""

    @property
    @abstractmethod
    def has_gradient(self) -> bool:
        """True if gradients have been collected that are not yet reduced."""

    @property
    def is_reducing(self) -> bool:
        """True between `start_reduce` and `wait_reduce`."""
        return self._reducing is not None

    def pack_gradient(self) -> None:  # noqa: B027
        """Bring what has been taken into one buffer; called where the computation is queued, before `start_reduce`."""

    def start_reduce(self) -> None:
        """Start the reduction of what has been taken; leaves without a gradient count as zero."""
        self.wait_reduce()
        self.finish_reduce()
        self._reducing = self._reduce()

    def wait_reduce(self) -> None:
        """After this the unsharded gradient is free, and the mean in the shards' `.grad` or on its way there."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
            self._accumulate()

    def finish_reduce(self) -> None:  # noqa: B027
        """After this the mean gradient is added to the shards' `.grad`, if `wait_reduce` has not done it."""

    def release_shards(self) -> None:  # noqa: B027
        """After this no gather reads the shards any longer, and the host may write to them."""

    @property
    def is_stale(self) -> bool:
        """True if the shards may have been written to since the unit was gathered."""
        return True

    def refresh(self) -> None:
        """A step begins: leaves are trained as their parameters are, which may have been frozen or thawed."""
        wanted = self.view.trained
        if wanted != [leaf.requires_grad for leaf in self.leaves]:  # also where a user has changed a leaf
            self._train(wanted)

    def check_unchanged(self) -> None:
        """A backward begins.

        Raises:
            AssertionError, RuntimeError: the unit has been unsharded since forward, and its values were changed.
        """
        if self.state is UNSHARDED:
            self._check_not_written()

    def show_gradients(self, accumulated: bool) -> None:
        """A backward has ended, and may have left gradients in the unit: the user may change and drop `.grad`."""
        if accumulated:
            self.show_accumulated()
        if self.state is UNSHARDED:
            self.view.share_gradients()

    def show_accumulated(self) -> None:  # noqa: B027
        """After a backward inside `no_sync`: let what has been taken be the shards' `.grad` until the next backward."""

    def take_accumulated(self) -> None:
        """The end of `show_accumulated`: forget what is not there any longer."""
        self.view.take_accumulated()

    def drop_gradient(self) -> None:  # noqa: B027
        """Forget the gradients that have been collected and not reduced."""

    # Subclass hooks

    @abstractmethod
    def _gather(self) -> Handle | Done: ...

    def _arrived(self) -> None:  # noqa: B027
        """The gather is over: what computes next may read what it has written."""

    @abstractmethod
    def _release(self) -> None: ...

    @abstractmethod
    def _reduce(self) -> Handle: ...

    @abstractmethod
    def _accumulate(self) -> None: ...

    def _set_leaves(self, leaves: list[nn.Parameter]) -> None:
        """Let `leaves` come and go where the original parameters were, as the view has it."""
        self.leaves = leaves
        self._train([leaf.requires_grad for leaf in leaves])
        self.view.attach(self)
        self.shards = self.view.shards

    def _train(self, wanted: list[bool]) -> None:
        """Let these leaves get a gradient."""
        for leaf, each in zip(self.leaves, wanted, strict=True):
            leaf.requires_grad_(each)
        self.trained = [index for index, each in enumerate(wanted) if each]


@contextmanager
def reducing(units: Iterable[Unit], value: bool) -> Iterator[None]:
    """Let backward passes inside the `with` reduce the gradients of `units`, or leave this to a later one."""
    before = [(unit, unit.reduces) for unit in units]
    try:
        for unit, _ in before:
            unit.reduces = value
        yield
    finally:
        for unit, each in before:
            unit.reduces = each
