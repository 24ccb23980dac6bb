"""The checks of lab 10a."""

from contextlib import contextmanager
from typing import ClassVar
from zlib import crc32

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

# 10a.1 A policy by size


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


# 10a.2 The walk


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


# 10a.3 Materialize one unit from meta


class Counted(nn.Linear):
    """Knows how often it was reset, and in which order."""

    order: ClassVar[list[str]] = []

    def __init__(self, *args, label, **kwargs):
        self.label = label
        super().__init__(*args, **kwargs)

    plain: ClassVar[list[str]] = []  # those that had no Parameter when they were reset

    def reset_parameters(self):
        if self.label is not None:
            self.order.append(self.label)
        if not isinstance(self.weight, nn.Parameter):
            self.plain.append(self.label)
        super().reset_parameters()


class Scaled(nn.Module):
    """Two parameters of its own, one of which is zero at first, and a child that is another unit's."""

    def __init__(self, size):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(2))
        self.inner = Counted(size, size, label="inner")

    def reset_parameters(self):
        Counted.order.append("scaled")
        nn.init.normal_(self.scale)
        nn.init.zeros_(self.shift)


class Forgetful(nn.Linear):
    """Leaves its bias unwritten, but for the first element."""

    resets = 0

    def reset_parameters(self):
        self.resets += 1
        nn.init.normal_(self.weight)
        nn.init.ones_(self.bias[:1])


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def unit_on_meta(size, forgetful=False, dtype=torch.float32):
    """A unit and what it leaves to another one: the linear layer inside of `scaled`."""
    with torch.device("meta"), default_dtype(dtype):
        unit = nn.Module()
        unit.first = Counted(size, 3, label="first")
        unit.scaled = Scaled(size)
        unit.last = Forgetful(3, 2) if forgetful else Counted(size, 3, label="last")
        unit.more = Forgetful(2, 2) if forgetful else None
    if not forgetful:
        unit.last.weight = unit.first.weight  # tied, and each with a bias of its own
        unit.head = Counted(size, 3, bias=False, label="head")
        unit.head.weight = unit.first.weight  # tied, and all that it has
    inner = unit.scaled.inner = Counted(size, size, label="inner", dtype=dtype)
    return unit, inner


def wanted_values(params, seed):
    """Every module's values, in memory of its own."""
    torch.manual_seed(seed)
    values = {}
    for p in params:
        values[p] = torch.empty(p.shape, dtype=p.dtype)
    for module in dict.fromkeys(place.module for places in params.values() for place in places):
        had = {a: p for a, p in module._parameters.items() if p is not None}
        own = {a: next(v for q, v in values.items() if q is p) for a, p in had.items()}
        if isinstance(module, Scaled):
            nn.init.normal_(own["scale"])
            nn.init.zeros_(own["shift"])
            continue
        nn.init.kaiming_uniform_(own["weight"], a=5**0.5)
        bound = own["weight"].shape[1] ** -0.5
        if "bias" in own:
            nn.init.uniform_(own["bias"], -bound, bound)
    return list(values.values())


