"""Exercise 4.5: Units: six layers, three flat parameters."""

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import nn

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, same
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter, find_parameters

from .shared import WHOLE_N


@reference(
    "4.5",
    hints=(
        "Each module belongs to one unit: `{child: number for number, unit in enumerate(inner, 1) for child in "
        "unit.modules()}`, and what is not in there to the root, 0. A parameter's unit is that of the module it is in.",
        "`model.named_parameters(remove_duplicate=False)` shows a tied parameter at each place, and "
        '`model.get_submodule(name.rpartition(".")[0])` is the module there. Remember for each parameter the unit '
        "and the name of its first place; at a further place the unit must be the same.",
    ),
    forbids=(FlatParameter.__init__, find_parameters),
)
def assign_units(model: nn.Module, inner: list[nn.Module], ranks: int) -> list[dict[str, int]]:
    """Return the layout of each unit's flat parameter, that of the root first.

    Args:
        model: the whole model.
        inner: modules in `model` that are units themselves; none of them is inside another.
        ranks: N.

    Returns:
        A dict for the root, then one for each of `inner`, in order. Each maps a parameter's name in
        `model` to its number of elements, in the order of `model.named_parameters()`; its last key
        is `"padding"`. A parameter that is tied within its unit appears once, under its first name.

    Raises:
        ValueError: two units use the same parameter; the message names both places.
    """
    unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
    units: list[dict[str, int]] = [{} for _ in range(1 + len(inner))]
    first: dict[nn.Parameter, tuple[int, str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
        if p not in first:
            first[p] = unit, name
            units[unit][name] = p.numel()
        elif first[p][0] != unit:
            raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
    for layout in units:
        layout["padding"] = -sum(layout.values()) % ranks
    return units


def six_layers(widths):
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    layers[1].bias.requires_grad_(False)
    layers[2].register_buffer("scale", torch.ones(3))
    pairs = [nn.Sequential(OrderedDict({f"layer{i}": layers[i] for i in pair})) for pair in ((1, 2), (4, 5))]
    return nn.Sequential(OrderedDict(layer0=layers[0], middle=pairs[0], layer3=layers[3], last=pairs[1]))


NAMES = ["layer0", "middle.layer1", "middle.layer2", "layer3", "last.layer4", "last.layer5"]


def rows(widths, numbers, ranks, without=(), buffers=False):
    """The layout of a unit of these layers: pairs of name and elements, and the padding."""
    found = []
    for i in numbers:
        a, b = widths[i], widths[i + 1]
        found += [(f"{NAMES[i]}.weight", a * b), (f"{NAMES[i]}.bias", b)]
        found += [(f"{NAMES[i]}.scale", 3)] if buffers and i == 2 else []
    found = [row for row in found if row[0] not in without]
    return [*found, ("padding", -sum(n for _, n in found) % ranks)]


def pairs_of(units):
    ok = isinstance(units, (list, tuple)) and all(isinstance(unit, dict) for unit in units)
    return [list(unit.items()) for unit in units] if ok else units


@check("4.5")
def check_assign_units(answer, variant):
    """Each parameter in one unit, the root's are the rest; padding once per unit; a tie between units is refused."""
    widths = [3, variant.size, 4, variant.size + 1, 2, 4, 5]
    for ranks in (variant.ranks, 16):
        model = six_layers(widths)
        for inner, numbers in (
            (("middle", "last"), [(0, 3), (1, 2), (4, 5)]),
            (("last",), [(0, 1, 2, 3), (4, 5)]),
            (("last", "middle"), [(0, 3), (4, 5), (1, 2)]),
        ):
            units_of(answer, widths, model, inner, numbers, ranks)
    model = six_layers([2, 2, 2, 2, 2, 2, 2])  # two layers have 12 elements
    units_of(answer, [2] * 7, model, ("middle", "last"), [(0, 3), (1, 2), (4, 5)], 4)
    for one, other in ((1, 2), (0, 3)):
        model = six_layers([3] * 7)
        tie(model, one, other)
        without = [f"{NAMES[other]}.weight"]
        units_of(answer, [3] * 7, model, ("middle", "last"), [(0, 3), (1, 2), (4, 5)], 4, without)
    for one, other in ((0, 5), (2, 4)):
        model = six_layers([3] * 7)
        tie(model, one, other)
        refused(answer, model, f"{NAMES[one]}.weight", f"{NAMES[other]}.weight")
    slip = "a name that begins as the unit's does: `layer10` is not in `layer1`, compare modules, or prefix and dot"
    three_layers(answer, ("layer1", "layer10", "layer2"), slip)
    slip = "parameters of equal values taken for one: they are tied if they are one object"
    three_layers(answer, ("layer0", "layer1", "layer2"), slip, zeros=True)
    reached_twice(answer)
    own_and_without_memory(answer)


def own_and_without_memory(answer):
    """A Parameter of the root itself; all on meta, where parameters have one address."""
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(one=nn.Linear(2, 2), two=nn.Linear(2, 2)))
        model.scale = nn.Parameter(torch.ones(()))
    what = "units of a scalar of the root, and of the layers one and two, on meta, with one wrapped, over 4 ranks"
    try:
        got = pairs_of(answer(model, [model.one], 4))
    except (ValueError, AttributeError) as error:
        said = f"{what}: expected layouts, got {type(error).__name__}: {error}"
        slip = "the root's own Parameter has no dot in its name; and on meta all parameters have one address"
        raise AnswerError(f"{said}\nlikely slip: {slip}") from error
    root = [("scale", 1), ("two.weight", 4), ("two.bias", 2), ("padding", 1)]
    slip = "a parameter is known by what it is, and not by its address: those on meta have none"
    expect(what, got, [root, [("one.weight", 4), ("one.bias", 2), ("padding", 2)]], slip=slip)


def reached_twice(answer):
    """A wrapped module that the model applies at two places: its parameters are in one unit all the same."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict(first=layer, middle=nn.Linear(2, 3), again=layer))
    what = "units of first, middle and again, where first and again are one module, which is wrapped, over 4 ranks"
    slip = "a module may have two paths, which is no tie of two units: compare modules, not the beginnings of names"
    wanted = [
        [("middle.weight", 6), ("middle.bias", 3), ("padding", 3)],
        [("first.weight", 4), ("first.bias", 2), ("padding", 2)],
    ]
    try:
        got = pairs_of(answer(model, [layer], 4))
    except ValueError as error:
        raise AnswerError(f"{what}: expected layouts, got ValueError: {error}\nlikely slip: {slip}") from error
    expect(what, got, wanted, slip=slip)


def three_layers(answer, names, slip, zeros=False):
    """With none of them wrapped, and the first."""
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    if zeros:
        for p in model.parameters():
            nn.init.zeros_(p)
    each = [[(f"{name}.weight", 4), (f"{name}.bias", 2)] for name in names]
    for inner, wanted in (
        ([], [[*each[0], *each[1], *each[2], ("padding", 2)]]),
        ([model[0]], [[*each[1], *each[2], ("padding", 0)], [*each[0], ("padding", 2)]]),
        (list(model), [[("padding", 0)], *([*rows, ("padding", 2)] for rows in each)]),
    ):
        equal = ", all zero" if zeros else ""
        what = f"units of {', '.join(names)}{equal}, with {len(inner) or 'none'} wrapped, over 4 ranks"
        try:
            got = pairs_of(answer(model, inner, 4))
        except ValueError as error:
            raise AnswerError(f"{what}: expected layouts, got ValueError: {error}\nlikely slip: {slip}") from error
        expect(what, got, wanted, slip=slip)


def tie(model, one, other):
    layers = [model.get_submodule(name) for name in NAMES]
    layers[other].weight = layers[one].weight


def units_of(answer, widths, model, inner, numbers, ranks, without=()):
    tied = f", {without[0]} tied within its unit" if without else ""
    where = f"with {' and '.join(inner)} wrapped, over {ranks} ranks{tied}"
    try:
        given = [model.get_submodule(name) for name in inner]
        got = pairs_of(answer(model, given, ranks))
        slip = "the list is the caller's, and is only read"
        expect("modules in `inner` afterwards", len(given), len(inner), slip=slip)
    except ValueError as error:
        raise AnswerError(
            f"units {where}: expected their layouts, got ValueError: {error}"
            + ("\nlikely slip: a tie within one unit is no error, only one between two units is" if without else "")
        ) from error
    wanted = [rows(widths, each, ranks, without) for each in numbers]
    everything = range(6)
    stages = [[0, 1], [2, 3], [4, 5]] if len(inner) == 2 else [[0, 1, 2], [3, 4, 5]]
    whole = [[*unit[:-1], ("padding", -sum(n for _, n in unit[:-1]) % ranks or ranks)] for unit in wanted]
    model_order = sorted(range(1, len(wanted)), key=lambda unit: numbers[unit])
    slips = {
        "the units stand in the order of `inner`, not in that of the model": [
            wanted[0],
            *(wanted[unit] for unit in model_order),
        ],
        "a buffer is no parameter: it is not flattened": [
            rows(widths, each, ranks, without, buffers=True) for each in numbers
        ],
        "frozen parameters are flattened as well: a unit is gathered whole": [
            rows(widths, each, ranks, (*without, f"{NAMES[1]}.bias")) for each in numbers
        ],
        "the root holds only what no inner unit holds, not the whole model again": (
            [rows(widths, everything, ranks, without), *wanted[1:]]
        ),
        "consecutive groups are pipeline stages: a unit is what is wrapped, the root the rest, wherever it is": (
            [rows(widths, each, ranks, without) for each in stages]
        ),
        "the tied parameter is counted at both places: within its unit it is flattened once": (
            [rows(widths, each, ranks) for each in numbers]
        ),
        "the padding is that of the unit's sum, once, not of each parameter": [
            [*unit[:-1], ("padding", sum(-n % ranks for _, n in unit[:-1]))] for unit in wanted
        ],
        WHOLE_N: whole,
    }
    all_wrong = next((text for text, wrong in slips.items() if same(got, wrong)), None)  # explains all units at once
    if not isinstance(got, list) or len(got) != len(wanted):
        count = f"{len(got)} units" if isinstance(got, list) else describe(got)
        raise AnswerError(f"units {where}: expected a list of {len(wanted)} dicts, got {count}")
    for i, (unit, right) in enumerate(zip(got, wanted, strict=True)):
        name = "root unit" if i == 0 else f"unit of {inner[i - 1]}"
        usual = {} if all_wrong else {text: wrong[i] for text, wrong in slips.items() if wrong[i] != right}
        slip = all_wrong
        if slip is None and same(unit[:-1], right[:-1]):
            slip = "the padding is that of the unit's sum, once"
        elif slip is None and same(sorted(unit, key=str), sorted(right, key=str)):
            slip = "another order: as the model registers them, and the padding last"
        expect(f"{name} {where}", unit, right, slips=usual, slip=slip)


def refused(answer, model, one, other):
    what = f"{one} and {other} are one parameter in two units: expected a ValueError that names both"
    try:
        got = pairs_of(answer(model, [model.middle, model.last], 4))
    except ValueError as error:
        if one in str(error) and other in str(error):
            return
        raise AnswerError(f"{what}, got ValueError: {error}") from error
    twice = sum(name in (one, other) for unit in got for name, _ in unit) == 2
    slip = (
        "the tie was not seen (`named_parameters()` tells one place of each), so one unit has the parameter, "
        "and the other computes with memory that was freed"
    )
    if twice:
        slip = "each unit shards and updates a copy of its own, and the two gradients are never added"
    raise AnswerError(f"{what}, got layouts\nlikely slip: {slip}")
