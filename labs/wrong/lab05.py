"""Wrong answers to lab 05, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 5.1

wrong("5.1", "is not in .grad yet").diff("""
Hooks the gradient on its way to the parameter, before it is accumulated.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ done = []
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not done:
+     done.append(True)
+     Variable._execution_engine.queue_callback(lambda: (done.clear(), record("end of backward")))
- p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))
+ p.register_hook(lambda gradient, name=name: record(f"gradient of {name}"))
""")
wrong("5.1", "a lambda made in a loop sees the loop's last one").diff("""
Every hook speaks of the last parameter.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ done = []
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not done:
+     done.append(True)
+     Variable._execution_engine.queue_callback(lambda: (done.clear(), record("end of backward")))
- p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))
+ p.register_post_accumulate_grad_hook(lambda p: record(f"gradient of {name}"))
""")
wrong("5.1", "queue it once per backward").diff("""
Queues the callback for every output.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")

  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ Variable._execution_engine.queue_callback(lambda: record("end of backward"))
""")


@wrong("5.1", "says nothing of its parameters")
def watch(module, record):
    """Takes the module's backward hooks for its parameters' gradients."""

    def end():
        record("end of backward")

    def post_backward(module, grad_input, grad_output):
        record("gradients of all parameters")

    def pre_backward(module, grad_output):
        record("output gradient")
        Variable._execution_engine.queue_callback(end)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(lambda module, args, output: record("post-forward"))
    module.register_full_backward_pre_hook(pre_backward)
    module.register_full_backward_hook(post_backward)


@wrong("5.1", "is not the end of backward")
def watch(module, record):
    """Takes the module's last gradient for the end of backward."""
    left = []

    def on_gradient(name):
        record(f"gradient of {name}")
        left.remove(name)
        if not left:
            record("end of backward")

    def post_forward(module, args, output):
        record("post-forward")
        if output.requires_grad:
            left[:] = [name for name, _ in module.named_parameters()]
            output.register_hook(lambda gradient: record("output gradient"))

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post_forward)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: on_gradient(name))


wrong("5.1", "has to fall at its end").diff("""
Queues the callback in the first backward only.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ done = []
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not done:
+     done.append(True)
+     Variable._execution_engine.queue_callback(lambda: record("end of backward"))
""")
wrong("5.1", "each watched module has a state of its own").diff("""
Keeps its flag in a default argument, which all modules share.
- def watch(module, record):
-     queued = False
+ def watch(module, record, queued=[]):
- nonlocal queued
- queued = False
+ queued.clear()
  def on_output(gradient):
-     nonlocal queued

- queued = True
+ queued.append(True)
""")
wrong("5.1", "says nothing of a backward").diff("""
Takes training mode for a backward that follows.
  def watch(module, record):
-     queued = False
+     queued = []
- nonlocal queued
- queued = False
+ queued.clear()
  def on_output(gradient):
-     nonlocal queued

- queued = True
+ queued.append(True)
- if output.requires_grad:
+ if module.training and output.requires_grad:
""")


@wrong("5.1", "queue it at the first of its outputs' gradients")
def watch(module, record):
    """Counts outputs: the end is queued when the first call's output has its gradient."""
    calls = [0]

    def pre(module, args):
        record("pre-forward")

    def post_forward(module, args, output):
        record("post-forward")
        if output.requires_grad:
            number = calls[0]
            calls[0] += 1

            def on_output(gradient):
                record("output gradient")
                if number == 0:
                    calls[0] = 0
                    Variable._execution_engine.queue_callback(lambda: record("end of backward"))

            output.register_hook(on_output)

    module.register_forward_pre_hook(pre)
    module.register_forward_hook(post_forward)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))


wrong("5.1", "expected `end of backward`, got nothing more").diff("""
Resets its flag when a forward begins, not when backward ends: a forward called twice resets it in vain.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ state = {"queued": False}
+ def pre(module, args):
+     state["queued"] = False
+     record("pre-forward")
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not state["queued"]:
+     state["queued"] = True
+     Variable._execution_engine.queue_callback(lambda: record("end of backward"))
- module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
+ module.register_forward_pre_hook(pre)
""")


@wrong("5.1", "an output without a gradient cannot be hooked")
def watch(module, record):
    """Hooks outputs wherever gradients are enabled."""
    queued = [False]

    def over():
        queued[0] = False
        record("end of backward")

    def began(gradient):
        record("output gradient")
        if not queued[0]:
            queued[0] = True
            Variable._execution_engine.queue_callback(over)

    def post(module, args, output):
        record("post-forward")
        if torch.is_grad_enabled():
            output.register_hook(began)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))


