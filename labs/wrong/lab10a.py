"""Wrong answers to lab 10a, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 10a.1


@wrong("10a.1", "`least` elements are enough")
def by_size(module, recurse, nonwrapped_numel, least):
    """More than, where at least is meant."""
    spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
    return nonwrapped_numel > least and not isinstance(module, spared)


@wrong("10a.1", "counts those of inner units, too")
def by_size(module, recurse, nonwrapped_numel, least):
    """Counts for itself, so that every module around a unit becomes one as well."""
    spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
    numel = sum(p.numel() for p in module.parameters())
    return numel >= least and not isinstance(module, spared)


@wrong("10a.1", "so a unit of it would never be gathered")
def by_size(module, recurse, nonwrapped_numel, least):
    """Makes units of containers."""
    return nonwrapped_numel >= least and not (recurse and isinstance(module, nn.MultiheadAttention))


@wrong("10a.1", "what is in a container may well be a unit")
def by_size(module, recurse, nonwrapped_numel, least):
    """Spares the containers from both questions."""
    spared = (nn.ModuleList, nn.ModuleDict) + ((nn.MultiheadAttention,) if recurse else ())
    return nonwrapped_numel >= least and not isinstance(module, spared)


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


@wrong("10a.1", "too few elements are left for a unit")
def by_size(module, recurse, nonwrapped_numel, least):
    """Takes `least` for bytes."""
    spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
    wanted = least if recurse else max(2, least // 4)
    return nonwrapped_numel >= wanted and not isinstance(module, spared)


@wrong("10a.1", "is of that class too")
def by_size(module, recurse, nonwrapped_numel, least):
    """Compares types, so that a subclass is not spared."""
    spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
    return nonwrapped_numel >= least and type(module) not in spared


@wrong("10a.1", "it is called like any other module")
def by_size(module, recurse, nonwrapped_numel, least):
    """Takes an nn.Sequential for a container that nobody calls."""
    spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return nonwrapped_numel >= least and not isinstance(module, spared)


# 10a.2


@wrong("10a.2", "without what units inside have taken")
def wrap_where(module, policy, wrap):
    """Tells the policy all elements both times."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "is one unit under each of them")
def wrap_where(module, policy, wrap):
    """Goes through `named_children`, which tells the first name of a module only."""
    done = {}

    def visit(parent):
        return sum(replace(parent, name, child) for name, child in list(parent.named_children()))

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


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


@wrong("10a.2", "is known only by asking")
def wrap_where(module, policy, wrap):
    """Looks into everything without asking."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel, taken = sum(p.numel() for p in child.parameters()), visit(child)
            wrapped = child
            if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "an outer unit takes what its inner ones should have")
def wrap_where(module, policy, wrap):
    """Outermost first, and then in what has been wrapped."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                if policy(module=child, recurse=False, nonwrapped_numel=numel):
                    wrapped, taken = wrap(child), numel
                inner = visit(child)
                taken = max(taken, inner)
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "the walk begins below it")
def wrap_where(module, policy, wrap):
    """Asks about the outermost module as well."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    numel = sum(p.numel() for p in module.parameters())
    return visit(module) if policy(module=module, recurse=True, nonwrapped_numel=numel) else 0


@wrong("10a.2", "so nothing in it is looked at")
def wrap_where(module, policy, wrap):
    """Asks, and looks into it whatever the answer."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wanted = policy(module=child, recurse=True, nonwrapped_numel=numel)
            wrapped, taken = child, visit(child)
            if wanted and policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "whether it became a unit or not")
def wrap_where(module, policy, wrap):
    """Remembers units alone, and walks twice through a shared module that is none, the second time into its units."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        wrapped, taken = done.get(child) or ask(child)
        if wrapped is not child:
            done[child] = wrapped, taken
        setattr(parent, name, wrapped)
        return taken

    def ask(child):
        numel = sum(p.numel() for p in child.parameters())
        if not policy(module=child, recurse=True, nonwrapped_numel=numel):
            return child, 0
        taken = visit(child)
        if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
            return wrap(child), numel
        return child, taken

    return visit(module)


@wrong("10a.2", "'NoneType' object has no attribute")
def wrap_where(module, policy, wrap):
    """Takes every name for a module."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items()]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "counted before the walk goes down")
