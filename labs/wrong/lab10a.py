"""Wrong answers to lab 10a, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 10a.1

wrong("10a.1", "`least` elements are enough").diff("""
More than, where at least is meant.
- return nonwrapped_numel >= least and not isinstance(module, spared)
+ return nonwrapped_numel > least and not isinstance(module, spared)
""")
wrong("10a.1", "counts those of inner units, too").diff("""
Counts for itself, so that every module around a unit becomes one as well.
- return nonwrapped_numel >= least and not isinstance(module, spared)
+ numel = sum(p.numel() for p in module.parameters())
+ return numel >= least and not isinstance(module, spared)
""")


@wrong("10a.1", "so a unit of it would never be gathered")
def by_size(module, recurse, nonwrapped_numel, least):
    """Makes units of containers."""
    return nonwrapped_numel >= least and not (recurse and isinstance(module, nn.MultiheadAttention))


wrong("10a.1", "what is in a container may well be a unit").diff("""
Spares the containers from both questions.
- spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
+ spared = (nn.ModuleList, nn.ModuleDict) + ((nn.MultiheadAttention,) if recurse else ())
""")


@wrong("10a.1", "uses its children's weights without calling them")
def by_size(module, recurse, nonwrapped_numel, least):
    """Knows nothing of attention."""
    return nonwrapped_numel >= least and (recurse or not isinstance(module, (nn.ModuleList, nn.ModuleDict)))


@wrong("10a.1", "only what is in it cannot")
def by_size(module, recurse, nonwrapped_numel, least):
    """Spares the attention altogether."""
    if isinstance(module, nn.MultiheadAttention):
        return False
    return nonwrapped_numel >= least and (recurse or not isinstance(module, (nn.ModuleList, nn.ModuleDict)))


@wrong("10a.1", "no unit is ever found in what nobody looks into")
def by_size(module, recurse, nonwrapped_numel, least):
    """Answers the second question only."""
    return not recurse and nonwrapped_numel >= least and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


wrong("10a.1", "too few elements are left for a unit").diff("""
Takes `least` for bytes.
- return nonwrapped_numel >= least and not isinstance(module, spared)
+ wanted = least if recurse else max(2, least // 4)
+ return nonwrapped_numel >= wanted and not isinstance(module, spared)
""")
wrong("10a.1", "is of that class too").diff("""
Compares types, so that a subclass is not spared.
- return nonwrapped_numel >= least and not isinstance(module, spared)
+ return nonwrapped_numel >= least and type(module) not in spared
""")
wrong("10a.1", "it is called like any other module").diff("""
Takes an nn.Sequential for a container that nobody calls.
- spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
+ spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict, nn.Sequential)
""")
wrong("10a.1", "the number comes first").diff("""
Looks at the class first.
- spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
- return nonwrapped_numel >= least and not isinstance(module, spared)
+ if isinstance(module, nn.MultiheadAttention):
+     return not recurse
+ if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
+     return recurse
+ return nonwrapped_numel >= least
""")

# 10a.2

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

# 10a.3

wrong("10a.3", "and is reset once").diff("""
Resets a module for each of its parameters.
- modules = {}

-         modules[place.module] = None
- for module in modules:
-     module.reset_parameters()  # type: ignore[operator]
+ for places in params.values():
+     for place in places:
+         place.module.reset_parameters()
""")
wrong("10a.3", "is each module's own: modules that are places of `params`").diff("""
Goes down into the children, which are another unit's.
- modules[place.module] = None
+ modules |= dict.fromkeys(place.module.modules())
""")
wrong("10a.3", "unwritten memory has values like any other").diff("""
Trusts every `reset_parameters`.
- shown = nn.Parameter(view.fill_(torch.nan))
+ shown = nn.Parameter(view)
- if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
""")
wrong("10a.3", "the modules keep Parameters of the buffer").diff("""
Leaves the views in the modules.
- for p, places in params.items():
-     for place in places:
-         place.module._parameters[place.attribute] = p
""")
wrong("10a.3", "are a second unit in memory").diff("""
Lets the modules have memory of their own, and copies.
- modules = {}
+ modules, made = {}, []
- shown = nn.Parameter(view.fill_(torch.nan))
+ view.fill_(torch.nan)
+ made.append(nn.Parameter(torch.full(view.shape, torch.nan)))
- place.module._parameters[place.attribute] = shown
+ place.module._parameters[place.attribute] = made[-1]
      module.reset_parameters()  # type: ignore[operator]