wrong("5.1", "the output has no hook").diff("""
Makes the output's hook and registers it nowhere: neither its gradient nor the end is recorded.
- if output.requires_grad:
-     output.register_hook(on_output)
""")
wrong("5.1", "under torch.no_grad(), after `post-forward`").diff("""
Hooks every output, so that a forward under torch.no_grad() raises.
- if output.requires_grad:
-     output.register_hook(on_output)
+ output.register_hook(on_output)
""")


# 5.2

wrong("5.2", "only starts it").diff("""
Does not wait.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard.data, group)
""")


@wrong("5.2", "gathered into a fresh tensor")
def gather(flat, group):
    """Gathers into a new tensor; the views look at the old buffer."""
    flat.full = torch.empty(flat.shard.numel() * group.size())
    comm.all_gather(flat.full, flat.shard.data, group).wait()


wrong("5.2", "a version counter of its own").diff("""
Gathers into the buffer under autograd's eyes.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ flat.full.add_(0)
+ comm.all_gather(flat.full, flat.shard.data, group).wait()
""")


@wrong("5.2", "the unit is there twice")
def gather(flat, group):
    """Gathers beside the buffer and copies."""
    device.allocate(flat.full)
    gathered = torch.empty_like(flat.full)
    comm.all_gather(gathered, flat.shard.data, group).wait()
    flat.full.data.copy_(gathered)


wrong("5.2", "only 1/N of the unit").diff("""
Puts this rank's shard in its place and fetches nothing.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ flat.full.data.zero_()
+ flat.full.data.chunk(group.size())[group.rank()].copy_(flat.shard.data)
""")


@wrong("5.2", "sends twice the bytes")
def gather(flat, group):
    """An all-reduce of what is zero but for this rank's shard."""
    device.allocate(flat.full)
    flat.full.data.zero_()
    flat.full.data.chunk(group.size())[group.rank()].copy_(flat.shard.data)
    comm.all_reduce(flat.full.data, group).wait()


wrong("5.2", "hand both buffers over as `.data`").diff("""
Gathers from the Parameter, under autograd's eyes.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard, group).wait()
""")
wrong("5.2", "`device.allocate` first").diff("""
Gathers into a buffer that has no memory.
- device.allocate(flat.full)
""")
wrong("5.2", "`group` need not be the world").diff("""
From all ranks there are.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard.data, comm.world()).wait()
""")

# 5.3


@wrong("5.3", "nothing gives the memory back")
def free(flat):
    """Never frees: plain data parallelism with extra gathers."""


wrong("5.3", "dropping a name frees nothing").diff("""
Drops the name; the views keep the storage.
- device.free(flat.full)
+ del flat.full
""")
wrong("5.3", "another tensor under the same name").diff("""
Puts an empty tensor in its place.
- device.free(flat.full)
+ flat.full = torch.empty(0)
""")
wrong("5.3", "gives this one tensor another storage").diff("""
Swaps the tensor's data; the views keep the old storage.
- device.free(flat.full)
+ flat.full.data = torch.empty(0)
""")
wrong("5.3", "changes the tensor's shape and leaves the storage").diff("""
Resizes the tensor, not its storage.
- device.free(flat.full)
+ flat.full.resize_(0)
""")
wrong("5.3", "zeros take as much memory").diff("""
Overwrites the values.
- device.free(flat.full)
+ flat.full.data.zero_()
""")
wrong("5.3", "free `flat.full` alone").diff("""
Frees the shard as well.
  device.free(flat.full)
+ device.free(flat.shard)
""")

# 5.4


@wrong("5.4", "the ledger cannot see it")
def reduce_gradient(flat, gradient, group):
    """The right mean, in memory that nobody accounts for."""
    flat.padding_of(gradient).zero_()
    mean = torch.empty_like(flat.shard.data)
    comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
    device.free(gradient)
    flat.shard.grad = mean if flat.shard.grad is None else flat.shard.grad.add_(mean)


