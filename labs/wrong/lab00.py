"""Wrong answers to lab 00, each with words that its rejection must contain."""

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


@wrong("0.2", "the stages build on each other")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Each stage shards its own term only."""
    p, g, s = itemsize * psi, itemsize * psi, k * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + g / ranks + s,
        "stage 3": p / ranks + g + s,
    }


@wrong("0.2", "the parameters last")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Shards the parameters first."""
    p, g, s = itemsize * psi, itemsize * psi, k * psi
    return {
        "replicated": p + g + s,
        "stage 1": p / ranks + g + s,
        "stage 2": (p + g) / ranks + s,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "divide by N")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Shares the state among the other ranks."""
    p, g, s, others = itemsize * psi, itemsize * psi, k * psi, max(1, ranks - 1)
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / others,
        "stage 2": p + (g + s) / others,
        "stage 3": (p + g + s) / others,
    }


@wrong("0.2", "K is an argument")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """The paper's K = 12, for every optimizer."""
    p, g, s = itemsize * psi, itemsize * psi, 12 * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + (g + s) / ranks,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "not GiB")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Returns GiB."""
    p, g, s = itemsize * psi / 2**30, itemsize * psi / 2**30, k * psi / 2**30
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + (g + s) / ranks,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "k and itemsize are arguments")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """The formulas of the paper with its numbers in them."""
    return {
        "replicated": 16 * psi,
        "stage 1": 4 * psi + 12 * psi / ranks,
        "stage 2": 2 * psi + 14 * psi / ranks,
        "stage 3": 16 * psi / ranks,
    }


@wrong("0.2", "K includes the float32 copy")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Counts the float32 copy a second time."""
    p, g, s = itemsize * psi, itemsize * psi, (k + 4) * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + (g + s) / ranks,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "without rounding")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Divides bytes as whole numbers."""
    p, g, s = itemsize * psi, itemsize * psi, k * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s // ranks,
        "stage 2": p + (g + s) // ranks,
        "stage 3": (p + g + s) // ranks,
    }


@wrong("0.2", "replicated, Ψ = 50, N = 64, K = 12")
def zero_stages(psi, ranks, k=16, itemsize=2):
    """Has another default for K."""
    one, state = itemsize * psi, k * psi
    return {
        "replicated": 2 * one + state,
        "stage 1": 2 * one + state / ranks,
        "stage 2": one + (one + state) / ranks,
        "stage 3": (2 * one + state) / ranks,
    }


@wrong("0.3", "eps stands under the root")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Adds epsilon to the variance."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad, t = grad.to(param.dtype), state["step"].add_(1).item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**t) + eps).sqrt()
    param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**t))


@wrong("0.3", "eps is added before the bias is corrected")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """The paper's shortened form (its epsilon-hat) with epsilon in place of epsilon-hat."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad, t = grad.to(param.dtype), state["step"].add_(1).item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    rate = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + eps, value=-rate)


@wrong("0.3", "no bias correction")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Uses the moments as they are; the first steps are several times too large."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad = grad.to(param.dtype)
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + eps, value=-lr)


@wrong("0.3", "made anew at every call")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Forgets the moments between steps: every step is a first one."""
    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad, t = grad.to(param.dtype), state["step"].add_(1).item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
    param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**t))


@wrong("0.3", "param is as it was")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Binds the name `param` to the new value, which nobody else sees."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad, t = grad.to(param.dtype), state["step"].add_(1).item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
    param = param - lr / (1 - beta1**t) * state["exp_avg"] / root


@wrong("0.3", "param is a new tensor")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Gives the parameter other memory: views of the old one, such as a flat parameter's, no longer see it."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad, t = grad.to(param.dtype), state["step"].add_(1).item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
    param.data = param - lr / (1 - beta1**t) * state["exp_avg"] / root


@wrong("0.3", "exp_avg is a new tensor")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Makes new moments at every step and drops the old ones: twice the state while both are there."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad, t = grad.to(param.dtype), state["step"].add_(1).item()
    state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * grad
    state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
    param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**t))


@wrong("0.3", "moments have shape and dtype of param")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Makes the moments like the gradient: in bfloat16 they lose what a small (1 - beta2) adds."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
    t = state["step"].add_(1).item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["exp_avg_sq"].to(param.dtype) / (1 - beta2**t)).sqrt() + eps
    param.addcdiv_(state["exp_avg"].to(param.dtype), root, value=-lr / (1 - beta1**t))


@wrong("0.3", "the square is taken in bfloat16")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Lets type promotion do the work, and so squares in bfloat16."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    t = state["step"].add_(1).item()
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    state["exp_avg_sq"].mul_(beta2).add_(grad * grad, alpha=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
    param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**t))


@wrong("0.3", "grad was written to")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Saves a temporary by squaring the gradient in place."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad, t = grad.to(param.dtype), state["step"].add_(1).item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).add_(grad.square_(), alpha=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
    param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**t))


@wrong("0.3", "for a count of 0 it is torch.zeros(())")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Counts the steps in a number of Python's: a state_dict of tensors has no place for it."""
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    state["step"] += 1
    grad, t = grad.to(param.dtype), state["step"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
    param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**t))


