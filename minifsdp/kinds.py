"""Arguments of a wrong kind: refused by name before anything starts, instead of being ignored.

Python takes any object for any argument. `use_orig_params="False"` is true, names are not the parameters that they
name, and `fully_shard` could take FSDP1's CPUOffload for a policy without offload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Kind = TypeVar("Kind")


def refused(argument: str, value: Any, cure: str) -> TypeError:
    """The error for an argument: its name, what was given, in one line, and what to give."""
    shown = " ".join(repr(value).split())
    if len(shown) > 100:
        shown = f"{shown[:60]}.., a {type(value).__name__}"
    return TypeError(f"{argument}={shown}: give {cure}")


def check_kind(argument: str, value: Any, kinds: Any, cure: str) -> None:
    """
    Raises:
        TypeError: the value is of none of the kinds.
    """
    if not isinstance(value, kinds):
        raise refused(argument, value, cure)


def check_flags(**flags: Any) -> None:
    """
    Raises:
        TypeError: one is neither True nor False; a number or None will do.
    """
    for name, value in flags.items():
        if not (value is None or type(value) in (bool, int)):
            raise refused(name, value, "True or False")


def check_count(argument: str, value: Any, least: int = 1) -> None:
    """
    Raises:
        TypeError: it is no whole number.
        ValueError: it is smaller than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(argument, value, "a whole number")
    if value < least:
        raise ValueError(f"{argument}={value}: give {least} or more")


def bytes_of_mib(argument: str, value: Any) -> int:
    """A size in MiB, in bytes.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or NaN.
    """
    check_kind(argument, value, int | float, "a number of MiB")
    if not value >= 0:
        raise ValueError(f"{argument}={value}: give 0 MiB or more")
    return int(value * 2**20)


def check_mesh(argument: str, value: Any) -> None:
    """
    Raises:
        TypeError: it is no device mesh.
    """
    check_kind(argument, value, DeviceMesh, "a DeviceMesh, such as init_device_mesh returns")


def is_named(value: Any, name: str) -> bool:
    """True for an instance of a class of this name, ours or torch's, or of one derived from it."""
    return any(base.__name__ == name for base in type(value).__mro__)


def ours(kind: type[Kind], value: Any, argument: str) -> Kind:
    """`value` as a `kind`: one of ours, or torch's of the same name, so that either import will do.

    Raises:
        ValueError: it is neither; names the argument.
    """
    if isinstance(value, kind):
        return value
    if type(value).__name__ == kind.__name__:
        if issubclass(kind, Enum):
            return kind[value.name]
        return kind(**{f.name: getattr(value, f.name) for f in fields(kind)})  # type: ignore[arg-type]
    raise ValueError(f"{argument}={value!r}: give a {kind.__name__}")


def check_dtypes(argument: str, policy: Any, *names: str) -> None:
    """
    Raises:
        TypeError: one of these attributes of a policy is neither a dtype nor None.
    """
    for name in names:
        value = getattr(policy, name, None)
        if value is not None:
            check_kind(f"{name} in {argument}", value, torch.dtype, "a torch.dtype, such as torch.bfloat16")


def tensors_of(argument: str, values: Any, cure: str) -> list[Tensor]:
    """A list of them; empty for None.

    Raises:
        TypeError: the values are no collection of tensors, but names, modules, or a single parameter.
    """
    if values is None:
        return []
    if isinstance(values, Tensor | str) or not isinstance(values, Iterable):
        raise refused(argument, values, cure)
    found = list(values)
    for each in found:
        check_kind(f"{argument} with", each, Tensor, cure)
    return found
