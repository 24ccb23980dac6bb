"""Exercise 10a.1: A policy by size."""

from torch import nn

from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.torch_api.policies import size_based_auto_wrap_policy


@reference(
    "10a.1",
    hints=(
        "Both questions begin with the same comparison: a module that has too little can hold no unit, and be none. "
        "They differ in the classes that are spared.",
        "`spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)`; then one line: enough "
        "elements, and no instance of what is spared.",
    ),
    forbids=(size_based_auto_wrap_policy,),
)
def by_size(module: nn.Module, recurse: bool, nonwrapped_numel: int, least: int) -> bool:
    """Make a module a unit if it has at least `least` parameter elements outside any unit.

    Args:
        module: the module in question.
        recurse: which question is asked: True for whether the walk should enter the module, False for whether the
            module should be a unit.
        nonwrapped_numel: the number of its parameter elements that are in no unit yet.
        least: the minimum number of elements in a unit.

    Returns:
        False for either value of `recurse` if the module has fewer than `least` elements. Otherwise True, with two
        exceptions: False with `recurse=True` for an `nn.MultiheadAttention`, and False with `recurse=False` for an
        `nn.ModuleList` or `nn.ModuleDict`.
    """
    spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
    return nonwrapped_numel >= least and not isinstance(module, spared)


class Attention(nn.MultiheadAttention):
    """Somebody's own."""


class Layers(nn.ModuleList):
    """The same."""


@check("10a.1")
def check_by_size(answer, variant):
    """Both questions, at the least number and one below it, for modules and for what is spared."""
    least = 10 * variant.size
    plain = nn.Linear(4 * least, 1, bias=False)  # inner units have the rest of its elements, as far as they are told
    attentions = nn.MultiheadAttention(4, 2), Attention(4, 2)
    containers = nn.ModuleList(), nn.ModuleDict(), Layers()

    def ask(module, recurse, numel):
        return bool(answer(module=module, recurse=recurse, nonwrapped_numel=numel, least=least))

    enough, edge = "enough elements are left, so it is a unit", "`least` elements are enough"
    slips = {
        True: {
            4 * least: "no unit is ever found in what nobody looks into: the way down has to be answered as well",
            least: edge,
            least - 1: "what has fewer than `least` can hold no unit either: it need not be looked into",
        },
        False: {
            4 * least: enough,
            0: "`nonwrapped_numel` is the question: counting the module's parameters counts those of inner units, too",
            least: edge,
            least - 1: "too few elements are left for a unit; `least` is in elements, not in bytes",
        },
    }
    for recurse, question in ((True, "shall it be looked into"), (False, "shall it be a unit")):
        for left, slip in slips[recurse].items():
            module = nn.Linear(left, 1, bias=False) if recurse else plain
            expect(f"{question}, {left} elements left of {least}", ask(module, recurse, left), left >= least, slip=slip)
    of_its_class = "what is made from a class by inheritance is of that class too: `isinstance`"
    into = "an `nn.MultiheadAttention` uses its children's weights without calling them: they must not become units"
    itself = "the attention itself is called, and can be a unit; only what is in it cannot"
    for each in attentions:
        slip = of_its_class if isinstance(each, Attention) else into
        expect(f"shall {article(each)} be looked into", ask(each, True, least), False, slip=slip)
        expect(f"shall {article(each)} be a unit", ask(each, False, least), True, slip=itself)
    for each in containers:
        slip = of_its_class if isinstance(each, Layers) else "nobody calls it, so a unit of it would never be gathered"
        expect(f"shall {article(each)} be a unit", ask(each, False, least), False, slip=slip)
        slip = "what is in a container may well be a unit: it has to be looked into"
        expect(f"shall {article(each)} be looked into", ask(each, True, least), True, slip=slip)
    slip = "the number comes first: with fewer than `least` elements the answer is no, whatever the class"
    for each in (*attentions, *containers):
        for recurse, question in ((True, "looked into"), (False, "a unit")):
            what = f"shall {article(each)} of {least - 1} elements be {question}, `least` is {least}"
            expect(what, ask(each, recurse, least - 1), False, slip=slip)
    slip = "it is called like any other module: of the containers only `nn.ModuleList` and `nn.ModuleDict` are spared"
    expect("shall an nn.Sequential be a unit", ask(nn.Sequential(), False, least), True, slip=slip)


def article(module):
    """What a module is, in words."""
    kind = type(module)
    if kind in (Attention, Layers):
        return f"a subclass of nn.{kind.__base__.__name__}"
    return f"an nn.{kind.__name__}"
