"""Exact live bytes, by purpose.

    with Ledger() as ledger:
        model = FullyShardedDataParallel(GPT())
        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(model, optimizer)
        loss = model(tokens, targets)
        ledger.mark("forward")  # {"parameters": 2415016, "unsharded": ...}

Every storage that an operator returns counts once, at its size, from its creation to its free. Each has one tag:

    parameters       the watched model's parameters and buffers, and the tensors that the optimizer updates
    unsharded        buffers of that role (device.empty): gathered parameters
    gradients        the `.grad` of watched leaves, and buffers of that role
    optimizer        the tensors in the optimizer's `state`, including the 4 bytes of Adam's `step`
    communication    buffers of that role: staging for a collective
    activations      everything else: tensors saved by autograd, inputs, temporaries

A gradient is a temporary of backward, in `activations`, until it is accumulated in `.grad` or copied into a buffer of
role "gradients"; if a hook removes it from `.grad` before the ledger's own hook runs, it stays in `activations`.

Nothing is recorded inside a collective (comm.observers), so that the numbers do not depend on its transport. Not seen
are unwatched storages older than the ledger, and memory that no operator returns, such as an operator's workspace,
a backend's staging (gloo's own reduce-scatter copies its input) and sparse tensors.

The ledger has one side effect: under a dispatch mode, autograd sums gradients that meet (at a residual connection, at a
tied weight) out of place, so `activations` in backward can be higher by one such gradient than without the ledger.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, NamedTuple, Self, TypeVar
from unittest.mock import patch

from torch import Tensor, UntypedStorage, empty, enable_grad, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from minifsdp import comm, device
from minifsdp.instruments.watch.storages import (
    TAGS,
    Books,
    Event,
    Operators,
    Tag,
    garbage_collected_by_us,
    tell_resizes,
)
from minifsdp.private import tree_leaves

T = TypeVar("T")


class Peak(NamedTuple):
    """The peak of live bytes, and the bytes by tag at the last time of that peak."""

    total: int
    tags: dict[Tag, int]


class Ledger:
    """Count live bytes inside the `with`, one ledger at a time per process; readable afterwards too.

    Build the model inside the `with`. Python's cyclic garbage collector runs only at marks and resets meanwhile, so the
    same program always gives the same events; memory kept alive only by a reference cycle counts until then.
    """

    _counting: ClassVar[Ledger | None] = None

    def __init__(self) -> None:
        self._books = self._make_books()
        self._parameters: list[weakref.ref[Tensor]] = []
        self._leaves: list[weakref.ref[Tensor]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._on_exit = ExitStack()
        self._has_waited = False  # for a collective since the last mark

    def __enter__(self) -> Self:
        if Ledger._counting is not None:
            raise RuntimeError("a Ledger is counting already, and one counts everything: use it, or leave it first")
        if self.events or any(self.live().values()):
            raise RuntimeError("this Ledger has counted before: make a new one")
        with ExitStack() as on_exit:
            Ledger._counting = self
            on_exit.callback(self._stop)
            with Operators(Books()):
                empty(0)  # the first operator under a mode imports half of torch and leaves cyclic frames
            on_exit.enter_context(garbage_collected_by_us())
            device.buffer_observers.append(self.tag)
            on_exit.callback(device.buffer_observers.remove, self.tag)
            comm.observers.append(self._during_collective)
            on_exit.callback(comm.observers.remove, self._during_collective)
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
        """Tag the parameters, gradients and optimizer state of a model, now and as they are created.

        Call it on the finished model, whose hooks have to run before the ledger's. A `.grad` set by hand is found at
        the next mark.

        Args:
            model: its parameters and buffers are tagged, now and again at every mark.
            optimizer: a `torch.optim.Optimizer`, or a wrapper that has one as `.inner` or `.optimizer`.
            leaves: tensors outside `model.parameters()` that accumulate gradients, such as those of an FSDP unit.

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
        """Tag a tensor's storage, if the ledger cannot infer its purpose.

        The first tag other than `activations` is permanent: a buffer of a role keeps it through `device.free` and
        `device.allocate`, and a `.grad` that views a bucket has the bucket's tag. Only staging (`communication`) may
        change, to `gradients`.
        """
        self._books.tag(tensor, tag)

    def mark(self, name: str) -> dict[Tag, int]:
        """Add a named mark to the curve; returns the live bytes by tag."""
        self._settle()
        self._tag_watched()
        return self._books.mark(name)

    def live(self) -> dict[Tag, int]:
        """Live bytes by tag."""
        return dict(self._books.now)

    def settled(self) -> dict[Tag, int]:
        """Live bytes by tag, as a mark has them, without one."""
        self._settle()
        self._tag_watched()
        return self.live()

    def reset_peaks(self) -> None:
        """Restart events, peaks and the curve from the current live bytes."""
        self._settle()
        self._books.reset()

    @property
    def events(self) -> list[Event]:
        """The events since the last reset, in order."""
        return self._books.events

    @property
    def listeners(self) -> list[Callable[[], None]]:
        """Each is called after every operator and resize that changes a storage, on its thread."""
        return self._books.listeners

    @property
    def peak(self) -> Peak:
        """The peak of live bytes since the last reset."""
        level = max(reversed(list(self._levels())), key=_total)
        return Peak(_total(level), level)

    def peak_of(self, *tags: Tag) -> int:
        """The peak of these tags' total live bytes since the last reset.

        Raises:
            ValueError: unknown tag.
        """
        if unknown := set(tags) - set(TAGS):
            raise ValueError(f"no such tag: {', '.join(sorted(unknown))}; choose from {', '.join(TAGS)}")
        return max(sum(level[tag] for tag in tags) for level in self._levels())

    def curve(self) -> dict[str, Any]:
        """Bytes over the events since the last reset, ready for JSON.

        Returns:
            `{"tags": {tag: [bytes, ...]}, "marks": [[index, name], ...]}`. Entry 0 is the start, entry i the bytes
            after event i; a mark's index is that of its bytes.
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
        """Tag the gradient after the hooks of its accumulation node, since DDP's hooks move it into a bucket."""

        def tag(*_: object) -> None:
            handle.remove()
            self._tag_grad(leaf)

        handle = _node_of(leaf).register_hook(tag)  # not stored: the node keeps the leaf alive
        if len(handle.hooks_dict_ref() or ()) < 2:  # no hooks, or not run: torch's FSDP2 calls leaves' hooks itself
            tag()

    _on_gradient.only_measures = True  # type: ignore[attr-defined]  # wrappers may lose it with its parameter

    def _tag_grad(self, leaf: Tensor) -> None:
        if leaf.is_leaf and leaf.grad is not None:
            self.tag(leaf.grad, "gradients")

    def _tag_state(self, optimizer: Optimizer) -> None:
        for value in tree_leaves(list(optimizer.state.values())):
            if isinstance(value, Tensor):
                self.tag(value, "optimizer")

    @contextmanager
    def _during_collective(self, call: comm.Call, phase: str) -> Iterator[None]:
        with self._books.paused():
            yield
            if phase == "wait":
                self._has_waited = True
                time.sleep(1e-4)  # see _settle

    def _settle(self) -> None:
        """Wait until nothing more is freed.

        A thread of gloo's drops its reference to a tensor after `wait` has returned, and needs for it the interpreter's
        lock, which this thread may hold for milliseconds.
        """
        gc.collect()
        known = None if self._has_waited else len(self.events)
        while len(self.events) != known:
            known = len(self.events)
            time.sleep(0.01)
        self._has_waited = False

    def _stop(self) -> None:
        self._books.close()
        Ledger._counting = None


def _torch_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """The optimizers in a wrapper, outermost first."""
    while optimizer is not None:
        if isinstance(optimizer, Optimizer):
            yield optimizer
        optimizer = getattr(optimizer, "inner", getattr(optimizer, "optimizer", None))


def _node_of(leaf: Any) -> Any:
    """The node that accumulates a leaf's gradient.

    torch's `get_gradient_edge` makes a view, which fails for a DTensor whose rows two axes share unevenly.
    """
    if not hasattr(leaf, "to_local"):
        return get_gradient_edge(leaf).node
    with enable_grad():
        return leaf.to_local().grad_fn.next_functions[0][0]


def _updated_by(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _alive(references: list[weakref.ref[T]]) -> list[T]:
    return [target for reference in references if (target := reference()) is not None]


def _total(level: dict[Tag, int]) -> int:
    return sum(level.values())
