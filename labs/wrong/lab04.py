"""Wrong answers to lab 04, each with words that its rejection must contain."""

import torch
from torch import nn

from minifsdp import device
from minifsdp.course.workshop.wrong import wrong


@wrong("4.1", "`chunk` does not pad")
def pad_and_chunk(flat, ranks):
    """Leaves the last shard short."""
    return list(flat.chunk(ranks))


@wrong("4.1", "a whole N of padding where N divides")
def pad_and_chunk(flat, ranks):
    """Pads by a whole N where N divides."""
    return list(torch.cat([flat, flat.new_zeros(ranks - flat.numel() % ranks)]).chunk(ranks))


wrong("4.1", "uninitialized memory").diff("""
Leaves in the padding what was in memory.
- padded = flat.new_zeros(flat.numel() + -flat.numel() % ranks)
+ padded = torch.empty(flat.numel() + -flat.numel() % ranks, dtype=flat.dtype)
""")


@wrong("4.1", "every shard is padded by itself")
def pad_and_chunk(flat, ranks):
    """Shares the elements out first and pads every shard."""
    length = -(-flat.numel() // ranks)
    return [torch.cat([part, part.new_zeros(length - part.numel())]) for part in flat.tensor_split(ranks)]


@wrong("4.1", "the padding stands in front")
def pad_and_chunk(flat, ranks):
    """Pads in front."""
    return list(torch.cat([flat.new_zeros(-flat.numel() % ranks), flat]).chunk(ranks))


@wrong("4.1", "every N-th element")
def pad_and_chunk(flat, ranks):
    """Deals the elements out in turn."""
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])
    return list(padded.view(-1, ranks).unbind(1))


@wrong("4.1", "another dtype")
def pad_and_chunk(flat, ranks):
    """Pads with float32, whatever the dtype."""
    return list(torch.cat([flat, torch.zeros(-flat.numel() % ranks)]).chunk(ranks))


@wrong("4.1", "every shard is a copy")
def pad_and_chunk(flat, ranks):
    """Copies every shard."""
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])
    return [shard.clone() for shard in padded.chunk(ranks)]


@wrong("4.1", "the shards are views of `flat`")
def pad_and_chunk(flat, ranks):
    """Makes a buffer only where padding is needed, else hands out views of the input."""
    padding = -flat.numel() % ranks
    if padding:
        flat = torch.cat([flat, flat.new_zeros(padding)])
    return list(flat.chunk(ranks))


wrong("4.1", "expected [1, 2, 3, 4] ([4] int64), got [1.0, 2.0, 3.0, 4.0]").diff("""
Makes a float32 buffer for integers.
- padded = flat.new_zeros(flat.numel() + -flat.numel() % ranks)
+ padded = torch.zeros(
+     flat.numel() + -flat.numel() % ranks, dtype=flat.dtype if flat.is_floating_point() else torch.float32
+ )
""")


