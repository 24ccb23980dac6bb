"""Values that a user gives to unsharded parameters: the shards keep the old ones, so it is an error."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minifsdp.local_parts import local_of


def written_error(unit: str) -> RuntimeError:
    """The error for writes to the memory of a unit while it was unsharded."""
    return RuntimeError(
        f"parameters of {unit} were written to while they were unsharded, and the shards have not changed: write to "
        "the sharded ones, or inside summon_full_params; nn.Embedding with max_norm writes in forward"
    )


def check_memory(unit: str, names: Sequence[str], leaves: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """See that leaves are views of their unit's memory; those that are not become so again.

    Raises:
        RuntimeError: a user has given one other memory, which no gather would fill, by `p.data = ...`.
    """
    other = []
    for name, leaf, view in zip(names, leaves, views, strict=True):
        if (type(view) is not Tensor or leaf.data_ptr() != view.data_ptr()) and _is_elsewhere(leaf, view):
            leaf.data = view
            other.append(name)
    if other:
        raise RuntimeError(
            f"{', '.join(other)} of {unit} got other memory while unsharded, by p.data = ... or vector_to_parameters, "
            "and the shards have not changed: write to the sharded ones, or inside summon_full_params"
        )


def _is_elsewhere(leaf: Tensor, view: Tensor) -> bool:
    """Not so for what has no memory: placeholders on meta, tensors on paper."""
    mine = local_of(view)
    return type(mine) is Tensor and not mine.is_meta and local_of(leaf).data_ptr() != mine.data_ptr()
