"""Exercise 10a.2: The walk."""

from collections.abc import Callable

import torch
from torch import nn

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.torch_api.wrap import wrap_children


@reference(
    "10a.2",
    hints=(
        "A recursive function. For each child: how many elements has it? Look into it, if the policy says so; then ask "
        "again, with what is left. `parent._modules` has every name, `named_children()` only the first of a module.",
        "Keep `done: dict[nn.Module, tuple[nn.Module, int]]`: what has become of a module, and how many elements are "
        "in units. A module that is there already is only put in its place. Sum over the children, each once.",
    ),
    forbids=(wrap_children,),
)
def wrap_where(module: nn.Module, policy: Callable[..., bool], wrap: Callable[[nn.Module], nn.Module]) -> int:
    """Replace the submodules that `policy` selects with `wrap(submodule)`, innermost first.

    Args:
        module: the walk covers the modules below it; `module` itself is not passed to the policy and is not replaced.
        policy: the walk visits each module below `module` once and calls
            `policy(module=..., recurse=..., nonwrapped_numel=...)`, first with `recurse=True` and the number of
            elements in all its parameters, frozen or not, tied ones counted once. If the answer is True, the walk
            covers the module's children and then calls the policy again with `recurse=False` and the number of elements
            in no unit inside it. If the first answer is False, the walk does not enter the module, and the module is
            not a unit.
        wrap: returns the module's replacement. The walk does not enter the replacement. The parameters of the wrapped
            module may be shards from then on, so count them before the call.

    A module that the tree holds under several names, in one parent or in several, is passed to the policy and to `wrap`
    once, and its replacement then appears under each name. No parameter is tied between two units. Children are in
    `parent._modules`, by name; a child may be None.

    Returns:
        The number of parameter elements that the units below `module` hold. A unit under two names
        of one parent counts once. A unit in two parents counts either in each of them, as in torch (the remainder above
        may then be negative), or once in total.
    """
    done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def visit(parent: nn.Module) -> int:
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent: nn.Module, name: str, child: nn.Module) -> int:
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


class Unit(nn.Module):
    """What `wrap` returns in the check; holds what it has wrapped."""

    def __init__(self, module):
        super().__init__()
        self.inside = module


class Twice(nn.Module):
    """A layer under two names, and a name under which there is none."""

    def __init__(self, layer, size):
        super().__init__()
        self.first, self.own, self.again = layer, nn.Linear(size, 2), layer
        self.register_module("none", None)


def tree(size):
    """A model with an inner tree, a module under three names in two parents, and one that nobody is to look into.

    What else it has: in two places a module that is no unit and contains one; a frozen parameter, and a tied one.
    """
    shared, group = nn.Linear(size, size), nn.Sequential(nn.Linear(size, 5))
    model = nn.Module()
    model.stem = nn.Linear(size, 3)
    model.stem.weight.requires_grad_(False)
    model.body = nn.ModuleList([Twice(shared, size), nn.Sequential(nn.Linear(2, size), shared), nn.Tanh()])
    model.closed = nn.Sequential(nn.Linear(size, 4, dtype=torch.bfloat16))
    model.left, model.right = nn.Sequential(group), nn.Sequential(group)
    model.tied = nn.Sequential(nn.Embedding(5, size), nn.Embedding(5, size))
    model.tied[1].weight = model.tied[0].weight
    model.weight = nn.Parameter(torch.zeros(size))
    return model


def walk(module, policy, wrap, once=False):
    """The same by other means: from a list of all modules, children before parents.

    A unit in two parents counts in each; if `once`, then each parameter counts once in all.
    """
    taken, made, children = {}, {}, {}  # taken: of each module how much is in units, and which parameters

    def inside(parent):
        return [child for child in parent._modules.values() if child is not None]

    def look(child):
        if child in taken:
            return
        params = {p: p.numel() for p in child.parameters()}
        numel = sum(params.values())
        taken[child] = 0, {}
        if policy(module=child, recurse=True, nonwrapped_numel=numel):
            taken[child] = below(child)
            if policy(module=child, recurse=False, nonwrapped_numel=numel - taken[child][0]):
                taken[child], made[child] = (numel, params), wrap(child)

    def below(parent):
        children[parent] = dict.fromkeys(inside(parent))
        for child in children[parent]:
            look(child)
        for name, child in list(parent._modules.items()):
            if child in made:
                parent._modules[name] = made[child]
        params = {p: numel for child in children[parent] for p, numel in taken[child][1].items()}
        return sum(params.values()) if once else sum(taken[child][0] for child in children[parent]), params

    return below(module)[0]


