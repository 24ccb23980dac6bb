"""Wrong answers to exercise 5.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
