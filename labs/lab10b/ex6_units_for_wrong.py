"""Wrong answers to exercise 10b.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("10b.6", "trained modules may lie further down")
def units_for(model, block):
    """Looks at the children of blocks only."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)
    for top in (model, *blocks):
        inner = [each for each in top.modules() if each in blocks and each is not top]
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            for child in top.children():
                if {p.requires_grad for p in child.parameters()} == {True} and child not in blocks:
                    units.add(child)
    return units


@wrong("10b.6", "go no deeper than necessary")
def units_for(model, block):
    """Makes every trained module in a mixed unit a unit of its own."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)
    for top in (model, *blocks):
        inner = {each for each in top.modules() if each in blocks and each is not top}
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            skipped = {each for module in inner for each in module.modules()}
            for module in set(top.modules()) - skipped - {top}:
                if {p.requires_grad for p in find_parameters(module, skip=inner)} == {True}:
                    units.add(module)
    return units


@wrong("10b.6", "a unit that does not mix needs no separation")
def units_for(model, block):
    """Separates trained modules wherever there are any."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def separate(module):
        for child in module.children():
            inner = [each for each in child.modules() if each in blocks and each is not child]
            if child in blocks:
                continue
            if {p.requires_grad for p in find_parameters(child, skip=inner)} == {True}:
                units.add(child)
            else:
                separate(child)

    for top in (model, *blocks):
        separate(top)
    return units


wrong("10b.6", "one unit of frozen parameters too many").diff("""
Gives the frozen modules units of their own as well.
- if kinds(child) == {True}:
+ if len(kinds(child)) == 1:
""")
wrong("10b.6", "separate the trained ones").diff("""
Separates the frozen ones.
- if kinds(child) == {True}:
+ if kinds(child) == {False}:
""")


@wrong("10b.6", "what no block holds can mix as well")
def units_for(model, block):
    """Forgets the root."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def separate(module):
        for child in module.children():
            if {p.requires_grad for p in child.parameters()} == {True}:
                units.add(child)
            else:
                separate(child)

    for top in blocks:
        if len({p.requires_grad for p in top.parameters()}) > 1:
            separate(top)
    return units


@wrong("10b.6", "each block is a unit, whatever is frozen in it")
def units_for(model, block):
    """Only the blocks that train are units."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = {each for each in blocks if any(p.requires_grad for p in each.parameters())}

    def separate(module):
        for child in module.children():
            if {p.requires_grad for p in child.parameters()} == {True}:
                units.add(child)
            else:
                separate(child)

    for top in blocks:
        if len({p.requires_grad for p in top.parameters()}) > 1:
            separate(top)
    return units


wrong("10b.6", "once its blocks are units").diff("""
Takes the list of trained blocks for a trained module.
- def kinds(module):
-     inner = [each for each in module.modules() if each in blocks and each is not module]
-     return {p.requires_grad for p in find_parameters(module, skip=inner)}

- if kinds(child) == {True}:
+ if {p.requires_grad for p in child.parameters()} == {True}:
- if len(kinds(top)) > 1:
+ inner = [each for each in top.modules() if each in blocks and each is not top]
+ if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1 or inner:
""")
wrong("10b.6", "only the parameters outside its blocks count").diff("""
Counts the blocks' parameters on the way down.
- def kinds(module):
-     inner = [each for each in module.modules() if each in blocks and each is not module]
-     return {p.requires_grad for p in find_parameters(module, skip=inner)}
- def separate(module):
+ def separate(module, inner):
- if kinds(child) == {True}:
+ found = {p.requires_grad for p in find_parameters(child)}
+ if found == {True}:
- else:
-     separate(child)
+ elif len(found) > 1:
+     separate(child, inner)
- if len(kinds(top)) > 1:
-     separate(top)
+ inner = blocks - {top}
+ if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
+     separate(top, inner)
""")
wrong("10b.6", "no block is found to mix").diff("""
Leaves out the block itself, too.
- def kinds(module):
-     inner = [each for each in module.modules() if each in blocks and each is not module]
-     return {p.requires_grad for p in find_parameters(module, skip=inner)}
- def separate(module):
+ def separate(module, inner):
- if kinds(child) == {True}:
+ found = {p.requires_grad for p in find_parameters(child, skip=inner)}
+ if found == {True}:
- else:
-     separate(child)
+ elif len(found) > 1:
+     separate(child, inner)
- if len(kinds(top)) > 1:
-     separate(top)
+ inner = blocks
+ if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
+     separate(top, inner)
""")


@wrong("10b.6", "a subclass of `block` is a block too")
def units_for(model, block):
    """Compares types."""
    blocks = {module for module in model.modules() if type(module) is block}
    units = set(blocks)

    def separate(module, inner):
        for child in module.children():
            if child not in blocks:
                found = {p.requires_grad for p in find_parameters(child, skip=inner)}
                if found == {True}:
                    units.add(child)
                elif len(found) > 1:
                    separate(child, inner)

    for top in (model, *blocks):
        inner = blocks - {top}
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            separate(top, inner)
    return units


@wrong("10b.6", "the outermost module is wrapped anyway")
def units_for(model, block):
    """Names the model, too."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def separate(module, inner):
        for child in module.children():
            if child not in blocks:
                found = {p.requires_grad for p in find_parameters(child, skip=inner)}
                if found == {True}:
                    units.add(child)
                elif len(found) > 1:
                    separate(child, inner)

    for top in (model, *blocks):
        inner = blocks - {top}
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            separate(top, inner)
    return units | {model}


wrong("10b.6", "the parameters that it holds directly as well").diff("""
Asks the model's children, and not the model, whether its unit mixes.
- if len(kinds(top)) > 1:
+ if len(kinds(top) if top in blocks else set().union(*map(kinds, top.children()))) > 1:
""")
