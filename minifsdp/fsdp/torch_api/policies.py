"""Policies that choose the submodules that become units (torch/distributed/fsdp/wrap.py has the same ones).

There are two kinds. A function is called for one module after another, on the way down to decide whether to look into
the module, and on the way up to decide whether to wrap it (wrap.py). Its further arguments are given with
`functools.partial`. `ModuleWrapPolicy` and `CustomPolicy` choose their modules beforehand, and may give each module its
own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

Arguments = dict[str, Any]
Chosen = dict[nn.Module, Arguments]
"""The modules that are to be units, each with its arguments."""


class WrapPolicy(Protocol):
    """Asked of every module: look into it (`recurse=True`)? If so, after its children: wrap it (`recurse=False`)?

    `nonwrapped_numel` counts the parameters under it that no unit has taken yet. The arguments are given by name.
    """

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool: ...


class NamingPolicy(Protocol):
    """Names the modules to wrap before any is, each with the arguments of its unit; torch's `_Policy` is one.

    Its only method has torch's name and signature, so that a policy written for either is good for both.
    """

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Arguments
    ) -> Chosen: ...


def _tuple_of(classes: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """The classes, as `isinstance` takes them.

    Raises:
        ValueError: a single class or a name was given, or something that is no class.
    """
    if isinstance(classes, Iterable) and not isinstance(classes, (str, type)):
        classes = tuple(classes)
        if all(isinstance(each, type) for each in classes):
            return classes
    raise ValueError(f"{classes!r} is not a policy: give a set of module classes, such as {{Block}}")


class ModuleWrapPolicy:
    """Every instance of the given classes is a unit; for a transformer, its block."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = _tuple_of(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:
        return recurse or isinstance(module, self.module_classes)

    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Arguments) -> Chosen:
        wanted = (m for m in root_module.modules() if isinstance(m, self.module_classes) and m not in ignored_modules)
        return {module: dict(root_kwargs) for module in wanted}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({{{', '.join(each.__name__ for each in self.module_classes)}}})"


class CustomPolicy:
    """A function of a module says whether it is a unit, and with what arguments.

    Args:
        lambda_fn: returns False, True, or a dict of the arguments in which this unit differs from the root.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Arguments) -> Chosen:
        chosen = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer} for {name or 'the root'}, a {type(module).__name__}"
                )
            if answer:
                chosen[module] = root_kwargs | (answer if isinstance(answer, dict) else {})
        return chosen


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Every submodule is a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which `lambda_fn` returns true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Every instance of the classes is a unit, as with `ModuleWrapPolicy`."""
    return recurse or isinstance(module, _tuple_of(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """A module is a unit as soon as it has so many parameters that no unit inside it has.

    Args:
        module: the module in question.
        recurse: whether the question is to look into it, or to wrap it.
        nonwrapped_numel: elements of its parameters that are in no unit yet.
        min_num_params: the least number of elements of a unit.
        force_leaf_modules: classes in which nothing is wrapped; default: `nn.MultiheadAttention`, which uses its
            children's parameters without calling them.
        exclude_wrap_modules: classes that are not wrapped themselves; default: containers without a `forward`.
    """
    spared = force_leaf_modules if recurse else exclude_wrap_modules
    if spared is None:
        name = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
        spared = getattr(size_based_auto_wrap_policy, name)
    return nonwrapped_numel >= min_num_params and not isinstance(module, _tuple_of(spared))


# Attributes of the function, as in torch, where users add to them.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[WrapPolicy]) -> bool:
    """True if any of the policies returns true."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)