@check("10a.3")
def check_fill_from_meta(answer, variant):
    """Each module's own reset, once and in place; nothing recursive, nothing left behind, no other memory."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        filled_in(answer, variant, dtype)
    unwritten(answer, variant)


def filled_in(answer, variant, dtype):
    Counted.plain.clear()
    unit, inner = unit_on_meta(variant.size, dtype=dtype)
    params = find_parameters(unit, skip=[inner])
    before = [(place.module, place.attribute, p) for p, places in params.items() for place in places]
    inner_values = inner.weight.detach().clone()
    wanted = wanted_values(params, variant.seed)
    Counted.order.clear()
    extra, filled = [], []

    def fill(views, originals):
        total = sum(ledger.live().values())
        ledger.reset_peaks()
        for view in views:
            view.fill_(7.0)  # unwritten memory has some value or other
        torch.manual_seed(variant.seed)
        try:
            answer(views, params)
        except RuntimeError as error:
            slip = "what is written may be zero: only NaN is what no initialization writes on purpose"
            if dtype != torch.float32:
                slip = f"the views are in {str(dtype).removeprefix('torch.')}: a cast is a copy, in other memory"
            elif any(view.isnan().any() or bool((view == 7.0).all()) for view in views):
                slip = "a module was reset in other memory: its Parameter has to be one of the view, and to stay it"
            raise AnswerError(
                f"modules that write everything: expected no error, got {type(error).__name__}: {error}\n"
                f"likely slip: {slip}"
            ) from error
        extra.append(ledger.peak.total - total)
        filled.extend(view.detach().clone() for view in views)

    with Ledger() as ledger:
        FlatParameter(params, 0, variant.ranks, fill, torch.device("cpu"))
    counts = {name: Counted.order.count(name) for name in ("first", "scaled", "last", "head", "inner")}
    if counts["inner"] or not torch.equal(inner.weight, inner_values):
        raise AnswerError(
            f"resets of a child that is another unit's: expected 0, got {counts['inner']}\n"
            "likely slip: `reset_parameters` is each module's own: modules that are places of `params`, no children"
        )
    slips = {
        "a module with a weight and a bias has two places, and is reset once": {"first": 2, "last": 2},
        "a module whose weight is tied has a bias of its own to initialize": {"first": 1, "last": 0},
        "nobody was reset: memory alone is no value": {"first": 0, "last": 0, "head": 0},
        "a module whose only parameter is tied is a place of it, too, and writes last": {"head": 0},
    }
    slips = {text: {**counts, **each} for text, each in slips.items()}
    once = {"first": 1, "scaled": 1, "last": 1, "head": 1, "inner": 0}
    expect("times that each module was reset", counts, once, slips=slips)
    order = list(dict.fromkeys(Counted.order))
    slip = "`nn.Parameter(view)`: an initializer may tell parameters from other tensors by their class"
    expect("modules that had a tensor for a Parameter when they were reset", Counted.plain, [], slip=slip)
    slip = "in the order in which they come in `params`: values are drawn from one generator"
    expect("modules in the order of their resets", order, ["first", "last", "head", "scaled"], slip=slip)
    left = [place for place in before if place[0]._parameters[place[1]] is not place[2]]
    for (view, right), places in zip(zip(filled, wanted, strict=True), params.values(), strict=True):
        tied = len(places) > 1
        slip = "the module's Parameter was not in this memory when it was reset"
        if bool((view == 7.0).all()):
            slip = "nothing was written: `reset_parameters` writes to the Parameter that it finds in the module"
        elif bool(view.isnan().any()):
            slip = "NaN is left: the module was not reset while it had this memory"
        elif tied:
            slip = "a tied parameter is one memory at all of its places: each module that is reset finds the same"
        expect(f"values of {places[0].name}", view, right, slip=slip)
    limit = max(view.numel() for view in filled) * 4  # of one parameter at a time, for the search for NaN
    if extra[0] > limit:
        raise AnswerError(
            f"bytes used beside the views: expected none, got {extra[0]}\n"
            "likely slip: values made elsewhere and copied are a second unit in memory: let modules write in the views"
        )
    slip = "the modules keep Parameters of the buffer: put the meta parameters back, the same objects"
    expect("places that do not have their meta parameter again", len(left), 0, slip=slip)


def other_error(error):
    return AnswerError(
        f"values that are left unwritten: expected RuntimeError, got {type(error).__name__}: {error}\n"
        "likely slip: the docstring promises RuntimeError, and the caller catches nothing else"
    )


def unwritten(answer, variant):
    unit, inner = unit_on_meta(variant.size, forgetful=True)
    unit.last.resets = unit.more.resets = 0  # a constructor's is not counted
    params = find_parameters(unit, skip=[inner])
    try:
        FlatParameter(params, 0, variant.ranks, lambda views, _: answer(views, params), torch.device("cpu"))
    except RuntimeError as error:
        slip = "say what is not written, by the name of its first place, and nothing that is"
        names = [places[0].name for places in params.values()]
        got, wanted = [name for name in names if name in str(error)], ["last.bias", "more.bias"]
        slips = {"all of them, not the first alone": wanted[:1]}
        expect("names in the error", got, wanted, slips=slips, slip=slip)
        slip = "once: a second reset draws other numbers, and writes no more than the first"
        expect(
            "resets of modules that leave something unwritten", [unit.last.resets, unit.more.resets], [1, 1], slip=slip
        )
        return
    except Exception as error:
        raise other_error(error) from error
    raise AnswerError(
        "modules that write one element of two in their bias: expected RuntimeError, got no error\n"
        "likely slip: unwritten memory has values like any other: fill the views with NaN first, and look afterwards "
        "whether any is left"
    )


# 10a.4 A param_init_fn


class Gained(nn.Module):
    """A parameter and a buffer of its own, a parameter that is None, and a child."""

    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.register_parameter("absent", None)
        self.register_buffer("table", torch.ones(3))
        self.layer = nn.Linear(size, 3)


class Table(nn.Module):
    """A buffer, and no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3, dtype=torch.float64), persistent=False)


