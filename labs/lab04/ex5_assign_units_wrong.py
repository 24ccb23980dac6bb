"""Wrong answers to exercise 4.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