wrong("5.4", "add in place").diff("""
Adds out of place, into a tensor of torch's.
- flat.shard.grad.add_(mean)
+ flat.shard.grad = flat.shard.grad + mean
""")
wrong("5.4", "the sum over the ranks").diff("""
Sums, does not average.
- mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ total = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
+ comm.reduce_scatter(total, gradient, group).wait()
- flat.shard.grad = mean
+ flat.shard.grad = total
- flat.shard.grad.add_(mean)
- device.free(mean)
+ flat.shard.grad.add_(total)
+ device.free(total)
""")
wrong("5.4", "the padding has no gradient").diff("""
Reduces whatever lies in the padding.
- flat.padding_of(gradient).zero_()
""")


@wrong("5.4", "the second gradient has overwritten the first")
def reduce_gradient(flat, gradient, group):
    """Overwrites what an earlier backward has left."""
    flat.padding_of(gradient).zero_()
    flat.shard.grad = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
    comm.reduce_scatter(flat.shard.grad, gradient, group, comm.MEAN).wait()
    device.free(gradient)


wrong("5.4", "the output is unwritten until").diff("""
Does not wait.
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
- device.free(gradient)
+ comm.reduce_scatter(mean, gradient, group, comm.MEAN)
- device.free(mean)
""")
wrong("5.4", "twice those of a reduce-scatter").diff("""
All-reduces and keeps a part.
- mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ comm.all_reduce(gradient, group, comm.MEAN).wait()
+ mine = gradient.chunk(group.size())[group.rank()].clone()
- flat.shard.grad = mean
+ flat.shard.grad = mine
- flat.shard.grad.add_(mean)
- device.free(mean)
+ flat.shard.grad.add_(mine)
""")


@wrong("5.4", "this reduces the parameter")
def reduce_gradient(flat, gradient, group):
    """Averages the parameter and keeps this rank's own gradient."""
    flat.padding_of(gradient).zero_()
    comm.all_reduce(flat.shard.data, group, comm.MEAN).wait()
    flat.shard.grad = gradient.chunk(group.size())[group.rank()].clone()
    device.free(gradient)


wrong("5.4", "the unsharded gradient is still there").diff("""
Only drops the name of the unsharded gradient.
- device.free(gradient)
+ del gradient
- device.free(mean)
""")


@wrong("5.4", "what was reduced before is reduced again")
def reduce_gradient(flat, gradient, group):
    """Accumulates before the reduction, so that the first mean is averaged twice."""
    flat.padding_of(gradient).zero_()
    if flat.shard.grad is not None:
        gradient.chunk(group.size())[group.rank()].add_(flat.shard.grad)
        device.free(flat.shard.grad)
    mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
    comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
    device.free(gradient)
    flat.shard.grad = mean


wrong("5.4", "divided by 2, whatever").diff("""
Takes N for 2.
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ comm.reduce_scatter(mean, gradient, group).wait()
+ mean.div_(2)
""")
wrong("5.4", "which need not be float32").diff("""
Has its mean in float32, whatever the gradient is.
- mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
+ mean = device.empty(flat.shard.numel(), torch.float32, "gradients", gradient.device)
""")
wrong("5.4", "rank 1, the last 1 of `flat.shard.grad`").diff("""
Zeroes all of the padding's gradient after the reduction.
- flat.padding_of(gradient).zero_()

  comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ if group.rank() == group.size() - 1 and flat.padding:
+     mean[-flat.padding :] = 0
""")
wrong("5.4", "is right for any padding").diff("""
Zeroes everything where there is no padding.
- flat.padding_of(gradient).zero_()
+ k = flat.padding_of(gradient).numel()
+ gradient[-k:] = 0
""")
wrong("5.4", "every rank zeroes its own").diff("""
Clears the padding on the rank alone in whose shard it lies.
- flat.padding_of(gradient).zero_()
+ if group.rank() == group.size() - 1:
+     flat.padding_of(gradient).zero_()
""")
wrong("5.4", "`comm.world()` is about the world").diff("""
Over all ranks there are.
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ comm.reduce_scatter(mean, gradient, comm.world(), comm.MEAN).wait()
""")
wrong("5.4", "the second mean has been added: free its buffer").diff("""
Only drops the name of the second mean.
- device.free(mean)
""")

# 5.5