def nested(size):
    layer = nn.Linear(size, size)
    model = nn.Sequential(
        nn.Embedding(5, size, dtype=torch.bfloat16),
        nn.Sequential(layer, nn.Tanh()),
        Gained(size),
        Table(),
        nn.Sequential(layer),
    )
    model.scale = nn.Parameter(torch.ones(2))
    return model


OWNERS = ["", "0", "1.0", "2", "2.layer", "3"]  # of parameters and buffers


def owned(module):
    return {key: t for key, t in {**module._parameters, **module._buffers}.items() if t is not None}


def reset_own(module):
    for t in owned(module).values():
        nn.init.normal_(t)


def seeded(module, seed):
    """What `reset_own` makes of a module."""
    torch.manual_seed(seed)
    return {key: torch.empty(t.shape, dtype=t.dtype).normal_() for key, t in owned(module).items()}


@check("10a.4")
def check_initializer(answer, variant):
    """Own parameters and buffers, seeded by name, in any order, after wrapping too; what has a NaN is named."""
    seed, where = variant.seed + 11, torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself
    for start in ("meta", "partly on meta", "cpu"):
        for backwards in (False, True):
            initialized(answer, variant.size, seed, where, start, backwards)
    forgotten(answer, variant.size, seed, where)
    kept(answer, variant.size, seed, where)


class Devices(TorchFunctionMode):
    """Notes the devices on which something is asked for."""

    def __init__(self):
        super().__init__()
        self.named = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs))
        self.named += [str(each) for each in given if isinstance(each, torch.device | str)]
        return func(*args, **(kwargs or {}))


def kept(answer, size, seed, where):
    """On a module that has values a reset may leave some as they are."""
    model = nested(size)
    with torch.no_grad():
        model[2].table.fill_(3.0)
    memory = {f"{name}.{key}": t.data_ptr() for name, m in model.named_modules() for key, t in owned(m).items()}

    resets = []

    def reset(module):
        resets.append(module)
        if module is model[2]:
            nn.init.normal_(module.gain)

    slip = "a module that has values is reset as it is: memory and NaN are for what is on meta"
    function = answer(model, reset, where, seed)
    try:
        function(model[2])
    except RuntimeError as error:
        raise AnswerError(
            f"a reset that leaves a buffer of a module on cpu as it is: expected no error, got {error}\n"
            f"likely slip: {slip}"
        ) from error
    expect("values of 2.table, which the reset leaves as they are", model[2].table, torch.full((3,), 3.0), slip=slip)
    now = {f"{name}.{key}": t.data_ptr() for name, m in model.named_modules() for key, t in owned(m).items()}
    moved = [name for name in memory if now[name] != memory[name]]
    expect("parameters and buffers on cpu that got other memory", moved, [], slip=slip)
    function(model[2])
    slip = "each call resets its module, also one that it has had before: it remembers names, and no more"
    expect("resets of a module in two calls", len(resets), 2, slip=slip)