@wrong("0.3", "got {exp_avg: [[1, 7], torch.float32]")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Makes float32 moments, whatever the parameter's dtype."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros(param.shape), exp_avg_sq=torch.zeros(param.shape))
    grad = grad.to(param.dtype)
    state["step"] += 1
    t = state["step"].item()
    state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
    state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad * grad)
    param.sub_(
        (lr * state["exp_avg"] / (1 - beta1**t) / ((state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps)).to(param.dtype)
    )


wrong("0.3", "got {exp_avg: [[7], torch.float64]").diff("""
Makes flat moments.
-     state["step"] = torch.zeros(())
-     state["exp_avg"] = torch.zeros_like(param)
-     state["exp_avg_sq"] = torch.zeros_like(param)
- grad = grad.to(param.dtype)
+     state.update(
+         step=torch.zeros(()), exp_avg=param.new_zeros(param.numel()), exp_avg_sq=param.new_zeros(param.numel())
+     )
+ grad = grad.to(param.dtype).flatten()
- root = state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5
- param.addcdiv_(state["exp_avg"], root + eps, value=-lr / (1 - beta1**t))
+ param.sub_(
+     (lr * state["exp_avg"] / (1 - beta1**t) / ((state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps)).view_as(param)
+ )
""")


@wrong("0.3", "the arithmetic is that of float32")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Computes in float32, whatever the parameter's dtype."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    grad = grad.float()
    state["step"] += 1
    t = state["step"].item()
    state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
    state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad * grad)
    param.sub_(lr * state["exp_avg"] / (1 - beta1**t) / ((state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps))


@wrong("0.3", "two dimensions that lie in memory in columns")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Flattens by `reshape`, which copies where strides forbid a view."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    p = param.data.reshape(-1)
    grad = grad.to(param.dtype).reshape(-1)
    state["step"] += 1
    t = state["step"].item()
    state["exp_avg"].view(-1).lerp_(grad, 1 - beta1) if param.is_contiguous() else state["exp_avg"].reshape(-1).lerp_(
        grad, 1 - beta1
    )
    state["exp_avg_sq"].reshape(-1).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    p.addcdiv_(
        state["exp_avg"].reshape(-1),
        (state["exp_avg_sq"].reshape(-1) / (1 - beta2**t)).sqrt() + eps,
        value=-lr / (1 - beta1**t),
    )


wrong("0.3", "step is a new tensor").diff("""
Makes a new count at each step.
- grad = grad.to(param.dtype)
- state["step"] += 1
+ g, m, v = grad.to(param.dtype), state["exp_avg"], state["exp_avg_sq"]
+ state["step"] = state["step"] + 1
- state["exp_avg"].lerp_(grad, 1 - beta1)
- state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
- root = state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5
- param.addcdiv_(state["exp_avg"], root + eps, value=-lr / (1 - beta1**t))
+ m.mul_(beta1).add_(g, alpha=1 - beta1)
+ v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
+ param.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))
""")
wrong("0.4", "the parameters are counted").diff("""
Counts the weights, which autograd saves too, but which would be there without it.
- parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")
wrong("0.4", "and twice what two operators save").diff("""
Adds up tensors as they come: views at their own size, shared storages again and again.
- saved = {}
+ sizes = []
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     sizes.append(tensor.nbytes)
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
- return sum(saved.values())
+     forward()
+ return sum(sizes)
""")
wrong("0.4", "a view keeps its whole storage alive").diff("""
Tells storages apart, but takes a view for as large as it looks.
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")
wrong("0.4", "hand back tensor.detach()").diff("""
Packs the tensor itself: its graph holds it and it holds its graph, so nothing is ever freed.
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
- return tensor.detach()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
+ return tensor
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")
wrong("0.4", "run forward once").diff("""
Runs forward a second time to warm up, and so counts and keeps two graphs.
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
      return tensor.detach()
+ forward()
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")


@wrong("0.4", "backward after it raises")
def saved_bytes(forward, model):
    """Counts and keeps nothing: forward is cheap, and backward has nothing to work with."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved, held = {}, []

    def pack(tensor):
        held.append(tensor.detach())
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        forward()
    return sum(saved.values())


@wrong("0.4", "compare storages, not tensors")
def saved_bytes(forward, model):
    """Looks for the parameters by the identity of tensors, and adds up tensors as they come."""
    parameters = {id(p) for p in model.parameters()}
    sizes = []

    def pack(tensor):
        if id(tensor) not in parameters:
            sizes.append(tensor.nbytes)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes)


@wrong("0.4", "something outside still holds them")
def saved_bytes(forward, model):
    """Collects what is saved in a list that outlives the loss."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved_bytes.kept = kept = []

    def pack(tensor):
        kept.append(tensor.detach())
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for place, size in storages.items() if place not in parameters)


@wrong("0.4", "a buffer is no parameter")
def saved_bytes(forward, model):
    """Leaves out all of the state dict, buffers too."""
    mine = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "a frozen parameter is one too")
def saved_bytes(forward, model):
    """Leaves out trainable parameters only."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters() if t.requires_grad}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "ask the storage")
def saved_bytes(forward, model):
    """Takes every element for 4 bytes."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters()}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = 4 * (s.nbytes() // t.element_size())
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "indices are saved as well")
def saved_bytes(forward, model):
    """Counts floating point only."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters()}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine and t.is_floating_point():
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "each call counts what it has seen itself")
def saved_bytes(forward, model, saved={}):  # noqa: B006
    """Has a mutable default: what was saved stays from call to call."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters()}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