wrong("5.5", "free first").diff("""
Gather, compute, reduce-scatter, free, as the textbooks have it.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

  missing.update(unit.leaves)
- unit.free()

- module.register_forward_pre_hook(before_forward)
+         unit.free()
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")


@wrong("5.5", "every rank keeps the whole model, which is DDP")
def attach(module, unit):
    """Plain DDP passed off as FSDP: gathers once and keeps everything."""
    missing = set(unit.leaves)

    def after_gradient(leaf):
        unit.take_gradient(leaf)
        missing.discard(leaf)
        if not missing:
            missing.update(unit.leaves)
            unit.reduce_gradient()

    module.register_forward_pre_hook(lambda module, args: unit.gather())
    for leaf in unit.leaves:
        leaf.register_post_accumulate_grad_hook(after_gradient)


wrong("5.5", "freed after forward and not gathered again").diff("""
No gather before backward.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()
- def after_forward(module, args, output):
-     if output.requires_grad:
-         output.register_hook(before_backward)
-     if not (unit.is_root and output.requires_grad):
-         unit.free()
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- module.register_forward_pre_hook(before_forward)
+ def after_forward(module, args, output):
+     if not (unit.is_root and output.requires_grad):
+         unit.free()
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "the root's backward begins at once").diff("""
Treats the root like any other unit.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

-         output.register_hook(before_backward)
-     if not (unit.is_root and output.requires_grad):
-         unit.free()
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()
+         output.register_hook(lambda gradient: unit.gather())
+     unit.free()
- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")


@wrong("5.5", "a module's backward hook knows of its inputs alone")
def attach(module, unit):
    """Ends the unit in its module's backward hook, which misses gradients."""

    def after_forward(module, args, output):
        if not (unit.is_root and output.requires_grad):
            unit.free()

    def after_backward(module, grad_input, grad_output):
        unit.free()
        unit.reduce_gradient()

    module.register_forward_pre_hook(lambda module, args: unit.gather())
    module.register_forward_hook(after_forward)
    module.register_full_backward_pre_hook(lambda module, gradient: None if unit.whole else unit.gather())
    module.register_full_backward_hook(after_backward)
    for leaf in unit.leaves:
        leaf.register_post_accumulate_grad_hook(unit.take_gradient)


wrong("5.5", "freed before the last use").diff("""
Frees at the first of the unit's gradients.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

  unit.take_gradient(leaf)
+ unit.free()
  missing.update(unit.leaves)
- unit.free()

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "do not arrive in the order of the list").diff("""
Takes the first leaf of the list for the last to arrive.
- missing = set(unit.leaves)
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- missing.discard(leaf)
- if not missing:
-     missing.update(unit.leaves)
+ if leaf is unit.leaves[0]:
- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "gradients wait in their leaves").diff("""
Hands all gradients over when the last is there.
- missing = set(unit.leaves)
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- unit.take_gradient(leaf)
- missing.discard(leaf)
- if not missing:
-     missing.update(unit.leaves)
+ if all(each.grad is not None for each in unit.leaves):
+     for each in unit.leaves:
+         unit.take_gradient(each)
- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "no gradient was handed over").diff("""
Counts the gradients and leaves them where they are.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- unit.take_gradient(leaf)

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "reduced at every leaf").diff("""
A reduction per leaf.
- missing = set(unit.leaves)
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()
+ left = [len(unit.leaves)]
- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- missing.discard(leaf)
- if not missing:
-     missing.update(unit.leaves)
+ left[0] -= 1
+ if not left[0]:
+     left[0] = len(unit.leaves)
-         unit.reduce_gradient()
- module.register_forward_pre_hook(before_forward)
+     unit.reduce_gradient()
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "start the next one with all of them again").diff("""
Counts the leaves once, so that only the first step is reduced.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

-     missing.discard(leaf)
-     if not missing:
-         missing.update(unit.leaves)
-         unit.free()
-         unit.reduce_gradient()
- module.register_forward_pre_hook(before_forward)
+     if leaf in missing:
+         missing.remove(leaf)
+         if not missing:
+             unit.free()
+             unit.reduce_gradient()
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "unsharded gradients pile up").diff("""
Reduces everything when backward is over.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- output.register_hook(before_backward)
+ output.register_hook(lambda gradient: None if unit.whole else unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

-         unit.reduce_gradient()
- module.register_forward_pre_hook(before_forward)
+         Variable._execution_engine.queue_callback(unit.reduce_gradient)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "hook the gradient of the output, not of the input").diff("""
Gathers when the gradient of the input is there.
  def before_forward(module, args):
      if not unit.whole:
          unit.gather()
+     if args[0].requires_grad:
+         args[0].register_hook(lambda gradient: None if unit.whole else unit.gather())
- if output.requires_grad:
-     output.register_hook(before_backward)

- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

  missing.update(unit.leaves)
- unit.free()
""")
wrong("5.5", "which is SHARD_GRAD_OP").diff("""
Keeps the unit whole from forward to backward.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- if output.requires_grad:
-     output.register_hook(before_backward)
- if not (unit.is_root and output.requires_grad):
+ if not output.requires_grad:
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "nobody else will free what it gathered").diff("""
Leaves the root whole after an evaluation.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

-     output.register_hook(before_backward)
- if not (unit.is_root and output.requires_grad):
+     output.register_hook(lambda gradient: None if unit.whole else unit.gather())
+ if not unit.is_root:
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "says nothing of a backward").diff("""
Takes training mode for a backward that follows.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

-     output.register_hook(before_backward)
- if not (unit.is_root and output.requires_grad):
+     output.register_hook(lambda gradient: None if unit.whole else unit.gather())
+ if not (unit.is_root and module.training and torch.is_grad_enabled()):
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "gather it only if it is not unsharded yet").diff("""
Gathers before backward whatever is there already, but for the root.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- if output.requires_grad:
-     output.register_hook(before_backward)
+ if output.requires_grad and not unit.is_root:
+     output.register_hook(lambda gradient: unit.gather())
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "what an evaluation has set").diff("""
Keeps whether a backward follows from the last forward in training on: a flag that evaluation leaves behind.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()
+ state = {"backward": True}
- if output.requires_grad:
-     output.register_hook(before_backward)
- if not (unit.is_root and output.requires_grad):
+ if not output.requires_grad:
+     state["backward"] = False
+ else:
+     output.register_hook(lambda gradient: None if unit.whole else unit.gather())
+ if not (unit.is_root and state["backward"]):
- def before_backward(gradient):
-     if not unit.whole:
-         unit.gather()

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.5", "a second forward may come before").diff("""
Counts the leaves anew before each forward.
- def before_forward(module, args):
+ def before_forward(module, args):
+     missing.update(unit.leaves)

- if not missing:
-     missing.update(unit.leaves)
+ if not missing:
""")
wrong("5.5", "only where the output requires a gradient").diff("""
Expects a backward wherever gradients are enabled.
- if not (unit.is_root and output.requires_grad):
+ if not (unit.is_root and torch.is_grad_enabled()):
""")

# 5.6

wrong("5.6", "called again is unsharded already").diff("""
Gathers at every call.
- if not unit.whole:
-     unit.gather()
+ unit.gather()
""")

wrong("5.6", "which is FULL_SHARD").diff("""
Frees after forward all the same.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- if not output.requires_grad:
+ if output.requires_grad:
+     output.register_hook(lambda gradient: None if unit.whole else unit.gather())
+ if not (unit.is_root and output.requires_grad):
- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.6", "SHARD_GRAD_OP gathers once a step").diff("""
Gathers again before backward what is whole.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- if not output.requires_grad:
+ if output.requires_grad:
+     output.register_hook(lambda gradient: unit.gather())
+ else:
- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.6", "which is DDP").diff("""
Never frees: ZeRO-2 with a gather too many.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()
- def after_forward(module, args, output):
-     if not output.requires_grad:
-         unit.free()

  missing.update(unit.leaves)
- unit.free()

- module.register_forward_pre_hook(before_forward)
- module.register_forward_hook(after_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.6", "unsharded after backward").diff("""
Frees the root alone, and keeps the others for the next forward.
- unit.gather()
+ if not unit.whole:
+     unit.gather()
  missing.update(unit.leaves)
- unit.free()
+ if unit.is_root:
+     unit.free()
""")
wrong("5.6", "freed before the last use").diff("""
Frees when the gradient of the output is there, before anything was computed with it.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- if not output.requires_grad:
+ if output.requires_grad:
+     output.register_hook(lambda gradient: unit.free())
+ else:
  missing.update(unit.leaves)
- unit.free()

- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.6", "nobody else will free what it gathered").diff("""
Relies on a backward that does not come in evaluation.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()
- def after_forward(module, args, output):
-     if not output.requires_grad:
-         unit.free()

- module.register_forward_pre_hook(before_forward)
- module.register_forward_hook(after_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
wrong("5.6", "says nothing of a backward").diff("""
Takes training mode for a backward that follows.
- def before_forward(module, args):
-     if not unit.whole:
-         unit.gather()

- if not output.requires_grad:
+ if not (module.training and torch.is_grad_enabled()):
- module.register_forward_pre_hook(before_forward)
+ module.register_forward_pre_hook(lambda module, args: unit.gather())
""")