def forgotten(answer, size, seed, where):
    """Each module's reset writes its weight and the first element of its bias, nothing else."""
    with torch.device("meta"):
        model = nested(size)

    resets = []

    def reset(module):
        resets.append(module)
        own = owned(module)
        for t in [own[key] if key == "weight" else own[key][:1] for key in ("weight", "bias") if key in own]:
            nn.init.ones_(t)

    forgets = answer(model, reset, where, seed)
    everything = [f"{name}.{key}".lstrip(".") for name, module in model.named_modules() for key in owned(module)]
    left = {
        "": ["scale"],
        "0": [],
        "1.0": ["1.0.bias"],
        "2": ["2.gain", "2.table"],
        "2.layer": ["2.layer.bias"],
        "3": ["3.table"],
    }
    for name, module in sorted(model.named_modules(), key=lambda named: named[0].startswith("2")):  # the mixed one last
        try:
            forgets(module)
            said = None
        except RuntimeError as error:
            said = str(error)
        except Exception as error:
            raise other_error(error) from error
        slip = "once for each call: a second reset writes no more than the first"
        expect(f"resets of {name or 'the model'} in one call", resets.count(module), int(name in OWNERS), slip=slip)
        wanted = left.get(name, [])
        if wanted and said is None:
            slip = (
                "`to_empty` gives memory with any values in it: fill it with NaN before `reset`, and look after "
                "whether any is left"
            )
            if name == "3":
                slip = "a buffer is looked at like a parameter: RoPE's frequencies are one"
            raise AnswerError(
                f"a reset that leaves {' and '.join(wanted)} unwritten: expected RuntimeError, got no error\n"
                f"likely slip: {slip}"
            )
        got = [each for each in everything if said is not None and each in said]
        slips = {"all that is not written, not the first alone": wanted[:1]} if len(wanted) > 1 else {}
        slip = "name what is not written with its module's name in `model`, and nothing that is written"
        expect(f"names in the error of {name or 'the model'}", got, wanted, slips=slips, slip=slip)