def observe_walk(answer, size):
    """Questions, wrappings in order, the number returned, and the model afterwards."""
    model = tree(size)
    names = {module: name for name, module in model.named_modules()}
    asked, wrapped = [], []

    def policy(*order, **named):
        if order or named.keys() != {"module", "recurse", "nonwrapped_numel"}:
            raise AnswerError(
                f"arguments of `policy`: expected module=, recurse= and nonwrapped_numel=, got {len(order)} without a "
                f"name and {', '.join(named) or 'no other'}\nlikely slip: policies differ in the order of their "
                "parameters: name all three"
            )
        module, recurse, nonwrapped_numel = named["module"], named["recurse"], named["nonwrapped_numel"]
        name = names.get(module, "what wrap returned")
        asked.append((name, "look into it" if recurse else "wrap it", nonwrapped_numel))
        return name != "closed" if recurse else isinstance(module, (nn.Linear, Twice))

    def wrap(module):
        wrapped.append(names.get(module, "what wrap returned"))
        if wrapped[-1] not in ("body.0.first", "left.0.0"):  # whose other parents will still be asked about
            for attribute, p in list(module._parameters.items()):
                module._parameters[attribute] = nn.Parameter(p.detach().flatten()[:1])  # a shard is left
        return Unit(module)

    returned = answer(model, policy, wrap)
    return asked, wrapped, returned, model


def units_of(model):
    """The names under which there are units, and how many different ones."""
    try:
        found = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, Unit)}
    except RecursionError:
        raise AnswerError(
            "the tree of modules: expected an end to it, got a module that contains itself\n"
            "likely slip: what `wrap` returned was put in a place below itself"
        ) from None
    return sorted(name.replace(".inside", "") for name in found), len(set(found.values()))


