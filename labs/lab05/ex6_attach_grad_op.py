"""Exercise 5.6: SHARD_GRAD_OP."""

from typing import Any

from torch import Tensor, nn

from minifsdp.course.workshop.checking import check
from minifsdp.course.workshop.references import reference

from .shared import LabUnit, check_events, check_training


@reference(
    "5.6",
    hints=(
        "What is not freed after forward needs no gather before backward. What is freed after backward is sharded "
        "between steps all the same.",
        "Your 5.5 without the hook on the output, and after forward only one case is left in which to free: no "
        "backward will follow.",
    ),
)
def attach_grad_op(module: nn.Module, unit: LabUnit) -> None:
    """SHARD_GRAD_OP: like `attach`, but a unit stays unsharded from its forward to the end of its backward.

    Args:
        module: the unit's module; its `forward` returns one tensor.
        unit: as for `attach`.

    Gather a unit before its forward, unless it is unsharded already, and at no other time. Free it after its forward
    only if no backward follows. After the last gradient of its leaves, free it and then reduce its gradient.
    """
    missing = set(unit.leaves)

    def before_forward(module: nn.Module, args: Any) -> None:
        if not unit.whole:
            unit.gather()

    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        if not output.requires_grad:
            unit.free()

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


@check("5.6")
def check_attach_grad_op(answer, variant):
    """Gathered once a step, whole from forward to the end of the unit's backward, sharded between steps."""
    check_events(answer, kept_after_forward=True)
    check_training(answer, variant, kept_after_forward=True)
