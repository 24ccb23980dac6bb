"""One wrapper for a parameter: two would shard it twice, or average it twice, mostly without an error.

Wrappers of one kind nest, if they are FSDP: each takes what those inside it have left. Of two kinds, one has to leave
out what the other has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from minifsdp.private import active_ddp, close_to_torchs_wrappers, is_in_torchs_fsdp

FSDP1, FSDP2, DDP = "minifsdp's FullyShardedDataParallel", "minifsdp's fully_shard", "minifsdp's DDP"
TENSOR_PARALLEL = "parallelize_module"

_KINDS = {"FullyShardedDataParallel": "FullyShardedDataParallel", "FSDPModule": "fully_shard"}
_KINDS |= dict.fromkeys(["DistributedDataParallel", "OverlappedDDP", "BucketedDDP", "NaiveDDP"], "DDP")

_ONE = "use one of them for the whole model, or leave these parameters out with "
_CURES = {
    FSDP1: f"{_ONE}ignored_states",
    FSDP2: f"{_ONE}ignored_params",
    DDP: f"{_ONE}DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    TENSOR_PARALLEL: "parallelize modules before they are wrapped",
}

_kept: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def keep(modules: Iterable[nn.Module], kind: str) -> None:
    """From now on no other kind of wrapper, ours or torch's, takes these modules' own parameters."""
    for module in modules:
        if module not in _kept:
            _kept[module] = kind
            close_to_torchs_wrappers(
                module,
                f"torch's wrappers cannot take the parameters of a {type(module).__name__}, which {kind} has: use one "
                "library for the whole model",
            )


def keeper_of(module: nn.Module) -> str | None:
    """The kind of wrapper that the module is, or that has its own parameters."""
    for cls in type(module).__mro__:
        library = cls.__module__.partition(".")[0]
        if cls.__name__ in _KINDS and library in ("minifsdp", "torch"):
            return f"{library}'s {_KINDS[cls.__name__]}"
    return "torch's FSDP" if is_in_torchs_fsdp(module) else _kept.get(module)


def refuse_nested(
    kind: str, root: nn.Module, params: Collection[Tensor] = (), modules: Collection[nn.Module] = ()
) -> None:
    """See that a new wrapper takes nothing that another has.

    Args:
        kind: of the new one.
        root: what it wraps.
        params: the parameters that it leaves out.
        modules: the modules that it leaves out.

    Raises:
        ValueError: names the first module that another kind has.
    """
    left_out = {id(p) for p in params}

    def visit(module: nn.Module, name: str) -> None:
        other, own = keeper_of(module), [*module.parameters()]
        if module in modules or (other and own and all(id(p) in left_out for p in own)):
            return
        if other == kind != DDP:  # it has seen to what is inside
            return
        if other is not None:
            raise ValueError(
                f"{kind} cannot take {name or 'the module'} ({type(module).__name__}), because {other} has its "
                f"parameters: {_CURES[kind]}"
            )
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")


def refuse_torchs_ddp(kind: str, params: Iterable[Tensor]) -> None:
    """See that torch's DDP is not around a model of ours that runs for the first time.

    Args:
        kind: the wrapper of ours.
        params: what it shards or averages.

    Raises:
        RuntimeError: it is, and averages one of them.
    """
    if (ddp := active_ddp()) is not None:
        ignored = ddp.parameters_to_ignore
        averaged = {id(p): name for name, p in ddp.module.named_parameters() if name not in ignored}
        names = [averaged[id(p)] for p in params if id(p) in averaged]
        if names:
            raise RuntimeError(
                f"torch's DistributedDataParallel is around {kind}, and would average {names[0]} as well: use one of "
                "them for the whole model"
            )