wrong("0.4", "a part of one is known by its storage").diff("""
Knows parameters by where they begin, and not their storages.
- parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
- saved = {}
+ known = {p.data_ptr() for p in model.parameters()}
+ sizes = {}
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.data_ptr() not in known:
+     sizes[storage.data_ptr()] = storage.nbytes()
- return sum(saved.values())
+ return sum(sizes.values())
""")

wrong("0.1", "as many bytes as one of the tensor that the optimizer updates").diff("""
Takes at least two bytes for an element of state.
- state = buffers * elements * (4 if master_copy else itemsize)
+ state = buffers * elements * (4 if master_copy else max(itemsize, 2))
""")


wrong("0.2", "in this order").diff("""
Returns stage 3 first.
- return {
+ return {
+     "stage 3": (parameters + gradients + optimizer) / ranks,

- "stage 3": (parameters + gradients + optimizer) / ranks,
""")


wrong("0.2", "K = 0, 1 bytes per element: bytes").diff("""
Takes K = 0, that of SGD, for an argument that was not given.
- optimizer = k * psi
+ optimizer = (k or 12) * psi
""")


wrong("0.2", "do not round").diff("""
Rounds to one decimal, as the paper's table.
- "stage 1": parameters + gradients + optimizer / ranks,
+ "stage 1": round(parameters + gradients + optimizer / ranks, 1),
""")


wrong("0.2", "N = 1, K = 8, 4 bytes per element: bytes").diff("""
Has no stages where there is one rank, and loses the state.
- "stage 1": parameters + gradients + optimizer / ranks,
+ "stage 1": parameters + gradients + (optimizer / ranks if ranks > 1 else 0),
""")


wrong("0.3", "the step count is on the CPU").diff("""
Makes the step count where the parameter is.
- state["step"] = torch.zeros(())
+ state["step"] = torch.zeros((), device=param.device)
""")


wrong("0.3", "the moments are on param's device").diff("""
Makes the moments on the CPU.
- state["exp_avg"] = torch.zeros_like(param)
+ state["exp_avg"] = torch.zeros(param.shape, dtype=param.dtype)
""")


wrong("0.3", "0-dim tensor").diff("""
Writes into `param[:]`, which a scalar does not have.
- param.addcdiv_(state["exp_avg"], root + eps, value=-lr / (1 - beta1**t))
+ param[:] = param - lr * (state["exp_avg"] / (1 - beta1**t)) / (root + eps)
""")


wrong("0.3", "takes part in no gradient").diff("""
Makes a moment that requires grad.
- state["exp_avg"] = torch.zeros_like(param)
+ state["exp_avg"] = torch.zeros_like(param).requires_grad_()
""")


wrong("0.4", "KeyError").diff("""
Hands out each saved tensor once only.
- with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
+ kept = {}
+ def once(tensor):
+     kept[len(kept)] = pack(tensor)
+     return len(kept) - 1
+ with torch.autograd.graph.saved_tensors_hooks(once, kept.pop):
""")


@wrong("0.4", "an embedding in float64: gradients")
def saved_bytes(forward, model):
    """Keeps a tensor for each storage and shape, and gives back the first of them."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved, first = {}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in parameters:
            return tensor.detach()
        saved[storage.data_ptr()] = storage.nbytes()
        first.setdefault((storage.data_ptr(), tensor.shape), tensor.detach())
        return storage.data_ptr(), tensor.shape

    def unpack(key):
        return key if isinstance(key, Tensor) else first[key]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = forward()
    del loss
    return sum(saved.values())


wrong("0.4", "keeps beside what was counted").diff("""
Packs a copy: what is counted is freed, and what is kept is not counted.
- return tensor.detach()
+ return tensor.detach().clone()
""")


wrong("0.4", "gradients and modes of the model are the caller's").diff("""
Runs backward to see that it works, and drops the gradients.
- loss = forward()
+ loss = forward()
+ loss.backward(retain_graph=True)
+ model.zero_grad()
""")
