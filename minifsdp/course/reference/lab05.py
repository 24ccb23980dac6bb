"""Reference answers of lab 05, FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Variable

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.gradient import Gradient
from minifsdp.fsdp.reduction import Reduction
from minifsdp.fsdp.view import FlatView


class LabUnit(Protocol):
    """The unit interface that `attach` may use; the notebook defines the class."""

    leaves: list[nn.Parameter]
    is_root: bool

    @property
    def whole(self) -> bool: ...
    def gather(self) -> None: ...
    def free(self) -> None: ...
    def take_gradient(self, leaf: Tensor) -> None: ...
    def reduce_gradient(self) -> None: ...


@reference(
    "5.1",
    hints=(
        "A module has `register_forward_pre_hook` and `register_forward_hook`, a tensor `register_hook`, a parameter "
        "`register_post_accumulate_grad_hook`. A backward's end has no hook: it is a callback, queued in mid-backward.",
        "In the forward hook register one on the output. In the output's hook record, and, unless one is queued in "
        "this backward already, `Variable._execution_engine.queue_callback(end)`. In a loop over parameters give each "
        "hook its own name: `lambda p, name=name: record(...)`.",
    ),
)
def watch(module: nn.Module, record: Callable[[str], None]) -> None:
    """Register hooks on `module` that tell `record` what happens in every forward and backward, when it happens."""
    queued = False

    def end() -> None:
        nonlocal queued
        queued = False
        record("end of backward")

    def on_output(gradient: Tensor) -> None:
        nonlocal queued
        record("output gradient")
        if not queued:
            queued = True
            Variable._execution_engine.queue_callback(end)

    def post_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        record("post-forward")
        if output.requires_grad:
            output.register_hook(on_output)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post_forward)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))


@reference(
    "5.2",
    hints=(
        "`device.allocate` gives `flat.full` its memory, the same that `flat.views` look at. `comm.all_gather` returns "
        "a handle; there is nothing to read before its `wait()`. Autograd has no part in it: `.data` on both buffers.",
        "Three steps: allocate `flat.full`; `comm.all_gather(output, shard, group)` with `flat.full.data` for the "
        "output, since it has a version counter of its own, and `flat.shard.data`, since the shard is a Parameter and "
        "autograd would record what is done with it; wait.",
    ),
    forbids=(FlatUnit._gather,),
)
def gather(flat: FlatParameter, group: Group) -> None:
    """Make the unit whole: `flat.full` [P] gets memory, and in it every rank's `flat.shard` [P / N]."""
    device.allocate(flat.full)
    comm.all_gather(flat.full.data, flat.shard.data, group).wait()


@reference(
    "5.3",
    hints=(
        "The views, the leaves made of them and autograd's saved tensors share one storage. As long as that has its "
        "bytes, it does not matter which names you drop.",
        "It is the storage that must shrink, not the tensor, as with `untyped_storage().resize_(0)`. `device.free` "
        "does that, and `record_stream` on a GPU: use it.",
    ),
    forbids=(FlatUnit._release,),
)
def free(flat: FlatParameter) -> None:
    """Give the memory of `flat.full` [P] away, whoever still refers to it; tensors and shapes stay."""
    device.free(flat.full)


@reference(
    "5.4",
    hints=(
        "The padding belongs to no parameter, so nobody has written its gradient. The output is a buffer of the "
        "shard's size with the role `gradients`; `comm.reduce_scatter` sums unless you say otherwise.",
        "Zero `flat.padding_of(gradient)`; `mean = device.empty(...)`; `comm.reduce_scatter(mean, gradient, group, "
        "comm.MEAN)` and wait; `device.free(gradient)`. Then `flat.shard.grad` becomes `mean`, or `mean` is added to "
        "it and freed.",
    ),
    forbids=(FlatUnit._reduce, Reduction.start, FlatUnit._accumulate, Gradient.complete, FlatView.add),
)
def reduce_gradient(flat: FlatParameter, gradient: Tensor, group: Group) -> None:
    """Add the ranks' mean of `gradient` [P] to `flat.shard.grad` [P / N], and free `gradient`."""
    flat.padding_of(gradient).zero_()
    mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
    comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
    device.free(gradient)
    if flat.shard.grad is None:
        flat.shard.grad = mean
    else:
        flat.shard.grad.add_(mean)
        device.free(mean)


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
    """FULL_SHARD: hook `unit`'s verbs to the forward and backward of `module`."""
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
    """SHARD_GRAD_OP: as `attach`, and the parameters stay whole from forward to the end of the unit's backward."""
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
