"""Names of parameters and modules, with and without the wrappers around them."""

FLAT_PARAM = "_flat_param"
WRAPPED = "_fsdp_wrapped_module"
CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's checkpoint_wrapper


def clean_name(name: str) -> str:
    """A qualified name without the wrappers that it passes through, as state dicts have it."""
    return name.replace(f"{WRAPPED}.", "").replace(f"{CHECKPOINTED}.", "")
