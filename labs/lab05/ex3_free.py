"""Exercise 5.3: Free."""

import torch
from torch import nn

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.instruments.watch.ledger import Ledger

from .shared import ITEM, flat_parameter, nbytes


@reference(
    "5.3",
    hints=(
        "The views, the leaves made of them and autograd's saved tensors share one storage. As long as that has its "
        "bytes, it does not matter which names you drop.",
        "It is the storage that must shrink, not the tensor, as with `untyped_storage().resize_(0)`. `device.free` "
        "does that, and `record_stream` on a GPU: use it.",
    ),
    forbids=(FlatUnit._release,),
)
def free(flat: FlatParameter) -> None:
    """Free the memory of `flat.full` [P], even if other tensors still refer to it.

    Afterwards there is no memory behind `flat.full`, its views and autograd's saved tensors. All of
    them remain the same tensors, with their shapes. `flat.shard` [P / N] stays, because the next gather
    reads it.
    """
    device.free(flat.full)


@check("5.3")
def check_free(answer, variant):
    """The storage has given its bytes back, and the tensors are the same objects as before."""
    with Ledger() as ledger:
        flat = flat_parameter(variant.seed, variant.size, 0, variant.ranks)
        full, views, shard = flat.full, flat.views, flat.shard
        wanted = shard.detach().clone()
        storage, shape = full.untyped_storage(), full.shape
        device.allocate(full)
        full.data.fill_(1.0)
        leaf = nn.Parameter(views[0])
        saved = (leaf * torch.ones_like(leaf).requires_grad_()).sum()  # autograd has saved the leaf
        answer(flat)
        unsharded = ledger.live()["unsharded"]
    if flat.shard is not shard or nbytes(shard) != wanted.numel() * ITEM:
        raise AnswerError(
            "the shard's memory: expected it to stay, got none\n"
            "likely slip: the shard is what the unit is gathered from, and nobody else has it: free `flat.full` alone"
        )
    slip = "nothing gives the memory back: the storage has to shrink to 0 bytes"
    if not hasattr(flat, "full") or flat.full is None:
        slip = "dropping a name frees nothing: the views and autograd hold the same storage"
    elif flat.full is not full:
        slip = "another tensor under the same name: the views and autograd still hold the old one's storage"
    elif full.shape != shape and full.untyped_storage()._cdata == storage._cdata:
        slip = "`Tensor.resize_` changes the tensor's shape and leaves the storage as it is: resize the storage"
    elif full.untyped_storage()._cdata != storage._cdata:
        slip = "`.data = ...` gives this one tensor another storage: the views and autograd still hold the old one"
    elif bool((full == 0).all()) if nbytes(full) else False:
        slip = "zeros take as much memory as any other values: the storage has to shrink to 0 bytes"
    expect("bytes behind `flat.full` and its views", storage.nbytes(), 0, slip=slip)
    expect("unsharded bytes by the ledger", unsharded, 0, slip=slip)
    same = getattr(flat, "full", None) is full and full.shape == shape
    expect("`flat.full` is the same tensor with the same shape", same, True, slip="the next gather fills this tensor")
    expect("`flat.shard`", shard.detach(), wanted)
    del saved
