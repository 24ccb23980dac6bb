"""Agreement on the optimizers' states before any is gathered: the same for all ranks, or one error on all of them.

Sharded states are gathered one after another. A rank that lacks one would join the gathering of the next, and the
result would have rows of two parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from minifsdp.checkpoint.agree import everywhere, groups_sharing, same_errors
from minifsdp.checkpoint.begin import has_state, initialized
from minifsdp.checkpoint.names import Names, StateDict
from minifsdp.checkpoint.optim_names import OptimizerIndex
from minifsdp.checkpoint.optim_state import ONE_PER_PARAMETER, has_elements, is_dtype
from minifsdp.checkpoint.sharded_values import copied
from minifsdp.checkpoint.units import wrappers_in
from minifsdp.comm import Group
from minifsdp.ddp import DistributedDataParallel
from minifsdp.local_parts import like, local_of
from minifsdp.optimizer_steps import parameters_of
from minifsdp.process_groups import global_ranks

Place = tuple[str, tuple[int, ...]]
"""A parameter's name, and the ranks that share it."""


class Described(NamedTuple):
    """A parameter's state on one rank.

    Attributes:
        form: in words, with the count of steps.
        may_lack: the rank has no element of the parameter, and needs no state.
        schema: of each key the dtype, if there is a value per element; otherwise the value. None: it does not say all.
    """

    form: str
    may_lack: bool
    schema: dict[str, Any] | None


class Difference(NamedTuple):
    """The words of an error: the problem and its cure."""

    problem: str
    cure: str


STATES = Difference(
    "ranks have different optimizer states of parameters that they share",
    "Give the optimizers of all ranks the same parameters, and step them on all ranks with gradients of the same "
    "parameters; optimizer.state_dict() returns what a rank has by itself",
)
OPTIMIZERS = Difference(
    "the optimizers of ranks have different ones of the parameters that the ranks share",
    "Give the optimizers of all ranks the same parameters before loading",
)
FROZEN = Difference(
    "ranks have frozen different ones of the parameters that they share",
    "Set requires_grad alike on all ranks, or leave ignore_frozen_params out",
)


@contextmanager
def agreed_states(
    model: nn.Module, names: Names, optimizers: Iterable[Optimizer]
) -> Iterator[dict[Optimizer, StateDict]]:
    """The optimizers' state dicts (`initialized`), with states of the same parameters on all ranks that share these.

    One small exchange, and a second one if the ranks differ.

    Args:
        optimizers: in the same order on all ranks.

    Raises:
        RuntimeError: a parameter's state is in another form on another rank, which may have none; on all of them.
    """
    groups = groups_sharing(model)
    with ExitStack() as stack:
        with same_errors(groups) as exchange:
            new = {optim for optim in optimizers if not has_state(optim)}
            saved = {optim: stack.enter_context(initialized(optim)) for optim in optimizers}
            index = {optim: OptimizerIndex(model, optim) for optim in saved}
            own = described(names, index, saved, new)
            exchange.mine = digest_of(own)
        if len(set(exchange.of_ranks.values())) > 1:
            agreed = agreed_forms(own, everywhere(own, groups), STATES)
            for optim, known in index.items():
                for p in (p for p in known.unmanaged if isinstance(p, DTensor)):
                    if found := agreed.get(names.of_parameters[p][0]):
                        saved[optim]["state"][known.keys[p]] = without_elements(p, found)
        yield saved


def check_frozen(names: Names, groups: list[Group]) -> None:
    """Check that ranks have frozen the same of the parameters that they share, as `check_alike`."""
    check_alike(names, lambda p: "trained" if p.requires_grad else "frozen", groups, FROZEN)


def check_owners(names: Names, optimizers: Iterable[Optimizer], groups: list[Group]) -> None:
    """Check that the optimizers of all ranks have the same of the parameters that they share, as `check_alike`."""
    shared = sharing(names.model).keys()
    of_each = [params for optim in optimizers if not shared.isdisjoint(params := parameters_of(optim))]
    owners = {p: f"in optimizer {number}" for number, params in enumerate(of_each, 1) for p in params}
    check_alike(names, lambda p: owners.get(p, "in no optimizer"), groups, OPTIMIZERS)


def check_alike(names: Names, form: Callable[[nn.Parameter], str], groups: list[Group], words: Difference) -> None:
    """Check that parameters have the same form on all ranks that share them, before values are exchanged one by one.

    Raises:
        RuntimeError: they have not; on all of these ranks.
    """
    own: dict[Place, Described] = {}
    for p, sets in sharing(names.model).items():
        one = Described(form(p), not p.numel() and not isinstance(p, DTensor), {})
        own |= {(names.of_parameters[p][0], ranks): one for ranks in sets}
    if len(set(everywhere(digest_of(own), groups).values())) > 1:
        agreed_forms(own, everywhere(own, groups), words)


def digest_of(own: Mapping[Place, Described]) -> bytes:
    return sha256(repr(sorted((name, each.form) for (name, _), each in own.items())).encode()).digest()