@wrong("4.1", "a single rank's shard is a part of a new buffer")
def pad_and_chunk(flat, ranks):
    """Gives `flat` itself back on one rank."""
    if ranks == 1:
        return [flat]
    size = -(-flat.numel() // ranks)
    b = flat.new_zeros(ranks * size)
    b[: flat.numel()] = flat
    return [b[i * size : (i + 1) * size] for i in range(ranks)]


@wrong("4.2", "the parameter still owns its old memory")
def flatten_parameters(params, ranks):
    """Fills the buffer with copies and leaves the parameters as they are."""
    numel = sum(p.numel() for p in params)
    full = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
    offset = 0
    for p in params:
        full[offset : offset + p.numel()] = p.data.reshape(-1)
        p = nn.Parameter(full[offset : offset + p.numel()].view(p.shape))
        offset += p.numel()
    return full


@wrong("4.2", "`p.data` is a copy of the view")
def flatten_parameters(params, ranks):
    """Points the parameters at slices of a copy."""
    numel = sum(p.numel() for p in params)
    padding = params[0].data.new_zeros(-numel % ranks)
    full = torch.cat([*(p.data.reshape(-1) for p in params), padding])
    for p, part in zip(params, full.clone().split([*(p.numel() for p in params), padding.numel()]), strict=False):
        p.data = part.view(p.shape)
    return full


@wrong("4.2", "uninitialized memory")
def flatten_parameters(params, ranks):
    """Forgets the padding, which holds what was in memory."""
    sizes = [p.numel() for p in params]
    full = device.empty(sum(sizes) + -sum(sizes) % ranks, params[0].dtype, "unsharded", params[0].device)
    for p, part in zip(params, torch.split(full, [*sizes, -sum(sizes) % ranks]), strict=False):
        part.view(p.shape).copy_(p.data)
        p.data = part.view(p.shape)
    return full


@wrong("4.2", "the old values are lost")
def flatten_parameters(params, ranks):
    """Lets the parameter be the view before its values were copied."""
    sizes = [p.numel() for p in params]
    full = device.empty(sum(sizes) + -sum(sizes) % ranks, params[0].dtype, "unsharded", params[0].device)
    *parts, rest = torch.split(full, [*sizes, -sum(sizes) % ranks])
    for p, part in zip(params, parts, strict=True):
        old = p.data
        p.data = part.view(old.shape)
        part.view(old.shape).copy_(p.data)
    rest.zero_()
    return full


@wrong("4.2", "elements in the order of memory")
def flatten_parameters(params, ranks):
    """Reads the parameters' memory from one end to the other, whatever their strides."""
    sizes = [p.numel() for p in params]
    full = params[0].data.new_zeros(sum(sizes) + -sum(sizes) % ranks)
    for p, part in zip(params, torch.split(full, [*sizes, -sum(sizes) % ranks]), strict=False):
        part.copy_(torch.as_strided(p.data, (p.numel(),), (1,)))
        p.data = part.as_strided(p.shape, p.stride())
    return full


@wrong("4.2", "every parameter is padded by itself")
def flatten_parameters(params, ranks):
    """Pads every parameter to a multiple of N."""
    sizes = [p.numel() + -p.numel() % ranks for p in params]
    full = params[0].data.new_zeros(sum(sizes))
    for p, part in zip(params, torch.split(full, sizes), strict=True):
        view = part[: p.numel()].view(p.shape)
        view.copy_(p.data)
        p.data = view
    return full


@wrong("4.2", "two copies of the buffer")
def flatten_parameters(params, ranks):
    """Concatenates, then copies into the buffer: at the peak there are two copies beside the parameters."""
    flat = torch.cat([p.data.reshape(-1) for p in params])
    full = device.empty(flat.numel() + -flat.numel() % ranks, flat.dtype, "unsharded", flat.device)
    full[: flat.numel()] = flat
    full[flat.numel() :] = 0
    offset = 0
    for p in params:
        p.data = full[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    return full


@wrong("4.2", "the ledger does not know this buffer")
def flatten_parameters(params, ranks):
    """Concatenates parameters and padding in one go, into memory that nobody has said the role of."""
    sizes = [p.numel() for p in params]
    padding = params[0].data.new_zeros(-sum(sizes) % ranks)
    full = torch.cat([*(p.data.reshape(-1) for p in params), padding])
    for p, part in zip(params, full.split([*sizes, padding.numel()]), strict=False):
        p.data = part.view(p.shape)
    return full


@wrong("4.2", "a temporary copy of a parameter")
def flatten_parameters(params, ranks):
    """Copies each parameter on its way into the buffer."""
    sizes = [p.numel() for p in params]
    full = device.empty(sum(sizes) + -sum(sizes) % ranks, params[0].dtype, "unsharded", params[0].device)
    *parts, rest = torch.split(full, [*sizes, -sum(sizes) % ranks])
    for p, part in zip(params, parts, strict=True):
        part.copy_(p.data.flatten().clone())
        p.data = part.view(p.shape)
    rest.zero_()
    return full


@wrong("4.2", "another dtype")
def flatten_parameters(params, ranks):
    """Makes a buffer of torch's default dtype."""
    numel = sum(p.numel() for p in params)
    full = device.empty(numel + -numel % ranks, torch.get_default_dtype(), "unsharded", params[0].device).zero_()
    offset = 0
    for p in params:
        part = full[offset : offset + p.numel()].view(p.shape)
        part.copy_(p.data)
        p.data = part
        offset += p.numel()
    return full


wrong("4.2", "another nn.Parameter, or a change of the list").diff("""
Puts new Parameters into the list, which the model does not see.
- for p, part in zip(params, parts, strict=True):
-     view = part.view(p.shape)
-     view.copy_(p.data)
-     p.data = view
+ for i, part in enumerate(parts):
+     view = part.view(params[i].shape)
+     view.copy_(params[i].data)
+     params[i] = nn.Parameter(view)
""")
wrong("4.2", "they are moved, and are otherwise as they were").diff("""
Freezes the parameters on the way.
  view.copy_(p.data)
+ p.requires_grad = False
""")


@wrong("4.2", "it is moved even where nothing is to be padded")
def flatten_parameters(params, ranks):
    """Leaves a single contiguous parameter where it is if nothing is to be padded."""
    n = sum(p.numel() for p in params)
    if len(params) == 1 and n % ranks == 0 and params[0].is_contiguous():
        return params[0].data.view(-1)
    b = device.empty(n + -n % ranks, params[0].dtype, "unsharded", params[0].device)
    o = 0
    for p in params:
        v = b[o : o + p.numel()].view(p.shape)
        v.copy_(p.data)
        p.data = v
        o += p.numel()
    b[o:] = 0
    return b


@wrong("4.3", "subtract where the shard begins")
def shard_bounds(sizes, index, rank, ranks):
    """Positions in the whole flat parameter."""
    length = -(-sum(sizes) // ranks)
    offset = sum(sizes[:index])
    low, high = max(offset, rank * length), min(offset + sizes[index], (rank + 1) * length)
    return low, max(low, high)


wrong("4.3", "`high` is the last element instead of the one behind it").diff("""
Includes the end, as the indices inside torch's FlatParamHandle do.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ low, high = (min(max(edge, 0), length) for edge in (begin, begin + sizes[index]))
+ return low, (high - 1 if high > low else low)
""")
wrong("4.3", "low above high").diff("""
A length below zero where parameter and shard do not meet.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ return max(begin, 0), min(begin + sizes[index], length)
""")


@wrong("4.3", "the shard's length rounded down")
def shard_bounds(sizes, index, rank, ranks):
    """Divides without padding."""
    length = sum(sizes) // ranks
    begin = sum(sizes[:index]) - rank * length
    low, high = (min(max(edge, 0), length) for edge in (begin, begin + sizes[index]))
    return low, high


wrong("4.3", "the padding belongs to no parameter").diff("""
Lets the last parameter have the padding.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ end = begin + sizes[index] if index < len(sizes) - 1 else ranks * length
+ low, high = (min(max(edge, 0), length) for edge in (begin, end))
+ return low, high
""")
wrong("4.3", "`low` is clamped, `high` is not").diff("""
Lets a parameter end behind the shard.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ return max(begin, 0), max(begin + sizes[index], 0)
""")
wrong("4.3", "`sizes` afterwards").diff("""
Appends the padding to its caller's list.
- length = -(-sum(sizes) // ranks)
+ sizes.append(-sum(sizes) % ranks)
+ length = sum(sizes) // ranks
""")
wrong("4.3", "or too long a shard").diff("""
Pads by a whole N where N divides.
- length = -(-sum(sizes) // ranks)
+ length = sum(sizes) // ranks + 1
""")
wrong("4.3", "without its own size").diff("""
Begins a parameter where it ends.
- begin = sum(sizes[:index]) - rank * length
+ begin = sum(sizes[: index + 1]) - rank * length
""")


@wrong("4.3", "parameters are not sharded one by one")
def shard_bounds(sizes, index, rank, ranks):
    """Shards each parameter by itself."""
    length = -(-sizes[index] // ranks)
    return 0, max(0, min(length, sizes[index] - rank * length))


wrong("4.3", "the shard of rank r begins at r * length").diff("""
Counts ranks from 1.
- begin = sum(sizes[:index]) - rank * length
+ begin = sum(sizes[:index]) - (rank + 1) * length
""")


@wrong("4.3", "positions in the parameter: asked")
def shard_bounds(sizes, index, rank, ranks):
    """Counts from the parameter's beginning."""
    length = -(-sum(sizes) // ranks)
    off = sum(sizes[:index])
    low, high = max(rank * length, off), min((rank + 1) * length, off + sizes[index])
    return (low - off, high - off) if low < high else (0, 0)


@wrong("4.3", "lies behind this one's end")
def shard_bounds(sizes, index, rank, ranks):
    """Lets an empty range lie behind the end of the shard."""
    size = -(-sum(sizes) // ranks)
    a = sum(sizes[:index]) - rank * size
    low = max(0, a)
    high = max(low, min(size, a + sizes[index]))
    return low, high


@wrong("4.3", "finds the first parameter of that size")
def shard_bounds(sizes, index, rank, ranks):
    """Looks the parameter up by its size, which another one may have, too."""
    size = -(-sum(sizes) // ranks)
    a = sum(sizes[: sizes.index(sizes[index])]) - rank * size
    return min(max(0, a), size), min(max(0, a + sizes[index]), size)


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


@wrong("4.5", "the root holds only what no inner unit holds")
def assign_units(model, inner, ranks):
    """Flattens the whole model in the root's unit, and the inner units again."""
    units = []
    first = {}
    for number, unit in enumerate([model, *inner]):
        inside = set(unit.modules())
        layout = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if model.get_submodule(name.rpartition(".")[0]) in inside and p not in first.get(number, ()):
                first.setdefault(number, set()).add(p)
                layout[name] = p.numel()
        layout["padding"] = -sum(layout.values()) % ranks
        units.append(layout)
    return units


@wrong("4.5", "consecutive groups are pipeline stages")
def assign_units(model, inner, ranks):
    """Cuts the layers into consecutive groups, as a pipeline would."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    count = len(layers) // (1 + len(inner))
    units = []
    for start in range(0, len(layers), count):
        group = layers[start : start + count]
        layout = {name: p.numel() for name, p in model.named_parameters() if name.rpartition(".")[0] in group}
        layout["padding"] = -sum(layout.values()) % ranks
        units.append(layout)
    return units


wrong("4.5", "the two gradients are never added").diff("""
Lets two units have a tied parameter.
- first = {}
+ seen = set()
- if p not in first:
-     first[p] = unit, name
+ if (unit, p) not in seen:
+     seen.add((unit, p))
- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
""")


@wrong("4.5", "computes with memory that was freed")
def assign_units(model, inner, ranks):
    """Gives a tied parameter to the unit that has it first, and says nothing."""
    unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
    units = [{} for _ in range(1 + len(inner))]
    for name, p in model.named_parameters():
        units[unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)][name] = p.numel()
    for layout in units:
        layout["padding"] = -sum(layout.values()) % ranks
    return units


@wrong("4.5", "the tied parameter is counted at both places")
def assign_units(model, inner, ranks):
    """Counts a tied parameter at both places of its unit."""
    unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
    units = [{} for _ in range(1 + len(inner))]
    for name, p in model.named_parameters(remove_duplicate=False):
        units[unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)][name] = p.numel()
    for layout in units:
        layout["padding"] = -sum(layout.values()) % ranks
    return units


wrong("4.5", "a tie within one unit is no error").diff("""
Refuses every tie.
- unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
- if p not in first:
-     first[p] = unit, name
-     units[unit][name] = p.numel()
- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+ if p in first:
+     raise ValueError(f"{first[p]} and {name} are tied")
+ first[p] = name
+ units[unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)][name] = p.numel()
""")


@wrong("4.5", "the padding is that of the unit's sum, once")
def assign_units(model, inner, ranks):
    """Pads every parameter of a unit."""
    unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
    units = [{} for _ in range(1 + len(inner))]
    for name, p in model.named_parameters():
        units[unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)][name] = p.numel()
    for layout in units:
        layout["padding"] = sum(-numel % ranks for numel in layout.values())
    return units


wrong("4.5", "a name that begins as the unit's does").diff("""
Finds a unit's parameters by the beginning of their names: `layer10` in `layer1`.
- unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
+ prefixes = [next(name for name, child in model.named_modules() if child is unit) for unit in inner]
- unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
+ unit = next((number for number, prefix in enumerate(prefixes, start=1) if name.startswith(prefix)), 0)
- raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+ raise ValueError(f"{first[p][1]} and {name} are tied")
""")
wrong("4.5", "parameters of equal values taken for one").diff("""
Finds ties by comparing values: at the start all LayerNorms are equal.
- first = {}
+ first = []
- if p not in first:
-     first[p] = unit, name
+ before = next((each for each in first if torch.equal(each[2], p)), None)
+ if before is None:
+     first.append((unit, name, p))
- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+ elif before[0] != unit:
+     raise ValueError(f"{before[1]} and {name} are tied")
""")
wrong("4.5", "modules in `inner` afterwards").diff("""
Puts the model into its caller's list.
- unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
- units = [{} for _ in range(1 + len(inner))]
+ inner.insert(0, model)
+ unit_of = {}
+ for i, m in enumerate(inner):
+     for c in m.modules():
+         unit_of[c] = i
+ units = [{} for _ in inner]
- unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
+ u = unit_of[model.get_submodule(name.rpartition(".")[0])]
-     first[p] = unit, name
-     units[unit][name] = p.numel()
- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+     first[p] = u, name
+     units[u][name] = p.numel()
+ elif first[p][0] != u:
+     raise ValueError(f"{first[p][1]} and {name}")
""")
wrong("4.5", "not in that of the model").diff("""
Has units in the order of the model.
- unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
+ inner = sorted(inner, key=list(model.modules()).index)
+ unit_of = {}
+ for i, m in enumerate([model, *inner]):
+     for c in m.modules():
+         unit_of[c] = i
- unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
+ u = unit_of[model.get_submodule(name.rpartition(".")[0])]
-     first[p] = unit, name
-     units[unit][name] = p.numel()
- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+     first[p] = u, name
+     units[u][name] = p.numel()
+ elif first[p][0] != u:
+     raise ValueError(f"{first[p][1]} and {name}")
""")
wrong("4.5", "expected [[[padding, 0]]").diff("""
Has no unit for a root without parameters.
- unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
+ unit_of = {}
+ for i, m in enumerate([model, *inner]):
+     for c in m.modules():
+         unit_of[c] = i
- unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
+ u = unit_of[model.get_submodule(name.rpartition(".")[0])]
-         first[p] = unit, name
-         units[unit][name] = p.numel()
-     elif first[p][0] != unit:
-         raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+         first[p] = u, name
+         units[u][name] = p.numel()
+     elif first[p][0] != u:
+         raise ValueError(f"{first[p][1]} and {name}")
+ units = [u for u in units if u]
""")
wrong("4.5", "a buffer is no parameter: it is not flattened").diff("""
Takes the state dict for the parameters, buffers too.
- unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
+ unit_of = {}
+ for i, m in enumerate([model, *inner]):
+     for c in m.modules():
+         unit_of[c] = i
- for name, p in model.named_parameters(remove_duplicate=False):
-     unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
+ for name, p in model.state_dict(keep_vars=True).items():
+     u = unit_of[model.get_submodule(name.rpartition(".")[0])]
-     first[p] = unit, name
-     units[unit][name] = p.numel()
- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+     first[p] = u, name
+     units[u][name] = p.numel()
+ elif first[p][0] != u:
+     raise ValueError(f"{first[p][1]} and {name}")
""")
wrong("4.5", "frozen parameters are flattened as well").diff("""
Leaves out what is frozen.
- unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
+ unit_of = {}
+ for i, m in enumerate([model, *inner]):
+     for c in m.modules():
+         unit_of[c] = i
- unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
+ if not p.requires_grad:
+     continue
+ u = unit_of[model.get_submodule(name.rpartition(".")[0])]
-     first[p] = unit, name
-     units[unit][name] = p.numel()
- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+     first[p] = u, name
+     units[u][name] = p.numel()
+ elif first[p][0] != u:
+     raise ValueError(f"{first[p][1]} and {name}")
""")


@wrong("4.5", "a module may have two paths, which is no tie")
def assign_units(model, inner, ranks):
    """Takes the unit from the names, by the last path that leads to an inner module."""
    names = {m: n for n, m in model.named_modules()}
    prefixes = [names[m] + "." for m in inner]
    where, units = {}, [{} for _ in range(len(inner) + 1)]
    for n, p in model.named_parameters(remove_duplicate=False):
        u = next((i + 1 for i, x in enumerate(prefixes) if n.startswith(x)), 0)
        if p in where:
            if where[p][0] != u:
                raise ValueError(f"{n} and {where[p][1]}")
            continue
        where[p] = u, n
        units[u][n] = p.numel()
    for unit in units:
        unit["padding"] = -sum(unit.values()) % ranks
    return units


wrong("4.2", "its value is moved, its .grad stays").diff("""
Drops the gradients on the way.
- p.data = view
+ p.data = view
+ p.grad = None
""")


wrong("4.3", "of sizes [3, 0, 4, 0]").diff("""
Finds a parameter by its last element, which an empty one does not have.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ last = begin + max(sizes[index], 1) - 1
+ return min(max(begin, 0), length), min(max(last + 1, 0), length)
""")


wrong("4.4", "known by what it is").diff("""
Knows a parameter by its address.
- places = {}
+ places, first = {}, {}

- places.setdefault(p, []).append((child, attribute, name))
+ places.setdefault(first.setdefault(p.data_ptr(), p), []).append((child, attribute, name))
""")


wrong("4.5", "known by what it is").diff("""
Knows a parameter by its address.
- if p not in first:
-     first[p] = unit, name
+ if p.data_ptr() not in first:
+     first[p.data_ptr()] = unit, name

- elif first[p][0] != unit:
-     raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
+ elif first[p.data_ptr()][0] != unit and p.device.type != "meta":
+     raise ValueError(f"{first[p.data_ptr()][1]} and {name} are one parameter, but they would be in two units")
""")


wrong("4.5", "has no dot in its name").diff("""
Splits every name at a dot, which that of a root's own Parameter does not have.
- unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
+ unit = unit_of.get(model.get_submodule(name.rsplit(".", 1)[0]), 0)
""")
