"""The state of a model and its optimizers, in the same form for every kind of parallelism.

Two functions are enough: call `get_state_dict` before `torch.distributed.checkpoint` (dcp) saves or loads, and
`set_state_dict` after it has loaded, on any number of ranks. The other functions are for only a model or only
optimizers.

    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=path)      # or dcp.save
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)

But for the two of trainers, the functions have the names and signatures of those in
torch.distributed.checkpoint.state_dict. They work with this package's FSDP, DDP, `fully_shard` and tensor parallelism,
with any combination of them, with torch's DDP and tensor parallelism, and with plain modules; `options` may be torch's.
Torch's own functions recognize only torch's FSDP. On a model with an instance of this package's FSDP, they would
mistake a rank's shards for the whole, so they are refused.

Names are those of the model without wrappers. All functions are collective, and the ranks that share a model return the
same result or raise the same error.

Three things around a checkpoint lose data without an error:

- `torch.distributed.checkpoint.HuggingFaceStorageWriter` keeps one rank's part of a sharded value. Pass
  `save_distributed=True` and `enable_consolidation=True`, or give it whole values (`full_state_dict=True`).
- dcp saves a value that every rank has only once, and takes each value from a rank of its own choice. If ranks differ,
  as in the running statistics of BatchNorm, the checkpoint is a mixture: make the values equal first, or save them
  under a name for each rank.
- dcp loads into the values that it is given. `optimizer.state_dict()` of a new optimizer has no moments, and those in
  the checkpoint are left out. `get_state_dict` describes them.
"""

from typing import TYPE_CHECKING

from minifsdp.on_first_use import on_first_use

if TYPE_CHECKING:
    from minifsdp.checkpoint.of_trainers import get_trainer_state, set_trainer_state
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
    "get_trainer_state",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "set_trainer_state",
]

__getattr__ = on_first_use(__name__, __all__, ".options", ".state_dict", ".of_trainers")
