"""Exercise 10a.3: Materialize one unit from meta."""

from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter, ParamPlaces, find_parameters
from minifsdp.fsdp.torch_api.materialize import reset_in
from minifsdp.instruments.watch.ledger import Ledger

from .shared import other_error


@reference(
    "10a.3",
    hints=(
        "A module's `reset_parameters()` writes in place into whatever Parameter it finds. So the memory has to be in "
        "the module before, and a Parameter that is made of a view has the view's memory.",
        "Fill every view with NaN; put `nn.Parameter(view)` into `place.module._parameters[place.attribute]` at every "
        "place; reset each module once (collect them in a dict: it keeps the order); put the meta parameters back; "
        "look for NaN.",
    ),
    forbids=(reset_in,),
)
def fill_from_meta(views: list[Tensor], params: ParamPlaces) -> None:
    """Write the initial values of one unit's parameters, which are on meta, into the flat buffer.

    Args:
        views: for each parameter, in the order of `params`, a view of its memory in its shape; the contents are
            arbitrary.
        params: `{parameter: places}`. A place has `module`, `attribute` ("weight") and `name` ("blocks.0.qkv.weight");
            a tied parameter has several. `place.module._parameters[place.attribute]` is the parameter, on meta.

    Call `reset_parameters()` once on every module that holds one of the parameters (all these modules have the method),
    in the order of `params`. During the call, each of the module's places holds a Parameter in the view's memory. Call
    it on no other module: a child may belong to a different unit. Afterwards, unless an error is raised, the modules
    hold the same meta parameter objects again. Use no memory other than the views, except that the search for NaN may
    take as much as one parameter at a time.

    Raises:
        RuntimeError: if an element is unwritten; the message lists every such parameter by the name of its first place.
    """
    modules: dict[nn.Module, None] = {}
    for view, places in zip(views, params.values(), strict=True):
        shown = nn.Parameter(view.fill_(torch.nan))
        for place in places:
            place.module._parameters[place.attribute] = shown
            modules[place.module] = None
    for module in modules:
        module.reset_parameters()  # type: ignore[operator]
    for p, places in params.items():
        for place in places:
            place.module._parameters[place.attribute] = p
    if left := [places[0].name for view, places in zip(views, params.values(), strict=True) if view.isnan().any()]:
        raise RuntimeError(f"nothing has initialized {', '.join(left)}")


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
