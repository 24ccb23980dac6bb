"""Reference answers of lab 10a, wrapping and initialization."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import ParamPlaces
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.torch_api.materialize import reset_in
from minifsdp.fsdp.torch_api.policies import size_based_auto_wrap_policy
from minifsdp.fsdp.torch_api.wrap import wrap_children


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
    """A module is a unit as soon as it has `least` elements of parameters that are in no unit yet."""
    spared = (nn.MultiheadAttention,) if recurse else (nn.ModuleList, nn.ModuleDict)
    return nonwrapped_numel >= least and not isinstance(module, spared)


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
    """Replace the submodules that `policy` names by `wrap(submodule)`, innermost first."""
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
    """Initialize the parameters of one unit, still on the meta device, in the flat buffer."""
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
    """A `param_init_fn` whose values for a module depend only on the seed and its name in `model`."""
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


@reference(
    "10a.5",
    hints=(
        "Five things, in this order: where the model is built, which modules are units, who gives them values, where "
        "they compute, and the optimizer last.",
        "`with torch.device('meta'): model = build()`; then `FullyShardedDataParallel(model, auto_wrap_policy=blocks, "
        "param_init_fn=make_init(model), device_id=where)`; then the optimizer over what *its* `parameters()` are.",
    ),
)
def shard_script(
    build: Callable[[], nn.Module],
    blocks: set[type[nn.Module]],
    make_init: Callable[[nn.Module], Callable[[nn.Module], None]],
    where: torch.device,
) -> tuple[FullyShardedDataParallel, Optimizer]:
    """Replace `model = DDP(build())` and `optimizer = AdamW(model.parameters(), lr=1e-3)`."""
    with torch.device("meta"):
        model = build()
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)
