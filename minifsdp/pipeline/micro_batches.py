"""A batch in micro-batches, and back (torch/distributed/pipelining/microbatch.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifsdp.kinds import check_kind, is_named, refused
from minifsdp.private import tree_flatten, tree_map, tree_unflatten
from minifsdp.tree import map_tensors, tensors_in


@dataclass(frozen=True)
class TensorChunkSpec:
    """The dimension along which a tensor is cut, or its parts are joined."""

    split_dim: int

    @staticmethod
    def from_tuple(dims: Sequence[int]) -> tuple[TensorChunkSpec, ...]:
        """One for each positional argument."""
        return tuple(TensorChunkSpec(dim) for dim in dims)

    @staticmethod
    def from_dict(dims: Mapping[str, int]) -> dict[str, TensorChunkSpec]:
        """One for each keyword argument."""
        return {name: TensorChunkSpec(dim) for name, dim in dims.items()}


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cut arguments into micro-batches.

    Args:
        args, kwargs: trees of tensors and other objects, also dataclasses with tensors; objects without tensors go to
            every micro-batch.
        chunks: the number of micro-batches.
        args_chunk_spec, kwargs_chunk_spec: a `TensorChunkSpec` for each argument, or tree of them; None in the place of
            one: it goes whole to every micro-batch. None: all tensors are cut along dimension 0.

    Returns:
        positional and keyword arguments of each micro-batch.

    Raises:
        ValueError: a tensor is shorter than `chunks`; or specs do not fit the arguments.
    """
    kwargs = kwargs or {}
    args_chunk_spec = tuple(_default(arg) for arg in args) if args_chunk_spec is None else args_chunk_spec
    kwargs_chunk_spec = {k: _default(v) for k, v in kwargs.items()} if kwargs_chunk_spec is None else kwargs_chunk_spec
    if len(args_chunk_spec) != len(args):
        raise ValueError(f"{len(args)} arguments and {len(args_chunk_spec)} in args_chunk_spec: give one for each")
    if kwargs_chunk_spec.keys() != kwargs.keys():
        names = sorted(kwargs_chunk_spec.keys() ^ kwargs.keys())
        raise ValueError(f"kwargs_chunk_spec and the keyword arguments differ in {names}: give one for each")
    pairs = zip(args, args_chunk_spec, strict=True)
    cut = [_cut(arg, spec, chunks, f"argument {n}") for n, (arg, spec) in enumerate(pairs)]
    named = {name: _cut(arg, kwargs_chunk_spec[name], chunks, name) for name, arg in kwargs.items()}
    of_args = list(zip(*cut, strict=True)) if cut else [()] * chunks
    return of_args, [{name: each[chunk] for name, each in named.items()} for chunk in range(chunks)]


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """Join the outputs of all micro-batches: the inverse for tuples and dicts.

    Args:
        chunks: trees of one form.
        chunk_spec: `TensorChunkSpec`s in that form; None: along dimension 0. Of what is no tensor the last one counts.
    """
    if chunk_spec is None and all(isinstance(chunk, Tensor) for chunk in chunks):  # the usual case, without a tree
        return _join(chunks, TensorChunkSpec(0))
    flat = [tree_flatten(chunk) for chunk in chunks]
    form = flat[0][1]
    specs = [TensorChunkSpec(0)] * len(flat[0][0]) if chunk_spec is None else _flatten_specs(chunk_spec)
    columns = zip(*(values for values, _ in flat), strict=True)
    return tree_unflatten([_join(column, spec) for column, spec in zip(columns, specs, strict=True)], form)


def check_specs(args_chunk_spec: Any, kwargs_chunk_spec: Any, output_merge_spec: Any) -> None:
    """
    Raises:
        TypeError: they are no trees of `TensorChunkSpec`s, ours or torch's, and None.
    """
    if args_chunk_spec is not None:
        check_kind("args_chunk_spec", args_chunk_spec, tuple, "a tuple, such as TensorChunkSpec.from_tuple((0,))")
    if kwargs_chunk_spec is not None:
        check_kind("kwargs_chunk_spec", kwargs_chunk_spec, dict, "a dict, such as TensorChunkSpec.from_dict({'x': 0})")
    specs = {
        "args_chunk_spec": args_chunk_spec,
        "kwargs_chunk_spec": kwargs_chunk_spec,
        "output_merge_spec": output_merge_spec,
    }
    for name, spec in specs.items():
        for each in _flatten_specs(spec):
            if not (each is None or is_named(each, "TensorChunkSpec")):
                raise refused(f"{name} with", each, "TensorChunkSpec(dim) for each tensor, or None")


def _join(column: Sequence[Any], spec: Any) -> Any:
    if not isinstance(column[0], Tensor) or spec is None:
        return column[-1]
    return torch.stack(list(column)) if column[0].ndim == 0 else torch.cat(list(column), spec.split_dim)


def _default(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return TensorChunkSpec(0)
    return tree_map(lambda value: TensorChunkSpec(0) if tensors_in(value) else None, arg)


def _flatten_specs(spec: Any) -> list[Any]:
    found: list[Any] = tree_flatten(spec)[0]
    return found


def _cut(arg: Any, spec: Any, chunks: int, name: str) -> Sequence[Any]:
    if isinstance(arg, Tensor) and isinstance(spec, TensorChunkSpec):  # the usual case, without a tree
        return _pieces(arg, spec, chunks, name)
    values, form = tree_flatten(arg)
    specs = _flatten_specs(spec)
    if len(specs) != len(values):
        raise ValueError(f"{name} has {len(values)} parts and its chunk spec {len(specs)}: give one for each")
    columns = [_pieces(value, each, chunks, name) for value, each in zip(values, specs, strict=True)]
    return [tree_unflatten([column[chunk] for column in columns], form) for chunk in range(chunks)]


def _pieces(value: Any, spec: Any, chunks: int, name: str) -> Sequence[Any]:
    if spec is None:
        return [value] * chunks
    if not isinstance(value, Tensor):  # such as a dataclass
        return [map_tensors(lambda t: _pieces(t, spec, chunks, name)[n], value) for n in range(chunks)]  # noqa: B023
    if value.ndim == 0 or value.shape[spec.split_dim] < chunks:
        raise ValueError(
            f"{name} {list(value.shape)} cannot be cut into {chunks} micro-batches along dimension {spec.split_dim}: "
            "use fewer, or a larger batch"
        )
    return torch.tensor_split(value, chunks, spec.split_dim)
