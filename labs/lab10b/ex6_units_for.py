"""Exercise 10b.6: Units that do not mix."""

import torch
from torch import nn

from minifsdp.course.workshop.checking import AnswerError, check
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import find_parameters


@reference(
    "10b.6",
    hints=(
        "First find the units that would be mixed: the parameters of `find_parameters(top, skip=the blocks inside it)` "
        "for the model and for each block, which has none inside. Then walk down into those, and stop at the first "
        "module that is trained through and through.",
        "A recursive `separate(module)`: for each child that is no block, `{p.requires_grad for p in "
        "find_parameters(child, skip=the blocks inside it)}`; if that is `{True}`, the child is a unit, else go on "
        "inside it.",
    ),
)
def units_for(model: nn.Module, block: type[nn.Module]) -> set[nn.Module]:
    """Return the submodules to make units, so that no unit mixes frozen and trainable parameters.

    Args:
        model: the outermost module; always a unit, so it is not in the result. Each parameter is trainable or frozen
            (`p.requires_grad`); the parameters that a module holds *directly* are either all trainable or all frozen.
        block: the class of the model's blocks; no block lies inside another.

    Every block is a unit. A block's unit starts with all parameters of the block, and the model's unit starts with the
    parameters outside all blocks. (`find_parameters(module, skip=inner)` gives a dict of the parameters in `module`,
    without those in a module of `inner`; the dict is empty if `module` itself is in `inner`.) If the unit's parameters
    are all trainable, or all frozen, make no further units inside it. If they are mixed, consider the modules inside it
    (in the model: only those outside all blocks, the blocks themselves excluded), and each module's parameters outside
    any block inside it. A module becomes a unit if it has such parameters and all of them are trainable. Of nested
    modules, only the *outermost* becomes a unit.
    """
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def kinds(module: nn.Module) -> set[bool]:
        inner = [each for each in module.modules() if each in blocks and each is not module]
        return {p.requires_grad for p in find_parameters(module, skip=inner)}

    def separate(module: nn.Module) -> None:
        for child in module.children():
            if child not in blocks:
                if kinds(child) == {True}:
                    units.add(child)
                else:
                    separate(child)

    for top in (model, *blocks):
        if len(kinds(top)) > 1:
            separate(top)
    return units


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)


class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base, self.adapter = nn.Linear(width, width), Adapter(width)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.ModuleDict({"proj": Adapted(width), "act": nn.Tanh()})


class LastLayer(Layer):
    """A block by inheritance."""


class Toy(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, width), nn.ModuleList(Layer(width) for _ in range(layers - 1))
        self.layers.append(LastLayer(width))
        self.tail = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 5))


class Body(Toy):
    """Holds blocks, and a parameter directly."""

    def __init__(self, width, layers):
        super().__init__(width, layers)
        self.gain = nn.Parameter(torch.ones(width))


class Headed(nn.Module):
    """A body with blocks, and a head beside it, as language models have."""

    def __init__(self, width, layers):
        super().__init__()
        self.body, self.head = Body(width, layers), nn.Linear(width, 5)


def frozen_but(model, *trained):
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in trained))
    return model


