"""Exercise 4.4: Tied weights."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, same
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.instruments.watch.ledger import Ledger

from .shared import total


@reference(
    "4.4",
    hints=(
        "Walk `module.named_modules()` and each child's `child._parameters.items()`: there a tied parameter appears "
        "at every place. A dict keyed by the Parameter itself (it hashes by identity) collects its places.",
        "`places.setdefault(p, []).append((child, attribute, name))`; `flatten(list(places))` once; then everywhere "
        "`del child._parameters[attribute]` and `setattr(child, attribute, view)`.",
    ),
    forbids=(FlatParameter.__init__, find_parameters),
)
def place_views(module: nn.Module, flatten: Callable[[list[nn.Parameter]], list[Tensor]]) -> list[list[str]]:
    """Replace every parameter of `module` by a view, in each place that uses it.

    Afterwards no module registers a Parameter; the view is an attribute of the same name instead.

    Args:
        module: any tree of modules; a parameter may be used in several places, and a module may have
            None instead of a parameter.
        flatten: call it once with all parameters, each once, in the order of
            `module.named_parameters()`; it returns a view for each.

    Returns:
        For each parameter, the qualified names of its places, in the order of
        `module.named_modules()`, which lists a module once even if two paths reach it:
        `[["embed.weight", "head.weight"], ["head.bias"]]`.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for prefix, child in module.named_modules():
        for attribute, p in child._parameters.items():
            if p is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places.setdefault(p, []).append((child, attribute, name))
    for view, users in zip(flatten(list(places)), places.values(), strict=True):
        for child, attribute, _ in users:
            del child._parameters[attribute]
            setattr(child, attribute, view)
    return [[name for _, _, name in users] for users in places.values()]


