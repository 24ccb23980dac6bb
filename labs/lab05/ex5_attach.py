"""Exercise 5.5: Attach the hooks."""

from typing import Any

from torch import Tensor, nn

from minifsdp.course.workshop.checking import check
from minifsdp.course.workshop.references import reference

from .shared import LabUnit, check_events, check_training


@reference(
    "5.5",
    hints=(
        "The four hooks of 5.1: before forward, after forward, the output's gradient, a leaf's gradient. The last of "
        "the leaves ends the unit's backward; the next backward counts from the start again.",
        "After forward: `output.register_hook(before_backward)` if `output.requires_grad`, and free unless the unit is "
        "the root and a backward follows. `before_backward` gathers unless the unit is whole. On a leaf: "
        "`take_gradient`, cross it off; if none is left, refill the list, free, reduce.",
    ),
)
def attach(module: nn.Module, unit: LabUnit) -> None:
    """FULL_SHARD: call the methods of `unit` from hooks on the forward and backward of `module`.

    Args:
        module: the unit's module; its `forward` returns one tensor.
        unit: has `leaves` (list of Parameters), `is_root`, `whole` (whether it is currently unsharded),
            and the methods `gather()`, `free()`, `take_gradient(leaf)` and `reduce_gradient()`.

    Gather a unit before its forward, unless it is unsharded already. Free it afterwards, unless it is the root and a
    backward follows (in this case the output requires a gradient). Gather it before its backward, unless it is
    unsharded already. After the last gradient of its leaves, free it and then reduce its gradient, exactly once in
    every backward: reset the count of leaves when the last gradient has arrived, so that the next backward counts all
    of them again, even if two forwards come before their two backwards.
    """
    missing = set(unit.leaves)

    def before_forward(module: nn.Module, args: Any) -> None:
        if not unit.whole:
            unit.gather()

    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(before_backward)
        if not (unit.is_root and output.requires_grad):
            unit.free()

    def before_backward(gradient: Tensor) -> None:
        if not unit.whole:
            unit.gather()

    def after_gradient(leaf: Tensor) -> None:
        unit.take_gradient(leaf)
        missing.discard(leaf)
        if not missing:
            missing.update(unit.leaves)
            unit.free()
            unit.reduce_gradient()

    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward)
    for leaf in unit.leaves:
        leaf.register_post_accumulate_grad_hook(after_gradient)


@check("5.5")
def check_attach(answer, variant):
    """Gathered before forward and before backward, freed after both, then reduced; the root stays from end to end."""
    check_events(answer, kept_after_forward=False)
    check_training(answer, variant, kept_after_forward=False)
