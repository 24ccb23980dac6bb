"""Wrong answers to exercise 5.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
