"""Wrong answers to exercise 10a.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("10a.2", "without what units inside have taken").diff("""
Tells the policy all elements both times.
- if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
+ if policy(module=child, recurse=False, nonwrapped_numel=numel):
""")
wrong("10a.2", "is one unit under each of them").diff("""
Goes through `named_children`, which tells the first name of a module only.
- children = [(name, child) for name, child in parent._modules.items() if child is not None]
- return sum({child: replace(parent, name, child) for name, child in children}.values())
+ return sum(replace(parent, name, child) for name, child in list(parent.named_children()))
""")


@wrong("10a.2", "would be two units: remember what has become of each")
def wrap_where(module, policy, wrap):
    """Wraps a module once in each place."""
    total = 0
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        numel = sum(p.numel() for p in child.parameters())
        if policy(module=child, recurse=True, nonwrapped_numel=numel):
            taken = wrap_where(child, policy, wrap)
            if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                module._modules[name], taken = wrap(child), numel
            total += taken
    return total


wrong("10a.2", "is known only by asking").diff("""
Looks into everything without asking.
- numel = sum(p.numel() for p in child.parameters())
- wrapped, taken = child, 0
- if policy(module=child, recurse=True, nonwrapped_numel=numel):
-     taken = visit(child)
-     if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
-         wrapped, taken = wrap(child), numel
+ numel, taken = sum(p.numel() for p in child.parameters()), visit(child)
+ wrapped = child
+ if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
+     wrapped, taken = wrap(child), numel
""")
wrong("10a.2", "an outer unit takes what its inner ones should have").diff("""
Outermost first, and then in what has been wrapped.
- taken = visit(child)
- if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
+ if policy(module=child, recurse=False, nonwrapped_numel=numel):
      wrapped, taken = wrap(child), numel
+ inner = visit(child)
+ taken = max(taken, inner)
""")
wrong("10a.2", "the walk begins below it").diff("""
Asks about the outermost module as well.
- return visit(module)
+ numel = sum(p.numel() for p in module.parameters())
+ return visit(module) if policy(module=module, recurse=True, nonwrapped_numel=numel) else 0
""")
wrong("10a.2", "so nothing in it is looked at").diff("""
Asks, and looks into it whatever the answer.
- wrapped, taken = child, 0
- if policy(module=child, recurse=True, nonwrapped_numel=numel):
-     taken = visit(child)
-     if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
-         wrapped, taken = wrap(child), numel
+ wanted = policy(module=child, recurse=True, nonwrapped_numel=numel)
+ wrapped, taken = child, visit(child)
+ if wanted and policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
+     wrapped, taken = wrap(child), numel
""")
wrong("10a.2", "whether it became a unit or not").diff("""
Remembers units alone, and walks twice through a shared module that is none, the second time into its units.
- if child not in done:
-     numel = sum(p.numel() for p in child.parameters())
-     wrapped, taken = child, 0
-     if policy(module=child, recurse=True, nonwrapped_numel=numel):
-         taken = visit(child)
-         if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
-             wrapped, taken = wrap(child), numel
+ wrapped, taken = done.get(child) or ask(child)
+ if wrapped is not child:
-     setattr(parent, name, done[child][0])
-     return done[child][1]
+     setattr(parent, name, wrapped)
+     return taken
+ def ask(child):
+     numel = sum(p.numel() for p in child.parameters())
+     if not policy(module=child, recurse=True, nonwrapped_numel=numel):
+         return child, 0
+     taken = visit(child)
+     if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
+         return wrap(child), numel
+     return child, taken
""")
wrong("10a.2", "'NoneType' object has no attribute").diff("""
Takes every name for a module.
- children = [(name, child) for name, child in parent._modules.items() if child is not None]
+ children = [(name, child) for name, child in parent._modules.items()]
""")
wrong("10a.2", "counted before the walk goes down").diff("""
Counts when the units inside have their parameters already.
  taken = visit(child)
+ numel = sum(p.numel() for p in child.parameters())
""")
wrong("10a.2", "`parameters()` tells it once").diff("""
Adds up the modules, and counts a tied parameter in each.
- numel = sum(p.numel() for p in child.parameters())
+ numel = sum(p.numel() for m in child.modules() for p in m.parameters(recurse=False))
""")
wrong("10a.2", "what is frozen counts as well").diff("""
Leaves out what is not trained.
- numel = sum(p.numel() for p in child.parameters())
+ numel = sum(p.numel() for p in child.parameters() if p.requires_grad)
""")
wrong("10a.2", "there is no second question").diff("""
Does not look into it after a no, and asks all the same.
-     if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
-         wrapped, taken = wrap(child), numel
+ if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
+     wrapped, taken = wrap(child), numel
""")
wrong("10a.2", "is asked about like any other").diff("""
Passes over modules without parameters.
- if policy(module=child, recurse=True, nonwrapped_numel=numel):
+ if numel and policy(module=child, recurse=True, nonwrapped_numel=numel):
""")
wrong("10a.2", "name all three").diff("""
Calls the policy without names.
- if policy(module=child, recurse=True, nonwrapped_numel=numel):
+ if policy(child, True, numel):
- if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
+ if policy(child, False, numel - taken):
""")
wrong("10a.2", "another call begins anew").diff("""
Remembers modules for ever.
- done = {}
+ done = wrap_where.__dict__.setdefault("done", {})
""")
wrong("10a.2", "whatever their dtype").diff("""
Counts four bytes as an element.
- numel = sum(p.numel() for p in child.parameters())
+ numel = sum(p.nbytes // 4 for p in child.parameters())
""")
wrong("10a.2", "it is a unit all the same").diff("""
Tells a unit by its being another module than before.
- wrapped, taken = wrap(child), numel
+ wrapped = wrap(child)
+ taken = taken if wrapped is child else numel
""")
