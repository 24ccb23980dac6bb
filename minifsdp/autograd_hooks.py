"""Autograd hooks: on the inputs and outputs of a module, and at the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from minifsdp.private import ClosedToTorch, at_end_of_backward, base_of, made_since
from minifsdp.tree import tensors_in


def made_here(output: Any, inputs: Any, nodes: int) -> list[Tensor]:
    """The outputs that require grad, except for inputs that are passed on: their gradients belong to another module.

    Args:
        output: the output of a call.
        inputs: the inputs of that call.
        nodes: the number of autograd nodes when the call began.
    """

    def is_passed_on(output: Tensor) -> bool:
        return any((t.grad_fn or t) is (output.grad_fn or output) for t in tensors_in(inputs) if t.requires_grad)

    made = [t for t in tensors_in(output) if t.requires_grad]
    return [t for t in made if made_since(t, nodes) or not is_passed_on(t)]


# Most attributes of modules are of these types, which are no result of an operation.
_PLAIN = frozenset([bool, int, float, str, tuple, dict, nn.Parameter, *map(type, vars(nn.Module()).values())])
_PLAIN |= {ClosedToTorch}


def left_on(modules: Iterable[nn.Module], nodes: int) -> list[Tensor]:
    """Tensors that a call has stored on its modules, such as an auxiliary loss of experts in an attribute or a list.

    Args:
        modules: the modules whose attributes are examined.
        nodes: the number of autograd nodes when the call began.
    """

    def is_new(value: Any) -> bool:
        return isinstance(value, Tensor) and made_since(value, nodes)

    found: list[Tensor] = []
    for module in modules:
        values = module.__dict__.values()
        if _PLAIN.issuperset(map(type, values)):  # the rule, and quick to see
            continue
        for value in values:
            if isinstance(value, list):
                found += takewhile(is_new, reversed(value))
            elif is_new(value):
                found.append(value)
    return found


def before_backward_of(
    outputs: Iterable[Tensor], hook: Callable[[Any], None], base_hook: Callable[[Any], None]
) -> list[Any]:
    """Call `hook` each time a gradient reaches one of these outputs, all of which require grad.

    An in-place change of a view replaces the view's `grad_fn`, but not that of its base, so `base_hook` is attached to
    the base. It is also called if the base is an input of which the output is a view.

    Returns:
        Handles of the hooks that outlive the graph: those on leaves that the module has passed on.
    """
    lasting = []
    for t in outputs:
        if t.grad_fn is None:
            lasting.append(t.register_hook(hook))
            continue
        t.grad_fn.register_prehook(hook)  # costs less than a hook on the tensor
        base = base_of(t)
        if base is not None and base.grad_fn is not None:
            base.grad_fn.register_prehook(base_hook)
    return lasting


def after_backward_to(inputs: Iterable[Tensor], hook: Callable[[], None]) -> bool:
    """Call `hook` once all inputs that get a gradient have it. Returns True if any input may get one."""
    watched = [t for t in inputs if t.requires_grad]
    if watched:
        register_multi_grad_hook(watched, lambda gradients: hook())
    return bool(watched)


class BackwardEnd:
    """The call that ends the current backward: autograd makes it once, or drops it if the backward raises an error."""

    def __init__(self) -> None:
        self._due: weakref.ref[partial[None]] | None = None

    @property
    def is_due(self) -> bool:
        """True if the backward for which an end was arranged is under way."""
        return self._due is not None and self._due() is not None

    def schedule(self, end: Callable[[], None]) -> None:
        """Call `end` when the backward under way has made all its gradients."""
        due = partial(self._run, end)  # autograd has the only reference
        self._due = weakref.ref(due)
        at_end_of_backward(due)

    def _run(self, end: Callable[[], None]) -> None:
        try:
            end()
        finally:
            self._due = None

    def check(self) -> None:
        """
        Raises:
            RuntimeError: the backward has raised, and no forward since has cleared away what it left.
        """
        if self._due is not None and self._due() is None:
            raise RuntimeError(
                "the last backward raised, and this one's forward came before it: zero the gradients and run this "
                "micro-batch's forward again"
            )
