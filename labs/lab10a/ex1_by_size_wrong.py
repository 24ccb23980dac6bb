"""Wrong answers to exercise 10a.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
