"""The state of a model and its optimizers, in the same form for every kind of parallelism.

Two functions are enough: call `get_state_dict` before `torch.distributed.checkpoint` (dcp) saves or loads, and
`set_state_dict` after it has loaded, on any number of ranks. The other functions are for only a model or only
optimizers.

    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=path)      # or dcp.save
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)

The functions have the names and signatures of those in torch.distributed.checkpoint.state_dict, and work with this
package's FSDP and DDP, with torch's DDP and with plain modules; `options` may be torch's. Torch's own functions
recognize only torch's FSDP. On a model with an instance of this package's FSDP, they would mistake a rank's shards for
the whole, so they are refused. Models under `fully_shard` have DTensors as parameters, which torch's functions do
recognize, so these models are passed on to them.

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