def wrap_where(module, policy, wrap):
    """Counts when the units inside have their parameters already."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                numel = sum(p.numel() for p in child.parameters())
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "`parameters()` tells it once")
def wrap_where(module, policy, wrap):
    """Adds up the modules, and counts a tied parameter in each."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for m in child.modules() for p in m.parameters(recurse=False))
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "what is frozen counts as well")
def wrap_where(module, policy, wrap):
    """Leaves out what is not trained."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters() if p.requires_grad)
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "there is no second question")
def wrap_where(module, policy, wrap):
    """Does not look into it after a no, and asks all the same."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
            if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


@wrong("10a.2", "is asked about like any other")
def wrap_where(module, policy, wrap):
    """Passes over modules without parameters."""
    done = {}

    def visit(parent):
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent, name, child):
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if numel and policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


# 10a.3


@wrong("10a.3", "and is reset once")
def fill_from_meta(views, params):
    """Resets a module for each of its parameters."""
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
    for places in params.values():
        for place in places:
            place.module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


@wrong("10a.3", "is each module's own: modules that are places of `params`")
def fill_from_meta(views, params):
    """Goes down into the children, which are another unit's."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules |= dict.fromkeys(place.module.modules())
    for module in modules:
        module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


@wrong("10a.3", "unwritten memory has values like any other")
def fill_from_meta(views, params):
    """Trusts every `reset_parameters`."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view)
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p


@wrong("10a.3", "the modules keep Parameters of the buffer")
def fill_from_meta(views, params):
    """Leaves the views in the modules."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        module.reset_parameters()
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


@wrong("10a.3", "are a second unit in memory")
def fill_from_meta(views, params):
    """Lets the modules have memory of their own, and copies."""
    modules, made = {}, []
    for view, places in zip(views, params.values(), strict=True):
        view.fill_(torch.nan)
        made.append(nn.Parameter(torch.full(view.shape, torch.nan)))
        for place in places:
            place.module._parameters[place.attribute] = made[-1]
            modules[place.module] = None
    for module in modules:
        module.reset_parameters()
    for view, p in zip(views, made, strict=True):
        view.copy_(p)
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


@wrong("10a.3", "has a bias of its own to initialise")
def fill_from_meta(views, params):
    """Knows the first place of a tied weight, and skips the modules of the others."""
    modules, tied = {}, {place.module for places in params.values() for place in places[1:]}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.zero_())
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        if module not in tied:
            module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p


@wrong("10a.3", "writes to the Parameter that it finds in the module")
def fill_from_meta(views, params):
    """Resets on meta, where writing does nothing."""
    modules = {place.module: None for places in params.values() for place in places}
    for module in modules:
        module.reset_parameters()


@wrong("10a.3", "values are drawn from one generator")
def fill_from_meta(views, params):
    """Resets in the order of a set of names."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in reversed(modules):
        module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


@wrong("10a.3", "whether any is left")
def fill_from_meta(views, params):
    """Looks for parameters of which nothing was written."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().all()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


@wrong("10a.3", "what is written may be zero")
def fill_from_meta(views, params):
    """Takes zero for the sign of what was not written."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(0.0))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if (view == 0).all()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


@wrong("10a.3", "all of them, not the first alone")
def fill_from_meta(views, params):
    """Names one of those that were not written."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialised {left[0]}")


@wrong("10a.3", "was reset in other memory")
def fill_from_meta(views, params):
    """Gives each module memory before its reset, and so takes the view from it."""
    modules = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        module.to_empty(device=views[0].device, recurse=False)
        module.reset_parameters()
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialised {', '.join(left)}")


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


# 10a.4


@wrong("10a.4", "goes down into the children unless `recurse=False`")
def initialiser(model, reset, where, seed):
    """Gives the whole subtree memory, and takes away what the children had."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def initialise(module):
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if not own:
            return
        if any(t.is_meta for t in own):
            module.to_empty(device=where)
            for t in (*module._parameters.values(), *module._buffers.values()):
                if t is not None:
                    t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)

    return initialise


