"""Exercise 2.4: Finish a bucket."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.ddp import bucketed
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

from .shared import SECONDS, bucket_of_rank, draw, make_bucket, parameter


@reference(
    "2.4",
    hints=(
        "The order is: wait, copy, free. A gradient must own its memory, since the buffer's is about to go.",
        "After `handle.wait()`, for each part of `flat.split([...])` in its parameter's shape: "
        "`param.grad.copy_` it, or `param.grad = part.clone()` where there was None. Then `device.free(flat)`.",
    ),
    forbids=(bucketed.BucketedDDP.sync_gradients, bucketed.finish_bucket),
)
def finish_bucket(bucket: list[nn.Parameter], flat: Tensor, handle: comm.Handle) -> None:
    """Wait for the bucket's all-reduce, copy the means back into the gradients, and free the buffer.

    Args:
        bucket: the bucket that `start_bucket` received.
        flat: [sum of numel], which holds the means after `handle.wait()`. Free it at the end (`device.free`).
        handle: the handle of the all-reduce in flight.

    Afterwards every parameter's `.grad` equals its range of `flat`, in the parameter's shape and in storage other than
    that of `flat`. Overwrite existing gradients in place; allocate memory only for those that were None.
    """
    handle.wait()
    for part, param in zip(flat.split([param.numel() for param in bucket]), bucket, strict=True):
        mean = part.view(param.shape)
        if param.grad is None:
            param.grad = mean.clone()
        else:
            param.grad.copy_(mean)
    device.free(flat)


class Arriving:
    """A handle whose data is there only once it has been waited for."""

    def __init__(self, flat: Tensor, values: Tensor) -> None:
        self.flat, self.values, self.waits = flat, values, 0
        self.call = SimpleNamespace(ranks=dist.get_world_size())

    def wait(self) -> None:
        if not device.is_allocated(self.flat):
            raise AnswerError("the buffer was freed before its all-reduce had ended: wait, copy, then free")
        self.waits += 1
        self.flat.copy_(self.values)


def observe_finish(answer: Any, size: int, seed: int) -> dict[str, Any]:
    rank = dist.get_rank()
    bucket = make_bucket(seed, rank, size)
    flat = device.empty(5 * size + 4, torch.float32, "communication", rank_device()).fill_(torch.nan)
    handle = Arriving(flat, draw(seed + 5, 0, flat.numel()).to(flat.device))
    given, values = list(bucket), [p.detach().clone() for p in bucket]
    before = [None if p.grad is None else p.grad.detach() for p in bucket]  # its memory, whatever becomes of the tensor
    with Ledger() as ledger:
        ledger.watch(nn.ParameterList(bucket))
        ledger.reset_peaks()
        already = sum(ledger.live().values())
        answer(given, flat, handle)
        taken = ledger.peak.total - already
    moved = sum(not torch.equal(p, value) for p, value in zip(bucket, values, strict=True))
    wide = parameter(torch.ones(size, dtype=torch.float64), None)
    scalar = parameter(torch.tensor(1.0, dtype=torch.float64), None)
    last = device.empty(size + 1, torch.float64, "communication", rank_device())
    answer([wide, scalar], last, Arriving(last, torch.arange(size + 1).double().to(last.device)))
    image = nn.Parameter(torch.ones(1, 2, 2, size, device=rank_device()).to(memory_format=torch.channels_last))
    image.grad = torch.zeros_like(image)
    pixels = device.empty(image.numel(), torch.float32, "communication", rank_device())
    answer([image], pixels, Arriving(pixels, torch.arange(image.numel()).float().to(pixels.device)))
    storage = flat.untyped_storage()._cdata
    views = [p.grad is not None and p.grad.untyped_storage()._cdata == storage for p in bucket]
    return {
        "waits": handle.waits,
        "freed": not device.is_allocated(flat),
        "given": [a is b for a, b in zip(given, bucket, strict=False)],
        "moved": moved,
        "wide": None if wide.grad is None or device.is_allocated(last) else wide.grad.cpu(),
        "image": image.grad.cpu(),
        "scalar": None if scalar.grad is None else scalar.grad.cpu(),
        "taken": taken,
        "views": sum(views),
        "replaced": [
            index
            for index, (p, grad) in enumerate(zip(bucket, before, strict=True))
            if grad is not None and (p.grad is None or p.grad.data_ptr() != grad.data_ptr())
        ],
        "grads": [p.grad.cpu() if p.grad is not None and not any(views) else None for p in bucket],
    }


@check("2.4")
def check_finish_bucket(answer, variant):
    """Waits first, then every gradient holds its part of the buffer in memory of its own, and the buffer is freed."""
    n, size, seed = variant.ranks, variant.size, variant.seed
    seen = on_ranks(n, observe_finish, answer, size, seed, timeout=SECONDS)
    first, second, third = draw(seed + 5, 0, 5 * size + 4).split([3 * size, 2 * size, 4])
    means = [first.view(size, 3), second, third.view(2, 2)]
    for rank, found in enumerate(seen):
        expect(
            "calls of handle.wait()",
            found["waits"],
            1,
            rank=rank,
            slip="before wait() the buffer holds whatever the collective has left there so far",
        )
        expect(
            "gradients that are views of the buffer",
            found["views"],
            0,
            rank=rank,
            slip="a .grad that views the buffer loses its memory when the buffer is freed: copy",
        )
        own = bucket_of_rank(seed, rank, size)
        for index, (grad, mean) in enumerate(zip(found["grads"], means, strict=True)):
            unchanged = "the means were never copied back"
            if own[index] is None:
                unchanged = "a gradient that was None stays None: give it memory of its own"
            slips: dict[str, Any] = {
                unchanged: own[index],
                "divided by N again: start_bucket asked for the mean": mean / n,
                "the mean was added to this rank's own gradient: it must replace it": mean
                + (own[index] if own[index] is not None else 0),
            }
            slip = "the buffer was read before wait()" if grad is not None and bool(grad.isnan().any()) else None
            expect(f"gradient {index} of the bucket", grad, mean, rank=rank, slips=slips, slip=slip)
        expect(
            "indices of the gradients that were there and have other memory now",
            found["replaced"],
            [],
            rank=rank,
            slip="twice the memory while both live: write into the gradient that exists, copy_ does",
        )
        expect(
            "the buffer is freed",
            found["freed"],
            True,
            rank=rank,
            slip="without device.free all buckets' buffers pile up",
        )
        slip = "the list is the caller's, and has a next backward"
        expect("parameters that are in `bucket` as before", found["given"], [True] * 3, rank=rank, slip=slip)
        slip = "the optimizer moves parameters, after all gradients have been averaged"
        expect("parameters whose values have changed", found["moved"], 0, rank=rank, slip=slip)
        expect("gradient of a parameter in float64", found["wide"], torch.arange(size).double(), rank=rank)
        slip = "a scalar's gradient is one too: a view in the parameter's shape, []"
        expect("gradient of a scalar", found["scalar"], torch.tensor(float(size)).double(), rank=rank, slip=slip)
        pixels = torch.arange(4 * size).float().view(1, 2, 2, size)
        slip = "reshape and flatten give a copy where a gradient is not contiguous: write into the gradient itself"
        what = "gradient of a parameter that lies in memory channels last"
        expect(what, found["image"], pixels, rank=rank, slip=slip)
        slip = "copy each part into the gradient that exists, and clone it only where there was None"
        wanted = 4 * 2 * size if own[1] is None else 0
        expect("bytes allocated, at most at one time", found["taken"], wanted, rank=rank, slip=slip)
