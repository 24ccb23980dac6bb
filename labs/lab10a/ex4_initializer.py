"""Exercise 10a.4: A param_init_fn whose values do not depend on the wrapping."""

from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import other_error


@reference(
    "10a.4",
    hints=(
        "Names first: `{module: name for name, module in model.named_modules()}`, taken before anything is wrapped. "
        "`to_empty` gives memory and no values, and without `recurse=False` it does so for everything below as well.",
        "In the inner function: the module's own tensors (`module._parameters` and `module._buffers`, None left out); "
        "return if there are none; if one is on meta, `to_empty(device=where, recurse=False)` and fill them with NaN; "
        "seed; `reset(module)`; look for NaN.",
    ),
)
def initializer(
    model: nn.Module, reset: Callable[[nn.Module], None], where: torch.device, seed: int
) -> Callable[[nn.Module], None]:
    """Return a `param_init_fn` under which a module's values depend only on the seed and its name in `model`.

    Args:
        model: the full model before any wrapping (wrapping changes names and replaces modules with wrappers). A module
            that appears several times is known by the first of its names, the one that `named_modules()` yields.
        reset: writes values into a module's own parameters and buffers, not its children's.
        where: the device on which meta tensors get memory.
        seed: the model's seed.

    Returns:
        A function that takes a module of `model`. It handles the module's own parameters and buffers
        (`module._parameters`, `module._buffers`; an entry may be None) and touches no child. If there are none, it does
        nothing. If any is on meta, it gives memory on `where`, filled with NaN, to these or, as `to_empty` does, to all
        of the module's own. Then it sets torch's seed to `seed + crc32(name.encode())` and calls `reset(module)`
        without recording gradients; it does both even for a module that is not on meta, whose memory it keeps. All of
        the model's parameters and buffers are floating point. If any of the module's own still contains a NaN, it
        raises a RuntimeError that names every such tensor, as in "blocks.0.block0.qkv.weight".
    """
    names = {module: name for name, module in model.named_modules()}

    def own(module: nn.Module) -> dict[str, Tensor]:
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    @torch.no_grad()
    def initialize(module: nn.Module) -> None:
        if not own(module):
            return
        if any(t.is_meta for t in own(module).values()):
            module.to_empty(device=where, recurse=False)
            for t in own(module).values():
                t.fill_(torch.nan)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)
        if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
            raise RuntimeError(f"nothing has initialized {', '.join(left)}")

    return initialize


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
