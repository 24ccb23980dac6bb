"""Wrong answers to exercise 9.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("9.4", "each rank decides alone")
def step_together(optimizer, scale, group):
    """Looks at its own shards only."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if not all(grad.isfinite().all() for grad in grads):
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "a rank waits in a collective")
def step_together(optimizer, scale, group):
    """Only the rank that has found something says so."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.zeros(1)
    if not all(grad.isfinite().all() for grad in grads):
        found.fill_(1)
        comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "a NaN is no infinity")
def step_together(optimizer, scale, group):
    """Looks for infinities and lets NaNs pass."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(any(grad.isinf().any() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "the step made all the same")
def step_together(optimizer, scale, group):
    """Halves the scale and steps."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale / 2 if found.item() else scale


@wrong("9.4", "the next step will overflow again")
def step_together(optimizer, scale, group):
    """Skips, and leaves the scale."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if not found.item():
        for grad in grads:
            grad.div_(scale)
        optimizer.step()
    return scale


wrong("9.4", "are still scaled").diff("""
Forgets to unscale.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
- found = torch.zeros(1, device=params[0].device)
- for p in params:
-     if p.grad is not None:
-         p.grad.div_(scale)
-         found += (~p.grad.isfinite()).any()
+ grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
+ found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
""")


@wrong("9.4", "one rank's finding is everybody's")
def step_together(optimizer, scale, group):
    """Skips only if all ranks have found something."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.SUM).wait()
    if found.item() == group.size():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "only the verdict is shared")
def step_together(optimizer, scale, group):
    """All-reduces the gradients, which are of different elements."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    bad = False
    for grad in grads:
        whole = torch.zeros(64)
        whole[: grad.numel()] = grad
        comm.all_reduce(whole, group, comm.MAX).wait()
        bad |= not whole.isfinite().all()
        grad.div_(scale)
    if bad:
        return scale / 2
    optimizer.step()
    return scale


@wrong("9.4", "is no zero")
def step_together(optimizer, scale, group):
    """Takes zero for what has overflowed."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item() and group.rank() < group.size() - 1:
        return scale / 2
    for grad in grads:
        grad.div_(scale).nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    return scale / 2 if found.item() else scale


@wrong("9.4", "without gradients there is nothing to find")
def step_together(optimizer, scale, group):
    """Leaves at once if there are no gradients."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if not grads:
        return scale
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "minus infinity is an overflow")
def step_together(optimizer, scale, group):
    """Compares with infinity."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(any((grad == torch.inf).any() or grad.isnan().any() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "can be several")
def step_together(optimizer, scale, group):
    """Looks for infinities in the first parameter group."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    first = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in first))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "those of the second parameter group")
def step_together(optimizer, scale, group):
    """Knows one parameter group only."""
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "one verdict for all gradients")
def step_together(optimizer, scale, group):
    """Communicates for every gradient."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.zeros(1)
    for grad in grads:
        bad = torch.tensor([float(not grad.isfinite().all())])
        comm.all_reduce(bad, group, comm.MAX).wait()
        found += bad
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "have a sum that is not")
def step_together(optimizer, scale, group):
    """Asks whether the sum is finite."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not sum((grad.sum() for grad in grads), torch.zeros(())).isfinite())])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "the world may have more")
def step_together(optimizer, scale, group):
    """Asks the world."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, comm.world(), comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "the number is this rank's own")
def step_together(optimizer, scale, group):
    """Does not wait for the verdict."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX)
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "MAX may lose a NaN")
def step_together(optimizer, scale, group):
    """Sends the largest gradient in place of a verdict."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.stack([torch.zeros(()), *(grad.abs().max() for grad in grads)]).max()[None]
    comm.all_reduce(found, group, comm.MAX).wait()
    if not found.isfinite():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "none forgotten")
def step_together(optimizer, scale, group):
    """Keeps what it finds in the last gradient only."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.zeros(1)
    for grad in grads:
        found.fill_(float(not grad.isfinite().all()))
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "momentum and weight decay")
def step_together(optimizer, scale, group):
    """Zeroes the gradients in place of skipping the step."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    for grad in grads:
        grad.zero_() if found.item() else grad.div_(scale)
    optimizer.step()
    return scale / 2 if found.item() else scale


wrong("9.4", "whole numbers end in a scale of 0").diff("""
Halves in whole numbers, down to 0.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- p.grad.div_(scale)

-     return scale / 2
+     return scale // 2
+ for p in params:
+     if p.grad is not None:
+         p.grad.div_(scale)
""")


@wrong("9.4", "made without the parameters' device")
def step_together(optimizer, scale, group):
    """Makes its number where torch makes it if nothing is said."""
    params = [p for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
    bad = any(not p.grad.isfinite().all() for p in params)
    found = torch.tensor([float(bad)])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for p in params:
        p.grad.div_(scale)
    optimizer.step()
    return scale


wrong("9.4", "a scale of 1: scale: expected 0.5, got 1").diff("""
Does not let the scale fall below 1.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- return scale / 2
+ return max(1.0, scale / 2)
""")
wrong("9.4", "divided by 1,024").diff("""
Knows the scale: 1024.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- p.grad.div_(scale)
+ p.grad.div_(1024)
""")


@wrong("9.4", "the largest magnitude that tells")
def step_together(optimizer, scale, group):
    """Looks at the largest value."""
    params = [p for each in optimizer.param_groups for p in each["params"]]
    gradients = [p.grad for p in params if p.grad is not None]
    worst = torch.zeros(1, device=params[0].device)
    for g in gradients:
        if g.isnan().any():
            worst.fill_(torch.inf)
        if g.numel():
            worst = torch.maximum(worst, g.max().float().reshape(1))
    comm.all_reduce(worst, group, comm.MAX).wait()
    if not worst.isfinite().all():
        return scale / 2
    for g in gradients:
        g.div_(scale)
    optimizer.step()
    return scale


wrong("9.4", "there is no lower limit here").diff("""
Does not let the scale fall below 0.5.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- return scale / 2
+ return max(0.5, scale / 2)
""")
wrong("9.4", "in its own dtype").diff("""
Looks for what has overflowed in float32, whatever the gradient is in.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- p.grad.div_(scale)
- found += (~p.grad.isfinite()).any()
+ found += (~p.grad.float().isfinite()).any()
+ p.grad.div_(scale)
""")


@wrong("9.4", "Adam's step hardly depends on their size")
def step_together(optimizer, scale, group):
    """Divides the learning rate, which for plain SGD is the same."""
    params = [p for each in optimizer.param_groups for p in each["params"]]
    found = torch.zeros(1, device=params[0].device)
    for p in params:
        if p.grad is not None:
            found += (~p.grad.isfinite()).any()
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for each in optimizer.param_groups:
        each["lr"] /= scale
    optimizer.step()
    for each in optimizer.param_groups:
        each["lr"] *= scale
    return scale


wrong("9.4", "gradients after the step: expected a tensor [21] float32, got None").diff("""
Drops the gradients after the step.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- optimizer.step()
+ optimizer.step()
+ optimizer.zero_grad()
""")
wrong("9.4", "a parameter without a gradient is not in the step").diff("""
Gives each parameter a gradient.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- if p.grad is not None:
-     p.grad.div_(scale)
-     found += (~p.grad.isfinite()).any()
+ if p.grad is None:
+     p.grad = torch.zeros_like(p)
+ p.grad.div_(scale)
+ found += (~p.grad.isfinite()).any()
""")