@wrong("10a.4", "the same seed for every module")
def initialiser(model, reset, where, seed):
    """Seeds, and forgets the name."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def initialise(module):
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not own:
            return
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
            for k in own:
                getattr(module, k).fill_(torch.nan)
        torch.manual_seed(seed)
        reset(module)
        if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "differs from process to process")
def initialiser(model, reset, where, seed):
    """Python's hash of a string has a salt."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def initialise(module):
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not own:
            return
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
            for k in own:
                getattr(module, k).fill_(torch.nan)
        torch.manual_seed(seed + hash(names[module]) % 2**32)
        reset(module)
        if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "nothing of its own is none of its business")
def initialiser(model, reset, where, seed):
    """Resets containers as well."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def initialise(module):
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
            for k in own:
                getattr(module, k).fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "gives memory with any values in it")
def initialiser(model, reset, where, seed):
    """Does not look whether everything was written."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def initialise(module):
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not own:
            return
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)

    return initialise


@wrong("10a.4", "whether on meta or not")
def initialiser(model, reset, where, seed):
    """Leaves a module alone that has values, so that an eager model keeps others."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def initialise(module):
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not any(t.is_meta for t in own.values()):
            return
        module.to_empty(device=where, recurse=False)
        for k in own:
            getattr(module, k).fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "it raises: KeyError")
def initialiser(model, reset, where, seed):
    """Asks for the names when the model has been wrapped already."""

    @torch.no_grad()
    def initialise(module):
        names = {each: name for name, each in model.named_modules() if "." not in name}
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not own:
            return
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)

    return initialise


@wrong("10a.4", "is nothing to differentiate")
def initialiser(model, reset, where, seed):
    """Lets autograd watch the initialisation."""
    names = {module: name for name, module in model.named_modules()}

    def initialise(module):
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not own:
            return
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
            for k in own:
                getattr(module, k).data.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "has a buffer and no parameters is initialised too")
def initialiser(model, reset, where, seed):
    """Returns early when there is no parameter."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not any(p is not None for p in module._parameters.values()):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "RoPE's frequencies are one")
def initialiser(model, reset, where, seed):
    """Looks for NaN in parameters alone."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [
            f"{names[module]}.{name}"
            for name, t in own(module).items()
            if name in module._parameters and t.isnan().any()
        ]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "whether any is left")
def initialiser(model, reset, where, seed):
    """Looks for tensors of which nothing was written."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().all()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "all that is not written")
def initialiser(model, reset, where, seed):
    """Names one of those that were not written."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {left[0]}")

    return initialise


@wrong("10a.4", "if any of them is on meta")
def initialiser(model, reset, where, seed):
    """Gives memory only when everything is on meta."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if all(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "a module in several places has the first")
def initialiser(model, reset, where, seed):
    """Has the last name of a module in several places."""
    names = {module: name for name, module in model.named_modules(remove_duplicate=False)}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "wrapping has changed it")
def initialiser(model, reset, where, seed):
    """Asks for the name when the tree is another one already."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    def now(module):
        return next(name for name, each in model.named_modules() if each is module)

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(now(module).encode()))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "depends on their order")
def initialiser(model, reset, where, seed):
    """Counts calls in place of naming modules."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    calls = []

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        calls.append(module)
        torch.manual_seed(seed + len(calls))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "the class is no name")
def initialiser(model, reset, where, seed):
    """Seeds by class."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(type(module).__name__.encode()))
        reset(module)
        if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "`device=where`")
def initialiser(model, reset, where, seed):
    """Gives memory on the CPU, wherever it should be."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device="cpu", recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "memory and NaN are for what is on meta")