def described(
    names: Names, index: Mapping[Optimizer, OptimizerIndex], saved: Mapping[Optimizer, StateDict], new: set[Optimizer]
) -> dict[Place, Described]:
    """This rank's states of the parameters that it shares; `new` are optimizers that have not stepped."""
    shared = sharing(names.model)
    units = any(known.managed for known in index.values())
    # With FSDP1, saving an optimizer is collective, whatever it has.
    counted = [optim for optim, known in index.items() if units or not shared.keys().isdisjoint(known.params)]
    owners = {p: optim for optim, known in index.items() for p in known.params}
    own: dict[Place, Described] = {}
    for p, sets in shared.items():
        optim = owners.get(p)
        state: Any = {}
        words = "in no optimizer"
        if optim is not None:
            state = saved[optim]["state"].get(index[optim].keys[p], {})
            words = f"in optimizer {counted.index(optim) + 1} of {len(counted)}, " if len(counted) > 1 else ""
            words += form_of_state(p, state) + (", before a first step" if state and optim in new else "")
        may_lack = not local_of(p).numel() and (optim is not None or not isinstance(p, DTensor))
        one = Described(words, may_lack, schema_of(p, state))
        own |= {(names.of_parameters[p][0], ranks): one for ranks in sets}
    return own


def sharing(model: nn.Module) -> dict[nn.Parameter, list[tuple[int, ...]]]:
    """The parameters that ranks share, as an optimizer has them, each with the sets of these ranks.

    What no wrapper has is each rank's own, such as an expert outside the FSDP units.
    """
    found: dict[nn.Parameter, list[tuple[int, ...]]] = defaultdict(list)
    for p in model.parameters():
        if isinstance(p, DTensor):
            found[p].append(tuple(p.device_mesh.mesh.flatten().tolist()))
    for wrapper in wrappers_in(model):
        sets = [tuple(global_ranks(group)) for group in wrapper._groups.outermost_first]
        for p in wrapper._unit.contents.held() if wrapper._unit else ():
            found[p] += sets
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | nn.parallel.DistributedDataParallel):
            for name, p in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    found[p].append(tuple(global_ranks(module.process_group)))
    return found


def form_of_state(p: Tensor, state: Mapping[str, Any] | None) -> str:
    """A state's keys with the dtypes of tensors and the numbers that count steps."""
    if not state:
        return "without a state"
    return ", ".join(f"{key} {_kind(p, key, state[key])}".rstrip() for key in sorted(state, key=str))


def _kind(p: Tensor, key: str, value: Any) -> str:
    if key in ONE_PER_PARAMETER and not has_elements(key, value, p.shape):
        return str(value.item() if isinstance(value, Tensor) else value)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def schema_of(p: Tensor, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The schema from which `without_elements` makes a state; FSDP1's units agree on theirs (optim_schema.py)."""
    schema: dict[str, Any] = {}
    for key, value in (state or {}).items() if isinstance(p, DTensor) else ():
        if isinstance(value, DTensor) and value.shape == p.shape:
            schema[key] = value.dtype
        elif isinstance(value, Tensor | dict) and not (isinstance(value, Tensor) and value.numel() == 1):
            return None
        else:
            schema[key] = copied(value, to_cpu=True)
    return schema


def without_elements(p: DTensor, schema: Mapping[str, Any]) -> StateDict:
    """The state of a parameter on a rank that has no element of it."""
    local = local_of(p).detach()
    return {key: like(local.to(kind), p) if is_dtype(kind) else kind for key, kind in schema.items()}


def agreed_forms(
    own: Mapping[Place, Described], of_ranks: Mapping[int, Mapping[Place, Described]], words: Difference
) -> dict[str, dict[str, Any]]:
    """The schemas of the parameters by name for which this rank has no state of its own, and needs none.

    Raises:
        RuntimeError: ranks that have elements of a parameter have its state in different forms; on all ranks.
    """
    schemas: dict[str, dict[str, Any]] = {}
    differing: dict[str, str] = {}
    for place in sorted({place for of_rank in of_ranks.values() for place in of_rank}):
        name, ranks = place
        found = {rank: of_ranks[rank][place] for rank in ranks if place in of_ranks.get(rank, {})}
        needed = [each for each in found.values() if not each.may_lack] or list(found.values())
        first = needed[0]
        if first.schema is None:
            needed = list(found.values())
        if len({each.form for each in needed}) > 1:
            forms = dict.fromkeys(each.form for each in found.values())
            where = {form: [rank for rank, each in found.items() if each.form == form] for form in forms}
            differing.setdefault(name, "; ".join(f"{form} on {in_words(ranks)}" for form, ranks in where.items()))
        elif place in own and own[place].form != first.form and first.schema is not None:
            schemas[name] = first.schema
    if differing:
        more = f" | and {len(differing) - 4} more" if len(differing) > 4 else ""
        found_in = " | ".join(f"{name}: {text}" for name, text in list(differing.items())[:4])
        raise RuntimeError(f"{words.problem}: {found_in}{more}. {words.cure}")
    return schemas


def in_words(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{more}"