def initialized(answer, size, seed, where, start, backwards):
    with torch.device("cpu" if start == "cpu" else "meta"):
        model = nested(size)
    if start == "partly on meta" and backwards:
        model[2].gain = nn.Parameter(torch.ones(size, device="cpu"))
    elif start == "partly on meta":
        model[2].table = torch.ones(3)
    calls = []

    def reset(module):
        calls.append(names[module])
        if torch.is_grad_enabled():
            raise AnswerError(
                "gradients while reset runs: expected not to be recorded\n"
                "likely slip: writing into a parameter is nothing to differentiate: `torch.no_grad()`"
            )
        reset_own(module)

    names = {module: name for name, module in model.named_modules()}
    function = answer(model, reset, where, seed)
    if not callable(function):
        raise AnswerError("what it returns: expected a function of one module, got none\nlikely slip: return it")
    modules = list(model.modules())
    dtypes = {(module, key): t.dtype for module in modules for key, t in owned(module).items()}
    model._modules["1"] = nn.Sequential(model._modules["1"])  # as wrapping does: a level more, after names were told
    for module in reversed(modules) if backwards else modules:
        others = {id(p) for m in modules if m is not module for p in m._parameters.values() if p is not None}
        on_meta = any(t.is_meta for t in owned(module).values())
        try:
            with Devices() as devices:
                function(module)
        except RuntimeError:  # of an operation that needs values, such as bool()
            if not any(t.is_meta for t in owned(module).values()):
                raise
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            raise AnswerError(
                f"gradients after {names[module] or 'the model'} was initialized: expected switched on as before, "
                "got switched off\nlikely slip: `set_grad_enabled` stays: `with torch.no_grad():` ends"
            )
        if on_meta and devices.named and str(where) not in devices.named:
            raise AnswerError(
                f"where {names[module] or 'the model'} gets its memory: expected {where}, got "
                f"{', '.join(dict.fromkeys(devices.named))}\n"
                "likely slip: on a GPU it would be in the host's memory: `device=where`"
            )
        now = {id(p) for m in modules if m is not module for p in m._parameters.values() if p is not None}
        if others != now:
            raise AnswerError(
                f"parameters of other modules after {names[module] or 'the model'} was initialized: expected the same, "
                "got others\nlikely slip: `to_empty` goes down into the children unless `recurse=False`"
            )
        for key, t in owned(module).items():
            if t.dtype != dtypes[module, key]:
                raise AnswerError(
                    f"dtype of {names[module]}.{key}, {start}: expected {dtypes[module, key]}, got {t.dtype}\n"
                    "likely slip: `to_empty` gives memory in the tensor's own dtype, which it keeps"
                )
            if t.is_meta and names[module] in calls:
                raise AnswerError(
                    f"{names[module]}.{key}, {start}: expected values, got a meta tensor\n"
                    "likely slip: each of its own parameters and buffers needs memory if any of them is on meta"
                )
    where_from = f"on {start}" if start != "partly on meta" else start
    where_from += ", last module first" if backwards else ", in order"
    slips = {
        "a module that has nothing of its own is none of its business": list(names.values()),
        "a module that has a buffer and no parameters is initialized too": OWNERS[:-1],
        "the model is a module like the others, with the name '', and may have parameters of its own": OWNERS[1:],
    }
    expect(
        f"modules that were reset, {where_from}",
        shown(calls),
        shown(OWNERS),
        slips={text: shown(wrong) for text, wrong in slips.items()},
        slip="each module that has parameters or buffers of its own, once for each call, whether on meta or not",
    )
    for module in reversed(modules):  # the first is too like others: a call number 0 is no call number
        if names[module] in OWNERS:
            right_values(model, module, names, seed, where_from)


def shown(names):
    return sorted(name or "the model" for name in names)


def right_values(model, module, names, seed, where_from):
    """The values of one module, or what they were drawn from in place of seed and name."""
    name = names[module].encode()
    slip = "seed + crc32(name.encode()), set right before `reset`; `hash(name)` differs from process to process"
    usual = {
        "the same seed for every module: equal shapes get equal values": [seed],
        "the model's own seed is missing in the sum": [crc32(name)],
        "the class is no name: two modules of a class get equal values": [seed + crc32(type(module).__name__.encode())],
        "the name is asked for too late: wrapping has changed it": [
            seed + crc32(now.encode()) for now, each in model.named_modules(remove_duplicate=False) if each is module
        ],
        "the last of its names: a module in several places has the first": [
            seed + crc32(b"4.0")  # of the layer that is 1.0
        ],
        "a number that counts the calls depends on their order": [seed + number for number in range(1, 9)],
    }
    wanted = seeded(module, seed + crc32(name))
    for text, seeds in usual.items():
        for each in seeds:
            values = seeded(module, each)
            if each != seed + crc32(name) and all(torch.equal(t, values[key]) for key, t in owned(module).items()):
                slip = text
    for key, got in owned(module).items():
        expect(f"values of {names[module]}.{key}, {where_from}", got.detach(), wanted[key], slip=slip)


