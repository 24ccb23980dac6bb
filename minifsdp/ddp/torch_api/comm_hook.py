"""Communication hooks: reductions of a bucket that the user supplies (torch/csrc/distributed/c10d/comm.hpp)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.ddp.buckets import Bucket, Reduction

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class GradBucket:
    """A full bucket as a hook sees it, with the methods of `torch.distributed.GradBucket`, which cannot be made here.

    The gradients in it are this rank's own sums, which have not been divided yet.
    """

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Its place in the order in which the buckets of a backward are launched."""
        return self._index

    def is_last(self) -> bool:
        """True for the last bucket."""
        return self._is_last

    def buffer(self) -> Tensor:
        """All gradients [sum of the parameters' numel]; or one, if it is sparse, in its shape."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer` [the same numel], of any dtype, be what the next hook sees."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, in the shapes of the parameters."""
        return self._bucket.gradients_of(self._buffer)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of their gradients in the buffer."""
        return list(self._bucket.params)


class HookedReduction:
    """A reduction that a hook has started; its result replaces the bucket's content."""

    def __init__(self, bucket: Bucket, future: torch.futures.Future[Any], hook: Hook) -> None:
        self.bucket = bucket
        self.future = future
        self.hook = hook

    def wait(self) -> None:
        with named_if_sparse(self.hook, self.bucket):
            result = self.future.wait()  # on CUDA the current stream waits, not the host
        if isinstance(result, list | tuple):  # a collective's own future holds a list of its tensors
            (result,) = result
        if result is not self.bucket.flat:
            self.bucket.store(result)


class HookedReduce:
    """Calls a hook for every bucket, in the order of the launches, the same on all ranks.

    Args:
        state: the hook's first argument.
        hook: receives the `GradBucket` as its second argument, and returns a future of the tensor that replaces it.

    Raises:
        TypeError: the hook cannot be called.
        ValueError: its annotations are those of a different function.
        RuntimeError: when a bucket is launched, the hook has returned no future.
    """

    def __init__(self, state: Any, hook: Hook) -> None:
        check_hook(hook)
        self.state = state
        self.hook = hook

    def __call__(self, bucket: Bucket, index: int, is_last: bool) -> Reduction:
        with named_if_sparse(self.hook, bucket):
            future = self.hook(self.state, GradBucket(bucket, index, is_last))
        if not isinstance(future, torch.Future):  # a collective's own is not of the class in torch.futures
            raise RuntimeError(
                "DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__} from {getattr(self.hook, '__qualname__', self.hook)}"
            )
        return HookedReduction(bucket, future, self.hook)


@contextmanager
def named_if_sparse(hook: Hook, bucket: Bucket) -> Iterator[None]:
    """Errors of a hook that cannot do with a sparse gradient, in whose operators they are raised, name both."""
    try:
        yield
    except RuntimeError as error:
        if not bucket.flat.is_sparse:
            raise
        name, shape = getattr(hook, "__qualname__", hook), list(bucket.params[0].shape)
        raise RuntimeError(
            f"the communication hook {name} has failed on the sparse gradient of a weight {shape}: take another, or "
            f"pass sparse=False to the embedding ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def check_hook(hook: Hook) -> None:
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not is_annotated(bucket.annotation, "GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not is_annotated(signature.return_annotation, "Future"):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def is_annotated(annotation: Any, name: str) -> bool:
    """True if it is the class of that name, torch's or ours, its name in quotes, or missing."""
    return annotation is inspect.Parameter.empty or name in str(annotation)
