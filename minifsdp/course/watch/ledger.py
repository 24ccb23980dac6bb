"""Exact live bytes, by what they are for.

    with Ledger() as ledger:
        model = FullyShardedDataParallel(GPT())
        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(model, optimizer)
        loss = model(tokens, targets)
        ledger.mark("forward")  # {"parameters": 2415016, "unsharded": ...}

Every storage that an operator returns counts once, at its size, from the moment it is made to the moment it is freed.
Each has one tag:

    parameters       the watched model's parameters and buffers, and what the optimizer updates
    unsharded        buffers of that role (device.empty): gathered parameters
    gradients        what is in the `.grad` of a watched leaf, and buffers of that role
    optimizer        the tensors in the optimizer's `state`, the 4 bytes of Adam's `step` included
    communication    buffers of that role: staging that exists only for a collective
    activations      all else: what autograd has saved, inputs, temporaries

A gradient is a temporary of backward, in `activations`, until it is accumulated in `.grad` or copied into a buffer of
role "gradients"; if a hook takes it out of `.grad` before the ledger's own hook runs, it is never anything else.

Nothing is entered inside a collective (comm.observers), so that the numbers are the same whoever carries it. Not seen:
what existed before the ledger and is not watched, and memory that no operator returns, such as an operator's own
workspace, a backend's staging (gloo's own reduce-scatter copies its input) and sparse tensors.

One thing the ledger changes: while a dispatch mode is on, autograd adds gradients that meet (at a residual connection,
at a tied weight) out of place, so in backward `activations` can stand higher by one such gradient than without it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple, Self, TypeVar
from unittest.mock import patch

from torch import Tensor, UntypedStorage, empty, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from minifsdp import comm, device
from minifsdp.course.watch.storages import TAGS, Books, Event, Operators, Tag, garbage_collected_by_us, tell_resizes
from minifsdp.private import tree_leaves

T = TypeVar("T")


class Peak(NamedTuple):
    """The most bytes alive at once, and their tags at the last moment when there were so many."""

    total: int
    tags: dict[Tag, int]


class Ledger:
    """Counts while its `with` runs, one at a time in a process; can be read afterwards too.

    Build the model inside the `with`. Meanwhile Python's cyclic garbage collector runs at marks and resets only, so the
    same program gives the same events every time; memory that only a reference cycle keeps shows until then.
    """

    _counting: ClassVar[Ledger | None] = None

    def __init__(self) -> None:
        self._books = self._make_books()
        self._parameters: list[weakref.ref[Tensor]] = []
        self._leaves: list[weakref.ref[Tensor]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._on_exit = ExitStack()

    def __enter__(self) -> Self:
        if Ledger._counting is not None:
            raise RuntimeError("a Ledger is counting already, and one counts everything: use it, or leave it first")
        if self.events or any(self.live().values()):
            raise RuntimeError("this Ledger has counted before: make a new one")
        with ExitStack() as on_exit:
            Ledger._counting = self
            on_exit.callback(self._stop)
            with Operators(Books()):
                empty(0)  # the first operator under any mode imports half of torch, and leaves frames in cycles behind
            on_exit.enter_context(garbage_collected_by_us())
            device.buffer_observers.append(self.tag)
            on_exit.callback(device.buffer_observers.remove, self.tag)
            comm.observers.append(self._books.paused)
            on_exit.callback(comm.observers.remove, self._books.paused)
            on_exit.enter_context(patch.object(UntypedStorage, "resize_", tell_resizes(self._books)))
            on_exit.enter_context(self._make_operators())
            self._on_exit = on_exit.pop_all()
        return self

    def _make_books(self) -> Books:
        return Books()

    def _make_operators(self) -> Operators:
        return Operators(self._books)

    def __exit__(self, *exc: object) -> None:
        self._on_exit.close()

    def watch(self, model: nn.Module, optimizer: Any = None, leaves: Iterable[Tensor] = ()) -> None:
        """Tag the parameters, gradients and optimizer state of a model, now and as they come.

        Call it on the finished model, whose hooks have to run before the ledger's. A `.grad` that is set by hand is
        found at the next mark.

        Args:
            model: its parameters and buffers are tagged, those of this moment and of every mark.
            optimizer: a `torch.optim.Optimizer`, or a wrapper that has one as `.inner` or `.optimizer`.
            leaves: tensors outside `model.parameters()` that backward accumulates gradients in, such as an FSDP unit's.

        Raises:
            RuntimeError: called outside the `with`.
        """
        if Ledger._counting is not self:
            raise RuntimeError("watch() belongs inside the `with` of its Ledger")
        parameters: list[Tensor] = list(model.parameters())
        self._parameters += [weakref.ref(tensor) for tensor in (*parameters, *model.buffers())]
        for each in _torch_optimizers(optimizer):
            self._optimizers.append(weakref.ref(each))
            self._on_exit.callback(each.register_step_post_hook(lambda stepped, *_: self._tag_state(stepped)).remove)
            parameters += _updated_by(each)
        for leaf in {id(p): p for p in (*parameters, *leaves)}.values():
            self._leaves.append(weakref.ref(leaf))
            if leaf.requires_grad:
                self._on_exit.callback(leaf.register_post_accumulate_grad_hook(self._on_gradient).remove)
        self._tag_watched()

    def tag(self, tensor: Tensor, tag: Tag) -> None:
        """Say what a tensor's storage is for, where the ledger cannot know.

        The first tag that is not `activations` is for life: a buffer of a role keeps it through `device.free` and
        `device.allocate`, and a `.grad` that views a bucket has the bucket's. Only what was staging may become the
        memory of gradients.
        """
        self._books.tag(tensor, tag)

    def mark(self, name: str) -> dict[Tag, int]:
        """Name this moment, for the curve; returns the bytes alive by tag."""
        gc.collect()
        self._tag_watched()
        return self._books.mark(name)

    def live(self) -> dict[Tag, int]:
        """Bytes alive now, by tag."""
        return dict(self._books.now)

    def reset_peaks(self) -> None:
        """Begin anew: events, peaks and the curve are from here on, starting with what is alive."""
        gc.collect()
        self._books.reset()

    @property
    def events(self) -> list[Event]:
        """The events since the last reset, in order."""
        return self._books.events

    @property
    def peak(self) -> Peak:
        """The most bytes that were alive since the last reset."""
        level = max(reversed(list(self._levels())), key=_total)
        return Peak(_total(level), level)

    def peak_of(self, *tags: Tag) -> int:
        """The most bytes that were alive under these tags together since the last reset.

        Raises:
            ValueError: there is no such tag.
        """
        if unknown := set(tags) - set(TAGS):
            raise ValueError(f"no such tag: {', '.join(sorted(unknown))}; choose from {', '.join(TAGS)}")
        return max(sum(level[tag] for tag in tags) for level in self._levels())

    def curve(self) -> dict[str, Any]:
        """Bytes over the events since the last reset, ready for JSON.

        Returns:
            `{"tags": {tag: [bytes, ...]}, "marks": [[index, name], ...]}`. Entry 0 is the start, entry i the bytes
            after event i, and a mark's index leads to its bytes.
        """
        levels = list(self._levels())
        marks = [[i, event.cause] for i, event in enumerate(self.events, start=1) if not event.changes]
        return {"tags": {tag: [level[tag] for level in levels] for tag in TAGS}, "marks": marks}

    def _levels(self) -> Iterator[dict[Tag, int]]:
        """Bytes by tag at the last reset and after each event since."""
        level = dict(self._books.start)
        yield dict(level)
        for event in self.events:
            for tag, change in event.changes.items():
                level[tag] += change
            yield dict(level)

    def _tag_watched(self) -> None:
        optimizers = _alive(self._optimizers)
        parameters = _alive(self._parameters) + [p for optimizer in optimizers for p in _updated_by(optimizer)]
        for p in parameters:
            self.tag(p, "parameters")
        for leaf in parameters + _alive(self._leaves):
            self._tag_grad(leaf)
        for optimizer in optimizers:
            self._tag_state(optimizer)

    def _on_gradient(self, leaf: Tensor) -> None:
        """Tag it, but after the hooks of the node that has accumulated it: those of DDP move it into a bucket."""

        def tag(*_: object) -> None:
            handle.remove()
            self._tag_grad(leaf)

        handle = get_gradient_edge(leaf).node.register_hook(tag)  # anew each time: a node kept would keep the leaf
        if len(handle.hooks_dict_ref() or ()) < 2:  # it has none, or has not run: torch's FSDP2 calls leaves' hooks
            tag()

    def _tag_grad(self, leaf: Tensor) -> None:
        if leaf.is_leaf and leaf.grad is not None:
            self.tag(leaf.grad, "gradients")

    def _tag_state(self, optimizer: Optimizer) -> None:
        for value in tree_leaves(list(optimizer.state.values())):
            if isinstance(value, Tensor):
                self.tag(value, "optimizer")

    def _stop(self) -> None:
        self._books.close()
        Ledger._counting = None


def _torch_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """The optimizers in a wrapper, from the outside in."""
    while optimizer is not None:
        if isinstance(optimizer, Optimizer):
            yield optimizer
        optimizer = getattr(optimizer, "inner", getattr(optimizer, "optimizer", None))


def _updated_by(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _alive(references: list[weakref.ref[T]]) -> list[T]:
    return [target for reference in references if (target := reference()) is not None]


def _total(level: dict[Tag, int]) -> int:
    return sum(level.values())