+ for view, p in zip(views, made, strict=True):
+     view.copy_(p)
""")
wrong("10a.3", "has a bias of its own to initialize").diff("""
Knows the first place of a tied weight, and skips the modules of the others.
- modules = {}
+ modules, tied = {}, {place.module for places in params.values() for place in places[1:]}
- shown = nn.Parameter(view.fill_(torch.nan))
+ shown = nn.Parameter(view.zero_())
- module.reset_parameters()  # type: ignore[operator]
+ if module not in tied:
+     module.reset_parameters()
- if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
""")


@wrong("10a.3", "writes to the Parameter that it finds in the module")
def fill_from_meta(views, params):
    """Resets on meta, where writing does nothing."""
    modules = {place.module: None for places in params.values() for place in places}
    for module in modules:
        module.reset_parameters()


wrong("10a.3", "values are drawn from one generator").diff("""
Resets in the order of a set of names.
- for module in modules:
+ for module in reversed(modules):
""")
wrong("10a.3", "whether any is left").diff("""
Looks for parameters of which nothing was written.
- if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
+ if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().all()]:
""")
wrong("10a.3", "what is written may be zero").diff("""
Takes zero for the sign of what was not written.
- shown = nn.Parameter(view.fill_(torch.nan))
+ shown = nn.Parameter(view.fill_(0.0))
- if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
+ if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if (view == 0).all()]:
""")
wrong("10a.3", "all of them, not the first alone").diff("""
Names one of those that were not written.
- raise RuntimeError(f"nothing has initialized {', '.join(left)}")
+ raise RuntimeError(f"nothing has initialized {left[0]}")
""")
wrong("10a.3", "was reset in other memory").diff("""
Gives each module memory before its reset, and so takes the view from it.
  for module in modules:
+     module.to_empty(device=views[0].device, recurse=False)
""")


@wrong("10a.3", "is a place of it, too, and writes last")
def fill_from_meta(views, params):
    """Resets no module that has but second places."""
    for v, places in zip(views, params.values(), strict=False):
        v.fill_(torch.nan)
        new = nn.Parameter(v)
        for place in places:
            place.module._parameters[place.attribute] = new
    firsts = {places[0].module for places in params.values()}
    for m in dict.fromkeys(place.module for places in params.values() for place in places):
        if m in firsts:
            m.reset_parameters()
    bad = [places[0].name for v, places in zip(views, params.values(), strict=False) if v.isnan().any()]
    if bad:
        raise RuntimeError(", ".join(bad))
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p


wrong("10a.3", "a cast is a copy").diff("""
Initializes in float32.
- shown = nn.Parameter(view.fill_(torch.nan))
+ shown = nn.Parameter(view.fill_(torch.nan).float())
""")
wrong("10a.3", "draws other numbers").diff("""
Resets once more what has left NaN.
- for p, places in params.items():
-     for place in places:
-         place.module._parameters[place.attribute] = p
+ for module in modules:
+     if any(p is not None and p.isnan().any() for p in module._parameters.values()):
+         module.reset_parameters()
+ for p, places in params.items():
+     for place in places:
+         place.module._parameters[place.attribute] = p
""")
wrong("10a.3", "expected RuntimeError, got ValueError").diff("""
Raises another error.
- raise RuntimeError(f"nothing has initialized {', '.join(left)}")
+ raise ValueError(f"nothing has initialized {', '.join(left)}")
""")
wrong("10a.3", "may tell parameters from other tensors").diff("""
Shows the modules the views themselves.
- shown = nn.Parameter(view.fill_(torch.nan))
+ shown = view.fill_(torch.nan)
""")

# 10a.4

wrong("10a.4", "goes down into the children unless `recurse=False`").diff("""
Gives the whole subtree memory, and takes away what the children had.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
+ if not own:
- if any(t.is_meta for t in own(module).values()):
-     module.to_empty(device=where, recurse=False)
-     for t in own(module).values():
-         t.fill_(torch.nan)
+ if any(t.is_meta for t in own):
+     module.to_empty(device=where)
+     for t in (*module._parameters.values(), *module._buffers.values()):
+         if t is not None:
+             t.fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
""")
wrong("10a.4", "the same seed for every module").diff("""
Seeds, and forgets the name.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
-     for t in own(module).values():
-         t.fill_(torch.nan)
- torch.manual_seed(seed + crc32(names[module].encode()))
+     for k in own:
+         getattr(module, k).fill_(torch.nan)
+ torch.manual_seed(seed)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "differs from process to process").diff("""
Python's hash of a string has a salt.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
-     for t in own(module).values():
-         t.fill_(torch.nan)
- torch.manual_seed(seed + crc32(names[module].encode()))
+     for k in own:
+         getattr(module, k).fill_(torch.nan)
+ torch.manual_seed(seed + hash(names[module]) % 2**32)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "nothing of its own is none of its business").diff("""
Resets containers as well.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
-     return
- if any(t.is_meta for t in own(module).values()):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if any(t.is_meta for t in own.values()):
- for t in own(module).values():
-     t.fill_(torch.nan)
+ for k in own:
+     getattr(module, k).fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "gives memory with any values in it").diff("""
Does not look whether everything was written.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
- for t in own(module).values():
-     t.fill_(torch.nan)

- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
""")
wrong("10a.4", "whether on meta or not").diff("""
Leaves a module alone that has values, so that an eager model keeps others.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not any(t.is_meta for t in own.values()):
- if any(t.is_meta for t in own(module).values()):
-     module.to_empty(device=where, recurse=False)
-     for t in own(module).values():
-         t.fill_(torch.nan)
+ module.to_empty(device=where, recurse=False)
+ for k in own:
+     getattr(module, k).fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")


@wrong("10a.4", "it raises: KeyError")
def initializer(model, reset, where, seed):
    """Asks for the names when the model has been wrapped already."""

    @torch.no_grad()
    def initialize(module):
        names = {each: name for name, each in model.named_modules() if "." not in name}
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not own:
            return
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)

    return initialize


wrong("10a.4", "is nothing to differentiate").diff("""
Lets autograd watch the initialization.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}
- @torch.no_grad()

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
- for t in own(module).values():
-     t.fill_(torch.nan)
+ for k in own:
+     getattr(module, k).data.fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "has a buffer and no parameters is initialized too").diff("""
Returns early when there is no parameter.
- if not own(module):
+ if not any(p is not None for p in module._parameters.values()):
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "RoPE's frequencies are one").diff("""
Looks for NaN in parameters alone.
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [
+     f"{names[module]}.{name}"
+     for name, t in own(module).items()
+     if name in module._parameters and t.isnan().any()
+ ]:
""")
wrong("10a.4", "whether any is left").diff("""
Looks for tensors of which nothing was written.
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().all()]:
""")
wrong("10a.4", "all that is not written").diff("""
Names one of those that were not written.
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
+     raise RuntimeError(f"nothing has initialized {left[0]}")
""")
wrong("10a.4", "if any of them is on meta").diff("""
Gives memory only when everything is on meta.
- if any(t.is_meta for t in own(module).values()):
+ if all(t.is_meta for t in own(module).values()):
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "a module in several places has the first").diff("""
Has the last name of a module in several places.
- names = {module: name for name, module in model.named_modules()}
+ names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "wrapping has changed it").diff("""
Asks for the name when the tree is another one already.
      return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ def now(module):
+     return next(name for name, each in model.named_modules() if each is module)
- torch.manual_seed(seed + crc32(names[module].encode()))
+ torch.manual_seed(seed + crc32(now(module).encode()))
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "depends on their order").diff("""
Counts calls in place of naming modules.
      return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ calls = []
- torch.manual_seed(seed + crc32(names[module].encode()))
+ calls.append(module)
+ torch.manual_seed(seed + len(calls))
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "the class is no name").diff("""
Seeds by class.
- torch.manual_seed(seed + crc32(names[module].encode()))
+ torch.manual_seed(seed + crc32(type(module).__name__.encode()))
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "`device=where`").diff("""
Gives memory on the CPU, wherever it should be.
- module.to_empty(device=where, recurse=False)
+ module.to_empty(device="cpu", recurse=False)
""")
wrong("10a.4", "memory and NaN are for what is on meta").diff("""
Fills a module with NaN that has values.
- if any(t.is_meta for t in own(module).values()):
-     module.to_empty(device=where, recurse=False)
-     for t in own(module).values():
-         t.fill_(torch.nan)
+ module.to_empty(device=where, recurse=False)
+ for t in own(module).values():
+     t.fill_(torch.nan)
""")
wrong("10a.4", "`set_grad_enabled` stays").diff("""
Switches gradients off for ever.
- @torch.no_grad()

  def initialize(module):
+     torch.set_grad_enabled(False)
""")
wrong("10a.4", "in the tensor's own dtype").diff("""
Replaces the memory by one in the default dtype.
- t.fill_(torch.nan)
+ t.data = torch.full(t.shape, torch.nan, device=where)
""")
wrong("10a.4", "writes no more than the first").diff("""
Resets once more what has left NaN.
- reset(module)
+ reset(module)
+ if any(t.isnan().any() for t in own(module).values()):
+     reset(module)
""")
wrong("10a.4", "also one that it has had before").diff("""
Initializes each module once.
- names = {module: name for name, module in model.named_modules()}
+ names, had = {module: name for name, module in model.named_modules()}, set()
- if not own(module):
+ if not own(module) or module in had:
-     return
- if any(t.is_meta for t in own(module).values()):
+     return
+ had.add(module)
+ if any(t.is_meta for t in own(module).values()):
""")
wrong("10a.4", "partly on meta: expected values, got a meta tensor").diff("""
Asks the first of a module's tensors whether it is on meta.
- if any(t.is_meta for t in own(module).values()):
+ if next(iter(own(module).values())).is_meta:
""")
wrong("10a.4", "with the name ''").diff("""
Takes a module without a name for one that is not in the model.
- if not own(module):
+ if not own(module) or not names[module]:
""")
wrong("10a.4", "expected RuntimeError, got ValueError").diff("""
Raises another error.
- raise RuntimeError(f"nothing has initialized {', '.join(left)}")
+ raise ValueError(f"nothing has initialized {', '.join(left)}")
""")