@check("10b.6")
def check_units_for(answer, variant):
    """No unit mixes, and none is smaller than it has to be."""
    width, layers = variant.size, 3
    every = [f"layers.{number}" for number in range(layers)]
    adapters = [f"{name}.inner.proj.adapter" for name in every]
    norms = [f"{name}.norm" for name in every]
    cases = {
        "everything is trained": (("",), every),
        "everything is frozen": (("nothing",), every),
        "norms are trained": ((".norm",), every + norms),
        "adapters are trained": (("adapter",), every + adapters),
        "adapters and norms are trained": (("adapter", ".norm"), every + adapters + norms),
        "the last block is trained": ((f"layers.{layers - 1}",), every),
        "the tail is trained": (("tail",), [*every, "tail"]),
        "blocks are trained, embedding and tail are not": (("layers",), every),
        "a block's adapter and the tail are trained": (
            ("layers.1.inner.proj.adapter", "tail"),
            [*every, adapters[1], "tail"],
        ),
    }
    inside = [f"body.{name}" for name in every]
    headed = {
        "blocks and head are frozen, the rest of the body is trained": (
            ("body.embed", "body.gain", "body.tail"),
            [*inside, "body"],
        ),
        "the head is trained, the body is frozen": (("head",), [*inside, "head"]),
    }
    for what, case in cases.items():
        check_units(answer, what, Toy(width, layers), every, *case)
    for what, case in headed.items():
        check_units(answer, what, Headed(width, layers), inside, *case)
    own = "all but the parameter that the model holds directly is trained"
    check_units(answer, own, Body(width, layers), every, ("embed", "tail", "layers"), [*every, "embed", "tail"])


def check_units(answer, what, model, every, trained, wanted):
    model = frozen_but(model, *trained)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    got = answer(model, Layer)
    names = {module: name for name, module in model.named_modules()}
    if not isinstance(got, set | frozenset) or any(module not in names for module in got):
        raise AnswerError(f"{what}: expected a set of the model's modules, got {type(got).__name__}")
    got = {names[module] for module in got}
    changed = {name: p.requires_grad for name, p in model.named_parameters()} != before
    if changed:
        raise AnswerError(f"{what}: expected the parameters as they were, got `requires_grad` changed")
    if got != set(wanted):
        raise AnswerError(why_units(what, model, got, set(wanted), every))


def why_units(what, model, got, wanted, blocks):
    more, less = sorted(got - wanted), sorted(wanted - got)
    faults = [f"missing: {', '.join(less)}"] if less else []
    faults += [f"too many: {', '.join(name or 'the model itself' for name in more)}"] if more else []
    lines = [f"{what}: units {'; '.join(faults)}"]
    modules = dict(model.named_modules())
    children = {f"{block}.{child}" for block in blocks for child, _ in modules[block].named_children()}

    if less and what.startswith("all but the parameter") and not set(less) & set(blocks):
        slip = "the model's unit has the parameters that it holds directly as well: with one frozen it mixes"
    elif less and all(type(modules[name]) is LastLayer for name in less):
        slip = "a subclass of `block` is a block too: `isinstance`"
    elif set(less) & set(blocks):
        slip = "each block is a unit, whatever is frozen in it"
    elif "" in more:
        slip = "the outermost module is wrapped anyway: name submodules"
    elif any(not next(iter(modules[name].parameters()), None) is not None for name in more):
        slip = "a module without parameters makes no unit"
    elif "layers" in more:
        slip = "once its blocks are units, a list of blocks has no parameters left"
    elif any(block.startswith(f"{name}.") for name in less for block in blocks):
        slip = "on the way down, too, only the parameters outside its blocks count"
    elif children & set(less) and not children & got:
        slip = "no block is found to mix: if `skip` has the block itself, no parameter of it is left to look at"
    elif more and all(any(name.startswith(f"{other}.") for other in wanted - set(blocks)) for name in more):
        slip = "go no deeper than necessary: a module that is trained entirely is one unit, not several"
    elif any(not p.requires_grad for name in more for p in modules[name].parameters()) and less:
        slip = "separate the trained ones: frozen modules stay together in what is left of the block"
    elif any(not p.requires_grad for name in more for p in modules[name].parameters()):
        slip = "one unit of frozen parameters too many: the block's own unit has them already"
    elif any(name.startswith(block + ".") for name in more for block in blocks) or more:
        slip = "a unit that does not mix needs no separation: every additional unit is an additional message"
    elif any(name == "tail" for name in less):
        slip = "the root is a unit too: what no block holds can mix as well"
    elif less:
        slip = "look deeper: trained modules may lie further down than a block's children"
    else:
        slip = ""
    return "\n".join([*lines, *([f"likely slip: {slip}"] if slip else [])])
