"""Exercise 0.1: Bytes of model state."""

from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.workshop.checking import AnswerError, check, expect
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
    """Return the bytes of parameters, gradients and optimizer state after a model's first training step.

    Args:
        numels: elements of each parameter tensor of the model.
        itemsize: bytes per element of the parameters that the forward and the backward pass use.
        optimizer: "sgd", "momentum", "adam" or "amsgrad".
        master_copy: whether the optimizer updates a float32 copy of the parameters; the copy counts as its state.

    Returns:
        {"parameters": bytes, "gradients": bytes, "optimizer": bytes}, in this order.
    """
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = buffers * elements * (4 if master_copy else itemsize)
    if optimizer in ("adam", "amsgrad"):
        state += 4 * len(numels)
    if master_copy:
        state += 4 * elements
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


STATE_BUFFERS = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}


@check("0.1")
def check_training_bytes(answer, variant):
    """Exact bytes for SGD, momentum, Adam and AMSGrad, in float32, in bfloat16 and with a float32 copy."""
    few = variant.size
    numels = [few, 5 * few + 1, 64, few, few, 1]  # three of one size, one of one element, and in no order
    for itemsize, copy in ((4, False), (2, False), (2, True), (4, True), (8, False), (1, False)):
        for optimizer in STATE_BUFFERS:
            given = list(numels)
            found = answer(given, itemsize, optimizer, copy) if copy else answer(given, itemsize, optimizer)
            case = f"{optimizer}, parameters of {itemsize} bytes{', float32 copy' if copy else ''}"
            expect(f"{case}: `numels` afterwards", given, numels, slip="it is the caller's list: leave it as it is")
            if not isinstance(found, dict) or list(found) != ["parameters", "gradients", "optimizer"]:
                raise AnswerError(f"{case}: expected a dict with parameters, gradients, optimizer, got {found!r}")
            _expect_bytes(case, found, numels, itemsize, optimizer, copy)


def _expect_bytes(case, found, numels, itemsize, optimizer, copy):
    elements, tensors = sum(numels), len(numels)
    buffers, counts = STATE_BUFFERS[optimizer], 4 * tensors * (STATE_BUFFERS[optimizer] > 1)
    updated = 4 if copy else itemsize  # bytes of an element of what the optimizer updates
    held = itemsize * elements
    state = elements * (buffers * updated + 4 * copy) + counts
    copied = {"the float32 copy is the optimizer's, not a second set of parameters": held + 4 * elements}
    expect(f"{case}: parameters, bytes", found["parameters"], held, slips=copied)
    wide = {"gradients have the dtype of the parameters that forward used": 4 * elements}
    expect(f"{case}: gradients, bytes", found["gradients"], held, slips=wide)
    slips = {}
    if counts:
        slips["each parameter tensor has a step count of 4 bytes beside its buffers"] = state - counts
        slips["the step count is per parameter tensor, not one for the model"] = state - counts + 4
        slips["a step count has 4 bytes, whatever the dtype of the parameters"] = state - counts + itemsize * tensors
        slips["the step count is one number per tensor, not one per element"] = state - counts + 4 * elements
        slips["two tensors of one size are two tensors, and have a step count each"] = state - 8
        slips["a tensor of one element is a tensor, and has a step count"] = state - 4
    else:
        slips["SGD counts no steps: only Adam and AMSGrad keep a step count"] = state + 4 * tensors
    if copy:
        slips["the float32 copy of the parameters is missing: 4 bytes per element"] = state - 4 * elements
        slips["state is float32 here: the optimizer updates the copy, so its buffers have the copy's dtype"] = (
            elements * (buffers * itemsize + 4) + counts
        )
    elif itemsize != 4:
        slips["state has the dtype of the parameters: without a float32 copy nothing is float32"] = (
            elements * buffers * 4 + counts
        )
    if not copy:
        slips["no copy is asked for: `master_copy` is False by default"] = elements * 4 * (buffers + 1) + counts
    slips[f"{optimizer} has {buffers} buffers as large as the parameter"] = state - updated * elements
    slip = "an element of a buffer has as many bytes as one of the tensor that the optimizer updates, be it 1"
    expect(f"{case}: optimizer state, bytes", found["optimizer"], state, slips=slips, slip=slip)
