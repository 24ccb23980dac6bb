"""Wrong answers to exercise 0.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
