"""Wrong answers to exercise 10a.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