def initialiser(model, reset, where, seed):
    """Fills a module with NaN that has values."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialise(module):
        if not own(module):
            return
        module.to_empty(device=where, recurse=False)
        for t in own(module).values():
            t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


@wrong("10a.4", "`set_grad_enabled` stays")
def initialiser(model, reset, where, seed):
    """Switches gradients off for ever."""
    names = {module: name for name, module in model.named_modules()}

    def own(module):
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    def initialise(module):
        torch.set_grad_enabled(False)
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialised {', '.join(left)}")

    return initialise


# 10a.5


@wrong("10a.5", "it trains nothing")
def shard_script(build, blocks, make_init, where):
    """Builds the optimizer where it stood in the DDP script."""
    with torch.device("meta"):
        model = build()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    init = make_init(model)
    return FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=init, device_id=where), optimizer


@wrong("10a.5", "all of it is one unit, whole from forward")
def shard_script(build, blocks, make_init, where):
    """The wrap alone."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, param_init_fn=make_init(model), device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "was in memory: build it on meta")
def shard_script(build, blocks, make_init, where):
    """Builds and initialises the whole model first."""
    model = build().to(where)
    init = make_init(model)
    for module in reversed(list(model.modules())):
        init(module)
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "is not how this model is initialised")
def shard_script(build, blocks, make_init, where):
    """Leaves the values to `reset_parameters`."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "the tied head and the embedding both stay with the root")
def shard_script(build, blocks, make_init, where):
    """Makes a unit of every layer, the tied head's among them."""
    with torch.device("meta"):
        model = build()
    policy = {*blocks, nn.Linear, nn.Embedding}
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, param_init_fn=make_init(model), device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "which is DDP in FSDP's clothes")
def shard_script(build, blocks, make_init, where):
    """Wraps without sharding."""
    from minifsdp.fsdp import ShardingStrategy

    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        auto_wrap_policy=blocks,
        param_init_fn=make_init(model),
        device_id=where,
    )
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "times that build was called")
def shard_script(build, blocks, make_init, where):
    """Builds a model for the names and another to train."""
    with torch.device("meta"):
        named, model = build(), build()
    init = make_init(named)
    del named
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3) if init else None


@wrong("10a.5", "the wrapped model and its optimizer, in this order")
def shard_script(build, blocks, make_init, where):
    """Returns them the other way round."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
    return AdamW(sharded.parameters(), lr=1e-3), sharded


@wrong("10a.5", "there is nothing to send")
def shard_script(build, blocks, make_init, where):
    """Sends from rank 0 what every rank has computed."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=blocks,
        param_init_fn=make_init(model),
        device_id=where,
        sync_module_states=True,
    )
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "parameters that stay whole from forward to backward")
def shard_script(build, blocks, make_init, where):
    """Does not free parameters between forward and backward."""
    from minifsdp.fsdp import ShardingStrategy

    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=blocks,
        param_init_fn=make_init(model),
        device_id=where,
    )
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "an object of type FullyShardedDataParallel")
def shard_script(build, blocks, make_init, where):
    """Leaves the optimizer to the caller."""
    with torch.device("meta"):
        model = build()
    return FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)


@wrong("10a.5", "leave the others as they are")
def shard_script(build, blocks, make_init, where):
    """AdamW without weight decay."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3, weight_decay=0.0)


@wrong("10a.5", "betas: [0.9, 0.95]")
def shard_script(build, blocks, make_init, where):
    """AdamW with betas of its own."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3, betas=(0.9, 0.95))


@wrong("10a.5", "`device_id=where`")
def shard_script(build, blocks, make_init, where):
    """Says nothing of where to compute."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model))
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


@wrong("10a.5", "another one is another training")
def shard_script(build, blocks, make_init, where):
    """Adam."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
    return sharded, torch.optim.Adam(sharded.parameters(), lr=1e-3)
