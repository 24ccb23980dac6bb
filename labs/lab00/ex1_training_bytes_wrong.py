"""Wrong answers to exercise 0.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("0.1", "the float32 copy of the parameters is missing")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Counts the moments of mixed precision and forgets the copy they belong to: 12 bytes instead of 16."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = buffers * elements * (4 if master_copy else itemsize) + 4 * len(numels) * (buffers > 1)
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "step count of 4 bytes beside its buffers")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """The account of the papers, per element only: Adam's step counts are missing."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = elements * (buffers * (4 if master_copy else itemsize) + 4 * master_copy)
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "without a float32 copy nothing is float32")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Takes moments for float32 always; with bfloat16 parameters torch's are bfloat16."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = elements * 4 * (buffers + master_copy) + 4 * len(numels) * (buffers > 1)
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "the optimizer updates the copy")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Keeps the moments in bfloat16 beside a float32 copy."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = elements * (buffers * itemsize + 4 * master_copy) + 4 * len(numels) * (buffers > 1)
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "the dtype of the parameters that forward used")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Gives the copy's float32 to the gradients too."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    updated = 4 if master_copy else itemsize
    state = elements * (buffers * updated + 4 * master_copy) + 4 * len(numels) * (buffers > 1)
    return {"parameters": itemsize * elements, "gradients": updated * elements, "optimizer": state}


@wrong("0.1", "only Adam and AMSGrad keep a step count")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Gives every optimizer a step count."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = elements * (buffers * (4 if master_copy else itemsize) + 4 * master_copy) + 4 * len(numels)
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "a step count has 4 bytes, whatever the dtype")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Counts the steps in the dtype of the parameters."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = elements * (buffers * (4 if master_copy else itemsize) + 4 * master_copy)
    state += itemsize * len(numels) * (buffers > 1)
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "`numels` afterwards")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Sorts its argument in place."""
    numels.sort(reverse=True)
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = (
        buffers * elements * (4 if master_copy else itemsize)
        + 4 * len(numels) * (buffers > 1)
        + 4 * elements * master_copy
    )
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "two tensors of one size are two tensors")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Counts a step per distinct size."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = (
        buffers * elements * (4 if master_copy else itemsize)
        + 4 * len(set(numels)) * (buffers > 1)
        + 4 * elements * master_copy
    )
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "parameters of 4 bytes, float32 copy")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Makes a copy only where parameters have 2 bytes."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    copy = master_copy and itemsize == 2
    state = (
        buffers * elements * (4 if master_copy else itemsize) + 4 * len(numels) * (buffers > 1) + 4 * elements * copy
    )
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "momentum, parameters of 8 bytes")
def training_bytes(numels, itemsize, optimizer, master_copy=False):
    """Takes nothing for wider than float32."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = (
        buffers * elements * (4 if master_copy else min(4, itemsize))
        + 4 * len(numels) * (buffers > 1)
        + 4 * elements * master_copy
    )
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


@wrong("0.1", "`master_copy` is False by default")
def training_bytes(numels, itemsize, optimizer, master_copy=True):
    """Has a copy by default."""
    elements = sum(numels)
    buffers = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}[optimizer]
    state = (
        buffers * elements * (4 if master_copy else itemsize)
        + 4 * len(numels) * (buffers > 1)
        + 4 * elements * master_copy
    )
    return {"parameters": itemsize * elements, "gradients": itemsize * elements, "optimizer": state}


wrong("0.1", "a tensor of one element is a tensor").diff("""
Leaves out the step counts of scalars.
- state += 4 * len(numels)
+ state += 4 * sum(numel > 1 for numel in numels)
""")
wrong("0.1", "as many bytes as one of the tensor that the optimizer updates").diff("""
Takes at least two bytes for an element of state.
- state = buffers * elements * (4 if master_copy else itemsize)
+ state = buffers * elements * (4 if master_copy else max(itemsize, 2))
""")