class Tied(nn.Module):
    """A head with the embedding's weight, two norms of equal values, and one layer under two names."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.embed = nn.Embedding(size, 4)
        self.norm1, self.norm2 = nn.LayerNorm(4, bias=False), nn.LayerNorm(4, bias=False)
        self.up = self.again = nn.Linear(4, 4)
        self.head = nn.Linear(4, size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.again(self.up(self.norm1(self.embed(tokens))))
        return self.head(self.norm2(self.scale * hidden)).square().mean()


TIED_NAMES = [
    ["scale"],
    ["embed.weight", "head.weight"],
    ["norm1.weight"],
    ["norm2.weight"],
    ["up.weight"],
    ["up.bias"],
]
BY_PATH = [[each[0], each[0].replace("up", "again")] if "up" in each[0] else each for each in TIED_NAMES]


@check("4.4")
def check_place_views(answer, variant):
    """Each parameter flattened once, its view in every place, and the gradient of both places in the one buffer."""
    torch.manual_seed(variant.seed)
    tokens = torch.arange(variant.size)
    plain = Tied(variant.size)
    loss = plain(tokens)
    loss.backward()
    with Ledger() as ledger:
        model = Tied(variant.size)
        model.load_state_dict(plain.state_dict())
        names = {id(p): name for name, p in model.named_parameters()}
        given, views, buffers = [], [], []

        def flatten(params):
            if any(p is None for p in params):
                raise AnswerError(
                    "what `flatten` is given: expected Parameters, got None among them\n"
                    "likely slip: a module may have None for a parameter (`bias=False`): skip it"
                )
            given.extend(names.get(id(p), "no parameter of the model") for p in params)
            full = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
            parts = torch.split(full, [p.numel() for p in params])
            buffers.append(full)
            views.extend(part.view(p.shape) for part, p in zip(parts, params, strict=True))
            return list(views)

        said = answer(model, flatten)
        ledger.mark("placed")
        left = total(ledger)
    if not buffers:
        raise AnswerError("`flatten` was not called: it makes the views")
    expect("calls of `flatten`", len(buffers), 1, slip="one call with all parameters: they share one buffer")
    first = [users[0] for users in TIED_NAMES]
    expect(
        "what `flatten` is given",
        given,
        first,
        slips={
            "the tied parameter once per place: flattened, sharded and updated twice, it is tied no more": (
                [*first, "embed.weight"]
            ),
            "parameters of equal values taken for one: they are tied if they are one object": (
                [name for name in first if not name.startswith("norm2")]
            ),
        },
        slip="each parameter once, in the order of `named_parameters`",
    )
    check_places(model, views)
    expect(
        "names returned",
        said,
        TIED_NAMES,
        slips={
            "one place of each: the tied parameter has two": [[name] for name in first],
            "the root's own Parameter has no prefix, and no dot": [[".scale"], *TIED_NAMES[1:]],
            "a module reached by two paths is one place: `named_modules()` shows it once": BY_PATH,
        },
    )
    expect("parameters that the model still registers", [name for name, _ in model.named_parameters()], [])
    found = model(tokens)
    expect("loss with the views", found.detach(), loss.detach(), slip="the views are not where they belong")
    found.backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    expect("gradient of the buffer", buffers[0].grad, wanted, tolerance=1e-5)
    expect("bytes left", left, wanted.numel() * 4, slip="the original parameters are still held by somebody")
    check_nested(answer)
    check_twice_in_one(answer)
    check_without_memory(answer)


def check_without_memory(answer):
    """Parameters on meta, which have no memory: all have one address."""
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(one=nn.Linear(2, 2, bias=False), two=nn.Linear(2, 2, bias=False)))
    said = answer(model, lambda params: [p.detach() for p in params])
    slip = "a parameter is known by what it is, and not by its address: those on meta have none"
    expect("names returned of two layers on meta", said, [["one.weight"], ["two.weight"]], slip=slip)


def check_twice_in_one(answer):
    """A module that has one Parameter under two names."""
    layer = nn.Module()
    layer.left = layer.right = nn.Parameter(torch.ones(3))
    model, views = nn.ModuleDict({"layer": layer}), []

    def flatten(params):
        views.extend(p.detach().clone() for p in params)
        return list(views)

    said = answer(model, flatten)
    where = "of a module that has one Parameter under two names"
    expect(f"Parameters {where}", len(views), 1, slip="it is flattened once")
    slip = "both names are places of it, though they are in one module"
    expect(f"names returned {where}", said, [["layer.left", "layer.right"]], slip=slip)
    found = [getattr(layer, name, None) is views[0] for name in ("left", "right")]
    expect(f"names {where} that have the view", found, [True, True], slip=slip)


def check_nested(answer):
    """Three levels down; a frozen parameter, and buffers, which stay where they are."""
    norm, linear = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False).requires_grad_(False)
    model = nn.ModuleDict({"outer": nn.ModuleDict({"inner": nn.ModuleDict({"norm": norm, "linear": linear})})})
    buffers, views = dict(model.named_buffers()), []

    def flatten(params):
        full = torch.cat([p.detach().reshape(-1) for p in params])
        views.extend(
            part.view(p.shape) for part, p in zip(full.split([p.numel() for p in params]), params, strict=True)
        )
        return list(views)

    said = answer(model, flatten)
    places = [(norm, "weight"), (norm, "bias"), (linear, "weight")]
    names = [[f"outer.inner.{'norm' if module is norm else 'linear'}.{attribute}"] for module, attribute in places]
    where = "of a frozen layer and a BatchNorm three levels down"
    slip = "every module of the tree, whatever its depth, and every parameter, trained or not"
    expect(f"names returned {where}", said, names, slip=slip)
    found = [getattr(module, attribute) is view for (module, attribute), view in zip(places, views, strict=True)]
    expect(f"places {where} that have their view", found, [True] * 3, slip=slip)
    slip = "a buffer is no parameter, and stays as it is"
    after = dict(model.named_buffers())
    kept = [name for name in buffers if after.get(name) is buffers[name]]
    expect(f"buffers {where}", [sorted(kept), len(after)], [sorted(buffers), len(buffers)], slip=slip)


def check_places(model, views):
    for view, users in zip(views, TIED_NAMES, strict=True):
        for name in users:
            path, _, attribute = name.rpartition(".")
            found = getattr(model.get_submodule(path), attribute, None)
            if found is view:
                continue
            got, slip = describe(found), None
            if isinstance(found, nn.Parameter):
                same_memory = found.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                got = "a Parameter over the view's memory" if same_memory else "the old Parameter"
                slip = "this place was forgotten: a tied parameter has two"
                if same_memory:
                    slip = "a Parameter is a leaf: its gradient stays in it and never reaches the buffer"
                elif name == users[0]:
                    slip = "the old Parameter is still registered there: delete it from `_parameters`, then set"
            elif isinstance(found, torch.Tensor):
                got = "another tensor of the same values" if same(found, view, 1e-6) else describe(found)
                slip = "a copy of the view: a gather writes to the buffer, and this place would not see it"
                if found.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
                    got, slip = "another view of the same memory", "it has its shape already: set it as it is"
                    if not found.requires_grad:
                        got, slip = "a detached view", "autograd does not find the flat Parameter: its gradient is lost"
            raise AnswerError(
                f"{name}: expected the view itself, got {got}" + (f"\nlikely slip: {slip}" if slip else "")
            )