@check("10a.2")
def check_wrap_where(answer, variant):
    """Asked in order and once each, with what is left; wrapped innermost first; in place under every name."""
    asked, wrapped, returned, model = observe_walk(answer, variant.size)
    asked_, wrapped_, returned_, model_ = observe_walk(walk, variant.size)
    asked_once, _, returned_once, _ = observe_walk(lambda *args: walk(*args, once=True), variant.size)
    if [each for each in asked if each[1] == "wrap it"] == [each for each in asked_once if each[1] == "wrap it"]:
        asked_ = asked_once  # a unit in two parents may count in both, or once
    into = [each for each in asked if each[1] == "look into it"]
    up = [each for each in asked if each[1] == "wrap it"]
    into_, up_ = ([each for each in asked_ if each[1] == what] for what in ("look into it", "wrap it"))
    if not into:
        raise AnswerError(
            "questions with recurse=True: expected one for each module, got none\n"
            "likely slip: what the policy wants left alone, such as an nn.MultiheadAttention, is known only by asking"
        )
    if "" in wrapped or any(name == "" for name, *_ in asked):
        raise AnswerError(
            "questions about `module` itself: expected none, got one\n"
            "likely slip: the outermost module is the caller's business, the walk begins below it"
        )
    if any(name.startswith("closed.") for name, *_ in asked):
        raise AnswerError(
            "questions about what is in `closed`: expected none, got some\n"
            "likely slip: the policy said no to recurse=True, so nothing in it is looked at"
        )
    if len(wrapped) != len(set(wrapped)):
        raise AnswerError(
            f"modules given to wrap: expected each once, got {', '.join(wrapped)}\n"
            "likely slip: a module that is in two places would be two units: remember what has become of each"
        )
    if twice := next((name for name, *_ in into if [each[0] for each in into].count(name) > 1), None):
        raise AnswerError(
            f"questions with recurse=True about {twice}: expected 1, got {[each[0] for each in into].count(twice)}\n"
            "likely slip: remember every module that was asked about, whether it became a unit or not"
        )
    if any(name == "what wrap returned" for name, *_ in asked) or "what wrap returned" in wrapped:
        raise AnswerError(
            "questions about what `wrap` has returned: expected none, got some\n"
            "likely slip: wrapped before its children were walked, or replaced while the walk goes on below it"
        )
    if (
        sorted(wrapped) == sorted(wrapped_)
        and wrapped != wrapped_
        and wrapped.index("body.0") < wrapped.index("body.0.own")
    ):
        raise AnswerError(
            f"modules in the order of wrapping: expected {', '.join(wrapped_)}, got {', '.join(wrapped)}\n"
            "likely slip: the innermost first, or an outer unit takes what its inner ones should have"
        )
    if [each[:2] for each in into] == [each[:2] for each in into_]:
        slips = {
            "stem": "what is frozen counts as well: it is in a unit like the rest",
            "closed": "elements count, whatever their dtype: in bf16 there are as many in half the bytes",
            "tied": "a parameter that two modules share counts once: `parameters()` tells it once",
        }
        for got, wanted in zip(into, into_, strict=True):
            slip = slips.get(wanted[0], "on the way down the policy is told all elements of the module's parameters")
            expect(f"elements of {wanted[0]} told with recurse=True", got[2], wanted[2], slip=slip)
    if [each[:2] for each in up] == [each[:2] for each in up_]:
        slip = "on the way up the policy is told what is left, without what units inside have taken"
        shards = "elements are to be counted before the walk goes down, and a module under two names of a parent once"
        for got, wanted in zip(up, up_, strict=True):
            usual = shards if got[2] < wanted[2] else slip
            expect(f"elements of {wanted[0]} told with recurse=False", got[2], wanted[2], slip=usual)
    for number, wanted in enumerate(asked_):
        got = asked[number] if number < len(asked) else "no more questions"
        slip = "each module once: down, then its children, then up"
        if got[:2] == ("closed", "wrap it"):
            slip = "after a no to recurse=True there is no second question"
        elif wanted[2] == 0 and wanted[1] == "look into it":
            slip = "a module without parameters is asked about like any other"
        expect(f"question {number + 1} of {len(asked_)}", got, wanted, slip=slip)
    expect("number of questions", len(asked), len(asked_), slip="each module once: down, then its children, then up")
    (where, number), (where_, number_) = units_of(model), units_of(model_)
    missing = "a module under several names is one unit under each of them; `named_children()` tells the first alone"
    expect("names under which units are found", where, where_, slip=missing)
    expect("different units", number, number_, slip=missing)
    slip = "a unit counts with all its elements, whatever inner units hold of them; one in two names of a parent once"
    expect("elements returned", returned, returned_once if returned == returned_once else returned_, slip=slip)
    walked_again(answer, variant.size, (returned_, returned_once))


def walked_again(answer, size, totals):
    """Twice over one model: the first time nothing is looked into, the second time units are wrapped in place."""
    model, asked = tree(size), []

    def no(module, recurse, nonwrapped_numel):
        asked.append(module)
        return False

    def linear(module, recurse, nonwrapped_numel):
        asked.append(module)
        return module is not model.closed if recurse else isinstance(module, (nn.Linear, Twice))

    slip = "what the policy says no to is in no unit"
    expect("elements returned where the policy always says no", answer(model, no, lambda module: module), 0, slip=slip)
    below, first = len({*model.children()}), len(asked)
    expect("questions where the policy always says no", first, below, slip="one for each child, and none below")
    total = answer(model, linear, lambda module: module)
    slip = "another call begins anew: what a walk remembers of the modules ends with it"
    expect(
        "questions of a second walk over the same model, more than of the first",
        len(asked) > 2 * first,
        True,
        slip=slip,
    )
    slip = "`wrap` may work in place and return the same module, as `fully_shard` does: it is a unit all the same"
    expect("elements returned where `wrap` works in place", total, total if total in totals else totals[0], slip=slip)
