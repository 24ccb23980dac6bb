"""A model's and its optimizers' state in one form, whatever they are parallelised by.

Two functions do: `get_state_dict` before `torch.distributed.checkpoint` (dcp) saves or loads, and `set_state_dict` when
it has loaded, on any number of ranks. The others are for a model or its optimizers alone.

    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=path)      # or dcp.save
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)

They are the functions of torch.distributed.checkpoint.state_dict, with their signatures, for this package's FSDP and
DDP, for torch's DDP and for plain modules; `options` may be torch's. Torch's own functions know no FSDP but torch's: on
a model with an instance of this package's they would take a rank's shards for the whole, and are refused. Models under
`fully_shard` have DTensors for parameters, which torch's functions do know; here they are left to them.

Names are those of the model without wrappers. All functions are collective.
"""

from minifsdp.checkpoint.options import StateDictOptions
from minifsdp.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
