"""Reference answers of lab 00, memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import adam

from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.workshop.references import reference


@reference(
    "0.1",
    hints=(
        "Count what is per element first: parameters and gradients at `itemsize`; then one buffer of state for "
        "momentum, two for Adam, three for AMSGrad, each at the item size of the tensor that the optimizer updates.",
        "With a float32 copy the optimizer updates the copy: a buffer has 4 bytes per element, and the copy itself is "
        "one more of them. Last, for Adam and AMSGrad, `4 * len(numels)` for the step counts.",
    ),
    forbids=(closed_form.OptimizerState.bytes, closed_form.ddp),
)
def training_bytes(numels: list[int], itemsize: int, optimizer: str, master_copy: bool = False) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state of a model with parameters of `numels` elements."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = buffers * elements * (4 if master_copy else itemsize)
    if optimizer in ("adam", "amsgrad"):
        state += 4 * len(numels)
    if master_copy:
        state += 4 * elements
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@reference(
    "0.2",
    hints=(
        "Three terms: parameters, gradients, optimizer state. Each stage divides one more of them by the ranks.",
        "Stage 1 divides the optimizer state, stage 2 the gradients as well, stage 3 the parameters as well.",
    ),
    forbids=(closed_form.ddp, closed_form.zero1, closed_form.zero2, closed_form.fsdp),
)
def zero_stages(psi: int, ranks: int, k: int = 12, itemsize: int = 2) -> dict[str, float]:
    """Bytes of model state on each rank under replication and the three stages of ZeRO."""
    parameters = gradients = itemsize * psi
    optimizer = k * psi
    return {
        "replicated": parameters + gradients + optimizer,
        "stage 1": parameters + gradients + optimizer / ranks,
        "stage 2": parameters + (gradients + optimizer) / ranks,
        "stage 3": (parameters + gradients + optimizer) / ranks,
    }


@reference(
    "0.3",
    hints=(
        "`state` is empty at the first call only: fill it then, with `zeros_like(param)` twice. Convert the gradient "
        'to `param.dtype` before anything else, and take the count out with `state["step"].item()`.',
        "`exp_avg.lerp_(grad, 1 - beta1)`; `exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)`; then divide "
        "`exp_avg` by `1 - beta1**t`, `exp_avg_sq` by `1 - beta2**t`, and "
        "`param.addcdiv_(m_hat, v_hat.sqrt() + eps, value=-lr)`.",
    ),
    forbids=(adam.adam,),
)
def adam_step(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """One step of Adam on one parameter, in place; the state is made at the first."""
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    grad = grad.to(param.dtype)
    state["step"] += 1
    t = state["step"].item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5
    param.addcdiv_(state["exp_avg"], root + eps, value=-lr / (1 - beta1**t))


@reference(
    "0.4",
    hints=(
        "`pack` is called for every tensor that an operator saves: note `tensor.untyped_storage()` there, in a dict "
        "from its `data_ptr()` to its `nbytes()`, so that a storage counts once. Collect the parameters' addresses "
        "before, to leave them out.",
        "`pack` hands back `tensor.detach()`: the same memory, without the graph that the tensor itself would hold. "
        "`unpack` hands back what it is given. After the `with`, sum the dict's values.",
    ),
)
def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes that autograd keeps for backward when `forward` runs, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    del loss  # it held the graph, and with it all that was counted
    return sum(saved.values())
