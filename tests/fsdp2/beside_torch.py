"""One model under ours and under torch's `fully_shard`: training, and what is compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import minifsdp.fsdp2 as ours
from minifsdp.gpt import GPT

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Apply = Callable[[Any, nn.Module], nn.Module]  # takes the library


def tolerance() -> float:
    """Sums of two numbers do not depend on their order; those of three or four do."""
    return 0.0 if dist.get_world_size() == 2 else 1e-12


class Float64GPT(GPT):
    """The course's GPT with its loss in the dtype of its parameters, not in float32."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt(dtype: torch.dtype = torch.float64, **sizes: Any) -> GPT:
    """Of sizes that neither 2, 3 nor 4 ranks divide."""
    torch.manual_seed(0)
    return Float64GPT(**{"vocabulary": 37, "width": 10, "layers": 3, "heads": 2, "context": 8, **sizes}).to(dtype)


def shard_blocks(lib: Any, model: Any, **options: Any) -> Any:
    """Each block and the rest."""
    for block in model.blocks:
        lib.fully_shard(block, **options)
    return lib.fully_shard(model, **options)


def batch(step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    tokens = torch.randint(0, 37, (2, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def local(t: Any) -> Tensor | None:
    """This rank's part: equal parts on all ranks are equal tensors, and no collective is needed to see it."""
    if t is None:
        return None
    return t.detach().to_local().clone() if isinstance(t, DTensor) else t.detach().clone()


def whole(t: Any) -> Tensor | None:
    if t is None:
        return None
    return t.detach().full_tensor().clone() if isinstance(t, DTensor) else t.detach().clone()


def train(
    model: Any,
    steps: int = 2,
    micros: int = 1,
    between: Callable[[Any, int], None] | None = None,
    optimizer: Callable[[Any], Any] = lambda params: torch.optim.SGD(params, 0.1),
    data: Callable[[int, int], Any] = batch,
    clip: float | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Train, and yield losses, gradients and parameters with their names.

    Args:
        steps: by default two, the second from the parameters of the first.
        optimizer: by default one of a single operator: each costs a DTensor dearly when it is the first of its shape.
        between: called with the model and the micro-batch before each forward.
    """
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        for micro in range(micros):
            if between is not None:
                between(model, micro)
            loss = model(*data(step, micro))
            yield f"loss of step {step}.{micro}", loss.detach()
            loss.backward()
        if clip is not None:
            yield f"norm of step {step}", whole(nn.utils.clip_grad_norm_(model.parameters(), clip))
        for name, p in model.named_parameters():
            yield f"gradient of {name} in step {step}", local(p.grad)
        stepper.step()
        stepper.zero_grad()
    for name, p in model.named_parameters():
        yield name, local(p)


def assert_same(
    one: Iterator[tuple[str, Tensor | None]], other: Iterator[tuple[str, Tensor | None]], most: float
) -> None:
    """Both yield the same names, and values no further apart than `most`."""
    pairs = list(zip([*one], [*other], strict=True))  # all collectives are over before a rank may fail
    assert len(pairs) > 10
    for (name, a), (other_name, b) in pairs:
        assert name == other_name
        assert (a is None) == (b is None), f"{name}: {a} and {b}"
        if a is not None and b is not None:
            assert a.dtype == b.dtype, f"{name} is {a.dtype} and {b.dtype}"
            assert a.shape == b.shape, f"{name} has shapes {a.shape} and {b.shape}"
            furthest = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
            assert furthest <= most, f"{name} differs by {furthest}"


def compare(make: Callable[[], nn.Module], apply: Apply, most: float | None = None, **training: Any) -> tuple[Any, Any]:
    """Train the model under both libraries; returns both models."""
    mine, reference = apply(ours, make()), apply(theirs, make())
    assert_same(train(mine, **training), train(reference, **training), tolerance() if most is None else most)
    return mine, reference