# 10a.5

wrong("10a.5", "it trains nothing").diff("""
Builds the optimizer where it stood in the DDP script.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ optimizer = AdamW(model.parameters(), lr=1e-3)
+ init = make_init(model)
+ return FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=init, device_id=where), optimizer
""")
wrong("10a.5", "all of it is one unit, whole from forward").diff("""
The wrap alone.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(model, param_init_fn=make_init(model), device_id=where)
""")


@wrong("10a.5", "was in memory: build it on meta")
def shard_script(build, blocks, make_init, where):
    """Builds and initializes the whole model first."""
    model = build().to(where)
    init = make_init(model)
    for module in reversed(list(model.modules())):
        init(module)
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


wrong("10a.5", "is not how this model is initialized").diff("""
Leaves the values to `reset_parameters`.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
""")
wrong("10a.5", "the tied head and the embedding both stay with the root").diff("""
Makes a unit of every layer, the tied head's among them.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ policy = {*blocks, nn.Linear, nn.Embedding}
+ sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, param_init_fn=make_init(model), device_id=where)
""")
wrong("10a.5", "which is DDP in FSDP's clothes").diff("""
Wraps without sharding.
  def shard_script(build, blocks, make_init, where):
+     from minifsdp.fsdp import ShardingStrategy
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(
+     model,
+     sharding_strategy=ShardingStrategy.NO_SHARD,
+     auto_wrap_policy=blocks,
+     param_init_fn=make_init(model),
+     device_id=where,
+ )
""")


@wrong("10a.5", "times that build was called")
def shard_script(build, blocks, make_init, where):
    """Builds a model for the names and another to train."""
    with torch.device("meta"):
        named, model = build(), build()
    init = make_init(named)
    del named
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3) if init else None


wrong("10a.5", "the wrapped model and its optimizer, in this order").diff("""
Returns them the other way round.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return AdamW(sharded.parameters(), lr=1e-3), sharded
""")
wrong("10a.5", "there is nothing to send").diff("""
Sends from rank 0 what every rank has computed.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(
+     model,
+     auto_wrap_policy=blocks,
+     param_init_fn=make_init(model),
+     device_id=where,
+     sync_module_states=True,
+ )
""")
wrong("10a.5", "parameters that stay whole from forward to backward").diff("""
Does not free parameters between forward and backward.
  def shard_script(build, blocks, make_init, where):
+     from minifsdp.fsdp import ShardingStrategy
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(
+     model,
+     sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
+     auto_wrap_policy=blocks,
+     param_init_fn=make_init(model),
+     device_id=where,
+ )
""")
wrong("10a.5", "an object of type FullyShardedDataParallel").diff("""
Leaves the optimizer to the caller.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
""")
wrong("10a.5", "leave the others as they are").diff("""
AdamW without weight decay.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return sharded, AdamW(sharded.parameters(), lr=1e-3, weight_decay=0.0)
""")
wrong("10a.5", "betas: [0.9, 0.95]").diff("""
AdamW with betas of its own.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return sharded, AdamW(sharded.parameters(), lr=1e-3, betas=(0.9, 0.95))
""")
wrong("10a.5", "`device_id=where`").diff("""
Says nothing of where to compute.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model))
""")
wrong("10a.5", "another one is another training").diff("""
Adam.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return sharded, torch.optim.Adam(sharded.parameters(), lr=1e-3)
""")
wrong("10a.5", "wrapping casts nothing").diff("""
Has every model in float32.
- model = build()
+ model = build().float()
""")
wrong("10a.5", "`eval` switches dropout off").diff("""
Leaves the model in evaluation mode.
- model = build()
+ model = build().eval()
""")
wrong("10a.5", "is for `build` alone").diff("""
Leaves the default device on meta.
- with torch.device("meta"):
-     model = build()
+ torch.set_default_device("meta")
+ model = build()
""")