# 10a.5 From DDP to FSDP


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Tiny(nn.Module):
    """A model with a tied head; ends in its loss."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(4)))
        self.head = nn.Linear(width, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.layers(self.embed(tokens))).flatten(0, 1), tokens.flatten())


def init_tiny(model):
    """A param_init_fn; not what `reset_parameters` does."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def init(module):
        own = list(module.parameters(recurse=False))
        if own:
            module.to_empty(device=rank_device(), recurse=False)
            torch.manual_seed(crc32(names[module].encode()))
            for p in module.parameters(recurse=False):
                p.copy_(torch.empty(p.shape, device="cpu").normal_(std=0.1))  # a GPU draws other numbers from a seed

    return init


def rows(seed, rank, step):
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(100 * seed + 10 * rank + step))


STEPS = 3
OPTIONS = ("betas", "eps", "weight_decay", "amsgrad", "maximize")


def observe_script(answer, seed, width):
    """What the script builds, what it costs to build, and how it trains."""
    group, built, where = comm.world(), [], rank_device()
    if where.type == "cpu":
        where = torch.device("cpu", 0)  # not the `cpu` that is found without a word on it

    def build():
        built.append(Tiny(width))
        return built[-1]

    found = {}
    with Ledger() as ledger:
        with comm.record() as calls:
            made = answer(build, {Layer}, init_tiny, where)
        found["peak"] = ledger.peak.total
    found["built"], found["sent"] = len(built), sum(call.payload for call in calls if call.op == "broadcast")
    if not (isinstance(made, tuple) and len(made) == 2):
        found["made"] = f"an object of type {type(made).__name__}"
        return found
    model, optimizer = made
    found["made"] = [type(model).__name__, type(optimizer).__name__]
    if not isinstance(model, FullyShardedDataParallel):
        return found
    found["training"] = all(module.training for module in model.modules())
    instances = FullyShardedDataParallel.fsdp_modules(model)
    found["units"] = sorted(type(each.module).__name__ for each in instances)
    found["strategies"] = sorted({each.sharding_strategy.name for each in instances})
    held = [p for each in optimizer.param_groups for p in each["params"]]
    found["held"], found["mine"] = sum(p.numel() for p in held), {id(p) for p in held} == {*map(id, model.parameters())}
    found["rate"] = [each["lr"] for each in optimizer.param_groups]
    found["options"] = [{name: each[name] for name in OPTIONS} for each in optimizer.param_groups]
    found["where"] = sorted({str(each.compute_device) for each in instances} - {str(where)})
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for step in range(STEPS):
        loss = model(rows(seed, group.rank(), step).to(rank_device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found["trains"] = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    half, _ = answer(lambda: Tiny(width).to(torch.bfloat16), {Layer}, init_tiny, where)
    found["dtypes"] = sorted({str(p.dtype) for p in half.parameters()})
    mean = torch.stack(losses)
    comm.all_reduce(mean, group, comm.MEAN).wait()
    found["losses"] = mean.tolist()
    return found


def train_alone(seed, width, ranks):
    """One process with all rows, from the same values."""
    model = Tiny(width)
    with torch.no_grad():
        for name, module in reversed(list(model.named_modules())):  # the first place of the tied weight counts
            own = list(module.parameters(recurse=False))
            torch.manual_seed(crc32(name.encode()))
            for p in own:
                p.normal_(std=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = model(torch.cat([rows(seed, rank, step) for rank in range(ranks)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def padded(numel, ranks):
    return -(-numel // ranks) * ranks


BEFORE = "the optimizer has the parameters of before wrapping: nobody computes with those, and it trains nothing"
REFUSED = {
    "the optimizer was built before wrapping": BEFORE,
    "are one parameter, but they would be in two units": "only `blocks` are units: the tied head and the embedding "
    "both stay with the root",
    "Cannot copy out of meta tensor": "`torch.device('meta')` is for `build` alone: what is made later needs memory",
    "param_init_fn left on the meta device": "the function that `make_init` returns is for the modules of the model "
    "that you wrap: give it the same one",
}


@check("10a.5")
def check_shard_script(answer, variant):
    """Units, bytes of construction, what the optimizer holds, and the losses of one process."""
    ranks, width = variant.ranks, 8 + variant.size
    try:
        seen = on_ranks(ranks, observe_script, answer, variant.seed, width, timeout=15)
    except AnswerError as error:
        slip = next((slip for text, slip in REFUSED.items() if text in str(error)), None)
        raise AnswerError(f"{error}\nlikely slip: {slip}" if slip else str(error)) from error
    root, layer = 11 * width + 11, 4 * width * width + 3 * width
    shards = (4 * padded(layer, ranks) + padded(root, ranks)) // ranks
    losses = train_alone(variant.seed, width, ranks)
    whole = root + 4 * layer
    for rank, found in enumerate(seen):
        expect("times that build was called", found["built"], 1, rank=rank)
        expect(
            "what is returned",
            found["made"],
            ["FullyShardedDataParallel", "AdamW"],
            rank=rank,
            slip="the script's optimizer is AdamW: another one is another training"
            if found["made"][:1] == ["FullyShardedDataParallel"]
            else "the wrapped model and its optimizer, in this order",
        )
        expect(
            "units",
            found["units"],
            ["Layer"] * 4 + ["Tiny"],
            rank=rank,
            slips={"without a policy all of it is one unit, whole from forward to the end of backward": ["Tiny"]},
            slip="the modules whose class is in `blocks`, and the root",
        )
        expect(
            "strategies",
            found["strategies"],
            ["FULL_SHARD"],
            rank=rank,
            slips={
                "which is DDP in FSDP's clothes": ["NO_SHARD"],
                "parameters that stay whole from forward to backward": ["SHARD_GRAD_OP"],
            },
        )
        most = 4 * (shards + 2 * padded(layer, ranks)) + 4 * 64
        if found["peak"] > most:
            raise AnswerError(
                f"rank {rank}, bytes at the peak of construction: expected at most {most:,} (shards and two units), "
                f"got {found['peak']:,}\nlikely slip: the whole model, {4 * whole:,} bytes, was in memory: build it on "
                "meta and let FSDP materialize one unit at a time"
            )
        slip = "every rank computes the same values from `make_init`: there is nothing to send"
        expect("bytes broadcast by the wrapping", found["sent"], 0, rank=rank, slip=slip)
        slip = "the shards of the flat parameters, which are what `parameters()` of the wrapped model are"
        expect("elements the optimizer holds", found["held"], shards, rank=rank, slips={BEFORE: whole}, slip=slip)
        expect("the optimizer holds what model.parameters() are", found["mine"], True, rank=rank, slip=BEFORE)
        expect("learning rates", found["rate"], [1e-3], rank=rank, slip="the script's was 1e-3")
        slip = "the script's model is in training mode, as DDP's is: `eval` switches dropout off"
        expect("modules in training mode, all of them", found["training"], True, rank=rank, slip=slip)
        slip = "`build` decides on the dtype: wrapping casts nothing"
        expect("dtypes of the shards of a model in bfloat16", found["dtypes"], ["torch.bfloat16"], rank=rank, slip=slip)
        options = {name: AdamW([torch.ones(1)]).defaults[name] for name in OPTIONS}
        slip = "of AdamW's options the script says lr alone: leave the others as they are"
        expect("options of the optimizer", found["options"], [options], rank=rank, slip=slip)
        slip = "`device_id=where`: otherwise it computes where the process group happens to be"
        expect("devices other than `where` that units compute on", found["where"], [], rank=rank, slip=slip)
        expect("three steps change the parameters", found["trains"], True, rank=rank, slip=BEFORE)
        slip = (
            "other values at the start: `reset_parameters` is not how this model is initialized, `make_init` says how"
        )
        expect("mean losses of three steps", found["losses"], losses, rank=rank, slip=slip, tolerance=1e-5)
