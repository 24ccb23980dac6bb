"""Wrong answers to exercise 4.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("4.4", "the tied parameter once per place")
def place_views(module, flatten):
    """Flattens a tied parameter at each of its places."""
    places = [
        (child, attribute, f"{prefix}.{attribute}".lstrip("."))
        for prefix, child in module.named_modules()
        for attribute, p in child._parameters.items()
        if p is not None
    ]
    views = flatten([child._parameters[attribute] for child, attribute, _ in places])
    for view, (child, attribute, _) in zip(views, places, strict=True):
        del child._parameters[attribute]
        setattr(child, attribute, view)
    return [[name] for _, _, name in places]


@wrong("4.4", "this place was forgotten")
def place_views(module, flatten):
    """Knows one place of each parameter, as `named_parameters` tells it."""
    named = list(module.named_parameters())
    for view, (name, _) in zip(flatten([p for _, p in named]), named, strict=True):
        path, _, attribute = name.rpartition(".")
        child = module.get_submodule(path)
        del child._parameters[attribute]
        setattr(child, attribute, view)
    return [[name] for name, _ in named]


wrong("4.4", "parameters of equal values taken for one").diff("""
Finds ties by comparing values: at the start all norms are equal.
- places = {}
+ found = []
-             name = f"{prefix}.{attribute}" if prefix else attribute
-             places.setdefault(p, []).append((child, attribute, name))
- for view, users in zip(flatten(list(places)), places.values(), strict=True):
+             users = next((users for q, users in found if q.shape == p.shape and torch.equal(q, p)), None)
+             if users is None:
+                 found.append((p, users := []))
+             users.append((child, attribute, f"{prefix}.{attribute}".lstrip(".")))
+ for view, (_, users) in zip(flatten([p for p, _ in found]), found, strict=True):
- return [[name for _, _, name in users] for users in places.values()]
+ return [[name for _, _, name in users] for _, users in found]
""")
wrong("4.4", "its gradient stays in it and never reaches the buffer").diff("""
Registers each view as a Parameter, a leaf of its own.
- name = f"{prefix}.{attribute}" if prefix else attribute
- places.setdefault(p, []).append((child, attribute, name))
+ places.setdefault(p, []).append((child, attribute, f"{prefix}.{attribute}".lstrip(".")))
- del child._parameters[attribute]
- setattr(child, attribute, view)
+ setattr(child, attribute, nn.Parameter(view))
""")
wrong("4.4", "a copy of the view").diff("""
Places copies.
- name = f"{prefix}.{attribute}" if prefix else attribute
- places.setdefault(p, []).append((child, attribute, name))
+ places.setdefault(p, []).append((child, attribute, f"{prefix}.{attribute}".lstrip(".")))
- setattr(child, attribute, view)
+ setattr(child, attribute, view.clone())
""")
wrong("4.4", "a detached view").diff("""
Detaches the views, as for `p.data`.
- name = f"{prefix}.{attribute}" if prefix else attribute
- places.setdefault(p, []).append((child, attribute, name))
+ places.setdefault(p, []).append((child, attribute, f"{prefix}.{attribute}".lstrip(".")))
- setattr(child, attribute, view)
+ setattr(child, attribute, view.detach())
""")
wrong("4.4", "the root's own Parameter has no prefix").diff("""
Puts a dot before the names of the root's own Parameters.
- name = f"{prefix}.{attribute}" if prefix else attribute
- places.setdefault(p, []).append((child, attribute, name))
+ places.setdefault(p, []).append((child, attribute, f"{prefix}.{attribute}"))
""")


@wrong("4.4", "a module reached by two paths is one place")
def place_views(module, flatten):
    """Takes every path to a parameter for a place."""
    places = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        places.setdefault(p, []).append(name)
    for view, names in zip(flatten(list(places)), places.values(), strict=True):
        for name in names:
            path, _, attribute = name.rpartition(".")
            child = module.get_submodule(path)
            child._parameters.pop(attribute, None)
            setattr(child, attribute, view)
    return list(places.values())


wrong("4.4", "a module may have None for a parameter").diff("""
Takes the None of a layer without a bias for a parameter.
- if p is not None:
-     name = f"{prefix}.{attribute}" if prefix else attribute
-     places.setdefault(p, []).append((child, attribute, name))
+ places.setdefault(p, []).append((child, attribute, f"{prefix}.{attribute}".lstrip(".")))
""")


@wrong("4.4", "whatever its depth, and every parameter, trained or not")
def place_views(module, flatten):
    """Leaves frozen parameters where they are."""
    places = {}
    for prefix, child in module.named_modules():
        for a, p in child._parameters.items():
            if p is not None and p.requires_grad:
                places.setdefault(p, []).append((child, a, f"{prefix}.{a}" if prefix else a))
    for view, users in zip(flatten(list(places)), places.values(), strict=True):
        for child, a, _ in users:
            del child._parameters[a]
            setattr(child, a, view)
    return [[n for _, _, n in users] for users in places.values()]


@wrong("4.4", "a buffer is no parameter")
def place_views(module, flatten):
    """Takes the buffers away too."""
    places = {}
    for prefix, child in module.named_modules():
        for a, p in child._parameters.items():
            if p is not None:
                places.setdefault(p, []).append((child, a, f"{prefix}.{a}" if prefix else a))
        child._buffers.clear()
    for view, users in zip(flatten(list(places)), places.values(), strict=True):
        for child, a, _ in users:
            del child._parameters[a]
            setattr(child, a, view)
    return [[n for _, _, n in users] for users in places.values()]


@wrong("4.4", "though they are in one module")
def place_views(module, flatten):
    """Takes one name of a Parameter in each module."""
    params = list(module.parameters())
    views = flatten(params)
    index = {p: i for i, p in enumerate(params)}
    names = [[] for _ in params]
    for prefix, m in module.named_modules():
        seen = set()
        for n, p in list(m._parameters.items()):
            if p is None:
                continue
            del m._parameters[n]
            setattr(m, n, views[index[p]])
            if index[p] not in seen:
                seen.add(index[p])
                names[index[p]].append(f"{prefix}.{n}" if prefix else n)
    return names


wrong("4.4", "known by what it is").diff("""
Knows a parameter by its address.
- places = {}
+ places, first = {}, {}

- places.setdefault(p, []).append((child, attribute, name))
+ places.setdefault(first.setdefault(p.data_ptr(), p), []).append((child, attribute, name))
""")
