"""Names with and without wrapping."""

from __future__ import annotations

from minifsdp.private import ASKED_BY_STATE_DICT_FUNCTIONS

FLAT_PARAM = "_flat_param"
WRAPPED = "_fsdp_wrapped_module"
CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's checkpoint_wrapper


def clean_name(name: str) -> str:
    """A qualified name without the wrappers that it passes through, as state dicts have it."""
    return name.replace(f"{WRAPPED}.", "").replace(f"{CHECKPOINTED}.", "")


def refuse_torchs_functions(asked_for: str) -> None:
    """Raise RuntimeError where an attribute is asked for by functions that take an FSDP of ours for a plain module."""
    if asked_for == ASKED_BY_STATE_DICT_FUNCTIONS:
        raise RuntimeError(
            "torch.distributed.checkpoint.state_dict knows no FSDP but torch's, and would take a rank's shard for the "
            "whole: import get_state_dict, set_state_dict and their like from minifsdp.checkpoint"
        )
